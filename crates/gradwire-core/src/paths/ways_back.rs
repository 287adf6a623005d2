//! By which path it is told what has come.

use super::Paths;
use crate::Timestamp;

impl Paths {
    /// The path whose arrivals must be acknowledged now.
    pub(crate) fn ack_due(&self, now: Timestamp) -> Option<usize> {
        self.members.iter().position(|member| member.path.arrivals.is_due(now))
    }

    /// The path by which what came on path `index` is acknowledged: the same, unless nothing of this side's comes through there.
    pub(crate) fn way_back(&self, index: usize) -> usize {
        if self.members.len() > 1 && self.members[index].health.seems_dead() {
            usize::from(self.control(0).0)
        } else {
            index
        }
    }
}
