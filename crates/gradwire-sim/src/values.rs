//! Inputs whose every possible mean is known beforehand.
//!
//! Contributions are small integers held in the tensor's element type, so that each order of summation gives the
//! same bits. Rank `r` contributes `BASE[r] * factor(op, element)`: the bases are chosen so that no two subsets of
//! ranks have the same mean, hence a result *tells who contributed to it*; the factor changes from element to
//! element, hence values that land at the wrong place are noticed.

use crate::mix;
use gradwire_collectives::{Dtype, ReduceOp};
use half::{bf16, f16};
use std::ops::Range;

/// Most ranks of a simulated group.
pub(crate) const WORLD_SIZE_MAX: usize = 16;
/// Most ranks whose subsets the means of wide numbers tell apart.
const TOLD_APART_MAX: usize = 8;

/// How large the integers of a dtype may be.
#[derive(Clone, Copy, Debug)]
struct Scale {
    bases: [i64; WORLD_SIZE_MAX],
    factors: u32,
}

/// 840 is divisible by 1..=8, so that the mean over any count is an integer: exact however it is divided. The
/// other factors of the first eight: a search for the smallest numbers whose subset means all differ. Largest sum: 13.9
/// million, below float32's 2^24.
static WIDE: Scale = Scale {
    bases: [
        840, 1680, 3360, 6720, 13440, 26880, 87360, 269_640, 177_240, 257_880, 326_760, 362_040, 409_080,
        454_440, 504_840, 553_560,
    ],
    factors: 4,
};
/// Sums up to 1924: exact in float16 (2048) and int16.
static MEDIUM: Scale =
    Scale { bases: [3, 7, 13, 29, 41, 59, 83, 101, 2, 5, 11, 17, 19, 23, 31, 37], factors: 4 };
/// Sums up to 120: exact in bfloat16 (256) and int8.
static NARROW: Scale = Scale { bases: [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0, 1, 0, 1, 0, 1], factors: 3 };

fn scale(dtype: Dtype) -> &'static Scale {
    match dtype {
        Dtype::F32 | Dtype::F64 | Dtype::I32 | Dtype::I64 | Dtype::U32 | Dtype::U64 => &WIDE,
        Dtype::F16 | Dtype::I16 | Dtype::U16 => &MEDIUM,
        Dtype::Bf16 | Dtype::U8 | Dtype::I8 | Dtype::Bool | Dtype::Bytes => &NARROW,
    }
}

/// Whether a mean of this dtype identifies its contributors in a group of this size.
#[must_use]
pub(crate) fn means_identify_masks(dtype: Dtype, world_size: usize) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F64) && world_size <= TOLD_APART_MAX
}

/// The factor of an element, 1 and up.
#[must_use]
pub(crate) fn factor(dtype: Dtype, op: usize, elem: u64) -> i64 {
    let scrambled = elem.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ ((op as u64) << 17));
    1 + i64::from((scrambled >> 40) as u32 % scale(dtype).factors)
}

/// What `rank` contributes to an element of collective `op` under `reduce`.
#[must_use]
pub(crate) fn contribution(dtype: Dtype, reduce: ReduceOp, op: usize, rank: usize, elem: u64) -> i64 {
    contribution_by(dtype, reduce, rank, factor(dtype, op, elem))
}

/// What `rank` contributes to each element that has this factor.
#[must_use]
pub(crate) fn contribution_by(dtype: Dtype, reduce: ReduceOp, rank: usize, factor: i64) -> i64 {
    match reduce {
        _ if dtype == Dtype::Bool => i64::from((factor + rank as i64) % 3 == 0),
        // 2^8 at most: exact in every dtype that the scenarios multiply in.
        ReduceOp::Product => 1 + (factor + rank as i64) % 2,
        _ => scale(dtype).bases[rank] * factor,
    }
}

