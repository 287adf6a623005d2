//! One collective in flight on this rank: its transfers, its memory, its report.
//!
//! Sits between the group, which owns the connections, and the schedule, which decides. Payload goes through here
//! to the memory and datagrams take their bytes from here; both only look up a small table.

mod called;
mod fetching;
mod owed;
mod part;
mod serving;
mod staging;
mod table;
mod waiting;
mod weights;

pub(crate) use called::earlier;

use crate::adaptive::StageEnd;
use crate::call::Call;
use crate::links::LinkShares;
use crate::memory::{Memory, Pool, Reduction, Side};
use crate::report::{Contributions, Places};
use crate::rotation::RotatedBucket;
use crate::schedules::{blocks_of, pieces_of, schedule_for, senders};
use crate::schedules::{Loss, Place, Post, Schedule, Stage, Target};
use crate::settings::CallSettings;
use crate::tags::Important;
use crate::{Algorithm, DeliveryReport, OpId, Policy, Request, View};
use fetching::soon;
use gradwire_core::{Payloads, Receipt, SendReceipt, Timestamp, TransferId, TransferTags};
use part::Part;
use staging::{Copied, StagedMax};
use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;
use table::Table;

/// A collective in flight.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) id: OpId,
    pub(crate) call: Call,
    pub(crate) policy: Policy,
    /// Exact whatever the policy says, because the policy measures first.
    pub(crate) warms_up: bool,
    part: Part,
    pub(crate) priority: u8,
    class: u8,
    /// Ranks that send to one receiver at once.
    pub(crate) senders: u32,
    pub(crate) pieces: u32,
    /// The packets that a switch should keep, where some may be lost.
    important: Option<Important>,
    pub(crate) submitted: Timestamp,
    /// The latest call of those that this rank has heard of, its own included: the others cannot end before. A dedicated server
    /// calls nothing.
    called_at: Timestamp,
    pub(crate) timeout: Duration,
    sequence: u64,
    /// Its number among the calls that dedicated servers take part in; those know only these.
    pub(crate) served: Option<u64>,
    /// What they are told about it; at a server, what it was told.
    pub(crate) settings: [u8; CallSettings::BYTES],
    /// The accumulator of a dedicated server.
    buffer: Vec<u8>,
    has_settings: bool,
    /// The only transfer of a point-to-point call.
    point_to_point: Option<TransferId>,
    schedule: Box<dyn Schedule>,
    memory: Memory,
    /// Of the caller's bucket.
    bytes: usize,
    /// What is sent in place of the caller's bucket; the memory is then its.
    rotated: Option<RotatedBucket>,
    chunk_bytes: usize,
    sends: Table<Send>,
    receives: Table<Receive>,
    /// Copies of small sends, and what the latest one was a copy of.
    staging: Vec<u8>,
    staged: Option<(Side, Range<usize>)>,
    /// Bytes of contributions and of results that may be copied, what was copied before included.
    stages_up_to: StagedMax,
    /// Transfers that are not over.
    open: usize,
    /// Of these, those that need the caller's memory.
    held: usize,
    /// The caller has been told that it ended.
    pub(crate) is_reported: bool,
    /// Nobody waits for it; see [`Op::stand_in`] and [`Op::exchange`].
    pub(crate) is_internal: bool,
    /// How the stages ended so far: reduce, gather.
    stages: [StageEnd; 2],
    /// Bytes of a shard and of a block, if the caller wants to know how many ranks are in each block of the result.
    blocks: Option<(usize, usize)>,
    /// Bytes of the residual that hold what did not count, and of how many ranks.
    owed: Vec<(Range<usize>, u16)>,
    report: DeliveryReport,
    places: Places,
    /// Bytes per second of the fastest connection, once a receive has found it.
    pub(crate) fastest: Cell<u64>,
}

/// A posted send.
#[derive(Clone, Debug)]
struct Send {
    side: Side,
    range: Range<usize>,
    /// Where its copy is.
    copy: Option<Copied>,
    weights: Option<usize>,
    loss: Loss,
    is_open: bool,
}

/// A posted receive.
#[derive(Clone, Debug)]
struct Receive {
    target: Target,
    loss: Loss,
    bytes: usize,
    received: usize,
    is_open: bool,
}

/// What names a new collective.
#[derive(Clone, Debug)]
pub(crate) struct Name {
    pub(crate) id: OpId,
    pub(crate) submitted: Timestamp,
    pub(crate) point_to_point: Option<TransferId>,
    /// Seed of the rotation, if the bucket is to be rotated.
    pub(crate) rotation: Option<u64>,
    /// How fast the ranks' links are, where some are slow.
    pub(crate) links: Option<LinkShares>,
}

