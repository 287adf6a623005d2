//! The six promises of `auto` (docs/architecture.md), each on many seeds. The checkers run on every seed of the swarm; here each
//! promise gets the surroundings in which it is hardest to keep. `canaries.rs` shows that each checker can fail.

use gradwire_collectives::{Algorithm, Dtype, Policy, ReduceOp};
use gradwire_sim::{run, Fault, Impairments, OpKind, OpPlan, Scenario, Summary};
use std::time::Duration;

const SEEDS: u64 = 60;

/// Topology, hosts, clocks, collectives and their sizes of a seed, every tolerant reduction under `auto`; nothing goes
/// wrong. The first collective is tolerant if any is allowed to be.
fn calm(seed: u64) -> Scenario {
    let mut scenario = Scenario::swarm(seed);
    scenario.network.impairments = Impairments::default();
    scenario.faults = vec![(Duration::from_secs(2), Fault::Heal)];
    for op in &mut scenario.ops {
        if op.is_tolerant() {
            op.policy = Policy::AUTO;
        }
    }
    scenario.ops[0] = tolerant(seed);
    scenario
}

/// The same with room for everything that is on its way.
fn roomy(seed: u64) -> Scenario {
    let mut scenario = calm(seed);
    scenario.network.links.iter_mut().for_each(|link| link.buffer_bytes = 1 << 30);
    if let Some(trunk) = &mut scenario.network.trunk {
        trunk.buffer_bytes = 1 << 30;
    }
    scenario.host.socket_bytes = 1 << 30;
    scenario
}

/// The calm one over a network that loses packets at random, in bursts for every third seed.
fn lossy(seed: u64) -> Scenario {
    let mut scenario = calm(seed);
    scenario.network.impairments.loss = [0.01, 0.05, 0.1][seed as usize % 3];
    scenario.network.impairments.burst = Scenario::swarm(seed).network.impairments.burst;
    scenario
}

fn tolerant(seed: u64) -> OpPlan {
    let algorithms = [Algorithm::Transpose, Algorithm::Transpose, Algorithm::Ring];
    OpPlan {
        kind: OpKind::AllReduce(algorithms[seed as usize % 3]),
        dtype: [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16][seed as usize % 4],
        elems: 20_000 + 37 * seed as usize,
        reduce: ReduceOp::Avg,
        policy: Policy::AUTO,
        in_place: seed % 2 == 0,
        priority: 0,
    }
}

/// Runs every seed and adds up what was left out.
fn all_pass(scenario_of: impl Fn(u64) -> Scenario) -> (u64, Vec<Summary>) {
    let pass = |seed| {
        let scenario = scenario_of(seed);
        let text = scenario.to_string();
        run(scenario, false).unwrap_or_else(|violation| panic!("{violation}\n{text}"))
    };
    let summaries: Vec<Summary> = (0..SEEDS).map(pass).collect();
    (summaries.iter().map(|summary| summary.elems_uncounted).sum(), summaries)
}

// test of: auto/nothing-lost-without-loss
#[test]
fn on_a_network_that_loses_nothing_nothing_is_lost_in_any_topology() {
    let (uncounted, summaries) = all_pass(roomy);
    assert!(summaries.iter().all(|summary| summary.network.lost + summary.network.overflowed == 0));
    assert_eq!(uncounted, 0);
}

// test of: auto/nothing-lost-without-loss
#[test]
fn what_is_overtaken_for_less_than_packets_are_waited_for_is_not_lost() {
    let (uncounted, summaries) = all_pass(|seed| {
        let mut scenario = roomy(seed);
        scenario.network.impairments.reorder = 0.05;
        // Packets are waited for at least 500 us once all have left.
        scenario.network.impairments.reorder_delay = Duration::from_micros(400);
        scenario
    });
    assert!(summaries.iter().all(|summary| summary.network.lost + summary.network.overflowed == 0));
    assert_eq!(uncounted, 0);
}

// test of: auto/no-needless-wait
#[test]
fn the_reduce_stage_waits_for_no_more_than_its_bound_needs() {
    let (uncounted, summaries) = all_pass(|seed| {
        let mut scenario = lossy(seed);
        // Then the watch knows when each transfer has to be closed, to the microsecond.
        scenario.host.nic_bytes = None;
        if seed % 2 == 0 {
            let most = Duration::from_millis(5 << (seed % 5));
            scenario.ops[0].policy.deadline_max = Some(most);
        }
        scenario
    });
    assert!(uncounted > 10_000, "only {uncounted} elements were left out: every loss was waited for");
    // One round of 2 to 8 ranks has 2 to 56 transfers, most of which begin with a measured round trip and bandwidth.
    let judged: u64 = summaries.iter().map(|summary| summary.deadlines_judged).sum();
    assert!(judged > 10 * SEEDS, "{judged} transfers were held against their deadline");
}

// test of: auto/repaired-in-round-trips
#[test]
fn what_is_lost_of_a_result_goes_out_again_within_a_few_round_trips() {
    let (_, summaries) = all_pass(|seed| {
        let mut scenario = lossy(seed);
        scenario.ops = vec![OpPlan { kind: OpKind::AllReduce(Algorithm::Transpose), ..tolerant(seed) }; 3];
        scenario
    });
    let judged: u64 = summaries.iter().map(|summary| summary.repairs_judged).sum();
    assert!(judged > 10 * SEEDS, "only {judged} repairs were judged");
}

// test of: auto/identical-replicas, auto/error-feedback, auto/unbiased-mean
#[test]
fn replicas_agree_and_each_value_is_in_the_mean_or_handed_back_whatever_is_lost() {
    let (uncounted, _) = all_pass(|seed| {
        let mut scenario = lossy(seed);
        scenario.network.impairments.reorder = 0.02;
        scenario.network.impairments.reorder_delay = scenario.network.delay * 2;
        scenario.network.impairments.duplicate = 0.02;
        scenario
    });
    assert!(uncounted > 10_000, "only {uncounted} elements were left out: nothing was divided by fewer");
}

// test of: auto/exact-unless-asked
#[test]
fn what_nobody_opted_in_is_exact_beside_reductions_that_lose() {
    let (uncounted, _) = all_pass(|seed| {
        let mut scenario = lossy(seed);
        let exact = OpPlan { policy: Policy::RELIABLE, ..tolerant(seed + 1) };
        let gathered = OpPlan { kind: OpKind::AllGather, elems: 3_000, in_place: false, ..exact.clone() };
        scenario.ops = vec![tolerant(seed), exact, tolerant(seed + 2), gathered];
        scenario.in_flight_max = 4;
        scenario
    });
    assert!(uncounted > 10_000, "only {uncounted} elements were left out beside the exact ones");
}
