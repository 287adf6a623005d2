//! The sending half of a transfer: what has been sent, what must go again, and what the receiver said.

use super::{byte_ranges, Bitmap, Grid, Order};
use crate::{Reliability, SendReceipt, SendTransfer, Timestamp};
use alloc::vec::Vec;
use gradwire_wire::{Opening, StatusBody, TransferState, STATUS_WORDS_MAX};

/// `received_chunks` of a closed transfer that the receiver has retired: everything counted, as far as it remembers.
pub(crate) const ALL_CHUNKS: u32 = u32::MAX;

/// The last percent of a transfer, at least one packet, is marked (ULTIMA section 3.3.2).
const LAST_PERCENTILE_OF: u32 = 100;

/// A posted send.
#[derive(Debug)]
pub(crate) struct SendHalf {
    pub(crate) request: SendTransfer,
    pub(crate) grid: Grid,
    order: Order,
    /// None of its packets left earlier.
    pub(crate) posted_at: Timestamp,
    /// Chunks of the first pass that have been sent; its order is `order`.
    sent: u32,
    pub(crate) granted: bool,
    /// A status came after this send was posted. A grant that came before it says nothing about what this rank calls.
    answered: bool,
    /// The receiver has said anything of it, if only that it has not called it.
    is_told: bool,
    /// Chunks known to have arrived.
    acked: Bitmap,
    /// Chunks with a packet on its way.
    in_flight: Bitmap,
    /// Chunks to send again.
    resend: Bitmap,
    /// The receiver's contract needs what is missing, so losses are repaired at once from now on.
    asked: bool,
    /// The probe that follows the first pass has been sent.
    pub(crate) end_announced: bool,
    closing: Option<Closing>,
    waiting: Option<Waiting>,
    /// More urgent transfers overtake it in the network, so that their acknowledgements tell nothing of what it has on its way.
    pub(crate) is_overtaken: bool,
    /// For each chunk the path of its latest packet; empty where there is one path only.
    sent_over: Vec<u8>,
}

/// How long a transfer has waited for the receiver's word, which is said once and may be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Waiting {
    /// When the wait began, or when it was last asked about or told of.
    pub(crate) since: Timestamp,
    /// How often was asked since anything new was told.
    pub(crate) asked: u32,
    /// The receiver has not called it: it will speak when it does, and questions before that are in vain.
    pub(crate) is_unposted: bool,
}

impl Waiting {
    const fn since(now: Timestamp) -> Self {
        Self { since: now, asked: 0, is_unposted: false }
    }
}

/// The final bitmap while it is put together from several statuses.
#[derive(Debug)]
struct Closing {
    missing: Bitmap,
    described: Bitmap,
}

impl Closing {
    /// The first chunk whose end is not known yet, of a transfer with so many words of 64 chunks.
    fn unknown_from(&self, words: u32) -> Option<u32> {
        (0..words).find(|word| !self.described.contains(*word)).map(|word| word * 64)
    }
}

/// What a status changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum StatusEffect {
    /// Nothing new.
    Nothing,
    /// The transfer is granted now, or chunks were queued again.
    Progress,
    /// It is over, but the bitmap from this chunk on is still unknown: probe for it.
    AskFrom(u32),
    /// It is over.
    Done(SendReceipt),
    /// The status contradicts the transfer's size.
    Implausible,
}

impl SendHalf {
    pub(crate) fn new(request: SendTransfer, chunk_bytes: u32, granted: bool) -> Self {
        let grid = Grid::new(request.bytes, chunk_bytes);
        let order = Order::new(grid, request.critical_chunks, request.begin);
        let chunks = grid.chunks();
        Self {
            request,
            grid,
            order,
            posted_at: Timestamp::ZERO,
            sent: 0,
            granted,
            answered: false,
            is_told: false,
            acked: Bitmap::zeros(chunks),
            in_flight: Bitmap::zeros(chunks),
            resend: Bitmap::zeros(chunks),
            asked: false,
            end_announced: false,
            closing: None,
            waiting: None,
            is_overtaken: false,
            sent_over: Vec::new(),
        }
    }

    /// What a packet that leaves now says about this transfer.
    pub(crate) fn opening(&self, now: Timestamp) -> Opening {
        let called = self.request.called_at.map_or(0, |at| now.since(at).as_micros());
        let called_us = u32::try_from(called).unwrap_or(Opening::CALLED_US_MAX);
        Opening { total_bytes: self.request.bytes, descriptor: self.request.descriptor, called_us }
    }

