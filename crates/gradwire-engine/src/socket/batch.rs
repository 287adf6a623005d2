//! Datagrams on their way to the kernel: small heads are copied here, payload stays in the tensor until it is sent.
//!
//! The driver lets a group fill a [`Batch`], then hands the batch to the socket before it calls the group again. What
//! the kernel does not take at once ([`Batch::keep_from`]) is copied aside, so that no pointer into a tensor outlives
//! that moment.
//!
//! A batch for a thread beside the driver's ([`Batch::copying`]) copies payload as well, from the start: it is sent at any
//! later time, and sealed by whoever sends it.

#[cfg(test)]
mod tests;

use super::address::RawAddress;
use crate::handle::lock;
use gradwire_core::wire::{HEADER_BYTES, TAG_BYTES};
use gradwire_core::{TransmitRun, MESSAGE_BYTES_MAX, MESSAGE_DATAGRAMS_MAX};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

/// Most datagrams in a batch: a kernel call takes 1024 pieces, and a datagram has at most two.
pub(crate) const DATAGRAMS_MAX: usize = 512;
/// Largest UDP payload.
pub(crate) const DATAGRAM_BYTES_MAX: usize = MESSAGE_BYTES_MAX;
/// Most datagrams of one kernel message.
pub(crate) const SEGMENTS_MAX: usize = MESSAGE_DATAGRAMS_MAX;
/// Kernel messages of one batch: little enough that acknowledgements are looked at often.
const MESSAGES: usize = 4;
/// Most bytes of a batch: its messages, what is small between them, and behind them a datagram of any size.
const BATCH_BYTES: usize = (MESSAGES + 2) * DATAGRAM_BYTES_MAX;

/// What seals datagrams to one peer, in the order in which they leave.
pub(crate) trait Seal: Send + std::fmt::Debug {
    /// Seals head and body in place; the last [`TAG_BYTES`] are room for the tag. `false`: it must not be sent.
    fn seal(&mut self, datagram: &mut [u8]) -> bool;
}

/// The same, for the thread that sends.
pub(crate) type SharedSeal = Arc<Mutex<dyn Seal>>;

/// One datagram of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    /// Destination.
    pub(crate) to: RawAddress,
    /// Traffic class octet.
    pub(crate) octet: u8,
    /// It may leave behind datagrams to the same destination that follow it.
    pub(crate) may_follow: bool,
    /// Head only: of no transfer's data.
    is_control: bool,
    head_start: u32,
    head_bytes: u32,
    payload: *const u8,
    payload_bytes: u32,
    /// Place of what is still to seal it, among those of the batch; [`NO_SEAL`]: nothing is.
    seal: u16,
}

/// See [`Slot::seal`].
const NO_SEAL: u16 = u16::MAX;

impl Slot {
    /// UDP payload bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.head_bytes as usize + self.payload_bytes as usize
    }
}

/// Datagrams that wait for one hand-over to the kernel.
#[derive(Debug)]
pub(crate) struct Batch {
    slots: Vec<Slot>,
    heads: Vec<u8>,
    kept: Vec<u8>,
    bytes: usize,
    /// Of its largest datagram.
    datagram_bytes: usize,
    /// Of all data.
    data_bytes: usize,
    /// With so many of those it is full.
    bytes_max: usize,
    /// Payload is copied too, and lies behind its head.
    copies: bool,
    /// Of the peers to whom unsealed datagrams wait.
    seals: Vec<SharedSeal>,
    /// Datagrams that could not be sealed, since that was last asked.
    refused: u64,
}

impl Batch {
    /// An empty batch with all memory that its datagrams will ever need.
    pub(crate) fn new() -> Self {
        Self::with(false)
    }

    /// The same, which copies payload and never holds a pointer into a tensor.
    pub(crate) fn copying() -> Self {
        Self::with(true)
    }

    fn with(copies: bool) -> Self {
        Self {
            copies,
            seals: Vec::new(),
            refused: 0,
            slots: Vec::with_capacity(DATAGRAMS_MAX),
            heads: Vec::with_capacity(BATCH_BYTES),
            kept: Vec::with_capacity(BATCH_BYTES),
            bytes: 0,
            datagram_bytes: 0,
            data_bytes: 0,
            bytes_max: bytes_max(1),
        }
    }

