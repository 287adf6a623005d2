//! The transform of a large bucket in its own memory: no padding, no copy.
//!
//! The bucket is a matrix of `block` rows, with as many whole columns as it has, and a rest, less than 16 elements of each
//! row. The rest is mixed with elements in front of it in the same pass ([`super::rest`]), so that no value is rounded more than once on
//! each way. A packet of the rest that is lost takes a sixteenth of the square of 16 elements for each of its own; all others
//! take the same share of every column.

use super::{run, Level, Plan, Signs, BLOCKS, LANES_STEP};
use crate::Dtype;

// claim: ultima/hadamard
/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WholeHadamard {
    elems: usize,
    block: usize,
    lanes: usize,
}

impl WholeHadamard {
    /// For a bucket of `elems` elements; `None`: it has less than 2^17, and [`super::Hadamard`] pads it.
    #[must_use]
    pub fn of(elems: usize) -> Option<Self> {
        let block = BLOCKS.into_iter().find(|block| block * LANES_MIN <= elems)?;
        let lanes = elems / (block * LANES_STEP) * LANES_STEP;
        (elems >= ELEMS_MIN).then_some(Self { elems, block, lanes })
    }

    /// Elements of a block, a power of four.
    #[must_use]
    pub fn block(self) -> usize {
        self.block
    }

    /// Transforms `bucket`, `[elems]` of `dtype`: float32, float16 or bfloat16. `seed` and `scratch` as for
    /// [`Hadamard::spread`](super::Hadamard::spread).
    ///
    /// # Panics
    /// When the length is another one.
    pub fn spread(self, dtype: Dtype, seed: u64, bucket: &mut [u8], scratch: &mut Vec<f32>) {
        self.turn(Level::best(), (dtype, seed, false), bucket, scratch);
    }

    /// The inverse, up to rounding.
    ///
    /// # Loss
    /// A value that is zero because it did not arrive perturbs each value of its column a little. One that is not a number
    /// makes all of them so.
    ///
    /// # Panics
    /// When the length is another one.
    pub fn restore(self, dtype: Dtype, seed: u64, bucket: &mut [u8], scratch: &mut Vec<f32>) {
        self.turn(Level::best(), (dtype, seed, true), bucket, scratch);
    }

    fn turn(
        self,
        level: Level,
        (dtype, seed, is_inverse): (Dtype, u64, bool),
        bucket: &mut [u8],
        scratch: &mut Vec<f32>,
    ) {
        let Self { elems, block, lanes } = self;
        assert_eq!(bucket.len(), elems * dtype.bytes(), "the bucket");
        let rest = elems - block * lanes;
        let plan = Plan { block, lanes, rest, signs: Signs::new(seed, lanes), is_inverse };
        run(level, (dtype, plan), None, bucket, scratch);
    }
}

