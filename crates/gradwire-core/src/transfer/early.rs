//! Data that came before its receive was posted: a bounded buffer.
//!
//! The sender may send `eager_bytes` before it is granted anything; each chunk takes one slot here, and the
//! sender counts slots too, so that a correct peer never finds the buffer full. Slots are allocated on first use and
//! reused.

use crate::Timestamp;
use alloc::collections::btree_map::Entry;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec;
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::ops::RangeInclusive;
use core::time::Duration;
use gradwire_wire::{Opening, TransferId};

/// One early chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EarlyChunk {
    pub(crate) offset: u64,
    pub(crate) weight: u16,
    pub(crate) len: u32,
    pub(crate) last_percentile: bool,
    pub(crate) all_sent: bool,
    slot: u32,
}

/// What came early of one transfer.
#[derive(Debug)]
struct EarlyTransfer {
    opening: Opening,
    /// When its sender had called, by its first packet.
    called_at: Timestamp,
    chunks: Vec<EarlyChunk>,
    /// Of these chunks.
    offsets: BTreeSet<Offset>,
}

/// Where a chunk begins in its transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Offset(u64);

impl Ord for Offset {
    fn cmp(&self, other: &Self) -> Ordering {
        #[cfg(test)]
        tests::LOOKS.with(|looks| looks.set(looks.get() + 1));
        self.0.cmp(&other.0)
    }
}

impl PartialOrd for Offset {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// What became of an early chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stored {
    /// Kept; first of its transfer.
    First,
    /// Kept.
    Kept,
    /// Here already.
    Duplicate,
    /// No slot free.
    Full,
}

/// The buffer of one connection.
#[derive(Debug)]
pub(crate) struct EarlyBuffer {
    slot_bytes: usize,
    slots_max: u32,
    memory: Vec<u8>,
    free: Vec<u32>,
    /// By id, because each early packet looks for its own. They were offered in the order in which they came.
    transfers: BTreeMap<TransferId, EarlyTransfer>,
    /// Chunks of transfers that have been posted since, waiting to be handed out.
    ready: VecDeque<(TransferId, EarlyChunk)>,
}

impl EarlyBuffer {
    pub(crate) fn new(slot_bytes: usize, slots_max: u32) -> Self {
        Self {
            slot_bytes,
            slots_max,
            memory: Vec::new(),
            free: Vec::new(),
            transfers: BTreeMap::new(),
            ready: VecDeque::new(),
        }
    }

    /// What the peer said about a transfer that is not posted here.
    pub(crate) fn opening(&self, transfer: TransferId) -> Option<Opening> {
        self.transfers.get(&transfer).map(|early| early.opening)
    }

    /// Remembers a transfer of which only a probe has come so far; `true` when it is new.
    pub(crate) fn announce(&mut self, called_at: Timestamp, transfer: TransferId, opening: Opening) -> bool {
        // Not as many as there are slots: a sender asks about all that wait, and the one wanted first may be the last.
        let is_full = self.transfers.len() >= ANNOUNCED_MAX;
        match self.transfers.entry(transfer) {
            Entry::Vacant(free) if !is_full => {
                let (chunks, offsets) = (Vec::new(), BTreeSet::new());
                free.insert(EarlyTransfer { opening, called_at, chunks, offsets });
                true
            }
            _ => false,
        }
    }

    pub(crate) fn store(
        &mut self,
        called_at: Timestamp,
        (transfer, opening): (TransferId, Opening),
        mut chunk: EarlyChunk,
        bytes: &[u8],
    ) -> Stored {
        // A transfer of which nothing could be kept stays unknown: it is offered with the chunk that finds room.
        if !self.has_slot() && self.opening(transfer).is_none() {
            return Stored::Full;
        }
        let first = self.announce(called_at, transfer, opening);
        let Some(early) = self.transfers.get(&transfer) else { return Stored::Full };
        if early.offsets.contains(&Offset(chunk.offset)) {
            return Stored::Duplicate;
        }
        let Some(slot) = self.take_slot() else { return Stored::Full };
        let start = slot as usize * self.slot_bytes;
        self.memory[start..start + bytes.len()].copy_from_slice(bytes);
        chunk.slot = slot;
        self.transfers.entry(transfer).and_modify(|early| {
            early.chunks.push(chunk);
            early.offsets.insert(Offset(chunk.offset));
        });
        if first {
            Stored::First
        } else {
            Stored::Kept
        }
    }

