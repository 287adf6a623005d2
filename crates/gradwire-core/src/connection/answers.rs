//! Over which path questions are answered.
//!
//! An answer goes back by the path that the question came by: only so is it a round trip of that path. But each side numbers its ways by itself, so that
//! the two directions of one path may be two cards: where one of them is dead, and nothing of the other side's comes back that tells so, all answers may go where
//! nothing arrives, for ever. Whoever asks again, although nothing new of his has come since he was answered, has not heard the answer: the next one goes by another path,
//! and each further one by the next.

use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Answers {
    answered_at: Option<Timestamp>,
    /// Questions in a row that an answer had not reached.
    again: u32,
    /// Ways that were found to lead nowhere: kept, so that the next time begins with the last that did not.
    turn: u32,
}

impl Answers {
    /// A question has come, and will be answered; new data last came at `data_at`. Within `patience` an answer cannot have been missed.
    pub(super) fn on_question(&mut self, now: Timestamp, data_at: Timestamp, patience: Duration) {
        match self.answered_at {
            Some(before) if before >= data_at => {
                if now.since(before) <= patience {
                    return;
                }
                self.turn += u32::from(self.again > 0);
                self.again += 1;
            }
            _ => self.again = 0,
        }
        self.answered_at = Some(now);
    }

    /// By so many paths behind the question's the answer goes.
    pub(super) fn detour(&self) -> u32 {
        if self.again == 0 {
            0
        } else {
            1 + self.turn
        }
    }
}