    /// Whether a datagram of any size fits. A batch ends where its last message is full: the kernel's layers and devices take as
    /// long for a message of three datagrams as for one of 45. Control packets between them do not count.
    pub(crate) fn has_room(&self) -> bool {
        self.slots.len() < DATAGRAMS_MAX
            && self.data_bytes + self.datagram_bytes <= self.bytes_max
            && self.bytes + DATAGRAM_BYTES_MAX <= BATCH_BYTES
    }

    /// How many datagrams of `bytes` bytes fit, `most` at most: as many as could be pushed one after the other.
    pub(crate) fn room_for(&self, bytes: usize, most: usize) -> usize {
        if !self.has_room() {
            return 0;
        }
        if bytes > self.datagram_bytes || most < 2 {
            return most.min(1);
        }
        let in_messages = 1 + (self.bytes_max - self.data_bytes - self.datagram_bytes) / bytes;
        let in_memory = 1 + (BATCH_BYTES - DATAGRAM_BYTES_MAX - self.bytes) / bytes;
        most.min(in_messages).min(in_memory).min(DATAGRAMS_MAX - self.slots.len())
    }

    fn count(&mut self, bytes: usize, is_control: bool) {
        self.bytes += bytes;
        if is_control {
            return;
        }
        self.data_bytes += bytes;
        if bytes > self.datagram_bytes {
            (self.datagram_bytes, self.bytes_max) = (bytes, bytes_max(bytes));
        }
    }

    /// The last datagram may leave behind those to its destination that follow.
    pub(crate) fn let_last_follow(&mut self) {
        if let Some(slot) = self.slots.last_mut() {
            slot.may_follow = true;
        }
    }

    /// Bytes of data in it.
    pub(crate) fn data_bytes(&self) -> usize {
        self.data_bytes
    }

