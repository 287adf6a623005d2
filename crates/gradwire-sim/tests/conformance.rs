//! The same calls in virtual time over a lossy network and over real sockets, against the same formulas.

use gradwire_collectives::{
    Algorithm, Collective, Dtype, GatherRule, Policy, ReduceOp, Request, Rotation, View,
};
use gradwire_engine::{
    DedicatedServers, Engine, EngineConfig, EngineError, GroupHandle, OpHandle, PendingGroup,
};
use gradwire_sim::{
    expected_output, parse_list, run, NetworkOptions, OpKind, OpPlan, OutputPlan, Scenario, Tensor,
};
use std::collections::VecDeque;
use std::time::Duration;

const LIST: &str = include_str!("../../../tests/conformance/exact.txt");
/// Longest that anything may take before it counts as hung: 16 ranks in one process, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// Calls in flight over sockets.
const IN_FLIGHT: usize = 8;

fn plans(world_size: usize) -> Vec<OpPlan> {
    parse_list(LIST, world_size).unwrap_or_else(|error| panic!("tests/conformance/exact.txt: {error}"))
}

#[test]
fn the_simulator_gets_every_call_right_at_every_loss() {
    for (seed, world_size) in [1, 2, 3, 4, 7, 8, 16].into_iter().enumerate() {
        for loss in [0.0, 0.01, 0.1] {
            let mut network = NetworkOptions::uniform(125_000_000, 500_000, Duration::from_micros(200));
            network.impairments.loss = loss;
            let mut scenario = Scenario::quiet(seed as u64, world_size, network, plans(world_size));
            scenario.in_flight_max = 3;
            scenario.faults[0].0 = Duration::from_secs(30);
            let result = run(scenario, false);
            assert!(result.is_ok(), "{world_size} ranks, {loss} loss: {result:?}");
        }
    }
}

#[test]
fn real_sockets_get_every_call_right() {
    for world_size in 1..=16 {
        let engines = engines(world_size);
        let groups = join(&engines, |engine, rank| engine.new_group(rank, world_size, "conformance"));
        check(&groups, &plans(world_size as usize));
        leave(groups);
        engines.iter().for_each(Engine::stop);
    }
}

// test of: ltp/dedicated-servers
#[test]
fn dedicated_servers_sum_everything_that_workers_do_over_real_sockets() {
    for (workers, count) in [(2, 1), (5, 3), (8, 2)] {
        let engines = engines(workers + count);
        let servers = DedicatedServers { count, buffer_bytes: 1 << 30 };
        let mut groups =
            join(&engines, |engine, rank| engine.new_served_group(rank, workers, servers, "conformance"));
        let servers = groups.split_off(workers as usize);
        let mut plans = plans(workers as usize);
        for plan in plans.iter_mut().filter(|plan| matches!(plan.kind, OpKind::AllReduce(_))) {
            plan.kind = OpKind::AllReduce(Algorithm::ParameterServer);
        }
        check(&groups, &plans);
        leave(groups);
        for server in servers {
            assert_eq!(server.wait_for_workers(PATIENCE).expect("the engine runs"), Some(Ok(())));
        }
        engines.iter().for_each(Engine::stop);
    }
}

/// All ranks have the same values, so the mean of those that count is these, whatever a busy machine loses.
#[test]
fn every_preset_reduces_over_real_sockets_in_every_schedule_rotated_or_not() {
    // Every remainder of halving and doubling up to eight; beyond it an odd one and the two powers' neighbours.
    for world_size in (2..=8).chain([11, 13, 16]) {
        let engines = engines(world_size);
        let groups = join(&engines, |engine, rank| engine.new_group(rank, world_size, "presets"));
        let mut in_flight: VecDeque<Mean> = VecDeque::new();
        for call in means() {
            if in_flight.len() == IN_FLIGHT {
                in_flight.pop_front().into_iter().for_each(Mean::check);
            }
            in_flight.push_back(Mean::start(&groups, call));
        }
        in_flight.into_iter().for_each(Mean::check);
        leave(groups);
        engines.iter().for_each(Engine::stop);
    }
}

/// Policy, schedule, dtype and elements.
type Call = (Policy, Algorithm, Dtype, usize);

