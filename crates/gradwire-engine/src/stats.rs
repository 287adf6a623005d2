//! Counters that leave the engine: plain data that serialises to JSON.

use gradwire_collectives::{AgreedNetwork, DeliveryReport};
use gradwire_core::{TagStats, CLASSES_MAX};
use serde::Serialize;
use std::net::IpAddr;

/// What the kernel granted at start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Features {
    /// Segmentation offload: one system call sends up to 64 datagrams.
    pub gso: bool,
    /// Receive offload: one buffer holds many datagrams.
    pub gro: bool,
    /// Each datagram carries the traffic class that was asked for, and says the one that it arrived with.
    pub traffic_class: bool,
    /// `sendmmsg` and `recvmmsg`.
    pub batched_calls: bool,
    /// The receive buffer in bytes, as the kernel counts (data and overhead).
    pub receive_buffer_bytes: usize,
    /// The send buffer in bytes.
    pub send_buffer_bytes: usize,
    /// Largest UDP payload on the chosen interfaces.
    pub datagram_bytes: usize,
    /// Largest UDP payload between ranks of one network namespace.
    pub datagram_bytes_local: usize,
    /// Addresses that are published.
    pub addresses: Vec<String>,
    /// UDP port from which each path sends; all paths of the peers end at the first.
    pub source_ports: Vec<u16>,
    /// Faults that are done to what this process receives, in words; `None`: none.
    pub chaos: Option<String>,
}

/// Counters of the socket and the network thread; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineStats {
    /// Datagrams handed to the kernel.
    pub datagrams_sent: u64,
    /// Bytes of them.
    pub bytes_sent: u64,
    /// Send system calls.
    pub send_calls: u64,
    /// Datagrams received.
    pub datagrams_received: u64,
    /// Bytes of them.
    pub bytes_received: u64,
    /// Receive system calls.
    pub receive_calls: u64,
    /// Datagrams that carry no connection id of ours.
    pub datagrams_unknown: u64,
    /// Datagrams that arrived with the congestion-experienced mark.
    pub ecn_marked: u64,
    /// Datagrams that the kernel refused to send (no route, a firewall, too large): lost like on the way.
    pub send_refused: u64,
    /// Times that the kernel's send buffer was full.
    pub send_blocked: u64,
    /// Datagrams that the kernel dropped because our receive buffer was full.
    pub receive_overflows: u64,
    /// Times that the thread slept.
    pub sleeps: u64,
    /// Datagrams that fault injection has lost.
    pub chaos_lost: u64,
    /// Datagrams to a connection of ours that nobody with its keys had made; they changed nothing.
    pub datagrams_not_authentic: u64,
    /// Sealed datagrams that had come before, or so long ago that nobody can tell; they changed nothing.
    pub datagrams_replayed: u64,
    /// Datagrams that were not sent because their number had been used; more than zero is a bug.
    pub seals_refused: u64,
}

/// Counters of one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct GroupStats {
    /// Name of the group.
    pub name: String,
    /// This rank.
    pub rank: u32,
    /// Ranks in the group.
    pub world_size: u32,
    /// UDP payload bytes of a full datagram.
    pub datagram_bytes: usize,
    /// How its datagrams travel.
    pub security: SecurityStats,
    /// What all ranks know alike about the network; `None` until they have exchanged what they measured.
    pub agreed: Option<AgreedStats>,
    /// What this rank did as a dedicated parameter server; zero on every other rank.
    pub served: ServedStats,
    /// Each other rank.
    pub peers: Vec<PeerStats>,
}

/// How the datagrams of a group travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SecurityStats {
    /// What seals them; `None`: they travel in clear.
    pub cipher: Option<&'static str>,
    /// Whether a job secret was configured; else rank 0 made one and published it in the store.
    pub secret_configured: bool,
    /// Whether all ranks are in one network namespace and meet over loopback.
    pub all_local: bool,
}

/// The network as all ranks know it; see [`gradwire_collectives::AgreedNetwork`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AgreedStats {
    /// Round-trip time of the empty network, microseconds.
    pub rtt_us: f64,
    /// What one rank can send, bytes per second.
    pub rate: u64,
    /// Share of packets that the network lost lately.
    pub packet_loss: f32,
    /// Share of values that did not arrive lately.
    pub loss: f32,
}

impl From<AgreedNetwork> for AgreedStats {
    fn from(network: AgreedNetwork) -> Self {
        let AgreedNetwork { rtt, rate, packet_loss, loss, .. } = network;
        Self { rtt_us: rtt.as_secs_f64() * 1e6, rate, packet_loss, loss }
    }
}