impl Op {
    /// A valid request on its way; nothing happens before [`Op::start`].
    pub(crate) fn new(
        mut request: Request,
        algorithm: Algorithm,
        place: Place,
        name: Name,
        pool: &mut Pool,
    ) -> Self {
        let (part, mut call) = (Part::of(&request, place.sequence), Call::of(&request, algorithm));
        let (bytes, result_bytes) = (request.bucket_bytes(), request.output.len());
        let rotated = name.rotation.and_then(|seed| RotatedBucket::replace(&mut request, seed, pool));
        if rotated.is_some() {
            call = call.rotated();
        }
        let grid = (place.shards(algorithm), place.chunk_bytes);
        let important = Important::of(&request, grid, place.sequence, &mut pool.samples);
        let views = (request.input, request.output, request.residual);
        let mut memory = Memory::new(views, Reduction::of(&request, place.world_size), place.chunk_bytes);
        memory.own_row = request.scattered_feedback().map(|row| {
            let start = place.rank as usize * row;
            start..start + row
        });
        memory.beyond = rotated.as_ref().map_or(View::EMPTY, RotatedBucket::beyond);
        let stages_up_to = StagedMax::of(&request);
        let report = DeliveryReport {
            collective: call.name().to_owned(),
            sequence: place.sequence,
            in_sequence: name.point_to_point.is_none(),
            submitted_at: name.submitted,
            elems: (result_bytes / request.dtype.bytes()) as u64,
            rotated_elems: rotated.as_ref().map_or(0, RotatedBucket::elems),
            replicas_identical: !request.policy.gather.may_lose(),
            ..DeliveryReport::default()
        };
        Self {
            id: name.id,
            call,
            policy: request.policy,
            warms_up: false,
            part,
            priority: if request.policy.keeps_order() { PRIORITY_IN_ORDER } else { request.priority },
            class: request.tags.class,
            senders: senders(&request, algorithm, place),
            pieces: pieces_of(&request, algorithm, place),
            important,
            submitted: name.submitted,
            called_at: name.submitted,
            timeout: request.timeout,
            sequence: place.sequence,
            served: None,
            settings: [0; CallSettings::BYTES],
            buffer: Vec::new(),
            has_settings: false,
            point_to_point: name.point_to_point,
            schedule: schedule_for(&request, algorithm, place, name.links.as_ref()),
            memory,
            bytes,
            rotated,
            chunk_bytes: place.chunk_bytes,
            sends: Table::new(place.ranks() as usize),
            receives: Table::new(place.ranks() as usize),
            staging: Vec::new(),
            staged: None,
            stages_up_to,
            open: 0,
            held: 0,
            is_reported: false,
            is_internal: false,
            stages: [StageEnd::NOTHING; 2],
            blocks: blocks_of(&request, algorithm, place).filter(|_| request.wants_contributions),
            owed: Vec::new(),
            report,
            places: Places::default(),
            fastest: Cell::new(0),
        }
    }

    /// Makes it stand for a call that was refused: its signals say so, and nobody waits for it.
    pub(crate) fn stand_in(&mut self) {
        (self.call, self.is_internal, self.is_reported) = (Call::REFUSED, true, true);
    }

    /// Makes it an exchange of what the ranks measured. Its few bytes are no incast.
    pub(crate) fn exchange(&mut self) {
        (self.call, self.is_internal, self.is_reported) = (Call::EXCHANGE, true, true);
        self.senders = 1;
    }

    /// Why its schedule is another one than before.
    pub(crate) fn note_choice(&mut self, choice: Option<String>) {
        self.report.choice = choice;
    }

    /// Prepares the memory and gives the first transfers to post.
    pub(crate) fn start(&mut self, pool: &mut Pool, posts: &mut Vec<Post>) {
        self.staging = pool.staging.pop().unwrap_or_default();
        if self.warms_up {
            self.stages_up_to.measure();
        }
        if let Some(rotated) = &mut self.rotated {
            rotated.spread(&mut pool.strip);
        }
        self.schedule.start(&mut self.memory, pool, posts);
        self.note(posts);
    }

    /// Whether it is one; see [`Op::exchange`].
    pub(crate) fn is_exchange(&self) -> bool {
        self.call == Call::EXCHANGE
    }

    /// Number in the group's sequence, or of the point-to-point call.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether it is part of the group's sequence.
    pub(crate) fn is_collective(&self) -> bool {
        self.point_to_point.is_none()
    }

