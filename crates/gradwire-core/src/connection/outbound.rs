//! The way out: what leaves next.
//!
//! Control goes first and is not paced: it is small, bounded and idempotent (where rates are high the driver may put an acknowledgement
//! behind the data of the same moment, [`Transmit::may_follow`]). Data follows in three queues, as in LTP
//! section IV-B: critical packets that were lost; then new ones, of each transfer the critical ones first; then those that may
//! wait until nothing new is left. A new critical packet does not go before the data of an earlier transfer: it would begin the
//! clock of a contract whose data still waits here. What
//! an exact transfer lost goes before what is new, and so does what the receiver of a tolerant one has asked for: its
//! next stage waits for nothing else, so new data of other transfers would only hold it up.

use super::leaving_run::Run;
use super::liveness::Due;
use super::questions::{Probe, Question};
use super::Connection;
use crate::paths::COPY;
use crate::recovery::{RateController, SentPacket};
use crate::transfer::ALL_CHUNKS;
use crate::{Body, Mark, Reliability, Timestamp, TrafficClass, Transmit};
use core::time::Duration;
use gradwire_wire::{
    AckBody, Flags, Header, HelloBody, Kind, StatusBody, TransferId, TransferState, Writer, HEADER_BYTES,
    STATUS_WORDS_MAX, TAG_BYTES,
};

/// Transfers of fewer chunks do without the probe behind their end: three control packets would be a large part of
/// them, and the probe timeout finds a lost tail too.
const ANNOUNCED_CHUNKS: u32 = 16;

/// Transfer of copies in the ledger. A point-to-point transfer may have the same id after 2^31 others: when it ends, the
/// fate of a copy or two stays unknown.
const COPY_TRANSFER: TransferId = TransferId(u32::MAX);

/// A data packet that may leave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub(super) send: usize,
    pub(super) chunk: u32,
    pub(super) again: bool,
}

impl Connection {
    /// The next datagram that may leave now; `scratch` has at least the configured datagram size.
    pub fn poll_transmit(&mut self, now: Timestamp, scratch: &mut [u8]) -> Option<Transmit> {
        if let Some(transmit) = self.poll_run(now) {
            return Some(transmit);
        }
        self.run = None;
        if let Some(transmit) = self.poll_control(now, scratch) {
            self.stats.control_sent += 1;
            return Some(transmit);
        }
        if !self.liveness.is_open() {
            return None;
        }
        self.poll_data(now)
    }

    fn poll_control(&mut self, now: Timestamp, scratch: &mut [u8]) -> Option<Transmit> {
        // Asked for each packet; only a farewell is repeated at this pace.
        let pause = if self.liveness.is_over() { self.probe_timeout() } else { Duration::ZERO };
        self.on_awake(now);
        if let Some(due) = self.liveness.next_due(now, self.config.heartbeat(), pause) {
            return self.transmit_due(now, due, scratch);
        }
        if !self.liveness.is_open() {
            return if self.liveness.is_parting() { self.poll_answers(now, scratch) } else { None };
        }
        if let Some((about, lead)) = self.to_acknowledge(now) {
            let transmit = self.transmit_ack(now, (about, lead), scratch);
            if about != lead {
                // It was described with the others.
                self.paths.at_mut(about).arrivals.acknowledge(now);
            }
            if transmit.is_some() {
                return transmit;
            }
        }
        self.poll_answers(now, scratch)
    }

    /// The path that must be acknowledged now, or that of a question that asks for it, and by which path.
    fn to_acknowledge(&self, now: Timestamp) -> Option<(usize, usize)> {
        let asked = self.ack_requested.map(|(_, path)| usize::from(path.0));
        let about = asked.or_else(|| self.paths.ack_due(now))?;
        let as_usual = || if asked.is_some() { about } else { self.paths.way_back(about) };
        Some((about, self.detour(now).unwrap_or_else(as_usual)))
    }

