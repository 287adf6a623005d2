//! The last step of a reduction: a mean divides, a scaled sum multiplies, in the pass that adds the last contribution.

use super::element::{fold, map, Scalable};
use super::half::{largest, narrow, widen};
use crate::{Dtype, ReduceOp};

/// Elements of a half that are scaled at once, on the stack.
const BLOCK: usize = 64;

/// What is left to do with a whole sum.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Closing {
    /// It is the result.
    Keep,
    /// A mean divides.
    Divide(u16),
    /// A scaled sum multiplies.
    Scale(f64),
}

/// Turns sums of `dtype` into the result, halves in float32.
pub(crate) fn close(dtype: Dtype, closing: Closing, values: &mut [u8]) {
    match dtype {
        Dtype::F32 => each::<f32>(closing, values),
        Dtype::F64 => each::<f64>(closing, values),
        Dtype::F16 | Dtype::Bf16 => in_float32(dtype, values, |wide| close_f32(closing, wide)),
        Dtype::U8 => each::<u8>(closing, values),
        Dtype::I8 => each::<i8>(closing, values),
        Dtype::I16 => each::<i16>(closing, values),
        Dtype::I32 => each::<i32>(closing, values),
        Dtype::I64 => each::<i64>(closing, values),
        Dtype::U16 => each::<u16>(closing, values),
        Dtype::U32 => each::<u32>(closing, values),
        Dtype::U64 => each::<u64>(closing, values),
        Dtype::Bool | Dtype::Bytes => {
            debug_assert!(closing == Closing::Keep, "requests for such means and sums are refused");
        }
    }
}

fn each<T: Scalable>(closing: Closing, values: &mut [u8]) {
    match closing {
        Closing::Keep => {}
        Closing::Divide(count) => map::<T>(values, |v| v.divided(count)),
        Closing::Scale(factor) => map::<T>(values, |v| v.scaled(factor)),
    }
}

/// As [`close`], of sums in float32.
pub(crate) fn close_f32(closing: Closing, values: &mut [f32]) {
    match closing {
        Closing::Keep => {}
        Closing::Divide(count) => values.iter_mut().for_each(|v| *v = v.divided(count)),
        Closing::Scale(factor) => values.iter_mut().for_each(|v| *v = v.scaled(factor)),
    }
}

/// The last contribution: `accumulator[i] = close(accumulator[i] + source[i])` in one pass, with the bits that
/// [`super::combine`] and [`close`] give one after the other. The shorter length counts.
pub(crate) fn add_last(dtype: Dtype, closing: Closing, accumulator: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { add_last_avx2(dtype, closing, accumulator, source) };
    }
    add_last_any(dtype, closing, accumulator, source);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_last_avx2(dtype: Dtype, closing: Closing, accumulator: &mut [u8], source: &[u8]) {
    add_last_any(dtype, closing, accumulator, source);
}

#[inline(always)]
pub(super) fn add_last_any(dtype: Dtype, closing: Closing, accumulator: &mut [u8], source: &[u8]) {
    match dtype {
        Dtype::F32 => add_each::<f32>(closing, accumulator, source),
        Dtype::F64 => add_each::<f64>(closing, accumulator, source),
        Dtype::U8 => add_each::<u8>(closing, accumulator, source),
        Dtype::I8 => add_each::<i8>(closing, accumulator, source),
        Dtype::I16 => add_each::<i16>(closing, accumulator, source),
        Dtype::I32 => add_each::<i32>(closing, accumulator, source),
        Dtype::I64 => add_each::<i64>(closing, accumulator, source),
        Dtype::U16 => add_each::<u16>(closing, accumulator, source),
        Dtype::U32 => add_each::<u32>(closing, accumulator, source),
        Dtype::U64 => add_each::<u64>(closing, accumulator, source),
        // Sums of halves live in float32 ([`crate::halves`]), which closes them itself.
        Dtype::F16 | Dtype::Bf16 | Dtype::Bool | Dtype::Bytes => {
            super::combine_any(dtype, ReduceOp::Sum, accumulator, source);
            close(dtype, closing, accumulator);
        }
    }
}

#[inline(always)]
fn add_each<T: Scalable>(closing: Closing, accumulator: &mut [u8], source: &[u8]) {
    match closing {
        Closing::Keep => fold::<T>(accumulator, source, T::add),
        Closing::Divide(count) => fold::<T>(accumulator, source, |a, s| a.add(s).divided(count)),
        Closing::Scale(factor) => fold::<T>(accumulator, source, |a, s| a.add(s).scaled(factor)),
    }
}

/// `values[i] -= factor * source[i]` over elements of a float dtype, halves in float32; zero where that is not finite, and the half
/// with the most where it is only too large for one.
pub(crate) fn take_away(dtype: Dtype, values: &mut [u8], source: &[u8], factor: f64) {
    let single = |v: f32, s: f32| finite_or_zero(v - factor as f32 * s);
    match dtype {
        Dtype::F32 => fold::<f32>(values, source, single),
        Dtype::F64 => fold::<f64>(values, source, |v, s| {
            let left = v - factor * s;
            if left.is_finite() {
                left
            } else {
                0.0
            }
        }),
        Dtype::F16 | Dtype::Bf16 => {
            let (mut other, most) = ([0.0; BLOCK], largest(dtype));
            for (block, source) in values.chunks_mut(2 * BLOCK).zip(source.chunks(2 * BLOCK)) {
                let other = &mut other[..block.len() / 2];
                widen(dtype, source, other);
                in_float32(dtype, block, |wide| {
                    wide.iter_mut().zip(&*other).for_each(|(v, s)| *v = single(*v, *s).clamp(-most, most));
                });
            }
        }
        _ => debug_assert!(false, "only floats tolerate loss"),
    }
}

/// Zero in place of what is not finite.
pub(crate) fn drop_infinite(dtype: Dtype, values: &mut [u8]) {
    // Its exponent is all ones.
    let finite_half = |exponent: u16| move |bits: u16| if bits & exponent == exponent { 0 } else { bits };
    match dtype {
        Dtype::F32 => map::<f32>(values, finite_or_zero),
        Dtype::F64 => map::<f64>(values, |v| if v.is_finite() { v } else { 0.0 }),
        Dtype::F16 => map::<u16>(values, finite_half(0x7C00)),
        Dtype::Bf16 => map::<u16>(values, finite_half(0x7F80)),
        _ => debug_assert!(false, "only floats tolerate loss"),
    }
}

fn finite_or_zero(value: f32) -> f32 {
    if value.is_finite() {
        value
    } else {
        0.0
    }
}

fn in_float32(dtype: Dtype, values: &mut [u8], change: impl Fn(&mut [f32])) {
    let mut wide = [0.0; BLOCK];
    for block in values.chunks_mut(2 * BLOCK) {
        let wide = &mut wide[..block.len() / 2];
        widen(dtype, block, wide);
        change(wide);
        narrow(dtype, wide, block);
    }
}
