//! The state that two ranks share, as one machine without IO.
//!
//! Split by the way of a packet: `inbound` takes datagrams, `arriving_run` many of them at once, `outbound` gives them, `leaving_run` many at once, `timers` does what is due,
//! `hellos` begins the association, `liveness` keeps, ends and fails it, `beats` says when a heartbeat is due, `silence` when
//! a peer is missed, `parting` sees off one that leaves, `questions` asks the receiver. This file holds the state and the commands.

mod answers;
mod arriving_run;
mod beats;
mod hellos;
mod inbound;
mod leaving_run;
mod liveness;
mod outbound;
mod parting;
mod questions;
mod silence;
mod timers;
mod trials;

#[cfg(test)]
mod parting_tests;
#[cfg(test)]
mod path_tests;
#[cfg(test)]
mod tests;

use crate::contract::Overtaken;
use crate::paths::{Paths, COPY};
use crate::recovery::{AckOutcome, SentPacket};
use crate::transfer::{Bitmap, Closed, ClosedTransfers, EarlyBuffer, ReceiveHalf, ReceptionRate, SendHalf};
use crate::transit::Transit;
use crate::{
    CloseReason, ConnectionConfig, ConnectionStats, Event, PathStats, Payload, ReceiveTransfer, Reliability,
    SendReceipt, SendTransfer, Timestamp, TransferError, CHUNKS_MAX,
};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use answers::Answers;
use gradwire_wire::{PathId, TransferId};
use leaving_run::Run;
pub use leaving_run::TransmitRun;
use liveness::Liveness;
use parting::Parting;
use questions::{Probe, Question};
use silence::Silence;
pub use trials::Attempt;
use trials::Trials;

/// Grants remembered that came before their send was posted: those of a few calls, of which one has up to 60 on one connection.
const PREGRANTS_MAX: usize = 256;

/// All state that two ranks of a process group share. See the crate's documentation for the drain contract.
#[derive(Debug)]
pub struct Connection {
    config: ConnectionConfig,
    paths: Paths,
    liveness: Liveness,
    silence: Silence,
    trials: Trials,
    parting: Parting,
    /// In the order in which they are served: by priority, then by age.
    sends: Vec<SendHalf>,
    receives: Vec<ReceiveHalf>,
    /// When the latest new packet of any transfer came, early ones included. That what came early is handed out later says
    /// nothing about the peer.
    peer_sent_at: Timestamp,
    closed: ClosedTransfers,
    early: EarlyBuffer,
    transit: Transit,
    pregrants: VecDeque<TransferId>,
    /// Chunks sent of transfers that have not been granted.
    eager_used: u32,
    /// Statuses to send: transfer, first chunk described, time stamp echoed.
    status_due: VecDeque<(TransferId, u32, u32)>,
    probe_due: VecDeque<Question>,
    /// Last sign of progress for what we send, and how often we have asked since.
    progress_at: Timestamp,
    probe_backoff: u32,
    /// Hellos, heartbeats and farewells so far: each takes the next path.
    greetings: u32,
    /// Where in the list of waiting sends the next questions begin.
    asked_before: usize,
    /// When was last asked for words that others' progress says nothing about.
    asked_for_words_at: Timestamp,
    /// The latest probe, until it is answered.
    last_probe: Option<Probe>,
    /// Stamp, queue and path of the latest ones, where some packets overtake others.
    asked: VecDeque<(u32, u8, PathId)>,
    /// A probe asked for an acknowledgement that echoes this stamp, on its path.
    ack_requested: Option<(u32, PathId)>,
    answers: Answers,
    /// Strangers flood this rank, and the peer.
    is_flooded: bool,
    peer_is_flooded: bool,
    /// Path on which the latest packet came.
    heard_on: PathId,
    /// New data that follows without a question, until anything happens: whatever changes the connection ends it.
    run: Option<Run>,
    /// The latest data packet: a path that is not trusted gets a copy of it now and then.
    latest_sent: Option<(TransferId, u32)>,
    events: VecDeque<Event>,
    reception: ReceptionRate,
    outcome: AckOutcome,
    stats: ConnectionStats,
}

