//! Large shards of halves are contributed in pieces: the result is the same, and so it is when packets are lost on the way.

use crate::common::{all_reduce, lossy, Net, Tensor};
use gradwire_collectives::{Algorithm, Dtype, Policy, Request};
use std::time::Duration;

/// Shards of 48 MB and two packets and a bit.
const ELEMS: usize = 2 * ((24 << 20) + 1_500);

/// A small whole number as a bfloat16.
fn half(rank: usize, index: usize) -> [u8; 2] {
    let value = (index % 7 + 8 * rank) as f32;
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}

#[test]
fn a_shard_of_more_than_a_piece_is_summed_whole() {
    for mut net in [Net::perfect(2), Net::new(2, lossy(1, 1))] {
        let tensor = |rank| Tensor((0..ELEMS).flat_map(|index| half(rank, index)).collect());
        let mut tensors: Vec<Tensor> = (0..2).map(tensor).collect();
        for (rank, tensor) in tensors.iter_mut().enumerate() {
            let base = all_reduce(tensor, Algorithm::Transpose);
            net.submit(rank as u32, Request { dtype: Dtype::Bf16, ..base });
        }
        net.run_all(1);
        let mut contributed = 0;
        for (rank, tensor) in tensors.iter().enumerate() {
            let sum = |index: usize| ((((2 * (index % 7) + 8) as f32).to_bits() >> 16) as u16).to_le_bytes();
            let wrong = tensor.0.chunks_exact(2).enumerate().find(|(at, got)| **got != sum(*at));
            assert_eq!(wrong.map(|(at, _)| at), None, "rank {rank}");
            let report = net.report(rank as u32);
            assert_eq!((report.contributors_least, report.contributors), (2, 2));
            contributed += report.sources.iter().map(|source| source.elems_expected).sum::<u64>();
        }
        assert_eq!(contributed, ELEMS as u64, "each element by the rank that does not own it");
    }
}

// test of: auto/step-delay
#[test]
fn pieces_share_what_a_reduction_may_be_delayed() {
    let most = Duration::from_millis(90);
    let policy = Policy { deadline_max: Some(most), ..Policy::AUTO };
    let mut net = Net::perfect(2);
    let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(vec![0; 2 * ELEMS])).collect();
    for (rank, tensor) in tensors.iter_mut().enumerate() {
        let base = all_reduce(tensor, Algorithm::Transpose);
        net.submit(rank as u32, Request { dtype: Dtype::Bf16, policy, ..base });
    }
    net.run_all(1);
    for rank in 0..2 {
        // Of the first nothing was measured, so that it has all that there is for one.
        let of_both = net.report(rank).peers[0].deadline.expect("each of them has one");
        assert!((most / 2..=most).contains(&of_both), "rank {rank}: {of_both:?}");
    }
}
