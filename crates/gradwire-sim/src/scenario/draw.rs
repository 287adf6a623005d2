//! A scenario from a seed.
//!
//! Swarm testing: a seed switches whole features on and off before it draws their size, so that some runs are all
//! about one thing (bursts, say) and a feature cannot mask another in every run.

mod paths;
mod servers;

use super::{HostOptions, Scenario};
use crate::plan::{Fault, OpKind, OpPlan};
use crate::{Burst, Impairments, LinkOptions, NetworkOptions, Rng, Sabotage, Trunk};
use gradwire_collectives::{
    Algorithm, DeadlineRule, DivideBy, Dtype, ExchangePlan, Fill, GatherRule, Policy, ReduceOp, Rotation,
    Servers,
};
use gradwire_core::recovery::ControllerKind;
pub(super) use paths::bad_paths;
use paths::draw_paths;
use servers::draw_servers;
use std::time::Duration;

pub(super) fn swarm(seed: u64) -> Scenario {
    let root = Rng::new(seed);
    let mut rng = root.fork(1);
    let usual = rng.pick(&[1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8]);
    let mut size = root.fork(7);
    // Large groups are slow to simulate, and the edges are in the small ones.
    let world_size = if size.chance(0.04) { size.below(9..17) as usize } else { usual };
    let network = draw_network(&mut root.fork(2), world_size);
    let mut ops = draw_ops(&mut root.fork(3), world_size);
    draw_rotations(&mut root.fork(8), &mut ops);
    let late = if rng.chance(0.3) { Duration::from_millis(200) } else { Duration::from_micros(500) };
    let host = draw_host(&mut root.fork(4), &network, world_size);
    let faults = draw_faults(&mut root.fork(5), world_size, &network, host.peer_timeout);
    let (compute, clocks) = draw_ranks(&mut root.fork(6), world_size);
    let mut scenario = Scenario {
        seed,
        world_size,
        ops,
        in_flight_max: rng.below(1..5) as usize,
        start: (0..world_size).map(|_| rng.duration(late)).collect(),
        think_max: if rng.chance(0.5) { Duration::ZERO } else { Duration::from_millis(3) },
        compute,
        clocks,
        host,
        faults,
        network,
        judges_paths: false,
        sabotage: Sabotage::Nothing,
    };
    draw_paths(&mut root.fork(7), &mut scenario);
    scenario.host.exchange = draw_exchange(&mut root.fork(9));
    draw_servers(&mut root.fork(12), &mut scenario);
    draw_shared_cores(&mut root.fork(13), &mut scenario);
    scenario
}

/// 10 Mbit/s to 10 Gbit/s, round trips of 50 us to 40 ms.
fn draw_network(rng: &mut Rng, world_size: usize) -> NetworkOptions {
    let rate = rng.log_uniform(1_250_000, 1_250_000_000);
    let buffer_bytes = rng.log_uniform(24_000, 1_000_000);
    let rtt = Duration::from_micros(rng.log_uniform(50, 40_000));
    let mut network = NetworkOptions::uniform(rate, buffer_bytes, rtt);
    network.impairments = draw_impairments(rng, rtt);
    let odd_one = rng.below(0..world_size as u64) as usize;
    if rng.chance(0.15) {
        network.impaired_rank = Some(odd_one);
    }
    draw_topology(rng, world_size, odd_one, &mut network);
    network
}

/// A star of equals in half of the runs; else one slow rank, a rank that only receives slowly, hosts of all kinds, or
/// two racks with a trunk that is two to eight times too narrow.
fn draw_topology(rng: &mut Rng, world_size: usize, odd_one: usize, network: &mut NetworkOptions) {
    let usual = network.link(0);
    let with = |odd: LinkOptions| (0..world_size).map(|r| if r == odd_one { odd } else { usual }).collect();
    match rng.below(0..10) {
        0 | 1 => {
            let (up_rate, down_rate) = (usual.up_rate / 4, usual.down_rate / 4);
            network.links = with(LinkOptions { up_rate, down_rate, ..usual });
        }
        2 => network.links = with(LinkOptions { down_rate: usual.down_rate / 4, ..usual }),
        3 => {
            network.links = (0..world_size)
                .map(|_| LinkOptions {
                    up_rate: rng.log_uniform(usual.up_rate / 4, usual.up_rate),
                    down_rate: rng.log_uniform(usual.down_rate / 4, usual.down_rate),
                    delay: rng.duration(network.delay),
                    buffer_bytes: rng.log_uniform(usual.buffer_bytes / 2, usual.buffer_bytes),
                    ..usual
                })
                .collect();
        }
        4 if world_size > 1 => {
            let first_rack = rng.below(1..world_size as u64) as usize;
            let joined = first_rack.min(world_size - first_rack) as u64;
            network.trunk = Some(Trunk {
                first_rack,
                rate: (usual.up_rate * joined / rng.below(2..9)).max(RATE_MIN),
                delay: network.delay / 4,
                buffer_bytes: usual.buffer_bytes * rng.below(1..4),
            });
        }
        _ => {}
    }
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
    if rng.chance(0.1) {
        impairments.corrupt = rng.pick(&[0.001, 0.02]);
    }
    if rng.chance(0.1) {
        impairments.stray = rng.pick(&[0.01, 0.2]);
    }
    impairments
}