impl Connection {
    /// Starts to connect: the first [`Connection::poll_transmit`] gives a hello. Transfers may be posted at once.
    #[must_use]
    pub fn new(config: ConnectionConfig, now: Timestamp) -> Self {
        Self {
            paths: Paths::new(&config, now),
            liveness: Liveness::new(now),
            silence: Silence::default(),
            trials: Trials::default(),
            parting: Parting::No,
            sends: Vec::new(),
            receives: Vec::new(),
            peer_sent_at: Timestamp::ZERO,
            closed: ClosedTransfers::default(),
            early: EarlyBuffer::new(config.chunk_bytes() as usize, config.eager_chunks()),
            transit: Transit::default(),
            pregrants: VecDeque::new(),
            eager_used: 0,
            status_due: VecDeque::new(),
            probe_due: VecDeque::new(),
            progress_at: now,
            probe_backoff: 0,
            greetings: 0,
            asked_before: 0,
            asked_for_words_at: Timestamp::ZERO,
            last_probe: None,
            asked: VecDeque::new(),
            ack_requested: None,
            answers: Answers::default(),
            is_flooded: false,
            peer_is_flooded: false,
            heard_on: PathId(0),
            run: None,
            latest_sent: None,
            events: VecDeque::new(),
            reception: ReceptionRate::default(),
            outcome: AckOutcome::default(),
            stats: ConnectionStats::default(),
            config,
        }
    }

    /// The collective says that `senders` ranks, this one included, share the receiver from now on: first windows and
    /// parts of the receiver's queue follow. One means that nothing is known.
    pub fn set_incast(&mut self, senders: u32) {
        self.run = None;
        self.paths.on_incast(senders);
    }

    /// Strangers flood this rank, or no longer: the peer is told, and both keep their rates meanwhile. Acknowledgements are lost in
    /// a flood as well.
    pub fn set_flooded(&mut self, is_flooded: bool) {
        self.run = None;
        self.is_flooded = is_flooded;
        self.hold_rates();
    }

    fn hold_rates(&mut self) {
        let is_flooded = self.is_flooded || self.peer_is_flooded;
        (0..self.paths.len()).for_each(|index| self.paths.at_mut(index).controller.set_flooded(is_flooded));
    }

    /// The peer says whether it is flooded.
    fn on_flooded(&mut self, peer_is_flooded: bool) {
        if self.peer_is_flooded != peer_is_flooded {
            self.peer_is_flooded = peer_is_flooded;
            self.hold_rates();
        }
    }

    /// Posts a sending half. The bytes are asked for by [`crate::Body::Payload`] until [`Event::Sent`].
    ///
    /// # Errors
    /// [`TransferError`]; nothing was changed.
    pub fn send(&mut self, now: Timestamp, request: SendTransfer) -> Result<(), TransferError> {
        self.run = None;
        self.check_request(request.bytes)?;
        if self.sends.iter().any(|send| send.request.transfer == request.transfer) {
            return Err(TransferError::Exists(request.transfer));
        }
        if self.liveness.peer_has_left() {
            // What would have been counted there is not, and without an exact transfer nothing there has ended that waited for it.
            let half = SendHalf::new(request, self.config.chunk_bytes(), false);
            let is_exact = half.request.reliability == Reliability::Exact;
            let receipt = if is_exact { half.untaken() } else { half.unconfirmed() };
            self.events.push_back(Event::Sent(receipt));
            return Ok(());
        }
        let pregranted = self.pregrants.iter().position(|id| *id == request.transfer);
        if let Some(index) = pregranted {
            self.pregrants.remove(index);
        }
        // What is new may be lost, whoever was asked in vain before: a peer that is late has nothing to say, and pauses grow. No post puts a
        // question off that was not asked since the one before.
        if self.sends.is_empty() || self.probe_backoff > 0 {
            self.note_progress(now);
        }
        let at = self.sends.partition_point(|send| send.request.priority <= request.priority);
        let mut half = SendHalf::new(request, self.config.chunk_bytes(), pregranted.is_some());
        half.posted_at = now;
        let queue = self.config.queue_of(half.request.tags.class);
        half.is_overtaken = self.config.has_class_queues() && queue > 0;
        if self.paths.len() > 1 {
            half.track_paths();
        }
        self.sends.insert(at, half);
        Ok(())
    }

