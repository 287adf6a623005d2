//! The three small memories of rate control: least round-trip time, largest delivery rate, acknowledgement bursts.
//!
//! Used by [`super::RttEstimator`] and [`super::BottleneckController`]. Each has a fixed size and costs a few
//! instructions for each acknowledgement.

use crate::Timestamp;
use core::time::Duration;

/// Least duration over the last ten seconds, kept as two half windows: exact to within half a window, and
/// without a queue of samples.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WindowedMin {
    half_start: Timestamp,
    current: Option<Duration>,
    previous: Option<Duration>,
}

impl WindowedMin {
    /// Takes a sample.
    pub(super) fn insert(&mut self, now: Timestamp, value: Duration) {
        let age = now.since(self.half_start);
        if age >= HALF_WINDOW * 2 {
            *self = Self { half_start: now, current: None, previous: None };
        } else if age >= HALF_WINDOW {
            self.half_start = self.half_start + HALF_WINDOW;
            self.previous = self.current.take();
        }
        self.current = Some(self.current.map_or(value, |least| least.min(value)));
    }

    /// Begins a new half window, unless the present one is younger than `age_min`.
    pub(super) fn refresh(&mut self, now: Timestamp, age_min: Duration) {
        if self.current.is_some() && now.since(self.half_start) >= age_min {
            self.previous = self.current.take();
            self.half_start = now;
        }
    }

    /// The least value, if there was any.
    pub(super) fn min(&self) -> Option<Duration> {
        match (self.current, self.previous) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// Half of the ten seconds over which a least round-trip time holds: routes change more slowly.
const HALF_WINDOW: Duration = Duration::from_secs(5);

/// Largest delivery rate over the last [`ROUNDS`] round trips, bytes per second.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MaxFilter {
    rounds: [u64; ROUNDS],
    at: usize,
    max: u64,
}

impl MaxFilter {
    /// Takes a sample of the present round.
    pub(super) fn insert(&mut self, rate: u64) {
        if let Some(slot) = self.rounds.get_mut(self.at) {
            *slot = rate.max(*slot);
        }
        self.max = self.max.max(rate);
    }

    /// Begins a new round; the oldest one drops out. A round without a sample never pushes out a good one.
    pub(super) fn next_round(&mut self) {
        if self.rounds.get(self.at) == Some(&0) {
            return;
        }
        self.at = (self.at + 1) % ROUNDS;
        if let Some(slot) = self.rounds.get_mut(self.at) {
            *slot = 0;
        }
        self.max = self.rounds.iter().copied().max().unwrap_or(0);
    }

    /// Forgets everything but `rate`.
    pub(super) fn reset(&mut self, rate: u64) {
        *self = Self::default();
        self.insert(rate);
    }

    /// The largest rate; zero before the first sample.
    pub(super) fn max(&self) -> u64 {
        self.max
    }
}

/// Longer than one probing cycle of eight round trips, so that the rate that a probe found survives until the
/// next probe.
const ROUNDS: usize = 10;

/// How far acknowledgements run ahead of the estimated bandwidth: what must be in flight on top of the
/// bandwidth-delay product to keep sending while the peer, its scheduler or the way back holds them together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct AckAggregation {
    epoch_start: Timestamp,
    epoch_bytes: u64,
    current: u64,
    previous: u64,
    rounds: u32,
}

impl AckAggregation {
    /// Takes one acknowledgement of `bytes`, judged against `bandwidth` bytes per second. A lump of `whole` bytes
    /// is all that was in flight; it was only as large as the window, so twice as much is noted.
    pub(super) fn on_ack(&mut self, now: Timestamp, bytes: u64, bandwidth: u64, whole: u64) {
        if bandwidth == 0 {
            // Against no estimate everything would be ahead.
            return;
        }
        let mut expected = bytes_in(bandwidth, now.since(self.epoch_start));
        if self.epoch_bytes <= expected {
            self.epoch_start = now;
            self.epoch_bytes = 0;
            expected = 0;
        }
        self.epoch_bytes = self.epoch_bytes.saturating_add(bytes);
        let ahead = self.epoch_bytes.saturating_sub(expected);
        // All of it at once, not merely faster than the path: acknowledgements that wait in a queue close up as well.
        let at_once = expected <= self.epoch_bytes / 8;
        let noted = if ahead >= whole && at_once { ahead.saturating_mul(2) } else { ahead };
        self.current = self.current.max(noted);
    }