/// The sum of the contributions of the ranks in `mask`.
#[must_use]
pub(crate) fn sum_over(dtype: Dtype, op: usize, elem: u64, mask: u32) -> i64 {
    base_sum(dtype, mask) * factor(dtype, op, elem)
}

/// The sum of the bases of the ranks in `mask`.
#[must_use]
pub(crate) fn base_sum(dtype: Dtype, mask: u32) -> i64 {
    let bases = scale(dtype).bases;
    (0..WORLD_SIZE_MAX).filter(|rank| mask >> rank & 1 == 1).map(|rank| bases[rank]).sum()
}

/// Number of different factors of a dtype.
#[must_use]
pub(crate) fn factors(dtype: Dtype) -> i64 {
    i64::from(scale(dtype).factors)
}

/// The elements of a tensor, each of which its factor alone decides: `bits` gives them in the form of [`encode`].
#[must_use]
pub(crate) fn by_factor(dtype: Dtype, op: usize, elems: Range<u64>, bits: impl Fn(i64) -> u64) -> Vec<u8> {
    let of_factors: Vec<u64> = (1..=factors(dtype)).map(bits).collect();
    let each = elems.map(|elem| of_factors[(factor(dtype, op, elem) - 1) as usize]);
    match dtype.bytes() {
        1 => each.map(|bits| bits as u8).collect(),
        2 => joined(each.map(|bits| (bits as u16).to_le_bytes())),
        4 => joined(each.map(|bits| (bits as u32).to_le_bytes())),
        _ => joined(each.map(u64::to_le_bytes)),
    }
}

fn joined<const BYTES: usize>(words: impl Iterator<Item = [u8; BYTES]>) -> Vec<u8> {
    let mut out = vec![0; words.size_hint().0 * BYTES];
    out.chunks_exact_mut(BYTES).zip(words).for_each(|(place, word)| place.copy_from_slice(&word));
    out
}

/// What `from` sends to `to` in collective `op` that only copies.
#[must_use]
pub(crate) fn copied(op: usize, from: usize, to: usize, bytes: usize) -> Vec<u8> {
    let stream = mix((op as u64) << 32 | (from as u64) << 16 | to as u64);
    let mut out = joined((0..bytes.div_ceil(8) as u64).map(|word| mix(stream ^ word).to_le_bytes()));
    out.truncate(bytes);
    out
}

/// An element as it lies in memory: the low `dtype.bytes()` bytes of the result, little-endian.
#[must_use]
pub(crate) fn encode(dtype: Dtype, value: i64) -> u64 {
    match dtype {
        Dtype::F64 => (value as f64).to_bits(),
        Dtype::F32 => u64::from((value as f32).to_bits()),
        Dtype::F16 => u64::from(f16::from_f32(value as f32).to_bits()),
        Dtype::Bf16 => u64::from(bf16::from_f32(value as f32).to_bits()),
        Dtype::Bool => u64::from(value != 0),
        Dtype::I64 | Dtype::U64 => value as u64,
        Dtype::I32 | Dtype::U32 => u64::from(value as u32),
        Dtype::I16 | Dtype::U16 => u64::from(value as u16),
        Dtype::Bytes | Dtype::U8 | Dtype::I8 => u64::from(value as u8),
    }
}

/// `sum / count` as the dtype's arithmetic gives it: 16-bit floats are divided in float32 and rounded once.
#[must_use]
pub(crate) fn encode_mean(dtype: Dtype, sum: i64, count: u32) -> u64 {
    let mean = sum as f32 / count as f32;
    match dtype {
        Dtype::F64 => (sum as f64 / f64::from(count)).to_bits(),
        Dtype::F16 => u64::from(f16::from_f32(mean).to_bits()),
        Dtype::Bf16 => u64::from(bf16::from_f32(mean).to_bits()),
        Dtype::F32 => u64::from(mean.to_bits()),
        _ => encode(dtype, sum / i64::from(count)),
    }
}

