//! The driver: hands datagrams and time to real groups, and stops the clock while it looks at them.
//!
//! ```text
//! pop event -> move the clock -> handle_datagram | handle_timeout | submit -> drain -> transmit -> arm the timer
//! ```
//!
//! A run has phases in one stretch of time. Safety: until the last fault is over everything that completes must be
//! right. Liveness: after it everything must complete within a bound. Quiescence: when all is done nobody says more
//! than heartbeats, and after every rank has left nobody says anything.
//!
//! Parts: `schedule` (what happens to a rank), `wire` (what happens to a datagram), `ending` (bounds, the last phases).

mod ending;
mod schedule;
mod wire;

use crate::oracle;
use crate::path_watch::PathWatch;
use crate::plan::Fault;
use crate::rank::{Outbox, Packet, Rank};
use crate::record::DeliveryRecord;
use crate::repair_watch::RepairWatch;
use crate::sabotage::Saboteur;
use crate::trace::Trace;
use crate::watch::Watch;
use crate::{EventQueue, Network, NetworkStats, Port, Rng, Scenario, Violation};
use ending::Hush;
use gradwire_collectives::{AgreedNetwork, DeliveryReport};
use gradwire_core::{Spray, Timestamp};
use std::time::Duration;

/// A run in progress.
#[derive(Debug)]
pub struct World {
    pub(crate) scenario: Scenario,
    pub(crate) ranks: Vec<Rank>,
    pub(crate) record: DeliveryRecord,
    pub(crate) network: Network,
    watch: Watch,
    path_watch: PathWatch,
    repair_watch: RepairWatch,
    now: Timestamp,
    queue: EventQueue<Event>,
    trace: Trace,
    rng: Rng,
    outbox: Outbox,
    saboteur: Saboteur,
    /// Ranks that have ended each collective.
    ended: Vec<usize>,
    /// How long the network still sends what a crashed rank had handed to it.
    left_behind: Duration,
    /// What may still be sent.
    hush: Hush,
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
    /// For each collective its name, with the schedule of an all-reduce; `None` as above.
    pub op_names: Vec<Option<String>>,
    /// For each rank, which one it called lost.
    pub verdicts: Vec<Option<u32>>,
    /// Contributions that tolerant reductions left out, in elements.
    pub elems_uncounted: u64,
    /// Payload bytes sent, all ranks.
    pub bytes_sent: u64,
    /// Payload bytes sent again.
    pub bytes_retransmitted: u64,
    /// Shares of gray and healed paths that were judged.
    pub path_shares_judged: u64,
    /// Tolerant transfers that were judged by the deadline that their receiver had.
    pub deadlines_judged: u64,
    /// Repairs of exact transfers that were judged by how soon they left.
    pub repairs_judged: u64,
    /// What the first rank knew about the network in the end, and with it every other one.
    pub agreed: Option<AgreedNetwork>,
    /// Whether the saboteur found something to damage.
    pub sabotaged: bool,
}

#[derive(Debug)]
enum Event {
    /// A datagram reaches a switch's port.
    AtPort { from: usize, to: usize, port: Port, packet: Packet },
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
    /// A rank goes on. `lost`: for how long its clock stood still too.
    Resume { rank: usize, lost: Duration },
    /// A partition is over.
    Repair { a: usize, b: usize },
    /// A gray path is well again.
    PathHealed { path: usize },
}

impl World {
    /// Sets up a run. `verbose` prints every event.
    #[must_use]
    pub fn new(scenario: Scenario, verbose: bool) -> Self {
        let rng = Rng::new(scenario.seed);
        let network = Network::new(scenario.network.clone(), scenario.ranks(), &rng.fork(10));
        let ranks = (0..scenario.ranks()).map(|rank| Rank::new(&scenario, rank)).collect();
        let mut world = Self {
            ended: vec![0; scenario.ops.len()],
            saboteur: Saboteur::new(scenario.sabotage),
            watch: Watch::new(scenario.host.paths, scenario.world_size),
            path_watch: PathWatch::new(
                scenario.host.paths,
                scenario.judges_paths && scenario.host.spray == Spray::Adaptive,
            ),
            repair_watch: RepairWatch::new(scenario.host.paths),
            rng: rng.fork(11),
            ranks,
            network,
            scenario,
            record: DeliveryRecord::default(),
            now: Timestamp::ZERO,
            queue: EventQueue::new(),
            trace: Trace::new(verbose),
            outbox: Outbox::default(),
            left_behind: Duration::ZERO,
            hush: Hush::Nothing,
            violation: None,
        };
        world.schedule_start();
        world
    }

