//! The transform of a large bucket in its own memory: no padding, no copy.
//!
//! The bucket is a matrix of 4096 rows, with as many whole columns as it has, and a rest, less than 65536 elements. The rest is mixed
//! with elements in front of it first: it is the last row of another matrix, which ends where the bucket ends. So both
//! together are one rotation, its own inverse the other way round. A packet of the rest that is lost takes a row of the second
//! matrix, the share of one in its rows, from the elements there; all others take the same share of every column.

use super::{run, Hadamard, Level, LANES_STEP};
use crate::Dtype;

// claim: ultima/hadamard
/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WholeHadamard {
    elems: usize,
    most: Hadamard,
    /// Ends where the bucket ends.
    rest: Option<Hadamard>,
}

impl WholeHadamard {
    /// For a bucket of `elems` elements; `None`: it has less than 2^20, and [`Hadamard`] pads it.
    #[must_use]
    pub fn of(elems: usize) -> Option<Self> {
        if elems < ELEMS_MIN {
            return None;
        }
        let lanes = elems / (BLOCK * LANES_STEP) * LANES_STEP;
        let whole = |block, lanes| Hadamard { elems: block * lanes, block, lanes };
        let most = whole(BLOCK, lanes);
        let row = (elems - most.elems).next_multiple_of(LANES_STEP);
        // The larger the block, the smaller the share that the rest is of each of its columns.
        let block = REST_BLOCKS.into_iter().find(|block| block * row <= elems)?;
        Some(Self { elems, most, rest: (row > 0).then(|| whole(block, row)) })
    }

    /// Transforms `bucket`, `[elems]` of `dtype`: float32, float16 or bfloat16. `seed` and `scratch` as for [`Hadamard::spread`].
    ///
    /// # Panics
    /// When the length is another one.
    pub fn spread(self, dtype: Dtype, seed: u64, bucket: &mut [u8], scratch: &mut Vec<f32>) {
        self.mix_rest(dtype, (seed, false), bucket, scratch);
        turn(self.most, dtype, (seed, false), bucket, scratch);
    }

    /// The inverse, up to rounding.
    ///
    /// # Loss
    /// A value that is zero because it did not arrive perturbs each value of its column a little. One that is not a number
    /// makes all of them so, and those that are mixed with them.
    ///
    /// # Panics
    /// When the length is another one.
    pub fn restore(self, dtype: Dtype, seed: u64, bucket: &mut [u8], scratch: &mut Vec<f32>) {
        turn(self.most, dtype, (seed, true), bucket, scratch);
        self.mix_rest(dtype, (seed, true), bucket, scratch);
    }

    fn mix_rest(
        self,
        dtype: Dtype,
        (seed, is_inverse): (u64, bool),
        bucket: &mut [u8],
        scratch: &mut Vec<f32>,
    ) {
        assert_eq!(bucket.len(), self.elems * dtype.bytes(), "the bucket");
        if let Some(rest) = self.rest {
            let start = (self.elems - rest.elems) * dtype.bytes();
            turn(rest, dtype, (!seed, is_inverse), &mut bucket[start..], scratch);
        }
    }
}

/// Turns the matrix that `memory` begins with.
fn turn(
    matrix: Hadamard,
    dtype: Dtype,
    (seed, is_inverse): (u64, bool),
    memory: &mut [u8],
    scratch: &mut Vec<f32>,
) {
    let plan = matrix.plan(seed, is_inverse);
    run(Level::best(), (dtype, plan), None, &mut memory[..matrix.elems * dtype.bytes()], scratch);
}

/// As in [`Hadamard`].
const BLOCK: usize = 4096;
/// Powers of four, as in [`Hadamard`]; rows of 65536 elements in the least of them are [`ELEMS_MIN`].
const REST_BLOCKS: [usize; 3] = [256, 64, 16];
/// From here on the padding of a copy costs less than the copy, and the rest has enough elements in front of it.
const ELEMS_MIN: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::narrow;

    fn value(index: usize) -> f32 {
        (index as f32 * 0.37).sin() * if index % 1000 < 100 { 10.0 } else { 0.1 }
    }

    fn bucket(elems: usize) -> Vec<u8> {
        (0..elems).flat_map(|index| value(index).to_le_bytes()).collect()
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }

    fn energy(values: &[f32]) -> f64 {
        values.iter().map(|value| f64::from(*value).powi(2)).sum()
    }

    #[test]
    fn large_buckets_of_any_size_are_turned_where_they_are_and_back() {
        for elems in [1 << 20, (1 << 20) + 1, (1 << 20) + 65_535, (1 << 20) + 123_457] {
            let whole = WholeHadamard::of(elems).expect("large enough");
            let (mut memory, mut scratch) = (bucket(elems), Vec::new());
            let before = floats(&memory);
            whole.spread(Dtype::F32, 7, &mut memory, &mut scratch);
            let spread = floats(&memory);
            assert!((energy(&spread) / energy(&before) - 1.0).abs() < 1e-6, "it is a rotation");
            let same = spread.iter().zip(&before).filter(|(a, b)| a == b).count();
            assert!(same < elems / 100, "{same} of {elems} elements were left alone");
            whole.restore(Dtype::F32, 7, &mut memory, &mut scratch);
            let off: Vec<f32> = floats(&memory).iter().zip(&before).map(|(a, b)| a - b).collect();
            // Each butterfly rounds once: 12 of one transform and 8 of the other, there and back.
            assert!(energy(&off).sqrt() <= 40.0 * 2_f64.powi(-24) * energy(&before).sqrt(), "{elems}");
        }
        assert_eq!(WholeHadamard::of((1 << 20) - 1), None);
    }

    #[test]
    fn without_a_rest_it_is_the_transform_that_copies() {
        let elems = 1 << 20;
        let hadamard = Hadamard::of(elems).expect("large enough");
        let whole = WholeHadamard::of(elems).expect("large enough");
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut memory = bucket(elems);
            if dtype != Dtype::F32 {
                let source = memory.clone();
                memory.truncate(elems * dtype.bytes());
                narrow(dtype, &floats(&source), &mut memory);
            }
            let (mut copy, mut scratch) = (vec![0; memory.len()], Vec::new());
            hadamard.spread(dtype, 9, &memory, &mut copy, &mut scratch);
            whole.spread(dtype, 9, &mut memory, &mut scratch);
            assert!(memory == copy, "{dtype:?}");
        }
    }

    #[test]
    fn a_cut_off_tail_is_spread_over_the_bucket() {
        let elems = (1 << 20) + 50_001;
        let whole = WholeHadamard::of(elems).expect("large enough");
        let (mut memory, mut scratch) = (bucket(elems), Vec::new());
        let before = floats(&memory);
        whole.spread(Dtype::F32, 3, &mut memory, &mut scratch);
        let cut = elems * 9 / 10;
        memory[4 * cut..].fill(0);
        whole.restore(Dtype::F32, 3, &mut memory, &mut scratch);
        let off: Vec<f32> = floats(&memory).iter().zip(&before).map(|(a, b)| a - b).collect();
        let share = |range: std::ops::Range<usize>| energy(&off[range.clone()]) / energy(&before[range]);
        let (all, tail) = (share(0..elems), share(cut..elems));
        assert!((0.09..0.11).contains(&all), "{all} of the energy for a tenth of the packets");
        assert!(tail < 0.2, "{tail} of the tail is lost");
    }
}
