//! Real groups on the hosts of a [`Fabric`]: how a cluster reduces a model's gradients.
//!
//! ```text
//! connect -> warm-up steps -> measured steps -> Outcome
//! step: every rank calls for its buckets -> (Hop, Free, Wake)* -> all ranks have all results
//! ```
//!
//! The other driver, [`crate::World`], judges every byte of few ranks; this one carries no payload and measures many. Hosts take
//! no time for what they do. A step begins for all ranks together when the last one has ended the one before.

mod background;
#[cfg(feature = "cli")]
mod command;
mod flows;
mod host;
mod losses;
mod outcome;
mod plan;
mod report;

#[cfg(feature = "cli")]
pub use command::Burst;
pub use outcome::{mean, quantile, ClusterError, Cost, LayerLoss, Losses, Outcome};
pub use plan::{queues, BucketPlan, ClusterPlan, Layer, LinkTrouble, Preset};
pub use report::Report;

use crate::fabric::{Fabric, FabricEvent, FabricNews, PacketId};
use crate::{EventQueue, Rng, Tensor};
use background::Background;
use flows::{Flow, FlowLog};
use gradwire_collectives::{
    Algorithm, Collective, DeliveryReport, Dtype, GroupEvent, OpId, ReduceOp, Request, Tags, TransmitSink,
};
use gradwire_core::{ReceivedMark, Timestamp};
use host::{Host, Nic};
use losses::LossTally;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

/// What happens in a cluster.
#[derive(Clone, Copy, Debug)]
enum Event {
    Fabric(FabricEvent),
    /// A host's timer, if it is still armed so.
    Wake {
        rank: u32,
        armed: u32,
    },
    /// A rank calls for a bucket.
    Call {
        rank: u32,
        bucket: u32,
    },
    /// Somebody else's packet leaves a host.
    Background {
        place: u32,
    },
    /// A link goes bad or heals.
    Trouble {
        number: u32,
    },
}

impl From<FabricEvent> for Event {
    fn from(event: FabricEvent) -> Self {
        Self::Fabric(event)
    }
}

/// A run in progress.
#[derive(Debug)]
pub struct Cluster {
    plan: ClusterPlan,
    fabric: Fabric,
    hosts: Vec<Host>,
    /// The host of each rank, and the rank of each host.
    places: Vec<usize>,
    ranks: Vec<Option<usize>>,
    queue: EventQueue<Event>,
    now: Timestamp,
    rng: Rng,
    background: Background,
    flows: FlowLog,
    tally: LossTally,
    /// Every rank's gradients, and where all write their results: what they hold does not matter here.
    input: Tensor,
    output: Tensor,
    /// A datagram as its receiver sees it: a head, then zeros.
    datagram: Vec<u8>,
    /// When each rank called for each bucket of this step.
    called_at: Vec<Vec<Timestamp>>,
    /// Calls so far, of each rank alike.
    calls: u32,
    connected: usize,
    /// Ranks that have not ended this step.
    busy: usize,
    is_measuring: bool,
    outcome: Outcome,
    failure: Option<ClusterError>,
    events: u64,
    /// Whoever waits for the outcome does not any more.
    stop: Arc<AtomicBool>,
}

