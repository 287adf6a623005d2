//! What keeps the memory of calls alive, on its way back to whoever holds the GIL.
//!
//! The network thread ends calls without the GIL. What it drops there pyo3 would queue under a lock of its own, which every method of a native class
//! takes next. A program that forks meanwhile has a child in which nobody releases that lock: its first method, the hook of the fork, would wait
//! for ever, and with it the fork itself. Here nothing is held at any moment: objects are pushed onto a list, and taken from it all at once.

use pyo3::prelude::*;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What has been given back, the latest first.
static GIVEN_BACK: AtomicPtr<Entry> = AtomicPtr::new(std::ptr::null_mut());

struct Entry {
    _objects: Vec<Py<PyAny>>,
    /// Owned by the list as the entry itself is.
    next: *mut Entry,
}

/// Objects that a call needs. Whoever drops it need not hold the GIL: they go with the next [`release`].
pub(crate) struct Kept(*mut Entry, #[expect(dead_code, reason = "it is counted")] Arc<()>);

// SAFETY: the entry is this value's alone, and `Py` may go to other threads.
unsafe impl Send for Kept {}

impl Kept {
    fn new(objects: Vec<Py<PyAny>>, of: &Arc<()>) -> Self {
        let entry = Entry { _objects: objects, next: std::ptr::null_mut() };
        Self(Box::into_raw(Box::new(entry)), Arc::clone(of))
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

/// The calls of one group whose objects have not been given back yet.
#[derive(Default)]
pub(crate) struct KeptByGroup(Arc<()>);

impl KeptByGroup {
    /// What a call of the group needs.
    pub(crate) fn keep(&self, objects: Vec<Py<PyAny>>) -> Box<Kept> {
        Box::new(Kept::new(objects, &self.0))
    }

    /// Blocks without the GIL until the network thread has given back what the calls of a group need that has ended, and drops it. It does so at once,
    /// unless it is kept from running: then the objects go with a later [`release`].
    pub(crate) fn release_all(&self, py: Python<'_>) {
        let began = Instant::now();
        py.detach(|| {
            while Arc::strong_count(&self.0) > 1 && began.elapsed() < GIVEN_BACK_WITHIN {
                std::thread::sleep(LOOK_AGAIN);
            }
        });
        release(py);
    }
}

/// The network thread ends the calls of a group in the turn in which it hears of it.
const GIVEN_BACK_WITHIN: Duration = Duration::from_millis(100);
const LOOK_AGAIN: Duration = Duration::from_micros(50);

/// Drops the objects of all calls that have ended. What that runs may make calls and come here again.
pub(crate) fn release(_: Python<'_>) {
    let mut next = GIVEN_BACK.swap(std::ptr::null_mut(), Ordering::Acquire);
    while !next.is_null() {
        // SAFETY: made by `Kept::new`; the list has been taken, so that it is nobody else's.
        let entry = unsafe { Box::from_raw(next) };
        next = entry.next;
    }
}