/// So that the rest, less than 16 * `block` elements, finds 16 rows for each of its own among those of the matrix.
const LANES_MIN: usize = 16 * LANES_STEP;
/// From here on the padding of a copy costs more than smaller blocks do.
const ELEMS_MIN: usize = 1 << 17;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::hadamard::Hadamard;
    use crate::kernels::{narrow, widen};

    const SIZES: [usize; 7] = [
        1 << 17,
        (1 << 17) + 1,
        (1 << 18) - 1,
        (1 << 18) + 12_345,
        (1 << 20) - 16,
        (1 << 20) + 65_535,
        (1 << 20) + 123_457,
    ];

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

    /// The transform by its definition, in float64.
    fn defined(whole: WholeHadamard, seed: u64, values: &[f32]) -> Vec<f64> {
        let WholeHadamard { block, lanes, .. } = whole;
        let signs = Signs::new(seed, lanes);
        let mut out: Vec<f64> = values.iter().copied().map(f64::from).collect();
        for (place, value) in out.iter_mut().enumerate().take(block * lanes) {
            if signs.bits(place / lanes, place % lanes) & 1 == 1 {
                *value = -*value;
            }
        }
        for place in block * lanes..values.len() {
            let (row, lane) = (place / lanes - block, place % lanes);
            let partners = move |index: usize| (row * 16 + index) * lanes + lane;
            let share = (0..16).map(|index| out[partners(index)]).sum::<f64>() / 4.0;
            let more = (out[place] - share) / 4.0;
            out[place] = share;
            (0..16).for_each(|index| out[partners(index)] += more);
        }
        let mut half = lanes;
        while half < block * lanes {
            for pair in out[..block * lanes].chunks_exact_mut(2 * half) {
                let (first, second) = pair.split_at_mut(half);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        out[..block * lanes].iter_mut().for_each(|value| *value /= (block as f64).sqrt());
        out
    }

    #[test]
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
    fn large_buckets_of_any_size_are_turned_where_they_are_and_back() {
        for elems in SIZES {
            let whole = WholeHadamard::of(elems).expect("large enough");
            let (mut memory, mut scratch) = (bucket(elems), Vec::new());
            let before = floats(&memory);
            whole.spread(Dtype::F32, 7, &mut memory, &mut scratch);
            let spread = floats(&memory);
            let norm = energy(&before).sqrt();
            let off: Vec<f32> = spread
                .iter()
                .zip(defined(whole, 7, &before))
                .map(|(a, b)| (f64::from(*a) - b) as f32)
                .collect();
            // Each butterfly rounds once, and so does what mixes the rest: four sums, a difference and another sum.
            assert!(energy(&off).sqrt() <= 18.0 * 2_f64.powi(-24) * norm, "{elems}: not what is defined");
            assert!((energy(&spread) / energy(&before) - 1.0).abs() < 1e-6, "{elems}: it is a rotation");
            whole.restore(Dtype::F32, 7, &mut memory, &mut scratch);
            let off: Vec<f32> = floats(&memory).iter().zip(&before).map(|(a, b)| a - b).collect();
            assert!(energy(&off).sqrt() <= 36.0 * 2_f64.powi(-24) * norm, "{elems}");
        }
        assert_eq!(WholeHadamard::of((1 << 17) - 1), None);
    }

    /// The same bits on all that the processor has, and none of them off by more than one rounding of the true value: a rest that was
    /// rounded before it was mixed would be.
    #[test]
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
    fn halves_are_rounded_once_on_each_way_whatever_the_processor() {
        for (elems, constant) in SIZES.into_iter().zip([false, true].into_iter().cycle()) {
            let whole = WholeHadamard::of(elems).expect("large enough");
            for (dtype, unit) in [(Dtype::F16, 1.0 / 2_048.0), (Dtype::Bf16, 1.0 / 256.0)] {
                let values: Vec<f32> =
                    (0..elems).map(|index| if constant { 1.0 } else { value(index) }).collect();
                let (mut source, mut before) = (vec![0; 2 * elems], vec![0.0; elems]);
                narrow(dtype, &values, &mut source);
                widen(dtype, &source, &mut before);
                let expected = defined(whole, 5, &before);
                for level in Level::all() {
                    let (mut memory, mut scratch) = (source.clone(), vec![f32::NAN; 3]);
                    let (mut there, mut back) = (vec![0.0; elems], vec![0.0; elems]);
                    whole.turn(level, (dtype, 5, false), &mut memory, &mut scratch);
                    widen(dtype, &memory, &mut there);
                    whole.turn(level, (dtype, 5, true), &mut memory, &mut scratch);
                    widen(dtype, &memory, &mut back);
                    for (got, want) in there.iter().zip(&expected) {
                        // Subnormal float16, and float32 of values up to 100.
                        let bound = unit * want.abs() + 1e-5;
                        assert!((f64::from(*got) - want).abs() <= bound, "{level:?} {dtype:?} of {elems}");
                    }
                    let off: Vec<f32> = back.iter().zip(&before).map(|(a, b)| a - b).collect();
                    let bound = (2.0 * unit + 1e-5) * energy(&before).sqrt();
                    assert!(energy(&off).sqrt() <= bound, "{level:?} {dtype:?} of {elems}");
                }
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
    fn every_level_gives_the_same_bits() {
        for elems in [(1 << 17) + 12_345, (1 << 20) + 12_345] {
            let whole = WholeHadamard::of(elems).expect("large enough");
            for is_inverse in [false, true] {
                let of = |level| {
                    let mut memory = bucket(elems);
                    whole.turn(level, (Dtype::F32, 3, is_inverse), &mut memory, &mut Vec::new());
                    memory
                };
                let expected = of(Level::Any);
                assert!(Level::all().all(|level| of(level) == expected), "{elems}");
            }
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
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
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
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
        // The same sum could be a tenth of the columns, each lost whole.
        let touched = off.iter().filter(|off| off.abs() > 1e-3).count();
        assert!(touched > elems * 9 / 10, "only {touched} of {elems} elements bear it");
    }
}
