//! The way from one rank to another through the switch: where datagrams are lost, held back and doubled.

use super::{Burst, Impairments};
use crate::Rng;
use gradwire_core::Timestamp;
use std::time::Duration;

/// What became of one datagram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flight {
    /// When it reaches the receiver's port; `None`: lost.
    pub arrives_at: Option<Timestamp>,
    /// When its duplicate does.
    pub duplicate_at: Option<Timestamp>,
    /// Whether it was held back.
    pub reordered: bool,
    /// Whether bits flipped on the way, which the checksum finds.
    pub corrupted: bool,
    /// Whether bits flipped which it does not find.
    pub forged: bool,
    /// Whether a datagram of somebody else comes with it.
    pub stray: bool,
}

/// One direction between two ranks.
#[derive(Debug)]
pub(crate) struct Channel {
    rng: Rng,
    burst_since: Option<Timestamp>,
    cut: bool,
    last_arrival: Timestamp,
}

impl Channel {
    /// A channel whose chance comes from `rng`.
    #[must_use]
    pub(crate) fn new(rng: Rng) -> Self {
        Self { rng, burst_since: None, cut: false, last_arrival: Timestamp::ZERO }
    }

    /// While cut, everything is lost.
    pub(crate) fn set_cut(&mut self, cut: bool) {
        self.cut = cut;
    }

    /// A datagram that left its sender's NIC at `left_at`.
    pub(crate) fn cross(&mut self, left_at: Timestamp, impairments: &Impairments, delay: Duration) -> Flight {
        let lost_in_burst = impairments.burst.is_some_and(|burst| self.burst_loses(left_at, burst));
        if self.cut || lost_in_burst || self.rng.chance(impairments.loss) {
            return Flight::default();
        }
        let reordered = self.rng.chance(impairments.reorder);
        let arrives_at = self.arrival(left_at + delay, impairments, reordered);
        let duplicate_at = self.rng.chance(impairments.duplicate).then(|| {
            let behind = self.rng.duration(delay.max(Duration::from_micros(1)));
            arrives_at + behind
        });
        let corrupted = self.rng.chance(impairments.corrupt);
        let forged = self.rng.chance(impairments.forge);
        let stray = self.rng.chance(impairments.stray);
        Flight { arrives_at: Some(arrives_at), duplicate_at, reordered, corrupted, forged, stray }
    }

    fn burst_loses(&mut self, now: Timestamp, burst: Burst) -> bool {
        self.burst_since = match self.burst_since {
            None => self.rng.chance(burst.enter).then_some(now),
            Some(since) => {
                let over = self.rng.chance(burst.leave) || now.since(since) > burst.lasts_max;
                (!over).then_some(since)
            }
        };
        self.burst_since.is_some() && self.rng.chance(burst.loss)
    }

    /// Jitter alone never reorders: it models a queue elsewhere, and queues keep order.
    fn arrival(&mut self, undisturbed: Timestamp, impairments: &Impairments, reordered: bool) -> Timestamp {
        let jittered = undisturbed + self.rng.duration(impairments.jitter);
        if reordered {
            return jittered + self.rng.duration(impairments.reorder_delay);
        }
        self.last_arrival = self.last_arrival.max(jittered);
        self.last_arrival
    }
}
