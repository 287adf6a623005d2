//! Whom the oldest call waits for.

use super::Group;
use crate::peer::Peer;
use crate::straggler::{PeerWait, Waiting};
use gradwire_core::Timestamp;
use std::time::Duration;

impl Group {
    // claim: report/straggler
    /// What the oldest collective waits for that this rank has called and that has not ended; `None`: there is none.
    #[must_use]
    pub fn waiting(&self, now: Timestamp) -> Option<Waiting> {
        let calls = self.ops.iter().filter(|op| !op.is_reported && op.is_collective());
        let op = calls.min_by_key(|op| op.sequence())?;
        let sequence = op.sequence();
        let of = |peer: &Peer| op.wait_of(peer.rank).map(|wait| peer_wait(peer, wait, sequence, now));
        let peers = self.peers.iter().filter_map(of).collect();
        Some(Waiting { during: op.during(), sequence: op.number(), submitted_at: op.submitted, peers })
    }
}

fn peer_wait(peer: &Peer, wait: PeerWait, sequence: u64, now: Timestamp) -> PeerWait {
    let silent = peer.connection().silence(now);
    let said = peer.position.is_some_and(|position| position.sequence > sequence) || peer.is_in(sequence);
    // Who has something to confirm is asked again and again, and answers within a round trip.
    let silent_max = if wait.has_to_take { UNANSWERED_MAX } else { 2 * peer.heartbeat };
    PeerWait {
        has_called: wait.has_called || said || peer.serves,
        silent,
        is_stalled: silent > silent_max.min(2 * peer.heartbeat),
        ..wait
    }
}

/// Longer than any round trip and its repetitions: what is asked backs off to this.
const UNANSWERED_MAX: Duration = Duration::from_secs(1);