    /// When it times out.
    pub(crate) fn deadline(&self) -> Timestamp {
        self.submitted + self.timeout
    }

    /// The policy that its transfers follow.
    pub(crate) fn policy_in_force(&self) -> &Policy {
        if self.warms_up {
            &Policy::RELIABLE
        } else {
            &self.policy
        }
    }

    /// Bytes of the bucket.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// How its stages ended so far: reduce, gather.
    pub(crate) fn stages(&self) -> &[StageEnd; 2] {
        &self.stages
    }

    /// Ranks that have sent to this one at once in each of them.
    pub(crate) fn senders_of_stages(&self) -> [u32; 2] {
        [&self.report.peers, &self.report.sources].map(|senders| self.senders.min(senders.len() as u32))
    }

    /// Whether the receive `transfer` from `from` may leave something behind.
    pub(crate) fn may_lose(&mut self, from: u32, transfer: TransferId) -> bool {
        let index = self.index(transfer);
        match self.receives.at(from, index).map(|receive| receive.loss) {
            Some(Loss::In(stage)) => self.policy_in_force().may_lose(stage),
            _ => false,
        }
    }

    /// The stage that the send `transfer` to `to` belongs to.
    pub(crate) fn stage_of_send(&mut self, to: u32, transfer: TransferId) -> Option<Stage> {
        let index = self.index(transfer);
        match self.sends.at(to, index)?.loss {
            Loss::In(stage) => Some(stage),
            Loss::Never => None,
        }
    }

    /// Bytes of a receive that is posted, if it may lose something.
    pub(crate) fn lossy_receive(&mut self, from: u32, transfer: TransferId) -> Option<Option<u64>> {
        let index = self.index(transfer);
        let (loss, bytes) = self.receives.at(from, index).map(|receive| (receive.loss, receive.bytes))?;
        let may_lose = match loss {
            Loss::In(stage) => self.policy_in_force().may_lose(stage),
            Loss::Never => false,
        };
        Some(may_lose.then_some(bytes as u64))
    }

    /// The id of its transfer `index`; `serves`: with a dedicated server, which has numbers of its own.
    pub(crate) fn transfer(&self, index: u32, serves: bool) -> TransferId {
        let number = self.served.filter(|_| serves).unwrap_or(self.sequence);
        self.point_to_point.unwrap_or(TransferId::collective(number as u32, index))
    }

    /// What the network is told about the packets of a send that starts at byte `start` of its view.
    pub(crate) fn tags(&self, start: usize, loss: Loss) -> TransferTags {
        let important = self.important.as_ref().filter(|_| loss != Loss::Never);
        TransferTags { class: self.class, important: important.map(|important| important.from(start)) }
    }

    /// The inverse of [`Op::transfer`].
    fn index(&self, transfer: TransferId) -> u32 {
        if self.point_to_point.is_some() {
            0
        } else {
            transfer.index()
        }
    }

    /// Whether every transfer is over.
    pub(crate) fn is_complete(&self) -> bool {
        self.open == 0
    }

    /// Whether its result is there and nothing of the caller's memory is needed any more.
    pub(crate) fn is_result_ready(&self) -> bool {
        self.held == 0 && !self.schedule.has_more()
    }

    /// Adds or places new payload from `from`.
    pub(crate) fn on_payload(
        &mut self,
        from: u32,
        transfer: TransferId,
        offset: usize,
        weight: u16,
        payload: &[u8],
    ) {
        if let Some(target) = self.target_of(from, transfer, payload.len()) {
            self.take(target, offset, weight, payload);
        }
    }

    /// [`Op::on_payload`] for each of a run.
    pub(crate) fn on_payloads(&mut self, from: u32, payloads: Payloads<'_>) {
        let bytes = payloads.iter().map(|payload| payload.bytes.len()).sum();
        let Some(target) = self.target_of(from, payloads.transfer, bytes) else { return };
        for payload in payloads.iter() {
            self.take(target, payload.offset as usize, payload.weight, payload.bytes);
        }
    }

    /// Where payload of `transfer` goes, of which `bytes` have come.
    fn target_of(&mut self, from: u32, transfer: TransferId, bytes: usize) -> Option<Target> {
        let index = self.index(transfer);
        let receive = self.receives.at(from, index);
        debug_assert!(receive.is_some(), "payload of {transfer:?} from {from}, which was never posted");
        let receive = receive?;
        receive.received += bytes;
        Some(receive.target)
    }

