//! What an operation does about what did not arrive: it fills its own result, and keeps what it owes to later steps.

use super::{Op, Send};
use crate::memory::Pool;
use crate::{DivideBy, Fill};
use std::ops::Range;

impl Op {
    /// Puts something where there is no result, because no rank's values reached the server.
    // claim: mlt/fill
    pub(super) fn fill_nobodys(&mut self, at: usize, first_chunk: usize, part: Range<usize>) {
        self.report.replicas_identical &= self.policy.gather.fill == Fill::Zero;
        self.fill(at, first_chunk, &(part.start as u64..part.end as u64));
    }

    /// Puts something where a result did not arrive.
    pub(super) fn fill(&mut self, at: usize, first_chunk: usize, missing: &Range<u64>) {
        let (start, end) = (missing.start as usize, missing.end as usize);
        let chunks = first_chunk + start / self.chunk_bytes..first_chunk + end.div_ceil(self.chunk_bytes);
        let range = at + start..at + end;
        let elem_bytes = self.memory.elem_bytes();
        self.report.filled.push((range.start / elem_bytes) as u64..(range.end / elem_bytes) as u64);
        self.memory.fill(&range, chunks, self.policy.gather.fill);
    }

    pub(super) fn keep_uncounted(&mut self, send: &Send, missing: &Range<u64>) {
        let start = send.range.start + missing.start as usize;
        let end = (send.range.start + missing.end as usize).min(send.range.end);
        if start >= end {
            return;
        }
        if let Some(rotated) = &mut self.rotated {
            rotated.begin_residual();
        }
        self.memory.keep_residual(send.side, &(start..end));
        if !self.memory.residual.is_empty() {
            self.owe(send, start..end);
        }
        let elem_bytes = self.memory.elem_bytes();
        self.report.uncounted.push((start / elem_bytes) as u64..(end / elem_bytes) as u64);
    }

    /// Notes how many ranks' values are in a part of a send that did not count: in a ring each chunk has its own number.
    fn owe(&mut self, send: &Send, part: Range<usize>) {
        let Some(first) = send.weights else { return self.owed.push((part, 1)) };
        let mut start = part.start;
        while start < part.end {
            let chunk = (start - send.range.start) / self.chunk_bytes;
            let end = (send.range.start + (chunk + 1) * self.chunk_bytes).min(part.end);
            self.owed.push((start..end, self.memory.count(first + chunk)));
            start = end;
        }
    }

    /// The result is there: settles what is owed to later steps, and turns a rotated bucket back.
    pub(crate) fn finish(&mut self, pool: &mut Pool) {
        self.settle();
        if let Some(rotated) = &mut self.rotated {
            rotated.restore(&mut pool.strip);
        }
    }

    /// Takes from what is owed what stands in for it here: the mean of the others, or whatever was filled in where there is no
    /// result.
    fn settle(&mut self) {
        self.report.join_filled();
        for (range, weight) in std::mem::take(&mut self.owed) {
            match self.policy.divide_by {
                // Its mean is another rank's, who pays for it.
                _ if self.memory.own_row.is_some() => self.memory.drop_infinite(&range),
                DivideBy::Contributions => self.memory.settle_residual(&range, weight),
                DivideBy::World => self.settle_filled(&range, weight),
            }
        }
        self.memory.pay_for_means();
    }

    /// Divided by all ranks, zero stands in for a value wherever there is a result.
    fn settle_filled(&mut self, range: &Range<usize>, weight: u16) {
        let elem_bytes = self.memory.elem_bytes();
        let bytes_of = |elem: u64| elem as usize * elem_bytes;
        let first = self.report.filled.partition_point(|filled| bytes_of(filled.end) <= range.start);
        for filled in
            self.report.filled[first..].iter().take_while(|filled| bytes_of(filled.start) < range.end)
        {
            let within = range.start.max(bytes_of(filled.start))..range.end.min(bytes_of(filled.end));
            self.memory.settle_residual(&within, weight);
        }
        self.memory.drop_infinite(range);
    }
}