    /// Posts a receiving half. Data that came early is handed out by [`Connection::poll_payload`].
    ///
    /// # Errors
    /// [`TransferError`]; nothing was changed.
    pub fn receive(&mut self, now: Timestamp, request: ReceiveTransfer) -> Result<(), TransferError> {
        self.run = None;
        self.check_request(request.bytes)?;
        let transfer = request.transfer;
        let posted = self.receives.iter().any(|receive| receive.request.transfer == transfer);
        if posted || self.closed.find(transfer).is_some() || self.closed.is_retired(transfer) {
            return Err(TransferError::Exists(transfer));
        }
        let mut half = ReceiveHalf::new(request, self.config.chunk_bytes(), now);
        if let Some((theirs, called_at)) = self.early.post(transfer) {
            let ours = half.opening();
            half.on_called(called_at);
            if !theirs.agrees(&ours) {
                half.mismatch_reported = true;
                self.events.push_back(Event::Mismatch { transfer, ours, theirs });
            }
        }
        // A transfer that fits the eager window needs no grant; if the window is used up the sender will ask.
        if request.bytes > self.config.eager_bytes / 2 {
            self.queue_status(transfer, 0, 0);
        }
        half.status_at = Some(now + self.probe_timeout());
        self.receives.push(half);
        Ok(())
    }

    fn check_request(&self, bytes: u64) -> Result<(), TransferError> {
        if self.liveness.is_over() {
            return Err(TransferError::Closed);
        }
        let largest = u64::from(CHUNKS_MAX) * u64::from(self.config.chunk_bytes());
        if bytes > largest.min(u64::from(u32::MAX)) {
            return Err(TransferError::TooLarge(bytes));
        }
        Ok(())
    }

