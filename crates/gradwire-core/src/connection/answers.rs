//! Over which path it is answered and acknowledged.
//!
//! An answer goes back by the path that the question came by: only so is it a round trip of that path. But each side numbers its ways by itself, so that
//! the two directions of one path may be two cards: where one of them is dead, and nothing of the other side's comes back that tells so, all answers may go where
//! nothing arrives, for ever. Whoever asks says since when he had no answer. If one was given since, it was missed: then all that goes back takes one path after
//! the other, whichever one the question took, until he has answers, and keeps the one that did for a while.

use crate::Timestamp;
use core::time::Duration;

/// How long the way that did is kept: to find it again takes some round trips.
const KEPT: Duration = Duration::from_secs(1);
/// What a question counts the time without an answer in.
const UNIT_US: u32 = 64;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Stamp of the latest question that was answered, and when.
    answered: Option<(u32, Timestamp)>,
    /// How many ways were found to lead nowhere: the next time begins with the last one that did not.
    turn: usize,
    missed_at: Option<Timestamp>,
    /// The oldest question of this side's that was sent since the last answer.
    unanswered_since: Option<Timestamp>,
}

impl Answers {
    /// A question that was sent at `stamp` is answered.
    pub(super) fn on_answer(&mut self, now: Timestamp, stamp: u32) {
        self.answered = Some((stamp, now));
    }

    /// The peer has asked at `stamp`, and had no answer for so many units. One that left within `patience` may still be under way.
    pub(super) fn on_question(&mut self, now: Timestamp, (stamp, units): (u32, u16), patience: Duration) {
        let oldest = stamp.wrapping_sub(u32::from(units) * UNIT_US);
        let Some((answered, at)) = self.answered.filter(|_| units > 0) else { return };
        if answered.wrapping_sub(oldest) as i32 >= 0 && now.since(at) > patience {
            self.turn = self.turn.wrapping_add(usize::from(self.is_kept(now)));
            self.missed_at = Some(now);
        }
    }

    fn is_kept(&self, now: Timestamp) -> bool {
        self.missed_at.is_some_and(|missed| now.since(missed) <= KEPT)
    }

    /// The path, of so many, by which everything goes back at present; `None`: as it came.
    pub(super) fn detour(&self, now: Timestamp, paths: usize) -> Option<usize> {
        (paths > 1 && self.is_kept(now)).then(|| self.turn % paths)
    }

    /// A question of this side's leaves: for how many units there was no answer.
    pub(super) fn on_asked(&mut self, now: Timestamp) -> u16 {
        let since = *self.unanswered_since.get_or_insert(now);
        let units = now.since(since).as_micros().div_ceil(u128::from(UNIT_US));
        u16::try_from(units).unwrap_or(u16::MAX)
    }

    /// A question of this side's was answered.
    pub(super) fn on_answered(&mut self) {
        self.unanswered_since = None;
    }
}
