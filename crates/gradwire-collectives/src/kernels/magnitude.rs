//! How large the values of a packet are: the one pass over a bucket that tags need, and the look at single elements for a
//! sample.
//!
//! Sums are kept in sixteen lanes, so that additions do not wait for each other and the compiler uses whole vectors. float16 is
//! widened by the processor's instruction where it has one, chosen at run time; elsewhere in blocks, as in `half`.

use super::half::widen;
use crate::Dtype;

/// Partial sums: two vectors of AVX2.
const LANES: usize = 16;
/// Float16 values that are widened at once where there is no instruction.
const BLOCK: usize = 64;

/// Mean of the absolute values of whole elements of `dtype` (a float), `source` `[bytes]`; zero for none.
pub(crate) fn mean_magnitude(dtype: Dtype, source: &[u8]) -> f32 {
    let elems = source.len() / dtype.bytes();
    if elems == 0 {
        return 0.0;
    }
    sum_magnitudes(dtype, source) / elems as f32
}

/// Appends the absolute values of some elements of `dtype` (a float), given by their numbers, to `out`.
///
/// # Panics
/// An element is beyond the end of `source`.
pub(crate) fn gather_magnitudes(
    dtype: Dtype,
    source: &[u8],
    elems: impl Iterator<Item = usize>,
    out: &mut Vec<f32>,
) {
    match dtype {
        Dtype::F32 => out.extend(elems.map(|at| f32_magnitude(&source[4 * at..][..4]))),
        Dtype::F64 => out.extend(elems.map(|at| f64_magnitude(&source[8 * at..][..8]))),
        Dtype::Bf16 => out.extend(elems.map(|at| bf16_magnitude(&source[2 * at..][..2]))),
        Dtype::F16 => out.extend(elems.map(|at| f16_magnitude(&source[2 * at..][..2]))),
        _ => debug_assert!(false, "only floats are judged by magnitude"),
    }
}

fn sum_magnitudes(dtype: Dtype, source: &[u8]) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has what each of them needs.
        return unsafe {
            match dtype {
                Dtype::F16 if is_x86_feature_detected!("f16c") => sum_f16_f16c(source),
                Dtype::Bf16 => sum_bf16_avx2(source),
                _ => sum_avx2(dtype, source),
            }
        };
    }
    sum_any(dtype, source)
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(dtype: Dtype, source: &[u8]) -> f32 {
    sum_any(dtype, source)
}

/// As `sum_any`, for float16.
///
/// # Safety
/// The processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn sum_f16_f16c(source: &[u8]) -> f32 {
    use std::arch::x86_64::{
        _mm256_add_ps, _mm256_cvtph_ps, _mm256_setzero_ps, _mm_and_si128, _mm_loadu_si128, _mm_set1_epi16,
    };
    let blocks = source.chunks_exact(2 * LANES);
    let rest = blocks.remainder();
    // SAFETY: the processor has AVX2 and F16C; each load is of 16 bytes that are there, and may be unaligned.
    let whole = unsafe {
        let no_sign = _mm_set1_epi16(0x7FFF);
        let mut sums = [_mm256_setzero_ps(); 2];
        for block in blocks {
            for (sum, halves) in sums.iter_mut().zip(block.chunks_exact(LANES)) {
                let halves = _mm_loadu_si128(halves.as_ptr().cast());
                *sum = _mm256_add_ps(*sum, _mm256_cvtph_ps(_mm_and_si128(halves, no_sign)));
            }
        }
        sum_lanes(sums)
    };
    whole + rest.chunks_exact(2).map(f16_magnitude).sum::<f32>()
}

/// As `sum_any`, for bfloat16. Each word holds two, one in its upper half, where a float32 has them, so that nothing has to be moved
/// to another lane: left to itself the compiler widens them one by one, three times as slow.
///
/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_bf16_avx2(source: &[u8]) -> f32 {
    use std::arch::x86_64::{
        _mm256_add_ps, _mm256_and_si256, _mm256_castsi256_ps, _mm256_loadu_si256, _mm256_set1_epi32,
        _mm256_setzero_ps, _mm256_slli_epi32,
    };
    let blocks = source.chunks_exact(2 * LANES);
    let rest = blocks.remainder();
    // SAFETY: the processor has AVX2; each load is of 32 bytes that are there, and may be unaligned.
    let whole = unsafe {
        let no_sign = _mm256_set1_epi32(0x7FFF_0000);
        let mut sums = [_mm256_setzero_ps(); 2];
        for block in blocks {
            let pairs = _mm256_loadu_si256(block.as_ptr().cast());
            for (sum, halves) in sums.iter_mut().zip([pairs, _mm256_slli_epi32::<16>(pairs)]) {
                *sum = _mm256_add_ps(*sum, _mm256_castsi256_ps(_mm256_and_si256(halves, no_sign)));
            }
        }
        sum_lanes(sums)
    };
    whole + rest.chunks_exact(2).map(bf16_magnitude).sum::<f32>()
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_lanes(sums: [std::arch::x86_64::__m256; 2]) -> f32 {
    use std::arch::x86_64::{_mm256_add_ps, _mm256_storeu_ps};
    let mut lanes = [0.0_f32; 8];
    // SAFETY: the processor has AVX2; `lanes` holds the eight floats, and the store may be unaligned.
    unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), _mm256_add_ps(sums[0], sums[1])) };
    lanes.iter().sum()
}

