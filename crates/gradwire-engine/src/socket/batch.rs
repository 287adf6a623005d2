//! Datagrams on their way to the kernel: small heads are copied here, payload stays in the tensor until it is sent.
//!
//! The driver lets a group fill a [`Batch`], then hands the batch to the socket before it calls the group again. What
//! the kernel does not take at once ([`Batch::keep_from`]) is copied aside, so that no pointer into a tensor outlives
//! that moment.

use super::address::RawAddress;
use gradwire_core::wire::{HEADER_BYTES, TAG_BYTES};
use gradwire_core::{TransmitRun, MESSAGE_BYTES_MAX, MESSAGE_DATAGRAMS_MAX};
use std::ptr::NonNull;

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
}

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
}

impl Batch {
    /// An empty batch with all memory that it will ever need.
    pub(crate) fn new() -> Self {
        Self {
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
    /// The bytes of `payload` must stay valid until [`Batch::clear`] or [`Batch::keep_from`].
    pub(crate) unsafe fn push(&mut self, (to, octet): (RawAddress, u8), head: &[u8], payload: &[u8]) {
        assert!(
            self.has_room() && head.len() + payload.len() <= DATAGRAM_BYTES_MAX,
            "a full batch was pushed to"
        );
        // Room was checked against BATCH_BYTES, so this never reallocates and 32 bits hold every position.
        let head_start = self.heads.len() as u32;
        self.heads.extend_from_slice(head);
        let is_control = payload.is_empty();
        self.count(head.len() + payload.len(), is_control);
        self.slots.push(Slot {
            to,
            octet,
            may_follow: false,
            is_control,
            head_start,
            head_bytes: head.len() as u32,
            payload: payload.as_ptr(),
            payload_bytes: payload.len() as u32,
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
        let slot = Slot {
            to,
            octet,
            may_follow: false,
            is_control: false,
            head_start: self.heads.len() as u32,
            head_bytes: HEADER_BYTES as u32,
            payload: payload.as_ptr(),
            payload_bytes: run.bytes as u32,
        };
        for (place, part) in payload.chunks_exact(run.bytes).enumerate() {
            self.heads.extend_from_slice(&run.header_of(place).encode());
            let head_start = slot.head_start + (place * HEADER_BYTES) as u32;
            self.slots.push(Slot { head_start, payload: part.as_ptr(), ..slot });
            self.count(bytes, false);
        }
    }

    /// Takes a datagram as a whole: head and payload are copied, and `seal` gets both with room for a tag behind them. `false`
    /// from it: nothing is added.
    ///
    /// # Panics
    /// Without room ([`Batch::has_room`]).
    pub(crate) fn push_sealed(
        &mut self,
        (to, octet): (RawAddress, u8),
        head: &[u8],
        payload: &[u8],
        seal: &mut dyn FnMut(&mut [u8]) -> bool,
    ) {
        let bytes = head.len() + payload.len() + TAG_BYTES;
        assert!(self.has_room() && bytes <= DATAGRAM_BYTES_MAX, "a full batch was pushed to");
        let start = self.heads.len();
        self.heads.extend_from_slice(head);
        self.heads.extend_from_slice(payload);
        self.heads.extend_from_slice(&[0; TAG_BYTES]);
        if !seal(&mut self.heads[start..]) {
            return self.heads.truncate(start);
        }
        let is_control = payload.is_empty();
        self.count(bytes, is_control);
        let payload = NonNull::dangling().as_ptr();
        let (head_start, head_bytes) = (start as u32, bytes as u32);
        let slot = Slot {
            to,
            octet,
            may_follow: false,
            is_control,
            head_start,
            head_bytes,
            payload,
            payload_bytes: 0,
        };
        self.slots.push(slot);
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

/// What the messages of a batch hold of datagrams of so many bytes.
const fn bytes_max(datagram_bytes: usize) -> usize {
    let segments = DATAGRAM_BYTES_MAX / datagram_bytes;
    MESSAGES * datagram_bytes * if segments < SEGMENTS_MAX { segments } else { SEGMENTS_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::wire::PacketNumber;
    use gradwire_core::{ConnectionId, Header, Kind, Mark};

    fn whole(batch: &Batch, index: usize) -> Vec<u8> {
        let (head, payload) = batch.parts(&batch.slots()[index]);
        [head, payload].concat()
    }

    #[test]
    fn what_the_kernel_did_not_take_survives_its_tensor() {
        let mut batch = Batch::new();
        let mut tensor = [7_u8; 100];
        for i in 0..4_u8 {
            // SAFETY: `tensor` outlives the first `keep_from`.
            unsafe { batch.push((RawAddress::EMPTY, 0), &[i], &tensor[usize::from(i) * 10..][..10]) };
        }
        batch.keep_from(2);
        tensor.fill(0);
        assert_eq!(whole(&batch, 0), [&[2][..], &[7; 10]].concat());
        batch.keep_from(1);
        assert_eq!(whole(&batch, 0), [&[3][..], &[7; 10]].concat());
        batch.keep_from(1);
        assert!(batch.is_empty() && batch.has_room());
    }

    #[test]
    fn a_sealed_datagram_lies_in_the_batch_and_a_refused_one_does_not() {
        let mut batch = Batch::new();
        let to = (RawAddress::EMPTY, 0);
        let mut seal = |datagram: &mut [u8]| {
            datagram[3..].fill(9);
            true
        };
        batch.push_sealed(to, &[1, 2], &[3, 4], &mut seal);
        batch.push_sealed(to, &[5], &[6], &mut |_| false);
        batch.push_sealed(to, &[7, 8, 7], &[], &mut seal);
        assert_eq!(batch.slots().len(), 2);
        batch.keep_from(0);
        assert_eq!(whole(&batch, 0), [&[1, 2, 3][..], &[9; 17]].concat());
        assert_eq!(whole(&batch, 1), [&[7, 8, 7][..], &[9; 16]].concat());
    }

    #[test]
    fn a_batch_ends_where_its_last_message_is_full() {
        let payload = [0_u8; 32_616];
        for (bytes, message) in [(1_408, 45), (32_616, 2), (100, 64), (8_896, 7)] {
            let mut batch = Batch::new();
            while batch.has_room() {
                // SAFETY: `payload` outlives the batch's last use.
                unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 24], &payload[..bytes]) };
            }
            assert_eq!(batch.slots().len(), MESSAGES * message, "{bytes} bytes");
            batch.clear();
            assert!(batch.has_room());
        }
    }

    #[test]
    fn a_run_lies_in_the_batch_as_its_packets_would_and_leaves_as_much_room() {
        let payload: Vec<u8> = (0..60_000).map(|i| i as u8).collect();
        let to = (RawAddress::EMPTY, 3);
        for (bytes, before) in [(1_408, 1), (1_408, 30), (8_896, 3), (100, 200)] {
            let mut header = Header::control(Kind::Data, ConnectionId::new(1).expect("fits"));
            (header.packet_number, header.offset) = (PacketNumber(u32::MAX), 7);
            let run = TransmitRun { header, mark: Mark::CONTROL, offset: 7, bytes, count: 6 };
            let (mut at_once, mut one_by_one) = (Batch::new(), Batch::new());
            for batch in [&mut at_once, &mut one_by_one] {
                for _ in 0..before {
                    // SAFETY: `payload` outlives the batches.
                    unsafe { batch.push(to, &[0; HEADER_BYTES], &payload[..bytes]) };
                }
            }
            let mut rounds = 0;
            while at_once.room_for(HEADER_BYTES + bytes, run.count) == run.count {
                // SAFETY: as above.
                unsafe { at_once.push_run(to, &run, &payload[..6 * bytes]) };
                for (place, part) in payload[..6 * bytes].chunks(bytes).enumerate() {
                    // SAFETY: as above.
                    unsafe { one_by_one.push(to, &run.header_of(place).encode(), part) };
                }
                rounds += 1;
            }
            assert!(rounds > 1, "{bytes} bytes");
            let all = |batch: &Batch| (0..batch.slots().len()).map(|at| whole(batch, at)).collect::<Vec<_>>();
            assert!(all(&at_once) == all(&one_by_one), "{bytes} bytes");
            let left = at_once.room_for(HEADER_BYTES + bytes, usize::MAX);
            let mut fit = 0;
            while one_by_one.has_room() {
                // SAFETY: as above.
                unsafe { one_by_one.push(to, &[0; HEADER_BYTES], &payload[..bytes]) };
                fit += 1;
            }
            assert_eq!(left, fit, "{bytes} bytes");
        }
    }

    #[test]
    fn small_datagrams_take_no_room_of_full_messages_and_memory_suffices_for_all() {
        let payload = [0_u8; 1_384];
        let mut batch = Batch::new();
        let mut data = 0;
        while batch.has_room() {
            let is_small = batch.slots().len() % 46 == 0;
            let payload = if is_small { &payload[..0] } else { &payload[..] };
            data += usize::from(!is_small);
            // SAFETY: `payload` outlives the batch's last use.
            unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 24], payload) };
        }
        assert_eq!(data, MESSAGES * 46, "46 of 1408 bytes, whatever lies between");
        let mut small = Batch::new();
        small.push_sealed((RawAddress::EMPTY, 0), &[0; 24], &[0; 1_384], &mut |_| true);
        while small.has_room() {
            small.push_sealed((RawAddress::EMPTY, 0), &[0; 1_000], &[], &mut |_| true);
        }
        assert!(small.slots().len() > 300, "as much as the memory holds");
        assert_eq!(small.heads.capacity(), BATCH_BYTES);
    }

    #[test]
    fn a_batch_never_grows_beyond_its_memory() {
        let mut batch = Batch::new();
        let payload = vec![0_u8; 60_000];
        let mut pushed = 0;
        while batch.has_room() {
            // SAFETY: `payload` outlives the batch's last use.
            unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 48], &payload) };
            pushed += 1;
        }
        batch.keep_from(0);
        assert!(pushed >= 3);
        assert_eq!(batch.kept.capacity(), BATCH_BYTES);
    }
}
