//! Notices that strangers flood the port: peers are told, and go on at the rate that they had (docs/security.md).
//!
//! Fed by the driver with what it counts anyway. What makes a port lose is its link, by bytes, or its processor, by datagrams;
//! what makes a flood of it is that it lasts. A stranger who sends less has no say in how the ranks share their network, and what
//! the peers of a group still send that has just ended is over before it counts.

use gradwire_core::Timestamp;
use std::time::Duration;

/// Datagrams and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) datagrams: u64,
    pub(crate) bytes: u64,
}

impl Traffic {
    /// Counts one more datagram.
    pub(crate) fn add(&mut self, bytes: usize) {
        self.datagrams += 1;
        self.bytes += bytes as u64;
    }

    /// Of this, what has come since `before`.
    fn since(self, before: Self) -> Self {
        Self { datagrams: self.datagrams - before.datagrams, bytes: self.bytes - before.bytes }
    }

    /// The same, as if `elapsed` had been one span.
    fn in_a_span(self, before: Self, elapsed: Duration) -> Self {
        let Self { datagrams, bytes } = self.since(before);
        let scaled = |all: u64| {
            let all = u128::from(all) * SPAN.as_nanos() / elapsed.as_nanos().max(1);
            u64::try_from(all).unwrap_or(u64::MAX)
        };
        Self { datagrams: scaled(datagrams), bytes: scaled(bytes) }
    }

