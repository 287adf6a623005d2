//! The receiving half of a transfer: which chunks are in, and whether that is enough.
//!
//! claim: mlt/bounded-loss (section 4.2.3): any packet can be placed alone, a bitmap says what is missing.

use super::reception::FirstPass;
use super::{byte_ranges, Bitmap, Grid};
use crate::contract::Overtaken;
use crate::{CloseReason, Contract, Progress, Receipt, ReceiveTransfer, Timestamp, Verdict};
use core::time::Duration;
use gradwire_wire::{Flags, Opening, StatusBody, TransferState, STATUS_WORDS_MAX};

/// A posted receive.
#[derive(Debug)]
pub(crate) struct ReceiveHalf {
    pub(crate) request: ReceiveTransfer,
    pub(crate) grid: Grid,
    pub(crate) missing: Bitmap,
    received_bytes: u64,
    pub(crate) posted_at: Timestamp,
    first_at: Option<Timestamp>,
    called_at: Option<Timestamp>,
    /// When the contract's clock began: the first packet, or the word that all has been sent.
    began_at: Option<Timestamp>,
    /// Critical chunks that are not in.
    critical_missing: u32,
    last_new_at: Timestamp,
    first_pass_over_at: Option<Timestamp>,
    first_pass: FirstPass,
    last_percentile_seen: bool,
    /// Data that the sender could send only because it has the grant.
    pub(crate) grant_seen: bool,
    pub(crate) mismatch_reported: bool,
    /// When the grant or the request for missing chunks is repeated.
    pub(crate) status_at: Option<Timestamp>,
    pub(crate) status_backoff: u32,
    /// When a status was last sent because it was time for one.
    pub(crate) announced_at: Timestamp,
    /// When the contract must be looked at again though nothing arrives.
    pub(crate) contract_at: Option<Timestamp>,
    /// The latest chunk that had come when the contract was put off last.
    put_off_at: Option<Timestamp>,
    /// How often it was put off since the first pass was over.
    put_offs: u32,
}

impl ReceiveHalf {
    pub(crate) fn new(request: ReceiveTransfer, chunk_bytes: u32, now: Timestamp) -> Self {
        let grid = Grid::new(request.bytes, chunk_bytes);
        Self {
            request,
            grid,
            missing: Bitmap::ones(grid.chunks()),
            received_bytes: 0,
            posted_at: now,
            first_at: None,
            called_at: None,
            began_at: None,
            critical_missing: grid.critical(request.contract.critical_chunks),
            last_new_at: now,
            first_pass_over_at: None,
            first_pass: FirstPass::default(),
            last_percentile_seen: false,
            grant_seen: false,
            mismatch_reported: false,
            status_at: None,
            status_backoff: 0,
            announced_at: Timestamp::ZERO,
            contract_at: None,
            put_off_at: None,
            put_offs: 0,
        }
    }

    /// What we believe this transfer is.
    pub(crate) fn opening(&self) -> Opening {
        Opening { total_bytes: self.request.bytes, descriptor: self.request.descriptor, called_us: 0 }
    }

    /// A packet says that its sender had called by then. Each is right, and the one that was under way least knows best.
    pub(crate) fn on_called(&mut self, at: Timestamp) {
        self.called_at = Some(self.called_at.map_or(at, |known| known.min(at)));
    }

    /// Counts a chunk; `false` when it is here already.
    pub(crate) fn accept(&mut self, now: Timestamp, chunk: u32) -> bool {
        if !self.missing.remove(chunk) {
            return false;
        }
        self.first_at.get_or_insert(now);
        self.began_at.get_or_insert(now);
        self.last_new_at = now;
        self.received_bytes += u64::from(self.grid.len(chunk));
        if self.grid.is_critical(chunk, self.request.contract.critical_chunks) {
            self.critical_missing -= 1;
        }
        true
    }

    /// A new chunk came from the network: counts for the rate of reception until the first pass is over. What came early was
    /// buffered, and is handed out at once.
    pub(crate) fn on_arrival(&mut self, now: Timestamp, chunk: u32) {
        if self.first_pass_over_at.is_none() {
            self.first_pass.on_arrival(now, u64::from(self.grid.len(chunk)), 1);
        }
    }