    /// Whether a loss goes out again: unless nothing does, or nobody has asked yet.
    fn repairs(&self, chunk: u32) -> bool {
        match self.request.reliability {
            Reliability::Exact | Reliability::Deferred => true,
            Reliability::Tolerant => self.asked || self.is_critical(chunk),
            // claim: ultima/best-effort
            Reliability::BestEffort => self.is_critical(chunk),
        }
    }

    /// Whether what is sent again waits until nothing new is left, here and in all other transfers.
    pub(crate) fn defers(&self) -> bool {
        self.request.reliability == Reliability::Deferred
    }

    /// Whether `chunk` goes before the rest of its transfer and always arrives.
    pub(crate) fn is_critical(&self, chunk: u32) -> bool {
        self.grid.is_critical(chunk, self.request.critical_chunks)
    }

    /// Whether the packet with `chunk` must say what this transfer is. The first chunk always does, and the one that leaves first: without
    /// the one no exact transfer is complete, and the other is none of those that a contract cuts, so that no transfer ends before its two
    /// ends were compared, however early the grant came.
    pub(crate) fn needs_opening(&self, chunk: u32) -> bool {
        chunk == 0 || chunk == self.order.chunk_at(0) || !self.answered
    }

    /// Everything has been sent at least once.
    pub(crate) fn is_all_sent(&self) -> bool {
        self.sent == self.grid.chunks()
    }