    fn take(&mut self, target: Target, offset: usize, weight: u16, payload: &[u8]) {
        self.fetch_behind(target, offset, payload.len());
        match target {
            Target::Place(at) => self.memory.place(at + offset, payload),
            Target::Result { at, chunk } if weight == 0 => {
                self.fill_nobodys(at, chunk, offset..offset + payload.len())
            }
            Target::Result { at, chunk } => {
                self.memory.place(at + offset, payload);
                self.memory.note_count(chunk + offset / self.chunk_bytes, weight);
            }
            Target::Sum { at } => self.memory.sum(at + offset, payload),
            Target::Row { at } => self.memory.place_in_row(at + offset, payload),
            // Every worker sends the same.
            Target::Settings => self.settings[offset..offset + payload.len()].copy_from_slice(payload),
            Target::Add { at, chunk } => {
                self.memory.add(at + offset, chunk + offset / self.chunk_bytes, weight, payload);
            }
        }
    }

    /// Bytes `part` of a transfer to `to` that leave (`again`: not for the first time), straight from the tensor, and the ranks in them. Of
    /// several packets, which begin where a chunk does, those before the first that has other ranks in it: at least one.
    pub(crate) fn payload(
        &mut self,
        to: u32,
        transfer: TransferId,
        mut part: Range<usize>,
        again: bool,
    ) -> Option<(&[u8], u16)> {
        let index = self.index(transfer);
        let send = self.sends.at(to, index).filter(|send| send.is_open)?;
        let (side, start, copy, weights) = (send.side, send.range.start, send.copy, send.weights);
        let packets = part.len().div_ceil(self.chunk_bytes);
        let (weight, alike) = weights.map_or((1, packets), |first| {
            self.memory.count_alike(first + part.start / self.chunk_bytes, packets)
        });
        part.end = part.end.min(part.start + alike * self.chunk_bytes);
        self.report.bytes_retransmitted += if again { part.len() as u64 } else { 0 };
        // What is copied was counted then: it may leave when the report is out.
        self.report.bytes_sent += if again || copy.is_none() { part.len() as u64 } else { 0 };
        let bytes = match copy {
            Some(Copied::Staged(at)) => self.staging.get(at + part.start..at + part.end),
            Some(Copied::InRows) => self.memory.row(start + part.start..start + part.end),
            None if side == Side::Settings => self.settings.get(part),
            None => {
                let view = self.memory.view(side);
                view.fetch(soon(start + part.start, part.len(), part.len().min(self.chunk_bytes)));
                view.get(&(start + part.start..start + part.end))
            }
        };
        Some((bytes?, weight))
    }

    /// A receive is over; `way`: how long packets from there are under way at least. Gives the transfers to post next.
    pub(crate) fn on_received(
        &mut self,
        (from, way): (u32, Duration),
        receipt: &Receipt,
        posts: &mut Vec<Post>,
    ) {
        let index = self.index(receipt.transfer);
        let Some(receive) = self.receives.at(from, index).filter(|receive| receive.is_open) else { return };
        receive.is_open = false;
        let (target, loss) = (receive.target, receive.loss);
        let is_contribution = target.is_contribution();
        self.open -= 1;
        self.held -= 1;
        if receipt.received_bytes == 0 && receipt.total_bytes > 0 {
            self.stages_up_to.stop();
        }
        if target != Target::Settings {
            let (elem_bytes, sender) = (self.memory.elem_bytes() as u64, (from, way));
            self.report.add(sender, receipt, elem_bytes, is_contribution, &mut self.places);
        }
        if let Loss::In(stage) = loss {
            self.stages[stage as usize].add(receipt);
        }
        if let Target::Result { at, chunk } = target {
            receipt.missing.iter().for_each(|missing| self.fill(at, chunk, missing));
        }
        self.schedule.on_received(from, index, &mut self.memory, posts);
        self.note(posts);
    }

    /// A send is over: what did not count goes to the residual before the memory is written again. Gives the
    /// transfers to post next.
    pub(crate) fn on_sent(&mut self, to: u32, receipt: &SendReceipt, posts: &mut Vec<Post>) {
        let index = self.index(receipt.transfer);
        let Some(send) = self.sends.at(to, index).filter(|send| send.is_open) else { return };
        send.is_open = false;
        let send = send.clone();
        self.open -= 1;
        if send.copy.is_some() {
            // The schedule has known since it was copied that its memory is free.
            self.schedule.on_concluded(to, index, posts);
            return self.note(posts);
        }
        self.held -= 1;
        if send.loss == Loss::In(Stage::Reduce) {
            for missing in &receipt.missing {
                self.keep_uncounted(&send, missing);
            }
        }
        self.schedule.on_sent(to, index, posts);
        self.schedule.on_concluded(to, index, posts);
        self.note(posts);
    }