    /// A round trip is over.
    pub(super) fn next_round(&mut self) {
        self.rounds += 1;
        if self.rounds >= ROUNDS as u32 / 2 {
            self.rounds = 0;
            self.previous = core::mem::take(&mut self.current);
        }
    }

    /// The most bytes by which acknowledgements were ahead in the last five to ten round trips.
    pub(super) fn bytes(&self) -> u64 {
        self.current.max(self.previous)
    }
}

/// Bytes that `rate` bytes per second make in `time`, saturating.
pub(super) fn bytes_in(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate).saturating_mul(time.as_nanos()) / NANOS_PER_SECOND).unwrap_or(u64::MAX)
}

/// Bytes per second when `bytes` take `time`; `None` when no time passed.
pub(crate) fn rate_of(bytes: u64, time: Duration) -> Option<u64> {
    let rate = (u128::from(bytes) * NANOS_PER_SECOND).checked_div(time.as_nanos())?;
    Some(u64::try_from(rate).unwrap_or(u64::MAX))
}

/// How long `bytes` take at `rate` bytes per second, saturating.
pub(super) fn time_of(bytes: u64, rate: u64) -> Duration {
    let nanos = u128::from(bytes).saturating_mul(NANOS_PER_SECOND) / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

const NANOS_PER_SECOND: u128 = 1_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_rate_leaves_the_filter_after_ten_rounds_with_samples() {
        let mut filter = MaxFilter::default();
        filter.insert(100);
        for _ in 0..ROUNDS - 1 {
            filter.next_round();
            filter.insert(40);
            filter.insert(50);
            assert_eq!(filter.max(), 100);
        }
        filter.next_round();
        assert_eq!(filter.max(), 50);
    }

    #[test]
    fn rounds_without_a_sample_keep_the_estimate() {
        let mut filter = MaxFilter::default();
        filter.insert(100);
        for _ in 0..100 {
            filter.next_round();
        }
        assert_eq!(filter.max(), 100);
    }

    #[test]
    fn a_refreshed_minimum_keeps_the_last_half_window_only() {
        let mut least = WindowedMin::default();
        least.insert(at(0), Duration::from_millis(1));
        least.refresh(at(500), Duration::from_secs(1));
        least.insert(at(600), Duration::from_millis(3));
        assert_eq!(least.min(), Some(Duration::from_millis(1)));
        least.refresh(at(1_100), Duration::from_secs(1));
        least.insert(at(1_200), Duration::from_millis(2));
        least.refresh(at(2_300), Duration::from_secs(1));
        least.insert(at(2_400), Duration::from_millis(4));
        assert_eq!(least.min(), Some(Duration::from_millis(2)));
    }

    #[test]
    fn acknowledgements_in_bursts_are_measured_as_ahead_by_the_burst() {
        let mut aggregation = AckAggregation::default();
        // 1000 bytes for each millisecond, acknowledged in bursts of 8 ms.
        for burst in 1..10 {
            aggregation.on_ack(at(burst * 8), 8_000, 1_000_000, 10_000);
        }
        assert_eq!(aggregation.bytes(), 8_000);
        for _ in 0..10 {
            aggregation.next_round();
        }
        assert_eq!(aggregation.bytes(), 0);
        aggregation.on_ack(at(100), 8_000, 1_000_000, 8_000);
        assert_eq!(aggregation.bytes(), 16_000, "the whole flight came at once");
    }
}
