//! Halves: widened to float32 in blocks, reduced there, rounded back once.
//!
//! float16 conversions come from the `half` crate, which uses the processor's instructions on whole slices. A
//! bfloat16 is the upper half of a float32, so its conversions are shifts that vectorise by themselves.

use super::element::Element;
use crate::{Dtype, ReduceOp};
use ::half::f16;
use ::half::slice::HalfFloatSliceExt;

/// A bfloat16 as the float32 that it is the upper half of.
#[derive(Clone, Copy)]
pub(super) struct Bf16(f32);

impl Element for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn read(bytes: &[u8]) -> Self {
        Self(f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16))
    }

    #[inline(always)]
    fn write(self, bytes: &mut [u8]) {
        bytes[..2].copy_from_slice(&bf16_bits(self.0).to_le_bytes());
    }

    #[inline(always)]
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    #[inline(always)]
    fn multiply(self, other: Self) -> Self {
        Self(self.0 * other.0)
    }

    #[inline(always)]
    fn least(self, other: Self) -> Self {
        Self(self.0.least(other.0))
    }

    #[inline(always)]
    fn largest(self, other: Self) -> Self {
        Self(self.0.largest(other.0))
    }
}

/// Elements that are converted at once: 256 bytes of float32 on the stack, a few vector registers' worth.
const BLOCK: usize = 64;

/// `out[i] = source[i]`: `source` is `[2 * out.len()]` bytes of float16 or bfloat16.
pub(crate) fn widen(dtype: Dtype, source: &[u8], out: &mut [f32]) {
    for (block, wide) in source.chunks(2 * BLOCK).zip(out.chunks_mut(BLOCK)) {
        widen_block(dtype, block, wide);
    }
}

/// `out[i] = source[i]`, rounded to the nearest, ties to even: `out` is `[2 * source.len()]` bytes.
pub(crate) fn narrow(dtype: Dtype, source: &[f32], out: &mut [u8]) {
    for (wide, block) in source.chunks(BLOCK).zip(out.chunks_mut(2 * BLOCK)) {
        narrow_block(dtype, wide, block);
    }
}

/// The largest finite half. What is larger by half of its last bit or more is rounded to infinity.
pub(super) fn largest(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Bf16 => f32::from_bits(0x7F7F_0000),
        _ => f16::MAX.to_f32(),
    }
}

/// `out[i]` is the float32 whose upper 16 bits are `[2 * out.len()]` bytes of `upper`, and whose lower ones are `lower[i]`.
pub(crate) fn join(upper: &[u8], lower: &[u16], out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { join_avx2(upper, lower, out) };
    }
    join_any(upper, lower, out);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn join_avx2(upper: &[u8], lower: &[u16], out: &mut [f32]) {
    join_any(upper, lower, out);
}

#[inline(always)]
fn join_any(upper: &[u8], lower: &[u16], out: &mut [f32]) {
    for ((wide, bytes), low) in out.iter_mut().zip(upper.chunks_exact(2)).zip(lower) {
        let high = u16::from_le_bytes([bytes[0], bytes[1]]);
        *wide = f32::from_bits(u32::from(high) << 16 | u32::from(*low));
    }
}

/// The inverse of [`join`].
pub(crate) fn split(source: &[f32], upper: &mut [u8], lower: &mut [u16]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { split_avx2(source, upper, lower) };
    }
    split_any(source, upper, lower);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn split_avx2(source: &[f32], upper: &mut [u8], lower: &mut [u16]) {
    split_any(source, upper, lower);
}

#[inline(always)]
fn split_any(source: &[f32], upper: &mut [u8], lower: &mut [u16]) {
    for ((wide, bytes), low) in source.iter().zip(upper.chunks_exact_mut(2)).zip(lower) {
        let bits = wide.to_bits();
        bytes.copy_from_slice(&((bits >> 16) as u16).to_le_bytes());
        *low = bits as u16;
    }
}

/// `accumulator[i] = accumulator[i] (reduce) source[i]`: `source` is bytes of `dtype`, the accumulator float32.
pub(crate) fn accumulate(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [f32], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { accumulate_avx2(dtype, reduce, accumulator, source) };
    }
    accumulate_any(dtype, reduce, accumulator, source);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn accumulate_avx2(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [f32], source: &[u8]) {
    accumulate_any(dtype, reduce, accumulator, source);
}