    /// The path by which everything goes back at present, because the peer has no answers.
    fn detour(&self, now: Timestamp) -> Option<usize> {
        self.answers.detour(now)
    }

    /// What is said and asked about single transfers.
    fn poll_answers(&mut self, now: Timestamp, scratch: &mut [u8]) -> Option<Transmit> {
        if let Some((transfer, first_chunk, echo_us)) = self.status_due.pop_front() {
            return self.transmit_status(now, transfer, (first_chunk, echo_us), scratch);
        }
        while let Some(question) = self.probe_due.pop_front() {
            if let Some(transmit) = self.transmit_probe(now, question, scratch) {
                return Some(transmit);
            }
        }
        None
    }

    pub(super) fn header(&self, now: Timestamp, kind: Kind, transfer: TransferId) -> Header {
        let mut header = Header::control(kind, self.config.remote);
        header.transfer = transfer;
        header.sent_at_us = now.as_wire_us();
        header
    }

    /// `turn`: how often this was said before.
    fn control(&self, now: Timestamp, kind: Kind, transfer: TransferId, turn: u32) -> Header {
        let mut header = self.header(now, kind, transfer);
        header.path = self.paths.control(turn);
        header
    }

    fn transmit_due(&mut self, now: Timestamp, due: Due, scratch: &mut [u8]) -> Option<Transmit> {
        let (kind, reply) = match due {
            Due::Hello { .. } => (Kind::Hello, false),
            Due::HelloReply => (Kind::Hello, true),
            Due::Ping | Due::PathPing(_) | Due::Trial(_) => (Kind::Ping, false),
            Due::PingReply(..) => (Kind::Ping, true),
            Due::Goodbye => (Kind::Goodbye, false),
            Due::GoodbyeReply => (Kind::Goodbye, true),
            Due::Abort(_) => (Kind::Abort, false),
            Due::AbortReply => (Kind::Abort, true),
        };
        if matches!(due, Due::Hello { .. } | Due::Ping | Due::Goodbye | Due::Abort(_)) {
            // Each is a repetition of the one before, or tells how another path is.
            self.greetings = self.greetings.wrapping_add(1);
        }
        let mut header = self.control(now, kind, TransferId(0), self.greetings);
        if reply {
            header.flags = Flags::REPLY;
        }
        let mut out = Writer::new(scratch);
        match due {
            Due::Hello { .. } | Due::HelloReply => {
                let mut echo_us = 0;
                if reply {
                    let heard = self.liveness.take_hello_reply();
                    (echo_us, header.path, header.offset) = (heard.sent_at_us, heard.path, heard.address);
                }
                HelloBody { word: self.config.hello.says, echo_us }.encode(&mut out);
            }
            Due::Ping => {
                self.trials.on_pinged(header.path, header.sent_at_us);
                out.put(self.liveness.position());
            }
            Due::PathPing(path) => {
                header.path = path;
                self.trials.on_pinged(path, header.sent_at_us);
                out.put(self.liveness.position());
            }
            Due::Trial(path) => {
                header.path = path;
                self.trials.on_asked(path, header.sent_at_us);
                out.put(self.liveness.position());
            }
            Due::PingReply(sent_at_us, path) => {
                header.path = path;
                header.offset = sent_at_us;
                out.put(self.liveness.position());
            }
            Due::Abort(record) => _ = out.put(&record),
            Due::AbortReply => {
                header.path = self.heard_on;
                out.put(&[0; gradwire_wire::ABORT_RECORD_BYTES]);
            }
            Due::Goodbye => {}
            Due::GoodbyeReply => header.path = self.heard_on,
        }
        let mut bytes = out.finish()?;
        if due == (Due::Hello { is_full: true }) {
            // A full-sized request: an answer proves that full datagrams pass. What seals it adds the tag.
            let full = (self.config.datagram_bytes - HEADER_BYTES - TAG_BYTES).min(scratch.len());
            scratch.get_mut(bytes..full)?.fill(0);
            bytes = full;
        }
        let is_trial = matches!(due, Due::Trial(_));
        Some(Transmit { is_trial, ..control(header, bytes) })
    }

