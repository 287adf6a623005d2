//! Settings of one connection.

use crate::recovery::{ControllerKind, ControllerSettings, Turn};
use crate::Spray;
use core::time::Duration;
use gradwire_wire::{ConnectionId, HEADER_BYTES, STATUS_FIXED_BYTES, STATUS_WORDS_MAX, TAG_BYTES};

/// Most chunks of one transfer: its bitmaps take 512 KiB each. From 1024 bytes of payload on, the 32 bits of a byte offset end
/// before it.
pub const CHUNKS_MAX: u32 = 1 << 22;
/// A straggler warning after its 3 s knows two heartbeats that did not come, whatever the peer timeout.
const HEARTBEAT_MAX: Duration = Duration::from_secs(1);

/// Settings of one connection. Built by the collective layer from the group's configuration.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// Id in packets that we receive.
    pub local: ConnectionId,
    /// Id in packets that we send.
    pub remote: ConnectionId,
    /// UDP payload bytes of a full datagram; the packet grid follows from it. Equal on both ranks.
    pub datagram_bytes: usize,
    /// Fingerprint of the group: all its ranks draw the same lots from it.
    pub fingerprint: u64,
    /// What hellos say, and must say to count.
    pub hello: HelloWords,
    /// Bytes that may be sent before the receiver has asked for a transfer. Equal on both ranks.
    pub eager_bytes: u64,
    /// Data packets for each acknowledgement (MLT section 4.2.3: ten); nine times as many that left at one moment.
    pub ack_every: u32,
    /// Longest that an acknowledgement is held back where packets come fast; where they are further apart it waits for three of them, at most
    /// eight times as long and 2 ms.
    pub ack_delay_max: Duration,
    /// The rate controller.
    pub controller: ControllerKind,
    /// Rate at which a fresh connection starts, bytes per second, before anything was measured.
    pub initial_rate: u64,
    /// Ranks that send to the same receiver at once: the initial window is divided by it.
    pub incast: u32,
    /// This rank's place among those that send to the same receiver. The group sets it.
    pub turn: Turn,
    /// Bytes that the receiver can hold in its socket for this sender: bounds a standing queue.
    pub receive_buffer_bytes: u64,
    /// Longest silence after which a peer is lost; see [`crate::Connection::silence_max`].
    pub peer_timeout: Duration,
    /// Paths over which packets are spread, 1 to [`crate::PATHS_MAX`]. Equal on both ranks.
    pub paths: u8,
    /// How they are spread.
    pub spray: Spray,
    /// Queues of the network for traffic classes, the most urgent first; 0 or 1: all classes share one. Urgent packets overtake others then,
    /// and which are lost is told by those of their own queue, or of less urgent ones. For one path only.
    pub class_queues: u8,
    /// Packets that go over one path before the next is chosen. Segmentation offload joins what follows each other on
    /// one path, so with it a few packets at a time are cheaper; each choice then comes later by as many.
    pub spray_run: u32,
}

/// The words of the hellos between two ranks. Where each proves by its own that it knows a secret, they are two that only who knows it can
/// compute, so that nobody can say back what he was told; else both are the fingerprint.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HelloWords {
    /// Of this rank.
    pub says: u64,
    /// Of the peer: a hello, or an answer to one, with another word counts for nothing.
    pub expects: u64,
}

impl HelloWords {
    /// The same in both directions.
    #[must_use]
    pub const fn both(word: u64) -> Self {
        Self { says: word, expects: word }
    }
}

/// Whoever knows what is expected can pass for the peer.
impl core::fmt::Debug for HelloWords {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("HelloWords(..)")
    }
}

impl ConnectionConfig {
    /// Whether packets overtake others of the same path.
    pub(crate) const fn has_class_queues(&self) -> bool {
        self.class_queues > 1 && self.paths == 1
    }

    /// So many packets of its path may have overtaken one, at most; 0: by design none do.
    #[must_use]
    pub const fn overtaken_max(&self) -> u32 {
        if self.has_class_queues() {
            crate::late_arrivals::LateArrivals::BEHIND_MAX as u32
        } else {
            0
        }
    }

    /// The network's queue for a traffic class: those without one of their own share the last.
    pub(crate) const fn queue_of(&self, class: u8) -> u8 {
        if class < self.class_queues {
            class
        } else {
            self.class_queues.saturating_sub(1)
        }
    }

    /// Payload bytes of one data packet.
    #[must_use]
    pub const fn chunk_bytes(&self) -> u32 {
        gradwire_wire::chunk_bytes_for(self.datagram_bytes) as u32
    }

    /// A peer is told as often that this rank lives, unless it is known to have heard something else of it. Who has set a long peer
    /// timeout wants to wait for a silent rank, and not to know less of where the others are.
    #[must_use]
    pub fn heartbeat(&self) -> Duration {
        self.pause_min().min(HEARTBEAT_MAX)
    }

    /// A pause that no peer is blamed for, however punctual it was.
    pub(crate) fn pause_min(&self) -> Duration {
        self.peer_timeout / 10
    }

    /// Most bitmap words of a status that fit a datagram; what they leave out is described when its turn comes.
    pub(crate) fn status_words_max(&self) -> u16 {
        let room = self.datagram_bytes.saturating_sub(HEADER_BYTES + STATUS_FIXED_BYTES + TAG_BYTES);
        (room / 8).min(STATUS_WORDS_MAX) as u16
    }

    /// What the rate controller starts from.
    pub(crate) fn controller_settings(&self) -> ControllerSettings {
        ControllerSettings {
            initial_rate: self.initial_rate,
            flows: self.incast,
            paths: u32::from(self.paths),
            turn: self.turn,
            packet_bytes: u64::from(self.chunk_bytes()),
            standing_bytes: self.receive_buffer_bytes,
        }
    }

    /// Chunks that may be sent before a grant; also the slots of the early buffer.
    #[must_use]
    pub fn eager_chunks(&self) -> u32 {
        u32::try_from(self.eager_bytes / u64::from(self.chunk_bytes())).unwrap_or(u32::MAX).max(8)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Settings that unit tests share.
    pub(crate) fn config() -> ConnectionConfig {
        ConnectionConfig {
            local: ConnectionId::new(1).expect("fits"),
            remote: ConnectionId::new(2).expect("fits"),
            datagram_bytes: 1472,
            fingerprint: 7,
            hello: HelloWords::both(7),
            eager_bytes: 64 << 10,
            ack_every: 10,
            ack_delay_max: Duration::from_micros(500),
            controller: ControllerKind::Bottleneck,
            initial_rate: 125_000_000,
            incast: 1,
            turn: Turn::Any,
            receive_buffer_bytes: 1 << 20,
            peer_timeout: Duration::from_secs(5),
            paths: 1,
            spray: Spray::Adaptive,
            spray_run: 1,
            class_queues: 0,
        }
    }
}
