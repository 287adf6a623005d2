//! How long a peer may be silent before it is lost (docs/protocol.md section 6).
//!
//! The peer timeout, which all ranks have agreed on, is the most. Below it a rank goes by what it has measured: the longest
//! pause between two signs of life of the last minutes, several times, and the wait for an answer. A peer that was always
//! punctual is missed soon; where packets are lost, or a host does not let its threads run, the same silence means less.
//! Accrual detectors (Hayashibara et al., SRDS'04) fit a distribution to the same pauses. These have no one shape: data comes
//! every few microseconds, heartbeats every second, and what decides is the tail, of which the longest pause is the sample.

use super::Connection;
use crate::{ConnectionConfig, Timestamp};
use core::time::Duration;

/// The longest pauses of a peer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Silence {
    /// Since the peer was first heard, as long as that is less than a peer timeout ago: then nothing is known of its pauses.
    unknown_since: Option<Timestamp>,
    is_measured: bool,
    window_since: Timestamp,
    present: Duration,
    before: Duration,
}

impl Silence {
    /// The peer was heard again after `pause`.
    pub(super) fn on_pause(&mut self, now: Timestamp, pause: Duration, peer_timeout: Duration) {
        if !self.is_measured {
            let since = *self.unknown_since.get_or_insert(now);
            self.is_measured = now.since(since) >= peer_timeout;
        }
        if now.since(self.window_since) >= peer_timeout * WINDOW_TIMEOUTS {
            (self.window_since, self.before, self.present) = (now, self.present, Duration::ZERO);
        }
        self.present = self.present.max(pause);
    }

    /// The longest silence of a peer that lives; `answer`: how long to wait for any answer.
    fn longest(&self, config: &ConnectionConfig, answer: Duration) -> Duration {
        if !self.is_measured {
            return config.peer_timeout;
        }
        let pause = self.present.max(self.before).max(config.pause_min());
        (pause * PAUSES + answer).max(SILENCE_MIN).min(config.peer_timeout)
    }
}

impl Connection {
    // claim: faults/adaptive-peer-timeout
    /// The silence after which the peer counts as lost: the peer timeout until as much time has shown how late its signs of
    /// life come, and then five times the longest pause of the last minutes and the wait for an answer: at least half of the peer
    /// timeout, and 3 s, which is more where that is below 6 s; at most the peer timeout.
    #[must_use]
    pub fn silence_max(&self) -> Duration {
        self.silence.longest(&self.config, self.probe_timeout())
    }
}

/// Pauses of the longest kind that in a row mean death. In each heartbeat a healthy peer that is idle sends its own and the answer
/// to ours, and is asked four times as often when two were missing. At a loss of 30 % those of five in a row, with 11 to 14 answers, are lost once in a
/// million times; a pause of two comes once in six.
const PAUSES: u32 = 5;
/// A busy host may not let a healthy thread run for a second or two, however punctual it was before. Who has set a shorter peer
/// timeout wants to risk that. This is more than five heartbeats, of a tenth of the peer timeout each, where that is below 6 s.
const SILENCE_MIN: Duration = Duration::from_secs(3);
/// A pause is remembered for one to two windows of so many peer timeouts, minutes: as long as between two checkpoints, when hosts
/// are busiest.
const WINDOW_TIMEOUTS: u32 = 30;
