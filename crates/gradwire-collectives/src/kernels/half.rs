//! Halves: widened to float32 in blocks, reduced there, rounded back once.
//!
//! float16 conversions come from the `half` crate, which uses the processor's instructions on whole slices. A
//! bfloat16 is the upper half of a float32, so its conversions are shifts that vectorise by themselves.

use super::element::Element;
use crate::{Dtype, ReduceOp};
use ::half::f16;
use ::half::slice::HalfFloatSliceExt;

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

/// `accumulator[i] = accumulator[i] (reduce) source[i]`: `source` is bytes of `dtype`, the accumulator float32.
pub(crate) fn accumulate(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [f32], source: &[u8]) {
    let mut wide = [0.0; BLOCK];
    for (block, target) in source.chunks(2 * BLOCK).zip(accumulator.chunks_mut(BLOCK)) {
        let count = (block.len() / 2).min(target.len());
        widen_block(dtype, block, &mut wide[..count]);
        fold(reduce, &mut target[..count], &wide[..count]);
    }
}

/// As [`super::combine`], for halves.
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

#[inline]
fn widen_block(dtype: Dtype, source: &[u8], out: &mut [f32]) {
    let count = out.len().min(source.len() / 2).min(BLOCK);
    if dtype == Dtype::Bf16 {
        for (wide, bytes) in out[..count].iter_mut().zip(source.chunks_exact(2)) {
            *wide = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
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
            bytes.copy_from_slice(&bf16_bits(*wide).to_le_bytes());
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
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if value.is_nan() { quiet_nan } else { rounded }) as u16
}