    /// Takes the path that it is mostly about: the other direction of a path that works is likely to work, and the
    /// echo of its newest packet then gives the path's own round trip. What arrived on the other paths goes with it, so
    /// that a path whose way back is broken is not taken for dead.
    fn transmit_ack(
        &mut self,
        now: Timestamp,
        (about, lead): (usize, usize),
        scratch: &mut [u8],
    ) -> Option<Transmit> {
        let mut header = self.header(now, Kind::Ack, TransferId(0));
        header.path = self.paths.at(lead).id;
        if self.is_flooded {
            header.flags = Flags::FLOODED;
        }
        let mut ack =
            AckBody { echo_us: 0, delay_us: 0, received_bytes: self.stats.bytes_received, paths: 0 };
        if let Some((echo, asked)) = self.ack_requested.take() {
            header.flags = header.flags.with(Flags::REPLY);
            header.offset = echo;
            self.answers.on_answer(now, echo, lead);
            if asked != header.path {
                // What its acknowledgements said has not arrived.
                self.paths.at_mut(usize::from(asked.0)).arrivals.say_again();
            }
        }
        let datagram_bytes = self.config.datagram_bytes;
        let news = self.paths.at_mut(lead).arrivals.acknowledge(now);
        let lead_words = news.as_ref().map(|(echo_us, delay_us, path)| {
            (ack.echo_us, ack.delay_us) = (*echo_us, *delay_us);
            path.words
        });
        let room = datagram_bytes.saturating_sub(
            HEADER_BYTES + ACK_BODY_BYTES + TAG_BYTES + lead_words.map_or(0, crate::paths::ack_path_bytes),
        );
        let others = self.paths.others_to_acknowledge(about, lead, room);
        let late =
            self.paths.at(lead).arrivals.late_to_acknowledge(room, header.flags.contains(Flags::REPLY));
        // A probe is answered even if nothing ever arrived: then all that was sent before it is lost.
        ack.paths = u8::from(news.is_some()) + others.len() + late.len();
        let mut out = Writer::new(scratch);
        ack.encode(&mut out);
        if let Some((_, _, path)) = news {
            path.encode(&mut out);
        }
        for path in self.paths.describe(others, about) {
            path.encode(&mut out);
        }
        for entry in self.paths.at(lead).arrivals.describe_late(late) {
            entry.encode(&mut out);
        }
        self.paths.at_mut(lead).arrivals.on_late_acknowledged(late);
        let may_follow = self.paths.len() == 1 && self.paths.at(0).controller.pacing_rate() >= FOLLOWS_FROM;
        Some(Transmit { may_follow, ..control(header, out.finish()?) })
    }

    fn transmit_status(
        &mut self,
        now: Timestamp,
        transfer: TransferId,
        (first_chunk, echo_us): (u32, u32),
        scratch: &mut [u8],
    ) -> Option<Transmit> {
        let posted = self.receives.iter().find(|half| half.request.transfer == transfer);
        // Of what is not remembered nothing says how often it was told: it goes back the way the question came.
        let (mut status, turn) = match posted {
            Some(half) => (half.status(first_chunk), Some(half.status_backoff)),
            None => match self.closed.find(transfer) {
                Some(closed) => (closed.status(first_chunk), Some(closed.repeated)),
                None if self.closed.is_retired(transfer) => {
                    (bare_status(TransferState::Closed, ALL_CHUNKS), None)
                }
                None => (bare_status(TransferState::Unposted, 0), None),
            },
        };
        status.echo_us = echo_us;
        status.words = status.words.min(self.config.status_words_max());
        let mut out = Writer::new(scratch);
        status.encode(&mut out);
        let mut header = self.header(now, Kind::Status, transfer);
        header.path = match (self.detour(now), turn) {
            (Some(path), None | Some(0)) => self.paths.at(path).id,
            (_, Some(turn)) => self.paths.control(turn),
            (None, None) => self.heard_on,
        };
        if self.is_flooded {
            header.flags = Flags::FLOODED;
        }
        Some(control(header, out.finish()?))
    }