    /// How many chunks of `bytes` from `chunk` on are missing one after the other.
    pub(crate) fn whole_chunks_missing(&self, chunk: u32, bytes: usize) -> u32 {
        let last = self.grid.chunks() - 1;
        let is_last_whole = self.grid.len(last) as usize == bytes;
        let end = last + u32::from(is_last_whole);
        self.missing.run_from(chunk, end.saturating_sub(chunk))
    }

    /// Whether the contract might close the transfer before the last of `chunks` more, which come now with `flags`, is in. `true` where
    /// that is not certain.
    pub(crate) fn might_close_within(&self, now: Timestamp, chunks: u32, flags: Flags) -> bool {
        let contract = &self.request.contract;
        if contract.is_exact() {
            return false;
        }
        // More bytes and fewer critical chunks missing let it close and never keep it open. How long packets may be overtaken is not
        // measured here, which lets it close too.
        let mut then = self.progress(now, now);
        then.quiet = Duration::ZERO;
        then.received_bytes += u64::from(chunks - 1) * u64::from(self.grid.len(0));
        then.critical_missing = 0;
        then.last_percentile_seen |= flags.contains(Flags::LAST_PERCENTILE);
        matches!(contract.verdict(&then), Verdict::Close(_))
    }

    /// [`ReceiveHalf::on_arrival`] and [`ReceiveHalf::accept`] for whole chunks from `first` on, none of which is here. Returns their
    /// bytes.
    pub(crate) fn accept_run(&mut self, now: Timestamp, first: u32, chunks: u32) -> u64 {
        let chunk_bytes = u64::from(self.grid.len(first));
        if self.first_pass_over_at.is_none() {
            self.first_pass.on_arrival(now, chunk_bytes, chunks);
        }
        self.missing.assign(first, chunks, false);
        self.first_at.get_or_insert(now);
        self.began_at.get_or_insert(now);
        self.last_new_at = now;
        let bytes = chunk_bytes * u64::from(chunks);
        self.received_bytes += bytes;
        if self.critical_missing > 0 {
            let ends = self.request.contract.critical_chunks;
            let critical = (first..first + chunks).filter(|chunk| self.grid.is_critical(*chunk, ends));
            self.critical_missing -= critical.count() as u32;
        }
        bytes
    }

    /// How the first pass came.
    pub(crate) fn first_pass(&self) -> &FirstPass {
        &self.first_pass
    }

    /// The sender said or showed that everything has been sent once.
    pub(crate) fn on_all_sent(&mut self, now: Timestamp) {
        self.first_pass_over_at.get_or_insert(now);
        self.began_at.get_or_insert(now);
    }

    /// A packet of the last percent came.
    pub(crate) fn on_last_percentile(&mut self) {
        self.last_percentile_seen = true;
    }

    pub(crate) fn is_first_pass_over(&self) -> bool {
        self.first_pass_over_at.is_some()
    }

    /// Asks the contract; remembers when it wants to be asked again. `peer_sent_at`: when the latest new packet of any
    /// transfer came from this peer. `overtaken`: how long a packet may be, by what the paths measure now.
    pub(crate) fn verdict(
        &mut self,
        now: Timestamp,
        peer_sent_at: Timestamp,
        overtaken: impl FnOnce() -> Overtaken,
    ) -> Option<CloseReason> {
        if self.missing.is_empty() {
            return Some(CloseReason::AllArrived);
        }
        if self.request.contract.is_exact() {
            return None;
        }
        self.put_off(now);
        let progress = self.progress(now, peer_sent_at);
        let verdict = match self.request.contract.minds_order(&progress) {
            false => self.request.contract.verdict(&progress),
            true => self.request.contract.minding(overtaken()).verdict(&progress),
        };
        match verdict {
            Verdict::Close(reason) => Some(reason),
            Verdict::Wait(left) => {
                self.contract_at = left.map(|left| now + left.max(Duration::from_nanos(1)));
                None
            }
        }
    }

    /// A contract whose time was up so long ago was not looked at because this rank stood still, and what came meanwhile lies in its socket: it
    /// has a moment to read that. Once after each packet, so that a rank which is always late still ends; after the first pass a few times in
    /// all, because repairs that keep coming would put the end off again and again.
    fn put_off(&mut self, now: Timestamp) {
        let Some(late) = self.contract_at.map(|at| now.since(at)).filter(|late| *late > STOOD_STILL) else {
            return;
        };
        let are_repairs = self.is_first_pass_over();
        if self.put_off_at == Some(self.last_new_at) || are_repairs && self.put_offs == PUT_OFFS_MAX {
            return;
        }
        self.put_offs += u32::from(are_repairs);
        let later = |at: &mut Timestamp| *at = (*at + late + READS_WITHIN).min(now);
        self.began_at.iter_mut().chain(&mut self.first_pass_over_at).for_each(later);
        later(&mut self.last_new_at);
        self.put_off_at = Some(self.last_new_at);
    }

