//! When the ranks of an operation called it, as far as this rank has heard.

use super::Op;
use crate::report::PeerTaking;
use crate::schedules::{Stage, Target};
use gradwire_core::{Receipt, Timestamp, TransferId};
use std::time::Duration;

impl Op {
    /// When the last of the ranks that it has heard of called, itself included.
    pub(crate) fn called_at(&self) -> Timestamp {
        self.called_at
    }

    /// A transfer from another rank has ended: that rank, and all that it waited for, had called by then. `way`: how long a packet
    /// is under way at least. The receipt keeps the time only where `from` speaks for itself.
    pub(crate) fn on_called(&mut self, from: u32, receipt: &mut Receipt, way: Duration) {
        if let Some(at) = receipt.called_at {
            self.called_at = self.called_at.max(earlier(at, way));
        }
        let index = self.index(receipt.transfer);
        // Of a reduce the descriptor does not say which way it goes, but a result has always waited for others.
        let target = self.receives.at(from, index).map(|receive| receive.target);
        if matches!(target, Some(Target::Result { .. })) || self.call.passes_calls_on(from, index) {
            receipt.called_at = None;
        }
    }

    /// `to` has confirmed the transfer `index`. What is sent in later stages waits for others and says nothing about it.
    pub(crate) fn on_taken(&mut self, to: u32, transfer: TransferId, now: Timestamp) {
        if self.stage_of_send(to, transfer) == Some(Stage::Gather) || self.is_reported {
            return;
        }
        let taking = PeerTaking { rank: to, taken_at: now };
        *self.places.takings.entry(&mut self.report.takings, to, || taking) = taking;
    }
}

/// Before `at` by `way`.
pub(crate) fn earlier(at: Timestamp, way: Duration) -> Timestamp {
    Timestamp::from_nanos(at.as_nanos().saturating_sub(u64::try_from(way.as_nanos()).unwrap_or(u64::MAX)))
}
