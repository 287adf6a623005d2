//! What a flow holds on to while strangers flood its receiver.
//!
//! A rate controller yields to whatever shares its bottleneck. To a flood that yields to nobody it would leave everything:
//! each round trip delivers less, and the next one asks for less. But a receiver that drops a large part of what arrives because it
//! is nobody's knows that this is no congestion of its peers' making, and says so in its acknowledgements
//! ([`gradwire_wire::Flags::FLOODED`]). Its peers then go on at the rate that the path had carried before, so that the
//! port is shared between both in proportion to what they send. Others who share it lose no more than they did to that rate.

use super::filters::bytes_in;
use super::AckSample;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FloodedPath {
    /// Largest bandwidth of the present and of the last span of calm.
    spans: [Carried; 2],
    since: Timestamp,
    /// Of the latest round trip, queues included.
    rtt: Duration,
    /// How many flows share the receiver.
    flows: u64,
    held: Option<Carried>,
}

/// A rate, bytes per second, and of how many flows to the receiver one had it.
#[derive(Clone, Copy, Debug, Default)]
struct Carried {
    rate: u64,
    flows: u64,
}

impl Carried {
    fn larger(self, other: Self) -> Self {
        if other.rate > self.rate {
            other
        } else {
            self
        }
    }

    /// The same when so many flows share the receiver.
    fn among(self, flows: u64) -> u64 {
        let all = u128::from(self.rate) * u128::from(self.flows);
        let each = all / u128::from(flows.max(self.flows).max(1));
        u64::try_from(each).unwrap_or(u64::MAX).max(1)
    }
}

impl FloodedPath {
    /// So many flows share the receiver.
    pub(super) fn new(flows: u32) -> Self {
        let mut new = Self::default();
        new.on_incast(flows);
        new
    }

    /// So many flows share the receiver from now on: those that each had all of it before may not all take that.
    pub(super) fn on_incast(&mut self, flows: u32) {
        self.flows = u64::from(flows.max(1));
    }

    /// Takes an acknowledgement and the bandwidth that is estimated with it. Of a flow that had too little to send that is
    /// no bound: one that has carried barriers only would be held to a packet in a round trip.
    pub(super) fn on_ack(&mut self, sample: &AckSample, bandwidth: u64) {
        if let Some(rtt) = sample.rtt {
            self.rtt = rtt + sample.waited;
        }
        if self.held.is_some() || sample.app_limited || sample.delivery_rate.is_none() {
            return;
        }
        if sample.now.since(self.since) >= SPAN {
            (self.since, self.spans) = (sample.now, [Carried::default(), self.spans[0]]);
        }
        self.spans[0] = self.spans[0].larger(Carried { rate: bandwidth, flows: self.flows });
    }

    /// The receiver says whether it is flooded. Before anything was measured there is nothing to hold on to.
    // claim: faults/holds-its-rate-in-a-flood
    pub(super) fn set(&mut self, is_flooded: bool) {
        let held = self.held.unwrap_or(self.spans[0].larger(self.spans[1]));
        self.held = (is_flooded && held.rate > 0).then_some(held);
    }

    pub(super) fn is_set(&self) -> bool {
        self.held.is_some()
    }

    /// Instead of a pacing rate, bytes per second. The law learns nothing meanwhile: what it sends more than the path was seen
    /// to carry, at its start or to look for more, it would send until the flood is over; and what it sends less, as it does in turns
    /// to look for the round trip, would leave gaps in which the stranger fills the port, so that nearly all of the rest is lost too.
    pub(super) fn pace(&self, rate: u64) -> u64 {
        self.held.map_or(rate, |held| held.among(self.flows))
    }

    /// At least this of a window, bytes: what leaves at this pace in a round trip, queues included.
    pub(super) fn window(&self, cwnd: u64, pace: u64) -> u64 {
        self.held.map_or(cwnd, |_| bytes_in(pace, self.rtt.min(RTT_MAX)).max(cwnd))
    }
}

/// A flood is noticed within some tenths of a second; what was measured one to two of these spans before is that of calm.
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
            delivery_rate: Some(1),
            ..AckSample::default()
        }
    }

    /// A second of calm at this rate.
    fn calm(flows: u32, rate: u64) -> FloodedPath {
        let mut path = FloodedPath::new(flows);
        (0..1_000).for_each(|at_ms| path.on_ack(&sample(at_ms), rate));
        path
    }

    // test of: faults/holds-its-rate-in-a-flood
    #[test]
    fn the_rate_of_calm_is_held_while_the_receiver_is_flooded_and_no_longer() {
        let mut path = calm(1, 20_000_000);
        for at_ms in 1_500..1_600 {
            path.on_ack(&sample(at_ms), 1_000_000);
        }
        assert_eq!(
            (path.pace(1_000_000), path.window(3_000, 1_000_000)),
            (1_000_000, 3_000),
            "nobody has said a word"
        );
        path.set(true);
        for at_ms in 1_600..20_000 {
            path.on_ack(&sample(at_ms), 2_000_000);
            path.set(true);
        }
        assert_eq!((path.pace(2_000_000), path.window(3_000, 17_500_000)), (20_000_000, 175_000));
        assert_eq!(path.window(500_000, 17_500_000), 500_000);
        path.set(false);
        assert_eq!((path.pace(2_000_000), path.window(3_000, 2_000_000)), (2_000_000, 3_000));
    }

    #[test]
    fn the_rate_that_is_held_does_not_depend_on_what_the_law_did_when_the_flood_was_noticed() {
        let mut path = calm(1, 20_000_000);
        path.set(true);
        assert_eq!((path.pace(19_000_000), path.pace(1_250_000_000)), (20_000_000, 20_000_000));
    }

    #[test]
    fn what_a_flow_sent_that_had_too_little_to_send_is_not_held() {
        let mut path = FloodedPath::new(1);
        for at_ms in 0..3_000 {
            path.on_ack(&AckSample { app_limited: true, ..sample(at_ms) }, 160_000);
        }
        path.set(true);
        assert!(!path.is_set());
        assert_eq!((path.pace(1_250_000_000), path.window(14_000, 1)), (1_250_000_000, 14_000));
    }

    #[test]
    fn senders_that_each_had_the_whole_port_share_what_they_hold_once_they_send_together() {
        let mut path = calm(1, 20_000_000);
        path.set(true);
        path.on_incast(8);
        assert_eq!(path.pace(0), 2_500_000);
        path.on_incast(1);
        assert_eq!(path.pace(0), 20_000_000);
        let mut path = calm(8, 2_500_000);
        path.set(true);
        path.on_incast(1);
        assert_eq!(path.pace(0), 2_500_000, "more was never seen");
    }

    #[test]
    fn what_was_long_ago_is_not_held() {
        let mut path = FloodedPath::new(1);
        path.on_ack(&sample(0), 20_000_000);
        for at_ms in 2_000..5_000 {
            path.on_ack(&sample(at_ms), 5_000_000);
        }
        path.set(true);
        assert_eq!(path.pace(0), 5_000_000);
    }
}
