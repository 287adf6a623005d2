//! Importance by magnitude: the mean magnitude of a packet against the median magnitude of the bucket, which is estimated
//! from a sample (MLT section 4.2.2: 5 % of the gradients, DLCP section 3.2.2: 0.1 %).
//!
//! Both papers compare with the median of a tensor; what is sent here is a bucket of several, so that their median is one.
//! Where all gradients of a bucket follow one bell curve, nearly every packet is important by this rule: the mean of
//! magnitudes lies above their median (0.80 against 0.67 standard deviations). It tells apart what differs: tensors of
//! one bucket, rows that were used from rows that were not.

use super::{Bucket, ImportanceRule, Marks};
use crate::kernels;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Magnitude {
    /// Share of the elements that the median is estimated from, 0 to 1.
    pub sample_rate: f64,
}

impl Magnitude {
    /// As MLT samples.
    pub const MLT: Self = Self { sample_rate: 0.05 };
    /// As DLCP samples.
    pub const DLCP: Self = Self { sample_rate: 0.001 };
}

/// A median of fewer says little; where the rate asks for fewer, so many are taken.
const SAMPLES_MIN: usize = 100;

impl ImportanceRule for Magnitude {
    // claim: mlt/magnitude-drop, dlcp/magnitude-drop
    fn mark(&self, bucket: &Bucket<'_>, scratch: &mut Vec<f32>, marks: &mut Marks) {
        sample(bucket, self.sample_rate, scratch);
        let Some(threshold) = median(scratch) else { return };
        for (number, packet) in bucket.packets() {
            let bytes = bucket.packet(packet);
            let mean = kernels::mean_magnitude(bucket.dtype, bytes);
            let least = threshold * (1.0 - mean_error(bytes.len() / bucket.dtype.bytes()));
            // A packet with a NaN is kept: whoever looks for the cause needs it. One of zeros says nothing, also where most are.
            if (mean >= least && mean > 0.0) || mean.is_nan() {
                marks.set(number);
            }
        }
    }
}

/// How much smaller than it is, by its own size, the mean of so many magnitudes may come out: each addition and the division round
/// by half of `f32::EPSILON` at most. Without it packets of equal magnitudes would matter or not as their sum is rounded.
fn mean_error(elems: usize) -> f32 {
    elems as f32 * (f32::EPSILON / 2.0)
}

/// Magnitudes of about `rate` of the elements: one from each of as many equal stretches, at a random place of it, so that
/// every tensor of a bucket is in the sample with its share.
fn sample(bucket: &Bucket<'_>, rate: f64, out: &mut Vec<f32>) {
    let elems = bucket.elems();
    let wanted = (elems as f64 * rate.clamp(0.0, 1.0)).ceil() as usize;
    let count = wanted.max(SAMPLES_MIN).min(elems);
    if count == 0 {
        return;
    }
    // Stretch i begins at element i * elems / count, counted up without a division for each.
    let (step, remainder) = (elems / count, elems % count);
    let (mut start, mut carried, mut state) = (0, 0, bucket.seed);
    let places = (0..count).map(|_| {
        carried += remainder;
        let length = step + usize::from(carried >= count);
        carried -= if carried >= count { count } else { 0 };
        start += length;
        start - length + below(&mut state, length)
    });
    gather(bucket, places, out);
}

/// Those of the elements at `places`, in order.
fn gather(bucket: &Bucket<'_>, places: impl Iterator<Item = usize>, out: &mut Vec<f32>) {
    let (dtype, mut pieces) = (bucket.dtype, bucket.values.pieces());
    let (Some(first), second) = (pieces.next(), pieces.next()) else { return };
    if second.is_none() {
        return kernels::gather_magnitudes(dtype, first, places, out);
    }
    let (mut start, mut places) = (0, places.peekable());
    for piece in [first].into_iter().chain(second).chain(pieces) {
        let end = start + piece.len() / dtype.bytes();
        let inside = std::iter::from_fn(|| places.next_if(|at| *at < end).map(|at| at - start));
        kernels::gather_magnitudes(dtype, piece, inside, out);
        start = end;
    }
}

/// The median; the larger of the two middle ones of an even number. Magnitudes have no sign, so their bits are ordered as they are,
/// and whole numbers are compared faster.
fn median(values: &mut [f32]) -> Option<f32> {
    let middle = values.len() / 2;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by_key(middle, |value| value.to_bits()).1)
}