    /// Whether it holds no pointer into a tensor, whatever was pushed.
    pub(crate) fn copies(&self) -> bool {
        self.copies
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// The datagrams, in order.
    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Takes a datagram to an address with a traffic class octet: `head` is copied, `payload` is not.
    ///
    /// # Panics
    /// Without room ([`Batch::has_room`]).
    ///
    /// # Safety
    /// The bytes of `payload` must stay valid until [`Batch::clear`] or [`Batch::keep_from`], unless the batch copies.
    pub(crate) unsafe fn push(&mut self, (to, octet): (RawAddress, u8), head: &[u8], payload: &[u8]) {
        assert!(
            self.has_room() && head.len() + payload.len() <= DATAGRAM_BYTES_MAX,
            "a full batch was pushed to"
        );
        // Room was checked against BATCH_BYTES, so this never reallocates and 32 bits hold every position.
        let head_start = self.heads.len() as u32;
        let is_control = payload.is_empty();
        self.count(head.len() + payload.len(), is_control);
        self.heads.extend_from_slice(head);
        if self.copies {
            self.heads.extend_from_slice(payload);
            return self.push_whole((to, octet), head_start, (is_control, NO_SEAL));
        }
        self.slots.push(Slot {
            to,
            octet,
            may_follow: false,
            is_control,
            head_start,
            head_bytes: head.len() as u32,
            payload: payload.as_ptr(),
            payload_bytes: payload.len() as u32,
            seal: NO_SEAL,
        });
    }

    /// As [`Batch::push`] for each packet of a run, with its part of `payload`.
    ///
    /// # Panics
    /// Without room for all ([`Batch::room_for`]).
    ///
    /// # Safety
    /// As for [`Batch::push`].
    pub(crate) unsafe fn push_run(
        &mut self,
        (to, octet): (RawAddress, u8),
        run: &TransmitRun,
        payload: &[u8],
    ) {
        let bytes = HEADER_BYTES + run.bytes;
        assert!(self.room_for(bytes, run.count) == run.count, "a full batch was pushed to");
        debug_assert_eq!(payload.len(), run.bytes * run.count);
        if self.copies {
            return self.copy_run((to, octet), run, payload);
        }
        let slot = Slot {
            to,
            octet,
            may_follow: false,
            is_control: false,
            head_start: self.heads.len() as u32,
            head_bytes: HEADER_BYTES as u32,
            payload: payload.as_ptr(),
            payload_bytes: run.bytes as u32,
            seal: NO_SEAL,
        };
        for (place, part) in payload.chunks_exact(run.bytes).enumerate() {
            self.heads.extend_from_slice(&run.header_of(place).encode());
            let head_start = slot.head_start + (place * HEADER_BYTES) as u32;
            self.slots.push(Slot { head_start, payload: part.as_ptr(), ..slot });
            self.count(bytes, false);
        }
    }

    /// Takes a datagram as a whole: head and payload are copied, and sealed with room for a tag behind them, at once or, in a batch that
    /// copies, in [`Batch::seal`].
    ///
    /// # Panics
    /// Without room ([`Batch::has_room`]).
    pub(crate) fn push_sealed(
        &mut self,
        to: (RawAddress, u8),
        head: &[u8],
        payload: &[u8],
        seal: &SharedSeal,
    ) {
        let bytes = head.len() + payload.len() + TAG_BYTES;
        assert!(self.has_room() && bytes <= DATAGRAM_BYTES_MAX, "a full batch was pushed to");
        match self.seal_place(seal) {
            Some(place) => self.add_unsealed(to, head, payload, place),
            None => self.add_sealed(to, head, payload, &mut *lock(seal)),
        }
    }

    /// As [`Batch::push_sealed`] for each packet of a run, with its part of `payload`.
    ///
    /// # Panics
    /// Without room for all ([`Batch::room_for`]).
    pub(crate) fn push_sealed_run(
        &mut self,
        to: (RawAddress, u8),
        run: &TransmitRun,
        payload: &[u8],
        seal: &SharedSeal,
    ) {
        let bytes = HEADER_BYTES + run.bytes + TAG_BYTES;
        assert!(self.room_for(bytes, run.count) == run.count, "a full batch was pushed to");
        debug_assert_eq!(payload.len(), run.bytes * run.count);
        let parts = payload.chunks_exact(run.bytes).enumerate();
        let datagrams = parts.map(|(place, part)| (run.header_of(place).encode(), part));
        match self.seal_place(seal) {
            Some(place) => datagrams.for_each(|(head, part)| self.add_unsealed(to, &head, part, place)),
            None => {
                let mut seal = lock(seal);
                datagrams.for_each(|(head, part)| self.add_sealed(to, &head, part, &mut *seal));
            }
        }
    }

    /// Where what seals stands in a batch that is sealed later; `None`: it is sealed at once.
    fn seal_place(&mut self, seal: &SharedSeal) -> Option<u16> {
        if !self.copies {
            return None;
        }
        // There are few: a turn of one peer is a whole message.
        let known = self.seals.iter().position(|known| Arc::ptr_eq(known, seal));
        let place = known.unwrap_or_else(|| {
            self.seals.push(Arc::clone(seal));
            self.seals.len() - 1
        });
        // A batch has fewer datagrams than there are numbers.
        Some(place as u16)
    }

    fn add_unsealed(&mut self, to: (RawAddress, u8), head: &[u8], payload: &[u8], seal: u16) {
        let start = self.heads.len() as u32;
        for part in [head, payload, &[0; TAG_BYTES]] {
            self.heads.extend_from_slice(part);
        }
        let is_control = payload.is_empty();
        self.count(head.len() + payload.len() + TAG_BYTES, is_control);
        self.push_whole(to, start, (is_control, seal));
    }

    fn add_sealed(&mut self, to: (RawAddress, u8), head: &[u8], payload: &[u8], seal: &mut dyn Seal) {
        let start = self.heads.len();
        for part in [head, payload, &[0; TAG_BYTES]] {
            self.heads.extend_from_slice(part);
        }
        if !seal.seal(&mut self.heads[start..]) {
            self.refused += 1;
            return self.heads.truncate(start);
        }
        let is_control = payload.is_empty();
        self.count(head.len() + payload.len() + TAG_BYTES, is_control);
        self.push_whole(to, start as u32, (is_control, NO_SEAL));
    }

    fn copy_run(&mut self, to: (RawAddress, u8), run: &TransmitRun, payload: &[u8]) {
        for (place, part) in payload.chunks_exact(run.bytes).enumerate() {
            let start = self.heads.len() as u32;
            self.heads.extend_from_slice(&run.header_of(place).encode());
            self.heads.extend_from_slice(part);
            self.count(HEADER_BYTES + part.len(), false);
            self.push_whole(to, start, (false, NO_SEAL));
        }
    }

    /// What lies behind `start` is a datagram.
    fn push_whole(&mut self, (to, octet): (RawAddress, u8), start: u32, (is_control, seal): (bool, u16)) {
        self.slots.push(Slot {
            to,
            octet,
            may_follow: false,
            is_control,
            head_start: start,
            head_bytes: self.heads.len() as u32 - start,
            payload: NonNull::dangling().as_ptr(),
            payload_bytes: 0,
            seal,
        });
    }

    /// Seals what is still to be sealed, which whoever sends does first. Returns how many datagrams could not be sealed since the last
    /// time; they are out of the batch.
    pub(crate) fn seal(&mut self) -> u64 {
        if !self.seals.is_empty() {
            let before = self.slots.len();
            seal_slots((&mut self.slots, &mut self.heads), &self.seals);
            self.refused += (before - self.slots.len()) as u64;
            self.seals.clear();
        }
        std::mem::take(&mut self.refused)
    }

    /// Head and payload of a datagram of this batch.
    pub(crate) fn parts(&self, slot: &Slot) -> (&[u8], &[u8]) {
        let start = slot.head_start as usize;
        let head = &self.heads[start..start + slot.head_bytes as usize];
        // SAFETY: `push` obliges its caller to keep the payload valid until the batch is cleared or kept; `keep_from`
        // points it into `kept`, which does not move before `clear`.
        let payload = unsafe { std::slice::from_raw_parts(slot.payload, slot.payload_bytes as usize) };
        (head, payload)
    }

    /// Everything was handed over.
    pub(crate) fn clear(&mut self) {
        self.slots.clear();
        self.heads.clear();
        self.kept.clear();
        self.seals.clear();
        (self.bytes, self.datagram_bytes, self.data_bytes, self.bytes_max) = (0, 0, 0, bytes_max(1));
    }

    /// The first `sent` datagrams were handed over, the rest waits: its payload is copied, so that the tensors are free.
    pub(crate) fn keep_from(&mut self, sent: usize) {
        if sent >= self.slots.len() {
            return self.clear();
        }
        let already_kept = !self.kept.is_empty();
        self.slots.drain(..sent);
        self.bytes = 0;
        self.data_bytes = 0;
        for slot in &self.slots {
            self.bytes += slot.bytes();
            self.data_bytes += if slot.is_control { 0 } else { slot.bytes() };
        }
        if already_kept {
            return;
        }
        for slot in &mut self.slots {
            // SAFETY: as in `parts`.
            let payload = unsafe { std::slice::from_raw_parts(slot.payload, slot.payload_bytes as usize) };
            let start = self.kept.len();
            debug_assert!(start + payload.len() <= self.kept.capacity());
            self.kept.extend_from_slice(payload);
            slot.payload = self.kept[start..].as_ptr();
        }
        // Marks the batch as kept even when no datagram has payload.
        if self.kept.is_empty() {
            self.kept.push(0);
        }
    }
}

/// Seals the datagrams that wait for it, in order, and takes out those that could not be.
fn seal_slots((slots, heads): (&mut Vec<Slot>, &mut [u8]), seals: &[SharedSeal]) {
    let mut held = None;
    slots.retain_mut(|slot| {
        let place = std::mem::replace(&mut slot.seal, NO_SEAL);
        let Some(seal) = seals.get(usize::from(place)) else { return true };
        let held = match &mut held {
            Some((known, held)) if *known == place => held,
            other => {
                // The one before is given back first.
                *other = None;
                &mut other.insert((place, lock(seal))).1
            }
        };
        let start = slot.head_start as usize;
        held.seal(&mut heads[start..start + slot.head_bytes as usize])
    });
}

/// What the messages of a batch hold of datagrams of so many bytes.
const fn bytes_max(datagram_bytes: usize) -> usize {
    let segments = DATAGRAM_BYTES_MAX / datagram_bytes;
    MESSAGES * datagram_bytes * if segments < SEGMENTS_MAX { segments } else { SEGMENTS_MAX }
}
