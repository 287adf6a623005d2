//! How long an acknowledgement waited in queues on its way back.
//!
//! Fed by the path with the time from the peer's stamp of an acknowledgement to its arrival here, on two clocks: only its
//! differences mean something. What exceeds the least of them is queue, and not a queue of this flow: in an all-reduce
//! it is the data that goes the other way. A rate controller that took it for its own would give way to nobody, so
//! [`crate::Connection`]'s path takes it off the round trip.
//!
//! - **Clocks drift.** The least delay is remembered as if the peer's clock lost 100 us in each second against this one (two
//!   oscillators at the ends of what is usual), so that what drift adds is never taken for a queue. What it takes away
//!   shows as less queue than there is, until the next acknowledgement that did not wait: then the round trip counts in
//!   full, as it would without any of this.
//! - **Clocks step.** A peer's step is a shorter delay, and the new least one. A wait that is as long as the whole round trip
//!   cannot be: then this clock has stepped, and the memory begins again.

use super::AckSample;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WayBack {
    /// The latest delay as it travels (microseconds modulo 2^32), and the same unwrapped, in nanoseconds.
    latest: Option<(u32, i64)>,
    half_start: Timestamp,
    current: Option<i64>,
    previous: Option<i64>,
}

impl WayBack {
    /// How long the acknowledgement waited that the peer stamped with `sent_at_us` and that completes a round trip of `rtt`;
    /// always less than that.
    pub(crate) fn waited(&mut self, now: Timestamp, sent_at_us: u32, rtt: Duration) -> Duration {
        let slope = i64::try_from(now.as_nanos() / DRIFT_PER).unwrap_or(i64::MAX);
        let delay = self.unwrap(now.as_wire_us().wrapping_sub(sent_at_us)).saturating_sub(slope);
        let queue = |least: i64| Duration::from_nanos(delay.saturating_sub(least).max(0).unsigned_abs());
        let waited = queue(self.insert(now, delay));
        if waited < rtt {
            return if waited > RESOLUTION { waited } else { Duration::ZERO };
        }
        (self.half_start, self.current, self.previous) = (now, Some(delay), None);
        Duration::ZERO
    }

    fn unwrap(&mut self, delay_us: u32) -> i64 {
        let (wire, nanos) = self.latest.unwrap_or((delay_us, 0));
        let change = i64::from(delay_us.wrapping_sub(wire) as i32) * 1_000;
        let nanos = nanos.saturating_add(change);
        self.latest = Some((delay_us, nanos));
        nanos
    }

    /// Takes a delay and returns the least of the last ten seconds.
    fn insert(&mut self, now: Timestamp, delay: i64) -> i64 {
        let age = now.since(self.half_start);
        if age >= HALF_WINDOW * 2 {
            (self.half_start, self.current, self.previous) = (now, None, None);
        } else if age >= HALF_WINDOW {
            self.half_start = self.half_start + HALF_WINDOW;
            self.previous = self.current.take();
        }
        let least = self.current.map_or(delay, |least| least.min(delay));
        self.current = Some(least);
        self.previous.map_or(least, |previous| previous.min(least))
    }
}

/// What acknowledgements wait at present, for the window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SmoothedWait(Duration);

impl SmoothedWait {
    pub(super) fn on_ack(&mut self, sample: &AckSample) {
        if sample.rtt.is_some() {
            self.0 = (self.0 * 7 + sample.waited) / 8;
        }
    }

    pub(super) fn get(self) -> Duration {
        self.0
    }
}

/// As long as the least round-trip time holds.
const HALF_WINDOW: Duration = Duration::from_secs(5);
/// Two stamps of whole microseconds, for the least delay and for this one.
const RESOLUTION: Duration = Duration::from_micros(4);
/// One part in ten thousand.
const DRIFT_PER: u64 = 10_000;

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Duration = Duration::from_millis(10);

    fn at(us: u64) -> Timestamp {
        Timestamp::from_nanos(us * 1_000)
    }

    /// What is seen of waits (microseconds), one in each millisecond, when the peer's clock is `ahead` and gains
    /// `gain_ppm`.
    fn seen(ahead: u32, gain_ppm: i64, waits: impl Iterator<Item = u64>) -> std::vec::Vec<u64> {
        let mut way = WayBack::default();
        let see = |(index, wait): (usize, u64)| {
            let now = 1_000 * index as u64 + 5_000;
            let gained = (now as i64 - wait as i64) * gain_ppm / 1_000_000;
            let stamp = (now - 100 - wait).wrapping_add(gained as u64) as u32;
            way.waited(at(now), stamp.wrapping_add(ahead), RTT).as_micros() as u64
        };
        waits.enumerate().map(see).collect()
    }

    /// A queue that comes and goes: empty in one of a hundred milliseconds.
    fn queue() -> impl Iterator<Item = u64> {
        (0..30_000).map(|ms| if ms % 100 == 0 { 0 } else { 2_000 })
    }

    #[test]
    fn what_exceeds_the_least_delay_is_the_wait_whatever_the_clocks_show() {
        for ahead in [0, 1, 1 << 31, u32::MAX - 3_000] {
            for (seen, truth) in seen(ahead, 0, queue()).into_iter().zip(queue()) {
                assert!(seen <= truth && truth <= seen + 11, "{seen} of {truth}, {ahead} ahead");
            }
        }
    }

    #[test]
    fn drift_is_never_taken_for_a_queue_and_hides_little_of_one() {
        for gain_ppm in [-100, -50, 50, 100] {
            for (seen, truth) in seen(0, gain_ppm, queue()).into_iter().zip(queue()) {
                assert!(seen <= truth + 2 && truth <= seen + 25, "{seen} of {truth}, {gain_ppm} ppm");
            }
        }
    }

    #[test]
    fn a_step_of_either_clock_is_forgotten_at_once() {
        let mut way = WayBack::default();
        assert_eq!(way.waited(at(1_000_000), 0, RTT), Duration::ZERO);
        // This clock steps by a minute, then the peer's by two.
        assert_eq!(way.waited(at(61_000_000), 0, RTT), Duration::ZERO);
        assert_eq!(way.waited(at(61_000_500), 0, RTT).as_micros(), 499);
        assert_eq!(way.waited(at(61_001_000), 120_000_000, RTT), Duration::ZERO);
        assert_eq!(way.waited(at(61_002_000), 120_000_000, RTT).as_micros(), 999);
    }
}
