//! A data-centre network for many hosts: leaves and spines, ports with queues in strict priority, ECN, broken and gray
//! links.
//!
//! ```text
//! send -> [NIC] -> Hop -> [port] -> Hop -> [port] -> .. -> Arrival
//! ```
//!
//! [`crate::Network`] models the links between few ranks as times and schedules nothing; here a packet waits in each port on
//! its way, because urgent ones overtake it there. Two events for each port on the way, no allocation for a packet, no
//! payload bytes. The books of each port ([`FabricViolation`]) are kept beside its queues.

mod ledger;
mod packets;
mod port;
#[cfg(test)]
mod tests;
mod topology;

pub use ledger::FabricViolation;
pub use packets::{Packet, PacketId, Packets};
pub use port::PortStats;
use port::{Fate, Port};
pub use topology::{LeafSpine, PathChoice, Place, QueueOptions};

use crate::{mix, EventQueue, PathTrouble, Rng};
use gradwire_core::Timestamp;

/// Most bands of a port: control, eight classes, others.
pub const BANDS_MAX: usize = 10;

/// What happens in the fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricEvent {
    /// A packet has crossed a link and comes to this port.
    Hop {
        /// Which packet.
        packet: PacketId,
        /// Which port.
        port: u32,
    },
    /// The last bit of a packet has left this port.
    Free {
        /// Which port.
        port: u32,
    },
}

/// What a fabric has to say after an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricNews {
    /// Nothing for hosts.
    Nothing,
    /// A packet has reached its host, which gives its place back.
    Arrival(PacketId),
    /// A host's NIC has sent a packet.
    Sent {
        /// The host.
        host: usize,
    },
}

/// Deliberate damage, for tests of the checkers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Damage {
    /// None.
    #[default]
    Nothing,
    /// Drops are not written down.
    ForgetsDrops,
    /// The second packet of a band leaves before the first.
    LetsOvertake,
    /// A full buffer takes one more.
    OverfillsBuffers,
}

/// The network. Time is the caller's: it hands each event back when it is due.
#[derive(Debug)]
pub struct Fabric {
    topology: LeafSpine,
    ports: Vec<Port>,
    packets: Packets,
    rng: Rng,
    damage: Damage,
    injected: u64,
}

impl Fabric {
    /// A healthy network with empty queues.
    #[must_use]
    pub fn new(topology: LeafSpine, rng: Rng, damage: Damage) -> Self {
        let ports = (0..topology.ports()).map(|port| Port::new(topology.rate(port))).collect();
        Self { topology, ports, packets: Packets::default(), rng, damage, injected: 0 }
    }

    /// Its shape.
    #[must_use]
    pub const fn topology(&self) -> &LeafSpine {
        &self.topology
    }

    /// The packets under way.
    pub fn packets(&mut self) -> &mut Packets {
        &mut self.packets
    }

    /// A packet leaves its host. Its `wire_bytes` are set here.
    pub fn send<E: From<FabricEvent>>(&mut self, now: Timestamp, id: PacketId, queue: &mut EventQueue<E>) {
        let packet = self.packets.get_mut(id);
        packet.wire_bytes =
            packet.payload_bytes + packet.head.len() as u32 + self.topology.header_bytes as u32;
        let nic = packet.from as usize;
        self.injected += 1;
        self.enter(now, id, nic, queue);
    }

    /// Bytes that wait in a host's NIC.
    #[must_use]
    pub fn nic_bytes(&self, host: usize) -> u64 {
        self.ports[host].queued_bytes()
    }

    /// Does what is due.
    pub fn handle<E: From<FabricEvent>>(
        &mut self,
        now: Timestamp,
        event: FabricEvent,
        queue: &mut EventQueue<E>,
    ) -> FabricNews {
        match event {
            FabricEvent::Hop { packet, port: ARRIVED } => FabricNews::Arrival(packet),
            FabricEvent::Hop { packet, port } => {
                self.enter(now, packet, port as usize, queue);
                FabricNews::Nothing
            }
            FabricEvent::Free { port } => self.leave(now, port as usize, queue),
        }
    }

    /// What is wrong with both directions of the link between a leaf and a spine; the default: nothing.
    pub fn set_core_link(&mut self, leaf: usize, spine: usize, trouble: PathTrouble) {
        for port in [self.topology.uplink(leaf, spine), self.topology.downlink(spine, leaf)] {
            self.ports[port].trouble = trouble;
        }
    }