impl Cluster {
    /// Runs a plan.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn run(plan: ClusterPlan) -> Result<Outcome, ClusterError> {
        Self::run_until_told(plan, Arc::default())
    }

    /// As [`Cluster::run`], until `stop` is set.
    ///
    /// # Errors
    /// [`ClusterError`].
    pub fn run_until_told(plan: ClusterPlan, stop: Arc<AtomicBool>) -> Result<Outcome, ClusterError> {
        let mut cluster = Self::new(plan)?;
        cluster.stop = stop;
        cluster.connect()?;
        cluster.begin_troubles();
        for _ in 0..cluster.plan.warm_up {
            cluster.step()?;
        }
        cluster.is_measuring = true;
        for _ in 0..cluster.plan.steps {
            cluster.step()?;
        }
        cluster.end()
    }

    fn new(plan: ClusterPlan) -> Result<Self, ClusterError> {
        let (ranks, hosts) = (plan.ranks(), plan.topology.hosts());
        if ranks > hosts {
            return Err(ClusterError::TooManyRanks { ranks, hosts });
        }
        let places = plan.hosts();
        let mut by_host = vec![None; hosts];
        places.iter().enumerate().for_each(|(rank, place)| by_host[*place] = Some(rank));
        let now = Timestamp::ZERO;
        let host = |(rank, place): (usize, &usize)| Host::new(&plan, rank, *place, now);
        let rng = Rng::new(plan.seed);
        let bytes = plan.buckets.iter().map(BucketPlan::bytes).max().unwrap_or(0);
        let input = losses::gradients(bytes, &rng.fork(2));
        let mut cluster = Self {
            fabric: Fabric::new(plan.topology.clone(), rng.fork(1), plan.damage),
            hosts: places.iter().enumerate().map(host).collect(),
            places,
            ranks: by_host,
            queue: EventQueue::new(),
            now,
            background: Background::new(&plan, rng.fork(3)),
            rng: rng.fork(4),
            flows: FlowLog::default(),
            tally: LossTally::new(&plan, &input),
            output: Tensor::new(bytes, 0),
            input,
            datagram: vec![0; plan.host.datagram_bytes.max(2048) * 2],
            called_at: vec![vec![now; plan.buckets.len()]; ranks],
            calls: 0,
            connected: 0,
            busy: 0,
            is_measuring: false,
            outcome: Outcome::default(),
            failure: None,
            events: 0,
            stop: Arc::default(),
            plan,
        };
        cluster.background.begin(now, &mut cluster.queue);
        Ok(cluster)
    }

    fn connect(&mut self) -> Result<(), ClusterError> {
        (0..self.hosts.len()).for_each(|rank| self.drain(rank));
        let ranks = self.hosts.len();
        self.run_until(CONNECT_MAX, |cluster| cluster.connected == ranks)?;
        // Hellos and their answers are over before the first call.
        let until = self.now + SETTLE;
        self.run_until(SETTLE * 2, |cluster| cluster.queue.next_at().is_none_or(|at| at >= until))?;
        self.now = self.now.max(until);
        Ok(())
    }

    fn begin_troubles(&mut self) {
        for (number, (after, _)) in self.plan.troubles.iter().enumerate() {
            self.queue.schedule(self.now + *after, Event::Trouble { number: number as u32 });
        }
    }

    fn step(&mut self) -> Result<(), ClusterError> {
        let began = self.now;
        self.flows.take();
        self.busy = self.plan.workers;
        for rank in 0..self.plan.workers {
            self.hosts[rank].open = self.plan.buckets.len();
            let late = self.rng.duration(self.plan.jitter);
            for (bucket, plan) in self.plan.buckets.iter().enumerate() {
                let event = Event::Call { rank: rank as u32, bucket: bucket as u32 };
                self.queue.schedule(began + late + plan.ready, event);
            }
        }
        self.run_until(STEP_MAX, |cluster| cluster.busy == 0)?;
        if self.is_measuring {
            self.outcome.step_times.push(self.now - began);
            self.note_flows();
        }
        self.calls += self.plan.buckets.len() as u32;
        // What ranks still have to say about this step does not fall into the next one.
        let until = self.now + SETTLE;
        self.run_until(SETTLE * 2, |cluster| cluster.queue.next_at().is_none_or(|at| at >= until))?;
        self.now = self.now.max(until);
        Ok(())
    }

    fn note_flows(&mut self) {
        let flows = self.flows.take();
        // Calls over dedicated servers are numbered from 0; others share their numbers with exchanges of the group.
        let called_at = |flow: &Flow| match flow.op.checked_sub(self.calls & 0xFFFF) {
            Some(bucket) if self.plan.ranks() > self.plan.workers => {
                let calls = &self.called_at[flow.from as usize];
                calls.get(bucket as usize).copied().unwrap_or(flow.first_sent)
            }
            _ => flow.first_sent,
        };
        let has_two_stages = self.plan.algorithm != Algorithm::Ring;
        for (is_pull, time) in flows::times(&flows, has_two_stages, called_at) {
            self.outcome.flow_times.push(time);
            let of_stage = if is_pull { &mut self.outcome.pull_times } else { &mut self.outcome.push_times };
            of_stage.push(time);
        }
    }

    fn end(mut self) -> Result<Outcome, ClusterError> {
        self.fabric.check()?;
        let outcome = &mut self.outcome;
        outcome.modelled_step = self.plan.modelled_step();
        for times in [&mut outcome.flow_times, &mut outcome.push_times, &mut outcome.pull_times] {
            times.sort_unstable();
        }
        outcome.losses = self.tally.into_losses();
        outcome.switches = self.fabric.switches();
        outcome.cost = Cost {
            events: self.events,
            datagrams: self.fabric.injected(),
            packets_most: self.fabric.packets().most(),
            until: self.now,
        };
        Ok(self.outcome)
    }

    fn run_until(&mut self, most: Duration, is_over: impl Fn(&Self) -> bool) -> Result<(), ClusterError> {
        let limit = self.now + most;
        while !is_over(self) {
            let Some((at, event)) = self.queue.pop().filter(|(at, _)| *at <= limit) else {
                let open = self.hosts.iter().map(|host| host.open).sum();
                return Err(ClusterError::Stuck { open, after: most });
            };
            self.now = at;
            self.events += 1;
            if self.events % EVENTS_UNWATCHED == 0 && self.stop.load(Ordering::Relaxed) {
                return Err(ClusterError::Stopped);
            }
            self.handle(event);
            if let Some(failure) = self.failure.take() {
                return Err(failure);
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Fabric(event) => match self.fabric.handle(self.now, event, &mut self.queue) {
                FabricNews::Nothing => {}
                FabricNews::Arrival(packet) => self.deliver(packet),
                FabricNews::Sent { host } => self.on_sent(host),
            },
            Event::Wake { rank, armed } => {
                let rank = rank as usize;
                if self.hosts[rank].armed == armed {
                    self.hosts[rank].armed_at = None;
                    self.hosts[rank].group.handle_timeout(self.now);
                    self.drain(rank);
                }
            }
            Event::Call { rank, bucket } => self.call(rank as usize, bucket as usize),
            Event::Background { place } => {
                self.background.send(self.now, place, &mut self.fabric, &mut self.queue);
            }
            Event::Trouble { number } => {
                let (_, link) = self.plan.troubles[number as usize];
                self.fabric.set_core_link(link.leaf, link.spine, link.trouble);
            }
        }
    }

    fn deliver(&mut self, id: PacketId) {
        let packet = self.fabric.packets().get(id);
        let receiver = self.ranks[packet.to as usize].filter(|_| !packet.is_background);
        let sender = self.ranks[packet.from as usize];
        let (head, payload) = (packet.head.len(), packet.payload_bytes as usize);
        if let (Some(rank), Some(from)) = (receiver, sender) {
            self.datagram[..head].copy_from_slice(&packet.head);
            let mark = ReceivedMark { class: None, ecn: packet.ecn };
            let group = &mut self.hosts[rank].group;
            group.handle_marked_datagram(self.now, from as u32, &self.datagram[..head + payload], mark);
            self.datagram[..head].fill(0);
            self.fabric.packets().give_back(id);
            self.drain(rank);
        } else {
            self.fabric.packets().give_back(id);
        }
    }

    /// A NIC has sent a packet: whoever waits for room goes on when half of it is empty.
    fn on_sent(&mut self, place: usize) {
        let Some(rank) = self.ranks[place].filter(|rank| self.hosts[*rank].waits_for_room) else { return };
        if self.fabric.nic_bytes(place) <= self.plan.host.nic_bytes.unwrap_or(u64::MAX) / 2 {
            self.hosts[rank].waits_for_room = false;
            self.hosts[rank].group.handle_timeout(self.now);
            self.drain(rank);
        }
    }

    fn call(&mut self, rank: usize, bucket: usize) {
        let plan = &self.plan.buckets[bucket];
        self.called_at[rank][bucket] = self.now;
        let (input, output) = (self.input.view_of(plan.bytes()), self.output.view_of(plan.bytes()));
        let importance = self.plan.preset.importance;
        let request = Request {
            reduce: ReduceOp::Avg,
            input,
            output,
            policy: self.plan.preset.policy,
            priority: plan.priority,
            tags: Tags { class: plan.class, importance: importance.map(|rule| Arc::new(rule) as Arc<_>) },
            ..Request::exact(
                Collective::AllReduce { algorithm: self.plan.algorithm },
                Dtype::F32,
                STEP_MAX * 2,
            )
        };
        let id = self.hosts[rank].group.submit(self.now, request);
        self.hosts[rank].calls.push((id, bucket));
        self.drain(rank);
    }

    /// The drain contract: events, then datagrams, then the timer.
    fn drain(&mut self, rank: usize) {
        while let Some(event) = self.hosts[rank].group.poll_event() {
            match event {
                GroupEvent::Done { op, outcome } => match outcome {
                    Ok(report) => self.on_done(rank, op, &report),
                    Err(error) => self.failure = Some(ClusterError::Failed { rank, error }),
                },
                GroupEvent::Failed(error) => self.failure = Some(ClusterError::Failed { rank, error }),
                GroupEvent::Connected if !self.hosts[rank].connected => {
                    self.hosts[rank].connected = true;
                    self.connected += 1;
                }
                _ => {}
            }
        }
        self.transmit(rank);
        self.arm(rank);
    }

    fn on_done(&mut self, rank: usize, op: OpId, report: &DeliveryReport) {
        let host = &mut self.hosts[rank];
        let Some(place) = host.calls.iter().position(|(id, _)| *id == op) else { return };
        let (_, bucket) = host.calls.swap_remove(place);
        host.open -= 1;
        self.busy -= usize::from(host.open == 0);
        if self.is_measuring {
            self.outcome.bytes_sent += report.bytes_sent;
            self.outcome.bytes_retransmitted += report.bytes_retransmitted;
            self.tally.note(bucket, report);
        }
    }

    fn transmit(&mut self, rank: usize) {
        let host = &mut self.hosts[rank];
        let mut nic = Nic {
            now: self.now,
            rank: rank as u32,
            place: host.place,
            places: &self.places,
            room_bytes: self.plan.host.nic_bytes.unwrap_or(u64::MAX),
            tells_marks: self.plan.preset.importance.is_some(),
            fabric: &mut self.fabric,
            queue: &mut self.queue,
            flows: &mut self.flows,
        };
        host.group.poll_transmit(self.now, &mut nic);
        host.waits_for_room = !nic.has_room();
    }

    fn arm(&mut self, rank: usize) {
        let host = &mut self.hosts[rank];
        let due = host.group.poll_timeout().map(|timeout| timeout.at);
        // What is due but finds the NIC full leaves when the NIC has room.
        let due = due.filter(|due| !host.waits_for_room || *due > self.now);
        if due == host.armed_at {
            return;
        }
        host.armed_at = due;
        host.armed += 1;
        if let Some(due) = due {
            let event = Event::Wake { rank: rank as u32, armed: host.armed };
            self.queue.schedule(due.max(self.now), event);
        }
    }
}

/// Events between two looks at whether anybody still waits for the outcome.
const EVENTS_UNWATCHED: u64 = 1 << 14;
/// Longest that ranks take to meet.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Between two steps: more than round trips and held-back words take.
const SETTLE: Duration = Duration::from_millis(2);
/// A step that takes longer is stuck.
const STEP_MAX: Duration = Duration::from_secs(60);