    fn transmit_probe(
        &mut self,
        now: Timestamp,
        Question { transfer, first_chunk, turn, settles }: Question,
        scratch: &mut [u8],
    ) -> Option<Transmit> {
        let send = self.sends.iter().find(|send| send.request.transfer == transfer)?;
        let mut header = self.control(now, Kind::Probe, transfer, turn);
        header.offset = first_chunk;
        if send.is_all_sent() {
            header.flags = Flags::ALL_SENT;
        }
        if settles {
            header.flags = header.flags.with(Flags::ACK_NOW);
        }
        let mut out = Writer::new(scratch);
        send.opening(now).encode(&mut out);
        // Behind the transfer's own data where classes have queues of their own: what it overtook would count as lost.
        let class = send.request.tags.class;
        let mark = Mark { class: TrafficClass::Data(class), ..Mark::CONTROL };
        if settles {
            let next = self.paths.at(usize::from(header.path.0)).ledger.next_number();
            let queue = self.config.queue_of(class);
            header.weight = self.answers.on_asked(now, self.probe_timeout());
            let (stamp, path) = (header.sent_at_us, header.path);
            self.note_probe(Probe { stamp, sent_at: now, path, next, queue });
        }
        Some(Transmit { mark, ..control(header, out.finish()?) })
    }

    fn poll_data(&mut self, now: Timestamp) -> Option<Transmit> {
        if let Some(copy) = self.poll_copy(now) {
            return Some(copy);
        }
        let Some(choice) = self.choose() else {
            self.paths.on_starved();
            return None;
        };
        let avoid = if choice.again { self.sends[choice.send].sent_over(choice.chunk) } else { None };
        let path = self.paths.choose(now, avoid)?;
        self.run = self.run_after(now, &choice);
        Some(self.transmit_data(now, choice, path))
    }

    /// Whether more like it follows: new data of a granted transfer, on the only path. Behind what is critical comes the short end of the
    /// transfer, or what is longer than that.
    fn run_after(&self, now: Timestamp, choice: &Choice) -> Option<Run> {
        let send = &self.sends[choice.send];
        let goes_in_turn = !choice.again && send.granted && !send.is_critical(choice.chunk);
        let follows = goes_in_turn && self.paths.len() == 1;
        follows.then_some(Run { at: now, send: choice.send })
    }

    /// The next packet of a run, `None` where it is over: then all is asked again.
    fn poll_run(&mut self, now: Timestamp) -> Option<Transmit> {
        let send = self.run.filter(|run| run.at == now)?.send;
        if !self.probe_due.is_empty() || !self.paths.at(0).may_send_on(now) {
            return None;
        }
        let choice = Choice { send, chunk: self.sends[send].peek_new()?, again: false };
        debug_assert!(self.is_next(now, choice), "{choice:?} is not what would be chosen");
        Some(self.transmit_data(now, choice, 0))
    }

    /// Whether the whole way would come to the same.
    pub(super) fn is_next(&self, now: Timestamp, choice: Choice) -> bool {
        let has_control = self.ack_requested.is_some()
            || self.paths.ack_due(now).is_some()
            || !self.status_due.is_empty()
            || self.liveness.due_at().is_some_and(|at| at <= now);
        self.liveness.is_open() && !has_control && self.choose() == Some(choice)
    }

    /// Whether it is to be polled before its timer: copies of the latest packet come due without one, and a pacer counts the
    /// time since it was last asked at the rate of now.
    #[must_use]
    pub fn wants_polls(&self) -> bool {
        self.paths.len() > 1 && self.latest_sent.is_some()
            || self.has_data() && self.paths.sends_at().is_some()
    }

