//! The checkers must be able to fail: every kind of deliberate damage is found, by the checker that is meant to.

use gradwire_collectives::{Algorithm, Policy, Rotation};
use gradwire_sim::{run, Fault, NetworkOptions, OpPlan, Sabotage, Scenario, Violation};
use std::time::Duration;

fn all_reduce(policy: Policy) -> OpPlan {
    OpPlan { in_place: false, ..OpPlan::all_reduce(Algorithm::Transpose, 50_000, policy) }
}

/// Three ranks, one tolerant all-reduce of 200 KB over a network that loses one datagram in twenty-five.
fn damaged(seed: u64, sabotage: Sabotage) -> Result<bool, Violation> {
    damaged_with(Policy::AUTO, seed, sabotage)
}

fn damaged_with(policy: Policy, seed: u64, sabotage: Sabotage) -> Result<bool, Violation> {
    let mut network = NetworkOptions::uniform(12_500_000, 500_000, Duration::from_millis(1));
    network.impairments.loss = 0.04;
    let mut scenario = Scenario::quiet(seed, 3, network, vec![all_reduce(policy); 2]);
    scenario.faults[0].0 = Duration::from_secs(5);
    scenario.sabotage = sabotage;
    run(scenario, false).map(|summary| summary.sabotaged)
}

/// Every seed on which the damage was done must be found, and it must be done on most.
fn is_always_found(sabotage: Sabotage, right_checker: fn(&Violation) -> bool) {
    let mut found = 0;
    for seed in 0..20 {
        match damaged(seed, sabotage) {
            Ok(sabotaged) => assert!(!sabotaged, "{sabotage:?} was not found on seed {seed}"),
            Err(violation) => {
                assert!(right_checker(&violation), "{sabotage:?} on seed {seed} was taken for: {violation}");
                found += 1;
            }
        }
    }
    assert!(found >= 10, "{sabotage:?} was done on {found} of 20 seeds only");
}

#[test]
fn without_damage_nothing_is_found() {
    for seed in 0..20 {
        assert_eq!(damaged(seed, Sabotage::Nothing), Ok(false), "seed {seed}");
    }
}

#[test]
fn a_flipped_bit_is_found() {
    is_always_found(Sabotage::FlipPayloadBit, |violation| {
        matches!(violation, Violation::NotAMean { .. } | Violation::ReportDisagrees { .. })
    });
}

#[test]
fn payload_at_the_wrong_place_is_found() {
    is_always_found(Sabotage::SwapPayload, |violation| {
        matches!(violation, Violation::NotAMean { .. } | Violation::ReportDisagrees { .. })
    });
}

#[test]
fn a_forgotten_residual_is_found() {
    is_always_found(Sabotage::ForgetResidual, |violation| matches!(violation, Violation::Residual { .. }));
}

#[test]
fn a_replica_that_differs_is_found() {
    is_always_found(Sabotage::DivergeReplica, |violation| {
        matches!(violation, Violation::ReplicasDiffer { .. })
    });
}

#[test]
fn damage_to_a_rotated_reduction_is_found() {
    let rotated = Policy { rotation: Rotation::On, ..Policy::AUTO };
    let kinds = [
        Sabotage::Nothing,
        Sabotage::WrongSum,
        Sabotage::ForgetResidual,
        Sabotage::DivergeReplica,
        Sabotage::ReportTwice,
    ];
    for sabotage in kinds {
        let mut found = 0;
        for seed in 0..20 {
            match (damaged_with(rotated, seed, sabotage), sabotage) {
                (Ok(sabotaged), _) => assert!(!sabotaged, "{sabotage:?} was not found on seed {seed}"),
                (Err(Violation::WrongElement { .. }), Sabotage::WrongSum)
                | (Err(Violation::Residual { .. }), Sabotage::ForgetResidual)
                | (Err(Violation::ReplicasDiffer { .. }), Sabotage::DivergeReplica)
                | (Err(Violation::ReportDisagrees { .. }), Sabotage::ReportTwice) => found += 1,
                (Err(violation), _) => panic!("{sabotage:?} on seed {seed} was taken for: {violation}"),
            }
        }
        assert!(
            found >= 10 || sabotage == Sabotage::Nothing,
            "{sabotage:?} was done on {found} of 20 seeds only"
        );
    }
}

#[test]
fn a_world_without_timers_is_found() {
    is_always_found(Sabotage::StopTimers, |violation| {
        matches!(violation, Violation::Stuck { .. } | Violation::Failed { .. })
    });
}

#[test]
fn a_sum_that_is_wrong_alike_on_every_rank_is_found() {
    is_always_found(Sabotage::WrongSum, |violation| matches!(violation, Violation::NotAMean { .. }));
}

#[test]
fn values_that_are_handed_back_twice_are_found() {
    is_always_found(Sabotage::ReportTwice, |violation| {
        matches!(violation, Violation::ReportDisagrees { .. })
    });
}

