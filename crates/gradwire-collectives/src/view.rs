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

    /// Asks the processor for what of `range` is in the view, which will be used soon, and does not wait for it.
    pub(crate) fn fetch(&self, range: Range<usize>) {
        for at in (range.start..range.end.min(self.bytes)).step_by(LINE_BYTES) {
            fetch_line(self.pointer.wrapping_add(at));
        }
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

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Brings a cache line near the processor, into the second level: of what is fetched ahead, the first one holds too little.
#[inline]
fn fetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing and changes nothing, whatever the address; every x86-64 has it.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T1};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    // Miri has no assembly.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that reads nothing and changes nothing, whatever the address.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri)))))]
    let _ = at;
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

/// Memory of the group's own that views can lend: what is sent in place of a tensor.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    lines: Vec<Line>,
}

/// A cache line: vectors of the widest kind then never straddle two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Buffer {
    /// A view of its first `bytes` bytes, which are whatever they were.
    ///
    /// # Safety
    /// The buffer is neither dropped nor lent again while any copy of the view is used.
    pub(crate) unsafe fn lend(&mut self, bytes: usize) -> View {
        self.lines.resize(bytes.div_ceil(size_of::<Line>()), Line([0; 64]));
        View { pointer: self.lines.as_mut_ptr().cast(), bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_lends_as_much_as_is_asked_for_at_a_cache_line() {
        let mut buffer = Buffer::default();
        for bytes in [1, 64, 1_000, 3] {
            // SAFETY: each view is used before the next one is lent.
            let mut view = unsafe { buffer.lend(bytes) };
            view.as_mut_slice().fill(7);
            assert!(view.len() == bytes && view.pointer as usize % 64 == 0);
        }
    }

    #[test]
    fn what_is_fetched_may_lie_behind_the_end() {
        let mut memory = vec![0_u8; 100];
        // SAFETY: `memory` outlives the view.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        for range in [0..100, 64..usize::MAX, 100..200, 500..600] {
            view.fetch(range);
        }
        View::EMPTY.fetch(0..64);
    }

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