/// A number below `length` (at least 1): the upper half of a product, which is cheaper than the rest of a division.
fn below(state: &mut u64, length: usize) -> usize {
    ((u128::from(random(state)) * length as u128) >> 64) as usize
}

/// SplitMix64: spreads neighbouring seeds, and needs no more state than one word.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut word = *state;
    word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

#[cfg(test)]
mod tests {
    use super::super::values::Values;
    use super::*;
    use crate::Dtype;
    use proptest::prelude::*;

    /// The rule in the plainest form, over all elements.
    fn naive(values: &[f32], packet_elems: usize) -> Vec<bool> {
        let mut sorted: Vec<f32> = values.iter().map(|value| value.abs()).collect();
        sorted.sort_by(f32::total_cmp);
        let median = f64::from(sorted[sorted.len() / 2]);
        let mean = |packet: &[f32]| {
            packet.iter().map(|value| f64::from(value.abs())).sum::<f64>() / packet.len() as f64
        };
        values.chunks(packet_elems).map(|packet| mean(packet) >= median).collect()
    }

    fn bytes_of(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    fn important(rule: Magnitude, dtype: Dtype, bytes: &[u8], seed: u64) -> Vec<bool> {
        let bucket = Bucket::new(dtype, bytes, 1, 256, seed);
        let mut marks = bucket.marks();
        rule.mark(&bucket, &mut Vec::new(), &mut marks);
        bucket.packets().map(|(number, _)| marks.contains(number)).collect()
    }

    proptest! {
        // test of: mlt/magnitude-drop, dlcp/magnitude-drop
        #[test]
        fn with_every_element_sampled_the_rule_is_that_of_the_naive_model(
            // Small integers: sums and means are exact in either precision.
            values in prop::collection::vec(-1_000_i16..1_000, 1..700), seed in any::<u64>(),
        ) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let rule = Magnitude { sample_rate: 1.0 };
            prop_assert_eq!(important(rule, Dtype::F32, &bytes_of(&values), seed), naive(&values, 64));
        }
    }

    #[test]
    fn values_in_pieces_are_judged_as_those_that_lie_behind_each_other() {
        let (rows, row, columns) = (3, 4_000, 512..3_000);
        let memory = crate::view::OwnMemory::zeroed(rows * row);
        let values = bytes_of(&two_tensors(rows * row / 4));
        memory.view().as_mut_slice().copy_from_slice(&values);
        let view = memory.view().columns(row, &columns);
        let copy: Vec<u8> = values.chunks(row).flat_map(|row| &row[columns.clone()]).copied().collect();
        let grid = super::super::Grid::of_rows(columns.len(), rows, 256);
        for rate in [0.0, 0.05, 1.0] {
            let [pieces, whole] = [Values::In(&view), Values::Whole(&copy)].map(|values| {
                let bucket = Bucket { dtype: Dtype::F32, values, seed: 3, grid };
                let (mut marks, mut sampled) = (bucket.marks(), Vec::new());
                Magnitude { sample_rate: rate }.mark(&bucket, &mut sampled, &mut marks);
                (marks, sampled)
            });
            assert_eq!(pieces, whole);
            assert!(whole.0.count() > 0 && whole.0.count() < whole.0.words.len() * 64);
        }
    }

    /// Half of the packets have gradients of about `large`, half of about a hundredth of it.
    fn two_tensors(elems: usize) -> Vec<f32> {
        let mut state = 7;
        let mut value = |scale: f32| scale * (0.5 + random(&mut state) as f32 / u64::MAX as f32);
        (0..elems).map(|i| if i < elems / 2 { value(0.01) } else { -value(1.0) }).collect()
    }

    // test of: mlt/magnitude-drop, dlcp/magnitude-drop
    #[test]
    #[cfg_attr(miri, ignore = "large buckets are sampled, which takes minutes there")]
    fn a_sample_of_either_papers_size_tells_large_gradients_from_small_ones() {
        let bytes = bytes_of(&two_tensors(1 << 20));
        for rule in [Magnitude::MLT, Magnitude::DLCP] {
            for seed in 0..20 {
                let marks = important(rule, Dtype::F32, &bytes, seed);
                let (small, large) = marks.split_at(marks.len() / 2);
                assert!(large.iter().all(|mark| *mark), "{rule:?}, seed {seed}");
                // The median lies between the two halves, so that either side of it may be sampled.
                assert!(small.iter().all(|mark| !mark), "{rule:?}, seed {seed}");
            }
        }
    }