fn means() -> Vec<Call> {
    let mut calls = Vec::new();
    let schedules = [
        Algorithm::Transpose,
        Algorithm::Ring,
        Algorithm::ParameterServer,
        Algorithm::HalvingDoubling,
        Algorithm::OneShot,
    ];
    // Rotated with padding and, the large one, where they are with a rest mixed in. Five, three and eight have nothing in common.
    let sizes = [1, 5_003, 30_011, (1 << 17) + 5_003, 2_048].into_iter().cycle();
    let dtypes = [Dtype::F32, Dtype::Bf16, Dtype::F16].into_iter().cycle();
    let mut rest = sizes.zip(dtypes);
    for (_, preset) in Policy::PRESETS {
        for algorithm in schedules {
            for rotation in [Rotation::Off, Rotation::On] {
                // What is lost on its way back is filled with something else.
                let policy = Policy { gather: GatherRule::EXACT, rotation, ..preset };
                let (elems, dtype) = rest.next().unwrap_or((1, Dtype::F32));
                calls.push((policy, algorithm, dtype, elems));
            }
        }
    }
    calls
}

/// A mean in flight, with the tensor of each rank.
struct Mean {
    call: Call,
    ranks: Vec<(OpHandle, Tensor)>,
}

impl Mean {
    fn start(groups: &[GroupHandle], call: Call) -> Self {
        let (policy, algorithm, dtype, elems) = call;
        let bytes: Vec<u8> = (0..elems).flat_map(|index| encode(dtype, value(index))).collect();
        let submit = |group: &GroupHandle| {
            let tensor = Tensor::from_bytes(&bytes);
            let (input, output, residual) = (tensor.view(), tensor.view(), View::EMPTY);
            let exact = Request::exact(Collective::AllReduce { algorithm }, dtype, PATIENCE);
            let request = Request { reduce: ReduceOp::Avg, input, output, residual, policy, ..exact };
            (group.submit(request, Box::new(())).expect("the engine runs"), tensor)
        };
        Self { call, ranks: groups.iter().map(submit).collect() }
    }

    /// Rotated, values are rounded when they are sent, when they are divided and when they are turned back, each time by a unit at most, and
    /// in float32 at each step: none is off by more than the norm of its block times that.
    fn check(self) {
        let Self { call: call @ (policy, _, dtype, elems), ranks } = self;
        let unit = match dtype {
            Dtype::F32 => 64.0 * 2_f64.powi(-24),
            Dtype::F16 => 3.0 * 2_f64.powi(-11),
            _ => 3.0 * 2_f64.powi(-8),
        };
        let rounds = policy.rotation == Rotation::On && elems >= 2_048;
        // The mean square of the values is 6.
        let square_max = if rounds { unit * unit * 6.0 } else { 0.0 };
        let most = if rounds { unit * (6.0 * 4_096.0_f64).sqrt() } else { 0.0 };
        for (rank, (handle, tensor)) in ranks.iter().enumerate() {
            let outcome = handle.wait(Some(PATIENCE)).unwrap_or_else(|| panic!("{call:?} hangs"));
            assert!(outcome.is_ok(), "{call:?}: {outcome:?}");
            let off: Vec<f64> = tensor
                .as_slice()
                .chunks_exact(dtype.bytes())
                .enumerate()
                .map(|(index, bytes)| decode(dtype, bytes) - f64::from(value(index)))
                .collect();
            assert_eq!(off.len(), elems);
            let square = off.iter().map(|off| off * off).sum::<f64>() / elems as f64;
            let is_right = square <= square_max && off.iter().all(|off| off.abs() <= most);
            assert!(is_right, "{call:?} on rank {rank}: off by {} on average", square.sqrt());
            assert!(tensor.guards_are_intact(), "{call:?}: memory was overrun");
        }
    }
}

/// A whole number that every float has.
fn value(index: usize) -> f32 {
    (index % 5) as f32
}

fn encode(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => value.to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        _ => half::bf16::from_f32(value).to_le_bytes().to_vec(),
    }
}

fn decode(dtype: Dtype, bytes: &[u8]) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(f32::from_le_bytes(bytes.try_into().expect("four bytes"))),
        Dtype::F16 => half::f16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
        _ => half::bf16::from_le_bytes(bytes.try_into().expect("two bytes")).to_f64(),
    }
}

