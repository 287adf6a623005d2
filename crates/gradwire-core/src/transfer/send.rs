//! The sending half of a transfer: what has been sent, what must go again, and what the receiver said.

use super::{Bitmap, Grid};
use crate::{Reliability, SendReceipt, SendTransfer};
use alloc::vec::Vec;
use core::ops::Range;
use gradwire_wire::{Opening, StatusBody, TransferState, STATUS_WORDS_MAX};

/// `received_chunks` of a closed transfer that the receiver has retired: everything counted, as far as it remembers.
pub(crate) const ALL_CHUNKS: u32 = u32::MAX;

/// A posted send.
#[derive(Debug)]
pub(crate) struct SendHalf {
    pub(crate) request: SendTransfer,
    pub(crate) grid: Grid,
    /// First chunk that has never been sent.
    next: u32,
    pub(crate) granted: bool,
    /// A status came after this send was posted. A grant that came before it says nothing about what this rank calls.
    answered: bool,
    /// Chunks known to have arrived.
    acked: Bitmap,
    /// Chunks with a packet on its way.
    in_flight: Bitmap,
    /// Chunks to send again.
    resend: Bitmap,
    /// The receiver's contract needs what is missing, so losses are repaired at once from now on.
    asked: bool,
    /// The probe that follows the first pass has been sent.
    pub(crate) end_announced: bool,
    closing: Option<Closing>,
    /// For each chunk the path of its latest packet; empty where there is one path only.
    sent_over: Vec<u8>,
}

/// The final bitmap while it is put together from several statuses.
#[derive(Debug)]
struct Closing {
    missing: Bitmap,
    described: Bitmap,
}

/// What a status changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StatusEffect {
    /// Nothing new.
    Nothing,
    /// The transfer is granted now, or chunks were queued again.
    Progress,
    /// It is over, but the bitmap from this chunk on is still unknown: probe for it.
    AskFrom(u32),
    /// It is over.
    Done(SendReceipt),
    /// The status contradicts the transfer's size.
    Implausible,
}

impl SendHalf {
    pub(crate) fn new(request: SendTransfer, chunk_bytes: u32, granted: bool) -> Self {
        let grid = Grid::new(request.bytes, chunk_bytes);
        let chunks = grid.chunks();
        Self {
            request,
            grid,
            next: 0,
            granted,
            answered: false,
            acked: Bitmap::zeros(chunks),
            in_flight: Bitmap::zeros(chunks),
            resend: Bitmap::zeros(chunks),
            asked: false,
            end_announced: false,
            closing: None,
            sent_over: Vec::new(),
        }
    }

    pub(crate) fn opening(&self) -> Opening {
        Opening { total_bytes: self.request.bytes, descriptor: self.request.descriptor }
    }

    /// Whether losses go out again without being asked for.
    fn repairs_at_once(&self) -> bool {
        self.request.reliability == Reliability::Exact || self.asked
    }

    /// Whether the packet with `chunk` must say what this transfer is. The first chunk always does: without it no exact
    /// transfer is complete, so that none ends before its two ends were compared, however early the grant came.
    pub(crate) fn needs_opening(&self, chunk: u32) -> bool {
        chunk == 0 || !self.answered
    }

    /// Everything has been sent at least once.
    pub(crate) fn is_all_sent(&self) -> bool {
        self.next == self.grid.chunks()
    }

    /// Chunks of the first pass that have been sent.
    pub(crate) fn first_pass_chunks(&self) -> u32 {
        self.next
    }

    /// The next chunk to send again.
    pub(crate) fn peek_resend(&self) -> Option<u32> {
        // Asked before every packet, and nearly always there is none.
        if self.resend.is_empty() || self.closing.is_some() {
            return None;
        }
        self.resend.first_from(0)
    }

    /// The next chunk never sent; none once the receiver wants no more.
    pub(crate) fn peek_new(&self) -> Option<u32> {
        (!self.is_all_sent() && self.closing.is_none()).then_some(self.next)
    }

    /// Remembers from now on which path each chunk takes.
    pub(crate) fn track_paths(&mut self) {
        self.sent_over = alloc::vec![0; self.grid.chunks() as usize];
    }

    /// The path of the chunk's latest packet, where there are several.
    pub(crate) fn sent_over(&self, chunk: u32) -> Option<usize> {
        self.sent_over.get(chunk as usize).map(|path| usize::from(*path))
    }

    /// A chunk left over `path`.
    pub(crate) fn on_sent(&mut self, chunk: u32, path: usize) {
        if let Some(over) = self.sent_over.get_mut(chunk as usize) {
            *over = path as u8;
        }
        self.resend.remove(chunk);
        self.in_flight.insert(chunk);
        if chunk == self.next {
            self.next += 1;
        }
    }

    /// A packet with this chunk arrived.
    pub(crate) fn on_acked(&mut self, chunk: u32) {
        self.in_flight.remove(chunk);
        self.resend.remove(chunk);
        self.acked.insert(chunk);
    }

