//! Large reduces, which are summed in shards and gathered by their root: the root alone gets the result, nobody else's tensor changes.

use crate::common::{lossy, request, slow, Net, Tensor};
use gradwire_collectives::{
    stragglers_of, Collective, Dtype, OpError, ReduceOp, Request, StragglerCause, View,
};
use std::time::Duration;

/// 128 KiB of float32: of so much a piece for each of two ranks but the root is at least made.
const SHARD_ELEMS: usize = 32_768;

fn value(rank: u32, index: usize) -> f32 {
    ((index * 7 + rank as usize * 3) % 16) as f32
}

/// The reduce of one tensor of each rank.
struct Reduce {
    root: u32,
    in_place: bool,
    inputs: Vec<Tensor>,
    output: Tensor,
}

impl Reduce {
    fn new(world_size: u32, root: u32, elems: usize) -> Self {
        let input = |rank| Tensor::f32((0..elems).map(|index| value(rank, index)));
        let output = Tensor::f32(vec![-1.0; elems]);
        Self { root, in_place: false, inputs: (0..world_size).map(input).collect(), output }
    }

    fn submit(&mut self, net: &mut Net, rank: u32) {
        let input = self.inputs[rank as usize].view();
        let output = match (rank == self.root, self.in_place) {
            (false, _) => View::EMPTY,
            (true, true) => input,
            (true, false) => self.output.view(),
        };
        let base = request(Collective::Reduce { root: self.root });
        let wants_contributions = true;
        net.submit(rank, Request { input, output, reduce: ReduceOp::Avg, wants_contributions, ..base });
    }

    fn run(&mut self, net: &mut Net) {
        (0..self.inputs.len() as u32).for_each(|rank| self.submit(net, rank));
        net.run_all(1);
    }

    fn assert_is_right(&self, net: &Net) {
        let ranks = self.inputs.len() as u32;
        let elems = self.output.0.len() / 4;
        for (rank, input) in (0..).zip(&self.inputs) {
            let (is_root, report) = (rank == self.root, net.report(rank));
            if !(is_root && self.in_place) {
                assert!(input.0 == Tensor::f32((0..elems).map(|index| value(rank, index))).0, "{rank}");
            }
            assert_eq!(report.bytes_received, report.bytes_expected);
            assert_eq!((report.contributors_least, report.contributors), (ranks as u16, ranks as u16));
            assert_eq!(report.elems, if is_root { elems as u64 } else { 0 });
            let others = (0..ranks).filter(|other| *other != rank).collect::<Vec<_>>();
            let (peers, sources): (Vec<u32>, Vec<u32>) = (
                report.peers.iter().map(|peer| peer.rank).collect(),
                report.sources.iter().map(|peer| peer.rank).collect(),
            );
            let want = if is_root { (vec![], others) } else { (others, vec![]) };
            assert_eq!((peers, sources), want, "who sent to rank {rank}");
            let found = report.contributions.as_ref();
            assert_eq!(found.is_some(), is_root);
            assert!(
                found.is_none_or(|found| (0..elems as u64).all(|elem| u32::from(found.of(elem)) == ranks))
            );
        }
        let mean = |index| (0..ranks).map(|rank| value(rank, index)).sum::<f32>() / ranks as f32;
        let got = if self.in_place { &self.inputs[self.root as usize] } else { &self.output };
        assert!(got.0 == Tensor::f32((0..elems).map(mean)).0, "root {} of {ranks}", self.root);
    }
}

#[test]
fn the_root_alone_gets_the_result_whoever_it_is_and_no_other_tensor_changes() {
    for world_size in [3, 4, 6] {
        for root in 0..world_size {
            for (in_place, odd) in [(false, 0), (true, 1), (true, 1717), (false, 12_345)] {
                let elems = SHARD_ELEMS * (world_size as usize - 1) + odd;
                let mut reduce = Reduce { in_place, ..Reduce::new(world_size, root, elems) };
                let mut net = Net::new(world_size, lossy(u64::from(root), 2));
                reduce.run(&mut net);
                reduce.assert_is_right(&net);
            }
        }
    }
}

