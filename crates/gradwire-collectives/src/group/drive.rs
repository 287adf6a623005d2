//! Starting collectives, carrying events to them, ending them.

use super::told_incast::senders;
use super::{Group, GroupEvent, Key, Purpose, Queued};
use crate::division::divide;
use crate::op::{Name, Op};
use crate::ops::Ops;
use crate::peer::{Peer, Peers, PointToPoint};
use crate::policy::Link;
use crate::position::PositionRecord;
use crate::schedules::{moving_begin, Loss, Post};
use crate::settings::CallSettings;
use crate::validate::validate;
use crate::{rotation, OpError, OpId, ReduceOp, Request};
use gradwire_core::{
    Contract, Event, Payload, Payloads, ReceiveTransfer, Reliability, SendTransfer, Timestamp, TransferError,
    TransferId,
};
use std::cell::{Cell, LazyCell};
use std::ops::Range;
use std::time::Duration;

/// Hands payload to the collective that it belongs to.
pub(super) fn deliver(
    (rank, serves): (u32, bool),
    traffic: &PointToPoint,
    ops: &mut Ops,
    payload: &Payload<'_>,
) {
    let key = key_of(ops, (&traffic.receiving, serves), payload.transfer);
    if let Some(op) = key.and_then(|key| ops.at(key)) {
        op.on_payload(rank, payload.transfer, payload.offset as usize, payload.weight, payload.bytes);
    }
}

/// Hands the payload of a run to the collective that it belongs to.
pub(super) fn deliver_run(
    (rank, serves): (u32, bool),
    traffic: &PointToPoint,
    ops: &mut Ops,
    payloads: Payloads<'_>,
) {
    let key = key_of(ops, (&traffic.receiving, serves), payloads.transfer);
    if let Some(op) = key.and_then(|key| ops.at(key)) {
        op.on_payloads(rank, payloads);
    }
}

/// Where the operation of `transfer` is kept; `listed` are the point-to-point transfers in its direction, `serves` says
/// whether the peer is a server, with numbers of its own.
pub(super) fn key_of(
    ops: &Ops,
    (listed, serves): (&[(TransferId, Key)], bool),
    transfer: TransferId,
) -> Option<Key> {
    if serves {
        return ops.key_of_served(transfer.op());
    }
    if !transfer.is_point_to_point() {
        return ops.key_of(transfer.op());
    }
    listed.iter().find(|(id, _)| *id == transfer).map(|(_, key)| *key)
}

/// What the fastest connection has sent at, bytes per second: of all peers, so not for each receive of a call but until it is `known`.
fn fastest(known: &Cell<u64>, peers: &Peers) -> u64 {
    if known.get() == 0 {
        known.set(peers.iter().map(|peer| peer.connection().stats().bandwidth).max().unwrap_or(0));
    }
    known.get()
}

impl Group {
    /// Why `request` cannot be started at all.
    pub(super) fn refusal(&self, request: &Request) -> Option<OpError> {
        if let Some(error) = &self.failed {
            return Some(error.clone().met_by(|| request.during(self.next_sequence)));
        }
        if self.is_leaving {
            return Some(OpError::ShutDown("nothing: it was called after the group was left".to_owned()));
        }
        if self.is_server() {
            return Some(OpError::Invalid("a parameter server calls nothing".to_owned()));
        }
        validate(request, self.rank, self.world_size, self.chunk_bytes).err().map(OpError::Invalid)
    }

    /// Starts queued collectives while there is room in flight.
    pub(super) fn start_queued(&mut self, now: Timestamp) {
        while self.queue.front().is_some_and(|queued| self.may_start(queued)) {
            let Some(queued) = self.queue.pop_front() else { return };
            let Queued { id, mut request, submitted, sequence, purpose } = queued;
            let mut agreed = self.agreement.reach(sequence);
            if let Some(part) = &request.part_of {
                agreed = Some(part.known.clone());
            }
            if purpose == Purpose::Call {
                let left = request.timeout.saturating_sub(now.since(submitted));
                self.hand_out(id, left, divide(&mut request, sequence, agreed.as_ref()));
            }
            let warms_up = self.adaptive.begins(&request.policy, request.bucket_bytes());
            let loss = agreed.as_ref().map(|network| network.loss);
            let rotates = self.world_size > 1 && !warms_up && request.policy.rotation.is_wanted(loss);
            let rotation = rotates.then(|| rotation::seed(self.seed, sequence));
            let place = self.place(sequence);
            let (algorithm, choice) = self.chooser.choose(&request, place, agreed.as_ref());
            let links = agreed.and_then(|network| network.links);
            let name = Name { id, submitted, point_to_point: None, rotation, links };
            let settings = self.settings_of(&request, warms_up);
            let mut op = Op::new(request, algorithm, place, name, &mut self.pool);
            op.warms_up = warms_up;
            op.note_choice(choice);
            match purpose {
                Purpose::Call => {}
                Purpose::StandIn => op.stand_in(),
                Purpose::Exchange => {
                    op.exchange();
                    let connections = self.peers.iter().map(|peer| peer.connection().stats());
                    self.agreement.begin(sequence, connections);
                }
            }
            if self.servers.are_dedicated() && op.call.is_over_servers() {
                (op.served, op.settings) = (Some(self.next_served), settings.encode());
                self.next_served += 1;
            }
            self.history.record(sequence, op.call.encode());
            self.next_start = sequence + 1;
            let key = self.ops.insert_collective(Box::new(op));
            self.update_position(now);
            for slot in 0..self.peers.len() {
                self.check_position(now, slot);
            }
            self.begin(now, key);
        }
        self.check_starved(now);
    }

