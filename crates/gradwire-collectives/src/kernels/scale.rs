//! The last step of a reduction: a mean divides, a scaled sum multiplies.

use super::element::{fold, map, Bits, Element};
use super::half::{narrow, widen};
use crate::Dtype;

/// Elements of a half that are scaled at once, on the stack.
const BLOCK: usize = 64;

/// `values[i] /= count` over elements of `dtype`. Floats are divided, not multiplied by a reciprocal, so that a
/// mean of equal values is that value; integers truncate towards zero.
pub(crate) fn divide(dtype: Dtype, values: &mut [u8], count: u16) {
    match dtype {
        Dtype::F32 => map::<f32>(values, |v| v / f32::from(count)),
        Dtype::F64 => map::<f64>(values, |v| v / f64::from(count)),
        Dtype::F16 | Dtype::Bf16 => in_float32(dtype, values, |wide| divide_f32(wide, count)),
        Dtype::U8 => integers::<u8>(values, count),
        Dtype::I8 => integers::<i8>(values, count),
        Dtype::I16 => integers::<i16>(values, count),
        Dtype::I32 => integers::<i32>(values, count),
        Dtype::I64 => integers::<i64>(values, count),
        Dtype::U16 => integers::<u16>(values, count),
        Dtype::U32 => integers::<u32>(values, count),
        Dtype::U64 => integers::<u64>(values, count),
        Dtype::Bool | Dtype::Bytes => debug_assert!(false, "requests for such means are refused"),
    }
}

/// `values[i] *= factor`, floats in their own precision (halves in float32), integers times a whole factor and wrapped.
pub(crate) fn scale(dtype: Dtype, values: &mut [u8], factor: f64) {
    match dtype {
        Dtype::F32 => map::<f32>(values, |v| v * factor as f32),
        Dtype::F64 => map::<f64>(values, |v| v * factor),
        Dtype::F16 | Dtype::Bf16 => in_float32(dtype, values, |wide| scale_f32(wide, factor)),
        Dtype::U8 => wrapping::<u8>(values, factor),
        Dtype::I8 => wrapping::<i8>(values, factor),
        Dtype::I16 => wrapping::<i16>(values, factor),
        Dtype::I32 => wrapping::<i32>(values, factor),
        Dtype::I64 => wrapping::<i64>(values, factor),
        Dtype::U16 => wrapping::<u16>(values, factor),
        Dtype::U32 => wrapping::<u32>(values, factor),
        Dtype::U64 => wrapping::<u64>(values, factor),
        Dtype::Bool | Dtype::Bytes => debug_assert!(false, "requests for such sums are refused"),
    }
}

/// `values[i] /= count`.
pub(crate) fn divide_f32(values: &mut [f32], count: u16) {
    values.iter_mut().for_each(|v| *v /= f32::from(count));
}

/// `values[i] *= factor`.
pub(crate) fn scale_f32(values: &mut [f32], factor: f64) {
    values.iter_mut().for_each(|v| *v *= factor as f32);
}

/// `values[i] -= factor * source[i]` over elements of a float dtype, halves in float32; zero where that is not finite.
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
            let mut other = [0.0; BLOCK];
            for (block, source) in values.chunks_mut(2 * BLOCK).zip(source.chunks(2 * BLOCK)) {
                let other = &mut other[..block.len() / 2];
                widen(dtype, source, other);
                in_float32(dtype, block, |wide| {
                    wide.iter_mut().zip(&*other).for_each(|(v, s)| *v = single(*v, *s));
                });
            }
        }
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

fn wrapping<T: Bits>(values: &mut [u8], factor: f64) {
    let factor = T::wrapped(factor as i64);
    map::<T>(values, |v| v.multiply(factor));
}

/// Through `i128`, which holds every integer dtype and every count: a mean happens once for each element.
fn integers<T: Element + Into<i128> + TryFrom<i128>>(values: &mut [u8], count: u16) {
    map::<T>(values, |v| T::try_from(v.into() / i128::from(count.max(1))).unwrap_or(v));
}
