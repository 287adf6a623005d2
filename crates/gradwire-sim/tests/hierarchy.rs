//! An all-reduce in two levels, of two process groups on each rank: every result is the exact mean, whatever the network does.

use gradwire_collectives::{Algorithm, Policy};
use gradwire_sim::cluster::{
    BucketPlan, Cluster, ClusterError, ClusterPlan, Hierarchy, LinkTrouble, Outcome,
};
use gradwire_sim::PathTrouble;
use std::time::Duration;

/// Every packet carries its payload, and every rank's result is compared with the mean.
fn checked(preset: &str, ranks: usize, set: usize, bytes: u64) -> ClusterPlan {
    let plan = ClusterPlan::burst(preset, ranks, bytes).expect("a preset").with_hierarchy(Hierarchy { set });
    ClusterPlan { is_checked: true, ..plan }
}

/// Leaves of so many hosts, and from the first call on a fifth of a percent of all packets lost between them, with room for ten packets at
/// each port.
fn over_a_bad_network(hosts_per_leaf: usize, mut plan: ClusterPlan) -> ClusterPlan {
    (plan.topology.leaves, plan.topology.hosts_per_leaf) = (plan.workers / hosts_per_leaf, hosts_per_leaf);
    plan.topology.queue.buffer_bytes = 15_000;
    let trouble = PathTrouble { loss: 0.002, ..PathTrouble::default() };
    let links =
        (0..plan.topology.leaves).flat_map(|leaf| (0..plan.topology.spines).map(move |spine| (leaf, spine)));
    plan.troubles =
        links.map(|(leaf, spine)| (Duration::ZERO, LinkTrouble { leaf, spine, trouble })).collect();
    plan
}

fn run(plan: ClusterPlan) -> Outcome {
    Cluster::run(plan).expect("every call ends, the books hold and the results are the mean")
}

#[test]
fn a_hierarchy_gives_every_rank_the_mean_by_any_schedule_across_its_sets() {
    // In each group of so many ranks each sends so many transfers.
    let transfers = |algorithm, ranks: usize| match algorithm {
        Algorithm::HalvingDoubling => 2 * ranks.ilog2() as usize,
        _ => 2 * (ranks - 1),
    };
    for algorithm in [Algorithm::Transpose, Algorithm::Ring, Algorithm::HalvingDoubling] {
        for (ranks, set, bytes) in [(16, 4, 64 << 10), (16, 2, 4), (12, 3, 10_004), (64, 16, 64 << 10)] {
            let mut plan = ClusterPlan { algorithm, ..checked("reliable", ranks, set, bytes) };
            (plan.steps, plan.jitter) = (2, Duration::from_micros(20));
            let outcome = run(plan);
            assert_eq!((outcome.losses.share(), outcome.switches.overflowed), (0.0, 0));
            // Shards without an element are no transfers.
            if bytes > 4 {
                let each = 2 * (set - 1) + transfers(algorithm, ranks / set);
                assert_eq!(outcome.flow_times.len(), 2 * ranks * each, "{algorithm:?} of {ranks} by {set}");
            }
        }
    }
}

#[test]
fn a_hierarchy_gives_every_rank_the_mean_over_a_network_that_loses_packets() {
    for (seed, algorithm) in
        [(1, Algorithm::Transpose), (2, Algorithm::Ring), (3, Algorithm::HalvingDoubling)]
    {
        let mut plan = over_a_bad_network(4, checked("reliable", 64, 8, 256 << 10));
        (plan.seed, plan.algorithm) = (seed, algorithm);
        let outcome = run(plan);
        assert!(outcome.switches.overflowed > 0 && outcome.switches.lost > 0, "{:?}", outcome.switches);
        assert!(outcome.bytes_retransmitted > 0 && outcome.losses.share() == 0.0);
    }
}

#[test]
fn a_hierarchy_takes_less_than_the_model_says_and_no_less_than_its_links_allow() {
    let outcome = run(checked("reliable", 64, 8, 256 << 10));
    let (took, modelled) = (outcome.step_times[0], outcome.modelled_step.expect("the model knows it"));
    // Within a set 2 * 7 / 8 of the bucket cross a rank's link, across 2 * 7 / 8 of an eighth, at 12.5 GB/s; and 12 links of 2.9 us.
    let bytes = (256 << 10) * 14 / 8 + (32 << 10) * 14 / 8;
    let ideal = Duration::from_nanos(bytes * 8 / 100) + Duration::from_nanos(2_900) * 12;
    assert!(took >= ideal, "{took:?}, {ideal:?} at least");
    // 28 messages of 5 us are nothing here, but the model has no queues.
    assert!(took < modelled, "{took:?}, {modelled:?} by the model");
}

#[test]
fn what_a_tolerant_policy_loses_on_either_level_is_counted_and_found_by_the_check() {
    let plan = |policy, is_checked| {
        let mut plan = over_a_bad_network(3, checked("auto", 12, 3, 12 << 16));
        (plan.preset.policy, plan.topology.queue.buffer_bytes) = (policy, 512 << 10);
        ClusterPlan { is_checked, ..plan }
    };
    // A set is a leaf here: bad links of the core lose only what is sent across sets, where each value is the mean of three.
    let Outcome { losses, switches, .. } = run(plan(Policy::AUTO, false));
    assert_eq!((losses.layers[0].elems, losses.layers[0].lost % 3, switches.overflowed), (144 << 14, 0, 0));
    assert!(losses.share() > 0.0 && losses.share() <= f64::from(Policy::AUTO.loss_bound), "{losses:?}");
    // Whoever has nine tenths of a contribution waits for no more, on both levels: together they leave out more than one of them may.
    let both = run(plan(Policy::MLT, false)).losses.share();
    let bound = f64::from(Policy::MLT.loss_bound);
    assert!(both > bound && both <= 2.0 * bound, "{both}");
    let found = Cluster::run(plan(Policy::MLT, true)).expect_err("a mean without some is another one");
    assert!(matches!(found, ClusterError::Wrong { .. }), "{found}");
}

#[test]
fn sets_and_presets_that_do_not_fit_are_refused() {
    let refused = |plan: ClusterPlan| Cluster::run(plan).expect_err("it does not fit");
    for set in [0, 1, 5, 16] {
        assert_eq!(refused(checked("reliable", 16, set, 4096)), ClusterError::Sets { set, ranks: 16 });
    }
    assert_eq!(refused(checked("mlt", 16, 4, 4096)), ClusterError::Importance);
    let mut plan = checked("reliable", 16, 4, 4096);
    plan.buckets.push(BucketPlan::of_bytes(4096));
    assert_eq!(refused(plan), ClusterError::OneBucket { buckets: 2 });
}

#[test]
fn the_other_schedules_give_every_rank_the_mean_too() {
    for algorithm in [Algorithm::Transpose, Algorithm::Ring, Algorithm::HalvingDoubling] {
        let plan = ClusterPlan::burst("reliable", 16, 64 << 10).expect("a preset").with_algorithm(algorithm);
        assert_eq!(run(ClusterPlan { is_checked: true, ..plan }).losses.share(), 0.0);
    }
    let servers = ClusterPlan::burst("reliable", 12, 64 << 10).expect("a preset");
    assert_eq!(run(ClusterPlan { is_checked: true, ..servers }).losses.share(), 0.0);
}
