//! Settings of one connection.

use core::time::Duration;
use gradwire_wire::ConnectionId;

/// Most chunks of one transfer: 16 bits of offset arithmetic would not do, 32 bits of byte offset do.
pub const CHUNKS_MAX: u32 = 1 << 22;

/// Settings of one connection. Built by the collective layer from the group's configuration.
#[derive(Clone, Debug)]
pub struct ConnectionConfig {
    /// Id in packets that we receive.
    pub local: ConnectionId,
    /// Id in packets that we send.
    pub remote: ConnectionId,
    /// UDP payload bytes of a full datagram; the packet grid follows from it. Equal on both ranks.
    pub datagram_bytes: usize,
    /// Fingerprint of the group's settings, compared in the hello.
    pub fingerprint: u64,
    /// Bytes that may be sent before the receiver has asked for a transfer. Equal on both ranks.
    pub eager_bytes: u64,
    /// Data packets for each acknowledgement (MLT section 4.2.3: ten).
    pub ack_every: u32,
    /// Longest that an acknowledgement is held back.
    pub ack_delay_max: Duration,
    /// Rate at which a fresh connection starts, bytes per second, before anything was measured.
    pub initial_rate: u64,
    /// Ranks that send to the same receiver at once: the initial window is divided by it.
    pub incast: u32,
    /// Bytes that the receiver can hold in its socket for this sender: bounds a standing queue.
    pub receive_buffer_bytes: u64,
    /// Silence after which a peer is lost.
    pub peer_timeout: Duration,
}