    /// Whether the receiver has closed it, and has not said of all chunks which count.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_some()
    }

    /// How long it has waited for the receiver's word, if nothing of other transfers can help it on: what can be sent is sent, and what was
    /// on its way is acknowledged or lost, or is overtaken by others.
    pub(crate) fn waiting(&self) -> Option<Waiting> {
        self.waiting
    }

    /// Whether the receiver may not even know that there is such a transfer: nothing of it has left, and no question about it was answered.
    pub(crate) fn is_unheard_of(&self) -> bool {
        self.sent == 0 && !self.is_told
    }

    /// Whether packets of it are neither acknowledged nor lost.
    pub(crate) fn is_on_its_way(&self) -> bool {
        !self.in_flight.is_empty()
    }

    /// Packets of it have arrived: one that others overtake is asked about when no more do.
    pub(crate) fn note_arrived(&mut self, now: Timestamp) {
        if self.is_overtaken {
            self.waiting = None;
        }
        self.note_waiting(now);
    }

    /// What is on its way, or may be sent, has changed: looks whether it waits.
    pub(crate) fn note_waiting(&mut self, now: Timestamp) {
        let has_left = self.is_all_sent() && self.resend.is_empty();
        let is_quiet = has_left && (self.is_overtaken || !self.is_on_its_way());
        if is_quiet || self.is_closing() {
            self.waiting.get_or_insert(Waiting::since(now));
        } else {
            self.waiting = None;
        }
    }

    /// The receiver is asked about it.
    pub(crate) fn on_asked(&mut self, now: Timestamp) {
        if let Some(waiting) = &mut self.waiting {
            (waiting.since, waiting.asked) = (now, waiting.asked + 1);
        }
    }

    /// The receiver has said something, which does not end it. What is not new puts no question off: a receiver that misses its end says
    /// so again and again.
    pub(crate) fn on_told(&mut self, now: Timestamp, state: TransferState, effect: &StatusEffect) {
        self.is_told = true;
        self.note_waiting(now);
        let Some(waiting) = &mut self.waiting else { return };
        let is_unposted = state == TransferState::Unposted;
        if is_unposted || matches!(effect, StatusEffect::Progress | StatusEffect::AskFrom(_)) {
            *waiting = Waiting { is_unposted, ..Waiting::since(now) };
        } else if waiting.is_unposted {
            *waiting = Waiting { since: waiting.since, ..Waiting::since(now) };
        }
    }

    /// Bytes that at least one of so many of its chunks has.
    pub(crate) fn least_of(&self, chunks: u32) -> u32 {
        let last = self.grid.chunks().saturating_sub(1);
        self.grid.len(if chunks == 1 { last } else { 0 })
    }

    /// From which chunk on the receiver is asked.
    pub(crate) fn unknown_from(&self) -> u32 {
        let words = self.grid.chunks().div_ceil(64);
        self.closing.as_ref().and_then(|closing| closing.unknown_from(words)).unwrap_or(0)
    }

    /// Chunks of the first pass that have been sent.
    pub(crate) fn first_pass_chunks(&self) -> u32 {
        self.sent
    }

    /// The next critical chunk that was lost.
    // claim: ltp/critical-packets
    pub(crate) fn peek_lost_critical(&self) -> Option<u32> {
        let ends = u32::from(self.request.critical_chunks);
        if ends == 0 || self.resend.is_empty() || self.closing.is_some() {
            return None;
        }
        let head = self.resend.first_from(0).filter(|chunk| self.is_critical(*chunk));
        head.or_else(|| self.resend.first_from(self.grid.chunks().saturating_sub(ends)))
    }

    /// The next chunk to send again.
    pub(crate) fn peek_resend(&self) -> Option<u32> {
        // Asked before every packet, and nearly always there is none.
        if self.resend.is_empty() || self.closing.is_some() {
            return None;
        }
        self.resend.first_from(0)
    }

    /// The next chunk never sent, the critical ones first; none once the receiver wants no more.
    pub(crate) fn peek_new(&self) -> Option<u32> {
        let has_new = !self.is_all_sent() && self.closing.is_none();
        has_new.then(|| self.order.chunk_at(self.sent))
    }

    /// Remembers from now on which path each chunk takes.
    pub(crate) fn track_paths(&mut self) {
        self.sent_over = alloc::vec![0; self.grid.chunks() as usize];
    }

    /// The path of the chunk's latest packet, where there are several.
    pub(crate) fn sent_over(&self, chunk: u32) -> Option<usize> {
        self.sent_over.get(chunk as usize).map(|path| usize::from(*path))
    }

    /// A chunk left over `path`.
    pub(crate) fn on_sent(&mut self, chunk: u32, path: usize) {
        if let Some(over) = self.sent_over.get_mut(chunk as usize) {
            *over = path as u8;
        }
        self.resend.remove(chunk);
        self.in_flight.insert(chunk);
        self.waiting = None;
        if self.turn_of(chunk) == self.sent {
            self.sent += 1;
        }
    }

    /// The next chunk never sent, and how many packets from it on, `most` at most, differ in nothing but number and place. `None`: it is
    /// critical, says what the transfer is, or is the last one.
    pub(crate) fn alike_ahead(&self, most: u32) -> Option<(u32, u32)> {
        let (chunk, chunks) = (self.peek_new()?, self.grid.chunks());
        let ends = self.request.critical_chunks;
        if self.needs_opening(chunk) || self.grid.is_critical(chunk, ends) {
            return None;
        }
        // In turn, up to the last packet of the first pass, which says so.
        let mut alike = most.min(chunks - 1 - self.sent).min(self.order.run_from(chunk));
        let percentile = chunks - chunks.div_ceil(LAST_PERCENTILE_OF);
        if self.sent < percentile {
            alike = alike.min(percentile - self.sent);
        }
        let tags = &self.request.tags;
        let is_important = tags.is_important(chunk);
        let differs = |other: &u32| tags.is_important(chunk + other) != is_important;
        let alike = if tags.important.is_some() { (1..alike).find(differs).unwrap_or(alike) } else { alike };
        (alike > 0).then_some((chunk, alike))
    }

    /// So many chunks from `chunk` on left, which [`SendHalf::alike_ahead`] has named. There is one path only.
    pub(crate) fn on_sent_run(&mut self, chunk: u32, count: u32) {
        debug_assert!(self.sent_over.is_empty() && self.turn_of(chunk) == self.sent);
        self.in_flight.assign(chunk, count, true);
        self.sent += count;
    }

    /// Place of `chunk` in the first pass.
    fn turn_of(&self, chunk: u32) -> u32 {
        self.order.place_of(chunk)
    }

    /// Whether `chunk` is among the last percent of the first pass, or its only one (ULTIMA section 3.3.2).
    // claim: ultima/last-percentile
    pub(crate) fn is_in_last_percent(&self, chunk: u32) -> bool {
        let chunks = self.grid.chunks();
        self.turn_of(chunk) + chunks.div_ceil(LAST_PERCENTILE_OF) >= chunks
    }

    /// Packets with so many chunks from `chunk` on arrived.
    pub(crate) fn on_acked(&mut self, chunk: u32, count: u32) {
        self.in_flight.assign(chunk, count, false);
        self.resend.assign(chunk, count, false);
        self.acked.assign(chunk, count, true);
    }

    /// A packet with this chunk counts as lost.
    pub(crate) fn on_lost(&mut self, chunk: u32) {
        self.in_flight.remove(chunk);
        if self.repairs(chunk) && !self.acked.contains(chunk) {
            self.resend.insert(chunk);
        }
    }

    /// How it ends when nobody can say any more what counted: an exact send is taken for delivered, unless parts of it have never
    /// left. Of a tolerant one what was not acknowledged did not count.
    pub(crate) fn unconfirmed(&self) -> SendReceipt {
        let mut missing = Bitmap::ones(self.grid.chunks());
        self.acked.iter().for_each(|chunk| _ = missing.remove(chunk));
        let is_untaken = self.request.reliability == Reliability::Exact && !self.is_all_sent();
        SendReceipt { is_untaken, ..self.without(&missing) }
    }

    /// How it ends when the receiver has left without having taken it.
    pub(crate) fn untaken(&self) -> SendReceipt {
        SendReceipt { is_untaken: true, ..self.without(&Bitmap::ones(self.grid.chunks())) }
    }

    fn without(&self, missing: &Bitmap) -> SendReceipt {
        let missing = match self.request.reliability {
            Reliability::Exact => Vec::new(),
            _ => byte_ranges(missing, self.grid),
        };
        SendReceipt { missing, ..SendReceipt::complete(self.request.transfer) }
    }

    /// Applies the receiver's word.
    pub(crate) fn on_status(&mut self, status: &StatusBody) -> StatusEffect {
        let chunks = self.grid.chunks();
        if status.state == TransferState::Closed && status.received_chunks == ALL_CHUNKS {
            return StatusEffect::Done(SendReceipt::complete(self.request.transfer));
        }
        if status.received_chunks > chunks || status.wanted_chunks > chunks || status.first_chunk > chunks {
            return StatusEffect::Implausible;
        }
        match status.state {
            TransferState::Unposted => StatusEffect::Nothing,
            TransferState::Open => self.on_open(status),
            TransferState::Closed => self.on_closed(status),
        }
    }

    fn on_open(&mut self, status: &StatusBody) -> StatusEffect {
        let mut progress = !self.granted;
        self.granted = true;
        self.answered = true;
        self.asked |= status.wanted_chunks > 0;
        let mut spare = self.repairs_for(status);
        // Important ones first: the contract may be met before the others have had to come again. Mostly none is told from the others.
        let passes = if self.request.tags.important.is_some() { &[true, false][..] } else { &[false] };
        // What is missing is mostly what has not left yet, and that is all behind the rest where they leave in the order of memory.
        let (sent, in_order) = (self.sent, self.order.is_in_memory_order());
        for important in passes {
            for chunk in set_bits(status).take_while(|chunk| *chunk < sent || !in_order) {
                if self.request.tags.is_important(chunk) != *important {
                    continue;
                }
                if spare == 0 {
                    break;
                }
                // Not what has never left, and not what is on its way: its own acknowledgement or loss will tell.
                let was_sent = chunk < self.grid.chunks() && self.turn_of(chunk) < self.sent;
                if was_sent && self.repairs(chunk) {
                    spare -= 1;
                    if !self.in_flight.contains(chunk) {
                        self.acked.remove(chunk);
                        progress |= self.resend.insert(chunk);
                    }
                }
            }
        }
        if progress {
            StatusEffect::Progress
        } else {
            StatusEffect::Nothing
        }
    }

    /// How many of the missing chunks to send again: all of an exact transfer, what the contract needs of a tolerant
    /// one, and a few to spare for those that get lost again.
    fn repairs_for(&self, status: &StatusBody) -> usize {
        match self.request.reliability {
            Reliability::Exact | Reliability::Deferred | Reliability::BestEffort => usize::MAX,
            Reliability::Tolerant => (status.wanted_chunks + status.wanted_chunks / 8 + 1) as usize,
        }
    }

    fn on_closed(&mut self, status: &StatusBody) -> StatusEffect {
        let chunks = self.grid.chunks();
        if status.received_chunks == chunks {
            let receipt = SendReceipt::complete(self.request.transfer);
            return StatusEffect::Done(SendReceipt { stage_us: status.stage_us, ..receipt });
        }
        let words = chunks.div_ceil(64);
        let closing = self.closing.get_or_insert_with(|| Closing {
            missing: Bitmap::zeros(chunks),
            described: Bitmap::zeros(words),
        });
        for word in 0..u32::from(status.words).min(STATUS_WORDS_MAX as u32) {
            closing.described.insert(status.first_chunk / 64 + word);
        }
        for chunk in set_bits(status) {
            closing.missing.insert(chunk);
        }
        match closing.unknown_from(words) {
            Some(chunk) => StatusEffect::AskFrom(chunk),
            None => StatusEffect::Done(SendReceipt {
                transfer: self.request.transfer,
                missing: byte_ranges(&closing.missing, self.grid),
                stage_us: status.stage_us,
                is_untaken: false,
            }),
        }
    }
}

