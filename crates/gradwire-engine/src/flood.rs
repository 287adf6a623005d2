//! Notices that strangers flood the port: peers are told, and go on at the rate that they had (docs/security.md).
//!
//! Fed by the driver with what it counts anyway.

use gradwire_core::Timestamp;
use std::time::Duration;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct FloodWatch {
    since: Timestamp,
    received: u64,
    refused: u64,
    until: Option<Timestamp>,
}

impl FloodWatch {
    /// Whether there is a flood now.
    pub(crate) fn is_flooded(&self) -> bool {
        self.until.is_some()
    }

    // claim: faults/holds-its-rate-in-a-flood
    /// So many datagrams have come so far, and so many of them were nobody's. `Some`: that a flood has begun, or is over.
    pub(crate) fn on_counts(&mut self, now: Timestamp, received: u64, refused: u64) -> Option<bool> {
        if now.since(self.since) < SPAN {
            return None;
        }
        let (came, strange) = (received - self.received, refused - self.refused);
        // After an idle time the span is longer: then it takes as many more.
        let many = STRANGERS_MIN * (now.since(self.since).as_nanos() / SPAN.as_nanos()) as u64;
        (self.since, self.received, self.refused) = (now, received, refused);
        let was_flooded = self.until.is_some();
        if strange >= many && strange * STRANGE_PART >= came {
            self.until = Some(now + LASTS);
        } else if self.until.is_some_and(|until| now >= until) {
            self.until = None;
        }
        (self.until.is_some() != was_flooded).then_some(self.until.is_some())
    }
}

/// What is counted together.
const SPAN: Duration = Duration::from_millis(10);
/// Fewer in a span do no harm: 16 full datagrams are 20 Mbit/s.
const STRANGERS_MIN: u64 = 16;
/// At least one in so many datagrams is nobody's: less leaves the peers most of the link anyway, and is not worth to insist.
const STRANGE_PART: u64 = 4;
/// Between two bursts of a flood nothing changes.
const LASTS: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    // test of: faults/holds-its-rate-in-a-flood
    #[test]
    fn a_flood_is_noticed_within_a_span_and_its_end_after_a_while() {
        let mut watch = FloodWatch::default();
        assert_eq!(watch.on_counts(at(20), 400, 0), None);
        assert_eq!(watch.on_counts(at(25), 500, 80), None, "half a span");
        assert_eq!(watch.on_counts(at(30), 700, 200), Some(true));
        assert_eq!(watch.on_counts(at(40), 900, 300), None, "it was said");
        assert_eq!(watch.on_counts(at(230), 5_000, 300), None);
        assert_eq!(watch.on_counts(at(240), 5_100, 300), Some(false));
    }

    #[test]
    fn a_few_strangers_are_no_flood_however_quiet_the_port_is() {
        let mut watch = FloodWatch::default();
        for second in 1..100 {
            assert_eq!(watch.on_counts(at(second * 1_000), second * 1_000, second * 1_000), None);
        }
    }

    #[test]
    fn a_small_part_of_much_traffic_is_no_flood() {
        let mut watch = FloodWatch::default();
        for span in 1..100 {
            assert_eq!(watch.on_counts(at(span * 10), span * 1_000, span * 200), None);
        }
    }
}
