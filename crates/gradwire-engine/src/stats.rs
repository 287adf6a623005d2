//! Counters that leave the engine: plain data that serialises to JSON.

mod joined;

use gradwire_collectives::{AgreedNetwork, DeliveryReport, LinkShares, Waiting};
use gradwire_core::{TagStats, Timestamp, CLASSES_MAX};
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

/// Counters of the socket and the network thread, which only grow, and the latest error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineStats {
    /// Datagrams handed to the kernel.
    pub datagrams_sent: u64,
    /// Bytes of them.
    pub bytes_sent: u64,
    /// Send system calls.
    pub send_calls: u64,
    /// Batches of datagrams that the thread for it handed to the kernel, where there is one (`send_thread`).
    pub batches_apart: u64,
    /// Datagrams received.
    pub datagrams_received: u64,
    /// Bytes of them.
    pub bytes_received: u64,
    /// Datagrams that were taken with their neighbours at once: runs of one transfer, as receive offload brings them.
    pub datagrams_in_runs: u64,
    /// Receive system calls.
    pub receive_calls: u64,
    /// Datagrams that carry no connection id of ours.
    pub datagrams_unknown: u64,
    /// Datagrams that arrived with the congestion-experienced mark.
    pub ecn_marked: u64,
    /// Datagrams that the kernel refused to send (no route, a firewall, too large): lost like on the way.
    pub send_refused: u64,
    /// The error number (errno) of the latest of them; 0: there was none, or its socket takes nothing.
    pub send_refused_errno: i32,
    /// Times that the kernel's send buffer was full.
    pub send_blocked: u64,
    /// Datagrams that the kernel dropped because our receive buffer was full.
    pub receive_overflows: u64,
    /// Times that the thread turned to a group, for which something had come or was due.
    pub group_turns: u64,
    /// Times that the thread slept.
    pub sleeps: u64,
    /// Times that it looked for packets again instead, for `busy_poll`.
    pub busy_polls: u64,
    /// Times that it let other threads of its core go first, and then looked for packets again.
    pub yields: u64,
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
    /// Collectives that have ended well, by name and preset.
    pub calls: Vec<CallStats>,
    /// Collectives that have ended with an error.
    pub calls_failed: u64,
    /// The oldest collective that has not ended.
    pub waiting: Option<WaitingStats>,
    /// Who is in the group, where it goes on without lost ranks.
    pub epoch: Option<EpochStats>,
    /// Each other rank.
    pub peers: Vec<PeerStats>,
}

/// Who is in a group that goes on without lost ranks. Ranks are those of the first epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EpochStats {
    /// Its number; the first is 0.
    pub number: u64,
    /// Ranks that call collectives under it.
    pub members: Vec<u32>,
    /// Who was lost, in order: the latest 128.
    pub lost: Vec<LostStats>,
    /// Who has joined, in order: the latest 128.
    pub joined: Vec<JoinedStats>,
    /// Whether this rank may go on; false once it was left out, or has found no majority.
    pub is_member: bool,
}

/// A rank that has joined a group while it ran.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct JoinedStats {
    /// In the first epoch.
    pub rank: u32,
    /// Which of its lives it is.
    pub incarnation: u64,
    /// Its host.
    pub host: String,
    /// Number of the epoch that began with it.
    pub epoch: u64,
}

/// A rank that was lost.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LostStats {
    /// In the first epoch.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Number of the epoch that began without it.
    pub epoch: u64,
}

/// Counts of values by size: `counts[i]` are above bound `i - 1` and not above bound `i`, the last one is above all bounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Histogram<const N: usize> {
    /// One more than there are bounds.
    #[serde(with = "array")]
    pub counts: [u64; N],
    /// Of the values.
    pub sum: f64,
}

/// A histogram of times in seconds: 10 us doubled up to 42 s.
pub type TimeHistogram = Histogram<{ Histogram::SECONDS }>;
/// A histogram of shares, 0 to 1.
pub type ShareHistogram = Histogram<{ Histogram::SHARES }>;

impl Histogram<0> {
    /// Counts in a histogram of times.
    pub const SECONDS: usize = TIME_BOUNDS.len() + 1;
    /// Counts in a histogram of shares.
    pub const SHARES: usize = SHARE_BOUNDS.len() + 1;
}