fn engines(count: u32) -> Vec<Engine> {
    // Up to sixteen of them run in this process: a busy machine may not let one run for long, and no peer is lost here.
    let config = EngineConfig { peer_timeout: PATIENCE / 2, ..EngineConfig::default() };
    (0..count).map(|_| Engine::start(config.clone()).expect("loopback has free ports")).collect()
}

fn join(
    engines: &[Engine],
    new_group: impl Fn(&Engine, u32) -> Result<PendingGroup, EngineError>,
) -> Vec<GroupHandle> {
    let pending: Vec<PendingGroup> = engines
        .iter()
        .zip(0..)
        .map(|(engine, rank)| new_group(engine, rank).expect("a valid rank"))
        .collect();
    let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let threads: Vec<_> = pending
        .into_iter()
        .map(|group| {
            let records = records.clone();
            std::thread::spawn(move || group.join(&records, Some(PATIENCE)))
        })
        .collect();
    let joined = threads.into_iter().map(|thread| thread.join().expect("join does not panic"));
    joined.map(|group| group.expect("every rank is there")).collect()
}

/// Leaving waits for the others, so that everybody leaves at once.
fn leave(groups: Vec<GroupHandle>) {
    let leaving = groups.into_iter().map(|group| std::thread::spawn(move || group.leave(PATIENCE)));
    for thread in leaving.collect::<Vec<_>>() {
        assert!(thread.join().expect("leave does not panic"), "a rank did not leave in good order");
    }
}

/// Runs every call on the ranks that take part, several in flight, and compares each output.
fn check(groups: &[GroupHandle], plans: &[OpPlan]) {
    let mut in_flight: VecDeque<Running<'_>> = VecDeque::new();
    for (op, plan) in plans.iter().enumerate() {
        if in_flight.len() == IN_FLIGHT {
            in_flight.pop_front().into_iter().for_each(|call| call.check(groups.len()));
        }
        in_flight.push_back(Running::start(groups, plan, op));
    }
    in_flight.into_iter().for_each(|call| call.check(groups.len()));
}

/// One call in flight. The tensors outlive it: they are dropped after every rank has ended it.
struct Running<'p> {
    plan: &'p OpPlan,
    op: usize,
    ranks: Vec<(usize, OpHandle, Tensor, Tensor)>,
}

impl<'p> Running<'p> {
    fn start(groups: &[GroupHandle], plan: &'p OpPlan, op: usize) -> Self {
        let ranks = (0..groups.len()).filter(|rank| plan.involves(*rank));
        let ranks = ranks.map(|rank| submit(groups, plan, op, rank)).collect();
        Self { plan, op, ranks }
    }

    fn check(self, world_size: usize) {
        let Self { plan, op, ranks } = self;
        for (_, handle, _, _) in &ranks {
            let outcome = handle.wait(Some(PATIENCE)).unwrap_or_else(|| panic!("op {op} {plan:?} hangs"));
            assert!(outcome.is_ok(), "op {op} {plan:?}: {outcome:?}");
        }
        for (rank, _, input, output) in &ranks {
            let right = output.as_slice() == expected_output(plan, op, *rank, world_size);
            assert!(right, "op {op} {plan:?}: rank {rank} of {world_size} has a wrong result");
            assert!(input.guards_are_intact() && output.guards_are_intact(), "op {op}: memory was overrun");
        }
    }
}

fn submit(
    groups: &[GroupHandle],
    plan: &OpPlan,
    op: usize,
    rank: usize,
) -> (usize, OpHandle, Tensor, Tensor) {
    let world_size = groups.len();
    let input = Tensor::from_bytes(&plan.input(op, rank, world_size).unwrap_or_default());
    let output = match plan.output(op, rank, world_size) {
        OutputPlan::Empty(bytes) => Tensor::new(bytes, 0xEE),
        OutputPlan::Holds(content) => Tensor::from_bytes(&content),
    };
    let request = Request {
        reduce: plan.reduce,
        input: input.view(),
        output: output.view(),
        policy: plan.policy,
        ..Request::exact(plan.collective(op, rank, world_size), plan.dtype, PATIENCE)
    };
    let handle = groups[rank].submit(request, Box::new(())).expect("the engine runs");
    (rank, handle, input, output)
}
