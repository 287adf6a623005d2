//! Busy polling: for a bounded time the network thread looks for packets again instead of going to sleep.
//!
//! Waking a thread takes the system some microseconds, on a virtual machine tens of them, which is most of a small collective between
//! ranks with cores of their own. But a look that finds nothing is processor time that the training may want, so the thread
//! looks only where what comes, packets of its groups and commands, has come within the time of what came before.
//!
//! ```text
//!   SLEEPING --something comes within the time of what came before--> LOOKING --nothing comes for the time--> SLEEPING
//! ```
//!
//! So a thread that has nothing to do looks for the time once, and then no more until something comes that has company.

use gradwire_core::Timestamp;
use std::time::Duration;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct BusyPoll {
    /// Longest time without a packet; zero: never.
    time: Duration,
    is_looking: bool,
    /// When something last came.
    busy_at: Timestamp,
}

impl BusyPoll {
    pub(crate) const fn new(time: Duration) -> Self {
        Self { time, is_looking: false, busy_at: Timestamp::ZERO }
    }

    /// Something has come.
    pub(crate) fn on_busy(&mut self, now: Timestamp) {
        self.is_looking = now.since(self.busy_at) < self.time;
        self.busy_at = now;
    }

    /// Whether to look again, where the thread could sleep.
    pub(crate) fn looks_again(&self, now: Timestamp) -> bool {
        self.is_looking && now.since(self.busy_at) < self.time
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1_000)
    }

    /// Things come at these microseconds.
    fn after(busy: &[u64]) -> BusyPoll {
        let mut poll = BusyPoll::new(Duration::from_micros(50));
        busy.iter().for_each(|micros| poll.on_busy(at(*micros)));
        poll
    }

    #[test]
    fn what_comes_alone_does_not_begin_it() {
        assert!(!after(&[1_000]).looks_again(at(1_001)));
        assert!(!after(&[1_000, 1_050]).looks_again(at(1_051)));
    }

    #[test]
    fn what_has_company_begins_it_for_the_time() {
        let poll = after(&[1_000, 1_049]);
        assert!(poll.looks_again(at(1_049)) && poll.looks_again(at(1_098)) && !poll.looks_again(at(1_099)));
    }

    #[test]
    fn what_comes_in_time_prolongs_it_and_what_comes_late_ends_it() {
        let poll = after(&[1_000, 1_040, 1_080, 1_120]);
        assert!(poll.looks_again(at(1_169)) && !poll.looks_again(at(1_170)));
        assert!(!after(&[1_000, 1_040, 1_080, 1_140]).looks_again(at(1_141)));
    }

    #[test]
    fn without_a_time_it_never_looks() {
        let mut poll = BusyPoll::new(Duration::ZERO);
        poll.on_busy(at(5));
        poll.on_busy(at(5));
        assert!(!poll.looks_again(at(5)));
    }
}
