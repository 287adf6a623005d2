//! Memory of the caller's tensor. All unsafe access to it is in this file.

use std::ops::Range;

/// A flat, contiguous piece of memory that the caller lends for the duration of one collective.
///
/// The memory must stay valid, and must not be read or written by anybody else, until the collective's
/// [`crate::GroupEvent::Done`] has been polled. The engine ties it to the handle that keeps the tensor alive.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: a view is an address and a length; `View::new` obliges the caller to exclusive, thread-independent
// access for as long as any method is used.
unsafe impl Send for View {}

impl View {
    /// No memory.
    pub const EMPTY: Self = Self { pointer: std::ptr::NonNull::dangling().as_ptr(), bytes: 0 };

    /// A view of `bytes` bytes at `pointer`.
    ///
    /// # Safety
    /// `pointer` is valid for reads and writes of `bytes` bytes, and nobody else touches them, until the
    /// collective that the view is given to is done.
    #[must_use]
    pub const unsafe fn new(pointer: *mut u8, bytes: usize) -> Self {
        Self { pointer, bytes }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes, to read.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `View::new` promises validity and exclusive use.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, to write.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `View::new` promises validity and exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// The part `range` of it.
    ///
    /// # Panics
    /// When `range` is not inside: the caller has checked sizes at submission.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.bytes, "{range:?} of {} bytes", self.bytes);
        Self { pointer: self.pointer.wrapping_add(range.start), bytes: range.len() }
    }

    /// Whether both are the same memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.pointer == other.pointer && self.bytes == other.bytes
    }

    /// Whether they share at least one byte.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.pointer as usize, other.pointer as usize);
        !self.is_empty() && !other.is_empty() && a < b + other.bytes && b < a + self.bytes
    }

    /// Copies `source`, which has the same length and may be the same memory: then nothing happens.
    ///
    /// # Panics
    /// When lengths differ: the caller has checked sizes at submission.
    pub(crate) fn copy_from(&mut self, source: &Self) {
        assert_eq!(self.bytes, source.bytes, "copy between views of different sizes");
        if !self.is(source) {
            // SAFETY: `View::new` promises validity of both; `copy` allows them to overlap, and no reference to
            // either exists here.
            unsafe { std::ptr::copy(source.pointer, self.pointer, self.bytes) };
        }
    }
}

/// Memory of the group itself, for collectives that it calls on its own. Only views of it are ever used.
#[derive(Debug)]
pub(crate) struct OwnMemory(*mut [u8]);

// SAFETY: as for `View`; the allocation belongs to this value alone.
unsafe impl Send for OwnMemory {}

impl OwnMemory {
    /// `bytes` bytes of zero.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        Self(Box::into_raw(vec![0; bytes].into_boxed_slice()))
    }

    /// A view of all of it, good as long as `self` lives. Whoever takes it keeps to [`View::new`]: no other view is
    /// used while a collective has one.
    pub(crate) fn view(&self) -> View {
        View { pointer: self.0.cast(), bytes: self.0.len() }
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` and given back nowhere else.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_know_whether_they_share_memory() {
        let mut memory = vec![0_u8; 10];
        // SAFETY: `memory` outlives every view of it here.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        let (front, back) = (view.part(&(0..5)), view.part(&(5..10)));
        assert!(!front.overlaps(&back) && view.overlaps(&front) && front.is(&view.part(&(0..5))));
        assert!(!view.part(&(3..3)).overlaps(&view));
        assert!(!View::EMPTY.overlaps(&view));
    }
}