impl<const N: usize> Histogram<N> {
    /// The upper bounds, one less than there are counts.
    #[must_use]
    pub fn bounds() -> &'static [f64] {
        if N == Histogram::SHARES {
            &SHARE_BOUNDS
        } else {
            &TIME_BOUNDS
        }
    }
}

impl<const N: usize> Default for Histogram<N> {
    fn default() -> Self {
        Self { counts: [0; N], sum: 0.0 }
    }
}

/// The transport counts round trips by the same bounds.
impl From<gradwire_core::RoundTrips> for TimeHistogram {
    fn from(trips: gradwire_core::RoundTrips) -> Self {
        Self { counts: trips.counts, sum: trips.sum.as_secs_f64() }
    }
}

/// Times, from the wake-up of a thread to the longest wait before a warning, each twice the one before.
const TIME_BOUNDS: [f64; 23] = {
    let (mut bounds, mut at) = ([0.0; 23], 0);
    while at < bounds.len() {
        bounds[at] = (10_u64 << at) as f64 / 1e6;
        at += 1;
    }
    bounds
};
/// Shares lost: nothing at all, then the figures that people name.
const SHARE_BOUNDS: [f64; 11] = [0.0, 1e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];

/// serde knows arrays of up to 32 entries only, of a length that is a number.
mod array {
    pub(super) fn serialize<S: serde::Serializer, const N: usize>(
        counts: &[u64; N],
        to: S,
    ) -> Result<S::Ok, S::Error> {
        serde::Serialize::serialize(counts.as_slice(), to)
    }
}

/// What collectives of one name and one preset took and delivered on this rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallStats {
    /// Name, with the schedule of an all-reduce.
    pub collective: String,
    /// Preset of the policy, `exact` where there is none.
    pub preset: &'static str,
    /// Such collectives that have ended well.
    pub calls: u64,
    /// From the call to the end.
    pub elapsed_s: TimeHistogram,
    /// Of it, waiting for the last rank to call.
    pub compute_wait_s: TimeHistogram,
    /// Of it, the rest: the network.
    pub network_wait_s: TimeHistogram,
    /// Share of the expected contributions that did not arrive.
    pub lost_share: ShareHistogram,
    /// Elements of the results.
    pub elems: u64,
    /// Payload bytes expected in all stages.
    pub bytes_expected: u64,
    /// Payload bytes that arrived.
    pub bytes_received: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes sent again: what was lost and repaired.
    pub bytes_retransmitted: u64,
    /// Elements of this rank's contributions that did not count somewhere; error feedback repairs them in the next step.
    pub elems_uncounted: u64,
    /// Elements of the results that did not arrive here.
    pub elems_filled: u64,
    /// Collectives whose bucket was sent rotated.
    pub rotated: u64,
    /// Collectives that were exact because their policy measures first.
    pub warm_ups: u64,
    /// Where contributions come in.
    pub reduce: StageStats,
    /// Where results come back, or what is copied.
    pub gather: StageStats,
}

/// One stage of such collectives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StageStats {
    /// Elements that were expected from peers.
    pub elems_expected: u64,
    /// Elements of them that arrived.
    pub elems_received: u64,
    /// From the first packet to the end, of the peer that took longest.
    pub network_s: TimeHistogram,
    /// What ended the stage, of several reasons the one that accepts least.
    pub ended_by: EndedBy,
    /// What ended each transfer of it.
    pub transfers_ended_by: EndedBy,
    /// The latest deadline of a transfer, seconds from its first packet; zero: there was none.
    pub deadline_s: f64,
}

/// How often a wait ended for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EndedBy {
    /// Nothing was missing.
    pub all_arrived: u64,
    /// The loss bound was met.
    pub bound_met: u64,
    /// A link's threshold had passed and enough was there (LTP).
    pub soft_threshold: u64,
    /// Nothing came any more (ULTIMA).
    pub early_timeout: u64,
    /// The deadline.
    pub deadline: u64,
}

/// How long this rank waited for one peer alone, by cause; see [`gradwire_collectives::stragglers_of`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StragglerStats {
    /// It called later than the others.
    pub compute_s: f64,
    /// Its bytes came later.
    pub network_s: f64,
    /// It took its bytes later.
    pub receiver_s: f64,
    /// Separate times that it did.
    pub compute_episodes: u64,
    /// See `compute_episodes`.
    pub network_episodes: u64,
    /// See `compute_episodes`.
    pub receiver_episodes: u64,
}

