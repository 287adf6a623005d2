//! The memory of one collective: the caller's views, and the accumulator that payloads are added to.
//!
//! Payload is added where it lands, straight from the receive buffer. Sums of float32, float64 and integers live in
//! the output itself; a sum of halves at the owner of a shard is kept in float32 ([`crate::halves`]), so that it is rounded
//! once. For each chunk the number of contributions is counted, and a mean divides by it; with a result comes its count.
//! The pass that adds the last contribution to a chunk makes it the result: only what loss has left incomplete is passed over again.
//!
//! No reference to the input is held while the output is written: they may be the same memory.

mod apart;
mod cells;

use crate::halves::{HalfSums, Kind};
use crate::kernels::{self, Closing};
use crate::view::Buffer;
use crate::{DivideBy, Dtype, Fill, ReduceOp, Request, View};
use cells::Cells;
use std::ops::Range;

/// Scratch of finished collectives, for the next ones: in steady state nothing is allocated for each bucket.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    counts: Vec<Vec<u16>>,
    halves: Vec<HalfSums>,
    pub(crate) staging: Vec<Vec<u8>>,
    /// Contributions of former calls that were kept apart: as long as they were, so that nothing is cleared.
    rows: Vec<Vec<u8>>,
    /// Accumulators of former calls that were nobody's tensor.
    apart: Vec<Buffer>,
    pub(crate) samples: Vec<f32>,
    /// Rotated buckets, and what a transform works in.
    pub(crate) rotated: Vec<Buffer>,
    pub(crate) strip: Vec<f32>,
}

impl Pool {
    /// Gives unused sums of halves back to the system if they take more than this.
    pub(crate) fn trim(&mut self, bytes_max: u64) {
        let bytes: usize = self.halves.iter().map(HalfSums::bytes).sum();
        if bytes as u64 > bytes_max {
            self.halves.clear();
        }
    }
}

/// Which of the caller's views a send reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    Input,
    Output,
    /// The contributions that are kept apart, this rank's own among them.
    Rows,
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

impl Reduction {
    /// What `request` asks for among so many ranks.
    pub(crate) fn of(request: &Request, world_size: u32) -> Self {
        Self {
            dtype: request.dtype,
            reduce: request.reduce,
            world_size: u16::try_from(world_size).unwrap_or(u16::MAX),
            divide_by: request.policy.divide_by,
        }
    }
}

/// The memory of one collective.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) input: View,
    pub(crate) output: View,
    pub(crate) residual: View,
    /// Goes on where the residual ends: for the padding of a rotated bucket.
    pub(crate) beyond: View,
    /// This rank's row of the input and of the residual, of a reduce-scatter whose losses are fed back.
    pub(crate) own_row: Option<Range<usize>>,
    reduction: Reduction,
    chunk_bytes: usize,
    /// Where the accumulator begins in the output, bytes.
    base: usize,
    /// Sums of halves in float32; else the output itself is the accumulator.
    halves: Option<HalfSums>,
    /// Contributions for each chunk of the bucket, as far as this rank knows them.
    counts: Vec<u16>,
    /// Counts what [`Memory::sum`] adds.
    cells: Cells,
    /// Contributions that are kept apart, in the order of the ranks.
    rows: Vec<u8>,
    /// The output, where that is no tensor of the caller's.
    apart: Buffer,
    /// Fewest and most of them in a chunk that was finished.
    contributors: Option<(u16, u16)>,
    /// Bytes of the accumulator that were read once more after their last contribution.
    #[cfg(test)]
    pub(crate) passed_again: usize,
}

impl Memory {
    /// Memory that is only copied until [`Memory::accumulate_in`] is called.
    pub(crate) fn new(views: (View, View, View), reduction: Reduction, chunk_bytes: usize) -> Self {
        let (input, output, residual) = views;
        let beyond = View::EMPTY;
        let (halves, counts) = (None, Vec::new());
        Self {
            input,
            output,
            residual,
            beyond,
            own_row: None,
            reduction,
            chunk_bytes,
            base: 0,
            halves,
            counts,
            cells: Cells::default(),
            rows: Vec::new(),
            apart: Buffer::default(),
            contributors: None,
            #[cfg(test)]
            passed_again: 0,
        }
    }

