//! When a heartbeat is due (docs/protocol.md section 6).
//!
//! It keeps the peer from taking this rank for lost, asks for an answer, and says where this rank is. The first two are not needed
//! while data shows as much: what the peer is known to have heard was sent after the heartbeat that could be left out was due, and
//! the word of it has come back. So the next heartbeat is due one interval after that was *sent*, and neither of the two is silent for
//! longer than if there were nothing but heartbeats. In a partition, of one way or both, the word no longer comes, and heartbeats go as
//! always. Where this rank is matters to a peer that waits: what changes within an interval need not be told.
//!
//! A peer that was not heard for longer than two heartbeats of its own may be gone, or packets are lost. Until it is heard it is asked four
//! times as often, so that a verdict comes after a dozen answers that did not, where one in two is lost there or back, and not after a few.

use crate::Timestamp;
use core::time::Duration;

/// What is known of the time of the next heartbeat.
#[derive(Debug)]
pub(super) struct Beats {
    /// When to look next whether one is due.
    at: Option<Timestamp>,
    /// The peer has heard something that was sent then, or later.
    reached_at: Timestamp,
    /// Since when this rank is where it is, until the peer has confirmed a heartbeat that says so.
    untold_since: Option<Timestamp>,
}

impl Beats {
    /// The peer knows that this rank is nowhere yet.
    pub(super) const fn new() -> Self {
        Self { at: None, reached_at: Timestamp::ZERO, untold_since: None }
    }

    /// The ranks have met.
    pub(super) fn begin(&mut self, now: Timestamp, heartbeat: Duration) {
        self.at = Some(now + heartbeat);
    }

    /// When to look next whether one is due.
    pub(super) const fn at(&self) -> Option<Timestamp> {
        self.at
    }

    /// The peer has heard something that was sent at `sent_at`, or later.
    pub(super) fn on_reached(&mut self, sent_at: Timestamp) {
        self.reached_at = self.reached_at.max(sent_at);
    }

    /// This rank is somewhere else from now on.
    pub(super) fn on_moved(&mut self, now: Timestamp) {
        self.untold_since = Some(now);
    }

    /// The peer has confirmed a heartbeat that was sent at `sent_at`.
    pub(super) fn on_told(&mut self, sent_at: Timestamp) {
        self.untold_since = self.untold_since.filter(|since| *since > sent_at);
    }

    // claim: faults/free-heartbeats
    /// Whether one leaves now, to a peer that was silent for `silence`; if so the next one follows after `heartbeat`, or sooner.
    pub(super) fn is_due(&mut self, now: Timestamp, heartbeat: Duration, silence: Duration) -> bool {
        if self.at.is_none_or(|at| now < at) {
            return false;
        }
        let first = self.untold_since.map_or(self.reached_at, |since| since.min(self.reached_at));
        let due_at = first + heartbeat;
        let asks = silence > heartbeat * SILENT_BEATS;
        let is_due = asks || now >= due_at;
        let pause = if asks { heartbeat / ASKED_OFTENER } else { heartbeat };
        self.at = Some(if is_due { now + pause } else { due_at });
        is_due
    }
}

/// Heartbeats that may be missing before a peer is asked more often.
pub(super) const SILENT_BEATS: u32 = 2;
const ASKED_OFTENER: u32 = 4;
