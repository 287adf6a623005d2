//! Busy polling: for a bounded time the network thread looks for packets again instead of going to sleep.
//!
//! Waking a thread takes the system some microseconds, on a virtual machine tens of them, which is most of a small collective between
//! ranks with cores of their own. But a look that finds nothing is processor time that the training may want, so the thread
//! looks only where sleeps have been short: a sleep that ends within the time shows that looking would have
//! found what ended it, one that lasts longer shows the opposite.
//!
//! ```text
//!   SLEEPING --a sleep shorter than the time--> LOOKING --nothing for the time, then a longer sleep--> SLEEPING
//! ```
//!
//! So a thread that has nothing to do looks for the time once, and then no more until short sleeps return.

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
        self.busy_at = now;
    }

    /// Whether to look again, where the thread could sleep.
    pub(crate) fn looks_again(&self, now: Timestamp) -> bool {
        self.is_looking && now.since(self.busy_at) < self.time
    }

    /// The thread has slept, and something or the clock has woken it.
    pub(crate) fn on_slept(&mut self, from: Timestamp, to: Timestamp) {
        self.is_looking = to.since(from) < self.time;
        self.busy_at = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_micros(50);

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1_000)
    }

    #[test]
    fn a_short_sleep_begins_it_and_a_long_one_ends_it() {
        let mut poll = BusyPoll::new(TIME);
        poll.on_busy(at(0));
        assert!(!poll.looks_again(at(1)), "nothing is known yet");
        poll.on_slept(at(1), at(31));
        assert!(poll.looks_again(at(32)) && poll.looks_again(at(80)) && !poll.looks_again(at(81)));
        poll.on_slept(at(81), at(1_081));
        assert!(!poll.looks_again(at(1_082)));
    }

    #[test]
    fn what_comes_in_time_prolongs_it() {
        let mut poll = BusyPoll::new(TIME);
        poll.on_slept(at(0), at(10));
        for micros in (50..1_000).step_by(40) {
            assert!(poll.looks_again(at(micros)));
            poll.on_busy(at(micros));
        }
    }

    #[test]
    fn without_a_time_it_never_looks() {
        let mut poll = BusyPoll::new(Duration::ZERO);
        poll.on_slept(at(5), at(5));
        assert!(!poll.looks_again(at(5)));
    }
}
