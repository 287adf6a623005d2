//! Sums of halves in float32, in little more memory than the halves take.
//!
//! Contributions are added in float32 and rounded once. An accumulator of float32 would take twice the shard: 128 MB of a
//! bucket of 256 MB among four ranks. So the upper 16 bits of each sum live in the output, where the result will be, and the
//! lower ones beside it; and these only for chunks that are open: the first value of a chunk is a half like any other, and the
//! last contribution finishes the chunk on the spot. While all ranks send alike that is a window that moves with the
//! packets; behind a rank that is late it grows to the size of the shard, or of a piece of a large one ([`crate::schedules`]), and
//! no further.
//!
//! Called by [`crate::memory::Memory`] for each payload, which is one chunk; nothing is allocated for a single one.

use crate::kernels::{self, Closing};
use crate::{Dtype, ReduceOp};

/// How the halves of one collective are reduced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    pub(crate) dtype: Dtype,
    pub(crate) reduce: ReduceOp,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct HalfSums {
    /// For each chunk of the accumulator: the slot of its lower bits, [`HALF`] or [`FINISHED`].
    chunks: Vec<u32>,
    slots: Slots,
    scratch: Vec<f32>,
}

/// What becomes of a sum in the scratch.
#[derive(Clone, Copy)]
enum Next {
    Open(u32),
    Finished(Closing),
}

impl HalfSums {
    /// For `chunks` chunks, of which none has been added to.
    pub(crate) fn begin(&mut self, chunks: usize, chunk_bytes: usize) {
        self.chunks.clear();
        self.chunks.resize(chunks, HALF);
        self.slots.begin(chunk_bytes / 2);
        self.scratch.resize(PIECE, 0.0);
    }

    /// Adds `payload` to a chunk, which is `target` of the output.
    pub(crate) fn add(&mut self, kind: Kind, chunk: usize, target: &mut [u8], payload: &[u8]) {
        let slot = self.slot_of(chunk).unwrap_or_else(|| self.slots.take());
        self.pass(kind, self.slot_of(chunk), Some(payload), target, Next::Open(slot));
        self.chunks[chunk] = slot;
    }

    /// Adds the last contribution, and turns the sum into the result.
    pub(crate) fn add_last(
        &mut self,
        kind: Kind,
        (chunk, closing): (usize, Closing),
        target: &mut [u8],
        payload: &[u8],
    ) {
        self.pass(kind, self.slot_of(chunk), Some(payload), target, Next::Finished(closing));
        self.set_finished(chunk);
    }

    /// Turns the sum of what has come for a chunk into the result, unless it is one already.
    pub(crate) fn finish(&mut self, kind: Kind, chunk: usize, closing: Closing, target: &mut [u8]) {
        let slot = self.slot_of(chunk);
        let is_result = self.chunks[chunk] == FINISHED || (slot.is_none() && closing == Closing::Keep);
        if !is_result {
            self.pass(kind, slot, None, target, Next::Finished(closing));
        }
        self.set_finished(chunk);
    }

    /// Bytes of the lower bits that it has memory for.
    pub(crate) fn bytes(&self) -> usize {
        self.slots.blocks.len() * SLOTS_PER_BLOCK * self.slots.elems * size_of::<u16>()
    }

    fn slot_of(&self, chunk: usize) -> Option<u32> {
        Some(self.chunks[chunk]).filter(|state| *state < FINISHED)
    }

    fn set_finished(&mut self, chunk: usize) {
        self.slots.free.extend(self.slot_of(chunk));
        self.chunks[chunk] = FINISHED;
    }

    /// Widens a chunk, whose lower bits are in `slot` if it is open, adds `payload`, and puts it back.
    fn pass(
        &mut self,
        Kind { dtype, reduce }: Kind,
        slot: Option<u32>,
        payload: Option<&[u8]>,
        target: &mut [u8],
        next: Next,
    ) {
        for (at, upper) in (0..).step_by(PIECE).zip(target.chunks_mut(2 * PIECE)) {
            let sum = &mut self.scratch[..upper.len() / 2];
            match slot {
                None => kernels::widen(dtype, upper, sum),
                Some(slot) => kernels::join(upper, &self.slots.lower(slot)[at..], sum),
            }
            if let Some(payload) = payload {
                kernels::accumulate(dtype, reduce, sum, &payload[2 * at..]);
            }
            match next {
                Next::Open(slot) => kernels::split(sum, upper, &mut self.slots.lower(slot)[at..]),
                Next::Finished(closing) => {
                    kernels::close_f32(closing, sum);
                    kernels::narrow(dtype, sum, upper);
                }
            }
        }
    }
}

