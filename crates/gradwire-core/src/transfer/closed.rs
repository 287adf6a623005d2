//! What a receiver remembers of transfers that are over, so that it can repeat how they ended.

use super::receive::status_of;
use super::runs::Runs;
use super::Bitmap;
use crate::Timestamp;
use alloc::collections::{BTreeMap, VecDeque};
use gradwire_wire::{StatusBody, TransferId, TransferState};

/// Transfers remembered at least, of collectives and of point-to-point transfers each. More are while the oldest may still be asked about:
/// a collective ends on a rank only when its sends have concluded, at most 64 collectives are in flight, and of a weighted transpose some
/// 100 transfers are on one connection.
const REMEMBERED: usize = 1024;
/// Behind a message that nobody has received any number of others may be over. Of what is beyond this only the numbers are kept: in runs, of
/// which there is at most one behind each message that waits to be received.
const MESSAGES_AT_MOST: usize = 8 * REMEMBERED;

/// Collectives after which one is forgotten. Their numbers come round again after 65536, and the next one with the same
/// number must not be taken for the old one, however little a connection is used; far more than are in flight.
const FORGOTTEN_AFTER: u32 = 4096;

/// Collectives that a peer may be ahead at most. A rank starts none before the one 64 earlier is over, which has concluded its sends, so it is that
/// much ahead of those that it sends to; of others as many times as much as there are ranks between them, and a tree has 12 levels at
/// most. Half of all numbers would count as ahead otherwise, and a packet that the network has held for so long as one of a later call.
const AHEAD_MAX: u32 = 4096;

/// One transfer that is over at its receiver.
#[derive(Debug)]
pub(crate) struct Closed {
    /// The transfer.
    pub(crate) transfer: TransferId,
    /// Its chunks.
    pub(crate) chunks: u32,
    /// Those that did not count; `None` when all did.
    pub(crate) missing: Option<Bitmap>,
    /// See [`crate::ReceiveTransfer::stage_us`].
    pub(crate) stage_us: u32,
    /// When the closing status was last sent because of late data.
    pub(crate) answered_at: Timestamp,
    /// How often the sender asked although it had been told.
    pub(crate) repeated: u32,
}

impl Closed {
    /// How it ended, describing chunks from `first_chunk` on.
    pub(crate) fn status(&self, first_chunk: u32) -> StatusBody {
        let mut status = match &self.missing {
            Some(missing) => status_of(TransferState::Closed, missing, 0, first_chunk),
            None => {
                let mut status = status_of(TransferState::Closed, &Bitmap::zeros(0), 0, 0);
                status.received_chunks = self.chunks;
                status
            }
        };
        status.stage_us = self.stage_us;
        status
    }
}

/// The latest transfers that are over, and a mark below which all are.
#[derive(Debug, Default)]
pub(crate) struct ClosedTransfers {
    /// By id, because each early packet and each posted receive asks for one that is mostly not here.
    latest: BTreeMap<TransferId, Closed>,
    /// Their ids, oldest first: of collectives and of point-to-point transfers.
    order: [VecDeque<TransferId>; 2],
    /// Point-to-point transfers that are not among them any more, and not known to be retired.
    forgotten: Runs,
    /// The last one, in the order of ids, of collectives: data of later ones come early, and need not be looked for.
    last: Option<TransferId>,
    /// First id not known to be over, for collectives and for point-to-point transfers.
    retired_below: [Option<TransferId>; 2],
    /// Collective at which the old ones were forgotten last.
    forgotten_at: u32,
}

impl ClosedTransfers {
    pub(crate) fn push(&mut self, closed: Closed) {
        let transfer = closed.transfer;
        self.forget_like(transfer);
        if !transfer.is_point_to_point() && self.last.is_none_or(|last| last.is_before(transfer)) {
            self.last = Some(transfer);
        }
        if self.latest.insert(transfer, closed).is_some() {
            // Its number has come round, and nobody has said that the old one may be forgotten.
            self.order_of(transfer).retain(|id| *id != transfer);
        }
        self.order_of(transfer).push_back(transfer);
    }

    fn order_of(&mut self, transfer: TransferId) -> &mut VecDeque<TransferId> {
        &mut self.order[usize::from(transfer.is_point_to_point())]
    }