#[inline(always)]
fn sum_any(dtype: Dtype, source: &[u8]) -> f32 {
    match dtype {
        Dtype::F32 => sum::<4>(source, f32_magnitude),
        Dtype::Bf16 => sum::<2>(source, bf16_magnitude),
        Dtype::F64 => sum::<8>(source, f64_magnitude),
        Dtype::F16 => {
            let mut wide = [0.0; BLOCK];
            let mut sums = [0.0_f32; LANES];
            for block in source.chunks(2 * BLOCK) {
                let wide = &mut wide[..block.len() / 2];
                widen(dtype, block, wide);
                for lanes in wide.chunks(LANES) {
                    sums.iter_mut().zip(lanes).for_each(|(sum, value)| *sum += value.abs());
                }
            }
            sums.iter().sum()
        }
        _ => {
            debug_assert!(false, "only floats are judged by magnitude");
            0.0
        }
    }
}

/// Whole blocks first: only a loop of a fixed length becomes vectors.
#[inline(always)]
fn sum<const BYTES: usize>(source: &[u8], magnitude: impl Fn(&[u8]) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    let blocks = source.chunks_exact(LANES * BYTES);
    let rest = blocks.remainder();
    for block in blocks {
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += magnitude(&block[lane * BYTES..][..BYTES]);
        }
    }
    for (sum, bytes) in sums.iter_mut().zip(rest.chunks_exact(BYTES)) {
        *sum += magnitude(bytes);
    }
    sums.iter().sum()
}

#[inline(always)]
fn f32_magnitude(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).abs()
}

#[inline(always)]
fn f64_magnitude(bytes: &[u8]) -> f32 {
    let [a, b, c, d, e, f, g, h] = [0, 1, 2, 3, 4, 5, 6, 7].map(|at| bytes[at]);
    f64::from_le_bytes([a, b, c, d, e, f, g, h]).abs() as f32
}

/// A bfloat16 is the upper half of a float32.
#[inline(always)]
fn bf16_magnitude(bytes: &[u8]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]]) & 0x7FFF) << 16)
}

/// One at a time, without asking what the processor has: fields of a float16 moved to where a float32 has them.
#[inline(always)]
fn f16_magnitude(bytes: &[u8]) -> f32 {
    let bits = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]) & 0x7FFF);
    match bits >> 10 {
        // Zero and numbers below the smallest normal one: so many times 2^-24.
        0 => bits as f32 * (1.0 / (1 << 24) as f32),
        // Infinity and not-a-number stay so.
        31 => f32::from_bits(bits << 13 | 0x7F80_0000),
        // The exponent's bias is 127 instead of 15.
        _ => f32::from_bits((bits << 13) + (112 << 23)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_magnitude_of_every_float_type_is_that_of_the_naive_sum() {
        for count in [1_usize, 15, 16, 17, 63, 64, 65, 352, 704] {
            let values: Vec<f32> =
                (0..count).map(|i| (i % 32) as f32 * if i % 3 == 0 { -0.5 } else { 0.5 }).collect();
            let expected = values.iter().map(|v| f64::from(v.abs())).sum::<f64>() / count as f64;
            let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let f64s: Vec<u8> = values.iter().flat_map(|v| f64::from(*v).to_le_bytes()).collect();
            assert_eq!(mean_magnitude(Dtype::F32, &f32s), expected as f32);
            assert_eq!(mean_magnitude(Dtype::F64, &f64s), expected as f32);
            for dtype in [Dtype::F16, Dtype::Bf16] {
                let mut halves = vec![0; 2 * count];
                super::super::narrow(dtype, &values, &mut halves);
                assert_eq!(mean_magnitude(dtype, &halves), expected as f32, "{count} of {dtype:?}");
            }
        }
        assert_eq!(mean_magnitude(Dtype::F32, &[]), 0.0);
    }

    /// Every float16 and bfloat16, not-a-number too, in each of the ways that this processor has.
    #[test]
    #[cfg_attr(miri, ignore = "each of 65,536 numbers is looked at, which takes minutes there")]
    fn each_half_has_the_magnitude_of_the_float32_that_it_stands_for() {
        for bits in 0..=u16::MAX {
            let one = bits.to_le_bytes();
            // A whole vector and a rest of one: both ways through the kernel; the mean of equal values is their value.
            let many: Vec<u8> = one.repeat(LANES + 1);
            for dtype in [Dtype::F16, Dtype::Bf16] {
                let mut wide = [0.0];
                widen(dtype, &one, &mut wide);
                let expected = wide[0].abs();
                let mut gathered = Vec::new();
                gather_magnitudes(dtype, &many, [LANES].into_iter(), &mut gathered);
                let zeros_around = [&[0; 2 * LANES][..], &one, &[0; 4]].concat();
                let sums = [sum_magnitudes(dtype, &zeros_around), sum_any(dtype, &zeros_around), gathered[0]];
                for sum in sums {
                    assert!(
                        sum.to_bits() == expected.to_bits() || sum.is_nan() && expected.is_nan(),
                        "{bits:#x} {dtype:?}"
                    );
                }
                let mean = mean_magnitude(dtype, &many);
                assert!(
                    (mean / expected - 1.0).abs() < 1e-6
                        || mean == expected
                        || mean.is_nan() == expected.is_nan()
                );
            }
        }
    }
}
