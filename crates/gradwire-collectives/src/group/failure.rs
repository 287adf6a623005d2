//! The one verdict: the first fatal error ends everything on this rank and is told to every peer.

use super::{Group, GroupEvent, Purpose, Queued};
use crate::call::{mismatch, Call};
use crate::error::{first_named, IDLE};
use crate::op::Op;
use crate::peer::Peer;
use crate::position::PositionRecord;
use crate::verdict::{AbortRecord, Cause, Here};
use crate::{Algorithm, Collective, OpError, OpId};
use gradwire_core::wire::ABORT_RECORD_BYTES;
use gradwire_core::{Descriptor, Timestamp, TransferId};
use std::time::Duration;

/// Who hears nobody is told to look at home.
const ALONE: &str =
    "; no other rank was heard in that time either, so this rank may be the one that is cut off";

impl Group {
    /// Ends everything with `error` and tells the peers. Only the first failure counts.
    pub(super) fn fail(&mut self, now: Timestamp, error: OpError, record: &AbortRecord) {
        if self.failed.is_some() {
            return;
        }
        self.record = Some(*record);
        let record = record.encode();
        for slot in 0..self.peers.len() {
            self.peers.connection_mut(slot).abort(now, record);
            self.dirty.push(slot);
        }
        let mut ended: Vec<OpId> = self.unreported().map(|op| op.id).collect();
        for op in self.ops.drain() {
            op.release(&mut self.pool);
        }
        ended.extend(self.unstarted().map(|queued| queued.id));
        self.queue.clear();
        self.receives.clear();
        ended.sort_unstable();
        self.next_deadline = None;
        self.events.push_back(GroupEvent::Failed(error.clone()));
        let is_server = self.is_server();
        for op in ended.into_iter().filter(|_| !is_server) {
            self.events.push_back(GroupEvent::Done { op, outcome: Err(error.clone()) });
        }
        self.failed = Some(error);
    }

    /// A descriptor of ours against the peer's at the same place; they must agree.
    pub(super) fn compare(
        &mut self,
        now: Timestamp,
        slot: usize,
        sequence: u64,
        (ours, theirs): (Descriptor, Descriptor),
    ) {
        let agree = match (Call::decode(&ours), Call::decode(&theirs)) {
            (Some(ours), Some(theirs)) => ours.agrees(&theirs),
            _ => false,
        };
        if !agree {
            self.fail_mismatch(now, slot, sequence, (ours, theirs));
        }
    }

    pub(super) fn fail_mismatch(
        &mut self,
        now: Timestamp,
        slot: usize,
        sequence: u64,
        (ours, theirs): (Descriptor, Descriptor),
    ) {
        let (peer, caller) = (self.peers[slot].rank, self.caller_of(sequence));
        let sequence = self.number_of(sequence);
        let record = AbortRecord {
            ranks: [caller, peer],
            calls: [ours, theirs],
            sequence,
            ..AbortRecord::about(Cause::Mismatch, self.rank, peer)
        };
        let error = mismatch(sequence, (caller, &ours), (peer, &theirs));
        self.fail(now, OpError::Mismatch(Box::new(error)), &record);
    }

    /// The number that callers know the collective at `sequence` by.
    fn number_of(&self, sequence: u64) -> u64 {
        let mut calls = self.ops.iter().filter(|op| op.is_collective());
        calls.find(|op| op.sequence() == sequence).map_or(sequence, Op::number)
    }

    pub(super) fn fail_settings(&mut self, now: Timestamp, slot: usize, theirs: u64) {
        let peer = &self.peers[slot];
        let record = AbortRecord::about(Cause::Settings, self.rank, peer.rank);
        self.fail(now, OpError::Settings { rank: peer.rank, host: peer.host.clone(), theirs }, &record);
    }

    pub(super) fn fail_silent(&mut self, now: Timestamp, slot: usize, silent: Duration) {
        let peer = &self.peers[slot];
        let (rank, host, during) = (peer.rank, peer.host.clone(), self.during());
        let mut detail = self.lag_of(rank);
        // Whoever hears this rank, which hears nobody, is told that it is this one that is cut off.
        let is_alone = self.is_alone(now, silent / 2);
        let culprit = if is_alone { self.rank } else { rank };
        let record =
            AbortRecord { waited: silent, ..AbortRecord::about(Cause::PeerLost, self.rank, culprit) };
        if is_alone {
            detail += ALONE;
        }
        let detail = detail.into();
        self.fail(now, OpError::PeerLost { rank, host, silent, during, detail, reported_by: None }, &record);
    }

    /// A peer left in good order. That is fatal only if something from it is still needed.
    pub(super) fn on_left(&mut self, now: Timestamp, slot: usize) {
        self.peers[slot].has_left = true;
        let rank = Some(self.peers[slot].rank);
        let is_awaited = |op: &Op| !op.is_internal && rank.is_some_and(|rank| op.expects_from(rank));
        if self.ops.iter().any(is_awaited) {
            return self.fail_left(now, slot);
        }
        self.check_deserted(now);
        self.check_starved(now);
        self.on_worker_left();
    }

