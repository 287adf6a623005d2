//! What the sender asks of the receiver, and when.
//!
//! Words of the receiver (a grant, the end of a transfer) are said once and are not acknowledged: if one is lost, the sender asks. While
//! anything is on its way that it asks about, an acknowledgement or a loss will tell; the pause begins anew with each. A transfer that
//! has nothing on its way any more is told by no acknowledgement, and other transfers may go on for long: it has a pause of its own.

use super::Connection;
use crate::recovery::RttEstimator;
use crate::transfer::{SendHalf, Waiting};
use crate::Timestamp;
use core::time::Duration;
use gradwire_wire::{PacketNumber, TransferId};

use super::timers::{believed, paused};

/// Most transfers asked about at once.
const PROBES_AT_ONCE: usize = 8;

/// A question that waits to be sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) transfer: TransferId,
    /// First chunk of interest.
    pub(super) first_chunk: u32,
    /// Which path control takes: how often this was asked before.
    pub(super) turn: u32,
    /// Whether the receiver also acknowledges what has come. Then what was sent before, and is not named, is lost.
    pub(super) settles: bool,
}

/// A question that was sent, and will be answered by an acknowledgement.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) stamp: u32,
    pub(super) sent_at: Timestamp,
    /// Number of the next packet on its path: what is sent at the same time may have been sent behind it.
    pub(super) next: PacketNumber,
}

impl Connection {
    /// Asks how far a transfer is, and what has come of all that was sent before.
    pub(super) fn queue_probe(&mut self, transfer: TransferId, first_chunk: u32) {
        let turn = self.probe_backoff;
        self.queue_question(Question { transfer, first_chunk, turn, settles: true });
    }

    fn queue_question(&mut self, question: Question) {
        let is_alike = |due: &&mut Question| {
            (due.transfer, due.first_chunk) == (question.transfer, question.first_chunk)
        };
        match self.probe_due.iter_mut().find(is_alike) {
            Some(due) => due.settles |= question.settles,
            None => self.probe_due.push_back(question),
        }
    }

    /// How long an answer may take. A receiver that has everything says so at once, and of a full window four packets have asked for an
    /// acknowledgement: what it may hold back is no part of this pause (RACK-TLP, RFC 8985 section 7.2, adds it to that of a single
    /// packet only).
    fn answer_timeout(&self) -> Duration {
        believed(self.paths.longest(RttEstimator::answer_timeout))
    }

    /// When the receiver must be asked: something is outstanding, nothing can be sent, and nothing was heard.
    pub(super) fn probe_at(&self) -> Option<Timestamp> {
        if self.sends.is_empty() {
            return None;
        }
        Some(self.progress_at + paused(self.answer_timeout(), self.doublings(self.probe_backoff)))
    }

    /// Asks about what is outstanding: the transfers that wait for a word of the receiver, else the first one. If many
    /// wait, each time about others, because which one the receiver wants first is known to it alone.
    pub(super) fn ask(&mut self, now: Timestamp) {
        self.progress_at = now;
        self.probe_backoff += 1;
        let eager_full = self.eager_used >= self.config.eager_chunks();
        let waits = |send: &&SendHalf| send.is_all_sent() || send.is_closing() || !send.granted && eager_full;
        let waiting = self.sends.iter().filter(waits).count();
        let first = if waiting > PROBES_AT_ONCE { self.asked_before % waiting } else { 0 };
        self.asked_before = first + PROBES_AT_ONCE;
        let mut asked = [(TransferId(0), 0); PROBES_AT_ONCE];
        let mut count = 0;
        let in_turn = self.sends.iter().filter(waits).cycle().skip(first).take(waiting);
        for (slot, send) in asked.iter_mut().zip(in_turn) {
            *slot = (send.request.transfer, send.unknown_from());
            count += 1;
        }
        if count == 0 {
            asked[0] = (self.sends[0].request.transfer, 0);
            count = 1;
        }
        for (transfer, first_chunk) in &asked[..count] {
            self.queue_probe(*transfer, *first_chunk);
        }
        self.stats.probes_sent += count as u64;
    }

    /// When a transfer must be asked about that only a word can help on, while others go on: if none does, [`Connection::probe_at`] is
    /// as soon.
    pub(super) fn word_at(&self) -> Option<Timestamp> {
        let first =
            self.sends.iter().filter_map(|send| send.waiting()).map(|waiting| self.word_of(waiting)).min()?;
        let goes_on = self.sends.iter().any(|send| send.waiting().is_none());
        goes_on.then(|| first.max(self.asked_for_words_at + self.answer_timeout()))
    }

    fn word_of(&self, waiting: Waiting) -> Timestamp {
        waiting.since + paused(self.answer_timeout(), self.doublings(waiting.asked))
    }

    /// Asks for those words. It is known what has come of what was sent, so that nobody has to acknowledge anything.
    pub(super) fn ask_for_words(&mut self, now: Timestamp) {
        self.asked_for_words_at = now;
        let mut count = 0;
        for index in 0..self.sends.len() {
            let send = &self.sends[index];
            let Some(waiting) = send.waiting().filter(|waiting| self.word_of(*waiting) <= now) else {
                continue;
            };
            if count == PROBES_AT_ONCE {
                break;
            }
            let (transfer, first_chunk, turn) = (send.request.transfer, send.unknown_from(), waiting.asked);
            self.queue_question(Question { transfer, first_chunk, turn, settles: false });
            self.sends[index].on_asked(now);
            count += 1;
        }
        self.stats.probes_sent += count as u64;
    }
}
