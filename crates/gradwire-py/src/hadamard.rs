//! The randomised Hadamard transform on tensors in host memory: what kernels elsewhere are compared with, and benchmarks.

use crate::errors::invalid_request;
use gradwire_engine::collectives::{Dtype, Hadamard};
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
    let dtype =
        Dtype::from_code(dtype).filter(|dtype| matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16));
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