    /// Makes room for one more transfer of the same kind.
    fn forget_like(&mut self, transfer: TransferId) {
        while self.order_of(transfer).len() >= REMEMBERED {
            let Some(oldest) = self.order_of(transfer).front().copied() else { return };
            if !self.is_before_mark(oldest) {
                if !oldest.is_point_to_point() || self.order_of(transfer).len() < MESSAGES_AT_MOST {
                    return;
                }
                self.forgotten.insert(oldest);
            }
            self.order_of(transfer).pop_front();
            self.latest.remove(&oldest);
        }
    }

    /// Whether no collective that is over comes after `transfer`, nor is that one of them.
    fn is_ahead(&self, transfer: TransferId) -> bool {
        self.last.is_some_and(|last| last.is_before(transfer))
    }

    pub(crate) fn find(&self, transfer: TransferId) -> Option<&Closed> {
        if self.is_ahead(transfer) {
            return None;
        }
        self.latest.get(&transfer)
    }

    pub(crate) fn find_mut(&mut self, transfer: TransferId) -> Option<&mut Closed> {
        if self.is_ahead(transfer) {
            return None;
        }
        self.latest.get_mut(&transfer)
    }

    /// Returns the first id of that space that is not known to be over.
    pub(crate) fn retire(&mut self, below: TransferId) -> TransferId {
        let known = &mut self.retired_below[usize::from(below.is_point_to_point())];
        let mark = known.filter(|old| !old.is_before(below)).unwrap_or(below);
        *known = Some(mark);
        if below.is_point_to_point() {
            self.forgotten.forget_before(mark);
        }
        if !below.is_point_to_point() && ops_since(below, self.forgotten_at) >= FORGOTTEN_AFTER {
            self.forgotten_at = below.op();
            self.latest.retain(|transfer, _| {
                // What is not before the mark may be over already: collectives end in any order.
                let old = transfer.is_before(below) && ops_since(below, transfer.op()) >= FORGOTTEN_AFTER;
                transfer.is_point_to_point() || !old
            });
            self.order[0].retain(|transfer| self.latest.contains_key(transfer));
        }
        mark
    }

    /// Whether `transfer` is over although nothing more is remembered of it.
    pub(crate) fn is_retired(&self, transfer: TransferId) -> bool {
        self.is_before_mark(transfer) || self.forgotten.contains(transfer)
    }

    /// Whether `transfer` is of a collective that no peer can have begun: of an old one with the same number.
    pub(crate) fn is_beyond(&self, transfer: TransferId) -> bool {
        let mark = self.retired_below[0].unwrap_or_default();
        let is_ahead = !transfer.is_point_to_point() && !transfer.is_before(mark);
        is_ahead && ops_since(transfer, mark.op()) > AHEAD_MAX
    }

    fn is_before_mark(&self, transfer: TransferId) -> bool {
        self.retired_below[usize::from(transfer.is_point_to_point())]
            .is_some_and(|mark| transfer.is_before(mark))
    }
}