    /// Whether it is at least a part of `all`.
    fn is_part_of(self, all: Self, part: u64) -> bool {
        self.datagrams.saturating_mul(part) >= all.datagrams || self.bytes.saturating_mul(part) >= all.bytes
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct FloodWatch {
    since: Timestamp,
    received: Traffic,
    refused: Traffic,
    /// Most bytes of a span lately that were not refused.
    busiest: u64,
    /// Spans with a flood, less those without one.
    level: u32,
    is_flooded: bool,
}

impl FloodWatch {
    /// Whether there is a flood now.
    pub(crate) fn is_flooded(&self) -> bool {
        self.is_flooded
    }

    // claim: faults/holds-its-rate-in-a-flood
    /// So much has come so far, and so much of it was nobody's. `Some`: that a flood has begun, or is over.
    pub(crate) fn on_counts(&mut self, now: Timestamp, received: Traffic, refused: Traffic) -> Option<bool> {
        let elapsed = now.since(self.since);
        if elapsed < SPAN {
            return None;
        }
        let before = (self.received, self.refused);
        (self.since, self.received, self.refused) = (now, received, refused);
        if elapsed > SPAN * 2 {
            return self.after_long(elapsed, received.since(before.0), refused.since(before.1));
        }
        let came = received.in_a_span(before.0, elapsed);
        let strange = refused.in_a_span(before.1, elapsed);
        let ours = came.bytes.saturating_sub(strange.bytes);
        self.busiest = ours.max(self.busiest - self.busiest / FORGOTTEN);
        self.settle(if self.is_flood(came, strange) {
            (self.level + 1).min(LEVEL_MAX)
        } else {
            self.level.saturating_sub(1)
        })
    }

    /// The thread slept because nothing came, which is that many spans without a flood; or it stood still, and what came was dropped
    /// or is still to be read, which says nothing. In a flood a full buffer awaits a thread that stood still.
    fn after_long(&mut self, elapsed: Duration, came: Traffic, strange: Traffic) -> Option<bool> {
        let slept = strange.datagrams < AWAITED_MIN || !strange.is_part_of(came, STRANGE_PART);
        let spans = u32::try_from(elapsed.as_nanos() / SPAN.as_nanos()).unwrap_or(u32::MAX);
        let passed = if slept { spans } else { 0 };
        self.settle(self.level.saturating_sub(passed))
    }

    /// `Some`: that a flood has begun, or is over.
    fn settle(&mut self, level: u32) -> Option<bool> {
        self.level = level;
        let was_flooded = self.is_flooded;
        self.is_flooded = self.level >= LEVEL_BEGUN || was_flooded && self.level > 0;
        (self.is_flooded != was_flooded).then_some(self.is_flooded)
    }

    fn is_flood(&self, came: Traffic, strange: Traffic) -> bool {
        let fills = strange.bytes >= BYTES_MIN.max(self.busiest / STRANGE_PART);
        (fills || strange.datagrams >= DATAGRAMS_MIN) && strange.is_part_of(came, STRANGE_PART)
    }
}

/// What is counted together.
const SPAN: Duration = Duration::from_millis(50);
/// 20,000 datagrams in a second, whatever their size, keep a slow core busy.
const DATAGRAMS_MIN: u64 = 1_000;
/// Strangers' datagrams that await a thread that stood still in a flood, at least: the smallest receive buffers hold ten times as many.
const AWAITED_MIN: u64 = 16;
/// 20 Mbit/s: less fills no link that ranks are joined by.
const BYTES_MIN: u64 = 125_000;
/// At least one in so many datagrams, or bytes, is nobody's: less leaves the peers most of the link anyway, and is not worth to insist.
/// Of the bytes, also of the most that the peers have made the port carry lately: between two calls everything that comes is a stranger's.
const STRANGE_PART: u64 = 4;
/// The most is less by this part with each span: half of it after 1.1 s with [`SPAN`].
const FORGOTTEN: u64 = 32;
/// Spans with a flood until it counts, and until so many without one end it: 150 and 300 ms.
const LEVEL_BEGUN: u32 = 3;
const LEVEL_MAX: u32 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    const FULL: u64 = 1_472;

    /// What a port sees, in spans of 50 ms: of its peers, and of strangers; each with the bytes of one datagram.
    #[derive(Default)]
    struct Port {
        watch: FloodWatch,
        now_ms: u64,
        received: Traffic,
        refused: Traffic,
    }

    impl Port {
        /// The first span with news, and them.
        fn take(&mut self, spans: u64, ours: (u64, u64), theirs: (u64, u64)) -> Option<(u64, bool)> {
            let mut news = None;
            for span in 1..=spans {
                self.now_ms += 50;
                self.received.datagrams += ours.0 + theirs.0;
                self.received.bytes += ours.0 * ours.1 + theirs.0 * theirs.1;
                self.refused.datagrams += theirs.0;
                self.refused.bytes += theirs.0 * theirs.1;
                let said = self.watch.on_counts(at(self.now_ms), self.received, self.refused);
                news = news.or(said.map(|said| (span, said)));
            }
            news
        }
    }

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    // test of: faults/holds-its-rate-in-a-flood
    #[test]
    fn a_flood_is_noticed_after_some_spans_and_its_end_too() {
        let mut port = Port::default();
        assert_eq!(port.take(20, (800, FULL), (0, 0)), None);
        assert_eq!(port.take(20, (400, FULL), (400, FULL)), Some((3, true)));
        assert_eq!(port.take(1, (400, FULL), (0, 0)), None, "a pause of the flood");
        assert_eq!(port.take(20, (0, 0), (800, FULL)), None, "it was said");
        assert_eq!(port.take(20, (800, FULL), (0, 0)), Some((6, false)));
    }

    #[test]
    fn very_many_small_datagrams_are_a_flood() {
        assert_eq!(Port::default().take(20, (2_000, FULL), (1_000, 24)), Some((3, true)));
    }

    #[test]
    fn a_burst_is_no_flood_such_as_the_late_packets_of_a_group_that_has_ended() {
        let mut port = Port::default();
        for _ in 0..100 {
            assert_eq!(port.take(2, (0, 0), (4_000, FULL)), None);
            assert_eq!(port.take(2, (0, 0), (0, 0)), None);
        }
    }

    #[test]
    fn a_few_strangers_are_no_flood_however_quiet_the_port_is() {
        // 16 in each 10 ms, of any size below 1 kB.
        for bytes in [24, 200, 1_000] {
            assert_eq!(Port::default().take(1_000, (0, 0), (80, bytes)), None, "{bytes}");
        }
    }

    #[test]
    fn what_would_fill_a_small_part_of_the_link_is_no_flood_between_two_calls_either() {
        let mut port = Port::default();
        for _ in 0..100 {
            assert_eq!(port.take(2, (40_000, FULL), (500, FULL)), None);
            assert_eq!(port.take(8, (0, 0), (500, FULL)), None);
        }
    }

    #[test]
    fn a_small_part_of_much_traffic_is_no_flood() {
        assert_eq!(Port::default().take(100, (40_000, FULL), (10_000, FULL)), None);
    }

    #[test]
    fn a_thread_that_stood_still_says_nothing_of_that_time() {
        let mut watch = FloodWatch { level: 2, ..FloodWatch::default() };
        let refused = Traffic { datagrams: 200_000, bytes: 200_000 * FULL };
        assert_eq!(watch.on_counts(at(1_000), refused, refused), None);
        assert_eq!(watch.level, 2);
    }

    /// What the port sees when it was asleep for so long, and then this comes.
    fn sleep(port: &mut Port, ms: u64, ours: u64, theirs: u64) -> Option<bool> {
        port.now_ms += ms;
        port.received.datagrams += ours + theirs;
        port.received.bytes += (ours + theirs) * FULL;
        port.refused.datagrams += theirs;
        port.refused.bytes += theirs * FULL;
        port.watch.on_counts(at(port.now_ms), port.received, port.refused)
    }

    #[test]
    fn a_flood_that_ends_while_the_job_is_idle_is_over() {
        let mut port = Port::default();
        assert_eq!(port.take(20, (0, 0), (800, FULL)), Some((3, true)));
        assert_eq!(sleep(&mut port, 200, 1, 0), None, "four of six spans");
        assert_eq!(sleep(&mut port, 1_000, 1, 1), Some(false));
    }

    #[test]
    fn bursts_far_apart_add_up_to_no_flood() {
        let mut port = Port::default();
        for _ in 0..100 {
            assert_eq!(port.take(2, (0, 0), (4_000, FULL)), None);
            assert_eq!(sleep(&mut port, 1_000, 0, 0), None);
        }
    }
}
