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
mod circle;
#[cfg(feature = "cli")]
mod command;
mod content;
mod flows;
mod host;
mod losses;
mod outcome;
mod plan;
mod report;
mod stages;

pub use circle::Hierarchy;
#[cfg(feature = "cli")]
pub use command::Burst;
pub use outcome::{mean, quantile, ClusterError, Cost, LayerLoss, Losses, Outcome};
pub use plan::{queues, BucketPlan, ClusterPlan, Layer, LinkTrouble};
pub use report::Report;

use crate::fabric::{Fabric, FabricEvent, FabricNews, PacketId};
use crate::{EventQueue, Rng};
use background::Background;
use content::Content;
use flows::{Flow, FlowLog};
use gradwire_collectives::{Algorithm, GroupEvent, TransmitSink};
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
    /// A node's timer, if it is still armed so.
    Wake {
        node: u32,
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
    /// Of each node: a rank's end of one process group.
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
    memory: Content,
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
        plan.validate()?;
        let (ranks, hosts) = (plan.ranks(), plan.topology.hosts());
        let places = plan.hosts();
        let mut by_host = vec![None; hosts];
        places.iter().enumerate().for_each(|(rank, place)| by_host[*place] = Some(rank));
        let now = Timestamp::ZERO;
        let host = |node: usize| Host::new(&plan, node, places[node % ranks], now);
        let rng = Rng::new(plan.seed);
        let memory = Content::new(&plan, &rng.fork(2));
        let mut cluster = Self {
            fabric: Fabric::new(plan.topology.clone(), rng.fork(1), plan.damage),
            hosts: (0..plan.levels() * ranks).map(host).collect(),
            places,
            ranks: by_host,
            queue: EventQueue::new(),
            now,
            background: Background::new(&plan, rng.fork(3)),
            rng: rng.fork(4),
            flows: FlowLog::default(),
            tally: LossTally::new(&plan, memory.gradients()),
            memory,
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
        (0..self.hosts.len()).for_each(|node| self.drain(node));
        let nodes = self.hosts.len();
        self.run_until(CONNECT_MAX, |cluster| cluster.connected == nodes)?;
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
        self.memory.forget_results();
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
        self.memory.check()?;
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
        let has_two_stages = self.plan.algorithm != Algorithm::Ring && self.plan.hierarchy.is_none();
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
            Event::Wake { node, armed } => {
                let node = node as usize;
                if self.hosts[node].armed == armed {
                    self.hosts[node].armed_at = None;
                    self.hosts[node].group.handle_timeout(self.now);
                    self.drain(node);
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
        let level = usize::from(packet.group);
        if let (Some(rank), Some(from)) = (receiver, sender) {
            self.datagram[..head].copy_from_slice(&packet.head);
            let mark = ReceivedMark { class: None, ecn: packet.ecn };
            let node = level * self.places.len() + rank;
            let Host { group, circle, .. } = &mut self.hosts[node];
            let from = circle.number_of(from) as u32;
            group.handle_marked_datagram(self.now, from, &self.datagram[..head + payload], mark);
            self.datagram[..head].fill(0);
            self.fabric.packets().give_back(id);
            self.drain(node);
        } else {
            self.fabric.packets().give_back(id);
        }
    }

    /// A NIC has sent a packet: whoever waits for room goes on when half of it is empty.
    fn on_sent(&mut self, place: usize) {
        let Some(rank) = self.ranks[place] else { return };
        for node in (rank..self.hosts.len()).step_by(self.places.len()) {
            let has_room = self.fabric.nic_bytes(place) <= self.plan.host.nic_bytes.unwrap_or(u64::MAX) / 2;
            if has_room && self.hosts[node].waits_for_room {
                self.hosts[node].waits_for_room = false;
                self.hosts[node].group.handle_timeout(self.now);
                self.drain(node);
            }
        }
    }

    /// The drain contract: events, then datagrams, then the timer.
    fn drain(&mut self, node: usize) {
        let ranks = self.places.len();
        while let Some(event) = self.hosts[node].group.poll_event() {
            match event {
                GroupEvent::Done { op, outcome } => match outcome {
                    Ok(report) => self.on_done(node, op, &report),
                    Err(error) => self.failure = Some(ClusterError::Failed { rank: node % ranks, error }),
                },
                GroupEvent::Failed(error) => {
                    self.failure = Some(ClusterError::Failed { rank: node % ranks, error })
                }
                GroupEvent::Connected if !self.hosts[node].connected => {
                    self.hosts[node].connected = true;
                    self.connected += 1;
                }
                _ => {}
            }
        }
        self.transmit(node);
        self.arm(node);
    }

    fn transmit(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        let mut nic = Nic {
            now: self.now,
            node: node as u32,
            circle: host.circle,
            place: host.place,
            places: &self.places,
            room_bytes: self.plan.host.nic_bytes.unwrap_or(u64::MAX),
            carried_bytes: if self.plan.is_checked { usize::MAX } else { CARRIED_BYTES },
            tells_marks: self.plan.preset.importance.is_some(),
            fabric: &mut self.fabric,
            queue: &mut self.queue,
            flows: &mut self.flows,
        };
        // A full NIC takes nothing, and asking all peers that wait for it, after each datagram that comes, is most of what a large group costs.
        if nic.has_room() {
            host.group.poll_transmit(self.now, &mut nic);
        }
        host.waits_for_room = !nic.has_room();
    }

    fn arm(&mut self, node: usize) {
        let host = &mut self.hosts[node];
        let due = host.group.poll_timeout().map(|timeout| timeout.at);
        // What is due but finds the NIC full leaves when the NIC has room.
        let due = due.filter(|due| !host.waits_for_room || *due > self.now);
        if due == host.armed_at {
            return;
        }
        host.armed_at = due;
        host.armed += 1;
        if let Some(due) = due {
            let event = Event::Wake { node: node as u32, armed: host.armed };
            self.queue.schedule(due.max(self.now), event);
        }
    }
}

/// Payloads that are carried: what ranks tell each other in transfers (settings of a call, what they measured), which is short.
const CARRIED_BYTES: usize = 512;
/// Events between two looks at whether anybody still waits for the outcome.
const EVENTS_UNWATCHED: u64 = 1 << 14;
/// Longest that ranks take to meet.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Between two steps: more than round trips and held-back words take.
const SETTLE: Duration = Duration::from_millis(2);
/// A step that takes longer is stuck.
const STEP_MAX: Duration = Duration::from_secs(60);
