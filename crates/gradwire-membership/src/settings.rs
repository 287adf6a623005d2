//! Times of the protocol.

use crate::turn::AHEAD_MAX;
use core::time::Duration;

/// See the module's documentation. They cost waiting when they are wrong, never agreement.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// What was not answered is said again after this: a few round trips.
    pub repeat: Duration,
    /// How long an attempt waits for members that are slow to promise before it goes on with a majority.
    pub attempt: Duration,
    /// How long a member may be frozen before it gives up: with no majority nobody may go on, and nothing waits for ever.
    pub patience: Duration,
    /// A member that asks the same so many times, answered each time, hears no answers: the others go on without it.
    pub unheard: u32,
    /// A member that is asked again and again and says nothing for so long is not let go first. Several answers may be lost on their way; it
    /// should be much less than an attempt.
    pub silent: Duration,
}

impl Settings {
    /// Within so long a member that suspects somebody knows the next epoch or has halted: its turn comes, and then its patience ends.
    #[must_use]
    pub fn ends_within(&self) -> Duration {
        self.attempt * (AHEAD_MAX + 1) + self.patience
    }
}
