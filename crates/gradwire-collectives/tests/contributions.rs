//! The counts that a caller may ask for: how many ranks are in each block of a result, held against what every rank was
//! told about its own values.

use crate::common::{all_reduce, lossy, request, Net, Tensor, CHUNK_BYTES};
use gradwire_collectives::{
    Algorithm, Collective, Contributions, DeliveryReport, Dtype, Fill, GatherRule, Policy, ReduceOp, Request,
    Rotation, View,
};

/// No whole number of chunks, and shards of different length.
const ELEMS: usize = 100_003;

/// Which schedule, over which network.
#[derive(Clone, Copy, Debug)]
struct Case {
    algorithm: Algorithm,
    ranks: u32,
    /// Dedicated servers; zero: every rank is a colocated one.
    dedicated: u32,
    policy: Policy,
    dtype: Dtype,
    percent: u64,
}

const CASE: Case = Case {
    algorithm: Algorithm::Transpose,
    ranks: 4,
    dedicated: 0,
    policy: Policy { loss_bound: 0.2, floor: 0.5, gather: GatherRule::EXACT, ..Policy::MLT },
    dtype: Dtype::F32,
    percent: 4,
};

impl Case {
    fn run(self, seed: u64) -> Vec<DeliveryReport> {
        let fate = lossy(seed, self.percent);
        let mut net = match self.dedicated {
            0 => Net::with_servers(self.ranks, 3, fate),
            count => Net::with_dedicated(self.ranks, (count, 1 << 30), fate),
        };
        let bytes = ELEMS * self.dtype.bytes();
        let mut tensors: Vec<Tensor> = (0..self.ranks).map(|_| Tensor(vec![0; bytes])).collect();
        let mut outputs: Vec<Tensor> = (0..self.ranks).map(|_| Tensor(vec![0; bytes])).collect();
        for (rank, (tensor, output)) in tensors.iter_mut().zip(&mut outputs).enumerate() {
            // In place there is no previous value to fill with.
            let in_place = all_reduce(tensor, self.algorithm);
            let keeps_previous = self.policy.gather.fill == Fill::Previous;
            let base =
                Request { output: if keeps_previous { output.view() } else { in_place.output }, ..in_place };
            let Self { dtype, policy, .. } = self;
            // What one rank wants is no other's business.
            let wants_contributions = rank != 1;
            net.submit(
                rank as u32,
                Request { dtype, policy, reduce: ReduceOp::Avg, wants_contributions, ..base },
            );
        }
        net.run_all(1);
        (0..self.ranks).map(|rank| net.report(rank).clone()).collect()
    }
}

fn is_in(ranges: &[std::ops::Range<u64>], elem: u64) -> bool {
    ranges.iter().any(|range| range.contains(&elem))
}

/// One element of each block, and its last.
fn probes(elems: u64, counts: &Contributions) -> impl Iterator<Item = u64> + '_ {
    let starts = (0..elems).step_by(16);
    starts
        .chain([elems - 1])
        .filter(move |elem| elem % counts.shard_elems % counts.block_elems < 16 || *elem == elems - 1)
}

/// Holds what every rank was told against the ranks that count by `counts`.
fn check(
    case: Case,
    reports: &[DeliveryReport],
    counts: impl Fn(&[DeliveryReport], u64, &Contributions) -> u16,
) -> u64 {
    let mut short = 0;
    assert_eq!(reports[1].contributions, None, "{case:?}: it did not ask");
    for report in reports.iter().enumerate().filter(|(rank, _)| *rank != 1).map(|(_, report)| report) {
        let found = report.contributions.as_ref().expect("it asked");
        let elems = if report.rotated_elems > 0 { report.rotated_elems } else { report.elems };
        assert_eq!(found.block_elems as usize, CHUNK_BYTES / case.dtype.bytes());
        for elem in probes(elems, found) {
            let want = match (is_in(&report.filled, elem), case.policy.gather.fill) {
                (true, Fill::Local) => 1,
                (true, _) => 0,
                (false, _) => counts(reports, elem, found),
            };
            assert_eq!(found.of(elem), want, "{case:?}, element {elem}");
            short += u64::from(u32::from(want) < case.ranks);
        }
    }
    short
}

/// Every rank whose value was not refused is in it.
fn counted(reports: &[DeliveryReport], elem: u64, _: &Contributions) -> u16 {
    reports.iter().filter(|report| !is_in(&report.uncounted, elem)).count() as u16
}

/// The chain of a ring begins at the rank of the shard's number, and anew behind each hop that lost it.
fn counted_in_ring(reports: &[DeliveryReport], elem: u64, found: &Contributions) -> u16 {
    let (ranks, shard) = (reports.len(), (elem / found.shard_elems) as usize);
    let mut count = 0;
    for step in 0..ranks {
        count += 1;
        if step + 1 < ranks && is_in(&reports[(shard + step) % ranks].uncounted, elem) {
            count = 0;
        }
    }
    count
}