    /// A receive from a rank that has left, which had nothing more to send, or from any rank where all others have.
    pub(super) fn check_deserted(&mut self, now: Timestamp) {
        let gone = |receive: &Queued| match receive.request.collective {
            Collective::Receive { from: Some(from), .. } => {
                self.slot_of(from).filter(|slot| self.peers[*slot].has_left)
            }
            // Dedicated servers send nothing of their own.
            Collective::Receive { from: None, .. } => {
                let may_send = |peer: &Peer| !peer.serves && !peer.has_left;
                (!self.peers.iter().any(may_send)).then_some(0)
            }
            _ => None,
        };
        if let Some(slot) = self.receives.iter().find_map(gone) {
            self.fail_left(now, slot);
        }
    }

    /// A call that waits for the end of an exchange waits in vain when a peer has left without saying its word. It needs
    /// that peer in any case.
    pub(super) fn check_starved(&mut self, now: Timestamp) {
        let Some(next) = self.queue.front() else { return };
        if !self.agreement.must_wait(next.sequence) {
            return;
        }
        let is_missing = |peer: &Peer| {
            peer.has_left && self.ops.iter().any(|op| op.is_exchange() && op.expects_from(peer.rank))
        };
        if let Some(slot) = self.peers.iter().position(is_missing) {
            self.fail_left(now, slot);
        }
    }

    pub(super) fn fail_left(&mut self, now: Timestamp, slot: usize) {
        let peer = &self.peers[slot];
        let record = AbortRecord::about(Cause::PeerLeft, self.rank, peer.rank);
        let (rank, host, (during, waited)) = (peer.rank, peer.host.clone(), self.during_for(now));
        let detail = self.lag_of(rank).into();
        self.fail(now, OpError::PeerLeft { rank, host, during, waited, detail }, &record);
    }

    /// A peer's group failed: the same verdict here, and on to everybody else.
    pub(super) fn fail_told(&mut self, now: Timestamp, slot: usize, record: &[u8; ABORT_RECORD_BYTES]) {
        let Some(record) = AbortRecord::decode(record) else {
            let (rank, host) = (self.peers[slot].rank, self.peers[slot].host.as_str().into());
            let (during, waited) = self.during_for(now);
            let (cause, detail) = ("for a reason that this version does not know".into(), self.lag().into());
            let about = AbortRecord::about(Cause::TimedOut, rank, rank);
            return self.fail(now, OpError::Aborted { rank, host, cause, during, waited, detail }, &about);
        };
        let error = self.error_of(now, record);
        self.fail(now, error, &record);
    }

    /// What a record means on this rank, which adds what it has seen itself.
    pub(super) fn error_of(&self, now: Timestamp, record: AbortRecord) -> OpError {
        let host = |rank| match self.slot_of(rank) {
            Some(slot) => self.peers[slot].host.clone(),
            None => "this rank".to_owned(),
        };
        let detail = |rank: Option<u32>| rank.map_or_else(|| self.lag(), |rank| self.lag_of(rank));
        let (during, waited) = self.during_for(now);
        let during = if record.cause == Cause::ServerMemory { self.at_server(&record) } else { during };
        record.to_error(Here { host, detail, during, waited })
    }

    /// The call that a server tells of, whose number is another one there; what it is called there, if this rank has not come to it.
    fn at_server(&self, record: &AbortRecord) -> String {
        let op = self.ops.iter().find(|op| op.served == Some(record.sequence));
        let there = || Call::decode(&record.calls[0]).map(|call| call.during(record.sequence));
        op.map(Op::during).or_else(there).unwrap_or_default()
    }

    /// Ends everything if an operation ran out of time; else finds the next one that may.
    pub(super) fn check_deadlines(&mut self, now: Timestamp) {
        let queued = || self.unstarted();
        let late_op = self.unreported().filter(|op| op.deadline() <= now).min_by_key(|op| op.id);
        let late = match late_op {
            Some(op) => Some((op.call.encode(), op.number(), op.submitted)),
            None => queued().find(|queued| queued.deadline() <= now).map(|queued| {
                let call = Call::of(&queued.request, Algorithm::Auto);
                (call.encode(), queued.sequence, queued.submitted)
            }),
        };
        let Some((call, sequence, submitted)) = late else {
            let deadlines = self.unreported().map(Op::deadline).chain(queued().map(Queued::deadline));
            self.next_deadline = deadlines.min();
            return;
        };
        let waited = now - submitted;
        let during = Call::decode(&call).map_or_else(String::new, |call| call.during(sequence));
        let detail = self.lag();
        let record = AbortRecord {
            calls: [call, Descriptor::default()],
            sequence,
            waited,
            ..AbortRecord::about(Cause::TimedOut, self.rank, self.rank)
        };
        self.fail(now, OpError::TimedOut { during, waited, detail }, &record);
    }

