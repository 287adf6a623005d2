//! What a receiver remembers of transfers that are over, so that it can repeat how they ended.

use super::receive::status_of;
use super::Bitmap;
use crate::Timestamp;
use alloc::collections::VecDeque;
use gradwire_wire::{StatusBody, TransferId, TransferState};

/// Transfers remembered. A peer cannot lag further behind: a collective ends on a rank only when its sends have
/// concluded, at most 64 collectives are in flight, and none has more than 14 transfers on one connection for eight ranks.
const REMEMBERED: usize = 1024;

/// One transfer that is over at its receiver.
#[derive(Debug)]
pub(crate) struct Closed {
    /// The transfer.
    pub(crate) transfer: TransferId,
    /// Its chunks.
    pub(crate) chunks: u32,
    /// Those that did not count; `None` when all did.
    pub(crate) missing: Option<Bitmap>,
    /// When the closing status was last sent because of late data.
    pub(crate) answered_at: Timestamp,
}

impl Closed {
    /// How it ended, describing chunks from `first_chunk` on.
    pub(crate) fn status(&self, first_chunk: u32) -> StatusBody {
        match &self.missing {
            Some(missing) => status_of(TransferState::Closed, missing, 0, first_chunk),
            None => {
                let mut status = status_of(TransferState::Closed, &Bitmap::zeros(0), 0, 0);
                status.received_chunks = self.chunks;
                status
            }
        }
    }
}

/// The latest transfers that are over, and a mark below which all are.
#[derive(Debug, Default)]
pub(crate) struct ClosedTransfers {
    latest: VecDeque<Closed>,
    /// First id not known to be over, for collectives and for point-to-point transfers.
    retired_below: [Option<TransferId>; 2],
}

impl ClosedTransfers {
    pub(crate) fn push(&mut self, closed: Closed) {
        if self.latest.len() == REMEMBERED {
            self.latest.pop_front();
        }
        self.latest.push_back(closed);
    }

    /// Newest first: late packets belong to recent transfers.
    pub(crate) fn find(&self, transfer: TransferId) -> Option<&Closed> {
        self.latest.iter().rev().find(|closed| closed.transfer == transfer)
    }

    pub(crate) fn find_mut(&mut self, transfer: TransferId) -> Option<&mut Closed> {
        self.latest.iter_mut().rev().find(|closed| closed.transfer == transfer)
    }

    pub(crate) fn retire(&mut self, below: TransferId) {
        let mark = &mut self.retired_below[usize::from(below.is_point_to_point())];
        if mark.is_none_or(|old| old.is_before(below)) {
            *mark = Some(below);
        }
    }

    /// Whether `transfer` is over although nothing more is remembered of it.
    pub(crate) fn is_retired(&self, transfer: TransferId) -> bool {
        self.retired_below[usize::from(transfer.is_point_to_point())]
            .is_some_and(|mark| transfer.is_before(mark))
    }
}
