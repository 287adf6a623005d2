//! Everything that one run is made of, drawn from one seed.
//!
//! Swarm testing: a seed switches whole features on and off before it draws their size, so that some runs are all
//! about one thing (bursts, say) and a feature cannot mask another in every run.

use crate::plan::{Fault, OpKind, OpPlan};
use crate::{Burst, Impairments, LinkOptions, NetworkOptions, Rng};

use gradwire_collectives::{Algorithm, DeadlineRule, Dtype, Policy, ReduceOp};
use gradwire_core::recovery::ControllerKind;
use std::fmt;
use std::time::Duration;

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Seed of every chance in the run.
    pub seed: u64,
    /// Ranks.
    pub world_size: usize,
    /// Collectives, in the order of submission.
    pub ops: Vec<OpPlan>,
    /// Collectives of one rank in flight at once.
    pub in_flight_max: usize,
    /// When each rank submits its first collective.
    pub start: Vec<Duration>,
    /// Most time between the end of one collective and the submission of the next.
    pub think_max: Duration,
    /// The network.
    pub network: NetworkOptions,
    /// Faults by time. The last one is [`Fault::Heal`].
    pub faults: Vec<(Duration, Fault)>,
    /// Settings of the ranks.
    pub host: HostOptions,
    /// Deliberate damage that the checkers must find.
    pub sabotage: Sabotage,
}

/// Settings of the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOptions {
    /// UDP payload bytes of a full datagram.
    pub datagram_bytes: usize,
    /// Eager window.
    pub eager_bytes: u64,
    /// Data packets for each acknowledgement.
    pub ack_every: u32,
    /// Longest that an acknowledgement is held back.
    pub ack_delay_max: Duration,
    /// Rate controller of every connection.
    pub controller: ControllerKind,
    /// Rate before anything was measured, bytes per second.
    pub initial_rate: u64,
    /// Socket buffer of a rank.
    pub socket_bytes: u64,
    /// Bytes that a rank may hand to its NIC ahead of time; `None`: any number.
    pub nic_bytes: Option<u64>,
    /// Most lateness of a timer.
    pub wake_late_max: Duration,
    /// Silence after which a peer is lost.
    pub peer_timeout: Duration,
}

/// Deliberate damage. The canary tests prove that each kind is found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sabotage {
    /// None.
    #[default]
    Nothing,
    /// One bit of one payload flips past every check.
    FlipPayloadBit,
    /// One packet's payload is swapped for that of the same transfer's previous packet.
    SwapPayload,
    /// One rank's residual of uncounted values is wiped.
    ForgetResidual,
    /// One rank's result differs from the others' in its last element.
    DivergeReplica,
    /// No timer ever fires.
    StopTimers,
}

impl Scenario {
    /// A run in which nothing goes wrong: `world_size` equal links.
    #[must_use]
    pub fn quiet(seed: u64, world_size: usize, network: NetworkOptions, ops: Vec<OpPlan>) -> Self {
        Self {
            seed,
            world_size,
            ops,
            in_flight_max: 1,
            start: vec![Duration::ZERO; world_size],
            think_max: Duration::ZERO,
            network,
            faults: vec![(Duration::ZERO, Fault::Heal)],
            host: HostOptions::default(),
            sabotage: Sabotage::Nothing,
        }
    }

    /// The run of a seed.
    #[must_use]
    pub fn swarm(seed: u64) -> Self {
        let root = Rng::new(seed);
        let mut rng = root.fork(1);
        let world_size = rng.pick(&[1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]);
        let network = draw_network(&mut root.fork(2), world_size);
        let ops = draw_ops(&mut root.fork(3), world_size);
        let late = if rng.chance(0.3) { Duration::from_millis(200) } else { Duration::from_micros(500) };
        Self {
            seed,
            world_size,
            ops,
            in_flight_max: rng.below(1..5) as usize,
            start: (0..world_size).map(|_| rng.duration(late)).collect(),
            think_max: if rng.chance(0.5) { Duration::ZERO } else { Duration::from_millis(3) },
            host: draw_host(&mut root.fork(4), &network),
            faults: draw_faults(&mut root.fork(5), world_size),
            network,
            sabotage: Sabotage::Nothing,
        }
    }

    /// Whether the network gives no reason to lose anything: then nothing may be lost (overflowing buffers are
    /// counted by the network and looked at afterwards).
    #[must_use]
    pub fn is_undisturbed(&self) -> bool {
        let only_heals = self.faults.iter().all(|(_, fault)| *fault == Fault::Heal);
        self.network.impairments.are_harmless() && only_heals
    }

    /// The rank that crashes, if one does.
    #[must_use]
    pub fn crashes(&self) -> Option<usize> {
        self.faults.iter().find_map(|(_, fault)| match fault {
            Fault::Crash(rank) => Some(*rank),
            _ => None,
        })
    }

    /// When the faults are over.
    #[must_use]
    pub fn healed_at(&self) -> Duration {
        let end = |(at, fault): &(Duration, Fault)| match fault {
            Fault::Pause(_, length) | Fault::Partition(_, _, length) => *at + *length,
            Fault::Crash(_) | Fault::Heal => *at,
        };
        self.faults.iter().map(end).max().unwrap_or_default()
    }

