//! Packets of others: they leave every host at random times for random hosts, in the last band, and heed nothing.

use super::host::OTHERS;
use super::{ClusterPlan, Event};
use crate::fabric::Fabric;
use crate::{EventQueue, Rng};
use gradwire_core::{Ecn, Timestamp};
use std::time::Duration;

/// See the module.
#[derive(Debug)]
pub(super) struct Background {
    /// Mean time between two packets of a host; `None`: there are none.
    mean: Option<Duration>,
    hosts: u64,
    rng: Rng,
}

impl Background {
    pub(super) fn new(plan: &ClusterPlan, rng: Rng) -> Self {
        let hosts = plan.topology.hosts() as u64;
        let bytes = u64::from(PAYLOAD_BYTES) + plan.topology.header_bytes;
        let nanos = bytes as f64 * 1e9 / (plan.topology.host_rate as f64 * plan.background);
        let is_wanted = plan.background > 0.0 && hosts > 1;
        Self { mean: is_wanted.then(|| Duration::from_nanos(nanos as u64)), hosts, rng }
    }

    pub(super) fn begin(&mut self, now: Timestamp, queue: &mut EventQueue<Event>) {
        (0..self.hosts as u32).for_each(|place| self.plan_next(now, place, queue));
    }

    /// One packet leaves, and the next one of this host is planned.
    pub(super) fn send(
        &mut self,
        now: Timestamp,
        place: u32,
        fabric: &mut Fabric,
        queue: &mut EventQueue<Event>,
    ) {
        let step = 1 + self.rng.below(0..self.hosts - 1);
        let flow = self.rng.below(0..256) as u8;
        let id = fabric.packets().take();
        let packet = fabric.packets().get_mut(id);
        (packet.from, packet.to) = (place, ((u64::from(place) + step) % self.hosts) as u32);
        (packet.band, packet.ecn, packet.flow) = (OTHERS, Ecn::NotCapable, flow);
        (packet.payload_bytes, packet.is_background) = (PAYLOAD_BYTES, true);
        fabric.send(now, id, queue);
        self.plan_next(now, place, queue);
    }

    fn plan_next(&mut self, now: Timestamp, place: u32, queue: &mut EventQueue<Event>) {
        if let Some(mean) = self.mean {
            // Exponential: arrivals at random.
            let pause = mean.mul_f64(-(1.0 - self.rng.unit()).ln());
            queue.schedule(now + pause, Event::Background { place });
        }
    }
}

/// A full datagram.
const PAYLOAD_BYTES: u32 = 1472;
