//! The same calls in virtual time over a lossy network and over real sockets, against the same formulas.

use gradwire_collectives::{Request, Tags};
use gradwire_engine::{Engine, EngineConfig, GroupHandle, OpHandle, PendingGroup};
use gradwire_sim::{expected_output, parse_list, run, NetworkOptions, OpPlan, OutputPlan, Scenario, Tensor};
use std::time::Duration;

const LIST: &str = include_str!("../../../tests/conformance/exact.txt");
/// Longest that anything may take before it counts as hung.
const PATIENCE: Duration = Duration::from_secs(30);

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
    for world_size in [1, 2, 3, 4] {
        let engines: Vec<Engine> = (0..world_size)
            .map(|_| Engine::start(EngineConfig::default()).expect("loopback has free ports"))
            .collect();
        let groups = join(&engines);
        for (op, plan) in plans(world_size).iter().enumerate() {
            check(&groups, plan, op);
        }
        // Leaving waits for the others, so that everybody leaves at once.
        let leaving = groups.into_iter().map(|group| std::thread::spawn(move || group.leave(PATIENCE)));
        for thread in leaving.collect::<Vec<_>>() {
            assert!(thread.join().expect("leave does not panic"), "a rank did not leave in good order");
        }
        engines.iter().for_each(Engine::stop);
    }
}

fn join(engines: &[Engine]) -> Vec<GroupHandle> {
    let world_size = engines.len() as u32;
    let pending: Vec<PendingGroup> = engines
        .iter()
        .zip(0..)
        .map(|(engine, rank)| engine.new_group(rank, world_size, "conformance").expect("a valid rank"))
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

/// Runs one call on every rank that takes part and compares each output.
fn check(groups: &[GroupHandle], plan: &OpPlan, op: usize) {
    let world_size = groups.len();
    let ranks = (0..world_size).filter(|rank| plan.involves(*rank));
    let calls: Vec<(usize, OpHandle, Tensor, Tensor)> = ranks
        .map(|rank| {
            let input = Tensor::from_bytes(&plan.input(op, rank, world_size).unwrap_or_default());
            let output = match plan.output(op, rank, world_size) {
                OutputPlan::Empty(bytes) => Tensor::new(bytes, 0xEE),
                OutputPlan::Holds(content) => Tensor::from_bytes(&content),
            };
            let request = Request {
                collective: plan.collective(op, rank, world_size),
                dtype: plan.dtype,
                reduce: plan.reduce,
                input: input.view(),
                output: output.view(),
                policy: plan.policy,
                residual: gradwire_collectives::View::EMPTY,
                timeout: PATIENCE,
                priority: 0,
                tags: Tags::default(),
                wants_contributions: false,
            };
            // The tensors outlive the call: they are dropped below, after every rank has ended it.
            let handle = groups[rank].submit(request, Box::new(())).expect("the engine runs");
            (rank, handle, input, output)
        })
        .collect();
    for (_, handle, _, _) in &calls {
        let outcome = handle.wait(Some(PATIENCE)).unwrap_or_else(|| panic!("op {op} {plan:?} hangs"));
        assert!(outcome.is_ok(), "op {op} {plan:?}: {outcome:?}");
    }
    for (rank, _, input, output) in &calls {
        let right = output.as_slice() == expected_output(plan, op, *rank, world_size);
        assert!(right, "op {op} {plan:?}: rank {rank} of {world_size} has a wrong result");
        assert!(input.guards_are_intact() && output.guards_are_intact(), "op {op}: memory was overrun");
    }
}
