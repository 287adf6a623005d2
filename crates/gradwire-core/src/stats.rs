//! Counters of one connection and of its paths.

use crate::TagStats;
use core::time::Duration;

/// Counters and estimates of one connection; counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ConnectionStats {
    /// Data packets sent, retransmissions included.
    pub packets_sent: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Data packets sent again.
    pub packets_retransmitted: u64,
    /// Data packets that the sender took for lost.
    pub packets_lost: u64,
    /// Data packets that arrived and counted.
    pub packets_received: u64,
    /// Payload bytes that arrived and counted.
    pub bytes_received: u64,
    /// Data packets that arrived again.
    pub packets_duplicate: u64,
    /// Datagrams dropped for any other reason.
    pub packets_dropped: u64,
    /// Data packets that the peer has sent so far, judged by the numbers of those that came.
    pub packets_numbered: u64,
    /// Of these, packets that came, used or not: the rest is what the network lost.
    pub packets_arrived: u64,
    /// Control packets sent.
    pub control_sent: u64,
    /// Probes sent because nothing was heard.
    pub probes_sent: u64,
    /// Smoothed round-trip time; zero before the first sample.
    pub rtt_smoothed: Duration,
    /// Least round-trip time.
    pub rtt_min: Duration,
    /// Estimated bottleneck bandwidth, bytes per second.
    pub bandwidth: u64,
    /// Best rate at which the last eight first passes of more than a few packets came from the peer, bytes per second; zero
    /// before the first.
    pub reception_rate: u64,
    /// Congestion window, bytes.
    pub cwnd: u64,
    /// Classes, importance and congestion marks.
    pub tags: TagStats,
}

/// Counters and estimates of one path of a connection; counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathStats {
    /// Which one.
    pub path: u8,
    /// Data packets sent, copies included.
    pub packets_sent: u64,
    /// Of these, copies of packets that went over another path too, to see whether this one has healed.
    pub copies_sent: u64,
    /// Data packets that the sender took for lost, copies included.
    pub packets_lost: u64,
    /// Smoothed round-trip time; zero before the first sample.
    pub rtt_smoothed: Duration,
    /// Share of the last data packets (about a thousand, without copies) that took this path, 0 to 1.
    pub share: f32,
    /// Whether it carries data: it is not much worse than the others.
    pub trusted: bool,
}