    /// What had arrived from one rank and where it last said that it was, for messages; of this rank itself that it was
    /// heard by nobody.
    pub(super) fn lag_of(&self, rank: u32) -> String {
        let Some(slot) = self.slot_of(rank) else { return "the others did not hear this rank".to_owned() };
        let mut ops: Vec<&Op> = self.unreported().collect();
        ops.sort_by_key(|op| op.id);
        let lag = ops.iter().find_map(|op| op.lag_of(rank));
        let lag = lag.unwrap_or_else(|| match self.oldest_call() {
            Some((during, _)) => format!("nothing of {during} was under way with it"),
            None => "nothing was under way with it".to_owned(),
        });
        format!("{lag}; {}", self.peers[slot].whereabouts())
    }

    /// Whether none of several peers was heard lately.
    fn is_alone(&self, now: Timestamp, lately: Duration) -> bool {
        let silent = |peer: &Peer| peer.has_left || now.since(peer.connection().heard_at()) >= lately;
        self.peers.len() > 1 && self.peers.iter().all(silent)
    }

    /// For each peer that is behind, what is outstanding in the oldest operation that needs it, and where the peer
    /// last said it was. Peers that have not come to that operation are named first, and some of the others: they may be waiting too.
    fn lag(&self) -> String {
        let mut ops: Vec<&Op> = self.unreported().collect();
        ops.sort_by_key(|op| op.id);
        let lag = |peer: &Peer| {
            let (op, lag) = ops.iter().find_map(|op| Some((op, op.lag_of(peer.rank)?)))?;
            let (Peer { rank, host, .. }, during) = (peer, op.during());
            let line = format!("rank {rank} ({host}): {lag} in {during}; {}", peer.whereabouts());
            Some((peer.is_in(op.sequence()), line))
        };
        let mut lines: Vec<(bool, String)> = self.peers.iter().filter_map(lag).collect();
        lines.sort_by_key(|(has_come, _)| *has_come);
        if lines.is_empty() {
            let nothing = "no peer has offered what is waited for";
            return self.oldest_call().map_or("nothing was waited for", |_| nothing).to_owned();
        }
        first_named(lines.into_iter().map(|(_, line)| line))
    }

    /// Operations whose callers wait for them.
    fn unreported(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().filter(|op| !op.is_reported)
    }

    /// Calls that have not been started and whose callers wait for them.
    fn unstarted(&self) -> impl Iterator<Item = &Queued> {
        self.queue.iter().chain(&self.receives).filter(|queued| queued.purpose == Purpose::Call)
    }

    /// What is in progress, for messages.
    fn during(&self) -> String {
        self.during_any().unwrap_or_else(|| IDLE.to_owned())
    }

    /// The same, and how long it has waited.
    fn during_for(&self, now: Timestamp) -> (String, Duration) {
        let waited = self.oldest_call().map_or(Duration::ZERO, |(_, submitted)| now.since(submitted));
        (self.during(), waited)
    }

    /// The oldest operation that is not over.
    pub(super) fn during_any(&self) -> Option<String> {
        self.oldest_call().map(|(during, _)| during)
    }

    /// The same, and when it was called.
    fn oldest_call(&self) -> Option<(String, Timestamp)> {
        let in_flight = self.unreported().min_by_key(|op| op.id).map(|op| (op.during(), op.submitted));
        in_flight.or_else(|| {
            let queued = self.unstarted().next()?;
            let call = Call::of(&queued.request, Algorithm::Auto);
            Some((call.during(queued.sequence), queued.submitted))
        })
    }

    /// Says to the peers where this rank is, when that has changed.
    pub(super) fn update_position(&mut self, now: Timestamp) {
        let sequence = self.oldest;
        let call = if sequence < self.next_start { self.history.at(sequence) } else { None };
        let position = PositionRecord { sequence, call };
        if self.position == Some(position) {
            return;
        }
        self.position = Some(position);
        let record = position.encode();
        for slot in 0..self.peers.len() {
            self.peers.connection_mut(slot).set_position(now, record);
        }
    }

    /// Compares where a peer last said it was with what this rank called there. Finds what no transfer can show: two
    /// ranks that both wait for the other.
    pub(super) fn check_position(&mut self, now: Timestamp, slot: usize) {
        let peer = &self.peers[slot];
        let Some(PositionRecord { sequence, call: Some(theirs) }) = peer.position else { return };
        // A server's calls have other numbers, and the transfers of each are compared anyway.
        if self.is_server() || peer.serves {
            return;
        }
        if let Some(ours) = self.history.at(sequence) {
            self.compare(now, slot, sequence, (ours, theirs));
        }
    }

    /// The sequence number that a transfer belongs to, for messages.
    pub(super) fn sequence_of(&self, slot: usize, transfer: TransferId) -> u64 {
        if transfer.is_point_to_point() {
            let number = u64::from(transfer.0 & (TransferId::POINT_TO_POINT - 1));
            debug_assert!(slot < self.peers.len());
            return number;
        }
        if self.peers[slot].serves {
            let op = self
                .ops
                .iter()
                .find(|op| op.served.is_some_and(|number| number & 0xFFFF == u64::from(transfer.op())));
            return op.map_or(u64::from(transfer.op()), Op::sequence);
        }
        self.history.at_op(transfer.op()).map_or(u64::from(transfer.op()), |(sequence, _)| sequence)
    }
}
