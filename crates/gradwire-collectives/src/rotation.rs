//! A bucket that is rotated before it is reduced, and rotated back afterwards (ULTIMA section 3.4).
//!
//! Sits around a collective: the schedule reduces a bucket of our own, `[padded]` elements of the caller's dtype, and does not know
//! that its values are sums of many of the caller's. So every schedule can be rotated, loss is counted for each packet as
//! always, and the mean over contributions scales each value by what arrived. All ranks turn back the same bits with the
//! same arithmetic, so replicas stay identical.
//!
//! The transform is linear: what is owed of the rotated bucket, rotated back, is what is owed of the caller's. It is kept
//! where it will go, in the caller's residual. A small bucket is rotated into a padded copy; one from 2^17 elements on is turned in
//! the caller's output, so that a large one costs no memory.

use crate::kernels;
use crate::memory::Pool;
use crate::view::Buffer;
use crate::{Collective, Dtype, Fill, Hadamard, Request, View, WholeHadamard};

/// See the module.
#[derive(Debug)]
pub(crate) struct RotatedBucket {
    dtype: Dtype,
    seed: u64,
    /// The caller's memory.
    input: View,
    output: View,
    residual: View,
    form: Form,
    /// Something did not count: it is in the residual and beyond.
    has_lost: bool,
}

/// What is reduced in place of the caller's bucket.
#[derive(Debug)]
enum Form {
    Padded(Padded),
    /// The caller's output.
    Whole(WholeHadamard),
}

/// A copy with padding.
#[derive(Debug)]
struct Padded {
    hadamard: Hadamard,
    bucket: View,
    /// Own the memory of `bucket`, and of `beyond`.
    buffer: Buffer,
    /// Goes on where the residual ends.
    beyond: View,
    #[expect(dead_code, reason = "it owns the memory")]
    padding: Buffer,
}

/// The seed of the rotation of collective `sequence`: of every rank the same, of every collective another one.
pub(crate) fn seed(group: u64, sequence: u64) -> u64 {
    group ^ sequence.wrapping_mul(ODD)
}

/// Whether holes in results can be filled as the policy says. What another output held before the call is not known rotated.
pub(crate) fn can_fill(request: &Request) -> bool {
    request.policy.gather.fill != Fill::Previous
}

/// Elements that are sent for a rotated bucket of `elems`.
pub(crate) fn elems(elems: usize) -> usize {
    match (WholeHadamard::of(elems), Hadamard::of(elems)) {
        (None, Some(hadamard)) => hadamard.padded(),
        _ => elems,
    }
}

impl RotatedBucket {
    /// Puts a rotated bucket in place of the caller's; importance is not told, because rotated packets are all
    /// alike. `None`, and nothing changed: the request is exact, its dtype is not rotated, or it is too small.
    pub(crate) fn replace(request: &mut Request, seed: u64, pool: &mut Pool) -> Option<Self> {
        let is_reduction = matches!(request.collective, Collective::AllReduce { .. });
        let is_rotated = matches!(request.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16);
        if !is_reduction || !is_rotated || request.policy.is_exact() || !can_fill(request) {
            return None;
        }
        let elems = request.output.len() / request.dtype.bytes();
        let form = match WholeHadamard::of(elems) {
            Some(whole) => Form::Whole(whole),
            None => Form::Padded(Padded::new(Hadamard::of(elems)?, request, pool)),
        };
        let Request { dtype, input, output, residual, .. } = *request;
        let bucket = match &form {
            Form::Padded(padded) => padded.bucket,
            Form::Whole(_) => output,
        };
        (request.input, request.output) = (bucket, bucket);
        request.tags.importance = None;
        Some(Self { dtype, seed, input, output, residual, form, has_lost: false })
    }

    /// Elements of the bucket that is reduced.
    pub(crate) fn elems(&self) -> u64 {
        elems(self.output.len() / self.dtype.bytes()) as u64
    }

    /// Rotates the caller's input.
    pub(crate) fn spread(&mut self, scratch: &mut Vec<f32>) {
        let Self { dtype, seed, input, output, form, .. } = self;
        match form {
            Form::Padded(Padded { hadamard, bucket, .. }) => {
                hadamard.spread(*dtype, *seed, input.as_slice(), bucket.as_mut_slice(), scratch);
            }
            Form::Whole(whole) => {
                output.copy_from(input);
                whole.spread(*dtype, *seed, output.as_mut_slice(), scratch);
            }
        }
    }

