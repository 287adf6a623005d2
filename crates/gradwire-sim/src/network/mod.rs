//! The modelled network: every rank is a host on one switch, or on one of two that are joined by a narrow trunk.
//!
//! ```text
//! rank i -> [NIC queue] -> up link -> (loss, burst, delay, jitter, duplicate)
//!        -> [port buffer -> trunk ->] [port buffer] -> down link -> rank j
//! ```
//!
//! A datagram leaves the sender's NIC at the up link's rate, crosses the switch, and waits in the port to the other
//! rack and in that of the receiver, where it is dropped when the buffer is full (incast). All of it is arithmetic on
//! "busy until" times: the network schedules nothing itself, it answers when a datagram arrives, and the world queues that.

mod channel;
mod options;
mod paths;

use channel::Channel;
pub use channel::Flight;
pub use options::{Burst, Impairments, LinkOptions, NetworkOptions, Trunk};
use paths::Lanes;
pub use paths::PathTrouble;

use crate::Rng;
use gradwire_core::Timestamp;
use std::time::Duration;

/// What the network did to datagrams, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetworkStats {
    /// Handed in by senders.
    pub sent: u64,
    /// Handed to receivers, duplicates included.
    pub delivered: u64,
    /// Lost on the way: random, burst or partition.
    pub lost: u64,
    /// Dropped because a receiver's port was full.
    pub overflowed: u64,
    /// Delivered twice.
    pub duplicated: u64,
    /// Held back so that later ones overtook them.
    pub reordered: u64,
    /// Bytes altered.
    pub corrupted: u64,
}

/// A switch's port, where datagrams wait for a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// To the other rack: 0 from the first to the second, 1 back.
    Trunk(usize),
    /// To a rank.
    Host(usize),
}

/// The network between `world_size` ranks.
#[derive(Debug)]
pub struct Network {
    options: NetworkOptions,
    up_busy_until: Vec<Timestamp>,
    down_busy_until: Vec<Timestamp>,
    trunk_busy_until: [Timestamp; 2],
    lanes: Lanes,
    stats: NetworkStats,
}

impl Network {
    /// A quiet network. Every ordered pair of ranks has its own stream of chance.
    #[must_use]
    pub fn new(options: NetworkOptions, world_size: usize, rng: &Rng) -> Self {
        let lanes = Lanes::new(world_size, &options.paths, rng);
        Self {
            options,
            up_busy_until: vec![Timestamp::ZERO; world_size],
            down_busy_until: vec![Timestamp::ZERO; world_size],
            trunk_busy_until: [Timestamp::ZERO; 2],
            lanes,
            stats: NetworkStats::default(),
        }
    }

    /// A datagram of `bytes` UDP payload bytes leaves `from`. Returns when it and its duplicate reach
    /// [`Network::first_port`].
    pub fn transmit(&mut self, now: Timestamp, from: usize, to: usize, bytes: usize) -> Flight {
        self.transmit_on(0, now, (from, to), bytes)
    }

