//! The memory of one collective: the caller's views, and the accumulator that payloads are added to.
//!
//! Payload is added where it lands, straight from the receive buffer. Sums of float32, float64 and integers live in
//! the output itself; a sum of halves at the owner of a shard lives in a float32 scratch, so that it is rounded
//! once. For each chunk the number of contributions is counted, and a mean divides by it.
//!
//! No reference to the input is held while the output is written: they may be the same memory.

use crate::view::Buffer;
use crate::{kernels, DivideBy, Dtype, Fill, ReduceOp, View};
use std::ops::Range;

/// Scratch of finished collectives, for the next ones: in steady state nothing is allocated for each bucket.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    counts: Vec<Vec<u16>>,
    wide: Vec<Vec<f32>>,
    pub(crate) staging: Vec<Vec<u8>>,
    pub(crate) samples: Vec<f32>,
    /// Rotated buckets, and what a transform works in.
    pub(crate) rotated: Vec<Buffer>,
    pub(crate) strip: Vec<f32>,
}

impl Pool {
    /// Gives unused accumulators back to the system if they take more than this.
    pub(crate) fn trim(&mut self, bytes_max: u64) {
        let bytes: usize = self.wide.iter().map(|wide| wide.capacity() * size_of::<f32>()).sum();
        if bytes as u64 > bytes_max {
            self.wide.clear();
        }
    }
}

/// Which of the caller's views a send reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Input,
    Output,
    /// What a server is told about the call.
    Settings,
}

/// How contributions are summed, and what is done with the sum.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reduction {
    pub(crate) dtype: Dtype,
    pub(crate) reduce: ReduceOp,
    pub(crate) world_size: u16,
    pub(crate) divide_by: DivideBy,
}

/// The memory of one collective.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) input: View,
    pub(crate) output: View,
    pub(crate) residual: View,
    /// Goes on where the residual ends: for the padding of a rotated bucket.
    pub(crate) beyond: View,
    reduction: Reduction,
    chunk_bytes: usize,
    /// Where the accumulator begins in the output, bytes.
    base: usize,
    /// The accumulator of halves; empty when the output itself is the accumulator.
    wide: Vec<f32>,
    /// Contributions for each chunk of the accumulator.
    counts: Vec<u16>,
    /// Fewest and most of them in a chunk that was finished.
    contributors: Option<(u16, u16)>,
}

impl Memory {
    /// Memory that is only copied until [`Memory::accumulate_in`] is called.
    pub(crate) fn new(views: (View, View, View), reduction: Reduction, chunk_bytes: usize) -> Self {
        let (input, output, residual) = views;
        let beyond = View::EMPTY;
        let (wide, counts) = (Vec::new(), Vec::new());
        Self {
            input,
            output,
            residual,
            beyond,
            reduction,
            chunk_bytes,
            base: 0,
            wide,
            counts,
            contributors: None,
        }
    }

    /// Makes `area` of the output the accumulator, with this rank's contribution in it, taken from `own` of the
    /// input. `chunks` is the number of chunks that it is counted in. `in_float32`: halves are summed in a scratch.
    pub(crate) fn accumulate_in(
        &mut self,
        area: Range<usize>,
        own: &Range<usize>,
        chunks: usize,
        in_float32: bool,
        pool: &mut Pool,
    ) {
        self.base = area.start;
        self.counts = pool.counts.pop().unwrap_or_default();
        self.counts.clear();
        self.counts.resize(chunks, 1);
        if in_float32 && self.reduction.dtype.is_half() {
            self.wide = pool.wide.pop().unwrap_or_default();
            self.wide.resize(area.len() / 2, 0.0);
            kernels::widen(self.reduction.dtype, self.input.part(own).as_slice(), &mut self.wide);
        } else {
            self.output.part(&area).copy_from(&self.input.part(own));
        }
    }

    /// Makes the first `bytes` bytes of the output the accumulator, with nothing in it: a rank that only sums has no
    /// contribution of its own.
    pub(crate) fn accumulate_nothing(&mut self, bytes: usize, chunks: usize, pool: &mut Pool) {
        self.base = 0;
        self.counts = pool.counts.pop().unwrap_or_default();
        self.counts.clear();
        self.counts.resize(chunks, 0);
        if self.reduction.dtype.is_half() {
            self.wide = pool.wide.pop().unwrap_or_default();
            self.wide.resize(bytes / 2, 0.0);
        }
    }

    /// The factor of a scaled sum and the divisor of a mean, where they were not known at the start.
    pub(crate) fn follow(&mut self, factor: f64, divide_by: DivideBy) {
        self.reduction.divide_by = divide_by;
        if let ReduceOp::PremulSum(known) = &mut self.reduction.reduce {
            *known = factor;
        }
    }

    /// Bytes of one element.
    pub(crate) fn elem_bytes(&self) -> usize {
        self.reduction.dtype.bytes()
    }