fn draw_host(rng: &mut Rng, network: &NetworkOptions, world_size: usize) -> HostOptions {
    let fastest = (0..world_size).map(|rank| network.link(rank).down_rate).max().unwrap_or_default();
    let bdp = (fastest as f64 * network.longest_rtt(world_size).as_secs_f64()) as u64;
    // Of a short timeout few heartbeats may be lost.
    let timeouts = if is_mild(network) { [1, 2, 5] } else { [5, 5, 5] };
    let host = HostOptions {
        datagram_bytes: rng.pick(&[1200, 1472, 1472, 1472, 8972]),
        eager_bytes: rng.pick(&[16 << 10, 64 << 10, 256 << 10]),
        ack_every: rng.pick(&[2, 10, 10]),
        ack_delay_max: rng.pick(&[Duration::from_micros(250), Duration::from_millis(1)]),
        initial_rate: rng.log_uniform(1_250_000, 125_000_000),
        socket_bytes: rng.pick(&[256 << 10, 4 << 20]).max(2 * bdp),
        nic_bytes: if rng.chance(0.5) { None } else { Some(rng.log_uniform(20_000, 1_000_000)) },
        wake_late_max: rng.pick(&[Duration::ZERO, Duration::from_micros(60), Duration::from_millis(2)]),
        peer_timeout: Duration::from_secs(rng.pick(&timeouts)),
        controller: rng.pick(&CONTROLLERS),
        paths: rng.pick(&[1, 1, 2, 4]),
        spray: gradwire_core::Spray::Adaptive,
        incast: rng.pick(&[None, None, Some(1), Some(2), Some(3)]),
        exchange: ExchangePlan::DEFAULT,
        servers: Servers::EVERY_RANK,
        shares_cores: false,
    };
    // Nor may it be shorter than the slowest link's queue: a full buffer, or the fewest packets of all paths to all ranks.
    let least_bytes = 2 * u64::from(host.paths) * host.datagram_bytes as u64 * world_size as u64;
    let queue_of = |rank| {
        let link = network.link(rank);
        let bytes = least_bytes.max(link.buffer_bytes);
        Duration::from_secs_f64(bytes as f64 / link.up_rate.min(link.down_rate).max(1) as f64)
    };
    let queue = (0..world_size).map(queue_of).max().unwrap_or_default();
    HostOptions { peer_timeout: host.peer_timeout.max((queue * 3).min(Duration::from_secs(5))), ..host }
}

/// In two of three runs early and often, since a run has a few collectives; else as in a job.
fn draw_exchange(rng: &mut Rng) -> ExchangePlan {
    if rng.chance(0.3) {
        return ExchangePlan::DEFAULT;
    }
    let every = rng.below(2..5);
    ExchangePlan { first: rng.below(0..3), every, lag: rng.below(1..every + 1) }
}

/// In half of the runs with more than four ranks they share cores, so that all may share a tolerant ring: weighted transposes of it choose
/// for themselves, or are such a ring whatever they would choose.
fn draw_shared_cores(rng: &mut Rng, scenario: &mut Scenario) {
    if scenario.world_size <= 4 || !rng.chance(0.5) {
        return;
    }
    scenario.host.shares_cores = true;
    for op in &mut scenario.ops {
        if op.kind == OpKind::AllReduce(Algorithm::WeightedTranspose) {
            let is_ring = !op.policy.gather.may_lose() && rng.chance(0.5);
            op.kind = OpKind::AllReduce(if is_ring { Algorithm::Ring } else { Algorithm::Auto });
        }
    }
}