/// Memory for the lower bits of open chunks. What is given back is taken again first, while it is in the cache.
#[derive(Debug, Default)]
struct Slots {
    /// Elements of a slot: of a full chunk.
    elems: usize,
    blocks: Vec<Box<[u16]>>,
    free: Vec<u32>,
    /// Slots below it have been taken before.
    next: u32,
}

impl Slots {
    fn begin(&mut self, elems: usize) {
        if std::mem::replace(&mut self.elems, elems) != elems {
            self.blocks.clear();
        }
        self.free.clear();
        self.next = 0;
    }

    fn take(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            let slot = self.next;
            self.next += 1;
            if slot as usize / SLOTS_PER_BLOCK >= self.blocks.len() {
                self.blocks.push(vec![0; SLOTS_PER_BLOCK * self.elems].into_boxed_slice());
            }
            slot
        })
    }

    fn lower(&mut self, slot: u32) -> &mut [u16] {
        let (block, at) = (slot as usize / SLOTS_PER_BLOCK, slot as usize % SLOTS_PER_BLOCK);
        &mut self.blocks[block][at * self.elems..(at + 1) * self.elems]
    }
}

/// Nothing has been added to the chunk: it is halves.
const HALF: u32 = u32::MAX;
/// The chunk is the result.
const FINISHED: u32 = u32::MAX - 1;
/// Elements that are summed at once: 8 KB of float32, which stay in the cache.
const PIECE: usize = 2048;
/// A block is 360 KB at the usual size of a packet: an allocation for 256 of them, and memory that goes back to the system.
const SLOTS_PER_BLOCK: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{narrow, widen};

    /// Chunks that end within a piece, at its end and beyond it.
    const LENGTHS: [usize; 4] = [1, 704, PIECE, PIECE + 33];

    fn halves(dtype: Dtype, elems: usize, seed: usize) -> Vec<u8> {
        let values: Vec<f32> = (0..elems).map(|at| ((at * 37 + seed * 101) % 997) as f32 / 64.0).collect();
        let mut bytes = vec![0; 2 * elems];
        narrow(dtype, &values, &mut bytes);
        bytes
    }

    fn wide(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
        let mut wide = vec![0.0; bytes.len() / 2];
        widen(dtype, bytes, &mut wide);
        wide
    }

    #[test]
    fn a_sum_has_the_bits_of_one_in_float32_that_is_rounded_once() {
        for dtype in [Dtype::F16, Dtype::Bf16] {
            for (elems, closing) in
                LENGTHS.into_iter().zip([Closing::Divide(3), Closing::Scale(0.3)].into_iter().cycle())
            {
                for last_is_missing in [false, true] {
                    let parts: Vec<Vec<u8>> = (0..4).map(|seed| halves(dtype, elems, seed)).collect();
                    let mut want = wide(dtype, &parts[0]);
                    let (mut target, mut sums) = (parts[0].clone(), HalfSums::default());
                    sums.begin(1, 2 * elems);
                    let kind = Kind { dtype, reduce: ReduceOp::Sum };
                    for (at, part) in parts.iter().enumerate().skip(1) {
                        match (at, last_is_missing) {
                            (3, true) => continue,
                            (3, false) => sums.add_last(kind, (0, closing), &mut target, part),
                            _ => sums.add(kind, 0, &mut target, part),
                        }
                        want.iter_mut().zip(wide(dtype, part)).for_each(|(sum, value)| *sum += value);
                    }
                    sums.finish(kind, 0, closing, &mut target);
                    kernels::close_f32(closing, &mut want);
                    let mut rounded = vec![0; 2 * elems];
                    narrow(dtype, &want, &mut rounded);
                    assert!(target == rounded, "{elems} of {dtype:?}, {closing:?}, {last_is_missing}");
                }
            }
        }
    }

    #[test]
    fn memory_is_for_open_chunks_alone() {
        let kind = Kind { dtype: Dtype::Bf16, reduce: ReduceOp::Sum };
        let (mut sums, part) = (HalfSums::default(), halves(Dtype::Bf16, 704, 0));
        let chunks = 4 * SLOTS_PER_BLOCK;
        sums.begin(chunks, part.len());
        let mut target = part.clone();
        for chunk in 0..chunks {
            sums.add(kind, chunk, &mut target, &part);
            sums.add_last(kind, (chunk, Closing::Keep), &mut target, &part);
        }
        assert_eq!(sums.bytes(), SLOTS_PER_BLOCK * part.len(), "one after another: a single slot is used");
        sums.begin(chunks, part.len());
        (0..chunks).for_each(|chunk| sums.add(kind, chunk, &mut target, &part));
        assert_eq!(sums.bytes(), chunks * part.len(), "all open at once: as large as the halves");
    }
}
