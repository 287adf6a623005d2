//! Giving way: before the network thread sleeps, it lets other threads of its core go first, and looks for packets again. Where it is
//! asked for, or ranks share cores (`give_way`).
//!
//! Where ranks share cores, what a thread waits for is often made by one that waits for its core. A thread that sleeps is woken for
//! the first message of it, takes the core at once, and sleeps again: a change of threads, or two, for each message. One that gives
//! its turn away comes back when the others have done what they can, and finds it all. On a core that nobody else wants the
//! turn comes back at once, which costs one look. Where something is due sooner than a timer could be set and taken back, it never
//! sleeps.
//!
//! ```text
//!   SOMETHING CAME --> GIVES WAY --others used the turn--> GIVES WAY again, for TIME_MAX after what came last
//!                          '--------nobody did--------> SLEEPS, if nothing is due within TIMER_MIN
//!                                                       GIVES WAY again, if something is
//! ```
//!
//! A thread that computes may keep the core for a time slice, while what has come waits: a thread that sleeps takes the core from it.

use crate::config::Choice;
use gradwire_core::Timestamp;
use std::time::Duration;

/// Longest time since something came in which the thread gives way.
const TIME_MAX: Duration = Duration::from_millis(1);
/// To sleep for less costs more than the time: a timer is set and taken back, or interrupts, each of which leaves a virtual machine.
/// A pacer that lets some GBytes go in a second asks for it before each burst.
const TIMER_MIN: Duration = Duration::from_micros(20);
/// A turn that comes back sooner was used by nobody: an interrupt and two changes of threads take less.
const USED_MIN: Duration = Duration::from_micros(50);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct GivingWay {
    setting: Choice,
    is_on: bool,
    /// When something last came.
    busy_at: Timestamp,
    /// Nothing was given away since, or others used it.
    pays: bool,
}

impl GivingWay {
    pub(crate) fn new(setting: Choice) -> Self {
        Self { setting, is_on: setting == Choice::On, ..Self::default() }
    }

    /// A group, or an epoch of one, has so many ranks on this host, which has so many cores for this process. What it decides holds
    /// for as long as the thread lives: the ranks of one group are those of the next.
    pub(crate) fn on_ranks(&mut self, ranks_here: usize, cores: usize) {
        self.is_on |= self.setting == Choice::Auto && ranks_here > cores;
    }

    /// Something has come.
    pub(crate) fn on_busy(&mut self, now: Timestamp) {
        (self.busy_at, self.pays) = (now, self.is_on);
    }

    /// Whether others go first, where the thread could sleep for `wait`, or until something comes.
    pub(crate) fn is_wanted(&self, now: Timestamp, wait: Option<Duration>) -> bool {
        let is_soon = wait.is_some_and(|wait| wait < TIMER_MIN);
        self.is_on && is_soon || self.pays && now.since(self.busy_at) < TIME_MAX
    }

    /// The turn was given away, and has come back after so long.
    pub(crate) fn on_back(&mut self, after: Duration) {
        self.pays = after >= USED_MIN;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1_000)
    }

    fn after_something_at(micros: u64) -> GivingWay {
        let mut way = GivingWay::new(Choice::On);
        way.on_busy(at(micros));
        way
    }

    #[test]
    fn it_is_given_once_after_something_has_come_and_never_before() {
        assert!(!GivingWay::new(Choice::On).is_wanted(at(0), None));
        let mut way = after_something_at(5_000);
        assert!(way.is_wanted(at(5_000), None));
        way.on_back(Duration::from_micros(1));
        assert!(!way.is_wanted(at(5_001), None), "nobody wanted it");
        way.on_busy(at(5_002));
        assert!(way.is_wanted(at(5_002), None));
    }

    #[test]
    fn it_is_given_again_while_others_use_it_but_no_longer_than_a_millisecond() {
        let mut way = after_something_at(5_000);
        for micros in [5_060, 5_500, 5_999] {
            way.on_back(Duration::from_micros(60));
            assert!(way.is_wanted(at(micros), None));
        }
        assert!(!way.is_wanted(at(6_000), None));
    }

    #[test]
    fn it_is_given_in_place_of_a_sleep_that_is_shorter_than_setting_a_timer() {
        let wait = |micros| Some(Duration::from_micros(micros));
        let idle = GivingWay::new(Choice::On);
        assert!(idle.is_wanted(at(5_000), wait(19)));
        assert!(!idle.is_wanted(at(5_000), wait(20)));
        assert!(!GivingWay::new(Choice::Off).is_wanted(at(5_000), wait(19)));
    }

    #[test]
    fn unasked_it_is_given_once_more_ranks_are_here_than_cores() {
        let mut way = GivingWay::new(Choice::Auto);
        let mut is_wanted = |joined: Option<(usize, usize)>| {
            joined.into_iter().for_each(|(ranks_here, cores)| way.on_ranks(ranks_here, cores));
            way.on_busy(at(5_000));
            way.is_wanted(at(5_000), None)
        };
        assert!(!is_wanted(None));
        assert!(!is_wanted(Some((4, 4))));
        assert!(is_wanted(Some((5, 4))));
        assert!(is_wanted(Some((2, 4))), "a part of them meets again");
    }

    #[test]
    fn it_is_never_given_where_it_must_not_be() {
        let mut way = GivingWay::new(Choice::Off);
        way.on_ranks(5, 4);
        way.on_busy(at(5_000));
        assert!(!way.is_wanted(at(5_000), None));
    }
}
