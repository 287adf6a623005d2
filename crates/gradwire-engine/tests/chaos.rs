//! Faults on real sockets: what is asked to be lost is lost, nothing else, and what must arrive arrives.

use crate::common::{all_reduce, check_all_reduce, cluster, config, Tensor, PATIENCE};
use gradwire_engine::collectives::{
    Algorithm, Collective, DeadlineRule, DeliveryReport, Policy, ReduceOp, Request,
};
use gradwire_engine::{ChaosConfig, EngineConfig, GroupHandle};
use std::ops::Range;
use std::time::Duration;

const ELEMS: usize = 300_000;
/// Closes when everything was sent once and not before, whatever of it is in: what is missing is what was lost.
const ANYTHING: Policy =
    Policy { loss_bound: 0.9, floor: 0.0, deadline: DeadlineRule::Never, ..Policy::AUTO };

fn with(chaos: ChaosConfig) -> EngineConfig {
    EngineConfig { mtu: Some(1_500), chaos: Some(chaos), ..config() }
}

/// One tolerant mean on every rank.
fn lossy_all_reduce(groups: &[GroupHandle]) -> Vec<DeliveryReport> {
    let mut tensors: Vec<Tensor> = groups.iter().map(|_| Tensor(vec![1.0; ELEMS])).collect();
    let collective = Collective::AllReduce { algorithm: Algorithm::Transpose };
    let (policy, reduce) = (ANYTHING, ReduceOp::Avg);
    let ops: Vec<_> = groups
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| {
            let collective = collective.clone();
            let request = Request { collective, policy, reduce, ..all_reduce(tensor.view()) };
            group.submit(request, Box::new(())).expect("running")
        })
        .collect();
    ops.iter()
        .map(|op| op.wait(Some(PATIENCE)).expect("ends in time").as_ref().expect("ends well").clone())
        .collect()
}

fn count(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[test]
fn exact_collectives_stay_exact_when_every_tenth_datagram_is_lost() {
    let chaos = ChaosConfig { loss: 0.1, seed: 3, ..ChaosConfig::default() };
    let (engines, groups) = cluster(3, &with(chaos));
    for elems in [1, 1_000, ELEMS] {
        check_all_reduce(&groups, elems);
    }
    for engine in &engines {
        let stats = engine.stats().unwrap();
        let share = stats.chaos_lost as f64 / stats.datagrams_received as f64;
        assert!((0.05..0.15).contains(&share), "{} of {}", stats.chaos_lost, stats.datagrams_received);
        assert_eq!(
            engine.features().chaos.as_deref(),
            Some("loss=10%,tail=0%,corrupt=0%,duplicate=0%,delay=0ms,seed=3")
        );
    }
}

#[test]
fn damaged_datagrams_are_lost_and_doubled_ones_count_once() {
    let chaos = ChaosConfig { corrupt: 0.1, duplicate: 0.3, seed: 5, ..ChaosConfig::default() };
    let (engines, groups) = cluster(3, &with(chaos));
    for elems in [1, 1_000, ELEMS] {
        check_all_reduce(&groups, elems);
    }
    for engine in &engines {
        let stats = engine.stats().unwrap();
        let lost = (stats.chaos_lost + stats.datagrams_unknown) as f64 / stats.datagrams_received as f64;
        assert!((0.05..0.15).contains(&lost), "{stats:?}");
    }
    let doubled =
        |group: &GroupHandle| group.stats().unwrap().peers.iter().any(|peer| peer.packets_duplicate > 0);
    assert!(groups.iter().all(doubled));
}

#[test]
fn the_tail_of_each_transfer_that_may_lose_something_is_lost() {
    let chaos = ChaosConfig { tail: 0.1, ..ChaosConfig::default() };
    let (_engines, groups) = cluster(2, &with(chaos));
    for _ in 0..3 {
        for report in lossy_all_reduce(&groups) {
            // One transfer of half of the elements; the packet at the border of its tenth is lost as a whole.
            let lost = count(&report.uncounted) as f64 / (ELEMS as f64 / 2.0);
            assert!((0.1..0.11).contains(&lost), "{lost} of {report:?}");
            assert_eq!(report.uncounted.len(), 1, "a burst: {:?}", report.uncounted);
        }
        check_all_reduce(&groups, ELEMS);
    }
}

#[test]
fn the_same_seed_loses_the_same_packets() {
    let chaos = ChaosConfig { loss: 0.05, seed: 11, ..ChaosConfig::default() };
    // The first reduction of a group: its first packets are numbered from zero, and none is sent again.
    let first = || {
        let (_engines, groups) = cluster(2, &with(chaos));
        lossy_all_reduce(&groups).into_iter().map(|report| report.uncounted).collect::<Vec<_>>()
    };
    let lost = first();
    assert!(lost.iter().all(|uncounted| !uncounted.is_empty()));
    assert_eq!(lost, first());
}

#[test]
fn a_delay_lengthens_the_round_trip() {
    let delay = Duration::from_millis(5);
    let (_engines, groups) = cluster(2, &with(ChaosConfig { delay, ..ChaosConfig::default() }));
    check_all_reduce(&groups, 1_000);
    for group in &groups {
        let least = group.stats().unwrap().peers[0].rtt_min_us;
        assert!(least >= 10_000.0, "{least} us: 5 ms at each end");
    }
}
