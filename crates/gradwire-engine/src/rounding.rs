//! How a thread's floating point treats numbers: as on every other rank.
//!
//! A thread inherits it from the one that starts it. `torch.set_flush_denormal(True)` and libraries that were built with `-ffast-math` make numbers near
//! zero (below 1.2e-38) count as zero. Where some ranks do that, what each of them works out by itself, such as a rotation that is turned back, would differ.

/// Subnormal numbers count, results are rounded to the nearest, and nothing traps: on this thread, from now on.
pub(crate) fn as_on_every_rank() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    set(0x1F80);
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: it is the state that Rust takes for granted.
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) 0_u64, options(nomem, nostack, preserves_flags));
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
fn set(control: u32) {
    // SAFETY: the register is this thread's own and reads four bytes. Outside of the tests it gets the state that Rust takes for granted.
    unsafe {
        std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(readonly, nostack, preserves_flags));
    }
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use std::hint::black_box;

    use super::*;

    const FLUSHES_AND_TAKES_FOR_ZERO: u32 = 0x1F80 | 0x8000 | 0x40;

    fn half_of_the_smallest_normal() -> f32 {
        black_box(f32::MIN_POSITIVE) * black_box(0.5)
    }

    #[test]
    fn a_thread_counts_numbers_near_zero_whatever_the_one_does_that_started_it() {
        let started_by_one_that_flushes = |work: fn()| {
            let outer = std::thread::spawn(move || {
                set(FLUSHES_AND_TAKES_FOR_ZERO);
                let inner = std::thread::spawn(move || {
                    work();
                    half_of_the_smallest_normal().to_bits()
                });
                f32::from_bits(inner.join().unwrap())
            });
            outer.join().unwrap()
        };
        assert_eq!(started_by_one_that_flushes(|| {}), 0.0, "it is inherited");
        assert_eq!(started_by_one_that_flushes(as_on_every_rank), f32::MIN_POSITIVE / 2.0);
    }
}