    /// A copy of the latest packet, over a path that may have healed.
    fn poll_copy(&mut self, now: Timestamp) -> Option<Transmit> {
        let (transfer, chunk) = self.latest_sent?;
        let index = self.paths.copy_due(now)?;
        let send = self.sends.iter().find(|send| send.request.transfer == transfer)?;
        let (bytes, offset, class) = (send.grid.len(chunk), send.grid.offset(chunk), send.request.tags.class);
        let opening = send.needs_opening(chunk).then(|| send.opening(now));
        let mut header = self.header(now, Kind::Data, transfer);
        header.flags = Flags::RETRANSMITTED.with(Flags::ACK_NOW);
        if opening.is_some() {
            header.flags = header.flags.with(Flags::OPENING);
        }
        let path = self.paths.at(index);
        (header.path, header.packet_number) = (path.id, path.ledger.next_number());
        header.weight = 1;
        header.offset = offset as u32;
        let number = header.packet_number;
        // Its fate outlives the transfer, whose packets are forgotten when it is over.
        let packet = SentPacket { number, transfer: COPY_TRANSFER, chunk: COPY, bytes, sent_at: now };
        self.paths.on_sent(now, index, packet, self.config.queue_of(class));
        // What it carries is on its way already.
        let mark = Mark { class: TrafficClass::Data(class), ecn_capable: false };
        Some(Transmit {
            header,
            mark,
            is_trial: false,
            may_follow: false,
            opening,
            body: Body::Payload { offset, bytes: bytes as usize },
        })
    }

    /// Whether there is data that only the window or the pacer holds back.
    pub(super) fn has_data(&self) -> bool {
        self.liveness.is_open() && self.choose().is_some()
    }

    /// The packet that goes next.
    // claim: ltp/three-queues
    fn choose(&self) -> Option<Choice> {
        let eager_left = self.config.eager_chunks().saturating_sub(self.eager_used);
        let critical = || {
            let mut sends = self.sends.iter().enumerate();
            sends.find_map(|(send, half)| {
                half.peek_lost_critical().map(|chunk| Choice { send, chunk, again: true })
            })
        };
        // A half lists only what it repairs: what a tolerant transfer may do without never goes again.
        let again = |deferred: bool| {
            let mut sends = self.sends.iter().enumerate().filter(move |(_, half)| half.defers() == deferred);
            sends.find_map(|(send, half)| half.peek_resend().map(|chunk| Choice { send, chunk, again: true }))
        };
        // Up to the eager window, data leaves before a word of the receiver.
        // claim: mlt/fast-start, dlcp/zero-rtt-start
        let new = || {
            let mut sends = self.sends.iter().enumerate();
            sends.find_map(|(index, send)| {
                let chunk = if send.granted || eager_left > 0 { send.peek_new() } else { None };
                chunk.map(|chunk| Choice { send: index, chunk, again: false })
            })
        };
        critical().or_else(|| again(false)).or_else(new).or_else(|| again(true))
    }

