//! What a flow holds on to while strangers flood its receiver.
//!
//! A rate controller yields to whatever shares its bottleneck. To a flood that yields to nobody it would leave everything:
//! each round trip delivers less, and the next one asks for less. But a receiver that drops a large part of what arrives because it
//! is nobody's knows that this is no congestion of its peers' making, and says so in its acknowledgements
//! ([`gradwire_wire::Flags::FLOODED`]). Its peers then go on at most of the rate that the path had carried before, so that the
//! port is shared between both in proportion to what they send. Others who share it lose no more than they did to that rate.

use super::filters::bytes_in;
use super::AckSample;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FloodedPath {
    /// Largest bandwidth of the present and of the last span of calm.
    spans: [u64; 2],
    since: Timestamp,
    /// Of the latest round trip, queues included.
    rtt: Duration,
    held: Option<u64>,
}

impl FloodedPath {
    /// Takes an acknowledgement and the bandwidth that is estimated with it.
    pub(super) fn on_ack(&mut self, sample: &AckSample, bandwidth: u64) {
        if let Some(rtt) = sample.rtt {
            self.rtt = rtt + sample.waited;
        }
        if self.held.is_some() {
            return;
        }
        if sample.now.since(self.since) >= SPAN {
            (self.since, self.spans) = (sample.now, [0, self.spans[0]]);
        }
        self.spans[0] = self.spans[0].max(bandwidth);
    }

    /// The receiver says whether it is flooded. Before anything was measured there is nothing to hold on to.
    // claim: faults/holds-its-rate-in-a-flood
    pub(super) fn set(&mut self, is_flooded: bool) {
        let calm = self.spans[0].max(self.spans[1]);
        let held = self.held.unwrap_or(calm / HELD.1 * HELD.0);
        self.held = (is_flooded && held > 0).then_some(held);
    }

    pub(super) fn is_set(&self) -> bool {
        self.held.is_some()
    }

    /// This in place of a pacing rate, bytes per second.
    pub(super) fn pace(&self, rate: u64) -> u64 {
        self.held.unwrap_or(rate)
    }

    /// This in place of a window, bytes: what is lost counts as in flight until that is known, a round trip later.
    pub(super) fn window(&self, cwnd: u64) -> u64 {
        self.held.map_or(cwnd, |held| bytes_in(held, self.rtt.min(RTT_MAX) * 2).max(cwnd))
    }
}

/// Of the largest rate that was seen: the largest sample is above what the path carries, and more than that would queue here.
const HELD: (u64, u64) = (7, 8);
/// A flood is noticed within some ten milliseconds; what was measured one to two of these spans before is that of calm.
const SPAN: Duration = Duration::from_secs(1);
/// Longer round trips are those of a host that stood still.
const RTT_MAX: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_ms: u64) -> AckSample {
        AckSample {
            now: Timestamp::from_nanos(at_ms * 1_000_000),
            rtt: Some(Duration::from_millis(10)),
            ..AckSample::default()
        }
    }

    // test of: faults/holds-its-rate-in-a-flood
    #[test]
    fn most_of_the_rate_of_calm_is_held_while_the_receiver_is_flooded_and_no_longer() {
        let mut path = FloodedPath::default();
        for at_ms in 0..1_500 {
            path.on_ack(&sample(at_ms), 20_000_000);
        }
        for at_ms in 1_500..1_600 {
            path.on_ack(&sample(at_ms), 1_000_000);
        }
        assert_eq!((path.pace(1_000_000), path.window(3_000)), (1_000_000, 3_000), "nobody has said a word");
        path.set(true);
        for at_ms in 1_600..20_000 {
            path.on_ack(&sample(at_ms), 2_000_000);
            path.set(true);
        }
        assert_eq!((path.pace(2_000_000), path.window(3_000)), (17_500_000, 350_000));
        assert_eq!((path.pace(30_000_000), path.window(500_000)), (17_500_000, 500_000));
        path.set(false);
        assert_eq!((path.pace(2_000_000), path.window(3_000)), (2_000_000, 3_000));
    }

    #[test]
    fn what_was_long_ago_is_not_held() {
        let mut path = FloodedPath::default();
        path.on_ack(&sample(0), 20_000_000);
        for at_ms in 2_000..5_000 {
            path.on_ack(&sample(at_ms), 5_000_000);
        }
        path.set(true);
        assert_eq!(path.pace(0), 4_375_000);
    }
}