    /// Makes `area` of the output the accumulator, with this rank's contribution in it, taken from `own` of the
    /// input. `chunks` is the number of chunks of the bucket. `in_float32`: so are halves summed.
    pub(crate) fn accumulate_in(
        &mut self,
        area: Range<usize>,
        own: &Range<usize>,
        chunks: usize,
        in_float32: bool,
        pool: &mut Pool,
    ) {
        self.base = area.start;
        self.count_from(1, chunks, pool);
        self.output.part(&area).copy_from(&self.input.part(own));
        if in_float32 {
            self.sum_in_float32(area.len(), pool);
        }
    }

    /// Makes the first `bytes` bytes of the output the accumulator, with nothing in it: a rank that only sums has no
    /// contribution of its own.
    pub(crate) fn accumulate_nothing(&mut self, bytes: usize, chunks: usize, pool: &mut Pool) {
        self.base = 0;
        self.count_from(0, chunks, pool);
        self.sum_in_float32(bytes, pool);
    }

    /// For a rank that sums nothing: it is told with each result how many ranks are in it.
    pub(crate) fn count_results(&mut self, chunks: usize, pool: &mut Pool) {
        self.count_from(0, chunks, pool);
    }

    fn count_from(&mut self, first: u16, chunks: usize, pool: &mut Pool) {
        self.counts = pool.counts.pop().unwrap_or_default();
        self.counts.clear();
        self.counts.resize(chunks, first);
    }

    /// The result of chunk `chunk` holds the values of so many ranks.
    pub(crate) fn note_count(&mut self, chunk: usize, count: u16) {
        if let Some(known) = self.counts.get_mut(chunk) {
            *known = count;
        }
    }

    fn sum_in_float32(&mut self, bytes: usize, pool: &mut Pool) {
        if self.reduction.dtype.is_half() {
            let mut halves = pool.halves.pop().unwrap_or_default();
            halves.begin(bytes.div_ceil(self.chunk_bytes), self.chunk_bytes);
            self.halves = Some(halves);
        }
    }

    /// The factor of a scaled sum and the divisor of a mean, where they were not known at the start.
    pub(crate) fn follow(&mut self, factor: f64, divide_by: DivideBy) {
        self.reduction.divide_by = divide_by;
        if let ReduceOp::PremulSum(known) = &mut self.reduction.reduce {
            *known = factor;
        }
    }

    /// How many ranks there are whose contributions are reduced.
    pub(crate) fn world_size(&self) -> u16 {
        self.reduction.world_size
    }

    /// Bytes of one element.
    pub(crate) fn elem_bytes(&self) -> usize {
        self.reduction.dtype.bytes()
    }

    /// Copies `from` of the input to `to` of the output.
    pub(crate) fn copy(&mut self, from: &Range<usize>, to: &Range<usize>) {
        self.output.part(to).copy_from(&self.input.part(from));
    }

    // claim: report/streaming
    /// Adds a payload of `weight` contributions at byte `at` of the accumulator, in its chunk `chunk`.
    pub(crate) fn add(&mut self, at: usize, chunk: usize, weight: u16, payload: &[u8]) {
        if payload.is_empty() {
            // A bare signal, to a dedicated server whose shard is empty.
            return;
        }
        if let Some(count) = self.counts.get_mut(chunk) {
            let is_first = *count == 0;
            *count = count.saturating_add(weight.max(1));
            if is_first {
                // The chunk held whatever was there before.
                return self.place(self.base + at, payload);
            }
        }
        let is_last = self.is_whole(chunk);
        if self.halves.is_some() {
            self.add_halves((at, chunk), payload, is_last);
        } else {
            self.add_part(at, payload, is_last);
        }
    }

    /// Whether every rank's contribution is in a chunk, so that it is the result already. A lone rank adds nothing.
    fn is_whole(&self, chunk: usize) -> bool {
        let world_size = self.reduction.world_size;
        world_size > 1 && self.count(chunk) == world_size
    }

    fn add_halves(&mut self, (at, chunk): (usize, usize), payload: &[u8], is_last: bool) {
        let (kind, closing) = (self.kind(), self.closing(self.divisor(chunk)));
        let start = self.base + at;
        let mut target = self.output.part(&(start..start + payload.len()));
        let Some(halves) = &mut self.halves else { return };
        let (chunk, target) = (at / self.chunk_bytes, target.as_mut_slice());
        if is_last {
            halves.add_last(kind, (chunk, closing), target, payload);
        } else {
            halves.add(kind, chunk, target, payload);
        }
    }

