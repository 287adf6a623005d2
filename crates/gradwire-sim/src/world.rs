//! The driver: hands datagrams and time to real groups, and stops the clock while it looks at them.
//!
//! ```text
//! pop event -> move the clock -> handle_datagram | handle_timeout | submit -> drain -> transmit -> arm the timer
//! ```
//!
//! A run has two phases in one stretch of time: until the last fault is over everything that completes must be
//! right (safety); after it everything must complete within a bound (liveness). Then every rank leaves and must
//! have nothing left to say.

use crate::oracle;
use crate::plan::{Fault, OpKind};
use crate::rank::{Outbox, Outgoing, Packet, Rank};
use crate::record::{Arrival, DeliveryRecord, Provenance};
use crate::sabotage::Saboteur;
use crate::trace::{Step, Trace};
use crate::{EventQueue, Network, NetworkStats, Rng, Scenario, Violation};
use gradwire_collectives::{GroupEvent, OpError};
use gradwire_core::wire::{Header, Kind, Reader, StatusBody, TransferState};
use gradwire_core::Timestamp;
use std::time::Duration;

/// A run in progress.
#[derive(Debug)]
pub struct World {
    pub(crate) scenario: Scenario,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) record: DeliveryRecord,
    pub(crate) network: Network,
    now: Timestamp,
    queue: EventQueue<Event>,
    trace: Trace,
    rng: Rng,
    outbox: Outbox,
    saboteur: Saboteur,
    /// Ranks that have ended each collective.
    ended: Vec<usize>,
    violation: Option<Violation>,
}

/// What a run that kept every promise was like.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Hash of every event.
    pub trace_hash: u64,
    /// What the network did.
    pub network: NetworkStats,
    /// For each collective, from the first submission to the last rank's end; `None` when it failed, as it had to.
    pub op_times: Vec<Option<Duration>>,
    /// Contributions that tolerant reductions left out, in elements.
    pub elems_uncounted: u64,
    /// Payload bytes sent, all ranks.
    pub bytes_sent: u64,
    /// Payload bytes sent again.
    pub bytes_retransmitted: u64,
    /// Whether the saboteur found something to damage.
    pub sabotaged: bool,
}

#[derive(Debug)]
enum Event {
    /// A datagram reaches its receiver's port.
    AtPort { from: usize, to: usize, packet: Packet },
    /// It has been received.
    Received { from: usize, to: usize, packet: Packet },
    /// A timer fires, if no later one was armed.
    Wake { rank: usize, armed: u64 },
    /// The NIC has room again.
    Room { rank: usize },
    /// A rank may submit its next collectives.
    Submit { rank: usize },
    /// Entry of the fault list.
    Fault(usize),
    /// A pause is over.
    Resume { rank: usize },
    /// A partition is over.
    Repair { a: usize, b: usize },
}

impl World {
    /// Sets up a run. `verbose` prints every event.
    #[must_use]
    pub fn new(scenario: Scenario, verbose: bool) -> Self {
        let rng = Rng::new(scenario.seed);
        let network = Network::new(scenario.network.clone(), scenario.world_size, &rng.fork(10));
        let ranks = (0..scenario.world_size).map(|rank| Rank::new(&scenario, rank)).collect();
        let mut world = Self {
            ended: vec![0; scenario.ops.len()],
            saboteur: Saboteur::new(scenario.sabotage),
            rng: rng.fork(11),
            ranks,
            network,
            scenario,
            record: DeliveryRecord::default(),
            now: Timestamp::ZERO,
            queue: EventQueue::new(),
            trace: Trace::new(verbose),
            outbox: Outbox::default(),
            violation: None,
        };
        world.schedule_start();
        world
    }

