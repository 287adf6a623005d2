//! Element kernels: how one packet's payload meets the accumulator, straight from the receive buffer.
//!
//! Called for every payload of a reduction, so the rate of `combine` bounds the rate of an all-reduce. Payloads
//! come unaligned out of network buffers: elements are read as little-endian bytes in loops of fixed stride,
//! which the compiler turns into vector code; on x86-64 each entry point is compiled a second time with AVX2 and
//! chosen at run time. Halves are widened to float32 in small blocks on the stack.

mod element;
mod hadamard;
mod half;
mod magnitude;
mod scale;

pub(crate) use self::half::{accumulate, join, narrow, split, widen};
pub use hadamard::{Hadamard, WholeHadamard};
pub(crate) use magnitude::{gather_magnitudes, mean_magnitude};
pub(crate) use scale::{add_last, close, close_f32, drop_infinite, take_away, Closing};

use crate::{Dtype, ReduceOp};
use element::{fold, Bits, Element};

/// `accumulator[i] = accumulator[i] (reduce) source[i]` over whole elements of `dtype`; both `[bytes]`, the shorter
/// length counts. Sums of halves are rounded to the dtype here; [`accumulate`] keeps them in float32.
pub(crate) fn combine(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { combine_avx2(dtype, reduce, accumulator, source) };
    }
    combine_any(dtype, reduce, accumulator, source);
}

/// # Safety
/// The processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn combine_avx2(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    combine_any(dtype, reduce, accumulator, source);
}

#[inline(always)]
fn combine_any(dtype: Dtype, reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    match dtype {
        Dtype::F32 => numbers::<f32>(reduce, accumulator, source),
        Dtype::F64 => numbers::<f64>(reduce, accumulator, source),
        Dtype::F16 => half::combine(dtype, reduce, accumulator, source),
        Dtype::Bf16 => numbers::<half::Bf16>(reduce, accumulator, source),
        Dtype::U8 => integers::<u8>(reduce, accumulator, source),
        Dtype::I8 => integers::<i8>(reduce, accumulator, source),
        Dtype::I16 => integers::<i16>(reduce, accumulator, source),
        Dtype::I32 => integers::<i32>(reduce, accumulator, source),
        Dtype::I64 => integers::<i64>(reduce, accumulator, source),
        Dtype::U16 => integers::<u16>(reduce, accumulator, source),
        Dtype::U32 => integers::<u32>(reduce, accumulator, source),
        Dtype::U64 => integers::<u64>(reduce, accumulator, source),
        Dtype::Bool => booleans(reduce, accumulator, source),
        Dtype::Bytes => debug_assert!(false, "requests with bytes to reduce are refused"),
    }
}

#[inline(always)]
fn numbers<T: Element>(reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    match reduce {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum(_) => fold::<T>(accumulator, source, T::add),
        ReduceOp::Product => fold::<T>(accumulator, source, T::multiply),
        ReduceOp::Min => fold::<T>(accumulator, source, T::least),
        ReduceOp::Max => fold::<T>(accumulator, source, T::largest),
        ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => {
            debug_assert!(false, "requests with bits of floats are refused");
        }
    }
}

#[inline(always)]
fn integers<T: Bits>(reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    match reduce {
        ReduceOp::BitAnd => fold::<T>(accumulator, source, T::and),
        ReduceOp::BitOr => fold::<T>(accumulator, source, T::or),
        ReduceOp::BitXor => fold::<T>(accumulator, source, T::xor),
        _ => numbers::<T>(reduce, accumulator, source),
    }
}

#[inline(always)]
fn booleans(reduce: ReduceOp, accumulator: &mut [u8], source: &[u8]) {
    let truth = |value: u8| u8::from(value != 0);
    match reduce {
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => {
            fold::<u8>(accumulator, source, |a, b| truth(a) & truth(b));
        }
        ReduceOp::BitXor => fold::<u8>(accumulator, source, |a, b| truth(a) ^ truth(b)),
        _ => fold::<u8>(accumulator, source, |a, b| truth(a | b)),
    }
}

#[cfg(test)]
mod tests;
