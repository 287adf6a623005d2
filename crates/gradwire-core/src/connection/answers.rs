//! Over which path it is answered and acknowledged.
//!
//! An answer goes back by the path that the question came by: only so is it a round trip of that path. But each side numbers its ways by itself, so that
//! the two directions of one path may be two cards: where one of them is dead, and nothing of the other side's comes back that tells so, all answers may go where
//! nothing arrives, for ever. Whoever asks says since when he had no answer. If one was given since, it was missed. After two in a row all that goes back takes
//! another path, whichever one the question took, and another one after the next that is missed, until answers arrive; the way that did is kept for a while.

use crate::spray::PATHS_MAX;
use crate::Timestamp;
use core::time::Duration;

/// How long a way is taken. To find again the one that did takes some round trips, so each time that it had to be it is taken for twice as long.
const KEPT: Duration = Duration::from_secs(1);
const DOUBLINGS_MAX: u32 = 6;
/// Longer than a question can say that there was no answer, and far less than the range of its stamp.
const HEARD_MAX: Duration = Duration::from_secs(10);
/// A single answer may be lost on any path.
const MISSED_MAX: u32 = 2;
/// What a question counts the time without an answer in.
const UNIT_US: u32 = 64;

/// An answer of which it is not known whether it arrived.
#[derive(Clone, Copy, Debug)]
struct Answer {
    /// Of the question.
    stamp: u32,
    at: Timestamp,
    way: usize,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The first one since the last that is known to have arrived, or to have been missed.
    first: Option<Answer>,
    missed: u32,
    /// The other path, and since when it is taken.
    way: Option<(usize, Timestamp)>,
    /// How often the way that did had to be found again, and none did as the questions came.
    found_again: u32,
    /// An answer that went by it has arrived.
    is_proven: bool,
    /// Paths that did not do since the last one that did, as bits.
    tried: u32,
    /// The oldest question of this side's that was sent since the last answer.
    unanswered_since: Option<Timestamp>,
}

impl Answers {
    /// The question that was sent at `stamp` is answered by the path `way`.
    pub(super) fn on_answer(&mut self, at: Timestamp, stamp: u32, way: usize) {
        self.first.get_or_insert(Answer { stamp, at, way });
    }

    /// The peer has asked at `stamp`, and had no answer for so many units. One that left within `patience` may still be under way. Whether
    /// another way must be taken.
    pub(super) fn on_question(
        &mut self,
        now: Timestamp,
        (stamp, units): (u32, u16),
        patience: Duration,
    ) -> bool {
        let oldest = stamp.wrapping_sub(u32::from(units) * UNIT_US);
        let Some(first) = self.first.filter(|_| units > 0) else { return false };
        if now.since(first.at) > HEARD_MAX || (first.stamp.wrapping_sub(oldest) as i32) < 0 {
            // That one, or another since, has arrived.
            (self.first, self.missed, self.tried) = (None, 0, 0);
            if self.way.is_some_and(|(way, _)| way == first.way) {
                self.is_proven = true;
            } else {
                // As it came it does.
                self.found_again = 0;
            }
            return false;
        }
        // Not before it was answered: a copy that comes late says nothing.
        if stamp.wrapping_sub(first.stamp) as i32 <= 0 || now.since(first.at) <= patience {
            return false;
        }
        (self.first, self.missed, self.tried) = (None, self.missed + 1, self.tried | 1 << first.way);
        let may_lose = self.is_proven || self.detour(now).is_none();
        self.missed >= if may_lose { MISSED_MAX } else { 1 }
    }

    /// Takes another way: the last one that did, or the first in this order that was not tried.
    pub(super) fn take_another(&mut self, now: Timestamp, mut order: impl Iterator<Item = usize> + Clone) {
        let is_new = |tried: u32| move |way: &usize| tried >> way & 1 == 0;
        let known = self.way.map(|(way, _)| way).filter(|_| self.is_proven).filter(is_new(self.tried));
        let next = known.or_else(|| order.clone().find(is_new(self.tried))).or_else(|| {
            self.tried = 0;
            order.next()
        });
        self.is_proven = known.is_some();
        self.found_again = if self.is_proven { self.found_again + 1 } else { 0 };
        self.missed = 0;
        self.way = next.map(|way| (way, now));
        debug_assert!(next.is_none_or(|way| way < usize::from(PATHS_MAX)));
    }

    /// The path by which everything goes back at present; `None`: as it came.
    pub(super) fn detour(&self, now: Timestamp) -> Option<usize> {
        let kept = KEPT * (1 << self.found_again.min(DOUBLINGS_MAX));
        self.way.filter(|(_, since)| now.since(*since) <= kept).map(|(way, _)| way)
    }

    /// A question of this side's leaves: for how many units there was no answer; none where one is not overdue, after `timeout`.
    pub(super) fn on_asked(&mut self, now: Timestamp, timeout: Duration) -> u16 {
        let waited = now.since(*self.unanswered_since.get_or_insert(now));
        let units = if waited > timeout { waited.as_micros().div_ceil(u128::from(UNIT_US)) } else { 0 };
        u16::try_from(units).unwrap_or(u16::MAX)
    }

    /// A question of this side's was answered.
    pub(super) fn on_answered(&mut self) {
        self.unanswered_since = None;
    }
}