    /// A chunk to store.
    pub(crate) fn chunk(offset: u64, weight: u16, len: usize) -> EarlyChunk {
        EarlyChunk { offset, weight, len: len as u32, last_percentile: false, all_sent: false, slot: 0 }
    }

    fn has_slot(&self) -> bool {
        !self.free.is_empty() || self.memory.len() / self.slot_bytes < self.slots_max as usize
    }

    fn take_slot(&mut self) -> Option<u32> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        let used = (self.memory.len() / self.slot_bytes) as u32;
        if used >= self.slots_max {
            return None;
        }
        // Grow in few steps: early data is rare, and most connections never need the whole buffer.
        let grow = (self.slots_max - used).min(32);
        self.memory.extend(vec![0; grow as usize * self.slot_bytes]);
        self.free.extend((used + 1..used + grow).rev());
        Some(used)
    }

    /// The transfer has been posted: its chunks become ready, and what the peer said about it is returned, with when it had called.
    pub(crate) fn post(&mut self, transfer: TransferId) -> Option<(Opening, Timestamp)> {
        let early = self.transfers.remove(&transfer)?;
        self.ready.extend(early.chunks.into_iter().map(|chunk| (transfer, chunk)));
        Some((early.opening, early.called_at))
    }

    /// The next ready chunk.
    pub(crate) fn peek_ready(&self) -> Option<(TransferId, EarlyChunk)> {
        self.ready.front().copied()
    }

    /// The next ready chunk and its bytes. Its slot is free again; the bytes stay until the buffer is next used.
    pub(crate) fn pop_ready(&mut self) -> Option<(TransferId, EarlyChunk, &[u8])> {
        let (transfer, chunk) = self.ready.pop_front()?;
        self.free.push(chunk.slot);
        let start = chunk.slot as usize * self.slot_bytes;
        Some((transfer, chunk, &self.memory[start..start + chunk.len as usize]))
    }

    /// Forgets the transfers before `below`, in its space.
    pub(crate) fn discard_before(&mut self, below: TransferId) {
        for range in ids_before(below) {
            while let Some((transfer, _)) = self.transfers.range(range.clone()).next() {
                let transfer = *transfer;
                let chunks = self.transfers.remove(&transfer).map_or_else(Vec::new, |early| early.chunks);
                self.free.extend(chunks.iter().map(|chunk| chunk.slot));
            }
        }
    }
}

/// The ids of the same space for which [`TransferId::is_before`] holds.
fn ids_before(below: TransferId) -> impl Iterator<Item = RangeInclusive<TransferId>> {
    let (space, end) = (below.0 & TransferId::POINT_TO_POINT, below.0 & !TransferId::POINT_TO_POINT);
    let start = end.wrapping_sub(BEFORE_MAX) & !TransferId::POINT_TO_POINT;
    // Numbers come round: those at the end of the space may be before the first ones.
    let has_come_round = start > end;
    let older = has_come_round.then_some((start, !TransferId::POINT_TO_POINT));
    let newer = end.checked_sub(1).map(|last| (if has_come_round { 0 } else { start }, last));
    let range = move |(first, last)| TransferId(space | first)..=TransferId(space | last);
    older.into_iter().chain(newer).map(range)
}

/// Transfers announced at most that are not posted here: far more than a program has in flight with one peer, and 8 MB.
const ANNOUNCED_MAX: usize = 1 << 16;
/// Ids that are before another, in serial arithmetic over 31 bits.
const BEFORE_MAX: u32 = (1 << 30) - 1;

/// When the sender of a packet that came `now` and stood in queues for so long had called, by its opening.
pub(crate) fn called_at(now: Timestamp, queued: Duration, opening: &Opening) -> Timestamp {
    let ago = queued + Duration::from_micros(u64::from(opening.called_us));
    Timestamp::from_nanos(now.as_nanos().saturating_sub(ago.as_nanos() as u64))
}

#[cfg(test)]
mod tests {
    use super::*;

    std::thread_local! {
        /// How often two offsets were compared.
        pub(super) static LOOKS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
    }

    const OPENING: Opening = Opening { total_bytes: 40, descriptor: [7; 16], called_us: 3 };

    fn store(buffer: &mut EarlyBuffer, transfer: u32, offset: u64) -> Stored {
        let bytes = [offset as u8; 10];
        let called_at = called_at(Timestamp::from_nanos(10_000), Duration::ZERO, &OPENING);
        buffer.store(called_at, (TransferId(transfer), OPENING), EarlyBuffer::chunk(offset, 1, 10), &bytes)
    }

