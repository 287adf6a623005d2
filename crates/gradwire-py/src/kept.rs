//! What keeps the memory of calls alive, on its way back to whoever holds the GIL.
//!
//! The network thread ends calls without the GIL. What it drops there pyo3 would queue under a lock of its own, which every method of a native class
//! takes next. A program that forks meanwhile has a child in which nobody releases that lock: its first method, the hook of the fork, would wait
//! for ever, and with it the fork itself. Here nothing is held at any moment: objects are pushed onto a list, and taken from it all at once.

use pyo3::prelude::*;
use std::sync::atomic::{AtomicPtr, Ordering};

/// What has been given back, the latest first.
static GIVEN_BACK: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

struct Entry {
    _objects: Vec<Py<PyAny>>,
    /// Owned by the list as the entry itself is.
    next: *mut Entry,
}

/// Objects that a call needs. Whoever drops it need not hold the GIL: they go with the next [`release`].
pub(crate) struct Kept(*mut Entry);

// SAFETY: the entry is this value's alone, and `Py` may go to other threads.
unsafe impl Send for Kept {}

impl Kept {
    pub(crate) fn new(objects: Vec<Py<PyAny>>) -> Self {
        Self(Box::into_raw(Box::new(Entry { _objects: objects, next: std::ptr::null_mut() })))
    }
}

impl Drop for Kept {
    /// Takes no lock and allocates nothing.
    fn drop(&mut self) {
        let mut first = GIVEN_BACK.load(Ordering::Relaxed);
        loop {
            // SAFETY: made by `new`, and not on the list yet.
            unsafe { (*self.0).next = first };
            match GIVEN_BACK.compare_exchange_weak(first, self.0, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => first = now,
            }
        }
    }
}

/// Drops the objects of all calls that have ended. What that runs may make calls and come here again.
pub(crate) fn release(_: Python<'_>) {
    let mut next = GIVEN_BACK.swap(std::ptr::null_mut(), Ordering::Acquire);
    while !next.is_null() {
        // SAFETY: made by `Kept::new`; the list has been taken, so that it is nobody else's.
        let entry = unsafe { Box::from_raw(next) };
        next = entry.next;
    }
}
