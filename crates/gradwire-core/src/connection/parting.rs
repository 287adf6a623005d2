//! What becomes of sends to a peer that leaves in good order (docs/protocol.md section 6).
//!
//! It needs nothing more; but it may have left without ever having called for what is sent to it, and of a tolerant send it
//! alone knows which values counted: whoever takes either for granted loses data without a word. So the goodbye is confirmed
//! only when it is known of each send how it ended there: who leaves repeats its goodbye until then, and answers probes, then too.
//! When that takes too long, exact sends count as delivered if all of them was sent, else as untaken, and of a tolerant one what was never
//! acknowledged did not count.

use super::liveness::{FAREWELL_MIN, GOODBYE_MAX};
use super::Connection;
use crate::{Event, Timestamp};
use core::time::Duration;

/// Precision of the stamps in headers.
pub(super) const STAMP: Duration = Duration::from_micros(1);

/// How far the parting is that the peer began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Parting {
    /// It has not left.
    #[default]
    No,
    /// It is asked how sends have ended there.
    Asking(Asking),
    /// Nothing more is needed from it.
    Over,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Asking {
    /// When it said that it leaves.
    since: Timestamp,
    /// When it is asked again.
    again_at: Timestamp,
    /// How often it was asked before: each time takes the next path.
    pub(super) turn: u32,
}

impl Asking {
    /// When it is waited for no more.
    fn until(self) -> Timestamp {
        self.since + GOODBYE_MAX
    }
}

impl Connection {
    /// The peer leaves, or confirms that we do.
    pub(super) fn on_goodbye(&mut self, now: Timestamp, is_reply: bool) {
        if is_reply {
            return self.liveness.on_goodbye_reply();
        }
        if self.liveness.on_peer_leaves() {
            self.parting = Parting::Asking(Asking { since: now, again_at: now, turn: 0 });
            self.ask_who_leaves(now);
        }
        self.finish_parting();
        if self.parting == Parting::Over {
            self.liveness.confirm_goodbye();
        }
    }

    /// Asks about all sends. The next question does not wait for the goodbye to be repeated: that may be over by now.
    fn ask_who_leaves(&mut self, now: Timestamp) {
        for index in 0..self.sends.len() {
            self.queue_probe(self.sends[index].request.transfer, 0);
        }
        let pause = self.probe_timeout().max(FAREWELL_MIN);
        if let Parting::Asking(asking) = &mut self.parting {
            (asking.again_at, asking.turn) = (now + pause, asking.turn + 1);
        }
    }

    /// Ends the parting once every send has ended.
    pub(super) fn finish_parting(&mut self) {
        if matches!(self.parting, Parting::Asking(_)) && self.sends.is_empty() {
            self.parting = Parting::Over;
            self.liveness.confirm_goodbye();
            self.events.push_back(Event::PeerLeft);
        }
    }

    /// Whether an answer that echoes this stamp was given by a peer that had left. What it said before may be behind what it did then.
    pub(super) fn answers_parting(&self, now: Timestamp, echo_us: u32) -> bool {
        let Parting::Asking(asking) = self.parting else { return false };
        now.of_wire_us(echo_us).is_some_and(|asked_at| asked_at + STAMP > asking.since)
    }

    /// When a peer that leaves is asked again, or waiting for its answers ends.
    pub(super) fn parting_at(&self) -> Option<Timestamp> {
        // Also where this side was not connected yet, and so never asks.
        self.asking().map(|asking| asking.again_at.min(asking.until()))
    }

    fn asking(&self) -> Option<Asking> {
        match self.parting {
            Parting::Asking(asking) if self.liveness.has_only_left() => Some(asking),
            _ => None,
        }
    }

    pub(super) fn check_parting(&mut self, now: Timestamp) {
        let Some(asking) = self.asking().filter(|asking| now >= asking.again_at.min(asking.until())) else {
            return;
        };
        if now < asking.until() {
            return self.ask_who_leaves(now);
        }
        while let Some(send) = self.sends.first() {
            let receipt = send.unconfirmed();
            self.conclude(0, receipt);
        }
        self.finish_parting();
    }
}