    #[test]
    fn early_chunks_come_back_once_with_their_bytes() {
        let mut buffer = EarlyBuffer::new(10, 4);
        assert_eq!(store(&mut buffer, 1, 10), Stored::First);
        assert_eq!(store(&mut buffer, 1, 20), Stored::Kept);
        assert_eq!(store(&mut buffer, 1, 20), Stored::Duplicate);
        assert_eq!(buffer.post(TransferId(1)), Some((OPENING, Timestamp::from_nanos(7_000))));
        for offset in [10u8, 20] {
            let (transfer, chunk, bytes) = buffer.pop_ready().expect("two chunks are ready");
            assert_eq!(
                (transfer, chunk.offset, bytes),
                (TransferId(1), u64::from(offset), &[offset; 10][..])
            );
        }
        assert!(buffer.pop_ready().is_none());
    }

    /// The sender may send much early: 64 MB are 47,662 packets.
    #[test]
    fn what_an_early_chunk_costs_hardly_grows_with_those_before_it() {
        for is_in_order in [true, false] {
            let chunks = 20_000;
            let mut buffer = EarlyBuffer::new(10, chunks);
            let before = LOOKS.get();
            for chunk in 0..chunks {
                let place = if is_in_order { chunk } else { chunk * 7_919 % chunks };
                assert!(matches!(store(&mut buffer, 1, u64::from(place) * 10), Stored::First | Stored::Kept));
            }
            let looks = (LOOKS.get() - before) / u64::from(chunks);
            assert!(looks < 200, "{looks} for each chunk");
            assert_eq!(store(&mut buffer, 1, 70), Stored::Duplicate);
        }
    }

    #[test]
    fn the_buffer_never_grows_past_its_slots_and_reuses_them() {
        let mut buffer = EarlyBuffer::new(10, 2);
        assert_eq!(store(&mut buffer, 1, 0), Stored::First);
        assert_eq!(store(&mut buffer, 2, 0), Stored::First);
        assert_eq!(store(&mut buffer, 2, 10), Stored::Full);
        buffer.discard_before(TransferId(2));
        assert_eq!(store(&mut buffer, 2, 10), Stored::Kept);
        assert_eq!(buffer.memory.len(), 20);
    }

    #[test]
    fn a_transfer_that_found_no_room_is_offered_once_there_is_some() {
        let mut buffer = EarlyBuffer::new(10, 1);
        assert_eq!(store(&mut buffer, 1, 0), Stored::First);
        assert_eq!(store(&mut buffer, 2, 0), Stored::Full);
        assert_eq!(buffer.opening(TransferId(2)), None);
        buffer.discard_before(TransferId(2));
        assert_eq!(store(&mut buffer, 2, 0), Stored::First);
    }

    #[test]
    fn announcements_are_bounded_whatever_room_there_is_for_data() {
        let mut buffer = EarlyBuffer::new(10, 8);
        let mut announce = |id| buffer.announce(Timestamp::ZERO, TransferId(id), OPENING);
        let many = ANNOUNCED_MAX as u32;
        assert!((0..many).all(&mut announce));
        assert!(!announce(0) && !announce(many), "known, and one too many");
        buffer.discard_before(TransferId(1));
        assert!(buffer.announce(Timestamp::ZERO, TransferId(many), OPENING));
    }

    #[test]
    fn what_is_discarded_is_what_is_before_the_mark_in_its_space() {
        let last = !TransferId::POINT_TO_POINT;
        let ids = [0, 1, 5, 1 << 29, (1 << 30) + 4, (1 << 30) + 5, (1 << 30) + 6, last - 1, last];
        for (below, space) in
            ids.iter().flat_map(|id| [0, TransferId::POINT_TO_POINT].map(|space| (*id, space)))
        {
            let mut buffer = EarlyBuffer::new(10, 8);
            let all = || ids.iter().flat_map(|id| [*id, id | TransferId::POINT_TO_POINT]).map(TransferId);
            all().for_each(|id| _ = buffer.announce(Timestamp::ZERO, id, OPENING));
            let below = TransferId(below | space);
            buffer.discard_before(below);
            assert!(all().all(|id| buffer.opening(id).is_none() == id.is_before(below)), "{below:?}");
        }
    }
}