    /// Copies `from` of the input to `to` of the output.
    pub(crate) fn copy(&mut self, from: &Range<usize>, to: &Range<usize>) {
        self.output.part(to).copy_from(&self.input.part(from));
    }

    /// Adds a payload of `weight` contributions at byte `at` of the accumulator, in its chunk `chunk`.
    pub(crate) fn add(&mut self, at: usize, chunk: usize, weight: u16, payload: &[u8]) {
        let Reduction { dtype, reduce, .. } = self.reduction;
        if let Some(count) = self.counts.get_mut(chunk) {
            let is_first = *count == 0;
            *count = count.saturating_add(weight.max(1));
            if is_first {
                return self.put(at, payload);
            }
        }
        if self.wide.is_empty() {
            self.sum(at, payload);
        } else {
            let target = &mut self.wide[at / 2..][..payload.len() / 2];
            kernels::accumulate(dtype, reduce, target, payload);
        }
    }

    /// The first payload of a chunk, which holds whatever was there before.
    fn put(&mut self, at: usize, payload: &[u8]) {
        if self.wide.is_empty() {
            return self.place(self.base + at, payload);
        }
        let target = &mut self.wide[at / 2..][..payload.len() / 2];
        kernels::widen(self.reduction.dtype, payload, target);
    }

    /// Adds a payload at byte `at` of an accumulator that is the output itself, without counting it.
    pub(crate) fn sum(&mut self, at: usize, payload: &[u8]) {
        let Reduction { dtype, reduce, .. } = self.reduction;
        let start = self.base + at;
        let mut target = self.output.part(&(start..start + payload.len()));
        kernels::combine(dtype, reduce, target.as_mut_slice(), payload);
    }

    /// Contributions in the blocks that were finished here: the fewest and the most.
    pub(crate) fn contributors(&self) -> (u16, u16) {
        self.contributors.unwrap_or((0, 0))
    }

    fn note_contributors(&mut self, count: u16) {
        let (least, most) = self.contributors.unwrap_or((count, count));
        self.contributors = Some((least.min(count), most.max(count)));
    }

    /// Turns the whole sum of all ranks in `area` into the result.
    pub(crate) fn finish_sum(&mut self, area: &Range<usize>) {
        self.note_contributors(self.reduction.world_size);
        self.finish_run(area.clone(), self.reduction.world_size);
    }

    /// Puts `payload` at byte `at` of the output.
    pub(crate) fn place(&mut self, at: usize, payload: &[u8]) {
        self.output.part(&(at..at + payload.len())).as_mut_slice().copy_from_slice(payload);
    }

    /// Fills `range` of the output, which a result was expected in and did not come.
    ///
    /// # Loss
    /// The element is what `fill` says, on this rank alone.
    pub(crate) fn fill(&mut self, range: &Range<usize>, fill: Fill) {
        match fill {
            Fill::Zero => self.output.part(range).as_mut_slice().fill(0),
            Fill::Previous => {}
            Fill::Local => {
                if !self.input.overlaps(&self.output) {
                    self.output.part(range).copy_from(&self.input.part(range));
                }
                let factor = self.factor(1);
                if self.is_scaled(factor) {
                    kernels::scale(self.reduction.dtype, self.output.part(range).as_mut_slice(), factor);
                }
            }
        }
    }

    /// Contributions in a chunk of the accumulator.
    pub(crate) fn count(&self, chunk: usize) -> u16 {
        self.counts.get(chunk).copied().unwrap_or(1)
    }

    /// What a mean of a chunk divides by.
    fn divisor(&self, chunk: usize) -> u16 {
        match self.reduction.divide_by {
            DivideBy::World if self.count(chunk) > 0 => self.reduction.world_size,
            _ => self.count(chunk),
        }
    }

    /// Bytes that a send reads.
    pub(crate) fn view(&self, side: Side) -> &View {
        match side {
            Side::Input => &self.input,
            Side::Output | Side::Settings => &self.output,
        }
    }

    /// Copies `range`, this rank's values that did not count, to the same place of the residual.
    pub(crate) fn keep_residual(&mut self, side: Side, range: &Range<usize>) {
        if !self.residual.is_empty() {
            for (part, mut residual) in self.residual_parts(range) {
                residual.copy_from(&self.view(side).part(&part));
            }
        }
    }

    /// The parts of `range` that lie in the residual and beyond it, with the memory of each.
    fn residual_parts(&self, range: &Range<usize>) -> [(Range<usize>, View); 2] {
        let border = self.residual.len();
        let inside = range.start.min(border)..range.end.min(border);
        let beyond = range.start.max(border)..range.end.max(border);
        let (first, second) =
            (self.residual.part(&inside), self.beyond.part(&(beyond.start - border..beyond.end - border)));
        [(inside, first), (beyond, second)]
    }