/// `sum * (world_size / count)`, the factor rounded to the precision in which the dtype is summed: what a tolerant sum
/// gives, whose expected value is the sum over all.
#[must_use]
pub(crate) fn encode_scaled(dtype: Dtype, sum: i64, world_size: usize, count: u32) -> u64 {
    let factor = world_size as f64 / f64::from(count);
    let single = sum as f32 * factor as f32;
    match dtype {
        Dtype::F64 => (sum as f64 * factor).to_bits(),
        Dtype::F32 => u64::from(single.to_bits()),
        Dtype::F16 => u64::from(f16::from_f32(single).to_bits()),
        Dtype::Bf16 => u64::from(bf16::from_f32(single).to_bits()),
        _ => encode(dtype, sum),
    }
}

/// `value - factor * bits`, as a rank's residual has it: 16-bit floats are widened to float32 and rounded once.
#[must_use]
pub(crate) fn encode_less(dtype: Dtype, value: i64, bits: u64, factor: f64) -> u64 {
    let single = |result: f32| value as f32 - factor as f32 * result;
    match dtype {
        Dtype::F64 => (value as f64 - factor * f64::from_bits(bits)).to_bits(),
        Dtype::F16 => u64::from(f16::from_f32(single(f16::from_bits(bits as u16).to_f32())).to_bits()),
        Dtype::Bf16 => u64::from(bf16::from_f32(single(bf16::from_bits(bits as u16).to_f32())).to_bits()),
        _ => u64::from(single(f32::from_bits(bits as u32)).to_bits()),
    }
}

/// Reads element `index` of a tensor in the form of [`encode`].
#[must_use]
pub(crate) fn load(bytes: &[u8], dtype: Dtype, index: usize) -> u64 {
    match dtype.bytes() {
        1 => u64::from(bytes[index]),
        2 => u64::from(u16::from_le_bytes(element(bytes, index))),
        4 => u64::from(u32::from_le_bytes(element(bytes, index))),
        _ => u64::from_le_bytes(element(bytes, index)),
    }
}

fn element<const WIDTH: usize>(bytes: &[u8], index: usize) -> [u8; WIDTH] {
    std::array::from_fn(|at| bytes[index * WIDTH + at])
}

/// An element for people.
#[must_use]
pub(crate) fn show(dtype: Dtype, bits: u64) -> String {
    match dtype {
        Dtype::F64 => format!("{}", f64::from_bits(bits)),
        Dtype::F32 => format!("{}", f32::from_bits(bits as u32)),
        Dtype::F16 => format!("{}", f16::from_bits(bits as u16)),
        Dtype::Bf16 => format!("{}", bf16::from_bits(bits as u16)),
        _ => format!("{bits:#x}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_subset_of_ranks_has_a_mean_of_its_own() {
        for dtype in [Dtype::F32, Dtype::F64] {
            for factor in 1..=factors(dtype) {
                let means: BTreeSet<u64> = (1..1u32 << TOLD_APART_MAX)
                    .map(|mask| encode_mean(dtype, base_sum(dtype, mask) * factor, mask.count_ones()))
                    .collect();
                assert_eq!(means.len(), 255, "{dtype:?} with factor {factor}");
            }
        }
    }

    #[test]
    fn every_sum_is_exact_in_its_dtype() {
        let largest = |dtype| base_sum(dtype, 0xFFFF) * factors(dtype);
        assert!(largest(Dtype::F32) < 1 << 24);
        assert!(largest(Dtype::F16) <= 2048);
        assert!(largest(Dtype::Bf16) <= 256);
        assert!(largest(Dtype::I8) < 128 && largest(Dtype::I16) < 1 << 15);
    }

    #[test]
    fn neighbouring_elements_differ_often_enough_to_show_a_misplaced_chunk() {
        let same = (0..1000).filter(|e| factor(Dtype::F32, 0, *e) == factor(Dtype::F32, 0, e + 352)).count();
        assert!(same < 500, "{same} of 1000 elements equal the one a packet further");
    }
}