    /// What one port did.
    #[must_use]
    pub fn port(&self, port: usize) -> PortStats {
        self.ports[port].stats
    }

    /// What all switch ports did: sums, and the most that one of them held.
    #[must_use]
    pub fn switches(&self) -> PortStats {
        self.ports[self.topology.hosts()..]
            .iter()
            .fold(PortStats::default(), |all, port| all.with(&port.stats))
    }

    /// Packets that hosts have sent.
    #[must_use]
    pub const fn injected(&self) -> u64 {
        self.injected
    }

    /// Looks at the books of every port.
    ///
    /// # Errors
    /// The first port whose books do not hold.
    pub fn check(&self) -> Result<(), FabricViolation> {
        let mut ports = self.ports.iter().enumerate();
        ports.try_for_each(|(number, port)| port.ledger().check(number, port.count_waiting(&self.packets)))
    }

    fn enter<E: From<FabricEvent>>(
        &mut self,
        now: Timestamp,
        id: PacketId,
        port: usize,
        queue: &mut EventQueue<E>,
    ) {
        // A NIC's queue is its host's memory: the host stops handing out before it grows.
        let limits = (port >= self.topology.hosts()).then_some(&self.topology.queue);
        match self.ports[port].enqueue(id, &mut self.packets, limits, self.damage) {
            Fate::Waits => self.start(now, port, queue),
            Fate::Dropped => self.packets.give_back(id),
        }
    }

    fn start<E: From<FabricEvent>>(&mut self, now: Timestamp, port: usize, queue: &mut EventQueue<E>) {
        if let Some(time) = self.ports[port].start(&mut self.packets, self.damage) {
            queue.schedule(now + time, FabricEvent::Free { port: port as u32 }.into());
        }
    }

    fn leave<E: From<FabricEvent>>(
        &mut self,
        now: Timestamp,
        port: usize,
        queue: &mut EventQueue<E>,
    ) -> FabricNews {
        let trouble = self.ports[port].trouble;
        if let Some(packet) = self.ports[port].finish() {
            if trouble.loss > 0.0 && self.rng.chance(trouble.loss) {
                self.ports[port].stats.lost += 1;
                self.packets.give_back(packet);
            } else {
                let at = now + self.topology.link_delay + trouble.delay;
                let next = self.next(port, packet);
                queue.schedule(at, FabricEvent::Hop { packet, port: next }.into());
            }
        }
        self.start(now, port, queue);
        if port < self.topology.hosts() {
            FabricNews::Sent { host: port }
        } else {
            FabricNews::Nothing
        }
    }

    /// The port that a packet comes to behind the link of `port`.
    fn next(&mut self, port: usize, id: PacketId) -> u32 {
        let packet = self.packets.get(id);
        let (from, to, flow) = (packet.from as usize, packet.to as usize, packet.flow);
        let (here, there) = (self.topology.leaf_of(from), self.topology.leaf_of(to));
        let next = match self.topology.place(port) {
            Place::HostPort(_) => return ARRIVED,
            Place::Nic(_) if here != there => {
                let spine = self.spine(from, to, flow);
                self.topology.uplink(here, spine)
            }
            Place::Uplink { spine, .. } => self.topology.downlink(spine, there),
            Place::Nic(_) | Place::Downlink { .. } => self.topology.host_port(to),
        };
        next as u32
    }

    fn spine(&mut self, from: usize, to: usize, flow: u8) -> usize {
        let spines = self.topology.spines as u64;
        let number = match self.topology.choice {
            PathChoice::PerFlow => mix((from as u64) << 40 | (to as u64) << 8 | u64::from(flow)),
            PathChoice::PerPacket => self.rng.draw(),
        };
        (number % spines) as usize
    }
}

impl PortStats {
    fn with(self, other: &Self) -> Self {
        Self {
            arrived: self.arrived + other.arrived,
            departed: self.departed + other.departed,
            overflowed: self.overflowed + other.overflowed,
            dropped_selectively: self.dropped_selectively + other.dropped_selectively,
            marked: self.marked + other.marked,
            lost: self.lost + other.lost,
            bytes_most: self.bytes_most.max(other.bytes_most),
        }
    }
}

/// In place of a port: the host itself.
const ARRIVED: u32 = u32::MAX;
