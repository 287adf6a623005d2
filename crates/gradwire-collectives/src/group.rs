//! One rank of one process group, as one machine without IO.

use crate::{DeliveryReport, OpError, OpId, Request};
use gradwire_core::{ConnectionConfig, ConnectionStats, Timeout, Timestamp};
use std::time::Duration;

/// A peer, as the group needs to know it.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Its rank in the group.
    pub rank: u32,
    /// Its host name, for messages.
    pub host: String,
    /// Settings of the connection to it.
    pub connection: ConnectionConfig,
}

/// Settings of a group on one rank.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// This rank.
    pub rank: u32,
    /// Ranks in the group.
    pub world_size: u32,
    /// Every other rank, in any order.
    pub peers: Vec<PeerConfig>,
}

/// Where datagrams go. Called by [`Group::poll_transmit`] for one datagram at a time; consecutive calls for one peer
/// form a batch that the engine hands to the kernel at once.
pub trait TransmitSink {
    /// Whether another datagram fits.
    fn has_room(&self) -> bool;
    /// Takes one datagram for `peer`: `head`, then `payload` (which points into the tensor and must be copied or
    /// sent before the group is called again). `head.len() + payload.len()` is at most the datagram size.
    fn push(&mut self, peer: u32, head: &[u8], payload: &[u8]);
}

/// What a group reports.
#[derive(Debug)]
#[non_exhaustive]
pub enum GroupEvent {
    /// Every peer has answered.
    Connected,
    /// A collective ended; its memory is the caller's again.
    Done {
        /// Which.
        op: OpId,
        /// How.
        outcome: Result<DeliveryReport, OpError>,
    },
}

/// One rank of one process group. The drain contract is that of [`gradwire_core::Connection`].
#[derive(Debug)]
pub struct Group;

impl Group {
    /// Starts to connect to every peer.
    #[must_use]
    pub fn new(_config: GroupConfig, _now: Timestamp) -> Self {
        todo!()
    }

    /// Starts a collective. Collectives of one group must be submitted in the same order on every rank. Every error,
    /// an invalid request too, arrives as [`GroupEvent::Done`].
    pub fn submit(&mut self, _now: Timestamp, _request: Request) -> OpId {
        todo!()
    }

    /// Takes a datagram from `peer` (found by its connection id). Whatever is wrong with it is only counted.
    pub fn handle_datagram(&mut self, _now: Timestamp, _peer: u32, _datagram: &[u8]) {
        todo!()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, _now: Timestamp) {
        todo!()
    }

    /// When `handle_timeout` is due (then also call `poll_transmit`).
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timeout> {
        todo!()
    }

    /// Gives every datagram that may leave now, until the sink is full. Peers take turns, a burst at a time.
    pub fn poll_transmit(&mut self, _now: Timestamp, _sink: &mut dyn TransmitSink) {
        todo!()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<GroupEvent> {
        todo!()
    }

    /// Ends everything in flight with [`OpError::ShutDown`] if it cannot be drained, and says goodbye to the peers.
    pub fn leave(&mut self, _now: Timestamp) {
        todo!()
    }

    /// Whether nothing more has to be said after [`Group::leave`].
    #[must_use]
    pub fn is_drained(&self) -> bool {
        todo!()
    }

    /// Counters of the connection to each peer.
    #[must_use]
    pub fn stats(&self) -> Vec<(u32, ConnectionStats)> {
        todo!()
    }

    /// For a timeout while connecting: peers that have not answered, with how long ago they were last heard.
    #[must_use]
    pub fn unreachable_peers(&self) -> Vec<(u32, Option<Duration>)> {
        todo!()
    }
}
