//! When the ranks of an operation called it, as far as this rank has heard.

use super::Op;
use gradwire_core::{Receipt, Timestamp};
use std::time::Duration;

impl Op {
    /// When the last of the ranks that it has heard of called, itself included.
    pub(crate) fn called_at(&self) -> Timestamp {
        self.called_at
    }

    /// A transfer from another rank has ended: that rank, and all that it waited for, had called by then. `way`: how long a packet
    /// is under way at least.
    pub(crate) fn on_called(&mut self, receipt: &Receipt, way: Duration) {
        if let Some(at) = receipt.called_at {
            let way_nanos = u64::try_from(way.as_nanos()).unwrap_or(u64::MAX);
            let at = Timestamp::from_nanos(at.as_nanos().saturating_sub(way_nanos));
            self.called_at = self.called_at.max(at);
        }
    }
}