#[test]
fn a_word_that_never_comes_is_found() {
    is_always_found(Sabotage::SwallowClosing, |violation| matches!(violation, Violation::Stuck { .. }));
}

#[test]
fn talk_without_end_is_found() {
    is_always_found(Sabotage::Chatter, |violation| matches!(violation, Violation::NotQuiet { .. }));
}

#[test]
fn waiting_for_more_than_the_bound_needs_is_found() {
    is_always_found(Sabotage::WaitForAll, |violation| matches!(violation, Violation::RepairedUnasked { .. }));
    is_always_found(Sabotage::LazyTimers, |violation| matches!(violation, Violation::WaitedTooLong { .. }));
}

/// So much is lost that the reduce stage must ask for it, which a deadline of zero would not have let it.
#[test]
fn a_deadline_that_was_measured_and_is_not_kept_is_found() {
    let outcome = |seed, sabotage| {
        let mut network = NetworkOptions::uniform(12_500_000, 500_000, Duration::from_millis(1));
        network.impairments.loss = 0.4;
        let mut scenario = Scenario::quiet(seed, 3, network, vec![all_reduce(Policy::AUTO); 4]);
        (scenario.faults[0].0, scenario.sabotage) = (Duration::from_secs(20), sabotage);
        run(scenario, false)
    };
    for seed in 0..20 {
        let honest = outcome(seed, Sabotage::Nothing);
        assert!(honest.as_ref().is_ok_and(|summary| summary.deadlines_judged >= 6), "{honest:?}");
        match outcome(seed, Sabotage::OutstayDeadline) {
            Err(Violation::PastDeadline { .. }) => {}
            other => panic!("seed {seed}: {other:?}"),
        }
    }
}

#[test]
fn results_that_are_repaired_like_a_kernel_would_are_found() {
    is_always_found(Sabotage::RepairLikeKernel, |violation| {
        matches!(violation, Violation::RepairedLate { .. })
    });
}

#[test]
fn a_transfer_that_is_cut_while_it_flows_is_found() {
    let mut found = 0;
    for seed in 0..20 {
        let network = NetworkOptions::uniform(12_500_000, 4 << 20, Duration::from_millis(1));
        let mut scenario = Scenario::quiet(seed, 4, network, vec![all_reduce(Policy::AUTO); 2]);
        scenario.sabotage = Sabotage::CutEarly;
        match run(scenario, false) {
            Err(Violation::LostOnQuietNetwork { .. }) => found += 1,
            other => panic!("seed {seed}: {other:?}"),
        }
    }
    assert_eq!(found, 20);
}

#[test]
fn an_exact_collective_that_may_lose_is_found() {
    let mut found = 0;
    for seed in 0..20 {
        let mut network = NetworkOptions::uniform(12_500_000, 500_000, Duration::from_millis(1));
        network.impairments.loss = 0.04;
        let mut scenario = Scenario::quiet(seed, 3, network, vec![all_reduce(Policy::RELIABLE); 2]);
        scenario.faults[0].0 = Duration::from_secs(5);
        scenario.sabotage = Sabotage::TolerateExact;
        found += u32::from(matches!(run(scenario, false), Err(Violation::WrongElement { .. })));
    }
    assert!(found >= 18, "{found} of 20");
}

/// Two ranks with four paths, of which one loses one packet in ten until the middle of the run.
fn with_a_gray_path(sabotage: Sabotage, length: Duration) -> Result<u64, Violation> {
    let network = NetworkOptions::uniform(125_000_000, 64 * 1514, Duration::from_millis(1));
    let plan = OpPlan { elems: 1 << 19, ..all_reduce(Policy::RELIABLE) };
    let mut scenario = Scenario::quiet(1, 2, network, vec![plan; 16]);
    (scenario.host.paths, scenario.judges_paths) = (4, true);
    scenario.faults = vec![(Duration::ZERO, Fault::GrayPath(1, 100, length))];
    scenario.sabotage = sabotage;
    run(scenario, false).map(|summary| summary.path_shares_judged)
}

#[test]
fn a_gray_path_that_keeps_its_share_is_found_and_so_is_a_healed_one_that_does_not_get_it_back() {
    let (all, half) = (Duration::from_secs(9), Duration::from_millis(60));
    assert!(with_a_gray_path(Sabotage::Nothing, all).is_ok_and(|judged| judged == 2));
    let judged = with_a_gray_path(Sabotage::Nothing, half);
    assert!(judged.as_ref().is_ok_and(|judged| *judged >= 2), "{judged:?}");
    let gray = with_a_gray_path(Sabotage::KeepGrayPaths, all);
    assert!(matches!(gray, Err(Violation::PathShare { path: 1, .. })), "{gray:?}");
    let healed = with_a_gray_path(Sabotage::SwallowCopies, half);
    assert!(matches!(healed, Err(Violation::PathShare { path: 1, .. })), "{healed:?}");
}