    /// The other parts of a call are for others, which have so much time left.
    fn hand_out(&mut self, op: OpId, timeout: Duration, mut parts: Vec<Request>) {
        if !parts.is_empty() {
            parts.iter_mut().for_each(|part| part.timeout = timeout);
            self.events.push_back(GroupEvent::Divided { op, parts });
        }
    }

    fn settings_of(&self, request: &Request, warms_up: bool) -> CallSettings {
        let factor = match request.reduce {
            ReduceOp::PremulSum(factor) => factor,
            _ => 1.0,
        };
        let stage_limit = self.adaptive.stage_limit(&request.policy);
        CallSettings { policy: request.policy, factor, warms_up, stage_limit, class: request.tags.class }
    }

    /// Whether the next collective has room in flight and knows its deadlines.
    fn may_start(&self, queued: &Queued) -> bool {
        let request = &queued.request;
        self.ops.has_room(queued.sequence)
            && !self.adaptive.must_wait(&request.policy, request.bucket_bytes())
            && !self.agreement.must_wait(queued.sequence)
    }

    /// Tells the connections how many ranks send to one receiver.
    // claim: auto/schedule-aware-incast
    fn tell_incast(&mut self) {
        let is_fast = self.has_fast_links();
        let senders = senders(self.ops.iter(), self.chunk_bytes, is_fast);
        if let Some(senders) = self.told_incast.on_begun(senders, is_fast) {
            for slot in 0..self.peers.len() {
                self.peers.connection_mut(slot).set_incast(senders);
            }
        }
    }

    /// Posts the first transfers of an operation.
    pub(super) fn begin(&mut self, now: Timestamp, key: Key) {
        if self.ops.at(key).is_some_and(|op| op.is_collective()) {
            self.tell_incast();
        }
        let mut posts = std::mem::take(&mut self.posts);
        if let Some(op) = self.ops.at(key) {
            op.start(&mut self.pool, &mut posts);
        }
        self.carry_on(now, key, posts);
    }

    /// Posts what an operation wants next, and ends it when nothing is left.
    fn carry_on(&mut self, now: Timestamp, key: Key, mut posts: Vec<Post>) {
        for post in posts.drain(..) {
            if self.failed.is_none() {
                self.post(now, key, post);
            }
        }
        self.posts = posts;
        let Some(op) = self.ops.at(key) else { return };
        let is_complete = op.is_complete();
        if op.is_result_ready() && !op.is_reported {
            op.finish(&mut self.pool);
            self.adaptive.on_ended(&op.policy, op.bytes(), op.warms_up, op.stages());
            let peers = &self.peers;
            let sent_rate =
                || peers.iter().map(|peer| peer.connection().stats().sustained_rate).max().unwrap_or(0);
            self.agreement.on_ended(
                (op.sequence(), op.parts_if_large()),
                op.senders_of_stages(),
                op.stages(),
                sent_rate,
            );
            let (op, report) = (op.id, op.report(now));
            self.events.push_back(match self.serving {
                Some(_) => GroupEvent::Served(report),
                None => GroupEvent::Done { op, outcome: Ok(report) },
            });
        }
        let exchanged = (op.is_exchange() && op.is_result_ready()).then(|| op.sequence());
        if is_complete {
            self.end(now, key);
        }
        if exchanged.is_some_and(|sequence| self.agreement.settle(sequence)) {
            self.start_queued(now);
        }
    }

