//! Several paths between the ranks, alike, unlike, gray and dead.

use gradwire_collectives::{Algorithm, Policy};
use gradwire_core::Spray;
use gradwire_sim::{run, Fault, NetworkOptions, OpPlan, PathTrouble, Sabotage, Scenario, Summary, Violation};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

fn scenario(seed: u64, policy: Policy, spray: Spray, paths: Vec<PathTrouble>) -> Scenario {
    let plan = OpPlan::all_reduce(Algorithm::Transpose, 1 << 19, policy);
    let network = NetworkOptions { paths, ..NetworkOptions::uniform(125_000_000, 512 * 1514, MS) };
    let mut scenario = Scenario::quiet(seed, 3, network, vec![plan; 4]);
    (scenario.host.paths, scenario.host.spray) = (4, spray);
    // Not before the run is over.
    scenario.faults = vec![(MS * 10_000, Fault::Heal)];
    scenario
}

fn passes(scenario: Scenario) -> Summary {
    let text = scenario.to_string();
    run(scenario, false).unwrap_or_else(|violation| panic!("{violation}\n{text}"))
}

fn total(summary: &Summary) -> Duration {
    summary.op_times.iter().map(|time| time.expect("every collective ends well")).sum()
}

fn later(factor: u32) -> PathTrouble {
    PathTrouble { loss: 0.0, delay: MS / 4 * factor }
}

fn lossy(loss: f64) -> PathTrouble {
    PathTrouble { loss, delay: Duration::ZERO }
}

#[test]
fn paths_of_unlike_delay_lose_nothing_of_a_tolerant_sum_on_a_network_that_loses_nothing() {
    for spray in [Spray::RoundRobin, Spray::Random, Spray::Adaptive] {
        for seed in 0..4 {
            let paths = (0..4).map(later).collect();
            let summary = passes(scenario(seed, Policy::AUTO, spray, paths));
            assert_eq!(summary.elems_uncounted, 0, "{spray:?}, seed {seed}");
        }
    }
}

#[test]
fn sums_are_exact_and_nearly_as_fast_though_one_path_of_four_loses_up_to_5_percent() {
    let healthy = total(&passes(scenario(1, Policy::RELIABLE, Spray::Adaptive, Vec::new())));
    for loss in [0.01, 0.05] {
        let paths = vec![PathTrouble::default(), lossy(loss)];
        let took = total(&passes(scenario(1, Policy::RELIABLE, Spray::Adaptive, paths)));
        assert!(took < healthy * 3 / 2, "{loss}: {took:?}, {healthy:?} with all paths");
    }
}

#[test]
fn sums_are_exact_though_one_path_of_four_loses_30_percent_or_all_from_the_start() {
    for loss in [0.3, 1.0] {
        passes(scenario(1, Policy::RELIABLE, Spray::Adaptive, vec![PathTrouble::default(), lossy(loss)]));
    }
}

// test of: mlt/gray-path
#[test]
fn a_path_that_loses_1_or_3_percent_has_less_than_half_of_its_share_once_the_statistics_can_tell() {
    let gray = |loss_per_mille, sabotage| {
        let mut scenario = scenario(3, Policy::RELIABLE, Spray::Adaptive, Vec::new());
        (scenario.world_size, scenario.judges_paths, scenario.sabotage) = (2, true, sabotage);
        scenario.ops = vec![scenario.ops[0].clone(); 20];
        scenario.start.truncate(2);
        scenario.faults.insert(0, (Duration::ZERO, Fault::GrayPath(1, loss_per_mille, MS * 9_000)));
        scenario
    };
    for loss_per_mille in [10, 30] {
        let judged = passes(gray(loss_per_mille, Sabotage::Nothing)).path_shares_judged;
        assert_eq!(judged, 2, "{loss_per_mille} of 1000");
    }
    let kept = run(gray(10, Sabotage::KeepGrayPaths), false);
    assert!(matches!(kept, Err(Violation::PathShare { path: 1, .. })), "{kept:?}");
}

#[test]
fn a_group_ends_well_though_its_first_path_and_two_more_are_dead_from_the_start() {
    for spray in [Spray::RoundRobin, Spray::Adaptive] {
        let paths = vec![PathTrouble::DEAD, PathTrouble::DEAD, PathTrouble::DEAD];
        passes(scenario(2, Policy::RELIABLE, spray, paths));
    }
}

#[test]
fn a_peer_is_not_lost_though_one_path_of_two_dies_before_the_ranks_have_met() {
    let us = Duration::from_micros;
    let mut scenario = scenario(1880, Policy::RELIABLE, Spray::Adaptive, Vec::new());
    (scenario.world_size, scenario.in_flight_max) = (2, 4);
    scenario.start = vec![Duration::from_nanos(162_469_605), Duration::from_nanos(143_694_125)];
    scenario.network = NetworkOptions::uniform(2_651_262, 109_949, us(356));
    scenario.host.initial_rate = 8_186_892;
    (scenario.host.paths, scenario.host.peer_timeout, scenario.host.nic_bytes) =
        (2, MS * 2_000, Some(88_466));
    (scenario.host.ack_every, scenario.host.wake_late_max) = (2, MS * 2);
    (scenario.host.socket_bytes, scenario.host.eager_bytes) = (262_144, 262_144);
    scenario.ops.iter_mut().for_each(|op| (op.elems, op.in_place) = (525_098, false));
    scenario.faults =
        vec![(us(146_148), Fault::GrayPath(0, 1_000, us(2_820_477))), (us(3_424_931), Fault::Heal)];
    passes(scenario);
}
