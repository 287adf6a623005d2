//! What the sender asks of the receiver, and when.
//!
//! Words of the receiver (a grant, the end of a transfer) are said once and are not acknowledged: if one is lost, the sender asks. While
//! anything is on its way, an acknowledgement or a loss will tell, and the pause before a question begins anew with each. A transfer
//! that has nothing on its way any more is helped by neither, and other transfers may go on for long: it has a pause of its own. So has
//! one that others overtake, of which their acknowledgements tell nothing.

use super::parting::Parting;
use super::timers::{believed, paused, PAUSE_MAX};
use super::Connection;
use crate::path::{Asked, Before};
use crate::recovery::RttEstimator;
use crate::transfer::{SendHalf, Waiting};
use crate::Timestamp;
use core::time::Duration;
use gradwire_wire::{PacketNumber, PathId, TransferId};

/// Most transfers asked about at once.
const PROBES_AT_ONCE: usize = 8;

/// Questions whose class and path are remembered.
const ASKED_MAX: usize = 2 * PROBES_AT_ONCE;

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
    pub(super) path: PathId,
    /// Number of the next packet on its path: what is sent at the same time may have been sent behind it.
    pub(super) next: PacketNumber,
    /// The network's queue that it takes.
    pub(super) queue: u8,
}

impl Connection {
    /// Asks how far a transfer is, and what has come of all that was sent before.
    pub(super) fn queue_probe(&mut self, transfer: TransferId, first_chunk: u32) {
        let turn = match self.parting {
            Parting::Asking(asking) => asking.turn,
            _ => self.probe_backoff,
        };
        self.queue_question(Question { transfer, first_chunk, turn, settles: true });
    }

    /// Whether it was not there yet.
    fn queue_question(&mut self, question: Question) -> bool {
        let is_alike = |due: &&mut Question| {
            (due.transfer, due.first_chunk) == (question.transfer, question.first_chunk)
        };
        let there = self.probe_due.iter_mut().find(is_alike);
        let is_new = there.is_none();
        match there {
            Some(due) => due.settles |= question.settles,
            None => self.probe_due.push_back(question),
        }
        is_new
    }

    /// A question leaves whose answer settles what was sent before.
    pub(super) fn note_probe(&mut self, probe: Probe) {
        if self.config.has_class_queues() || self.paths.len() > 1 {
            let asked = (probe.stamp, probe.queue, probe.path);
            if self.asked.back() != Some(&asked) {
                if self.asked.len() == ASKED_MAX {
                    self.asked.pop_front();
                }
                self.asked.push_back(asked);
            }
        }
        self.last_probe = Some(probe);
    }

    /// What the question of this stamp that went by this path had asked about; the latest one is answered once.
    pub(super) fn take_asked(&mut self, (stamp, by): (u32, PathId), asked_at: Timestamp) -> Asked {
        // Of several that left at one moment it is not known which one is answered: the most urgent one has overtaken all that others have. Of
        // one that is not known any more it is not known what it has overtaken.
        let same = self.asked.iter().filter(|(asked, ..)| *asked == stamp);
        let queue = same.map(|(_, queue, _)| *queue).min().unwrap_or(0);
        match self.last_probe.take_if(|probe| (probe.stamp, probe.path) == (stamp, by)) {
            Some(probe) => Asked { before: Before::Number(probe.next), at: probe.sent_at, queue },
            None => {
                let before = Before::Time(asked_at.before(Duration::from_nanos(1)));
                Asked { before, at: asked_at, queue }
            }
        }
    }

    /// Whether the question of this stamp may have waited behind what is more urgent: its answer says nothing about the way of that.
    pub(super) fn was_held_up(&self, stamp: u32) -> bool {
        self.asked.iter().any(|(asked, queue, _)| *asked == stamp && *queue > 0)
    }