    fn transmit_data(&mut self, now: Timestamp, choice: Choice, path: usize) -> Transmit {
        let number = self.paths.at(path).ledger.next_number();
        let send = &mut self.sends[choice.send];
        send.on_sent(choice.chunk, path);
        send.note_waiting(now);
        let (grid, transfer, class) = (send.grid, send.request.transfer, send.request.tags.class);
        let bytes = grid.len(choice.chunk);
        let mut flags = Flags::NONE;
        if choice.again {
            flags = flags.with(Flags::RETRANSMITTED);
        }
        if send.is_all_sent() {
            flags = flags.with(Flags::ALL_SENT);
        }
        if self.paths.at_mut(path).wants_ack(bytes) {
            flags = flags.with(Flags::ACK_NOW);
        }
        if send.is_critical(choice.chunk) {
            flags = flags.with(Flags::CRITICAL);
        }
        if send.is_in_last_percent(choice.chunk) {
            flags = flags.with(Flags::LAST_PERCENTILE);
        }
        let opening = send.needs_opening(choice.chunk).then(|| send.opening(now));
        if opening.is_some() {
            flags = flags.with(Flags::OPENING);
        }
        if !send.granted {
            self.eager_used += u32::from(!choice.again);
        }
        if send.is_all_sent() && !send.end_announced {
            send.end_announced = true;
            if grid.chunks() >= ANNOUNCED_CHUNKS {
                // Right behind the last packet: the receiver then knows the end although the tail may be lost.
                self.queue_probe(transfer, 0);
            }
        }
        let packet = SentPacket { number, transfer, chunk: choice.chunk, bytes, sent_at: now };
        self.paths.on_sent(now, path, packet, self.config.queue_of(class));
        self.count_sent(&packet, 1);
        self.stats.packets_retransmitted += u64::from(choice.again);
        let mark = self.mark_data(choice.send, choice.chunk, (choice.again, 1), &mut flags);
        let offset = grid.offset(choice.chunk);
        let mut header = self.header(now, Kind::Data, transfer);
        header.flags = flags;
        header.weight = 1;
        header.path = self.paths.at(path).id;
        header.packet_number = number;
        header.offset = offset as u32;
        Transmit {
            header,
            mark,
            is_trial: false,
            may_follow: false,
            opening,
            body: Body::Payload { offset, bytes: bytes as usize },
        }
    }

    /// So many packets left, `first` and those with the chunks behind it.
    pub(super) fn count_sent(&mut self, first: &SentPacket, count: u32) {
        self.latest_sent = Some((first.transfer, first.chunk + count - 1));
        self.stats.packets_sent += u64::from(count);
        self.stats.bytes_sent += u64::from(count) * u64::from(first.bytes);
    }

    /// What the network is told about a data packet, and those behind it (`count` in all) that are like it: its class, and to mark rather
    /// than drop it if it is important or somebody waits for it. What must arrive, or was asked for (`again`), would only have to come again.
    // claim: mlt/gradient-aware-queueing
    pub(super) fn mark_data(
        &mut self,
        send: usize,
        chunk: u32,
        (again, count): (bool, u32),
        flags: &mut Flags,
    ) -> Mark {
        let request = &self.sends[send].request;
        let is_important = request.tags.is_important(chunk);
        if is_important {
            *flags = flags.with(Flags::IMPORTANT);
        }
        let is_awaited = again || request.reliability == Reliability::Exact;
        // What nobody has told apart is no less important than what was.
        let is_kept = is_important || is_awaited || request.tags.important.is_none();
        let class = request.tags.class;
        self.stats.tags.on_sent(class, is_important, count);
        Mark { class: TrafficClass::Data(class), ecn_capable: is_kept }
    }
}

/// A control packet whose body of `bytes` is in the caller's scratch.
const fn control(header: Header, bytes: usize) -> Transmit {
    Transmit {
        header,
        mark: Mark::CONTROL,
        is_trial: false,
        may_follow: false,
        opening: None,
        body: Body::Control { bytes },
    }
}

/// At this rate, bytes per second, a message of 64 KB takes the 250 us for which an acknowledgement may be held back by default.
const FOLLOWS_FROM: u64 = 250_000_000;

/// Bytes of the fixed part of an acknowledgement.
const ACK_BODY_BYTES: usize = 17;

/// A status without a bitmap.
fn bare_status(state: TransferState, received_chunks: u32) -> StatusBody {
    let missing = [0; STATUS_WORDS_MAX];
    StatusBody {
        state,
        received_chunks,
        wanted_chunks: 0,
        first_chunk: 0,
        echo_us: 0,
        stage_us: 0,
        words: 0,
        missing,
    }
}