/// Collectives from number `op` to that of `transfer`, modulo 65536.
fn ops_since(transfer: TransferId, op: u32) -> u32 {
    transfer.op().wrapping_sub(op) & 0xFFFF
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_is_found_in_any_order_and_what_is_ahead_is_not() {
        let mut closed = ClosedTransfers::default();
        let id = TransferId::collective;
        for (op, index) in [(65_535, 0), (1, 2), (0, 1), (1, 0)] {
            closed.push(over(id(op, index)));
        }
        assert!([(65_535, 0), (1, 2), (0, 1), (1, 0)]
            .iter()
            .all(|(op, at)| closed.find(id(*op, *at)).is_some()));
        assert!([(1, 1), (1, 3), (2, 0), (900, 0)]
            .iter()
            .all(|(op, at)| closed.find(id(*op, *at)).is_none()));
        let message = TransferId(TransferId::POINT_TO_POINT | 5);
        closed.push(over(message));
        assert!(closed.find_mut(message).is_some());
    }

    #[test]
    fn what_may_still_be_asked_about_is_remembered_and_no_more() {
        let mut closed = ClosedTransfers::default();
        (0..1_500).for_each(|op| closed.push(over(TransferId::collective(op, 0))));
        assert!(closed.find(TransferId::collective(0, 0)).is_some(), "it has not been retired");
        closed.retire(TransferId::collective(1_000, 0));
        closed.push(over(TransferId::collective(1_500, 0)));
        assert_eq!(closed.latest.len(), REMEMBERED);
        assert!(closed.find(TransferId::collective(1_000, 0)).is_some());
        // However many messages there are meanwhile, and however many transfers of its own a collective has.
        (0..20_000).for_each(|count| closed.push(over(TransferId::point_to_point(count))));
        (0..20_000).for_each(|index| closed.push(over(TransferId::collective(1_501, index))));
        assert!((0..20_000).all(|index| closed.find(TransferId::collective(1_501, index)).is_some()));
        assert!(closed.find(TransferId::collective(1_000, 0)).is_some());
    }

    #[test]
    fn each_is_remembered_once_and_the_oldest_is_forgotten_first() {
        let mut closed = ClosedTransfers::default();
        let id = TransferId::point_to_point;
        let most = MESSAGES_AT_MOST as u32;
        (0..most).for_each(|count| closed.push(over(id(count))));
        // Its number has come round: it is the newest now.
        closed.push(over(id(5)));
        (most..most + 6).for_each(|count| closed.push(over(id(count))));
        assert_eq!((closed.latest.len(), closed.order[1].len()), (MESSAGES_AT_MOST, MESSAGES_AT_MOST));
        let known: alloc::vec::Vec<u32> = (0..9).filter(|count| closed.find(id(*count)).is_some()).collect();
        assert_eq!(known, [5, 7, 8]);
    }

    #[test]
    fn of_messages_behind_one_that_nobody_has_received_the_oldest_are_known_by_their_numbers() {
        let mut closed = ClosedTransfers::default();
        let id = TransferId::point_to_point;
        (1..20_000).for_each(|count| closed.push(over(id(count))));
        assert_eq!(closed.latest.len(), MESSAGES_AT_MOST);
        let is_over = |closed: &ClosedTransfers, count| {
            closed.find(id(count)).is_some() || closed.is_retired(id(count))
        };
        assert!((1..20_000).all(|count| is_over(&closed, count)));
        assert!(!is_over(&closed, 0) && !is_over(&closed, 20_000));
        closed.push(over(id(0)));
        closed.retire(id(20_000));
        closed.push(over(id(20_000)));
        assert_eq!(closed.latest.len(), REMEMBERED, "what is retired needs no place");
        assert!((0..20_000).all(|count| is_over(&closed, count)));
    }

    fn over(transfer: TransferId) -> Closed {
        Closed { transfer, chunks: 1, missing: None, stage_us: 0, answered_at: Timestamp::ZERO, repeated: 0 }
    }

    #[test]
    fn a_number_that_comes_round_again_is_not_taken_for_the_old_one() {
        let mut closed = ClosedTransfers::default();
        let transfer = TransferId::collective(3, 0);
        closed.push(over(transfer));
        for op in 1..=100 {
            closed.retire(TransferId::collective(op, 0));
        }
        assert!(closed.find(transfer).is_some() && closed.is_retired(transfer));
        let ahead = TransferId::collective(65536 + 10, 0);
        for op in 100..=65536 + 3 {
            if op == 65536 {
                closed.push(over(ahead));
            }
            closed.retire(TransferId::collective(op, 0));
        }
        assert!(closed.find(ahead).is_some(), "collectives end in any order");
        assert!(closed.find(transfer).is_none() && !closed.is_retired(transfer));
    }

    #[test]
    fn what_is_not_over_is_at_most_so_far_ahead_of_the_mark() {
        let mut closed = ClosedTransfers::default();
        let id = TransferId::collective;
        assert!(!closed.is_beyond(id(AHEAD_MAX, 7)) && closed.is_beyond(id(AHEAD_MAX + 1, 0)));
        for mark in [1, 30_000, 60_000, 65_535, 65_536 + 3] {
            closed.retire(id(mark, 0));
            let of_those = |is: &dyn Fn(TransferId) -> bool| {
                (0..65_536u32).filter(|ahead| is(id(mark + ahead, 1))).collect::<alloc::vec::Vec<u32>>()
            };
            let beyond = of_those(&|transfer| closed.is_beyond(transfer));
            assert_eq!(
                (beyond.first(), beyond.last()),
                (Some(&(AHEAD_MAX + 1)), Some(&32_767)),
                "from {mark} on"
            );
            assert_eq!(beyond.len() as u32, 32_767 - AHEAD_MAX);
            assert!(of_those(&|transfer| closed.is_retired(transfer)).first() == Some(&32_768));
        }
        assert!(!closed.is_beyond(TransferId::point_to_point(1 << 29)));
    }
}