    /// The path by which the question of this stamp went, if its answer came by another one: its echo is a round trip of neither.
    pub(super) fn asked_elsewhere(&self, stamp: u32, came_by: PathId) -> Option<PathId> {
        let mut same = self.asked.iter().filter(|(asked, ..)| *asked == stamp).map(|(_, _, path)| *path);
        let first = same.next().filter(|first| *first != came_by)?;
        (!same.any(|path| path == came_by)).then_some(first)
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
    /// wait, each time about others, because which one the receiver wants first is known to it alone; as long as it answers, first about
    /// those of which it has not heard: it can want none of them before.
    pub(super) fn ask(&mut self, now: Timestamp) {
        let answers = self.probe_backoff == 0;
        self.progress_at = now;
        self.probe_backoff += 1;
        let eager_full = self.eager_used >= self.config.eager_chunks();
        let waits = |send: &&SendHalf| send.is_all_sent() || send.is_closing() || !send.granted && eager_full;
        let waiting = self.sends.iter().filter(waits).count();
        let mut asked = [0; PROBES_AT_ONCE];
        let mut count = 0;
        if answers && waiting > PROBES_AT_ONCE {
            let unheard_of = |send: &&SendHalf| waits(send) && send.is_unheard_of();
            let of_these = self.sends.iter().enumerate().filter(|(_, send)| unheard_of(send));
            for (slot, (index, _)) in asked.iter_mut().zip(of_these) {
                *slot = index;
                count += 1;
            }
        }
        if count == 0 {
            let first = if waiting > PROBES_AT_ONCE { self.asked_before % waiting } else { 0 };
            self.asked_before = first + PROBES_AT_ONCE;
            let of_these = self.sends.iter().enumerate().filter(|(_, send)| waits(send));
            for (slot, (index, _)) in asked.iter_mut().zip(of_these.cycle().skip(first).take(waiting)) {
                *slot = index;
                count += 1;
            }
        }
        let settling = self.settling(0..self.sends.len(), self.probe_backoff);
        // If none waits, the first one.
        count = count.max(1);
        for index in &asked[..count] {
            self.ask_about(now, *index, self.probe_backoff, settling.is_none());
        }
        match settling {
            Some(index) if asked[..count].contains(&index) => {
                self.queue_probe(self.sends[index].request.transfer, self.sends[index].unknown_from());
            }
            Some(index) => self.ask_about(now, index, self.probe_backoff, true),
            None => {}
        }
    }

    /// Where some packets overtake others: of these transfers the one whose question settles, as of several that leave at one moment it is
    /// not known which one is answered. By turns that of the most urgent one with packets on its way, whose answer comes soon, and that of
    /// the least urgent one, which overtakes nothing.
    fn settling(&self, of: impl IntoIterator<Item = usize>, turn: u32) -> Option<usize> {
        if !self.config.has_class_queues() {
            return None;
        }
        let mut on_their_way = of.into_iter().filter(|index| self.sends[*index].is_on_its_way()).peekable();
        on_their_way.peek()?;
        let class = |index: &usize| self.sends[*index].request.tags.class;
        if turn % 2 == 1 {
            on_their_way.min_by_key(class)
        } else {
            on_their_way.max_by_key(class)
        }
    }

    fn ask_about(&mut self, now: Timestamp, index: usize, turn: u32, settles: bool) {
        let send = &mut self.sends[index];
        send.on_asked(now);
        let (transfer, first_chunk) = (send.request.transfer, send.unknown_from());
        let is_new = self.queue_question(Question { transfer, first_chunk, turn, settles });
        self.stats.probes_sent += u64::from(is_new);
    }

    /// When a transfer must be asked about that no acknowledgement of another one helps on. [`Connection::probe_at`] is as soon, unless others go on.
    pub(super) fn word_at(&self) -> Option<Timestamp> {
        let mut waiting = self.sends.iter().filter_map(SendHalf::waiting).peekable();
        waiting.peek()?;
        let answer = self.answer_timeout();
        let first = waiting.map(|waiting| self.word_of(waiting, answer)).min()?;
        Some(first.max(self.asked_for_words_at + answer))
    }

    fn word_of(&self, waiting: Waiting, answer: Duration) -> Timestamp {
        let pause = match waiting.is_unposted {
            true => answer.max(PAUSE_MAX),
            false => paused(answer, self.doublings(waiting.asked)),
        };
        waiting.since + pause
    }

    /// Asks for those words, of those that have waited longest. If nothing of them is on its way, or nobody wants it any more, nothing has to
    /// be acknowledged.
    pub(super) fn ask_for_words(&mut self, now: Timestamp) {
        self.asked_for_words_at = now;
        let answer = self.answer_timeout();
        let mut asked = [0; PROBES_AT_ONCE];
        let (mut count, mut turns) = (0, 0);
        while count < PROBES_AT_ONCE {
            let waiting = self.sends.iter().enumerate().filter_map(|(index, send)| {
                let waiting = send.waiting()?;
                Some((self.word_of(waiting, answer), index, waiting.asked))
            });
            let Some((_, index, turn)) = waiting.min().filter(|(at, ..)| *at <= now) else { break };
            self.ask_about(now, index, turn, false);
            asked[count] = index;
            (count, turns) = (count + 1, turns + turn);
        }
        if let Some(index) = self.settling(asked[..count].iter().copied(), turns + 1) {
            self.queue_probe(self.sends[index].request.transfer, self.sends[index].unknown_from());
        }
    }
}