    fn post(&mut self, now: Timestamp, key: Key, post: Post) {
        let peer = match &post {
            Post::Send { to: peer, .. } | Post::Receive { from: peer, .. } => *peer,
        };
        let Some(slot) = self.slot_of(peer) else { return };
        // Who leaves has ended all that it was needed for, and may be gone: nobody would answer.
        let is_internal = self.ops.at(key).is_none_or(|op| op.is_internal);
        if self.peers[slot].has_left && !is_internal {
            return self.fail_left(now, slot);
        }
        let posted = match post {
            Post::Send { index, range, loss, .. } => self.post_send(now, key, slot, (index, range, loss)),
            Post::Receive { index, bytes, loss, .. } => {
                self.post_receive(now, key, slot, (index, bytes, loss))
            }
        };
        self.dirty.push(slot);
        // A connection that closed because the peer is silent says so in its next event.
        debug_assert!(matches!(posted, Ok(()) | Err(TransferError::Closed)), "{posted:?}");
    }

    fn post_send(
        &mut self,
        now: Timestamp,
        key: Key,
        slot: usize,
        (index, range, loss): (u32, Range<usize>, Loss),
    ) -> Result<(), TransferError> {
        let Some(op) = self.ops.at(key) else { return Ok(()) };
        let bytes = range.len();
        let policy = op.policy_in_force();
        let (reliability, critical_chunks, begin) = match loss {
            Loss::In(stage) if policy.may_lose(stage) => {
                let begin = moving_begin(self.rank, op.sequence());
                (policy.reliability(stage), policy.critical_chunks, begin)
            }
            _ => (Reliability::Exact, 0, 0),
        };
        let request = SendTransfer {
            transfer: op.transfer(index, self.peers[slot].serves),
            bytes: bytes as u64,
            descriptor: op.call.for_pair(bytes).encode(),
            reliability,
            priority: op.priority,
            critical_chunks,
            begin,
            tags: op.tags(range.start, loss),
            called_at: Some(op.called_at()),
        };
        self.peers.connection_mut(slot).send(now, request)
    }

    fn post_receive(
        &mut self,
        now: Timestamp,
        key: Key,
        slot: usize,
        (index, bytes, loss): (u32, usize, Loss),
    ) -> Result<(), TransferError> {
        let (contract, stage_us) = self.terms(key, slot, bytes, loss);
        let Self { peers, ops, .. } = self;
        let Some(op) = ops.at(key) else { return Ok(()) };
        let (connection, (rank, serves), traffic) = peers.receiving(slot);
        let request = ReceiveTransfer {
            transfer: op.transfer(index, serves),
            bytes: bytes as u64,
            descriptor: op.call.for_pair(bytes).encode(),
            contract,
            stage_us,
            weights: op.weights_of(rank, index),
        };
        connection.receive(now, request)?;
        while let Some(payload) = connection.poll_payload(now) {
            deliver((rank, serves), traffic, ops, &payload);
        }
        Ok(())
    }

    /// The contract of a receive, and what its sender is told about the time of the stage when it ends.
    pub(super) fn terms(&mut self, key: Key, slot: usize, bytes: usize, loss: Loss) -> (Contract, u32) {
        let Self { peers, ops, adaptive, world_size, chunk_bytes, .. } = self;
        let (Some(op), Loss::In(stage)) = (ops.at(key), loss) else { return (Contract::EXACT, 0) };
        let told = adaptive.told(&op.policy, stage, op.bytes());
        let mut policy = op.policy_in_force().for_each_wait(*world_size, op.senders, op.pieces);
        if op.call.is_ring() {
            policy = policy.in_ring(*world_size);
        }
        let policy = &policy;
        if !policy.may_lose(stage) {
            return (Contract::EXACT, told);
        }
        let is_ring = op.call.is_ring();
        let known = &op.fastest;
        let fastest = LazyCell::new(|| fastest(known, peers));
        let link_of = |peer: &Peer| {
            let link = Link { stats: peer.connection().stats(), bytes, incast: op.senders };
            if is_ring {
                link.one_way(*chunk_bytes, || *fastest)
            } else {
                link
            }
        };
        let (peer, link) = (peers[slot].rank, link_of(&peers[slot]));
        let links = peers.iter().map(|peer| (peer.rank, link_of(peer)));
        let learned = adaptive.learned(policy, (op.sequence(), stage, op.bytes()), (peer, &link), links);
        (policy.contract(stage, &link, &learned), told)
    }

    /// Carries what the connections report to where it belongs, until they have nothing more to say.
    pub(super) fn drain(&mut self, now: Timestamp) {
        while let Some(slot) = self.dirty.pop() {
            while let Some(event) = self.peers.connection_mut(slot).poll_event() {
                self.on_event(now, slot, event);
            }
        }
    }

