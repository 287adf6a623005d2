//! Round-trip time estimates (RFC 9002 section 5).
//!
//! Fed by the connection with one sample for each acknowledgement that echoes a new time stamp; read by loss
//! detection, by the probe timer and by the rate controller. Samples have the peer's acknowledgement delay
//! taken off already, so that `min` is the network's own delay.

use super::filters::WindowedMin;
use crate::Timestamp;
use core::time::Duration;

/// Smoothed and least round-trip time.
#[derive(Clone, Copy, Debug, Default)]
pub struct RttEstimator {
    smoothed: Duration,
    variation: Duration,
    latest: Duration,
    least: WindowedMin,
    sampled: bool,
}

impl RttEstimator {
    /// No sample yet; `smoothed` answers with `initial` until there is one.
    #[must_use]
    pub fn new(initial: Duration) -> Self {
        Self { smoothed: initial, variation: initial / 2, latest: initial, ..Self::default() }
    }

    /// Takes a sample from which the peer's acknowledgement delay has been subtracted.
    ///
    /// RFC 9002 section 5.3: variation = 3/4 variation + 1/4 |smoothed - rtt|, smoothed = 7/8 smoothed + 1/8 rtt.
    pub fn on_sample(&mut self, now: Timestamp, rtt: Duration) {
        self.latest = rtt;
        self.least.insert(now, rtt);
        if self.sampled {
            self.variation = (self.variation * 3 + self.smoothed.abs_diff(rtt)) / 4;
            self.smoothed = (self.smoothed * 7 + rtt) / 8;
        } else {
            self.sampled = true;
            self.smoothed = rtt;
            self.variation = rtt / 2;
        }
    }

    /// Smoothed round-trip time.
    #[must_use]
    pub fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// Least round-trip time over the last ten seconds; the initial guess before the first sample.
    #[must_use]
    pub fn min(&self) -> Duration {
        self.least.min().unwrap_or(self.smoothed)
    }

    /// Latest sample; the initial guess before the first.
    #[must_use]
    pub fn latest(&self) -> Duration {
        self.latest
    }

    /// Whether there was a sample.
    #[must_use]
    pub fn has_sample(&self) -> bool {
        self.sampled
    }

    /// How long an answer takes that the peer does not hold back: smoothed + 4 * variation (RFC 9002 section 6.2.1).
    #[must_use]
    pub fn answer_timeout(&self) -> Duration {
        self.smoothed + (self.variation * 4).max(WAKE_LATE)
    }

    /// How long to wait for any answer: smoothed + 4 * variation + the peer's longest acknowledgement delay.
    #[must_use]
    pub fn probe_timeout(&self, ack_delay_max: Duration) -> Duration {
        self.smoothed + (self.variation * 4).max(GRANULARITY) + ack_delay_max
    }

    /// Time after which an overtaken packet is lost: 9/8 of the larger of smoothed and latest, at least
    /// the clock's granularity.
    #[must_use]
    pub fn loss_delay(&self) -> Duration {
        (self.smoothed.max(self.latest) * 9 / 8).max(GRANULARITY)
    }
}

/// Shortest time that loss detection trusts. RFC 9002 takes 1 ms; that is many round trips of a data centre,
/// and a driver that sleeps in `poll` is awake again within about 0.1 ms, later only where others
/// of its core go first (`give_way`). Twice that.
const GRANULARITY: Duration = Duration::from_micros(200);

/// A driver that sleeps in `poll` is awake again within so long, at both ends of what was measured. Who asks too early loses a
/// tiny packet and an answer; what is lost by asking is only what the answer shows to be.
const WAKE_LATE: Duration = Duration::from_micros(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    fn at(value: u64) -> Timestamp {
        Timestamp::ZERO + ms(value)
    }

    #[test]
    fn the_first_sample_replaces_the_initial_guess() {
        let mut rtt = RttEstimator::new(ms(100));
        assert_eq!((rtt.smoothed(), rtt.min(), rtt.has_sample()), (ms(100), ms(100), false));
        assert_eq!(rtt.probe_timeout(ms(1)), ms(301));
        rtt.on_sample(at(1), ms(8));
        assert_eq!((rtt.smoothed(), rtt.min(), rtt.latest(), rtt.has_sample()), (ms(8), ms(8), ms(8), true));
        assert_eq!(rtt.probe_timeout(ms(1)), ms(8 + 16 + 1));
    }

    #[test]
    fn estimates_follow_rfc_9002_section_5() {
        let mut rtt = RttEstimator::new(ms(100));
        rtt.on_sample(at(1), ms(8));
        rtt.on_sample(at(2), ms(16));
        // variation = 3/4 * 4 + 1/4 * 8 = 5, smoothed = 7/8 * 8 + 1/8 * 16 = 9.
        assert_eq!(rtt.smoothed(), ms(9));
        assert_eq!((rtt.answer_timeout(), rtt.probe_timeout(ms(1))), (ms(9 + 20), ms(9 + 20 + 1)));
        assert_eq!(rtt.loss_delay(), ms(18), "9/8 of the latest, which is the larger one");
    }

    #[test]
    fn the_minimum_forgets_what_is_older_than_ten_seconds() {
        let mut rtt = RttEstimator::new(ms(100));
        rtt.on_sample(at(0), ms(1));
        rtt.on_sample(at(4_900), ms(5));
        rtt.on_sample(at(9_900), ms(5));
        assert_eq!(rtt.min(), ms(1));
        rtt.on_sample(at(10_100), ms(5));
        assert_eq!(rtt.min(), ms(5));
    }

    #[test]
    fn timers_never_fall_below_the_granularity() {
        let mut rtt = RttEstimator::new(ms(1));
        for round in 0..100 {
            rtt.on_sample(at(round), Duration::from_micros(20));
        }
        assert_eq!(rtt.loss_delay(), GRANULARITY);
        assert!(rtt.probe_timeout(Duration::ZERO) >= GRANULARITY);
        assert_eq!(rtt.answer_timeout(), rtt.smoothed() + WAKE_LATE);
    }
}