    /// Early data of the transfers posted since the last call; call until `None` after each `receive`.
    pub fn poll_payload(&mut self, now: Timestamp) -> Option<Payload<'_>> {
        self.run = None;
        // Chunks whose size contradicts the posted transfer belong to a mismatch that has been reported.
        while let Some((transfer, chunk)) = self.early.peek_ready() {
            let index = self.receives.iter().position(|half| half.request.transfer == transfer);
            if index.is_some_and(|index| self.accept_early(now, index, &chunk)) {
                break;
            }
            self.early.pop_ready();
        }
        let (transfer, chunk, bytes) = self.early.pop_ready()?;
        Some(Payload { transfer, offset: chunk.offset, weight: chunk.weight, bytes })
    }

    fn accept_early(&mut self, now: Timestamp, index: usize, chunk: &crate::transfer::EarlyChunk) -> bool {
        let half = &mut self.receives[index];
        let place = half.grid.chunk_at(chunk.offset, chunk.len as usize);
        let place = place.filter(|_| half.request.may_weigh(chunk.weight));
        if half.mismatch_reported || !place.is_some_and(|place| half.accept(now, place)) {
            return false;
        }
        if chunk.last_percentile {
            half.on_last_percentile();
        }
        if chunk.all_sent {
            half.on_all_sent(now);
        }
        self.stats.packets_received += 1;
        self.stats.bytes_received += u64::from(chunk.len);
        self.close_if_satisfied(now, index);
        true
    }

    /// Everything in the space of `below` that is before it is over for this rank: late packets are dropped,
    /// probes are answered with "closed", buffered early data is freed.
    pub fn retire(&mut self, below: TransferId) {
        self.early.discard_before(self.closed.retire(below));
        let closed = &self.closed;
        self.pregrants.retain(|transfer| !closed.is_retired(*transfer));
    }

    /// Whether [`Connection::poll_event`] has one.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Counters and estimates.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        let mut stats = self.stats;
        self.paths.fill_stats(&mut stats);
        stats.reception_rate = self.reception.get();
        stats.reception_rate_short = self.reception.short();
        stats
    }

    /// Bytes of data in the smallest of many packets of which none has arrived at the peer, though it answers questions: of a connection with one path, while
    /// as much is still to be sent. When nothing is, nobody has tried the way since, and it may be whole again.
    #[must_use]
    pub fn loses_all_data(&self) -> Option<u32> {
        let smallest = self.paths.at(0).lost_in_drought()?;
        self.sends.iter().any(|send| send.grid.len(0) >= smallest).then_some(smallest)
    }

    /// Counters and estimates of each path, in the order of their ids.
    #[must_use]
    pub fn path_stats(&self) -> Vec<PathStats> {
        self.paths.stats()
    }

    /// Closes the receive at `index` if its contract is satisfied.
    fn close_if_satisfied(&mut self, now: Timestamp, index: usize) {
        let Self { paths, receives, peer_sent_at, .. } = self;
        let overtaken = || Overtaken { most: paths.overtaken_max(now), by_path: paths.skew(now) };
        let reason = receives[index].verdict(now, *peer_sent_at, overtaken);
        if let Some(reason) = reason {
            self.close(now, index, reason);
        }
    }

    /// Ends a receive. The status says so to the sender, which sends nothing more.
    // claim: mlt/stop
    fn close(&mut self, now: Timestamp, index: usize, reason: CloseReason) {
        let half = self.receives.swap_remove(index);
        let transfer = half.request.transfer;
        self.reception.learn(half.first_pass());
        self.events.push_back(Event::Received(half.receipt(now, reason)));
        let (chunks, stage_us) = (half.grid.chunks(), half.request.stage_us);
        let missing: Option<Bitmap> = (!half.missing.is_empty()).then_some(half.missing);
        self.closed.push(Closed { transfer, chunks, missing, stage_us, answered_at: now, repeated: 0 });
        self.queue_status(transfer, 0, 0);
    }

    /// Queues a status unless one for the same part of the transfer waits already.
    fn queue_status(&mut self, transfer: TransferId, first_chunk: u32, echo_us: u32) {
        match self.status_due.iter_mut().find(|due| due.0 == transfer && due.1 == first_chunk) {
            Some(due) => due.2 = if echo_us == 0 { due.2 } else { echo_us },
            None => self.status_due.push_back((transfer, first_chunk, echo_us)),
        }
    }

    fn note_progress(&mut self, now: Timestamp) {
        self.progress_at = now;
        self.probe_backoff = 0;
    }

    /// Concludes the send at `index`.
    fn conclude(&mut self, index: usize, receipt: SendReceipt) {
        let send = self.sends.remove(index);
        self.paths.forget(send.request.transfer);
        if !send.granted {
            self.eager_used -= send.first_pass_chunks();
        }
        self.probe_due.retain(|question| question.transfer != receipt.transfer);
        // Another transfer may bear this number later, and be shorter.
        self.latest_sent = self.latest_sent.filter(|(transfer, _)| *transfer != receipt.transfer);
        self.events.push_back(Event::Sent(receipt));
    }

    /// Packets that the path at `index` took for lost go back to their transfers. A copy belongs to none.
    fn apply_outcome(&mut self, now: Timestamp, index: usize) {
        let outcome = core::mem::take(&mut self.outcome);
        self.paths.learn(index, &outcome);
        // What left in a run arrives in one, mostly.
        let is_next = |one: &SentPacket, next: &SentPacket| {
            next.transfer == one.transfer
                && next.chunk != COPY
                && one.chunk.checked_add(1) == Some(next.chunk)
        };
        for run in outcome.acked.chunk_by(is_next).filter(|run| run[0].chunk != COPY) {
            if let Some(send) = self.sends.iter_mut().find(|send| send.request.transfer == run[0].transfer) {
                send.on_acked(run[0].chunk, run.len() as u32);
                send.note_arrived(now);
            }
        }
        for packet in outcome.lost.iter().filter(|packet| packet.chunk != COPY) {
            self.stats.packets_lost += 1;
            if let Some(send) = self.sends.iter_mut().find(|send| send.request.transfer == packet.transfer) {
                send.on_lost(packet.chunk);
                send.note_waiting(now);
            }
        }
        // Keeps the capacity of its lists for the next acknowledgement.
        self.outcome = outcome;
    }
}