    /// Takes from `range` of the residual, the sum of what `weight` ranks contributed in vain, what the result holds in
    /// place of it already. With c of N ranks in a mean `a`, the sum over all ranks is `N a` plus, for each lost part, its
    /// value less `weight` times `a`: fed back whole it would count once as itself and once as the mean that stood in
    /// for it. Where zero stood in, all of it is owed. Not before the result is there.
    ///
    /// # Loss
    /// What is not finite is dropped: fed back, it would spoil the next step as well.
    // claim: auto/error-feedback
    pub(crate) fn settle_residual(&mut self, range: &Range<usize>, weight: u16) {
        let Reduction { dtype, reduce, world_size, divide_by } = self.reduction;
        let of_mean = match (divide_by, reduce) {
            (DivideBy::World, _) => 0.0,
            (_, ReduceOp::Avg) => 1.0,
            (_, ReduceOp::PremulSum(factor)) if factor != 0.0 => 1.0 / (f64::from(world_size) * factor),
            _ => 1.0 / f64::from(world_size),
        };
        let factor = f64::from(weight) * of_mean;
        for (part, mut residual) in self.residual_parts(range) {
            let result = self.output.part(&part);
            kernels::take_away(dtype, residual.as_mut_slice(), result.as_slice(), factor);
        }
    }

    /// Forgets `range` of the residual.
    pub(crate) fn drop_residual(&mut self, range: &Range<usize>) {
        self.residual_parts(range).iter_mut().for_each(|(_, residual)| residual.as_mut_slice().fill(0));
    }

    /// Turns the sums in `area` (bytes of the accumulator, `first_chunk` the chunk at its start) into the result:
    /// a mean over the contributions of each chunk, or a sum scaled by the share of ranks that are in it, which
    /// expects the same value as if all were. Then halves are rounded into the output.
    ///
    /// # Loss
    /// A contribution that did not arrive is left out of the mean, or counts as zero ([`DivideBy`]). Where none is there, which only a server without one of
    /// its own can see, the result is zero.
    // claim: mlt/mean-over-contributions, ltp/packet-bubble, auto/unbiased-mean
    pub(crate) fn finish(&mut self, area: &Range<usize>, first_chunk: usize) {
        let mut start = area.start;
        while start < area.end {
            let chunk = first_chunk + (start - area.start) / self.chunk_bytes;
            let count = self.divisor(chunk);
            let mut end = (start + self.chunk_bytes).min(area.end);
            // Neighbours with the same count are one run: without loss, the whole area.
            while end < area.end && self.divisor(first_chunk + (end - area.start) / self.chunk_bytes) == count
            {
                end = (end + self.chunk_bytes).min(area.end);
            }
            self.note_contributors(count);
            self.finish_run(start..end, count);
            start = end;
        }
    }

    fn finish_run(&mut self, run: Range<usize>, count: u16) {
        let Reduction { dtype, reduce, .. } = self.reduction;
        if count == 0 {
            return self.output.part(&(self.base + run.start..self.base + run.end)).as_mut_slice().fill(0);
        }
        let factor = self.factor(count);
        let is_mean = reduce == ReduceOp::Avg;
        let is_scaled = self.is_scaled(factor);
        if self.wide.is_empty() {
            let mut part = self.output.part(&(self.base + run.start..self.base + run.end));
            match (is_mean, is_scaled) {
                (true, _) => kernels::divide(dtype, part.as_mut_slice(), count),
                (false, true) => kernels::scale(dtype, part.as_mut_slice(), factor),
                (false, false) => {}
            }
            return;
        }
        let wide = &mut self.wide[run.start / 2..run.end / 2];
        match (is_mean, is_scaled) {
            (true, _) => kernels::divide_f32(wide, count),
            (false, true) => kernels::scale_f32(wide, factor),
            (false, false) => {}
        }
        let mut part = self.output.part(&(self.base + run.start..self.base + run.end));
        kernels::narrow(dtype, wide, part.as_mut_slice());
    }

    /// What a sum of `count` contributions is multiplied by, to expect the value of all.
    fn factor(&self, count: u16) -> f64 {
        let Reduction { reduce, world_size, .. } = self.reduction;
        let factor = match reduce {
            ReduceOp::PremulSum(factor) => factor,
            _ => 1.0,
        };
        if count == world_size {
            factor
        } else {
            factor * f64::from(world_size) / f64::from(count)
        }
    }

    fn is_scaled(&self, factor: f64) -> bool {
        let reduce = self.reduction.reduce;
        let is_sum = reduce.is_additive() && reduce != ReduceOp::Avg;
        is_sum && (factor - 1.0).abs() > 0.0
    }

    /// Gives the scratch back.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        if self.counts.capacity() > 0 {
            pool.counts.push(std::mem::take(&mut self.counts));
        }
        if self.wide.capacity() > 0 {
            pool.wide.push(std::mem::take(&mut self.wide));
        }
    }
}