    #[test]
    fn the_sample_has_the_asked_size_and_is_the_same_for_the_same_seed() {
        let bytes = bytes_of(&two_tensors(100_000));
        let sampled = |rate, seed| {
            let mut out = Vec::new();
            sample(&Bucket::new(Dtype::F32, &bytes, 1, 256, seed), rate, &mut out);
            out
        };
        assert_eq!(sampled(0.05, 1).len(), 5_000);
        assert_eq!(sampled(0.001, 1).len(), SAMPLES_MIN);
        assert_eq!(sampled(0.05, 1), sampled(0.05, 1));
        assert_ne!(sampled(0.05, 1), sampled(0.05, 2));
        assert_eq!(sampled(1.0, 3).len(), 100_000);
        assert_eq!(sampled(f64::NAN, 3).len(), SAMPLES_MIN);
    }

    #[test]
    #[cfg_attr(miri, ignore = "large buckets are sampled, which takes minutes there")]
    fn halves_are_judged_like_the_float32_values_that_they_round() {
        let values = two_tensors(1 << 15);
        let whole = important(Magnitude::MLT, Dtype::F32, &bytes_of(&values), 5);
        for dtype in [Dtype::Bf16, Dtype::F16] {
            let mut bytes = vec![0; 2 * values.len()];
            kernels::narrow(dtype, &values, &mut bytes);
            // A packet of 256 bytes holds twice as many.
            let halves = important(Magnitude::MLT, dtype, &bytes, 5);
            assert!(
                halves.iter().zip(whole.chunks(2)).skip(1).all(|(half, pair)| pair.contains(half)),
                "{dtype:?}"
            );
        }
        let doubles: Vec<u8> = values.iter().flat_map(|value| f64::from(*value).to_le_bytes()).collect();
        let doubles = important(Magnitude::MLT, Dtype::F64, &doubles, 5);
        assert_eq!(doubles.iter().filter(|mark| **mark).count(), doubles.len() / 2);
    }

    #[test]
    fn where_most_gradients_are_zero_the_packets_of_the_others_matter() {
        // As an embedding's rows: a packet has 64 values.
        let rows: Vec<f32> = (0..64 * 10).map(|i| if i / 64 % 3 == 0 { 0.5 } else { 0.0 }).collect();
        let marks = important(Magnitude::MLT, Dtype::F32, &bytes_of(&rows), 0);
        assert_eq!(marks, (0..10).map(|packet| packet % 3 == 0).collect::<Vec<_>>());
    }

    #[test]
    fn packets_that_are_full_of_the_median_matter_however_their_sum_is_rounded() {
        // As signs times one scale, of every second packet; most of these have sums that no float32 holds.
        for scale in (1..200).map(|i| i as f32 / 201.0) {
            let values: Vec<f32> = (0..352 * 4)
                .map(|i| match (i / 352 % 2, i % 3) {
                    (0, _) => 0.0,
                    (_, 0) => -scale,
                    _ => scale,
                })
                .collect();
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let mut bytes = bytes_of(&values);
                if dtype != Dtype::F32 {
                    bytes.truncate(2 * values.len());
                    kernels::narrow(dtype, &values, &mut bytes);
                }
                let bucket = Bucket::new(dtype, &bytes, 1, 352 * dtype.bytes(), 0);
                let mut marks = bucket.marks();
                Magnitude { sample_rate: 1.0 }.mark(&bucket, &mut Vec::new(), &mut marks);
                let marks: Vec<bool> = bucket.packets().map(|(number, _)| marks.contains(number)).collect();
                assert_eq!(marks, [false, true, false, true], "{scale} in {dtype:?}");
            }
        }
    }

    #[test]
    fn nothing_and_zeros_and_not_a_number_have_an_answer() {
        assert!(important(Magnitude::MLT, Dtype::F32, &[], 0).is_empty());
        assert_eq!(important(Magnitude::MLT, Dtype::F32, &bytes_of(&[0.0; 128]), 0), [false, false]);
        let mut values = vec![1.0_f32; 64];
        values.extend([0.1; 200]);
        values[100] = f32::NAN;
        assert_eq!(important(Magnitude::MLT, Dtype::F32, &bytes_of(&values), 0)[..3], [true, true, true]);
    }
}