    /// As [`Network::transmit`], over one of the paths between the two ranks `(from, to)`.
    pub fn transmit_on(
        &mut self,
        path: usize,
        now: Timestamp,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Flight {
        let LinkOptions { up_rate: rate, bucket_bytes, .. } = self.options.link(from);
        let left_at = cross_link(&mut self.up_busy_until[from], now, bytes, (rate, bucket_bytes));
        let lane = self.lanes.between(from, to, path);
        let mut impairments = self.options.impairments_between(from, to);
        let mut delay = self.options.delay_between(from, to);
        if let Some(trouble) = lane.trouble {
            trouble.worsen(&mut impairments, &mut delay);
        }
        let flight = lane.channel.cross(left_at, &impairments, delay);
        self.count(&flight);
        flight
    }

    /// The first port that a datagram from one rank to another waits in.
    #[must_use]
    pub fn first_port(&self, from: usize, to: usize) -> Port {
        let rack = |rank: usize| self.options.trunk.map_or(0, |trunk| usize::from(rank >= trunk.first_rack));
        if rack(from) == rack(to) {
            Port::Host(to)
        } else {
            Port::Trunk(rack(from))
        }
    }

    /// A datagram reaches a port. Returns when it has crossed the link behind it, or `None` when the port's buffer
    /// had no room. Behind a trunk comes the port of the receiver, behind that the receiver.
    pub fn enqueue(&mut self, now: Timestamp, port: Port, bytes: usize) -> Option<Timestamp> {
        let (rate, buffer_bytes, bucket_bytes, delay) = self.link_behind(port);
        let busy_until = match port {
            Port::Trunk(direction) => &mut self.trunk_busy_until[direction],
            Port::Host(rank) => &mut self.down_busy_until[rank],
        };
        let waiting = bytes_within(*busy_until - now, rate);
        if waiting + wire_bytes(bytes) > buffer_bytes.max(wire_bytes(bytes)) {
            self.stats.overflowed += 1;
            return None;
        }
        let crossed_at = cross_link(busy_until, now, bytes, (rate, bucket_bytes));
        self.stats.delivered += u64::from(matches!(port, Port::Host(_)));
        Some(crossed_at + delay)
    }

    /// Rate, buffer, bucket and delay of a port's link. The delay of a rank's own link is part of the way to its switch.
    fn link_behind(&self, port: Port) -> (u64, u64, u64, Duration) {
        match (port, self.options.trunk) {
            (Port::Trunk(_), Some(trunk)) => (trunk.rate, trunk.buffer_bytes, 0, trunk.delay),
            (Port::Trunk(_), None) => (u64::MAX, u64::MAX, 0, Duration::ZERO),
            (Port::Host(rank), _) => {
                let link = self.options.link(rank);
                (link.down_rate, link.buffer_bytes, link.bucket_bytes, Duration::ZERO)
            }
        }
    }

    /// Time until the NIC of `from` has sent all but `bytes` of what it was given; zero when it has.
    #[must_use]
    pub fn time_until_backlog(&self, now: Timestamp, from: usize, bytes: u64) -> Duration {
        let allowed = duration_of(bytes, self.options.link(from).up_rate);
        (self.up_busy_until[from] - now).saturating_sub(allowed)
    }

    /// Cuts or restores both directions between two ranks. What is under way still arrives.
    pub fn set_partition(&mut self, a: usize, b: usize, cut: bool) {
        self.lanes.set_cut(a, b, cut);
        self.lanes.set_cut(b, a, cut);
    }

    /// Says what is wrong with one path between two ranks, in both directions; `None`: it has healed.
    pub fn set_path(&mut self, a: usize, b: usize, path: usize, trouble: Option<PathTrouble>) {
        self.lanes.between(a, b, path).trouble = trouble;
        self.lanes.between(b, a, path).trouble = trouble;
    }

    /// One path between any two ranks loses datagrams with this probability, both ways. Its delay stays.
    pub fn set_path_loss(&mut self, path: usize, loss: f64) {
        let delay = self.options.paths.get(path).map_or(Duration::ZERO, |trouble| trouble.delay);
        self.lanes.set_trouble(path, PathTrouble { loss, delay });
    }

    /// From now on nothing is lost, duplicated, reordered or altered (buffers stay finite).
    pub fn heal(&mut self) {
        self.options.impairments = Impairments::default();
        self.options.paths.clear();
        self.lanes.heal();
    }

    /// Counters.
    #[must_use]
    pub const fn stats(&self) -> NetworkStats {
        self.stats
    }

    fn count(&mut self, flight: &Flight) {
        self.stats.sent += 1;
        self.stats.lost += u64::from(flight.arrives_at.is_none());
        self.stats.duplicated += u64::from(flight.duplicate_at.is_some());
        self.stats.reordered += u64::from(flight.reordered);
        self.stats.corrupted += u64::from(flight.corrupted);
    }
}

/// Bytes that a datagram occupies on a link: IPv4 20, UDP 8, Ethernet header 14.
#[must_use]
const fn wire_bytes(bytes: usize) -> u64 {
    bytes as u64 + 42
}

/// A datagram goes over a link that is busy until then, of so many bytes per second and with such a bucket. Returns when its last bit has left.
/// With a bucket the link is ahead of itself by no more than that: `busy_until` then lies in the past.
fn cross_link(
    busy_until: &mut Timestamp,
    now: Timestamp,
    bytes: usize,
    (rate, bucket_bytes): (u64, u64),
) -> Timestamp {
    let full_at = now.as_nanos().saturating_sub(duration_of(bucket_bytes, rate).as_nanos() as u64);
    *busy_until = (*busy_until).max(Timestamp::from_nanos(full_at)) + serialisation(bytes, rate);
    (*busy_until).max(now)
}

fn serialisation(bytes: usize, rate: u64) -> Duration {
    duration_of(wire_bytes(bytes), rate)
}

fn duration_of(bytes: u64, rate: u64) -> Duration {
    Duration::from_nanos(bytes.saturating_mul(1_000_000_000) / rate.max(1))
}

fn bytes_within(time: Duration, rate: u64) -> u64 {
    (time.as_nanos() * u128::from(rate) / 1_000_000_000) as u64
}

#[cfg(test)]
mod tests;