    fn progress(&self, now: Timestamp, peer_sent_at: Timestamp) -> Progress {
        // Until the first pass is over, a peer that sends another transfer first is busy and not silent.
        let quiet_since = self.last_new_at.max(self.first_pass_over_at.unwrap_or(peer_sent_at));
        Progress {
            elapsed: self.began_at.map_or(Duration::ZERO, |began| now.since(began)),
            quiet: now.since(quiet_since),
            received_bytes: self.received_bytes,
            total_bytes: self.request.bytes,
            critical_missing: self.critical_missing,
            last_percentile_seen: self.last_percentile_seen,
            first_pass_over: self.first_pass_over_at.is_some(),
            since_first_pass: self.first_pass_over_at.map_or(Duration::ZERO, |over| now.since(over)),
        }
    }

    /// Chunks that the contract still needs, as far as this is known: before the first pass is over nobody knows
    /// what is missing rather than under way.
    pub(crate) fn wanted_chunks(&self) -> u32 {
        if !self.is_first_pass_over() || !self.request.contract.repairs {
            return 0;
        }
        let bound = self.request.contract.loss_bound;
        let total = self.request.bytes;
        let needed = if bound <= 0.0 { total } else { Contract::needed(total, 1.0 - bound) };
        let short = needed.saturating_sub(self.received_bytes);
        let chunk = u64::from(self.grid.len(0)).max(1);
        let chunks = if total == 0 { self.missing.count() } else { short.div_ceil(chunk) as u32 };
        chunks.min(self.missing.count())
    }

    /// What the sender is told, describing chunks from the first one missing at or after `first_chunk` on: one status
    /// holds a part of a long transfer only, and what has arrived needs no place in it.
    pub(crate) fn status(&self, first_chunk: u32) -> StatusBody {
        let first_missing = self.missing.first_from(first_chunk).unwrap_or(first_chunk);
        status_of(TransferState::Open, &self.missing, self.wanted_chunks(), first_missing)
    }

    /// How it ended.
    pub(crate) fn receipt(&self, now: Timestamp, reason: CloseReason) -> Receipt {
        let first = self.first_at.or(self.began_at).unwrap_or(now);
        Receipt {
            transfer: self.request.transfer,
            reason,
            received_bytes: self.received_bytes,
            total_bytes: self.request.bytes,
            waited_for_peer: first.since(self.posted_at),
            called_at: self.called_at,
            began_at: first,
            elapsed: now.since(first),
            deadline: self.request.contract.deadline,
            missing: byte_ranges(&self.missing, self.grid),
        }
    }
}

/// A timer that is so late is not that of a busy thread's turn, but of a thread that did not run: its share of a processor was used up, or its
/// machine was stopped.
const STOOD_STILL: Duration = Duration::from_millis(5);
/// A socket's buffer of several MB is read within a few.
const READS_WITHIN: Duration = Duration::from_millis(5);
/// A rank that stands still more often while the repairs of one transfer come is slow, and so would be all that wait for it.
const PUT_OFFS_MAX: u32 = 3;

/// The status that describes `missing` from `first_chunk` (rounded down to a word) on; words after the last missing
/// chunk are left out.
pub(crate) fn status_of(state: TransferState, missing: &Bitmap, wanted: u32, first_chunk: u32) -> StatusBody {
    let first_word = (first_chunk / 64).min(missing.words().saturating_sub(1));
    let mut body = StatusBody {
        state,
        received_chunks: missing.len() - missing.count(),
        wanted_chunks: wanted,
        first_chunk: first_word * 64,
        echo_us: 0,
        stage_us: 0,
        words: 0,
        missing: [0; STATUS_WORDS_MAX],
    };
    let last_word = missing.words().min(first_word + STATUS_WORDS_MAX as u32);
    for (slot, index) in body.missing.iter_mut().zip(first_word..last_word) {
        *slot = missing.word(index);
    }
    body.words = (last_word - first_word) as u16;
    body
}
