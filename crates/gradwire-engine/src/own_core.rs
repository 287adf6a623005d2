//! The core that the network thread stays on, where the ranks of a host are as many as its cores (`own_core`).
//!
//! Threads that wake each other by packets gather on one core: a thread that is woken while its own core is busy for a moment runs where the
//! one runs that woke it, and is not taken away from there soon. Two ranks on two cores then take turns on one of them for whole calls while the other core
//! is idle. So the thread of the n-th rank on the host stays on the n-th core. Threads that compute are not bound, and go where there is room.
//!
//! Only where the process may use all cores of the host: of ranks that are bound, or limited to a part of it, nobody knows from here which
//! cores the others have. Where ranks are more than cores it brought nothing, and where they are fewer the system finds idle ones.

use crate::config::Choice;
use crate::cores::Cores;
use crate::here::Here;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct OwnCore {
    setting: Choice,
    is_settled: bool,
}

impl OwnCore {
    /// `sends_apart`: whether a second thread was asked for, which would be on the same core.
    pub(crate) fn new(setting: Choice, sends_apart: Choice) -> Self {
        let shares = setting == Choice::Auto && sends_apart == Choice::On;
        Self { setting: if shares { Choice::Off } else { setting }, is_settled: false }
    }

    /// A group of several ranks, or an epoch of one, has these of them on this host. Binds the calling thread if that is wanted, once: the
    /// ranks of one group are those of the next.
    pub(crate) fn on_ranks(&mut self, here: Here, cores: &Cores) {
        if !self.is_settled && self.is_wanted(here, cores) {
            self.is_settled = true;
            bind_to_nth(here.place);
        }
    }

    fn is_wanted(&self, here: Here, cores: &Cores) -> bool {
        match self.setting {
            Choice::Auto => here.ranks > 1 && cores.are_all_and(here.ranks),
            Choice::On => true,
            Choice::Off => false,
        }
    }
}

/// Binds the calling thread to the n-th of the cores that it may use, counted round. Nothing depends on success.
#[cfg(target_os = "linux")]
fn bind_to_nth(place: usize) {
    let mut set = empty_set();
    // SAFETY: the set is plain bits, and the kernel writes at most its size.
    if unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0 {
        return;
    }
    // SAFETY: all numbers are inside of the set.
    let allowed = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    let allowed: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(allowed).collect();
    let Some(core) = place.checked_rem(allowed.len()).map(|place| allowed[place]) else { return };
    let mut own = empty_set();
    // SAFETY: the number is inside of the set, which the kernel reads; it changes the calling thread only.
    unsafe {
        libc::CPU_SET(core, &mut own);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const own);
    }
}

#[cfg(target_os = "linux")]
fn empty_set() -> libc::cpu_set_t {
    // SAFETY: plain bits, of which none is set.
    unsafe { std::mem::zeroed() }
}

#[cfg(not(target_os = "linux"))]
fn bind_to_nth(_place: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(ranks: usize) -> Here {
        Here { ranks, place: 0 }
    }

    #[test]
    fn unasked_it_is_bound_where_as_many_ranks_as_cores_are_on_a_host_that_is_all_its_own() {
        let own = OwnCore::new(Choice::Auto, Choice::Auto);
        let wants = |ranks, cores| own.is_wanted(here(ranks), &cores);
        assert!(wants(2, Cores::of(2)) && wants(16, Cores::of(16)));
        assert!(!wants(1, Cores::of(1)), "nobody to gather with");
        assert!(!wants(2, Cores::of(4)) && !wants(4, Cores::of(2)));
        assert!(!wants(2, Cores::of_part(2, 64)), "which cores the others have is not known");
    }

    #[test]
    fn a_thread_that_sends_and_the_setting_decide_first() {
        let wants = |setting, apart| OwnCore::new(setting, apart).is_wanted(here(2), &Cores::of(2));
        assert!(wants(Choice::Auto, Choice::Off) && !wants(Choice::Auto, Choice::On));
        assert!(wants(Choice::On, Choice::On) && !wants(Choice::Off, Choice::Off));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_calling_thread_is_bound_once_and_to_one_core() {
        let cores_of_thread = || std::thread::available_parallelism().unwrap().get();
        let bound = std::thread::spawn(move || {
            let mut own = OwnCore::new(Choice::On, Choice::Auto);
            own.on_ranks(Here { ranks: 3, place: 5 }, &Cores::of(2));
            let first = cores_of_thread();
            bind_to_nth(7);
            (first, cores_of_thread(), own.is_settled)
        });
        assert_eq!(bound.join().unwrap(), (1, 1, true));
    }
}