    /// Adds a payload, or the part of one, to the accumulator that is the output itself.
    fn add_part(&mut self, at: usize, payload: &[u8], is_last: bool) {
        let Reduction { dtype, reduce, world_size, .. } = self.reduction;
        let closing = if is_last { self.closing(world_size) } else { Closing::Keep };
        let start = self.base + at;
        let mut target = self.output.part(&(start..start + payload.len()));
        match closing {
            Closing::Keep => kernels::combine(dtype, reduce, target.as_mut_slice(), payload),
            _ => kernels::add_last(dtype, closing, target.as_mut_slice(), payload),
        }
    }

    fn kind(&self) -> Kind {
        Kind { dtype: self.reduction.dtype, reduce: self.reduction.reduce }
    }

    /// What turns a sum of `count` contributions into the result.
    fn closing(&self, count: u16) -> Closing {
        let factor = self.factor(count);
        match self.reduction.reduce {
            ReduceOp::Avg if count == 1 => Closing::Keep,
            ReduceOp::Avg => Closing::Divide(count),
            _ if self.is_scaled(factor) => Closing::Scale(factor),
            _ => Closing::Keep,
        }
    }

    /// Every byte of `area` will get so many contributions by [`Memory::sum`].
    pub(crate) fn expect_sums(&mut self, area: &Range<usize>, contributions: u16, pool: &mut Pool) {
        self.cells = Cells::expect(area, contributions, pool);
    }

    /// Adds a payload at byte `at` of an accumulator that is the output itself, however the payloads are cut.
    pub(crate) fn sum(&mut self, at: usize, payload: &[u8]) {
        let bytes = at..at + payload.len();
        self.cells.count(&bytes);
        let mut start = bytes.start;
        while start < bytes.end {
            let (end, is_last) = self.cells.run(&(start..bytes.end));
            self.add_part(start, &payload[start - at..end - at], is_last);
            start = end;
        }
    }

    /// Keeps the contributions of `ranks` ranks apart until [`Memory::sum_rows`], that of `rank`, this one, copied from the input.
    pub(crate) fn keep_rows(&mut self, rank: u32, ranks: u32, pool: &mut Pool) {
        let bytes = self.input.len();
        self.rows = pool.rows.pop().unwrap_or_default();
        self.rows.resize(ranks as usize * bytes, 0);
        let own = rank as usize * bytes;
        self.rows[own..own + bytes].copy_from_slice(self.input.as_slice());
        self.accumulate_nothing(bytes, bytes.div_ceil(self.chunk_bytes), pool);
    }

    /// Puts `payload` at byte `at` of the contributions that are kept apart.
    pub(crate) fn place_in_row(&mut self, at: usize, payload: &[u8]) {
        self.rows[at..at + payload.len()].copy_from_slice(payload);
    }

    /// `range` of the contributions that are kept apart.
    pub(crate) fn row(&self, range: Range<usize>) -> Option<&[u8]> {
        self.rows.get(range)
    }

    /// Adds them up, each of `bytes` bytes, in the order of the ranks.
    pub(crate) fn sum_rows(&mut self, bytes: usize) {
        let rows = std::mem::take(&mut self.rows);
        for row in rows.chunks(bytes) {
            for (chunk, payload) in row.chunks(self.chunk_bytes).enumerate() {
                self.add(chunk * self.chunk_bytes, chunk, 1, payload);
            }
        }
        // Still sent, where a packet was lost.
        self.rows = rows;
    }

    /// Contributions in the blocks that were finished here: the fewest and the most.
    pub(crate) fn contributors(&self) -> (u16, u16) {
        self.contributors.unwrap_or((0, 0))
    }

    fn note_contributors(&mut self, count: u16) {
        let (least, most) = self.contributors.unwrap_or((count, count));
        self.contributors = Some((least.min(count), most.max(count)));
    }

    /// The sums of all ranks in `area` are the result: that of a lone rank is not yet.
    pub(crate) fn finish_sum(&mut self, area: &Range<usize>) {
        self.note_contributors(self.reduction.world_size);
        if self.reduction.world_size == 1 {
            self.finish_run(area.clone(), 1);
        }
    }