    /// Time that the payload of all collectives takes on the slowest link when each rank sends all of it twice:
    /// the yardstick of the liveness bound.
    #[must_use]
    pub fn ideal_time(&self) -> Duration {
        let rate = (0..self.world_size).map(|rank| self.network.link(rank).rate).min().unwrap_or(1);
        let rows = |op: &OpPlan| match op.kind {
            OpKind::AllReduce(_) | OpKind::SendReceive { .. } => 2,
            _ => 2 * self.world_size,
        };
        let bytes: usize = self.ops.iter().map(|op| op.bytes() * rows(op)).sum();
        Duration::from_secs_f64(bytes as f64 / rate as f64) + self.network.delay * 2 * self.ops.len() as u32
    }
}

impl Default for HostOptions {
    /// The engine's defaults.
    fn default() -> Self {
        Self {
            datagram_bytes: 1472,
            eager_bytes: 256 << 10,
            ack_every: 10,
            ack_delay_max: Duration::from_micros(250),
            controller: ControllerKind::default(),
            initial_rate: 125_000_000,
            socket_bytes: 4 << 20,
            nic_bytes: None,
            wake_late_max: Duration::ZERO,
            peer_timeout: Duration::from_secs(5),
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} · {} ranks · {} in flight", self.seed, self.world_size, self.in_flight_max)?;
        writeln!(f, "  start {:?} · think up to {:?}", self.start, self.think_max)?;
        writeln!(f, "  network {:?}", self.network)?;
        writeln!(f, "  host {:?}", self.host)?;
        for (at, fault) in &self.faults {
            writeln!(f, "  at {at:?}: {fault:?}")?;
        }
        for (index, op) in self.ops.iter().enumerate() {
            writeln!(f, "  op {index}: {op:?}")?;
        }
        if self.sabotage != Sabotage::Nothing {
            writeln!(f, "  SABOTAGE {:?}", self.sabotage)?;
        }
        Ok(())
    }
}

/// 10 Mbit/s to 10 Gbit/s, round trips of 50 us to 40 ms; a fifth of the runs has one slow rank.
fn draw_network(rng: &mut Rng, world_size: usize) -> NetworkOptions {
    let rate = rng.log_uniform(1_250_000, 1_250_000_000);
    let buffer_bytes = rng.log_uniform(24_000, 1_000_000);
    let rtt = Duration::from_micros(rng.log_uniform(50, 40_000));
    let mut network = NetworkOptions::uniform(rate, buffer_bytes, rtt);
    network.impairments = draw_impairments(rng, rtt);
    if rng.chance(0.2) {
        let straggler = rng.below(0..world_size as u64) as usize;
        let slow = LinkOptions { rate: rate / 4, buffer_bytes };
        network.links =
            (0..world_size).map(|rank| if rank == straggler { slow } else { network.link(0) }).collect();
    }
    network
}

fn draw_impairments(rng: &mut Rng, rtt: Duration) -> Impairments {
    let mut impairments = Impairments::default();
    if rng.chance(0.6) {
        impairments.loss = rng.pick(&[0.001, 0.01, 0.02, 0.05, 0.1, 0.2]);
    }
    if rng.chance(0.3) {
        let mean_length = rng.log_uniform(2, 60) as f64;
        impairments.burst = Some(Burst {
            enter: 0.002,
            leave: 1.0 / mean_length,
            loss: 0.9,
            lasts_max: Duration::from_millis(100),
        });
    }
    if rng.chance(0.3) {
        impairments.reorder = rng.pick(&[0.001, 0.01, 0.1]);
        impairments.reorder_delay = rng.duration(rtt * 2) + Duration::from_micros(10);
    }
    if rng.chance(0.3) {
        impairments.jitter = rng.duration(rtt);
    }
    if rng.chance(0.2) {
        impairments.duplicate = rng.pick(&[0.001, 0.05]);
    }
    impairments
}

fn draw_host(rng: &mut Rng, network: &NetworkOptions) -> HostOptions {
    let bdp = (network.link(0).rate as f64 * network.delay.as_secs_f64() * 2.0) as u64;
    HostOptions {
        datagram_bytes: rng.pick(&[1200, 1472, 1472, 1472, 8972]),
        eager_bytes: rng.pick(&[16 << 10, 64 << 10, 256 << 10]),
        ack_every: rng.pick(&[2, 10, 10]),
        ack_delay_max: rng.pick(&[Duration::from_micros(250), Duration::from_millis(1)]),
        initial_rate: rng.log_uniform(1_250_000, 125_000_000),
        socket_bytes: rng.pick(&[256 << 10, 4 << 20]).max(2 * bdp),
        nic_bytes: if rng.chance(0.5) { None } else { Some(rng.log_uniform(20_000, 1_000_000)) },
        wake_late_max: rng.pick(&[Duration::ZERO, Duration::from_micros(60), Duration::from_millis(2)]),
        ..HostOptions::default()
    }
}

