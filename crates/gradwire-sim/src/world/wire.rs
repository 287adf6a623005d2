//! What happens to a datagram between two ranks, and what the checkers read from it on the way.

use super::{Event, World};
use crate::oracle;
use crate::plan::{Fault, OpKind, OpPlan};
use crate::rank::{Outgoing, Packet};
use crate::record::{Arrival, Provenance};
use crate::trace::Step;
use crate::watch::Unsteady;
use crate::{stray, Port, Violation};
use gradwire_collectives::{Algorithm, DeadlineRule, Policy};
use gradwire_core::wire::{Flags, Header, Kind, Reader, StatusBody, TransferState};
use gradwire_core::{Reliability, Timestamp};
use std::time::Duration;

impl World {
    pub(super) fn on_at_port(&mut self, from: usize, to: usize, port: Port, packet: Packet) {
        let Some(at) = self.network.enqueue(self.now, port, packet.bytes.len()) else {
            self.trace.datagram(self.now, Step::Overflowed, from, to, &packet.bytes);
            self.note_loss(from, to, &packet.bytes);
            return self.outbox.spare.push(packet.bytes);
        };
        let event = match port {
            Port::Trunk(_) => Event::AtPort { from, to, port: Port::Host(to), packet },
            Port::Host(_) => Event::Received { from, to, packet },
        };
        self.queue.schedule(at, event);
    }

    pub(super) fn on_received(&mut self, from: usize, to: usize, packet: Packet) {
        if packet.corrupted {
            self.trace.datagram(self.now, Step::Corrupted, from, to, &packet.bytes);
            self.note_loss(from, to, &packet.bytes);
            return self.outbox.spare.push(packet.bytes);
        }
        self.trace.datagram(self.now, Step::Received, from, to, &packet.bytes);
        if self.ranks[to].is_running() {
            self.deliver(from, to, packet);
            self.drain(to);
            return;
        }
        let rank = &mut self.ranks[to];
        let room = rank.socket_bytes + packet.bytes.len() as u64 <= self.scenario.host.socket_bytes;
        if !rank.crashed && room {
            rank.socket_bytes += packet.bytes.len() as u64;
            rank.socket.push_back((from, packet));
        } else if let Ok((header, _)) = Header::decode(&packet.bytes) {
            self.repair_watch.on_lost(self.now, (from, to), &header);
        }
    }

    pub(super) fn deliver(&mut self, from: usize, to: usize, mut packet: Packet) {
        self.saboteur.on_delivery(&mut packet);
        let rank = &self.ranks[to];
        // Until it is connected a rank may close a transfer but cannot say so.
        let waits_in = |op: usize| {
            let has_begun = rank.runs[op].is_some() && rank.has_begun(op);
            rank.connected && has_begun && !rank.warms_up_before(&self.scenario.ops, op)
        };
        if let Some(provenance) = &packet.provenance {
            let arrival = if waits_in(provenance.op) { Arrival::Open } else { Arrival::Early };
            self.record.on_arrived(from, to, provenance, arrival);
        }
        // What a stranger's datagram claims has not arrived.
        if packet.genuine {
            let has_begun = |op: usize| waits_in(op) && !rank.warms_up_before(&self.scenario.ops, op);
            self.path_watch.on_delivered(self.now, packet.sent_at, (from, to));
            if let Ok((header, _)) = Header::decode(&packet.bytes) {
                self.repair_watch.on_delivered(self.now, packet.sent_at, (from, to), &header);
            }
            self.watch.on_delivered(self.now, packet.sent_at, (from, to), &packet.bytes, has_begun);
        }
        let local = self.local(to);
        self.ranks[to].group.handle_datagram(local, from as u32, &packet.bytes);
        self.outbox.spare.push(packet.bytes);
    }

    pub(super) fn transmit(&mut self, rank: usize) {
        self.outbox.room_bytes = self.room_bytes(rank);
        self.outbox.was_full = self.outbox.room_bytes == 0;
        let local = self.local(rank);
        self.ranks[rank].group.poll_transmit(local, &mut self.outbox);
        if self.outbox.was_full {
            self.wait_for_room(rank);
        }
        let mut datagrams = std::mem::take(&mut self.outbox.datagrams);
        for outgoing in datagrams.drain(..) {
            self.send(rank, outgoing);
        }
        self.outbox.datagrams = datagrams;
    }

    fn room_bytes(&self, rank: usize) -> u64 {
        let Some(limit) = self.scenario.host.nic_bytes else { return u64::MAX };
        let rate = self.scenario.network.link(rank).up_rate;
        let backlog = self.network.time_until_backlog(self.now, rank, 0).as_nanos() * u128::from(rate);
        limit.saturating_sub((backlog / 1_000_000_000) as u64)
    }

