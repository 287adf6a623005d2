//! A bucket that is rotated before it is reduced, and rotated back afterwards (ULTIMA section 3.4).
//!
//! Sits around a collective: the schedule reduces a bucket of our own, `[padded]` elements of the caller's dtype, and does not know
//! that its values are sums of many of the caller's. So every schedule can be rotated, loss is counted for each packet as
//! always, and the mean over contributions scales each value by what arrived. All ranks turn back the same bits with the
//! same arithmetic, so replicas stay identical.
//!
//! The transform is linear: what is owed of the rotated bucket, rotated back, is what is owed of the caller's. It is kept
//! where it will go, in the caller's residual, so that a rotated reduction costs the memory of one padded bucket.

use crate::memory::Pool;
use crate::view::Buffer;
use crate::{Collective, Dtype, Fill, Hadamard, Request, View};

/// See the module.
#[derive(Debug)]
pub(crate) struct RotatedBucket {
    hadamard: Hadamard,
    dtype: Dtype,
    seed: u64,
    /// The caller's memory.
    input: View,
    output: View,
    residual: View,
    /// What is reduced in its place.
    bucket: View,
    /// Own the memory of `bucket`, and of `beyond`.
    buffer: Buffer,
    /// Goes on where the residual ends.
    beyond: View,
    #[expect(dead_code, reason = "it owns the memory")]
    padding: Buffer,
    /// Something did not count: it is in the residual and beyond.
    has_lost: bool,
}

/// The seed of the rotation of collective `sequence`: of every rank the same, of every collective another one.
pub(crate) fn seed(group: u64, sequence: u64) -> u64 {
    group ^ sequence.wrapping_mul(ODD)
}

/// Whether holes in results can be filled as the policy says. What another output held before the call is not known rotated.
pub(crate) fn can_fill(request: &Request) -> bool {
    request.policy.gather.fill != Fill::Previous
}

impl RotatedBucket {
    /// Puts a bucket of our own in place of the caller's, in place; importance is not told, because rotated packets are all
    /// alike. `None`, and nothing changed: the request is exact, its dtype is not rotated, or it is too small.
    pub(crate) fn replace(request: &mut Request, seed: u64, pool: &mut Pool) -> Option<Self> {
        let is_reduction = matches!(request.collective, Collective::AllReduce { .. });
        let is_rotated = matches!(request.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        if !is_reduction || !is_rotated || request.policy.is_exact() || !can_fill(request) {
            return None;
        }
        let hadamard = Hadamard::of(request.output.len() / request.dtype.bytes())?;
        let mut buffer = pool.rotated.pop().unwrap_or_default();
        // SAFETY: the buffer stays beside the view until the collective is over.
        let bucket = unsafe { buffer.lend(hadamard.padded() * request.dtype.bytes()) };
        let Request { dtype, input, output, residual, .. } = *request;
        let mut padding = Buffer::default();
        let padding_bytes = if residual.is_empty() { 0 } else { bucket.len() - output.len() };
        // SAFETY: as above.
        let beyond = unsafe { padding.lend(padding_bytes) };
        (request.input, request.output) = (bucket, bucket);
        request.tags.importance = None;
        let has_lost = false;
        Some(Self {
            hadamard,
            dtype,
            seed,
            input,
            output,
            residual,
            bucket,
            buffer,
            beyond,
            padding,
            has_lost,
        })
    }

    /// Elements of the bucket that is reduced.
    pub(crate) fn elems(&self) -> u64 {
        self.hadamard.padded() as u64
    }

    /// Rotates the caller's input.
    pub(crate) fn spread(&mut self, scratch: &mut Vec<f32>) {
        let Self { hadamard, dtype, seed, input, bucket, .. } = self;
        hadamard.spread(*dtype, *seed, input.as_slice(), bucket.as_mut_slice(), scratch);
    }

    /// Rotates the result back into the caller's output, and then what did not count into its residual.
    ///
    /// # Loss
    /// Each element of a residual is its part of what did not count; where everything did, the residual is left as it was.
    pub(crate) fn restore(&mut self, scratch: &mut Vec<f32>) {
        let Self { hadamard, dtype, seed, output, residual, bucket, has_lost, beyond, .. } = self;
        hadamard.restore(*dtype, *seed, bucket.as_slice(), output.as_mut_slice(), scratch);
        if *has_lost {
            let (inside, behind) = bucket.as_mut_slice().split_at_mut(residual.len());
            inside.copy_from_slice(residual.as_slice());
            behind.copy_from_slice(beyond.as_slice());
            hadamard.restore(*dtype, *seed, bucket.as_slice(), residual.as_mut_slice(), scratch);
        }
    }

    /// Something did not count: the residual now holds rotated values, zero where nothing was lost.
    pub(crate) fn begin_residual(&mut self) {
        if !self.residual.is_empty() && !std::mem::replace(&mut self.has_lost, true) {
            self.residual.as_mut_slice().fill(0);
            self.beyond.as_mut_slice().fill(0);
        }
    }

    /// The memory of what did not count of the padding.
    pub(crate) fn beyond(&self) -> View {
        self.beyond
    }

    /// The memory, for the next one.
    pub(crate) fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

/// The odd number nearest to 2^64 over the golden ratio: neighbours differ in about half of their bits.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