    /// Rotates the result back into the caller's output, and then what did not count into its residual.
    ///
    /// # Loss
    /// Each element of a residual is its part of what did not count; where everything did, the residual is left as it was.
    pub(crate) fn restore(&mut self, scratch: &mut Vec<f32>) {
        let Self { dtype, seed, output, residual, form, has_lost, .. } = self;
        match form {
            Form::Padded(Padded { hadamard, bucket, beyond, .. }) => {
                hadamard.restore(*dtype, *seed, bucket.as_slice(), output.as_mut_slice(), scratch);
                if *has_lost {
                    let (inside, behind) = bucket.as_mut_slice().split_at_mut(residual.len());
                    inside.copy_from_slice(residual.as_slice());
                    behind.copy_from_slice(beyond.as_slice());
                    hadamard.restore(*dtype, *seed, bucket.as_slice(), residual.as_mut_slice(), scratch);
                }
            }
            Form::Whole(whole) => {
                whole.restore(*dtype, *seed, output.as_mut_slice(), scratch);
                if *has_lost {
                    whole.restore(*dtype, *seed, residual.as_mut_slice(), scratch);
                }
            }
        }
        if *has_lost {
            // Sums of what is owed: some may be too large for the dtype.
            kernels::drop_infinite(*dtype, residual.as_mut_slice());
        }
    }

    /// Something did not count: the residual now holds rotated values, zero where nothing was lost.
    pub(crate) fn begin_residual(&mut self) {
        if !self.residual.is_empty() && !std::mem::replace(&mut self.has_lost, true) {
            self.residual.as_mut_slice().fill(0);
            self.beyond().as_mut_slice().fill(0);
        }
    }

    /// The memory of what did not count of the padding.
    pub(crate) fn beyond(&self) -> View {
        match &self.form {
            Form::Padded(padded) => padded.beyond,
            Form::Whole(_) => View::EMPTY,
        }
    }

    /// Memory for the next one.
    pub(crate) fn into_buffer(self) -> Option<Buffer> {
        match self.form {
            Form::Padded(padded) => Some(padded.buffer),
            Form::Whole(_) => None,
        }
    }
}

impl Padded {
    fn new(hadamard: Hadamard, request: &Request, pool: &mut Pool) -> Self {
        let mut buffer = pool.rotated.pop().unwrap_or_default();
        // SAFETY: the buffer stays beside the view until the collective is over.
        let bucket = unsafe { buffer.lend(hadamard.padded() * request.dtype.bytes()) };
        let mut padding = Buffer::default();
        let padding_bytes = if request.residual.is_empty() { 0 } else { bucket.len() - request.output.len() };
        // SAFETY: as above.
        let beyond = unsafe { padding.lend(padding_bytes) };
        Self { hadamard, bucket, buffer, beyond, padding }
    }
}

/// The odd number nearest to 2^64 over the golden ratio: neighbours differ in about half of their bits.
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Policy};
    use std::time::Duration;

    fn view(bytes: &mut [u8]) -> View {
        // SAFETY: each test keeps its memory until the bucket is gone.
        unsafe { View::new(bytes.as_mut_ptr(), bytes.len()) }
    }

    #[test]
    fn nothing_is_owed_where_what_is_owed_has_become_infinite() {
        const ELEMS: usize = 2048;
        let half = |value: f32| ::half::f16::from_f32(value).to_le_bytes();
        let (mut data, mut owed) = (half(1.0).repeat(ELEMS), half(0.0).repeat(ELEMS));
        let collective = Collective::AllReduce { algorithm: Algorithm::Transpose };
        let mut request = Request {
            input: view(&mut data),
            output: view(&mut data),
            residual: view(&mut owed),
            policy: Policy::AUTO,
            ..Request::exact(collective, Dtype::F16, Duration::from_secs(1))
        };
        let mut rotated =
            RotatedBucket::replace(&mut request, 1, &mut Pool::default()).expect("large enough");
        rotated.spread(&mut Vec::new());
        rotated.begin_residual();
        // All that a column owes comes together in one of its elements, four times as much.
        request.residual.as_mut_slice().copy_from_slice(&half(60_000.0).repeat(ELEMS));
        rotated.restore(&mut Vec::new());
        let is_zero = |half: &[u8]| u16::from_le_bytes([half[0], half[1]]) & 0x7FFF == 0;
        assert!(owed.chunks_exact(2).all(is_zero), "it was the only one that was not zero");
    }
}