    fn on_event(&mut self, now: Timestamp, slot: usize, event: Event) {
        let Peer { rank, serves, .. } = self.peers[slot];
        match event {
            Event::Connected { .. } => self.on_connected(slot),
            Event::Offered { transfer, opening } => self.on_offered(now, slot, transfer, &opening),
            Event::Received(mut receipt) => {
                let key = key_of(&self.ops, (&self.peers[slot].traffic.receiving, serves), receipt.transfer);
                self.learn_settings(now, slot, key, &receipt);
                if let Some(op) = key.and_then(|key| self.ops.at(key)) {
                    // Of what ended without anything of it nobody knows whether its sender has called.
                    let came = receipt.received_bytes > 0 || receipt.total_bytes == 0;
                    if came && op.is_collective() && !serves {
                        self.peers[slot].on_seen(op.sequence());
                    }
                    self.adaptive.on_received(op.policy_in_force(), rank, &receipt);
                    if op.may_lose(rank, receipt.transfer) {
                        self.agreement.on_tolerant(&receipt);
                    }
                }
                let way = self.peers[slot].connection().stats().rtt_min / 2;
                self.advance(now, key, |op, posts| {
                    op.on_called(rank, &mut receipt, way);
                    op.on_received((rank, way), &receipt, posts);
                });
            }
            Event::Sent(receipt) => {
                let key = key_of(&self.ops, (&self.peers[slot].traffic.sending, serves), receipt.transfer);
                if let Some(op) = key.and_then(|key| self.ops.at(key)) {
                    if receipt.is_untaken && !op.is_internal {
                        return self.fail_left(now, slot);
                    }
                    if op.is_collective() && !serves {
                        self.peers[slot].on_seen(op.sequence());
                    }
                    if let Some(stage) = op.stage_of_send(rank, receipt.transfer) {
                        let about = (stage, op.bytes());
                        self.adaptive.on_told(&op.policy, rank, about, receipt.stage_us);
                    }
                }
                self.advance(now, key, |op, posts| {
                    op.on_taken(rank, receipt.transfer, now);
                    op.on_sent(rank, &receipt, posts);
                });
            }
            Event::Mismatch { transfer, ours, theirs } => {
                let sequence = self.sequence_of(slot, transfer);
                self.fail_mismatch(now, slot, sequence, (ours.descriptor, theirs.descriptor));
            }
            Event::HelloMismatch { theirs } => self.fail_settings(now, slot, theirs),
            Event::Position(record) => {
                self.peers[slot].position = PositionRecord::decode(&record);
                self.check_position(now, slot);
            }
            Event::PeerSilent { silent } => self.fail_silent(now, slot, silent),
            Event::PeerLeft => self.on_left(now, slot),
            Event::Aborted(record) => self.fail_told(now, slot, &record),
            _ => {}
        }
    }

    fn advance(&mut self, now: Timestamp, key: Option<Key>, step: impl FnOnce(&mut Op, &mut Vec<Post>)) {
        let Some(key) = key else { return };
        let mut posts = std::mem::take(&mut self.posts);
        if let Some(op) = self.ops.at(key) {
            step(op, &mut posts);
        }
        self.carry_on(now, key, posts);
    }

    fn on_connected(&mut self, slot: usize) {
        if std::mem::replace(&mut self.peers[slot].is_connected, true) {
            return;
        }
        self.unconnected -= 1;
        if self.unconnected == 0 {
            self.events.push_back(GroupEvent::Connected);
        }
    }

    /// Forgets an operation that is over.
    fn end(&mut self, now: Timestamp, key: Key) {
        let Some(mut op) = self.ops.take(key) else { return };
        let was_collective = op.is_collective();
        let buffer = op.take_buffer();
        op.release(&mut self.pool);
        if was_collective {
            self.take_back(buffer);
            self.retire_collectives(now);
            self.start_queued(now);
            self.start_offered(now);
        } else {
            self.retire_point_to_point(key);
        }
        self.say_goodbye(now);
    }

    /// Tells the connections which collectives are over. A late one in the middle holds back those behind it.
    fn retire_collectives(&mut self, now: Timestamp) {
        let before = self.oldest;
        while self.oldest < self.next_start && self.ops.key_of(self.oldest as u32 & 0xFFFF).is_none() {
            self.oldest += 1;
        }
        while self.oldest_served < self.next_served
            && self.ops.key_of_served(self.oldest_served as u32 & 0xFFFF).is_none()
        {
            self.oldest_served += 1;
        }
        if self.oldest != before {
            let below = TransferId::collective(self.oldest as u32, 0);
            let below_served = TransferId::collective(self.oldest_served as u32, 0);
            for slot in 0..self.peers.len() {
                let below = if self.peers[slot].serves { below_served } else { below };
                self.peers.connection_mut(slot).retire(below);
            }
            self.update_position(now);
        }
    }
}
