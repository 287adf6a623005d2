//! The randomised Hadamard transform on tensors in host memory: what kernels elsewhere are compared with, and benchmarks.

use crate::errors::invalid_request;
use gradwire_engine::collectives::{Dtype, Hadamard, WholeHadamard};
use pyo3::prelude::*;

/// Rows and elements of the matrix that a tensor of `elems` elements is rotated as; `None`: it is too small.
#[pyfunction]
pub(crate) fn hadamard_shape(elems: usize) -> Option<(usize, usize)> {
    Hadamard::of(elems).map(|hadamard| (hadamard.block(), hadamard.padded()))
}

/// Rotates `source`, `[elems]` of the dtype with this code, into `target`, `[padded]`, or with `inverse` the other way.
/// Both are address and length in bytes.
#[pyfunction]
#[pyo3(signature = (dtype, seed, source, target, inverse))]
pub(crate) fn hadamard(
    py: Python<'_>,
    dtype: u8,
    seed: u64,
    source: (usize, usize),
    target: (usize, usize),
    inverse: bool,
) -> PyResult<()> {
    let dtype = rotatable(dtype);
    let bucket = if inverse { target } else { source };
    let padded = if inverse { source } else { target };
    let plan = dtype.and_then(|dtype| Some((dtype, Hadamard::of(bucket.1 / dtype.bytes())?)));
    let Some((dtype, hadamard)) =
        plan.filter(|(dtype, hadamard)| padded.1 == hadamard.padded() * dtype.bytes())
    else {
        let problem = format!("{} bytes cannot be rotated as {} bytes", bucket.1, padded.1);
        return Err(invalid_request(py, problem));
    };
    py.detach(|| {
        // SAFETY: the adapter passes the addresses of two contiguous CPU tensors that it holds during the call, the second
        // of which nobody else knows.
        let (source, target) = unsafe {
            (
                std::slice::from_raw_parts(source.0 as *const u8, source.1),
                std::slice::from_raw_parts_mut(target.0 as *mut u8, target.1),
            )
        };
        let mut scratch = Vec::new();
        if inverse {
            hadamard.restore(dtype, seed, source, target, &mut scratch);
        } else {
            hadamard.spread(dtype, seed, source, target, &mut scratch);
        }
    });
    Ok(())
}

/// Rotates `bucket`, address and length in bytes of a tensor of the dtype with this code, where it is, as a reduction does with large ones;
/// with `inverse` the other way.
#[pyfunction]
#[pyo3(signature = (dtype, seed, bucket, inverse))]
pub(crate) fn hadamard_in_place(
    py: Python<'_>,
    dtype: u8,
    seed: u64,
    bucket: (usize, usize),
    inverse: bool,
) -> PyResult<()> {
    let plan = rotatable(dtype).and_then(|dtype| Some((dtype, WholeHadamard::of(bucket.1 / dtype.bytes())?)));
    let Some((dtype, hadamard)) = plan.filter(|(dtype, _)| bucket.1 % dtype.bytes() == 0) else {
        return Err(invalid_request(py, format!("{} bytes cannot be rotated where they are", bucket.1)));
    };
    py.detach(|| {
        // SAFETY: the adapter passes the address of a contiguous CPU tensor that it holds during the call and nobody else uses.
        let bucket = unsafe { std::slice::from_raw_parts_mut(bucket.0 as *mut u8, bucket.1) };
        let mut scratch = Vec::new();
        if inverse {
            hadamard.restore(dtype, seed, bucket, &mut scratch);
        } else {
            hadamard.spread(dtype, seed, bucket, &mut scratch);
        }
    });
    Ok(())
}

fn rotatable(code: u8) -> Option<Dtype> {
    Dtype::from_code(code).filter(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16))
}