    /// Runs until every rank is done and has left.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn run(mut self) -> Result<Summary, Violation> {
        (0..self.ranks.len()).for_each(|rank| self.drain(rank));
        let bound = self.scenario.healed_at() + self.liveness_bound();
        while !self.everybody_is_done() {
            self.step(Timestamp::ZERO + bound)?;
        }
        oracle::check_memory(&self)?;
        self.leave()?;
        Ok(self.summary())
    }

    /// What has been recorded of the network so far.
    #[must_use]
    pub const fn network_stats(&self) -> NetworkStats {
        self.network.stats()
    }

    fn schedule_start(&mut self) {
        for (rank, start) in self.scenario.start.iter().enumerate() {
            self.queue.schedule(Timestamp::ZERO + *start, Event::Submit { rank });
        }
        for (index, (at, _)) in self.scenario.faults.iter().enumerate() {
            self.queue.schedule(Timestamp::ZERO + *at, Event::Fault(index));
        }
    }

    /// How long the collectives may take once all faults are over. A second covers the longest back-off (100 ms)
    /// many times; sixteen times the ideal covers incast on small buffers and a rate that has to be found again.
    fn liveness_bound(&self) -> Duration {
        let late = self.scenario.start.iter().max().copied().unwrap_or_default();
        let think = (self.scenario.think_max + self.scenario.host.wake_late_max * 20)
            * self.scenario.ops.len() as u32;
        let crash =
            self.scenario.crashes().map_or(Duration::ZERO, |_| self.scenario.host.peer_timeout * 5 / 4);
        late + think + crash + self.scenario.ideal_time() * 16 + Duration::from_secs(1)
    }

    fn everybody_is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.crashed || rank.is_done(&self.scenario.ops))
    }

    fn step(&mut self, limit: Timestamp) -> Result<(), Violation> {
        let Some((at, event)) = self.queue.pop() else { return Err(self.stuck()) };
        assert!(at >= self.now, "the queue returned an event of the past");
        self.now = at;
        if self.now > limit {
            return Err(self.stuck());
        }
        self.handle(event);
        match self.violation.take() {
            Some(violation) => Err(violation),
            None => Ok(()),
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::AtPort { from, to, packet } => self.on_at_port(from, to, packet),
            Event::Received { from, to, packet } => self.on_received(from, to, packet),
            Event::Wake { rank, armed } => self.on_wake(rank, armed),
            Event::Room { rank } => {
                self.ranks[rank].waits_for_room = false;
                self.drain(rank);
            }
            Event::Submit { rank } => {
                self.submit(rank);
                self.drain(rank);
            }
            Event::Fault(index) => self.on_fault(self.scenario.faults[index].1),
            Event::Resume { rank } => self.on_resume(rank),
            Event::Repair { a, b } => self.network.set_partition(a, b, false),
        }
    }

    fn on_at_port(&mut self, from: usize, to: usize, packet: Packet) {
        match self.network.enqueue(self.now, to, packet.bytes.len()) {
            Some(at) => self.queue.schedule(at, Event::Received { from, to, packet }),
            None => {
                self.trace.datagram(self.now, Step::Overflowed, from, to, &packet.bytes);
                self.outbox.spare.push(packet.bytes);
            }
        }
    }

    fn on_received(&mut self, from: usize, to: usize, packet: Packet) {
        self.trace.datagram(self.now, Step::Received, from, to, &packet.bytes);
        if self.ranks[to].is_running() {
            self.deliver(from, to, packet);
            self.drain(to);
            return;
        }
        let rank = &mut self.ranks[to];
        if rank.paused && rank.socket_bytes + packet.bytes.len() as u64 <= self.scenario.host.socket_bytes {
            rank.socket_bytes += packet.bytes.len() as u64;
            rank.socket.push_back((from, packet));
        }
    }

    fn deliver(&mut self, from: usize, to: usize, mut packet: Packet) {
        self.saboteur.on_delivery(&mut packet);
        if let Some(provenance) = &packet.provenance {
            // Until it is connected a rank may close a transfer but cannot say so.
            let waits = self.ranks[to].connected && self.ranks[to].runs[provenance.op].is_some();
            let arrival = if waits { Arrival::Open } else { Arrival::Early };
            self.record.on_arrived(from, to, provenance, arrival);
        }
        self.ranks[to].group.handle_datagram(self.now, from as u32, &packet.bytes);
        self.outbox.spare.push(packet.bytes);
    }

    fn on_wake(&mut self, rank: usize, armed: u64) {
        if self.ranks[rank].armed != armed || !self.ranks[rank].is_running() {
            return;
        }
        self.ranks[rank].armed_at = None;
        self.ranks[rank].group.handle_timeout(self.now);
        self.count_wake(rank);
        self.drain(rank);
    }

    /// A timer that fires again and again at the same time would hang a real network thread.
    fn count_wake(&mut self, rank: usize) {
        let (since, wakes) = &mut self.ranks[rank].idle_wakes;
        *wakes = if *since == self.now { *wakes + 1 } else { 0 };
        *since = self.now;
        if *wakes > IDLE_WAKES_MAX {
            let due = self.ranks[rank].group.poll_timeout();
            let reason = due.map_or_else(String::new, |timeout| format!("{timeout:?}"));
            self.violation = Some(Violation::TimeStandsStill { rank, at: self.now, reason });
        }
    }

    fn on_fault(&mut self, fault: Fault) {
        match fault {
            Fault::Pause(rank, length) => {
                self.ranks[rank].paused = true;
                self.queue.schedule(self.now + length, Event::Resume { rank });
            }
            Fault::Partition(a, b, length) => {
                self.network.set_partition(a, b, true);
                self.queue.schedule(self.now + length, Event::Repair { a, b });
            }
            Fault::Crash(rank) => self.ranks[rank].crashed = true,
            Fault::Heal => self.network.heal(),
        }
    }

    fn on_resume(&mut self, rank: usize) {
        self.ranks[rank].paused = false;
        self.ranks[rank].armed_at = None;
        self.ranks[rank].socket_bytes = 0;
        while let Some((from, packet)) = self.ranks[rank].socket.pop_front() {
            self.deliver(from, rank, packet);
            self.drain(rank);
        }
        self.submit(rank);
        self.drain(rank);
    }

    /// Submits what this rank may have in flight now.
    fn submit(&mut self, index: usize) {
        let rank = &mut self.ranks[index];
        while rank.is_running()
            && rank.next_op < self.scenario.ops.len()
            && rank.in_flight.len() < self.scenario.in_flight_max
        {
            let op = rank.next_op;
            rank.next_op += 1;
            if self.scenario.ops[op].involves(index) {
                self.trace.note(self.now, index, || format!("submits op {op}"));
                rank.submit(self.now, &self.scenario, op, index);
            } else {
                self.ended[op] += 1;
            }
        }
    }

    /// The drain contract: events, then datagrams, then the timer.
    fn drain(&mut self, rank: usize) {
        if !self.ranks[rank].is_running() {
            return;
        }
        while let Some(event) = self.ranks[rank].group.poll_event() {
            self.on_group_event(rank, event);
        }
        self.transmit(rank);
        self.arm(rank);
    }

    fn on_group_event(&mut self, rank: usize, event: GroupEvent) {
        let (id, outcome) = match event {
            GroupEvent::Done { op, outcome } => (op, outcome),
            other => {
                self.ranks[rank].connected |= matches!(other, GroupEvent::Connected);
                return self.trace.note(self.now, rank, || format!("{other:?}"));
            }
        };
        self.trace.note(self.now, rank, || format!("{id:?} ended: {outcome:?}"));
        let Some(op) = self.ranks[rank].finish(self.now, id, outcome) else {
            self.violation = Some(Violation::UnknownDone { rank });
            return;
        };
        self.saboteur.on_finished(self.ranks[rank].runs[op].as_mut());
        let pause = self.rng.duration(self.scenario.think_max);
        self.queue.schedule(self.now + pause, Event::Submit { rank });
        self.ended[op] += 1;
        let checked = self.check_outcome(op, rank).and_then(|()| self.check_op(op));
        if let (Err(violation), None) = (checked, &self.violation) {
            self.violation = Some(violation);
        }
    }

    /// A collective may fail only because a rank crashed, and must then name that rank.
    fn check_outcome(&self, op: usize, rank: usize) -> Result<(), Violation> {
        let finished = self.ranks[rank].runs[op].as_ref().and_then(|run| run.finished.as_ref());
        let Some(Err(error)) = finished.map(|finished| &finished.outcome) else { return Ok(()) };
        match error {
            OpError::PeerLost { rank: lost, .. } if self.scenario.crashes() == Some(*lost as usize) => Ok(()),
            _ => Err(Violation::Failed { op, rank, at: self.now, error: error.clone() }),
        }
    }

    /// Looks at a collective when the last rank has ended it.
    fn check_op(&self, op: usize) -> Result<(), Violation> {
        if self.ended[op] == self.scenario.world_size {
            oracle::check_op(self, op)?;
        }
        Ok(())
    }

    fn transmit(&mut self, rank: usize) {
        self.outbox.room_bytes = self.room_bytes(rank);
        self.outbox.was_full = self.outbox.room_bytes == 0;
        self.ranks[rank].group.poll_transmit(self.now, &mut self.outbox);
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
        let rate = self.scenario.network.link(rank).rate;
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
        let provenance = self.inspect(from, to, &bytes, payload, payload_bytes);
        let flight = self.network.transmit(self.now, from, to, bytes.len());
        let Some(at) = flight.arrives_at else {
            self.trace.datagram(self.now, Step::Lost, from, to, &bytes);
            self.outbox.spare.push(bytes);
            return;
        };
        let mut packet = Packet { bytes, provenance };
        if flight.corrupted {
            self.corrupt(&mut packet.bytes);
        }
        if let Some(again) = flight.duplicate_at {
            let twin = Packet { bytes: packet.bytes.clone(), provenance: packet.provenance.clone() };
            self.queue.schedule(again, Event::AtPort { from, to, packet: twin });
        }
        self.queue.schedule(at, Event::AtPort { from, to, packet });
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
        if header.kind == Kind::Status {
            let status = StatusBody::decode(&mut Reader::new(body)).ok()?;
            if status.state == TransferState::Closed {
                self.record.on_closed(to, from, header.transfer.0);
            }
        }
        if header.kind != Kind::Data || header.transfer.is_point_to_point() || header.transfer.index() != 0 {
            return None;
        }
        let (op, offset) = self.ranks[from].locate(&self.scenario.ops, payload)?;
        let plan = &self.scenario.ops[op];
        if !plan.is_tolerant() || !oracle::may_be_transpose(plan.kind) {
            return None;
        }
        let width = plan.dtype.bytes() as u64;
        let elems = offset / width..(offset + payload_bytes as u64) / width;
        let provenance = Provenance { op, transfer: header.transfer.0, elems };
        self.record.on_sent(from, to, &provenance);
        Some(provenance)
    }

    /// Flips up to eight bits, mostly in the header, where it hurts.
    fn corrupt(&mut self, bytes: &mut [u8]) {
        for _ in 0..self.rng.below(1..9) {
            let reach = if self.rng.chance(0.8) { bytes.len().min(56) } else { bytes.len() };
            let at = self.rng.below(0..reach as u64) as usize;
            bytes[at] ^= 1 << self.rng.below(0..8);
        }
    }

    fn arm(&mut self, rank: usize) {
        // What is due but finds the NIC full leaves when the NIC has room; a driver that asked again at once would spin.
        let blocked = self.ranks[rank].waits_for_room;
        let due = self.ranks[rank].group.poll_timeout().map(|timeout| timeout.at);
        let due = due.filter(|due| !blocked || *due > self.now);
        if due == self.ranks[rank].armed_at || self.saboteur.stops_timers() {
            return;
        }
        self.ranks[rank].armed_at = due;
        self.ranks[rank].armed += 1;
        if let Some(due) = due {
            let at = due.max(self.now) + self.rng.duration(self.scenario.host.wake_late_max);
            self.queue.schedule(at, Event::Wake { rank, armed: self.ranks[rank].armed });
        }
    }

    /// Every rank says goodbye; half a second is what the protocol gives it (docs/protocol.md section 6).
    fn leave(&mut self) -> Result<(), Violation> {
        let left_at = self.now;
        for rank in 0..self.ranks.len() {
            if !self.ranks[rank].crashed {
                self.ranks[rank].group.leave(self.now);
                self.drain(rank);
            }
        }
        let crash = self.scenario.crashes().map_or(Duration::ZERO, |_| self.scenario.host.peer_timeout);
        let waited = crash + Duration::from_secs(1) + self.scenario.healed_at();
        loop {
            let talking = self.undrained();
            if talking.is_empty() {
                return Ok(());
            }
            match self.step(left_at + waited) {
                Err(Violation::Stuck { .. }) => return Err(Violation::NotDrained { ranks: talking, waited }),
                other => other?,
            }
        }
    }

    fn undrained(&self) -> Vec<usize> {
        let talks = |rank: &usize| !self.ranks[*rank].crashed && !self.ranks[*rank].group.is_drained();
        (0..self.ranks.len()).filter(talks).collect()
    }

    fn stuck(&self) -> Violation {
        let healed = Timestamp::ZERO + self.scenario.healed_at();
        let pending = self.ranks.iter().enumerate().filter(|(_, rank)| !rank.crashed).map(|(index, rank)| {
            let ops: Vec<usize> = rank.in_flight.iter().map(|(_, op)| *op).collect();
            let due = rank.group.poll_timeout();
            format!(
                "rank {index} in ops {ops:?}, {} not submitted, next {due:?}",
                self.scenario.ops.len() - rank.next_op
            )
        });
        Violation::Stuck { waited: self.now.since(healed), pending: pending.collect::<Vec<_>>().join("; ") }
    }

    fn summary(&self) -> Summary {
        let reports = self.ranks.iter().flat_map(|rank| rank.runs.iter().flatten());
        let reports: Vec<_> =
            reports.filter_map(|run| run.finished.as_ref()?.outcome.as_ref().ok()).collect();
        let uncounted =
            reports.iter().flat_map(|report| &report.uncounted).map(|range| range.end - range.start);
        Summary {
            trace_hash: self.trace.hash(),
            network: self.network.stats(),
            op_times: (0..self.scenario.ops.len()).map(|op| self.op_time(op)).collect(),
            elems_uncounted: uncounted.sum(),
            bytes_sent: reports.iter().map(|report| report.bytes_sent).sum(),
            bytes_retransmitted: reports.iter().map(|report| report.bytes_retransmitted).sum(),
            sabotaged: self.saboteur.has_struck(),
        }
    }

    fn op_time(&self, op: usize) -> Option<Duration> {
        let runs = || self.ranks.iter().filter_map(|rank| rank.runs[op].as_ref());
        let start = runs().map(|run| run.submitted_at).min()?;
        let ends: Option<Vec<Timestamp>> = runs()
            .map(|run| run.finished.as_ref().filter(|end| end.outcome.is_ok()).map(|end| end.at))
            .collect();
        Some(ends?.into_iter().max()?.since(start))
    }

    /// Whether the ranks that take part in a collective all ended it well.
    pub(crate) fn succeeded(&self, op: usize) -> bool {
        let kind = self.scenario.ops[op].kind;
        let involved =
            |rank: usize| !matches!(kind, OpKind::SendReceive { .. }) || self.scenario.ops[op].involves(rank);
        (0..self.ranks.len()).filter(|rank| involved(*rank)).all(|rank| {
            let finished = self.ranks[rank].runs[op].as_ref().and_then(|run| run.finished.as_ref());
            finished.is_some_and(|finished| finished.outcome.is_ok())
        })
    }
}

/// A burst of work may need a few wake-ups at one time; a thousand is a loop.
const IDLE_WAKES_MAX: u32 = 1000;
