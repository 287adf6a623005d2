//! What becomes of sends to a peer that leaves in good order (docs/protocol.md section 6).
//!
//! It needs nothing more, so exact sends count as delivered. Of a tolerant send it alone knows which values counted,
//! and whoever takes that for granted loses gradients without a word. So the goodbye is confirmed only when the
//! closing bitmap of each such send is here: who leaves repeats its goodbye until then, and answers probes. When that
//! takes too long, what was never acknowledged did not count.

use super::liveness::GOODBYE_MAX;
use super::Connection;
use crate::{Event, Reliability, SendReceipt, Timestamp};

/// How far the parting is that the peer began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Parting {
    /// It has not left.
    #[default]
    No,
    /// It is asked about tolerant sends, until then.
    Asking(Timestamp),
    /// Nothing more is needed from it.
    Over,
}

impl Connection {
    /// The peer leaves, or confirms that we do.
    pub(super) fn on_goodbye(&mut self, now: Timestamp, is_reply: bool) {
        if is_reply {
            return self.liveness.on_goodbye_reply();
        }
        if self.liveness.on_peer_leaves() {
            self.parting = Parting::Asking(now + GOODBYE_MAX);
            let is_exact = |send: &crate::transfer::SendHalf| send.request.reliability == Reliability::Exact;
            while let Some(index) = self.sends.iter().position(is_exact) {
                let transfer = self.sends[index].request.transfer;
                self.conclude(index, SendReceipt::complete(transfer));
            }
        }
        // Each repeated goodbye is a chance to ask again: no timer of its own.
        for index in 0..self.sends.len() {
            self.queue_probe(self.sends[index].request.transfer, 0);
        }
        self.finish_parting();
        if self.parting == Parting::Over {
            self.liveness.confirm_goodbye();
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

    /// When waiting for the answers of a peer that leaves ends.
    pub(super) fn parting_at(&self) -> Option<Timestamp> {
        match self.parting {
            Parting::Asking(until) if self.liveness.is_parting() => Some(until),
            _ => None,
        }
    }

    pub(super) fn check_parting(&mut self, now: Timestamp) {
        if self.parting_at().is_none_or(|until| now < until) {
            return;
        }
        while let Some(send) = self.sends.first() {
            let receipt = send.unconfirmed();
            self.conclude(0, receipt);
        }
        self.finish_parting();
    }
}