fn is_mild(network: &NetworkOptions) -> bool {
    network.impairments.loss <= 0.05 && network.impairments.burst.is_none()
}

/// Each kind of fault on its own, at most once: two seeds in five have one, few have more.
fn draw_faults(
    rng: &mut Rng,
    world_size: usize,
    network: &NetworkOptions,
    peer_timeout: Duration,
) -> Vec<(Duration, Fault)> {
    let mut faults = vec![(Duration::from_micros(rng.log_uniform(10_000, 10_000_000)), Fault::Heal)];
    let any_rank = |rng: &mut Rng| rng.below(0..world_size as u64) as usize;
    let early = |rng: &mut Rng| Duration::from_micros(rng.log_uniform(100, 300_000));
    // One in five is longer than the silence after which a rank counts as lost.
    let length = |rng: &mut Rng| match rng.chance(0.2) {
        true => peer_timeout + rng.duration(peer_timeout * 2),
        false => Duration::from_millis(rng.log_uniform(1, 2_000)),
    };
    if rng.chance(0.12) {
        faults.push((early(rng), Fault::ClockJump(any_rank(rng), length(rng) * rng.pick(&[1, 1, 100]))));
    }
    if world_size > 1 && rng.chance(0.12) {
        faults.push((early(rng), Fault::Pause(any_rank(rng), length(rng))));
    }
    if world_size > 1 && rng.chance(0.08) {
        faults.push((early(rng), Fault::Suspend(any_rank(rng), length(rng))));
    }
    if world_size > 1 && rng.chance(0.12) {
        let a = any_rank(rng);
        let b = (a + 1 + rng.below(0..world_size as u64 - 1) as usize) % world_size;
        faults.push((early(rng), Fault::Partition(a, b, length(rng))));
    }
    // Connecting is a matter of its own: when a rank crashes, every other one has heard it.
    let all_connected = faults.len() == 1 && is_mild(network);
    if world_size > 1 && all_connected && rng.chance(0.12) {
        faults.push((early(rng) + Duration::from_millis(500), Fault::Crash(any_rank(rng))));
    }
    faults.sort_by_key(|(at, _)| *at);
    faults
}

/// Computing times and clocks of the ranks. One run in seven has a straggler; in one of three no two clocks show the
/// same, and some are about to wrap the microseconds of a time stamp on the wire (2^32).
fn draw_ranks(rng: &mut Rng, world_size: usize) -> (Vec<Duration>, Vec<Duration>) {
    let mut compute = vec![Duration::ZERO; world_size];
    if rng.chance(0.15) {
        let straggler = rng.below(0..world_size as u64) as usize;
        compute[straggler] = Duration::from_micros(rng.log_uniform(100, 30_000));
    }
    if !rng.chance(0.3) {
        return (compute, vec![Duration::ZERO]);
    }
    let wrap = Duration::from_micros(1 << 32);
    let clock = |rng: &mut Rng| match rng.chance(0.5) {
        true => wrap - rng.duration(Duration::from_millis(200)),
        false => rng.duration(wrap * 3),
    };
    (compute, (0..world_size).map(|_| clock(rng)).collect())
}

fn draw_ops(rng: &mut Rng, world_size: usize) -> Vec<OpPlan> {
    let count = rng.below(1..7);
    (0..count).map(|_| draw_op(rng, world_size)).collect()
}

/// Sizes are drawn on a logarithmic scale up to 2 MB: most are small, which is where the edges are.
fn draw_op(rng: &mut Rng, world_size: usize) -> OpPlan {
    let mut kind = draw_kind(rng, world_size);
    let tolerant = matches!(kind, OpKind::AllReduce(_)) && rng.chance(0.7);
    let reduces = matches!(kind, OpKind::AllReduce(_) | OpKind::ReduceScatter | OpKind::Reduce(_));
    let (dtype, reduce) = if tolerant { draw_tolerant(rng) } else { draw_exact(rng, reduces) };
    let row_bytes_max = match kind {
        OpKind::AllReduce(_) => 2 << 20,
        // From 64 KB for each rank but the root on they go another way.
        OpKind::Broadcast(_) | OpKind::Reduce(_) => 600_000,
        _ => 200_000,
    };
    let bytes = rng.log_uniform(1, row_bytes_max) as usize;
    let elems = if rng.chance(0.05) { 0 } else { bytes.div_ceil(dtype.bytes()) };
    let policy = if tolerant { draw_policy(rng) } else { Policy::RELIABLE };
    if kind == OpKind::AllReduce(Algorithm::Ring) && policy.gather.may_lose() {
        // A ring would hand on what it has filled in.
        kind = OpKind::AllReduce(Algorithm::Transpose);
    }
    let keeps_previous = policy.gather.fill == Fill::Previous;
    let in_place = matches!(kind, OpKind::AllReduce(_)) && rng.chance(0.5) && !keeps_previous;
    OpPlan { kind, dtype, elems, reduce, policy, in_place, priority: rng.below(0..3) as u8 }
}

