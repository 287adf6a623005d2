//! Sums for another rank, whose result is not this rank's: its tensor stays as it is, and the accumulator is memory of the group's.

use super::{Memory, Pool, KEPT_BYTES_MAX};
use std::ops::Range;

impl Memory {
    /// Makes other memory the output and the accumulator, with this rank's contribution in it, taken from `own` of the input. `chunks`
    /// is the number of chunks of it.
    pub(crate) fn accumulate_apart(&mut self, own: &Range<usize>, chunks: usize, pool: &mut Pool) {
        self.apart = pool.apart.pop().unwrap_or_default();
        // SAFETY: the buffer is kept as long as the view of it, which is lent once, and given back when no transfer is left.
        self.output = unsafe { self.apart.lend(own.len()) };
        self.accumulate_in(0..own.len(), own, chunks, true, pool);
    }

    /// Keeps that memory for the next calls, if it is not much.
    pub(super) fn release_apart(&mut self, pool: &mut Pool) {
        let buffer = std::mem::take(&mut self.apart);
        if (1..=KEPT_BYTES_MAX).contains(&buffer.bytes()) && pool.apart.len() < KEPT_MAX {
            pool.apart.push(buffer);
        }
    }
}

/// As many calls as are mostly in flight.
const KEPT_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Reduction;
    use crate::{DivideBy, Dtype, ReduceOp, View};

    /// Sums of calls that are in flight together, of so many bytes each.
    fn kept_after(bytes: &[usize]) -> usize {
        let (dtype, reduce, divide_by) = (Dtype::F32, ReduceOp::Sum, DivideBy::Contributions);
        let reduction = Reduction { dtype, reduce, world_size: 3, divide_by };
        let mut pool = Pool::default();
        let mut inputs: Vec<Vec<u8>> = bytes.iter().map(|bytes| vec![7; *bytes + 64]).collect();
        let mut sums: Vec<Memory> = Vec::new();
        for input in &mut inputs {
            // SAFETY: `inputs` outlives the memories, and nothing else touches it meanwhile.
            let view = unsafe { View::new(input.as_mut_ptr(), input.len()) };
            let mut memory = Memory::new((view, View::EMPTY, View::EMPTY), reduction, 128);
            memory.accumulate_apart(&(64..view.len()), view.len().div_ceil(128), &mut pool);
            memory.output.as_mut_slice().fill(9);
            sums.push(memory);
        }
        sums.iter_mut().for_each(|memory| memory.release(&mut pool));
        assert!(inputs.iter().flatten().all(|byte| *byte == 7), "the caller's values were changed");
        pool.apart.len()
    }

    #[test]
    fn what_is_summed_for_another_rank_changes_no_tensor_and_little_memory_is_kept() {
        assert_eq!(kept_after(&[1000; 3]), 3);
        assert_eq!(kept_after(&[1000; 6]), KEPT_MAX);
        assert_eq!(kept_after(&[KEPT_BYTES_MAX + 1, 1000]), 1);
    }
}