#[test]
fn the_root_is_sent_the_result_once_and_in_place_that_takes_no_longer() {
    let elems = 16 * SHARD_ELEMS;
    let took = [false, true].map(|in_place| {
        let mut net = Net::new(5, slow(125_000_000));
        let mut reduce = Reduce { in_place, ..Reduce::new(5, 2, elems) };
        reduce.run(&mut net);
        assert_eq!(net.report(2).bytes_received, 4 * elems as u64);
        net.report(2).elapsed
    });
    let link = Duration::from_nanos(4 * elems as u64 * 8);
    assert!(took.iter().all(|took| *took < link * 7 / 4), "{took:?}, on one link {link:?}");
}

#[test]
fn it_ends_for_nobody_before_all_have_called_and_the_root_blames_no_owner_for_one_that_is_late() {
    for (late, in_place) in (0..4).flat_map(|late| [(late, false), (late, true)]) {
        let mut reduce = Reduce { in_place, ..Reduce::new(4, 3, 4 * SHARD_ELEMS) };
        let mut net = Net::perfect(4);
        (0..4).filter(|rank| *rank != late).for_each(|rank| reduce.submit(&mut net, rank));
        net.run_for(Duration::from_secs(2));
        assert!(net.done.iter().all(|done| done.is_empty()), "without rank {late}");
        if late != 3 {
            let waiting = net.groups[3].waiting(net.now).expect("it waits");
            let blamed = waiting.straggler(net.now).map(|blamed| (blamed.rank, blamed.cause));
            assert_eq!(blamed, Some((late, StragglerCause::Compute)), "in place: {in_place}");
        }
        reduce.submit(&mut net, late);
        net.run_all(1);
        reduce.assert_is_right(&net);
        let at_root = net.report(3);
        assert!(at_root.sources.iter().all(|source| source.called_at.is_none()), "{:?}", at_root.sources);
        let waited = Duration::from_millis(if late == 3 { 0 } else { 1_999 });
        assert!(at_root.compute_wait >= waited, "{:?}", at_root.compute_wait);
        assert_eq!(stragglers_of(at_root).collect::<Vec<_>>(), []);
    }
}

#[test]
fn sums_of_halves_are_rounded_once() {
    // In bfloat16 256 + 1 is 256, and 256 + 1 + 1 is 258.
    let bf16 = |value: f32| value.to_le_bytes()[2..].to_vec();
    let elems = 8 * SHARD_ELEMS;
    for root in 0..4 {
        let mut inputs = [256.0, 1.0, 1.0, 0.0].map(|value| Tensor(bf16(value).repeat(elems)));
        let mut output = Tensor(vec![0; 2 * elems]);
        let mut net = Net::new(4, lossy(u64::from(root), 1));
        for (rank, input) in (0..).zip(&mut inputs) {
            let output = if rank == root { output.view() } else { View::EMPTY };
            let base = request(Collective::Reduce { root });
            net.submit(rank, Request { dtype: Dtype::Bf16, input: input.view(), output, ..base });
        }
        net.run_all(1);
        assert!(output.0 == bf16(258.0).repeat(elems), "root {root}");
    }
}

#[test]
fn of_different_lengths_all_are_told() {
    // One too small to be gathered, and one that is.
    for other in [1000, 5 * SHARD_ELEMS] {
        let mut reduce = Reduce::new(4, 0, 4 * SHARD_ELEMS);
        reduce.inputs[2] = Tensor::f32(vec![1.0; other]);
        let mut net = Net::perfect(4);
        reduce.run(&mut net);
        for rank in 0..4 {
            assert!(matches!(net.error(rank), OpError::Mismatch(_)), "{}", net.error(rank));
        }
    }
}
