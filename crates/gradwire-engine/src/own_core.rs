//! The core that the network thread stays on, where the ranks of a host are as many as its cores (`own_core`).
//!
//! Threads that wake each other by packets gather on one core: a thread that is woken while its own core is busy for a moment runs where the
//! one runs that woke it, and is not taken away from there soon. Two ranks on two cores then take turns on one of them for whole calls while the other core
//! is idle. So the thread of the n-th rank on the host stays on the n-th core. Threads that compute are not bound, and go where there is room.
//!
//! Only where the process may use all cores of the host: of ranks that are bound, or limited to a part of it, nobody knows from here which
//! cores the others have. Where ranks are more than cores it brings little, and where they are fewer the system finds idle ones. A group of a few
//! of the ranks says nothing of the others, so the largest number of ranks on this host that any group has had decides.

use crate::config::Choice;
use crate::cores::Cores;
use crate::here::Here;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct OwnCore {
    setting: Choice,
    ranks: usize,
    /// Which cores the thread might use before it was bound, while it is.
    before: Option<Affinity>,
}

impl OwnCore {
    /// `sends_apart`: whether a second thread was asked for, which needs a core as well.
    pub(crate) fn new(setting: Choice, sends_apart: Choice) -> Self {
        let shares = setting == Choice::Auto && sends_apart == Choice::On;
        Self { setting: if shares { Choice::Off } else { setting }, ranks: 0, before: None }
    }

    /// A group of several ranks, or an epoch of one, has these of them on this host. Binds the calling thread where that is wanted, and
    /// frees it where it is not wanted any longer. Nothing depends on success.
    pub(crate) fn on_ranks(&mut self, here: Here, cores: &Cores) {
        if here.ranks <= self.ranks {
            return;
        }
        self.ranks = here.ranks;
        let before = self.before.take();
        if self.is_wanted(cores) {
            self.before = before.or_else(Affinity::of_thread);
            self.before.iter().for_each(|before| before.bind_to_nth(here.place));
        } else if let Some(before) = before {
            before.restore();
        }
    }

    fn is_wanted(&self, cores: &Cores) -> bool {
        match self.setting {
            Choice::Auto => self.ranks > 1 && cores.are_all_and(self.ranks),
            Choice::On => true,
            Choice::Off => false,
        }
    }
}

/// Cores that a thread may use.
#[derive(Debug)]
struct Affinity(Vec<usize>);

#[cfg(target_os = "linux")]
impl Affinity {
    /// Of the calling thread.
    fn of_thread() -> Option<Self> {
        let mut set = empty_set();
        // SAFETY: the set is plain bits, and the kernel writes at most its size.
        let failed = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } != 0;
        // SAFETY: all numbers are inside of the set.
        let has = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
        (!failed).then(|| Self((0..libc::CPU_SETSIZE as usize).filter(has).collect()))
    }

    /// The calling thread may use the n-th of them, counted round.
    fn bind_to_nth(&self, place: usize) {
        let core = place.checked_rem(self.0.len()).and_then(|place| self.0.get(place));
        core.into_iter().for_each(|core| Self(vec![*core]).restore());
    }

    /// The calling thread may use all of them.
    fn restore(&self) {
        let mut set = empty_set();
        // SAFETY: the numbers come from such a set, which the kernel reads; it changes the calling thread only.
        unsafe {
            self.0.iter().for_each(|core| libc::CPU_SET(*core, &mut set));
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
        }
    }
}

#[cfg(target_os = "linux")]
fn empty_set() -> libc::cpu_set_t {
    // SAFETY: plain bits, of which none is set.
    unsafe { std::mem::zeroed() }
}

#[cfg(not(target_os = "linux"))]
impl Affinity {
    fn of_thread() -> Option<Self> {
        None
    }

    fn bind_to_nth(&self, _place: usize) {}

    fn restore(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wants((setting, apart): (Choice, Choice), ranks: usize, cores: Cores) -> bool {
        OwnCore { ranks, ..OwnCore::new(setting, apart) }.is_wanted(&cores)
    }

    #[test]
    fn unasked_it_is_bound_where_as_many_ranks_as_cores_are_on_a_host_that_is_all_its_own() {
        let auto = (Choice::Auto, Choice::Auto);
        assert!(wants(auto, 2, Cores::of(2)) && wants(auto, 16, Cores::of(16)));
        assert!(!wants(auto, 1, Cores::of(1)), "nobody to gather with");
        assert!(!wants(auto, 2, Cores::of(4)) && !wants(auto, 4, Cores::of(2)));
        assert!(!wants(auto, 2, Cores::of_part(2, 64)), "which cores the others have is not known");
    }

    #[test]
    fn a_thread_that_sends_and_the_setting_decide_first() {
        let on_two = |settings| wants(settings, 2, Cores::of(2));
        assert!(on_two((Choice::Auto, Choice::Off)) && !on_two((Choice::Auto, Choice::On)));
        assert!(on_two((Choice::On, Choice::On)) && !on_two((Choice::Off, Choice::Off)));
    }

    /// What the thread may use after groups of so many ranks on a host of two cores, in each of which its place is 1.
    #[cfg(target_os = "linux")]
    fn cores_after(groups: &'static [usize]) -> Vec<usize> {
        let work = || {
            let mut own = OwnCore::new(Choice::Auto, Choice::Auto);
            groups.iter().for_each(|ranks| own.on_ranks(Here { ranks: *ranks, place: 1 }, &Cores::of(2)));
            Affinity::of_thread().expect("a thread has cores").0
        };
        std::thread::spawn(work).join().unwrap()
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_thread_stays_on_its_core_until_a_larger_group_shows_that_there_are_more_ranks() {
        let all = cores_after(&[]);
        let own = vec![all[1 % all.len()]];
        assert_eq!(cores_after(&[1]), all);
        assert_eq!(cores_after(&[1, 2]), own);
        assert_eq!(cores_after(&[2, 1, 2]), own);
        assert_eq!(cores_after(&[2, 4]), all);
        assert_eq!(cores_after(&[4, 2]), all, "a few of the ranks say nothing of the others");
    }
}
