//! Timeouts of calls that no group has: while members agree on the next epoch, connect and tell each other their results, and where a call
//! waits for older ones. What a group has started it times itself.

use super::{Phase, Step, Succession};
use gradwire_collectives::OpError;
use gradwire_core::Timestamp;

impl Succession {
    /// When the first of these calls has to end.
    pub(super) fn next_deadline(&self) -> Option<Timestamp> {
        self.calls.waiting(self.is_running()).map(|(_, pending)| pending.deadline()).min()
    }

    /// Ends the group, as it does itself, when one has not ended by then: others may have ended it, or wait for this rank to make it.
    /// Between epochs they may also go on without this rank, which can come back as one that was lost can.
    pub(super) fn check_deadlines(&mut self, now: Timestamp) -> Option<Step> {
        let mut waiting = self.calls.waiting(self.is_running());
        let (number, pending) = waiting.find(|(_, pending)| pending.deadline() <= now)?;
        let (during, waited) = (pending.request.during(number), now.since(pending.submitted));
        self.is_left_behind = !self.is_running();
        Some(Step::End(OpError::TimedOut { during, waited, detail: self.waits_for() }))
    }

    fn waits_for(&self) -> String {
        let decided = self.membership.epoch().number;
        let why = match &self.phase {
            Phase::Running | Phase::Over(_) => return "it waited here for older calls to end".to_owned(),
            Phase::Waiting { .. } => format!("no majority of epoch {decided} has agreed on who goes on"),
            Phase::Forming(_) | Phase::Connecting { .. } => {
                format!("not every member of epoch {decided} has answered this rank")
            }
            Phase::Syncing(_) => {
                format!("the members of epoch {decided} have not told each other all of their results")
            }
        };
        match &self.verdict {
            Some(verdict) => format!("{why}; the latest loss: {verdict}"),
            None => why,
        }
    }
}
