//! Time: what is due when.

use super::Connection;
use crate::time::ROUND_TRIP_BELIEVED;
use crate::{Timeout, TimeoutReason, Timestamp};
use core::time::Duration;

/// Longest pause between two probes, and between two grants, that bring no progress: the peer is busy elsewhere.
pub(super) const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Most multiples of the least round-trip time that a probe waits, if that is longer than [`PAUSE_MAX`]: our own queue is at
/// most two bandwidth-delay products, so an honest round trip stays below this.
const RTT_MIN_MULTIPLE: u32 = 4;
/// Shortest probe timeout: what is said again after it is said to a peer that computes, whose threads are late.
const PROBE_MIN: Duration = Duration::from_micros(500);
impl Connection {
    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.run = None;
        self.check_silence(now);
        self.check_parting(now);
        if !self.liveness.is_open() {
            return;
        }
        self.check_losses(now);
        self.check_contracts(now);
        self.check_statuses(now);
        if self.probe_at().is_some_and(|at| now >= at) {
            self.ask(now);
        }
        if self.word_at().is_some_and(|at| now >= at) {
            self.ask_for_words(now);
        }
    }

    /// When `handle_timeout` (or, for [`TimeoutReason::Pacing`], `poll_transmit`) is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timeout> {
        let mut next: Option<Timeout> = None;
        let mut offer = |at: Option<Timestamp>, reason| {
            if let Some(at) = at {
                if next.is_none_or(|next: Timeout| at < next.at) {
                    next = Some(Timeout { at, reason });
                }
            }
        };
        offer(self.liveness.due_at(), TimeoutReason::Heartbeat);
        offer(self.lost_at(), TimeoutReason::PeerSilent);
        offer(self.parting_at(), TimeoutReason::Heartbeat);
        if self.liveness.is_open() {
            offer(self.paths.ack_due_at(), TimeoutReason::AckDelay);
            offer(self.paths.loss_time(), TimeoutReason::Loss);
            offer(self.probe_at(), TimeoutReason::Probe);
            offer(self.word_at(), TimeoutReason::Probe);
            for half in &self.receives {
                offer(half.contract_at, TimeoutReason::Contract);
                offer(half.status_at, TimeoutReason::Status);
            }
            if self.has_data() {
                offer(self.paths.sends_at(), TimeoutReason::Pacing);
            }
        }
        next
    }

    /// How long to wait for an answer. A peer that stood still for a second makes every answer of that second look
    /// like a round trip; the least round-trip time bounds for how long that is believed. Asking too early costs a
    /// tiny packet.
    pub(super) fn probe_timeout(&self) -> Duration {
        believed(self.paths.probe_timeout()).max(PROBE_MIN)
    }

    /// How often a pause is doubled. In a flood what is asked gets lost, and no time brings it back.
    pub(super) fn doublings(&self, backoff: u32) -> u32 {
        if self.is_flooded || self.peer_is_flooded {
            0
        } else {
            backoff
        }
    }

    fn check_losses(&mut self, now: Timestamp) {
        for index in 0..self.paths.len() {
            let mut outcome = core::mem::take(&mut self.outcome);
            let due = self.paths.check_losses(now, index, &mut outcome);
            self.outcome = outcome;
            if due {
                self.apply_outcome(now, index);
            }
        }
    }

    fn check_contracts(&mut self, now: Timestamp) {
        // From the back, because closing removes by swapping with the last.
        for index in (0..self.receives.len()).rev() {
            if self.receives[index].contract_at.is_some_and(|at| now >= at) {
                self.close_if_satisfied(now, index);
            }
        }
    }

    /// Repeats grants that seem to be lost, and asks for what the contract still needs.
    fn check_statuses(&mut self, now: Timestamp) {
        for index in 0..self.receives.len() {
            let half = &self.receives[index];
            if half.status_at.is_none_or(|at| now < at) {
                continue;
            }
            let (transfer, backoff) = (half.request.transfer, half.status_backoff);
            let flows = half.grant_seen && !half.is_first_pass_over();
            let says_so = !flows && !self.has_its_turn_to_come(now, index);
            if says_so {
                self.queue_status(transfer, 0, 0);
            }
            let pause = paused(self.probe_timeout(), self.doublings(backoff));
            let half = &mut self.receives[index];
            half.status_at = Some(now + pause);
            half.announced_at = if says_so { now } else { half.announced_at };
            half.status_backoff = if flows { 0 } else { backoff + u32::from(says_so) };
        }
    }

    /// Whether a small transfer, which was announced not long ago, has only to wait until its sender gets to it: while data of others come
    /// that is hardly blocked. Each of dozens would be announced about five times before a slow link has carried those before it. Over several
    /// paths each word also tells how the path is that it takes.
    fn has_its_turn_to_come(&self, now: Timestamp, index: usize) -> bool {
        let half = &self.receives[index];
        let is_announced = half.status_backoff > 0 && now.since(half.announced_at) < PAUSE_MAX;
        let needs_no_grant = half.request.bytes <= self.config.eager_bytes / 2;
        let comes = now.since(self.peer_sent_at) < self.probe_timeout();
        self.paths.len() == 1 && is_announced && needs_no_grant && comes && !half.is_first_pass_over()
    }
}

/// What a peer that stood still has made of a timeout, bounded by the least round trip.
pub(super) fn believed((timeout, rtt_min): (Duration, Duration)) -> Duration {
    timeout.min(PAUSE_MAX.max((rtt_min * RTT_MIN_MULTIPLE).min(ROUND_TRIP_BELIEVED)))
}

/// The pause before what was said `backoff` times in vain is said again.
pub(super) fn paused(pause: Duration, backoff: u32) -> Duration {
    (pause * 2u32.saturating_pow(backoff.min(16))).min(PAUSE_MAX.max(pause))
}