    /// Enters new transfers in the tables. The memory of a send that is copied is free at once, so that the schedule
    /// may go on with it and post more.
    fn note(&mut self, posts: &mut Vec<Post>) {
        // Between two events the memory does not change; after that the same range is another copy.
        self.staged = None;
        let mut at = 0;
        while let Some(post) = posts.get(at).cloned() {
            at += 1;
            self.open += 1;
            match post {
                Post::Send { to, index, side, range, weights, loss } => {
                    let copy = self.stage(side, &range, loss);
                    let send = Send { side, range, copy, weights, loss, is_open: true };
                    self.sends.insert(to, index, send);
                    if copy.is_some() {
                        self.schedule.on_sent(to, index, posts);
                    } else {
                        self.held += 1;
                    }
                }
                Post::Receive { from, index, target, bytes, loss } => {
                    self.held += 1;
                    self.report.bytes_expected += if target == Target::Settings { 0 } else { bytes as u64 };
                    self.receives.insert(
                        from,
                        index,
                        Receive { target, loss, bytes, received: 0, is_open: true },
                    );
                }
            }
        }
    }

    /// Whether something from `rank` is still expected.
    pub(crate) fn expects_from(&self, rank: u32) -> bool {
        self.receives.of(rank).any(|receive| receive.is_open)
    }

    /// For a timeout: what is outstanding with `rank`, or `None` when nothing is.
    pub(crate) fn lag_of(&self, rank: u32) -> Option<String> {
        let open = |receive: &&Receive| receive.is_open;
        if self.expects_from(rank) {
            let received: usize = self.receives.of(rank).filter(open).map(|receive| receive.received).sum();
            let bytes: usize = self.receives.of(rank).filter(open).map(|receive| receive.bytes).sum();
            return Some(format!("{received} of {bytes} bytes from it arrived{}", self.stage_in(rank)));
        }
        let unconfirmed: usize =
            self.sends.of(rank).filter(|send| send.is_open).map(|send| send.range.len()).sum();
        let waits = self.sends.of(rank).any(|send| send.is_open);
        waits.then(|| format!("it has not taken {unconfirmed} bytes sent to it{}", self.stage_in(rank)))
    }

    /// Where in a reduction this rank stands with `rank`, for messages: the first stage in which something is open.
    fn stage_in(&self, rank: u32) -> &'static str {
        let receives = self.receives.of(rank).filter(|receive| receive.is_open).map(|receive| receive.loss);
        let sends = self.sends.of(rank).filter(|send| send.is_open).map(|send| send.loss);
        let open: Vec<Loss> = receives.chain(sends).collect();
        match () {
            () if open.contains(&Loss::In(Stage::Reduce)) => " in the reduce stage",
            () if open.contains(&Loss::In(Stage::Gather)) => " in the gather stage",
            () => "",
        }
    }

    /// Tells how it went, once. What is still sent again after that is in no report.
    pub(crate) fn report(&mut self, now: Timestamp) -> DeliveryReport {
        self.is_reported = true;
        self.report.elapsed = now - self.submitted;
        self.report.warm_up = self.warms_up;
        self.report.replicas_identical |= self.warms_up;
        let ended_by = |end: &StageEnd| if end.total > 0 { end.reason.name() } else { "" };
        let [reduce, gather] = &self.stages;
        (self.report.reduce_ended_by, self.report.gather_ended_by) = (ended_by(reduce), ended_by(gather));
        let (least, most) = self.memory.contributors();
        (self.report.contributors, self.report.contributors_least) = (most, least);
        self.report.contributions = self.contributions();
        self.report.compute_wait = self.called_at - self.submitted;
        self.report.tidy();
        self.places = Places::default();
        std::mem::take(&mut self.report)
    }

    fn contributions(&self) -> Option<Contributions> {
        let (bytes, elem_bytes) = (self.memory.output.len(), self.memory.elem_bytes());
        let of = |blocks| Contributions::new(self.memory.counts(), blocks, bytes, elem_bytes);
        self.blocks.map(of)
    }

    /// Gives the scratch back.
    pub(crate) fn release(mut self, pool: &mut Pool) {
        self.memory.release(pool);
        pool.rotated.extend(self.rotated.take().and_then(RotatedBucket::into_buffer));
        self.staging.clear();
        pool.staging.push(self.staging);
    }
}

/// Where the clock of a transfer runs from its first packet on, others must not be served before it.
const PRIORITY_IN_ORDER: u8 = 128;
#[cfg(test)]
mod tests;
