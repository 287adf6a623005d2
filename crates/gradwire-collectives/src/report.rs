//! What a collective delivered.

use std::ops::Range;
use std::time::Duration;

/// One peer's part of a collective, as its receiver saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerDelivery {
    /// The sender.
    pub rank: u32,
    /// Elements that arrived from it in the reduce stage.
    pub elems_received: u64,
    /// Elements that were expected in the reduce stage.
    pub elems_expected: u64,
    /// Why the last of its transfers closed: `all_arrived`, `bound_met`, `soft_threshold`, `early_timeout`, `deadline`.
    pub closed_by: &'static str,
    /// How long its first packet was waited for: the peer was late to the call.
    pub waited_for_peer: Duration,
    /// From its first packet to the end: the network.
    pub network_time: Duration,
}

/// What a collective delivered on this rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeliveryReport {
    /// Name of the collective, with its schedule for an all-reduce (`all_reduce/transpose`).
    pub collective: String,
    /// Its number in the group's sequence.
    pub sequence: u64,
    /// Elements of the result.
    pub elems: u64,
    /// From submission to the end.
    pub elapsed: Duration,
    /// Payload bytes received, duplicates left out.
    pub bytes_received: u64,
    /// Payload bytes expected.
    pub bytes_expected: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes sent again.
    pub bytes_retransmitted: u64,
    /// Elements of this rank's contribution that did not count somewhere, as ranges of the bucket.
    pub uncounted: Vec<Range<u64>>,
    /// For each peer that sent in the reduce stage.
    pub peers: Vec<PeerDelivery>,
}

impl DeliveryReport {
    /// Share of the expected payload bytes that did not arrive, 0 to 1.
    #[must_use]
    pub fn lost_share(&self) -> f64 {
        if self.bytes_expected == 0 {
            return 0.0;
        }
        1.0 - self.bytes_received as f64 / self.bytes_expected as f64
    }
}
