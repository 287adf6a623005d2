//! The memory under [`super::Ledger`]: one entry for each packet from the oldest that still matters to the newest.
//!
//! Packet numbers have no holes, so an entry is found by subtraction. A second ring holds one bit for each
//! packet that is not yet acknowledged; with it an acknowledgement costs a few instructions for each 64
//! packets that it names and work only for those that are new.

use super::SentPacket;
use crate::Timestamp;
use alloc::collections::VecDeque;
use gradwire_wire::PacketNumber;

/// Where a packet stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    InFlight,
    Acked,
    /// Lost, as enough later ones had come.
    Overtaken,
    /// Lost, as a later one had come and its time was over.
    Late,
    /// Lost for another reason.
    Lost,
    Forgotten,
}

/// A packet with what the delivery-rate sample needs to know about the moment when it was sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) packet: SentPacket,
    pub(super) state: State,
    /// Of the network.
    pub(super) queue: u8,
    pub(super) app_limited: bool,
    /// Bytes delivered on the path until then.
    pub(super) delivered: u64,
    /// When the last of them was acknowledged.
    pub(super) delivered_at: Timestamp,
    /// When the packet was sent whose acknowledgement came last: the start of the present flight.
    pub(super) first_sent_at: Timestamp,
}

/// Entries `[first, next)`.
#[derive(Debug, Default)]
pub(super) struct Ring {
    entries: VecDeque<Entry>,
    /// Bit `number % 64` of word `number / 64 - first / 64`: not acknowledged.
    unacked: VecDeque<u64>,
    first: PacketNumber,
}

impl Ring {
    /// Numbers an empty ring from `number` on.
    #[cfg(test)]
    pub(super) fn start_at(&mut self, number: PacketNumber) {
        self.first = number;
    }

    /// Number of the oldest entry, or of the next packet when there is none.
    pub(super) fn first(&self) -> PacketNumber {
        self.first
    }

    /// Number of the next packet.
    pub(super) fn next(&self) -> PacketNumber {
        PacketNumber(self.first.0.wrapping_add(self.entries.len() as u32))
    }

    /// Appends the packet with number [`Ring::next`].
    pub(super) fn push(&mut self, entry: Entry) {
        let number = self.next();
        if self.word_of(number) >= self.unacked.len() {
            self.unacked.push_back(0);
        }
        self.entries.push_back(entry);
        self.set_unacked(number, true);
    }

    /// The entry of `number`, if it is still here.
    pub(super) fn entry(&self, number: PacketNumber) -> Option<&Entry> {
        self.entries.get(usize::try_from(number.since(self.first)).ok()?)
    }

    /// As [`Ring::entry`], to change it.
    pub(super) fn entry_mut(&mut self, number: PacketNumber) -> Option<&mut Entry> {
        self.entries.get_mut(usize::try_from(number.since(self.first)).ok()?)
    }

    /// Drops the oldest entry.
    pub(super) fn pop(&mut self) {
        self.set_unacked(self.first, false);
        self.entries.pop_front();
        self.first = self.first.next();
        if self.entries.is_empty() {
            self.unacked.clear();
        } else if self.first.0 % 64 == 0 {
            self.unacked.pop_front();
        }
    }

    /// Marks `number` as acknowledged or not.
    pub(super) fn set_unacked(&mut self, number: PacketNumber, unacked: bool) {
        let at = self.word_of(number);
        if let Some(word) = self.unacked.get_mut(at) {
            let bit = 1 << (number.0 % 64);
            *word = if unacked { *word | bit } else { *word & !bit };
        }
    }

    /// Which of the 64 packets up to `newest` are not acknowledged: bit `63 - i` is packet `newest - i`.
    pub(super) fn unacked_up_to(&self, newest: PacketNumber) -> u64 {
        let Ok(bit) = usize::try_from(newest.since(PacketNumber(self.first.0 & !63))) else { return 0 };
        let word = |at: usize| self.unacked.get(at).copied().unwrap_or(0);
        let high = word(bit / 64) << (63 - bit % 64);
        match (bit % 64, bit / 64) {
            (63, _) | (_, 0) => high,
            (low_bits, at) => high | word(at - 1) >> (low_bits + 1),
        }
    }

    /// Marks packets as acknowledged that [`Ring::unacked_up_to`] has named: bit `63 - i` is packet `newest - i`.
    pub(super) fn acknowledge_up_to(&mut self, newest: PacketNumber, acked: u64) {
        let Ok(bit) = usize::try_from(newest.since(PacketNumber(self.first.0 & !63))) else { return };
        let (low_bits, at) = (bit % 64, bit / 64);
        if let Some(word) = self.unacked.get_mut(at) {
            *word &= !(acked >> (63 - low_bits));
        }
        if let Some(word) = at.checked_sub(1).and_then(|before| self.unacked.get_mut(before)) {
            // All of them are in the newer word where it is full.
            *word &= !acked.checked_shl(low_bits as u32 + 1).unwrap_or(0);
        }
    }

    fn word_of(&self, number: PacketNumber) -> usize {
        ((number.0 / 64).wrapping_sub(self.first.0 / 64) & (u32::MAX / 64)) as usize
    }
}
