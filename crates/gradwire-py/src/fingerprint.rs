//! Fingerprints of tensors, block by block: equal bits have equal ones on every rank, and different bits do not by chance of
//! one in 2^64 for each block.

use crate::errors::invalid_request;
use pyo3::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

/// XXH3 of each block of memory, the last one shorter; `memory` is address and length in bytes. Reads as fast as memory
/// does, without the GIL. Two's complement, because torch's all-gather has signed integers.
#[pyfunction]
pub(crate) fn fingerprints(py: Python<'_>, memory: (usize, usize), block_bytes: usize) -> PyResult<Vec<i64>> {
    let (address, bytes) = memory;
    if block_bytes == 0 || (address == 0 && bytes > 0) {
        return Err(invalid_request(py, format!("fingerprints of {bytes} bytes in blocks of {block_bytes}")));
    }
    if bytes == 0 {
        return Ok(Vec::new());
    }
    Ok(py.detach(|| {
        // SAFETY: the adapter passes the address of a contiguous CPU tensor that it holds during the call. Somebody who
        // writes to it meanwhile gets the fingerprint of neither state, as with any read of a tensor in torch.
        let memory = unsafe { std::slice::from_raw_parts(address as *const u8, bytes) };
        memory.chunks(block_bytes).map(|block| xxh3_64(block) as i64).collect()
    }))
}
