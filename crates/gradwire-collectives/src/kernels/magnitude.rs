//! How large the values of a packet are: the one pass over a bucket that tags need.
//!
//! Sums are kept in sixteen lanes, so that additions do not wait for each other and the compiler uses whole vectors.

use super::half::widen;
use crate::Dtype;

/// Partial sums: two vectors of AVX2.
const LANES: usize = 16;
/// Float16 values that are widened at once.
const BLOCK: usize = 64;

/// Mean of the absolute values of whole elements of `dtype` (a float), `source` `[bytes]`; zero for none.
pub(crate) fn mean_magnitude(dtype: Dtype, source: &[u8]) -> f32 {
    let elems = source.len() / dtype.bytes();
    if elems == 0 {
        return 0.0;
    }
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { sum_avx2(dtype, source) } / elems as f32;
    }
    sum_any(dtype, source) / elems as f32
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn sum_avx2(dtype: Dtype, source: &[u8]) -> f32 {
    sum_any(dtype, source)
}

#[inline(always)]
fn sum_any(dtype: Dtype, source: &[u8]) -> f32 {
    match dtype {
        Dtype::F32 => sum(source, 4, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).abs()),
        Dtype::Bf16 => {
            sum(source, 2, |b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]]) & 0x7FFF) << 16))
        }
        Dtype::F64 => sum(source, 8, |b| {
            f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]).abs() as f32
        }),
        Dtype::F16 => {
            let mut wide = [0.0; BLOCK];
            let blocks = source.chunks(2 * BLOCK).map(|block| {
                let wide = &mut wide[..block.len() / 2];
                widen(dtype, block, wide);
                wide.iter().map(|value| value.abs()).sum::<f32>()
            });
            blocks.sum()
        }
        _ => {
            debug_assert!(false, "only floats are judged by magnitude");
            0.0
        }
    }
}

#[inline(always)]
fn sum(source: &[u8], elem_bytes: usize, magnitude: impl Fn(&[u8]) -> f32) -> f32 {
    let mut sums = [0.0_f32; LANES];
    for block in source.chunks(LANES * elem_bytes) {
        for (sum, bytes) in sums.iter_mut().zip(block.chunks_exact(elem_bytes)) {
            *sum += magnitude(bytes);
        }
    }
    sums.iter().sum()
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
}