/// What a dedicated parameter server did in one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServedStats {
    /// Reductions that it has ended its part of.
    pub calls: u64,
    /// Elements of the contributions of all workers that were expected.
    pub elems_expected: u64,
    /// Elements of them that arrived before their contract closed.
    pub elems_received: u64,
    /// Payload bytes received, duplicates left out.
    pub bytes_received: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes sent again.
    pub bytes_retransmitted: u64,
}

impl ServedStats {
    pub(crate) fn add(&mut self, report: &DeliveryReport) {
        self.calls += 1;
        self.elems_expected += report.peers.iter().map(|peer| peer.elems_expected).sum::<u64>();
        self.elems_received += report.peers.iter().map(|peer| peer.elems_received).sum::<u64>();
        self.bytes_received += report.bytes_received;
        self.bytes_sent += report.bytes_sent;
        self.bytes_retransmitted += report.bytes_retransmitted;
    }
}

/// Counters and estimates of the connection to one peer; see [`gradwire_core::ConnectionStats`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PeerStats {
    /// Its rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// The address that answered first.
    pub address: String,
    /// Data packets sent, retransmissions included.
    pub packets_sent: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Data packets sent again.
    pub packets_retransmitted: u64,
    /// Data packets taken for lost.
    pub packets_lost: u64,
    /// Data packets that arrived and counted.
    pub packets_received: u64,
    /// Payload bytes that arrived and counted.
    pub bytes_received: u64,
    /// Data packets that arrived again.
    pub packets_duplicate: u64,
    /// Datagrams dropped for any other reason.
    pub packets_dropped: u64,
    /// Datagrams that named this connection and were not authentic, because nobody with its keys had made them.
    pub datagrams_not_authentic: u64,
    /// Sealed datagrams that had come before, or so long ago that nobody can tell.
    pub datagrams_replayed: u64,
    /// Datagrams that were not sent because their number had been used; more than zero is a bug.
    pub seals_refused: u64,
    /// Control packets sent.
    pub control_sent: u64,
    /// Probes sent.
    pub probes_sent: u64,
    /// Smoothed round-trip time, microseconds.
    pub rtt_smoothed_us: f64,
    /// Least round-trip time, microseconds.
    pub rtt_min_us: f64,
    /// Estimated bottleneck bandwidth, bytes per second.
    pub bandwidth: u64,
    /// Congestion window, bytes.
    pub cwnd: u64,
    /// Classes, importance and congestion marks of data packets.
    pub tags: TagCounts,
    /// Each path to it.
    pub paths: Vec<PathStats>,
}

/// Counters of tagged data packets of one connection; see [`gradwire_core::TagStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TagCounts {
    /// Sent, by class.
    pub sent: [u64; CLASSES_MAX],
    /// Arrived with the code point of a class, by class.
    pub received: [u64; CLASSES_MAX],
    /// Sent as important.
    pub important_sent: u64,
    /// Arrived as important.
    pub important_received: u64,
    /// Arrived ECN-capable, marked ones included.
    pub ecn_capable_received: u64,
    /// Arrived with the mark of a congested switch.
    pub congestion_received: u64,
}

impl From<TagStats> for TagCounts {
    fn from(stats: TagStats) -> Self {
        let TagStats { sent, received, important_sent, important_received, .. } = stats;
        let TagStats { ecn_capable_received, congestion_received, .. } = stats;
        Self { sent, received, important_sent, important_received, ecn_capable_received, congestion_received }
    }
}

/// Counters and estimates of one path; see [`gradwire_core::PathStats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PathStats {
    /// Which one.
    pub path: u8,
    /// UDP port from which this rank sends on it.
    pub source_port: u16,
    /// Local address from whose interface it sends; `None`: the kernel chooses by the destination.
    pub local_address: Option<IpAddr>,
    /// Address of the peer where it ends; `None`: the peer has not answered yet.
    pub peer_address: Option<IpAddr>,
    /// Data packets sent, copies included.
    pub packets_sent: u64,
    /// Of these, copies that only try whether the path has healed.
    pub copies_sent: u64,
    /// Data packets taken for lost, copies included.
    pub packets_lost: u64,
    /// Smoothed round-trip time, microseconds; zero before the first sample.
    pub rtt_smoothed_us: f64,
    /// Share of the last data packets (about a thousand) that took this path, 0 to 1.
    pub share: f32,
    /// Whether it carries data: it is not much worse than the others.
    pub trusted: bool,
}