/// The chunks that a status calls missing, in order.
fn set_bits(status: &StatusBody) -> impl Iterator<Item = u32> + '_ {
    let words = status.missing.iter().take(usize::from(status.words)).zip(0u32..);
    words.flat_map(move |(word, index)| {
        let clear_lowest = |rest: &u64| Some(rest & (rest - 1)).filter(|rest| *rest != 0);
        let rests = core::iter::successors(Some(*word).filter(|word| *word != 0), clear_lowest);
        rests.map(move |rest| status.first_chunk + index * 64 + rest.trailing_zeros())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_wire::TransferId;

    fn half(chunks: u32, reliability: Reliability, critical_chunks: u16) -> SendHalf {
        let bytes = u64::from(chunks) * 64;
        let (transfer, descriptor) = (TransferId(1), [0; 16]);
        let request =
            SendTransfer { reliability, critical_chunks, ..SendTransfer::exact(transfer, bytes, descriptor) };
        SendHalf::new(request, 64, true)
    }

    // test of: ultima/last-percentile
    #[test]
    fn the_last_percent_that_is_sent_is_marked_and_never_nothing() {
        for (chunks, marked) in [(1, 1), (2, 1), (99, 1), (100, 1), (101, 2), (1000, 10)] {
            for critical in [0, 1] {
                let half = half(chunks, Reliability::BestEffort, critical);
                let in_turn = (0..chunks).map(|place| half.order.chunk_at(place));
                let marks: Vec<bool> = in_turn.map(|chunk| half.is_in_last_percent(chunk)).collect();
                let first = (chunks - marked) as usize;
                assert!(marks[..first].iter().all(|mark| !mark), "{chunks} chunks");
                assert!(marks[first..].iter().all(|mark| *mark), "{chunks} chunks");
            }
        }
    }

    // test of: ultima/best-effort
    #[test]
    fn best_effort_sends_nothing_again_even_when_asked() {
        let mut half = half(3, Reliability::BestEffort, 0);
        (0..3).for_each(|chunk| half.on_sent(chunk, 0));
        half.on_lost(1);
        assert_eq!(half.peek_resend(), None);
        let mut missing = [0; STATUS_WORDS_MAX];
        missing[0] = 0b010;
        let (received_chunks, wanted_chunks) = (2, 1);
        let status = StatusBody {
            state: TransferState::Open,
            received_chunks,
            wanted_chunks,
            first_chunk: 0,
            echo_us: 0,
            stage_us: 0,
            words: 1,
            missing,
        };
        half.on_status(&status);
        assert_eq!((half.peek_resend(), half.peek_new()), (None, None));
    }

    // test of: ltp/critical-packets
    #[test]
    fn critical_chunks_go_before_the_rest_and_are_sent_again_whatever_it_does() {
        for reliability in [Reliability::Tolerant, Reliability::BestEffort, Reliability::Deferred] {
            let mut half = half(5, reliability, 1);
            assert_eq!(half.peek_new(), Some(0));
            half.on_sent(0, 0);
            assert_eq!(half.peek_new(), Some(4), "the last one next");
            half.on_sent(4, 0);
            assert_eq!((half.peek_lost_critical(), half.peek_new()), (None, Some(1)));
            half.on_lost(4);
            assert_eq!((half.peek_lost_critical(), half.peek_new()), (Some(4), Some(1)));
            half.on_sent(4, 0);
            (1..4).for_each(|chunk| half.on_sent(chunk, 0));
            half.on_lost(2);
            assert!(half.is_all_sent() && half.peek_lost_critical().is_none());
            let again = (reliability == Reliability::Deferred).then_some(2);
            assert_eq!(half.peek_resend(), again, "{reliability:?}");
        }
    }
}
