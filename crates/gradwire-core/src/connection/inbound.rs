//! The way in: from a datagram to payload, acknowledgement, status or farewell.

use super::hellos::Shown;
use super::liveness::Heard;
use super::parting::STAMP;
use super::{Connection, PREGRANTS_MAX};
use crate::arrivals::Arrival;
use crate::path::{Echo, Trip};
use crate::transfer::{called_at, EarlyBuffer, StatusEffect, Stored, ALL_CHUNKS};
use crate::{DropReason, Event, Payload, ReceivedMark, Timestamp};
use core::time::Duration;
use gradwire_wire::{
    AckBody, AckPath, Flags, Header, HelloBody, Kind, Opening, PathId, Reader, StatusBody, TransferId,
    TransferState,
};

/// Late data is answered at most this often for each transfer.
const LATE_ANSWER_PAUSE: Duration = Duration::from_micros(200);

/// What the network has held for less is not looked at: clocks drift, in the worst case by a twelfth while they are set. Numbers of collectives
/// come round after more than six seconds at ten thousand calls a second.
const HELD_MIN: Duration = Duration::from_secs(2);

impl Connection {
    /// Takes one datagram. Returns new payload, if it holds any, for the caller to place.
    ///
    /// # Errors
    /// [`DropReason`]: no payload was taken from the datagram; that its sender lives, what it says of its path, and that it
    /// wants an answer may count all the same.
    pub fn handle_datagram<'d>(
        &mut self,
        now: Timestamp,
        datagram: &'d [u8],
    ) -> Result<Option<Payload<'d>>, DropReason> {
        self.handle_marked_datagram(now, datagram, ReceivedMark::default())
    }

    /// As [`Connection::handle_datagram`], for one whose class and ECN field are known. They are only counted: the rate
    /// follows delivery, and gradients that a switch has spared are no sign to slow down.
    ///
    /// # Errors
    /// [`DropReason`]: no payload was taken from the datagram; that its sender lives, what it says of its path, and that it
    /// wants an answer may count all the same.
    pub fn handle_marked_datagram<'d>(
        &mut self,
        now: Timestamp,
        datagram: &'d [u8],
        mark: ReceivedMark,
    ) -> Result<Option<Payload<'d>>, DropReason> {
        self.run = None;
        let result = self.dispatch(now, datagram, mark);
        match result {
            Err(DropReason::Duplicate) => self.stats.packets_duplicate += 1,
            Err(_) => self.stats.packets_dropped += 1,
            Ok(_) => {}
        }
        result
    }

    fn dispatch<'d>(
        &mut self,
        now: Timestamp,
        datagram: &'d [u8],
        mark: ReceivedMark,
    ) -> Result<Option<Payload<'d>>, DropReason> {
        let (header, body) = Header::decode(datagram)?;
        if header.connection != self.config.local {
            return Err(DropReason::WrongConnection);
        }
        if !self.paths.contains(header.path) {
            return Err(DropReason::Implausible);
        }
        self.heard_on = header.path;
        self.paths.on_heard(header.path);
        self.transit.on_packet(now, header.sent_at_us);
        let mut reader = Reader::new(body);
        if self.liveness.is_aborting() && !matches!(header.kind, Kind::Abort | Kind::Goodbye) {
            self.on_heard(now);
            self.repeat_abort(now);
            return Err(DropReason::Closed);
        }
        match header.kind {
            Kind::Data => {
                self.stats.tags.on_received(mark, header.flags.contains(Flags::IMPORTANT), 1);
                return self.on_data(now, &header, body);
            }
            Kind::Ack => self.on_ack(now, &header, &mut reader)?,
            Kind::Status => self.on_status(now, &header, &mut reader)?,
            Kind::Probe => self.on_probe(now, &header, &mut reader)?,
            Kind::Hello => self.on_hello(now, &header, &mut reader)?,
            Kind::Ping => {
                let record = reader.array()?;
                if header.flags.contains(Flags::REPLY) {
                    self.sample_answer(now, &header);
                    self.trials.on_answer(header.path, header.offset);
                    self.on_ping_reply(now, header.offset, record);
                } else {
                    self.on_ping(header.sent_at_us, header.path, record);
                }
            }
            Kind::Goodbye => self.on_goodbye(now, header.flags.contains(Flags::REPLY)),
            Kind::Abort => self.on_abort(header.flags.contains(Flags::REPLY), reader.array()?),
            // The engine takes those out before.
            Kind::Members => return Err(DropReason::Implausible),
        }
        if matches!(header.kind, Kind::Ack | Kind::Status) {
            self.on_flooded(header.flags.contains(Flags::FLOODED));
        }
        self.on_heard(now);
        Ok(None)
    }

    fn on_hello(
        &mut self,
        now: Timestamp,
        header: &Header,
        reader: &mut Reader<'_>,
    ) -> Result<(), DropReason> {
        let hello = HelloBody::decode(reader)?;
        if hello.word != self.config.hello.expects {
            if self.liveness.is_first_mismatch() {
                self.events.push_back(Event::HelloMismatch { theirs: hello.word });
            }
            return Err(DropReason::WrongConnection);
        }
        if header.flags.contains(Flags::REPLY) {
            let shown = self.liveness.hellos.on_answer(now, hello.echo_us).ok_or(DropReason::Implausible)?;
            // The round trip of a small one would make those of full datagrams look late. What comes once the ranks are connected may be a
            // copy that took a slow way, or was held: how long a round trip is, data and heartbeats tell.
            if shown == Shown::FullPasses && !self.is_connected() {
                let path = self.paths.get_mut(header.path);
                let rtt = path.and_then(|path| path.sample_rtt(now, hello.echo_us));
                let rtt = rtt.ok_or(DropReason::Implausible)?;
                self.on_connected(now, rtt, header.path);
            }
        } else {
            let Header { sent_at_us, path, offset: address, .. } = *header;
            self.liveness.on_hello(Heard { sent_at_us, path, address });
        }
        Ok(())
    }

    fn on_data<'d>(
        &mut self,
        now: Timestamp,
        header: &Header,
        body: &'d [u8],
    ) -> Result<Option<Payload<'d>>, DropReason> {
        let mut reader = Reader::new(body);
        let opening = match header.flags.contains(Flags::OPENING) {
            true => Some(Opening::decode(&mut reader)?),
            false => None,
        };
        let payload = reader.rest();
        let path = self.paths.get_mut(header.path).ok_or(DropReason::Implausible)?;
        match path.arrivals.check(header.packet_number) {
            Arrival::Duplicate => {
                path.arrivals.on_duplicate(now);
                return Err(DropReason::Duplicate);
            }
            Arrival::Implausible if !path.arrivals.has_come_so_far(header.packet_number) => {
                return Err(DropReason::Implausible);
            }
            Arrival::New | Arrival::Implausible => path.arrivals.count(header.packet_number),
        }
        self.on_heard(now);
        let transfer = header.transfer;
        if let Some(index) = self.receives.iter().position(|half| half.request.transfer == transfer) {
            return self.on_expected(now, header, index, opening, payload);
        }
        if self.answer_if_over(now, transfer) {
            self.record(now, header);
            return Err(DropReason::Late);
        }
        if self.closed.is_beyond(transfer) {
            return Err(DropReason::Implausible);
        }
        self.on_early(now, header, opening.ok_or(DropReason::Implausible)?, payload)
    }

    /// A data packet is in, whatever becomes of it: its sender must know.
    fn record(&mut self, now: Timestamp, header: &Header) {
        let Some(path) = self.paths.get_mut(header.path) else { return };
        path.arrivals.record(now, header.packet_number, header.sent_at_us);
        if !header.flags.contains(Flags::RETRANSMITTED) {
            path.arrivals.on_first_pass(now, header.sent_at_us);
        }
        if header.flags.contains(Flags::ACK_NOW) {
            path.arrivals.on_asked();
        }
    }

    /// A round-trip sample of the path on which the answer to a ping came: answers take the path of what they answer.
    fn sample_answer(&mut self, now: Timestamp, header: &Header) {
        let Some(path) = self.paths.get_mut(header.path) else { return };
        if path.is_news(now, header.offset) {
            path.sample_rtt(now, header.offset);
        }
    }

    /// Data of a posted receive: used where its offset says, whatever came before it.
    // claim: mlt/order-free
    fn on_expected<'d>(
        &mut self,
        now: Timestamp,
        header: &Header,
        index: usize,
        opening: Option<Opening>,
        payload: &'d [u8],
    ) -> Result<Option<Payload<'d>>, DropReason> {
        let transfer = header.transfer;
        if let Some(theirs) = opening {
            self.check_opening(now, index, theirs)?;
        }
        let grid = self.receives[index].grid;
        let place = grid.chunk_at(u64::from(header.offset), payload.len()).ok_or(DropReason::Grid)?;
        if !self.receives[index].request.may_weigh(header.weight) {
            return Err(DropReason::Implausible);
        }
        self.record(now, header);
        let half = &mut self.receives[index];
        if half.missing.contains(place) && !header.flags.contains(Flags::RETRANSMITTED) {
            half.on_arrival(now, place);
        }
        if opening.is_none() {
            half.grant_seen = true;
        }
        // Its sender has had a word about this transfer, which left after it was posted.
        let answered = opening.is_none().then_some(half.posted_at);
        if header.flags.contains(Flags::LAST_PERCENTILE) {
            half.on_last_percentile();
        }
        if header.flags.contains(Flags::ALL_SENT) {
            half.on_all_sent(now);
        }
        let is_new = half.accept(now, place);
        if is_new {
            self.peer_sent_at = now;
        }
        if let Some(posted_at) = answered {
            self.on_reached(posted_at);
        }
        let half = &self.receives[index];
        if is_new && half.is_first_pass_over() {
            self.put_question_off(now, index);
        }
        let half = &self.receives[index];
        // The sender may be blocked: it has not seen the grant, and this was not everything.
        let blocked = opening.is_some() && !half.grant_seen && !half.missing.is_empty();
        if blocked && half.request.bytes > self.config.eager_bytes / 2 {
            self.queue_status(transfer, 0, 0);
        }
        self.close_if_satisfied(now, index);
        if !is_new {
            return Err(DropReason::Duplicate);
        }
        self.stats.packets_received += 1;
        self.stats.bytes_received += payload.len() as u64;
        let offset = u64::from(header.offset);
        Ok(Some(Payload { transfer, offset, weight: header.weight, bytes: payload }))
    }

    /// What was asked for is coming: no need to ask again yet.
    pub(super) fn put_question_off(&mut self, now: Timestamp, index: usize) {
        let pause = self.probe_timeout();
        let half = &mut self.receives[index];
        (half.status_at, half.status_backoff) = (Some(now + pause), 0);
    }

    /// Notes when the sender had called. Reports once that the two ends disagree; the packet is then useless.
    fn check_opening(&mut self, now: Timestamp, index: usize, theirs: Opening) -> Result<(), DropReason> {
        let half = &mut self.receives[index];
        let ours = half.opening();
        if ours.agrees(&theirs) {
            half.on_called(called_at(now, self.transit.queued(), &theirs));
            return Ok(());
        }
        if !core::mem::replace(&mut half.mismatch_reported, true) {
            let transfer = half.request.transfer;
            self.events.push_back(Event::Mismatch { transfer, ours, theirs });
        }
        Err(DropReason::Grid)
    }

    /// Data of a transfer that is not posted yet.
    fn on_early<'d>(
        &mut self,
        now: Timestamp,
        header: &Header,
        opening: Opening,
        payload: &[u8],
    ) -> Result<Option<Payload<'d>>, DropReason> {
        let grid = crate::transfer::Grid::new(opening.total_bytes, self.config.chunk_bytes());
        let offset = u64::from(header.offset);
        grid.chunk_at(offset, payload.len()).ok_or(DropReason::Grid)?;
        let mut chunk = EarlyBuffer::chunk(offset, header.weight, payload.len());
        chunk.last_percentile = header.flags.contains(Flags::LAST_PERCENTILE);
        chunk.all_sent = header.flags.contains(Flags::ALL_SENT);
        let transfer = header.transfer;
        let called_at = called_at(now, self.transit.queued(), &opening);
        match self.early.store(called_at, (transfer, opening), chunk, payload) {
            Stored::First => self.events.push_back(Event::Offered { transfer, opening }),
            Stored::Kept => {}
            Stored::Duplicate => {
                self.record(now, header);
                return Err(DropReason::Duplicate);
            }
            Stored::Full => return Err(DropReason::EarlyFull),
        }
        self.peer_sent_at = now;
        self.record(now, header);
        Ok(None)
    }

    /// Whether the transfer is over here; if so its end is repeated to the sender, who seems not to know it.
    fn answer_if_over(&mut self, now: Timestamp, transfer: TransferId) -> bool {
        if let Some(closed) = self.closed.find_mut(transfer) {
            if now.since(closed.answered_at) >= LATE_ANSWER_PAUSE {
                closed.answered_at = now;
                self.queue_status(transfer, 0, 0);
            }
            return true;
        }
        if self.closed.is_retired(transfer) {
            self.queue_status(transfer, 0, 0);
            return true;
        }
        false
    }

    fn on_ack(&mut self, now: Timestamp, header: &Header, reader: &mut Reader<'_>) -> Result<(), DropReason> {
        let ack = AckBody::decode(reader)?;
        let newest = (ack.echo_us, ack.delay_us);
        // The echo of a probe is fresher than that of the last data packet, and not held back.
        let is_reply = header.flags.contains(Flags::REPLY);
        let elsewhere = self.asked_elsewhere(header.offset, header.path).filter(|_| is_reply);
        let answers = is_reply && elsewhere.is_none() && !self.was_held_up(header.offset);
        let answering = self.paths.get_mut(header.path).filter(|_| answers);
        let mut trip = answering.and_then(|path| {
            let echo = path.is_news(now, header.offset).then_some(Echo::Question(header.offset))?;
            path.sample_trip(now, echo, header.sent_at_us, newest)
        });
        let (mut is_first, answers) = (true, trip.is_some());
        let (mut plausible, mut whole) = (true, Ok(()));
        for _ in 0..ack.paths {
            match AckPath::decode(reader) {
                Ok(entry) if entry.path == header.path => {
                    // The first entry of its path has the packet that the echo is of.
                    let path = self.paths.get_mut(entry.path).filter(|_| core::mem::take(&mut is_first));
                    match path {
                        Some(path) if answers => _ = path.names_anew(entry.largest),
                        Some(path) => {
                            trip =
                                path.sample_trip(now, Echo::Packet(entry.largest), header.sent_at_us, newest);
                        }
                        None => {}
                    }
                    plausible &= self.on_ack_path(now, &entry, trip);
                    trip = trip.map(Trip::of_further_entries);
                }
                Ok(entry) => plausible &= self.on_ack_path(now, &entry, None),
                Err(error) => {
                    whole = Err(error);
                    break;
                }
            }
        }
        if self.config.has_class_queues() {
            self.lose_overtaken(now);
        }
        whole?;
        if is_reply {
            self.answers.on_answered();
            self.settle_probe(now, header.offset, elsewhere.unwrap_or(header.path));
        }
        if plausible {
            Ok(())
        } else {
            Err(DropReason::Implausible)
        }
    }

    /// Of several queues of the only path. What comes out of one of them may be named in an entry behind that of a less urgent one.
    fn lose_overtaken(&mut self, now: Timestamp) {
        let mut outcome = core::mem::take(&mut self.outcome);
        self.paths.at_mut(0).lose_overtaken(now, &mut outcome);
        if outcome.brings_news() {
            self.note_progress(now);
        }
        self.outcome = outcome;
        self.apply_outcome(now, 0);
    }

    /// One entry of an acknowledgement; `false` when it names what was never sent.
    fn on_ack_path(&mut self, now: Timestamp, ack: &AckPath, trip: Option<Trip>) -> bool {
        let Some(path) = self.paths.get_mut(ack.path) else { return false };
        let mut outcome = core::mem::take(&mut self.outcome);
        let plausible = path.on_ack(now, ack, trip, &mut outcome);
        // claim: auto/repaired-in-round-trips
        if outcome.brings_news() {
            self.note_progress(now);
        }
        if let Some(newest) = outcome.acked.last() {
            self.on_reached(newest.sent_at);
        }
        self.outcome = outcome;
        self.apply_outcome(now, usize::from(ack.path.0));
        plausible
    }

    /// The answer to a probe lists all that had arrived: what was sent before it and is not listed is lost. On
    /// other paths than its own only what was sent a probe timeout before, and where nothing comes back: they may be slower.
    /// But they may also be so bad that no question goes over them, and what they lost would never be known.
    ///
    /// Of any probe: where a queue is longer than the pause between two of them, each answer finds that a later one was asked. Only of
    /// the latest one is it known what was sent in the same microsecond, so an earlier one settles what was sent before that.
    fn settle_probe(&mut self, now: Timestamp, stamp: u32, by: PathId) {
        let Some(asked_at) = now.of_wire_us(stamp) else { return };
        if self.paths.get_mut(by).is_none() {
            return;
        }
        let asked = self.take_asked((stamp, by), asked_at);
        let patience = self.probe_timeout();
        for index in 0..self.paths.len() {
            let is_asked = index == usize::from(by.0);
            let mut outcome = core::mem::take(&mut self.outcome);
            if is_asked {
                self.paths.at_mut(index).on_answer(now, asked, &mut outcome);
            } else {
                self.paths.lose_silent(now, index, (asked.at, patience), &mut outcome);
            }
            let changed = is_asked || !outcome.lost.is_empty();
            if outcome.brings_news() {
                self.note_progress(now);
            }
            self.outcome = outcome;
            if is_asked {
                self.paths.on_answer(asked.at);
            }
            if changed {
                self.apply_outcome(now, index);
            }
        }
    }

    fn on_status(
        &mut self,
        now: Timestamp,
        header: &Header,
        reader: &mut Reader<'_>,
    ) -> Result<(), DropReason> {
        let status = StatusBody::decode(reader)?;
        let transfer = header.transfer;
        let Some(index) = self.sends.iter().position(|send| send.request.transfer == transfer) else {
            return self.remember_grant(transfer, status.state);
        };
        if status.state == TransferState::Unposted && self.answers_parting(now, status.echo_us) {
            let receipt = self.sends[index].untaken();
            self.conclude(index, receipt);
            self.finish_parting();
            return Ok(());
        }
        if status.state == TransferState::Closed && self.is_of_another(now, index, status.echo_us) {
            return Err(DropReason::Implausible);
        }
        let send = &mut self.sends[index];
        let (was_granted, posted_at) = (send.granted, send.posted_at);
        let is_news = send.is_unheard_of();
        let effect = send.on_status(&status);
        if effect != StatusEffect::Implausible {
            send.on_told(now, status.state, &effect);
            // Asked about for the first time, and not in vain: the next ones follow an answer's time after the latest questions.
            self.probe_backoff = if is_news { 0 } else { self.probe_backoff };
        }
        // The end of a short transfer comes before an acknowledgement, which then names what nobody remembers.
        let came = status.received_chunks > 0 && status.received_chunks != ALL_CHUNKS;
        if came && effect != StatusEffect::Implausible {
            self.on_reached(posted_at);
            if status.state == TransferState::Closed {
                let arrived = self.sends[index].least_of(status.received_chunks);
                self.paths.at_mut(0).on_said_to_arrive(arrived);
            }
        }
        match effect {
            StatusEffect::Nothing => {}
            StatusEffect::Progress => {
                let send = &self.sends[index];
                if !was_granted {
                    self.eager_used -= send.first_pass_chunks();
                }
                if send.is_all_sent() && send.peek_resend().is_some() {
                    self.paths.on_repair();
                }
                self.note_progress(now);
            }
            StatusEffect::AskFrom(chunk) => {
                self.note_progress(now);
                self.queue_probe(transfer, chunk);
            }
            StatusEffect::Done(receipt) => {
                self.note_progress(now);
                self.conclude(index, receipt);
                self.finish_parting();
            }
            StatusEffect::Implausible => return Err(DropReason::Implausible),
        }
        Ok(())
    }

    /// Whether the end that the latest packet tells left long before the send at `index` was posted: it is that of an old transfer with the
    /// same number. The answer to a question is about what was asked, whatever the clocks of the two ranks have done.
    fn is_of_another(&self, now: Timestamp, index: usize, echo_us: u32) -> bool {
        let posted_at = self.sends[index].posted_at;
        let is_held = self.transit.queued() > now.since(posted_at) + HELD_MIN;
        is_held
            && (echo_us == 0 || now.of_wire_us(echo_us).is_none_or(|asked_at| asked_at + STAMP < posted_at))
    }

    /// A grant may overtake the posting of its send.
    fn remember_grant(&mut self, transfer: TransferId, state: TransferState) -> Result<(), DropReason> {
        if self.closed.is_beyond(transfer) {
            return Err(DropReason::Implausible);
        }
        if state != TransferState::Open || self.pregrants.contains(&transfer) {
            return Ok(());
        }
        if self.pregrants.len() == PREGRANTS_MAX {
            self.pregrants.pop_front();
        }
        self.pregrants.push_back(transfer);
        Ok(())
    }

    /// The sender asks: it is told what the transfer misses, and, if it wants to know, what has arrived on the path.
    // claim: mlt/probe
    fn on_probe(
        &mut self,
        now: Timestamp,
        header: &Header,
        reader: &mut Reader<'_>,
    ) -> Result<(), DropReason> {
        let theirs = Opening::decode(reader)?;
        let transfer = header.transfer;
        if self.closed.is_beyond(transfer) {
            return Err(DropReason::Implausible);
        }
        if let Some(index) = self.receives.iter().position(|half| half.request.transfer == transfer) {
            self.check_opening(now, index, theirs)?;
            if header.flags.contains(Flags::ALL_SENT) {
                self.receives[index].on_all_sent(now);
            }
            self.close_if_satisfied(now, index);
        } else if self.closed.find(transfer).is_none()
            && !self.closed.is_retired(transfer)
            && self.early.announce(called_at(now, self.transit.queued(), &theirs), transfer, theirs)
        {
            self.events.push_back(Event::Offered { transfer, opening: theirs });
        }
        let patience = self.probe_timeout();
        if let Some(closed) = self.closed.find_mut(transfer) {
            // The sender asks although it was told long ago: that was lost.
            closed.repeated += u32::from(now.since(closed.answered_at) > patience);
        }
        if self.liveness.is_open() && header.flags.contains(Flags::ACK_NOW) {
            // An answer that waited until this rank is connected would look like a round trip that took as long.
            self.ack_requested = Some((header.sent_at_us, header.path));
            self.on_missed_answers(now, header, patience);
        }
        self.queue_status(transfer, header.offset / 64 * 64, header.sent_at_us);
        Ok(())
    }

    /// A question says since when there was no answer.
    fn on_missed_answers(&mut self, now: Timestamp, header: &Header, patience: Duration) {
        let paths = self.paths.len();
        if paths > 1 && self.answers.on_question(now, (header.sent_at_us, header.weight), 2 * patience) {
            let order = (0..paths as u32).map(|turn| usize::from(self.paths.control(turn).0));
            // One that is only good has two turns.
            self.answers.take_another(now, order.chain(0..paths));
            self.paths.say_again();
        }
    }
}