fn draw_faults(rng: &mut Rng, world_size: usize) -> Vec<(Duration, Fault)> {
    let mut faults = Vec::new();
    let rank = rng.below(0..world_size as u64) as usize;
    let at = Duration::from_micros(rng.log_uniform(100, 300_000));
    if world_size > 1 && rng.chance(0.3) {
        let other = (rank + 1 + rng.below(0..world_size as u64 - 1) as usize) % world_size;
        let length = Duration::from_millis(rng.log_uniform(1, 2_000));
        faults.push(match rng.below(0..5) {
            0 | 1 => (at, Fault::Pause(rank, length)),
            2 | 3 => (at, Fault::Partition(rank, other, length)),
            // Connecting is a matter of its own: by now every rank has been heard.
            _ => (at + Duration::from_millis(500), Fault::Crash(rank)),
        });
    }
    faults.push((Duration::from_micros(rng.log_uniform(10_000, 10_000_000)), Fault::Heal));
    faults.sort_by_key(|(at, _)| *at);
    faults
}

fn draw_ops(rng: &mut Rng, world_size: usize) -> Vec<OpPlan> {
    let count = rng.below(1..7);
    (0..count).map(|_| draw_op(rng, world_size)).collect()
}

/// Sizes are drawn on a logarithmic scale up to 2 MB: most are small, which is where the edges are.
fn draw_op(rng: &mut Rng, world_size: usize) -> OpPlan {
    let kind = draw_kind(rng, world_size);
    let tolerant = matches!(kind, OpKind::AllReduce(_)) && rng.chance(0.7);
    let reduces = matches!(kind, OpKind::AllReduce(_) | OpKind::ReduceScatter | OpKind::Reduce(_));
    let (dtype, reduce) = if tolerant { draw_tolerant(rng) } else { draw_exact(rng, reduces) };
    let row_bytes_max = if matches!(kind, OpKind::AllReduce(_)) { 2 << 20 } else { 200_000 };
    let bytes = rng.log_uniform(1, row_bytes_max) as usize;
    let elems = if rng.chance(0.05) { 0 } else { bytes.div_ceil(dtype.bytes()) };
    let policy = if tolerant { draw_policy(rng) } else { Policy::RELIABLE };
    let in_place = matches!(kind, OpKind::AllReduce(_)) && rng.chance(0.5);
    OpPlan { kind, dtype, elems, reduce, policy, in_place, priority: rng.below(0..3) as u8 }
}

fn draw_kind(rng: &mut Rng, world_size: usize) -> OpKind {
    let root = rng.below(0..world_size as u64) as usize;
    let algorithm = rng.pick(&[Algorithm::Transpose, Algorithm::Transpose, Algorithm::Ring, Algorithm::Auto]);
    if rng.chance(0.7) {
        return OpKind::AllReduce(algorithm);
    }
    match rng.below(0..9) {
        0 => OpKind::Broadcast(root),
        1 => OpKind::AllGather,
        2 => OpKind::ReduceScatter,
        3 => OpKind::Reduce(root),
        4 => OpKind::Gather(root),
        5 => OpKind::Scatter(root),
        6 => OpKind::AllToAll,
        7 if world_size > 1 => {
            let to = (root + 1 + rng.below(0..world_size as u64 - 1) as usize) % world_size;
            OpKind::SendReceive { from: root, to, any_source: rng.chance(0.5) }
        }
        _ => OpKind::Barrier,
    }
}

fn draw_tolerant(rng: &mut Rng) -> (Dtype, ReduceOp) {
    let dtype = rng.pick(&[Dtype::F32, Dtype::F32, Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16]);
    (dtype, if rng.chance(0.8) { ReduceOp::Avg } else { ReduceOp::Sum })
}

fn draw_exact(rng: &mut Rng, reduces: bool) -> (Dtype, ReduceOp) {
    let floats = [Dtype::F32, Dtype::F64, Dtype::F16, Dtype::Bf16];
    let integers = [Dtype::U8, Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64];
    if !reduces {
        return (rng.pick(&[Dtype::Bytes, Dtype::F32, Dtype::I64, Dtype::Bf16]), ReduceOp::Sum);
    }
    if rng.chance(0.6) {
        (rng.pick(&floats), rng.pick(&[ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max]))
    } else {
        let bitwise = [ReduceOp::BitAnd, ReduceOp::BitOr, ReduceOp::BitXor];
        let reduce =
            if rng.chance(0.3) { rng.pick(&bitwise) } else { rng.pick(&[ReduceOp::Sum, ReduceOp::Max]) };
        (rng.pick(&integers), reduce)
    }
}

fn draw_policy(rng: &mut Rng) -> Policy {
    let mut policy = rng.pick(&[Policy::AUTO, Policy::AUTO, Policy::MLT]);
    if rng.chance(0.3) {
        policy.loss_bound = rng.pick(&[0.01, 0.02, 0.2]);
        policy.floor = policy.floor.min(1.0 - policy.loss_bound);
    }
    if rng.chance(0.1) {
        policy.deadline = DeadlineRule::Fixed(Duration::from_millis(rng.log_uniform(2, 500)));
    }
    policy
}