    /// `range` of the output will be written soon.
    pub(crate) fn fetch(&self, range: Range<usize>) {
        self.output.fetch(range);
    }

    /// The same for `range` of the accumulator.
    pub(crate) fn fetch_sum(&self, range: Range<usize>) {
        self.fetch(self.base + range.start..self.base + range.end);
    }

    /// Puts `payload` at byte `at` of the output.
    pub(crate) fn place(&mut self, at: usize, payload: &[u8]) {
        self.output.part(&(at..at + payload.len())).as_mut_slice().copy_from_slice(payload);
    }

    /// Fills `range` of the output, which a result was expected in and did not come. `chunks` are those of the bucket that it is.
    ///
    /// # Loss
    /// The element is what `fill` says, on this rank alone.
    pub(crate) fn fill(&mut self, range: &Range<usize>, chunks: Range<usize>, fill: Fill) {
        let count = u16::from(fill == Fill::Local);
        chunks.for_each(|chunk| self.note_count(chunk, count));
        match fill {
            Fill::Zero => self.output.part(range).as_mut_slice().fill(0),
            Fill::Previous => {}
            Fill::Local => {
                if !self.input.overlaps(&self.output) {
                    self.output.part(range).copy_from(&self.input.part(range));
                }
                let factor = self.factor(1);
                if self.is_scaled(factor) {
                    let closing = Closing::Scale(factor);
                    kernels::close(self.reduction.dtype, closing, self.output.part(range).as_mut_slice());
                }
            }
        }
    }

    /// Contributions in each chunk of the bucket; empty where nothing is reduced.
    pub(crate) fn counts(&self) -> &[u16] {
        &self.counts
    }

    /// Contributions in a chunk of the bucket.
    pub(crate) fn count(&self, chunk: usize) -> u16 {
        self.counts.get(chunk).copied().unwrap_or(1)
    }

    /// The same, and how many chunks from this one on, `most` at most, have as many.
    pub(crate) fn count_alike(&self, chunk: usize, most: usize) -> (u16, usize) {
        let count = self.count(chunk);
        let differs = |behind: &usize| self.count(chunk + behind) != count;
        (count, (1..most).find(differs).unwrap_or(most))
    }

    /// What a mean of a chunk divides by. Where its owner pays for those who are missing, it does so for less than half of the ranks:
    /// for more, what it owes would grow from step to step.
    fn divisor(&self, chunk: usize) -> u16 {
        let Reduction { divide_by, world_size, .. } = self.reduction;
        match divide_by {
            DivideBy::Contributions if self.own_row.is_some() && 2 * self.count(chunk) <= world_size => {
                world_size
            }
            DivideBy::World if self.count(chunk) > 0 => world_size,
            _ => self.count(chunk),
        }
    }

