//! One host of the cluster: a real group, and the NIC that it hands its datagrams to.

use super::circle::Circle;
use super::flows::FlowLog;
use super::stages::Call;
use super::{ClusterPlan, Event};
use crate::fabric::{Fabric, BANDS_MAX};
use crate::EventQueue;
use gradwire_collectives::{Group, GroupConfig, PeerConfig, TransmitSink};
use gradwire_core::{Ecn, Mark, Timestamp, TrafficClass};

/// A rank's end of a group, and what surrounds it.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) group: Group,
    /// Who else is in it.
    pub(super) circle: Circle,
    /// Where it hangs.
    pub(super) place: usize,
    pub(super) connected: bool,
    /// Calls that have not ended.
    pub(super) calls: Vec<Call>,
    /// Buckets of this step that are still to be called for or have not ended, of a rank whose first group this is.
    pub(super) open: usize,
    pub(super) armed_at: Option<Timestamp>,
    pub(super) armed: u32,
    pub(super) waits_for_room: bool,
}

impl Host {
    pub(super) fn new(plan: &ClusterPlan, node: usize, place: usize, now: Timestamp) -> Self {
        let (level, rank) = (node / plan.ranks(), node % plan.ranks());
        let circle = plan.circle(level, rank);
        Self {
            group: Group::new(group_config(plan, &circle, circle.number_of(rank)), now),
            circle,
            place,
            connected: false,
            calls: Vec::new(),
            open: 0,
            armed_at: None,
            armed: 0,
            waits_for_room: false,
        }
    }
}

fn group_config(plan: &ClusterPlan, circle: &Circle, rank: usize) -> GroupConfig {
    let peers = (0..circle.size).filter(|peer| *peer != rank);
    let peer_config = |peer: usize| PeerConfig {
        rank: peer as u32,
        host: String::new(),
        connection: plan.host.connection(circle.size, rank, peer),
    };
    GroupConfig {
        rank: rank as u32,
        world_size: circle.callers as u32,
        peers: peers.map(peer_config).collect(),
        incast: plan.host.incast,
        exchange: plan.host.exchange,
        servers: circle.servers,
    }
}

/// Takes datagrams from a group straight into its host's NIC.
pub(super) struct Nic<'a> {
    pub(super) now: Timestamp,
    pub(super) node: u32,
    pub(super) circle: Circle,
    pub(super) place: usize,
    /// Of each rank.
    pub(super) places: &'a [usize],
    pub(super) room_bytes: u64,
    /// Longer payloads are counted and not carried.
    pub(super) carried_bytes: usize,
    pub(super) tells_marks: bool,
    pub(super) fabric: &'a mut Fabric,
    pub(super) queue: &'a mut EventQueue<Event>,
    pub(super) flows: &'a mut FlowLog,
}

impl TransmitSink for Nic<'_> {
    fn has_room(&self) -> bool {
        self.fabric.nic_bytes(self.place) < self.room_bytes
    }

    fn push(&mut self, peer: u32, mark: Mark, head: &[u8], payload: &[u8]) {
        let (ranks, to) = (self.places.len(), self.circle.rank_of(peer as usize));
        let level = self.node as usize / ranks;
        let between = (self.node, (level * ranks + to) as u32);
        let path = self.flows.on_sent(self.now, between, head, payload.len());
        let (band, ecn) = self.treatment(mark);
        let id = self.fabric.packets().take();
        let packet = self.fabric.packets().get_mut(id);
        (packet.from, packet.to, packet.flow) = (self.place as u32, self.places[to] as u32, path);
        (packet.band, packet.ecn, packet.group) = (band, ecn, level as u8);
        let carried = if payload.len() <= self.carried_bytes { payload } else { &[] };
        packet.payload_bytes = (payload.len() - carried.len()) as u32;
        packet.is_background = false;
        packet.head.extend_from_slice(head);
        packet.head.extend_from_slice(carried);
        self.fabric.send(self.now, id, self.queue);
    }
}

impl Nic<'_> {
    /// The band and the ECN field. Presets that tell the network nothing travel with what others send.
    fn treatment(&self, mark: Mark) -> (u8, Ecn) {
        if !self.tells_marks {
            return (OTHERS, Ecn::NotCapable);
        }
        let ecn = if mark.ecn_capable { Ecn::Capable } else { Ecn::NotCapable };
        match mark.class {
            TrafficClass::Control => (0, ecn),
            TrafficClass::Data(class) => (1 + class, ecn),
        }
    }
}

/// The band of what has no class: the last one, whatever its number.
pub(super) const OTHERS: u8 = BANDS_MAX as u8 - 1;
