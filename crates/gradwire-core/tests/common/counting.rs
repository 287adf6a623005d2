//! Counts the allocations of a thread, or of all threads; included by the tests that claim that there are none.
#![allow(dead_code)] // Each test file uses its part.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Of all threads, since the process began.
static OF_ALL_THREADS: AtomicU64 = AtomicU64::new(0);

fn count_one() {
    OF_ALL_THREADS.fetch_add(1, Ordering::Relaxed);
    // The thread's storage may be gone at its very end, when nothing is counted.
    _ = COUNTED.try_with(|counted| counted.set(counted.get().map(|count| count + 1)));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread while `work` runs.
pub(crate) fn allocations_in(work: impl FnOnce()) -> u64 {
    COUNTED.set(Some(0));
    work();
    COUNTED.replace(None).expect("it was counting")
}

/// Allocations of every thread of the process while `work` runs. Only one test of a binary may use it: tests run at the
/// same time.
pub(crate) fn allocations_of_all_threads_in(work: impl FnOnce()) -> u64 {
    let before = OF_ALL_THREADS.load(Ordering::SeqCst);
    work();
    OF_ALL_THREADS.load(Ordering::SeqCst) - before
}
