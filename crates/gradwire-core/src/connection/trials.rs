//! Whether a path could take another way than the one in use: another network card, another address of the peer.
//!
//! ```text
//!   IN USE --try_path--> ASKED (a ping by the other way) --the peer echoes its stamp--> ANSWERED
//! ```
//!
//! The caller knows ways, this layer knows answers: only the echo of a stamp that went by the other way counts, so
//! that an answer to what went by the way in use proves nothing. A question that leaves at the same instant as another
//! ping of its path shares the stamp with it, and is not counted. The reply itself may come by any way.

use super::Connection;
use crate::PATHS_MAX;
use gradwire_wire::PathId;

/// Whether the way that is tried is the one that was tried before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Attempt {
    /// Another way: what was answered by the last one is forgotten.
    First,
    /// The same way once more.
    Again,
}

/// What was asked and answered, by path.
#[derive(Debug, Default)]
pub(super) struct Trials([Trial; PATHS_MAX as usize]);

#[derive(Clone, Copy, Debug, Default)]
struct Trial {
    /// Stamps of the latest questions.
    stamps: [Option<u32>; STAMPS],
    /// Of the latest ping by the way in use.
    in_use: Option<u32>,
    is_answered: bool,
}

impl Trials {
    /// A question leaves.
    pub(super) fn on_asked(&mut self, path: PathId, stamp: u32) {
        if let Some(trial) = self.0.get_mut(usize::from(path.0)) {
            trial.stamps.rotate_right(1);
            trial.stamps[0] = Some(stamp).filter(|_| trial.in_use != Some(stamp));
        }
    }

    /// A ping leaves by the way in use.
    pub(super) fn on_pinged(&mut self, path: PathId, stamp: u32) {
        if let Some(trial) = self.0.get_mut(usize::from(path.0)) {
            trial.in_use = Some(stamp);
            trial.stamps.iter_mut().filter(|asked| **asked == Some(stamp)).for_each(|asked| *asked = None);
        }
    }

    /// The peer echoes a stamp on this path.
    pub(super) fn on_answer(&mut self, path: PathId, stamp: u32) {
        if let Some(trial) = self.0.get_mut(usize::from(path.0)) {
            trial.is_answered |= trial.stamps.contains(&Some(stamp));
        }
    }
}

impl Connection {
    /// Asks the peer for an answer on `path`, by another way than the one in use: the question comes out as a
    /// [`crate::Transmit`] with `is_trial`. Nothing is asked on a path that the ranks have not agreed on.
    pub fn try_path(&mut self, path: PathId, attempt: Attempt) {
        self.run = None;
        if !self.paths.contains(path) {
            return;
        }
        if attempt == Attempt::First {
            let trial = &mut self.trials.0[usize::from(path.0)];
            *trial = Trial { in_use: trial.in_use, ..Trial::default() };
        }
        self.liveness.ask(path);
    }

    /// Whether a question of [`Connection::try_path`] by this way has been answered.
    #[must_use]
    pub fn has_trial_answer(&self, path: PathId) -> bool {
        self.trials.0.get(usize::from(path.0)).is_some_and(|trial| trial.is_answered)
    }
}

/// Questions whose answers are waited for: as many as are asked by one way, a little apart.
const STAMPS: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_echo_of_a_question_that_went_by_the_other_way_proves_it() {
        let mut trials = Trials::default();
        trials.on_asked(PathId(2), 70);
        trials.on_answer(PathId(2), 71);
        trials.on_answer(PathId(1), 70);
        assert!(!trials.0[2].is_answered && !trials.0[1].is_answered);
        (71..74).for_each(|stamp| trials.on_asked(PathId(2), stamp));
        trials.on_answer(PathId(2), 70);
        assert!(trials.0[2].is_answered, "the first question's answer is late");
    }

    #[test]
    fn a_ping_by_the_way_in_use_takes_its_stamp_from_the_question_whichever_leaves_first() {
        let mut trials = Trials::default();
        trials.on_asked(PathId(2), 70);
        trials.on_pinged(PathId(2), 70);
        trials.on_pinged(PathId(2), 71);
        trials.on_asked(PathId(2), 71);
        (70..72).for_each(|stamp| trials.on_answer(PathId(2), stamp));
        assert!(!trials.0[2].is_answered);
        trials.on_pinged(PathId(1), 72);
        trials.on_asked(PathId(2), 72);
        trials.on_answer(PathId(2), 72);
        assert!(trials.0[2].is_answered, "the ping was another path's");
    }

    #[test]
    fn without_a_question_nothing_is_an_answer() {
        let mut trials = Trials::default();
        trials.on_answer(PathId(0), 0);
        trials.on_answer(PathId(255), 0);
        assert!(!trials.0[0].is_answered);
    }
}