    /// A packet with this chunk counts as lost.
    pub(crate) fn on_lost(&mut self, chunk: u32) {
        self.in_flight.remove(chunk);
        if self.repairs_at_once() && !self.acked.contains(chunk) {
            self.resend.insert(chunk);
        }
    }

    /// How it ends when nobody can say any more what counted: an exact send was needed by nobody, of a tolerant one what
    /// was not acknowledged did not count.
    pub(crate) fn unconfirmed(&self) -> SendReceipt {
        let mut missing = Bitmap::ones(self.grid.chunks());
        self.acked.iter().for_each(|chunk| _ = missing.remove(chunk));
        self.without(&missing)
    }

    /// How it ends when the receiver dropped it.
    pub(crate) fn uncounted(&self) -> SendReceipt {
        self.without(&Bitmap::ones(self.grid.chunks()))
    }

    fn without(&self, missing: &Bitmap) -> SendReceipt {
        let missing = match self.request.reliability {
            Reliability::Exact => Vec::new(),
            Reliability::Tolerant => byte_ranges(missing, self.grid),
        };
        SendReceipt { transfer: self.request.transfer, missing }
    }

    /// Applies the receiver's word.
    pub(crate) fn on_status(&mut self, status: &StatusBody) -> StatusEffect {
        let chunks = self.grid.chunks();
        if status.state == TransferState::Closed && status.received_chunks == ALL_CHUNKS {
            return StatusEffect::Done(SendReceipt { transfer: self.request.transfer, missing: Vec::new() });
        }
        if status.received_chunks > chunks || status.wanted_chunks > chunks || status.first_chunk > chunks {
            return StatusEffect::Implausible;
        }
        match status.state {
            TransferState::Unposted => StatusEffect::Nothing,
            TransferState::Open => self.on_open(status),
            TransferState::Closed => self.on_closed(status),
        }
    }

    fn on_open(&mut self, status: &StatusBody) -> StatusEffect {
        let mut progress = !self.granted;
        self.granted = true;
        self.answered = true;
        self.asked |= status.wanted_chunks > 0;
        if self.repairs_at_once() {
            for chunk in
                set_bits(status).take_while(|chunk| *chunk < self.next).take(self.repairs_for(status))
            {
                // Not what is on its way: its own acknowledgement or loss will tell.
                if !self.in_flight.contains(chunk) {
                    self.acked.remove(chunk);
                    progress |= self.resend.insert(chunk);
                }
            }
        }
        if progress {
            StatusEffect::Progress
        } else {
            StatusEffect::Nothing
        }
    }

    /// How many of the missing chunks to send again: all of an exact transfer, what the contract needs of a tolerant
    /// one, and a few to spare for those that get lost again.
    fn repairs_for(&self, status: &StatusBody) -> usize {
        match self.request.reliability {
            Reliability::Exact => usize::MAX,
            Reliability::Tolerant => (status.wanted_chunks + status.wanted_chunks / 8 + 1) as usize,
        }
    }

    fn on_closed(&mut self, status: &StatusBody) -> StatusEffect {
        let chunks = self.grid.chunks();
        if status.received_chunks == chunks {
            return StatusEffect::Done(SendReceipt { transfer: self.request.transfer, missing: Vec::new() });
        }
        let words = chunks.div_ceil(64);
        let closing = self.closing.get_or_insert_with(|| Closing {
            missing: Bitmap::zeros(chunks),
            described: Bitmap::zeros(words),
        });
        for word in 0..u32::from(status.words).min(STATUS_WORDS_MAX as u32) {
            closing.described.insert(status.first_chunk / 64 + word);
        }
        for chunk in set_bits(status) {
            closing.missing.insert(chunk);
        }
        match (0..words).find(|word| !closing.described.contains(*word)) {
            Some(word) => StatusEffect::AskFrom(word * 64),
            None => StatusEffect::Done(SendReceipt {
                transfer: self.request.transfer,
                missing: byte_ranges(&closing.missing, self.grid),
            }),
        }
    }
}

/// The chunks that a status calls missing, in order.
fn set_bits(status: &StatusBody) -> impl Iterator<Item = u32> + '_ {
    let words = status.missing.iter().take(usize::from(status.words)).zip(0u32..);
    words.flat_map(move |(word, index)| {
        let clear_lowest = |rest: &u64| Some(rest & (rest - 1)).filter(|rest| *rest != 0);
        let rests = core::iter::successors(Some(*word).filter(|word| *word != 0), clear_lowest);
        rests.map(move |rest| status.first_chunk + index * 64 + rest.trailing_zeros())
    })
}

/// Byte ranges of the set chunks; neighbours are joined.
fn byte_ranges(missing: &Bitmap, grid: Grid) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for chunk in missing.iter() {
        let start = grid.offset(chunk);
        let end = start + u64::from(grid.len(chunk));
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}
