//! What ranks learn about their links, and what that makes of the times that they allow, on networks that lose nothing.

use crate::common::{all_reduce, slow, Net, Tensor};
use gradwire_collectives::{Algorithm, DeliveryReport, Policy, ReduceOp, Request};
use std::time::Duration;

const RANKS: u32 = 4;

/// A policy and a schedule.
type How = (Policy, Algorithm);
const LTP: How = (Policy::LTP, Algorithm::Transpose);

/// Reductions of `elems` elements, `count` of them at once; `late`: how much later than the others rank 0 calls them. What each rank reports.
fn reduce(net: &mut Net, how: How, (elems, count): (usize, usize), late: Duration) -> Vec<DeliveryReport> {
    let buckets = 0..count * RANKS as usize;
    let mut tensors: Vec<Tensor> =
        buckets.map(|_| Tensor::f32((0..elems).map(|index| index as f32))).collect();
    let before = net.done[0].len();
    for rank in (1..RANKS).chain([0]) {
        if rank == 0 && !late.is_zero() {
            net.run_for(late);
        }
        for bucket in 0..count {
            let tensor = &mut tensors[bucket * RANKS as usize + rank as usize];
            let request = all_reduce(tensor, how.1);
            net.submit(rank, Request { policy: how.0, reduce: ReduceOp::Avg, ..request });
        }
    }
    net.run_all(before + count);
    let outcomes = net.done.iter().flat_map(|done| done.values().skip(before));
    outcomes.map(|outcome| outcome.clone().expect("it ended well")).collect()
}

/// The first and the last packet of each bucket began its clock while the rest waited behind the buckets before it.
// test of: ltp/three-queues, ltp/early-close
#[test]
fn buckets_that_wait_behind_others_are_not_cut_before_they_are_sent() {
    let mut net = Net::new(RANKS, slow(12_500_000));
    for _ in 0..3 {
        reduce(&mut net, LTP, (250_000, 1), Duration::ZERO);
    }
    for report in reduce(&mut net, LTP, (250_000, 8), Duration::ZERO) {
        for peer in &report.peers {
            let share = peer.elems_received as f64 / peer.elems_expected as f64;
            assert!(peer.closed_by != "deadline" && share >= 0.8 - 1e-9, "{peer:?}");
        }
    }
}

/// What had come before rank 0 called seemed to have taken no time.
// test of: ltp/early-close
#[test]
fn a_rank_that_calls_late_once_costs_no_later_reduction_anything() {
    let mut net = Net::perfect(RANKS);
    for late in [0, 5, 0] {
        reduce(&mut net, LTP, (40_000, 1), Duration::from_millis(late));
    }
    for number in 0..20 {
        for report in reduce(&mut net, LTP, (40_000, 1), Duration::ZERO) {
            assert!(report.uncounted.is_empty(), "reduction {number}: {:?}", report.peers);
        }
    }
}

/// Nothing but acknowledgements and small messages goes to the rank from which the data comes.
// test of: auto/no-needless-wait
#[test]
fn a_ring_has_deadlines_of_what_its_transfers_take() {
    let rate = 12_500_000;
    let mut net = Net::new(RANKS, slow(rate));
    let shard_elems = 140_000;
    let mut reports = Vec::new();
    for _ in 0..5 {
        let elems = shard_elems * RANKS as usize;
        reports = reduce(&mut net, (Policy::AUTO, Algorithm::Ring), (elems, 1), Duration::ZERO);
    }
    let shard_time = Duration::from_secs_f64(4.0 * shard_elems as f64 / rate as f64);
    for report in reports {
        // That of its three transfers together.
        let deadline = report.peers[0].deadline;
        let is_fit = |deadline: Duration| deadline > shard_time * 3 && deadline < shard_time * 20;
        assert!(deadline.is_some_and(is_fit), "{deadline:?} where a shard takes {shard_time:?}");
    }
}