/// The part of [`GroupStats`] that says who is waited for: small in a large group too.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WatchStats {
    /// The oldest collective that has not ended.
    pub waiting: Option<WaitingStats>,
    /// Rank, and how long it was waited for; ranks that never were are left out.
    pub stragglers: Vec<(u32, StragglerStats)>,
    /// Who is in the group, where it goes on without lost ranks.
    pub epoch: Option<EpochStats>,
    /// Network threads of this rank that have not reached those of its peers, as behind a firewall that lets only the first one's port
    /// through: calls are divided between the others. None as long as links are not known to be fast enough for more than one to be used, unless `network_threads` asks for them.
    pub unreached_threads: u32,
    /// Strangers flood a port of this rank's (docs/security.md).
    pub is_flooded: bool,
}

/// The oldest collective that has not ended.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WaitingStats {
    /// Name, size and number.
    pub during: String,
    /// Number in the group's sequence.
    pub sequence: u64,
    /// Since this rank called it.
    pub waited_s: f64,
    /// Whom it waits for first; `None`: nobody, it is about to end.
    pub straggler: Option<u32>,
    /// Why: `compute`, `network`, `receiver`, or empty.
    pub cause: &'static str,
    /// Bytes from that rank that came of those outstanding.
    pub bytes_received: u64,
    /// Bytes from that rank outstanding.
    pub bytes_expected: u64,
    /// How long nothing was heard from that rank.
    pub silent_s: f64,
}

impl WaitingStats {
    pub(crate) fn new(waiting: Waiting, now: Timestamp) -> Self {
        let straggler = waiting.straggler(now);
        let peer = straggler.and_then(|late| waiting.peers.iter().find(|peer| peer.rank == late.rank));
        Self {
            sequence: waiting.sequence,
            waited_s: now.since(waiting.submitted_at).as_secs_f64(),
            straggler: straggler.map(|late| late.rank),
            cause: straggler.map_or("", |late| late.cause.as_str()),
            bytes_received: peer.map_or(0, |peer| peer.bytes_received),
            bytes_expected: peer.map_or(0, |peer| peer.bytes_expected),
            silent_s: peer.map_or(0.0, |peer| peer.silent.as_secs_f64()),
            during: waiting.during,
        }
    }
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

impl SecurityStats {
    /// Whether they travel in clear because they never leave this host: then whatever comes from elsewhere is a stranger's.
    pub(crate) fn stays_within_host(&self) -> bool {
        self.cipher.is_none() && self.all_local
    }
}

/// The network as all ranks know it; see [`gradwire_collectives::AgreedNetwork`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AgreedStats {
    /// Round-trip time of the empty network, microseconds.
    pub rtt_us: f64,
    /// What one rank can send, bytes per second.
    pub rate: u64,
    /// Share of packets that the network lost lately.
    pub packet_loss: f32,
    /// Share of values that did not arrive lately.
    pub loss: f32,
    /// Ranks whose link is much slower than most, with its share of `rate`.
    pub slow_links: Vec<(usize, f32)>,
    /// The slowest link's share of `rate`; 1 where none is much slower than most.
    pub slowest_link: f32,
    /// Whether more ranks than cores are on the host of some rank.
    pub shares_cores: bool,
    /// Between how many network threads each rank divides what is large; one: it does not.
    pub threads: u8,
}

impl From<AgreedNetwork> for AgreedStats {
    fn from(network: AgreedNetwork) -> Self {
        let AgreedNetwork { rtt, rate, packet_loss, loss, links, shares_cores, threads, .. } = network;
        let slow_links: Vec<_> = links.iter().flat_map(LinkShares::slow).collect();
        let slowest_link = slow_links.iter().fold(1.0, |least: f32, (_, share)| least.min(*share));
        let rtt_us = rtt.as_secs_f64() * 1e6;
        Self { rtt_us, rate, packet_loss, loss, slow_links, slowest_link, shares_cores, threads }
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
    /// The address to which the hello went that it answered first.
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
    /// How long nothing was heard from it.
    pub silent_s: f64,
    /// How long it alone was waited for.
    pub straggler: StragglerStats,
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
    /// Round trips, one for each acknowledgement that measured one.
    pub round_trip_s: TimeHistogram,
    /// Share of the last data packets (about a thousand) that took this path, 0 to 1.
    pub share: f32,
    /// Whether it carries data: it is not much worse than the others.
    pub trusted: bool,
}