#[inline(always)]
fn accumulate_any(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [f32], source: &[u8]) {
    if dtype == Dtype::Bf16 && reduce.is_additive() {
        // The hot case needs no block in between.
        for (a, bytes) in accumulator.iter_mut().zip(source.chunks_exact(2)) {
            *a += Bf16::read(bytes).0;
        }
        return;
    }
    let mut wide = [0.0; BLOCK];
    for (block, target) in source.chunks(2 * BLOCK).zip(accumulator.chunks_mut(BLOCK)) {
        let count = (block.len() / 2).min(target.len());
        widen_block(dtype, block, &mut wide[..count]);
        fold(reduce, &mut target[..count], &wide[..count]);
    }
}

/// As [`super::combine`], for float16.
pub(super) fn combine(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    let mut wide = [0.0; BLOCK];
    for (target, block) in accumulator.chunks_mut(2 * BLOCK).zip(source.chunks(2 * BLOCK)) {
        let count = (target.len().min(block.len())) / 2;
        widen_block(dtype, target, &mut wide[..count]);
        accumulate(dtype, reduce, &mut wide[..count], block);
        narrow_block(dtype, &wide[..count], target);
    }
}

#[inline]
fn fold(reduce: ReduceOp, accumulator: &mut [f32], source: &[f32]) {
    let each = |combine: fn(f32, f32) -> f32, accumulator: &mut [f32]| {
        for (a, s) in accumulator.iter_mut().zip(source) {
            *a = combine(*a, *s);
        }
    };
    match reduce {
        ReduceOp::Product => each(f32::multiply, accumulator),
        ReduceOp::Min => each(f32::least, accumulator),
        ReduceOp::Max => each(f32::largest, accumulator),
        // Sums are the hot case: a loop of its own that surely vectorises.
        _ => accumulator.iter_mut().zip(source).for_each(|(a, s)| *a += s),
    }
}

/// Four float16 as float32.
#[inline(always)]
pub(super) fn f16_from(bits: [u16; 4]) -> [f32; 4] {
    let mut wide = [0.0; 4];
    bits.map(f16::from_bits).convert_to_f32_slice(&mut wide);
    wide
}

/// Four float32 as float16, rounded to the nearest, ties to even.
#[inline(always)]
pub(super) fn f16_to(values: [f32; 4]) -> [u16; 4] {
    let mut halves = [f16::ZERO; 4];
    halves.convert_from_f32_slice(&values);
    halves.map(f16::to_bits)
}

#[inline]
fn widen_block(dtype: Dtype, source: &[u8], out: &mut [f32]) {
    let count = out.len().min(source.len() / 2).min(BLOCK);
    if dtype == Dtype::Bf16 {
        for (wide, bytes) in out[..count].iter_mut().zip(source.chunks_exact(2)) {
            *wide = Bf16::read(bytes).0;
        }
        return;
    }
    let mut halves = [f16::ZERO; BLOCK];
    for (half, bytes) in halves.iter_mut().zip(source.chunks_exact(2)) {
        *half = f16::from_bits(u16::from_le_bytes([bytes[0], bytes[1]]));
    }
    halves[..count].convert_to_f32_slice(&mut out[..count]);
}

#[inline]
fn narrow_block(dtype: Dtype, source: &[f32], out: &mut [u8]) {
    let count = source.len().min(out.len() / 2).min(BLOCK);
    if dtype == Dtype::Bf16 {
        for (bytes, wide) in out.chunks_exact_mut(2).zip(&source[..count]) {
            Bf16(*wide).write(bytes);
        }
        return;
    }
    let mut halves = [f16::ZERO; BLOCK];
    halves[..count].convert_from_f32_slice(&source[..count]);
    for (bytes, half) in out.chunks_exact_mut(2).zip(&halves[..count]) {
        bytes.copy_from_slice(&half.to_bits().to_le_bytes());
    }
}

/// The upper half of `value`, rounded to nearest even: add just under half of the last kept bit, and that bit
/// itself, so that a tie goes to even. A NaN keeps a set bit so that it does not become an infinity.
#[inline(always)]
pub(super) fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}
