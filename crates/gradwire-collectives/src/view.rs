//! Memory of the caller's tensor. All unsafe access to it is in this file.

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
}