    /// Bytes that a send reads.
    pub(crate) fn view(&self, side: Side) -> &View {
        match side {
            Side::Input => &self.input,
            Side::Output | Side::Rows | Side::Settings => &self.output,
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
    /// What is not finite is dropped: fed back, it would spoil the next step as well. Of what is only too large for the dtype the most
    /// that this holds is owed.
    // claim: auto/error-feedback
    pub(crate) fn settle_residual(&mut self, range: &Range<usize>, weight: u16) {
        self.take_from_residual(range, f64::from(weight) * self.mean_of_result());
    }

    /// What a result is multiplied by to be the mean.
    fn mean_of_result(&self) -> f64 {
        let Reduction { reduce, world_size, .. } = self.reduction;
        match reduce {
            ReduceOp::Avg => 1.0,
            ReduceOp::PremulSum(factor) if factor != 0.0 => 1.0 / (f64::from(world_size) * factor),
            _ => 1.0 / f64::from(world_size),
        }
    }

    /// Owes, in the own row, less the mean for each rank that is missing from it: their values are owed whole by themselves, since they
    /// do not learn the mean that stood in for them. Summed over all ranks that is the same as in an all-reduce. Not before the
    /// result is there.
    // claim: auto/error-feedback
    pub(crate) fn pay_for_means(&mut self) {
        let Some(row) = self.own_row.clone() else { return };
        let Reduction { dtype, world_size, .. } = self.reduction;
        for (chunk, start) in (0..row.len()).step_by(self.chunk_bytes).enumerate() {
            let count = self.count(chunk);
            if count == world_size || self.divisor(chunk) != count {
                continue;
            }
            let end = (start + self.chunk_bytes).min(row.len());
            let mut owed = self.residual.part(&(row.start + start..row.start + end));
            owed.as_mut_slice().fill(0);
            let factor = f64::from(world_size - count) * self.mean_of_result();
            kernels::take_away(
                dtype,
                owed.as_mut_slice(),
                self.output.part(&(start..end)).as_slice(),
                factor,
            );
        }
    }

    /// Forgets what is not finite in `range` of the residual.
    pub(crate) fn drop_infinite(&mut self, range: &Range<usize>) {
        for (_, mut residual) in self.residual_parts(range) {
            kernels::drop_infinite(self.reduction.dtype, residual.as_mut_slice());
        }
    }

    fn take_from_residual(&mut self, range: &Range<usize>, factor: f64) {
        for (part, mut residual) in self.residual_parts(range) {
            let result = self.output.part(&part);
            kernels::take_away(self.reduction.dtype, residual.as_mut_slice(), result.as_slice(), factor);
        }
    }

    /// Turns the sums in `area` (bytes of the accumulator, `first_chunk` the chunk at its start) into the result:
    /// a mean over the contributions of each chunk, or a sum scaled by the share of ranks that are in it, which
    /// expects the same value as if all were. Then halves are rounded into the output. Chunks that hold all ranks' are the result
    /// since the last was added.
    ///
    /// # Loss
    /// A contribution that did not arrive is left out of the mean, or counts as zero ([`DivideBy`]). Where none is there, which only a server without one of
    /// its own can see, the result is zero.
    // claim: mlt/mean-over-contributions, ltp/packet-bubble, auto/unbiased-mean
    pub(crate) fn finish(&mut self, area: &Range<usize>, first_chunk: usize) {
        let mut start = area.start;
        while start < area.end {
            let chunk = first_chunk + (start - area.start) / self.chunk_bytes;
            let count = self.count(chunk);
            let mut end = (start + self.chunk_bytes).min(area.end);
            // Neighbours with the same count are one run: without loss, the whole area.
            while end < area.end && self.count(first_chunk + (end - area.start) / self.chunk_bytes) == count {
                end = (end + self.chunk_bytes).min(area.end);
            }
            self.note_contributors(count);
            if !self.is_whole(chunk) {
                self.finish_run(start..end, self.divisor(chunk));
            }
            start = end;
        }
    }

    fn finish_run(&mut self, run: Range<usize>, count: u16) {
        #[cfg(test)]
        {
            self.passed_again += run.len();
        }
        let mut part = self.output.part(&(self.base + run.start..self.base + run.end));
        if count == 0 {
            return part.as_mut_slice().fill(0);
        }
        let (kind, closing) = (self.kind(), self.closing(count));
        if let Some(halves) = &mut self.halves {
            let chunks = part.as_mut_slice().chunks_mut(self.chunk_bytes);
            for (chunk, target) in (run.start / self.chunk_bytes..).zip(chunks) {
                halves.finish(kind, chunk, closing, target);
            }
            return;
        }
        kernels::close(kind.dtype, closing, part.as_mut_slice());
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
        // By its bits: what is no number differs from one, too.
        is_sum && factor.to_bits() != 1.0_f64.to_bits()
    }

    /// Gives the scratch back.
    pub(crate) fn release(&mut self, pool: &mut Pool) {
        if self.counts.capacity() > 0 {
            pool.counts.push(std::mem::take(&mut self.counts));
        }
        self.cells.release(pool);
        if self.rows.capacity() > 0 {
            let rows = std::mem::take(&mut self.rows);
            if pool.rows.len() < ROWS_KEPT {
                pool.rows.push(rows);
            }
        }
        pool.halves.extend(self.halves.take().filter(|halves| halves.bytes() <= KEPT_BYTES_MAX));
        self.release_apart(pool);
    }
}

/// Scratch that is larger is rare, and too much to hold for a call that may never come.
const KEPT_BYTES_MAX: usize = 64 << 20;
/// As many calls of the size as are mostly in flight.
const ROWS_KEPT: usize = 4;