// test of: mlt/mean-over-contributions
#[test]
fn every_schedule_tells_every_rank_how_many_are_in_each_block() {
    let mut short = 0;
    for seed in 0..3 {
        for (algorithm, dedicated) in
            [(Algorithm::Transpose, 0), (Algorithm::ParameterServer, 0), (Algorithm::ParameterServer, 2)]
        {
            for dtype in [Dtype::F32, Dtype::Bf16] {
                let case = Case { algorithm, dedicated, dtype, ..CASE };
                short += check(case, &case.run(seed), counted);
            }
        }
        let ring = Case { algorithm: Algorithm::Ring, ..CASE };
        short += check(ring, &ring.run(seed), counted_in_ring);
    }
    assert!(short > 100, "{short} blocks lost something: the test proves nothing");
}

#[test]
fn of_a_rotated_bucket_the_counts_are_about_what_was_sent() {
    let policy = Policy { rotation: Rotation::On, ..CASE.policy };
    for algorithm in [Algorithm::Transpose, Algorithm::ParameterServer] {
        let case = Case { algorithm, policy, ..CASE };
        let reports = case.run(7);
        assert!(reports.iter().all(|report| report.rotated_elems > report.elems));
        assert!(check(case, &reports, counted) > 10);
    }
}

#[test]
fn a_result_that_did_not_arrive_holds_nobodys_values_or_the_own() {
    for fill in [Fill::Zero, Fill::Previous, Fill::Local] {
        for dedicated in [0, 1] {
            let policy = Policy { gather: GatherRule::bounded(0.2, fill), ..CASE.policy };
            let case = Case { algorithm: Algorithm::ParameterServer, dedicated, policy, ..CASE };
            let reports = case.run(11);
            assert!(reports.iter().any(|report| !report.filled.is_empty()), "nothing was filled in");
            check(case, &reports, counted);
        }
    }
}

#[test]
fn an_exact_reduction_has_every_rank_in_every_block() {
    for algorithm in [
        Algorithm::HalvingDoubling,
        Algorithm::Ring,
        Algorithm::Transpose,
        Algorithm::WeightedTranspose,
        Algorithm::OneShot,
    ] {
        let case = Case { algorithm, policy: Policy::RELIABLE, ..CASE };
        for report in case.run(1).iter().filter_map(|report| report.contributions.as_ref()) {
            assert!((0..ELEMS as u64).step_by(101).all(|elem| report.of(elem) == 4), "{algorithm:?}");
        }
    }
}

#[test]
fn one_stage_reductions_count_where_the_result_is() {
    let rows: usize = 5_001;
    for collective in [Collective::ReduceScatter, Collective::Reduce { root: 2 }] {
        let mut net = Net::new(3, lossy(3, 5));
        let mut inputs: Vec<Tensor> = (0..3).map(|_| Tensor::f32(vec![1.0; 3 * rows])).collect();
        let mut outputs: Vec<Tensor> = (0..3).map(|_| Tensor::f32(vec![0.0; rows])).collect();
        for (rank, (input, output)) in inputs.iter_mut().zip(&mut outputs).enumerate() {
            let base = Request { wants_contributions: true, ..request(collective.clone()) };
            let views = match collective {
                Collective::Reduce { root } if root as usize == rank => (output.view(), output.view()),
                Collective::Reduce { .. } => (output.view(), View::EMPTY),
                _ => (input.view(), output.view()),
            };
            net.submit(rank as u32, Request { input: views.0, output: views.1, ..base });
        }
        net.run_all(1);
        for rank in 0..3 {
            let found = net.report(rank).contributions.as_ref();
            let has_result = rank == 2 || collective == Collective::ReduceScatter;
            assert_eq!(found.is_some(), has_result, "{collective:?}");
            assert!(found.is_none_or(|found| (0..rows as u64).all(|elem| found.of(elem) == 3)));
        }
    }
}

#[test]
fn no_element_and_one_rank_have_counts_too() {
    for (ranks, elems) in [(1, 10_000), (2, 0), (5, 2)] {
        let mut net = Net::perfect(ranks);
        let mut tensors: Vec<Tensor> = (0..ranks).map(|_| Tensor::f32(vec![1.0; elems])).collect();
        for (rank, tensor) in tensors.iter_mut().enumerate() {
            let base = all_reduce(tensor, Algorithm::Transpose);
            net.submit(rank as u32, Request { wants_contributions: true, ..base });
        }
        net.run_all(1);
        for rank in 0..ranks {
            let found = net.report(rank).contributions.clone().expect("it asked");
            assert!((0..elems as u64).all(|elem| u32::from(found.of(elem)) == ranks), "{found:?}");
            assert!(elems > 0 || found.counts.is_empty());
        }
    }
}