    /// Runs until every rank is done, has fallen silent and has left.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn run(mut self) -> Result<Summary, Violation> {
        self.run_to_end()?;
        Ok(self.summary())
    }

    /// As [`World::run`], and the world can be looked at afterwards.
    pub(crate) fn run_to_end(&mut self) -> Result<(), Violation> {
        (0..self.ranks.len()).for_each(|rank| self.drain(rank));
        let bound = Timestamp::ZERO + self.scenario.healed_at() + self.liveness_bound();
        while !self.everybody_is_done() {
            self.step(bound)?;
        }
        self.path_watch.judge_all(self.now)?;
        oracle::check_memory(self)?;
        oracle::check_agreement(self)?;
        self.fall_silent()?;
        oracle::check_served(self)?;
        self.leave()
    }

    /// What each rank that ended collective `op` well was told about it.
    pub(crate) fn reports(&self, op: usize) -> Vec<&DeliveryReport> {
        let runs = self.ranks.iter().filter_map(|rank| rank.runs[op].as_ref());
        runs.filter_map(|run| run.finished.as_ref()?.outcome.as_ref().ok()).collect()
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
        for (index, (at, fault)) in self.scenario.faults.clone().into_iter().enumerate() {
            if at.is_zero() && matches!(fault, Fault::GrayPath(..)) {
                // Bad for the very first greeting.
                self.on_fault(fault);
            } else {
                self.queue.schedule(Timestamp::ZERO + at, Event::Fault(index));
            }
        }
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
            Event::AtPort { from, to, port, packet } => self.on_at_port(from, to, port, packet),
            Event::Received { from, to, packet } => self.on_received(from, to, packet),
            Event::Wake { rank, armed } => self.on_wake(rank, armed),
            Event::Room { rank } => {
                self.on_room(rank);
            }
            Event::Submit { rank } => {
                self.submit(rank);
                self.drain(rank);
            }
            Event::Fault(index) => self.on_fault(self.scenario.faults[index].1),
            Event::Resume { rank, lost } => self.on_resume(rank, lost),
            Event::Repair { a, b } => self.network.set_partition(a, b, false),
            Event::PathHealed { path } => self.set_path_loss(path, 0),
        }
    }

    fn on_fault(&mut self, fault: Fault) {
        self.trace.note(self.now, fault.rank().unwrap_or(0), || format!("FAULT {fault:?}"));
        match fault {
            Fault::Pause(rank, length) => self.stop(rank, length, Duration::ZERO),
            Fault::Suspend(rank, length) => self.stop(rank, length, length),
            Fault::ClockJump(rank, length) => {
                self.ranks[rank].clock.jump(length);
                // What was armed is due earlier now.
                self.ranks[rank].armed_at = None;
                self.drain(rank);
            }
            Fault::Partition(a, b, length) => {
                self.network.set_partition(a, b, true);
                self.queue.schedule(self.now + length, Event::Repair { a, b });
            }
            Fault::GrayPath(path, per_mille, length) => {
                self.set_path_loss(path, per_mille);
                self.queue.schedule(self.now + length, Event::PathHealed { path });
            }
            Fault::Crash(rank) => {
                self.ranks[rank].crashed = true;
                self.left_behind = self.network.time_until_backlog(self.now, rank, 0);
            }
            Fault::Heal => {
                self.network.heal();
                (0..usize::from(self.scenario.host.paths)).for_each(|path| self.set_path_loss(path, 0));
            }
        }
    }

    fn set_path_loss(&mut self, path: usize, per_mille: u16) {
        self.network.set_path_loss(path, f64::from(per_mille) / 1_000.0);
        let judged = self.path_watch.on_change(self.now, path, per_mille);
        judged.unwrap_or_else(|violation| self.report(violation));
    }

    fn report(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }
}
