//! What a flow's round trips have delivered on average lately, and which rates are far above that.
//!
//! A shaper (a token bucket, as clouds and `tc tbf` have it) saves what an idle moment leaves unused, and lets it go at once: a burst of many
//! packets, at ten times the rate that holds behind it. Rate control needs the best of its samples to find what is free, and the average
//! to know that such a sample will not last. Round trips count by their time: those of a burst are short ones.

use super::filters::{bytes_in, rate_of};
use super::headroom::LossCount;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AverageRate {
    bytes: u64,
    time: Duration,
}

impl AverageRate {
    /// Takes a round trip that took `time`: what the path carried in it. `usual`: what one takes.
    pub(super) fn on_round(&mut self, losses: LossCount, time: Duration, usual: Duration) {
        self.bytes = self.bytes.saturating_add(losses.carried());
        self.time += time;
        let span = SPAN.max(usual * ROUNDS);
        if self.time > span {
            self.bytes = bytes_in(self.get(), span);
            self.time = span;
        }
    }

    /// Bytes per second; zero before the first round trip.
    pub(super) fn get(self) -> u64 {
        rate_of(self.bytes, self.time).unwrap_or(0)
    }

    /// Whether a rate is so far above it that it will not last.
    pub(super) fn is_burst(self, rate: u64) -> bool {
        let average = self.get();
        average > 0 && rate > average.saturating_add(average / 2)
    }
}

/// What counts, with weights that fall off: buckets of 128 packets at 100 Mbit/s are full again after 15 ms.
const SPAN: Duration = Duration::from_millis(20);
/// Or so many round trips, a probing cycle.
const ROUNDS: u32 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn acked(bytes: u64) -> LossCount {
        LossCount { acked: bytes, ..LossCount::default() }
    }

    #[test]
    fn a_burst_counts_by_its_time() {
        let mut average = AverageRate::default();
        assert!(!average.is_burst(u64::MAX), "nothing is known yet");
        (0..40).for_each(|_| average.on_round(acked(10_000), MS(1), MS(1)));
        assert_eq!(average.get(), 10_000_000);
        // What an idle time of 8 ms saved leaves within one.
        average.on_round(acked(0), MS(8), MS(1));
        average.on_round(acked(90_000), MS(1), MS(1));
        assert!(average.is_burst(90_000_000) && !average.is_burst(15_000_000), "{average:?}");
        assert!((9_000_000..13_000_000).contains(&average.get()), "{average:?}");
    }

    #[test]
    fn a_rate_that_lasts_is_the_average_within_some_rounds() {
        let mut average = AverageRate::default();
        (0..40).for_each(|_| average.on_round(acked(10_000), MS(1), MS(1)));
        let rounds = (1..100).find(|_| {
            average.on_round(acked(20_000), MS(1), MS(1));
            !average.is_burst(20_000_000)
        });
        assert!(rounds.is_some_and(|rounds| rounds <= 10), "{rounds:?}");
    }

    #[test]
    fn over_long_paths_it_spans_round_trips() {
        let mut average = AverageRate::default();
        (0..40).for_each(|_| average.on_round(acked(1_000_000), MS(100), MS(100)));
        average.on_round(acked(2_000_000), MS(100), MS(100));
        assert!((11_000_000..11_500_000).contains(&average.get()), "{average:?}");
    }
}