    fn wait_for_room(&mut self, rank: usize) {
        let half = self.scenario.host.nic_bytes.unwrap_or(u64::MAX) / 2;
        if !std::mem::replace(&mut self.ranks[rank].waits_for_room, true) {
            let wait = self.network.time_until_backlog(self.now, rank, half).max(Duration::from_micros(1));
            self.queue.schedule(self.now + wait, Event::Room { rank });
        }
    }

    fn send(&mut self, from: usize, outgoing: Outgoing) {
        let Outgoing { to, bytes, payload, payload_bytes } = outgoing;
        self.trace.datagram(self.now, Step::Sent, from, to, &bytes);
        self.check_hush(from, &bytes);
        if self.saboteur.delays(self.now, &bytes) {
            return self.outbox.spare.push(bytes);
        }
        let provenance = self.inspect(from, to, &bytes, payload, payload_bytes);
        if self.saboteur.swallows(from, &bytes) {
            return self.outbox.spare.push(bytes);
        }
        let flight = self.network.transmit_on(path_of(&bytes), self.now, (from, to), bytes.len());
        let Some(at) = flight.arrives_at else {
            self.trace.datagram(self.now, Step::Lost, from, to, &bytes);
            self.note_loss(from, to, &bytes);
            return self.outbox.spare.push(bytes);
        };
        let port = self.network.first_port(from, to);
        if flight.stray {
            let bytes = stray::datagram(&mut self.rng, &bytes);
            let (provenance, corrupted, genuine) = (None, false, false);
            let packet = Packet { bytes, provenance, corrupted, genuine, sent_at: self.now };
            self.queue.schedule(at, Event::AtPort { from, to, port, packet });
        }
        let (corrupted, genuine) = (flight.corrupted, !flight.forged);
        let mut packet = Packet { bytes, provenance, corrupted, genuine, sent_at: self.now };
        if flight.forged {
            stray::flip_bits(&mut self.rng, &mut packet.bytes);
        }
        if let Some(again) = flight.duplicate_at {
            self.queue.schedule(again, Event::AtPort { from, to, port, packet: packet.clone() });
        }
        self.queue.schedule(at, Event::AtPort { from, to, port, packet });
    }

    /// Reads what a rank sends: which elements a packet carries, and which transfers it calls closed.
    fn inspect(
        &mut self,
        from: usize,
        to: usize,
        bytes: &[u8],
        payload: *const u8,
        payload_bytes: usize,
    ) -> Option<Provenance> {
        let (header, body) = Header::decode(bytes).ok()?;
        self.path_watch.on_sent(self.now, (from, to), &header);
        if self.ranks[from].group.is_connected(to as u32) {
            self.repair_watch.on_met(self.now, (from, to));
        }
        if header.kind == Kind::Status {
            let status = StatusBody::decode(&mut Reader::new(body)).ok()?;
            if status.state == TransferState::Closed {
                self.record.on_closed(to, from, header.transfer.0);
            }
            let unsteady = self.unsteady(from, to);
            let checked = self.watch.on_status_sent(self.now, (from, to), &header, &status, unsteady);
            checked.unwrap_or_else(|violation| self.report(violation));
        }
        if header.kind == Kind::Probe {
            self.repair_watch.on_asked(self.now, (from, to), &header);
        }
        if header.kind != Kind::Data {
            return None;
        }
        let is_exact = self.is_exact((from, to), &header);
        let idle = self.idle_max(from, to);
        let checked = self.repair_watch.on_sent(self.now, (from, to), &header, is_exact, idle);
        checked.unwrap_or_else(|violation| self.report(violation));
        self.check_best_effort((from, to), &header, payload);
        if header.transfer.is_point_to_point() {
            return None;
        }
        let (op, offset) = self.ranks[from].locate(&self.scenario.ops, payload)?;
        let plan = &self.scenario.ops[op];
        if stage_index(plan, &header) != CONTRIBUTION
            || !plan.is_tolerant()
            || !oracle::may_sum_in_one_place(plan.kind)
        {
            return None;
        }
        let width = plan.dtype.bytes() as u64;
        let elems = offset / width..(offset + payload_bytes as u64) / width;
        let begin = (offset - u64::from(header.offset)) / width;
        let provenance = Provenance { op, transfer: header.transfer.0, elems, begin };
        self.record.on_sent(from, to, &provenance);
        let checked = self.watch.on_data_sent(self.now, (from, to), (op, plan), &header, body);
        checked.unwrap_or_else(|violation| self.report(violation));
        Some(provenance)
    }

    fn note_loss(&mut self, from: usize, to: usize, bytes: &[u8]) {
        if let Ok((header, _)) = Header::decode(bytes) {
            self.path_watch.on_lost((from, to), &header);
            self.repair_watch.on_lost(self.now, (from, to), &header);
        }
    }