fn draw_kind(rng: &mut Rng, world_size: usize) -> OpKind {
    let root = rng.below(0..world_size as u64) as usize;
    let algorithm = rng.pick(&ALGORITHMS);
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

/// Every dtype is copied; every reduction is made of every dtype that has it.
fn draw_exact(rng: &mut Rng, reduces: bool) -> (Dtype, ReduceOp) {
    let dtype = rng.pick(&Dtype::ALL);
    if !reduces {
        return (dtype, ReduceOp::Sum);
    }
    let dtype = if dtype == Dtype::Bytes { Dtype::F32 } else { dtype };
    let of_it: Vec<ReduceOp> = REDUCTIONS.into_iter().filter(|reduce| dtype.supports(*reduce)).collect();
    (dtype, rng.pick(&of_it))
}

/// `auto` in two of five, else any preset as it is or with other numbers.
fn draw_policy(rng: &mut Rng) -> Policy {
    let mut policy = if rng.chance(0.4) { Policy::AUTO } else { rng.pick(&Policy::PRESETS).1 };
    if policy.loss_bound > 0.0 && rng.chance(0.3) {
        policy = policy.bounded_by(rng.pick(&[0.01, 0.02, 0.2]));
    }
    if policy.gather.may_lose() {
        policy.gather = draw_gather(rng, policy.gather);
    }
    if let DeadlineRule::WarmUp { rounds, .. } = &mut policy.deadline {
        // A run has a few collectives, a training job thousands.
        *rounds = rng.below(1..4) as u16;
    }
    if !policy.is_exact() && rng.chance(0.15) {
        policy.deadline = DeadlineRule::Fixed(Duration::from_millis(rng.log_uniform(2, 500)));
    }
    if !policy.is_exact() && rng.chance(0.05) {
        policy.deadline_max = Some(Duration::from_millis(rng.log_uniform(5, 500)));
    }
    if !policy.is_exact() && rng.chance(0.2) {
        policy.divide_by = DivideBy::World;
    }
    assert_eq!(policy.validate(), Ok(()), "{policy:?}");
    policy
}

/// Results that may be lost, as the preset has it or exactly; what is missing is filled with anything.
fn draw_gather(rng: &mut Rng, preset: GatherRule) -> GatherRule {
    let fill = rng.pick(&[Fill::Zero, Fill::Previous, Fill::Local]);
    match rng.below(0..6) {
        0 => GatherRule::EXACT,
        1..4 if preset.loss_bound <= 0.0 => GatherRule { fill, ..preset },
        _ => GatherRule::bounded(rng.pick(&[0.01, 0.05, 0.1]), fill),
    }
}

/// One tolerant reduction in four is rotated, if its dtype can be.
fn draw_rotations(rng: &mut Rng, ops: &mut [OpPlan]) {
    for op in ops.iter_mut().filter(|op| op.is_tolerant() && op.dtype != Dtype::F64) {
        if rng.chance(0.25) && op.policy.gather.fill != Fill::Previous {
            op.policy.rotation = Rotation::On;
        }
    }
}

/// The default in most runs.
const CONTROLLERS: [ControllerKind; 4] = [
    ControllerKind::Bottleneck,
    ControllerKind::Bottleneck,
    ControllerKind::Timely,
    ControllerKind::ReceivingRate,
];
const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::Transpose,
    Algorithm::WeightedTranspose,
    Algorithm::Ring,
    Algorithm::Auto,
    Algorithm::HalvingDoubling,
    Algorithm::OneShot,
];
const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PremulSum(2.0),
];
/// 1 Mbit/s.
const RATE_MIN: u64 = 125_000;