    /// What is unknown about when `rank` speaks to `peer`.
    fn unsteady(&self, rank: usize, peer: usize) -> Unsteady {
        let absence = self.absence_max(rank);
        Unsteady {
            late_max: self.scenario.host.wake_late_max * 2 + Duration::from_micros(2) + absence,
            in_hosts: absence + self.absence_max(peer),
        }
    }

    /// For how long a rank has stood still so far, or its clock has jumped, and how long a NIC that holds datagrams back
    /// lets a word for one peer wait behind the bursts for the others.
    fn absence_max(&self, rank: usize) -> Duration {
        let host = &self.scenario.host;
        let held_back = host.nic_bytes.map_or(Duration::ZERO, |nic| {
            let bursts = (self.scenario.ranks() as u64 - 1) * BURST_DATAGRAMS * host.datagram_bytes as u64;
            let rate = self.scenario.network.link(rank).up_rate;
            Duration::from_secs_f64((bursts + nic) as f64 / rate as f64)
        });
        let begun = self.scenario.faults.iter().filter(|(at, _)| Timestamp::ZERO + *at <= self.now);
        let stop = |fault: &Fault| match fault {
            Fault::Pause(of, length) | Fault::Suspend(of, length) | Fault::ClockJump(of, length)
                if *of == rank =>
            {
                *length
            }
            _ => Duration::ZERO,
        };
        held_back + begun.map(|(_, fault)| stop(fault)).sum::<Duration>()
    }

    /// Whether nothing of the transfer that a data packet belongs to may be missing.
    fn is_exact(&mut self, (from, to): (usize, usize), header: &Header) -> bool {
        let Some(op) = self.ranks[from].sends(to, header.transfer) else { return false };
        let plan = &self.scenario.ops[op];
        let by_shard = matches!(
            plan.kind,
            OpKind::AllReduce(
                Algorithm::Transpose | Algorithm::ParameterServer | Algorithm::WeightedTranspose
            )
        );
        let is_result =
            by_shard && stage_index(plan, header) == RESULT && !header.transfer.is_point_to_point();
        !plan.is_tolerant() || is_result && !plan.policy.gather.may_lose()
    }

    /// Best effort sends nothing again, neither values nor results. Over several paths a copy of a packet may try whether one has
    /// healed, and rounds that warm up are exact.
    fn check_best_effort(&mut self, (from, to): (usize, usize), header: &Header, payload: *const u8) {
        let is_again = header.flags.contains(Flags::RETRANSMITTED) && self.scenario.host.paths == 1;
        let Some(op) = self.ranks[from].holder(payload).filter(|_| is_again) else { return };
        let plan = &self.scenario.ops[op];
        let Policy { recovery, gather, deadline, critical_chunks, .. } = plan.policy;
        let never = match stage_index(plan, header) {
            CONTRIBUTION => recovery == Reliability::BestEffort && critical_chunks == 0,
            RESULT => gather.recovery == Reliability::BestEffort,
            _ => false,
        };
        if never && matches!(deadline, DeadlineRule::Fixed(_)) {
            self.report(Violation::RepairedUnasked { op, from, to, at: self.now });
        }
    }

    /// By how much the hosts of both may delay a question, its answer and what follows from it.
    fn idle_max(&self, from: usize, to: usize) -> Duration {
        let both = [self.unsteady(from, to), self.unsteady(to, from)];
        both.map(|one| one.late_max * 2 + one.in_hosts).iter().sum::<Duration>() + self.ack_delay_max() * 2
    }

    /// Where packets come slowly a host with one path may hold an acknowledgement back for longer.
    fn ack_delay_max(&self) -> Duration {
        let host = &self.scenario.host;
        let slowly = if host.paths == 1 { ACK_DELAY_MAX } else { Duration::ZERO };
        host.ack_delay_max.max(slowly)
    }
}

/// Which stage a transfer of a call belongs to that sums each element in one place. A weighted transpose has many of each.
fn stage_index(plan: &OpPlan, header: &Header) -> u32 {
    match plan.kind {
        OpKind::AllReduce(Algorithm::WeightedTranspose) => header.transfer.index() % 2,
        _ => header.transfer.index(),
    }
}

/// Index of the transfers to where each shard is reduced.
const CONTRIBUTION: u32 = 0;
/// Index of the transfers that send results back, where each shard is reduced in one place.
const RESULT: u32 = 1;
/// What a group gives the NIC for one peer before the next has its turn.
const BURST_DATAGRAMS: u64 = gradwire_core::MESSAGE_DATAGRAMS_MAX as u64;

const ACK_DELAY_MAX: Duration = Duration::from_millis(2);

/// The path that a datagram takes, from its header.
fn path_of(datagram: &[u8]) -> usize {
    Header::decode(datagram).map_or(0, |(header, _)| usize::from(header.path.0))
}
