//! Exact reductions: every rank holds what the definition says, whatever the schedule, dtype and network.
//!
//! Inputs are small integers, held exactly by every dtype in every order of summation; so results are compared bit
//! by bit with a closed formula.

use crate::common::{self, all_reduce, lossy, request, scatter, Fate, Net, Tensor, NORMAL};
use gradwire_collectives::core::Kind;
use gradwire_collectives::{Algorithm, Collective, DeadlineRule, Dtype, Policy, ReduceOp, Request};
use std::cell::Cell;
use std::rc::Rc;

const SUMMED: [Dtype; 12] = [
    Dtype::F32,
    Dtype::F64,
    Dtype::F16,
    Dtype::Bf16,
    Dtype::U8,
    Dtype::I8,
    Dtype::I16,
    Dtype::I32,
    Dtype::I64,
    Dtype::U16,
    Dtype::U32,
    Dtype::U64,
];

/// Element `index` of `rank`'s input: 1 to 3 times the rank's ordinal.
fn input(rank: u32, index: usize) -> i64 {
    i64::from(rank + 1) * pattern(index)
}

fn pattern(index: usize) -> i64 {
    (index % 3) as i64 + 1
}

/// The sum over all ranks: at most 3 * 36 for 8 ranks, which even an `i8` holds.
fn sum(world_size: u32, index: usize) -> i64 {
    i64::from(world_size * (world_size + 1) / 2) * pattern(index)
}

/// `value / 2`, which every float dtype holds; integers truncate.
fn element(dtype: Dtype, twice: i64) -> Vec<u8> {
    let half = twice as f32 / 2.0;
    let whole = twice / 2;
    match dtype {
        Dtype::F32 => half.to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(half).to_le_bytes().to_vec(),
        // Both half types hold these values exactly: upper bits of the float32, or rebuilt from it.
        Dtype::Bf16 => half.to_le_bytes()[2..].to_vec(),
        Dtype::F16 => f16_bits(half).to_le_bytes().to_vec(),
        Dtype::I16 | Dtype::U16 => (whole as i16).to_le_bytes().to_vec(),
        Dtype::I32 | Dtype::U32 => (whole as i32).to_le_bytes().to_vec(),
        Dtype::I64 | Dtype::U64 => whole.to_le_bytes().to_vec(),
        _ => vec![whole as u8],
    }
}

/// float16 of a small multiple of one half, from its float32.
fn f16_bits(value: f32) -> u16 {
    if value == 0.0 {
        return 0;
    }
    let bits = value.to_bits();
    let exponent = (bits >> 23 & 0xFF) - 127 + 15;
    (bits >> 16 & 0x8000 | exponent << 10 | bits >> 13 & 0x3FF) as u16
}

fn tensor(dtype: Dtype, elems: usize, twice: impl Fn(usize) -> i64) -> Tensor {
    Tensor((0..elems).flat_map(|index| element(dtype, twice(index))).collect())
}

#[derive(Clone, Copy, Debug)]
struct Case {
    world_size: u32,
    elems: usize,
    dtype: Dtype,
    reduce: ReduceOp,
    algorithm: Algorithm,
    in_place: bool,
}

/// Twice the expected value of the result.
fn expected(case: &Case, index: usize) -> i64 {
    let sum = sum(case.world_size, index);
    match case.reduce {
        // (N + 1) / 2 times the pattern.
        ReduceOp::Avg => 2 * sum / i64::from(case.world_size),
        _ => 2 * sum,
    }
}

fn check(case: Case, mut net: Net) {
    let Case { world_size, elems, dtype, .. } = case;
    let mut inputs: Vec<Tensor> =
        (0..world_size).map(|rank| tensor(dtype, elems, |index| 2 * input(rank, index))).collect();
    let before: Vec<Vec<u8>> = inputs.iter().map(|input| input.0.clone()).collect();
    let mut outputs = vec![Tensor(vec![0xEE; elems * dtype.bytes()]); world_size as usize];
    for rank in 0..world_size {
        let at = rank as usize;
        let (input, output) = (inputs[at].view(), outputs[at].view());
        let output = if case.in_place { input } else { output };
        let collective = Collective::AllReduce { algorithm: case.algorithm };
        net.submit(rank, Request { dtype, reduce: case.reduce, input, output, ..request(collective) });
    }
    net.run_all(1);
    let want = tensor(dtype, elems, |index| expected(&case, index));
    for rank in 0..world_size as usize {
        let got = if case.in_place { &inputs[rank] } else { &outputs[rank] };
        assert!(got.0 == want.0, "{case:?}: rank {rank} holds something else");
        assert!(case.in_place || inputs[rank].0 == before[rank], "{case:?}: the input was changed");
        let report = net.report(rank as u32);
        assert_eq!(report.bytes_received, report.bytes_expected, "{case:?}");
        assert_eq!((report.lost_share(), report.uncounted.len(), report.elems), (0.0, 0, elems as u64));
    }
}

// test of: ultima/transpose
#[test]
fn all_reduce_is_exact_for_every_world_size_length_dtype_and_schedule() {
    for world_size in [1, 2, 3, 4, 7, 8] {
        for elems in [0, 1, 10, 1000] {
            for dtype in SUMMED {
                for (algorithm, in_place) in [
                    (Algorithm::Ring, false),
                    (Algorithm::Ring, true),
                    (Algorithm::Transpose, false),
                    (Algorithm::Transpose, true),
                    (Algorithm::HalvingDoubling, false),
                    (Algorithm::HalvingDoubling, true),
                    (Algorithm::ParameterServer, false),
                    (Algorithm::ParameterServer, true),
                    (Algorithm::WeightedTranspose, false),
                    (Algorithm::WeightedTranspose, true),
                    (Algorithm::OneShot, false),
                    (Algorithm::OneShot, true),
                ] {
                    let reductions = [ReduceOp::Sum, ReduceOp::Avg];
                    for reduce in reductions.into_iter().filter(|reduce| dtype.supports(*reduce)) {
                        let case = Case { world_size, elems, dtype, reduce, algorithm, in_place };
                        check(case, Net::perfect(world_size));
                    }
                }
            }
        }
    }
}

// test of: auto/halving-doubling
#[test]
fn halving_and_doubling_is_exact_for_every_world_size_up_to_16_and_any_length() {
    for world_size in 1..=16 {
        for elems in [1, 15, 16, 17, 257, 5000] {
            for (dtype, reduce) in
                [(Dtype::F32, ReduceOp::Avg), (Dtype::I64, ReduceOp::Sum), (Dtype::I32, ReduceOp::Avg)]
            {
                let (algorithm, in_place) = (Algorithm::HalvingDoubling, elems % 2 == 0);
                let case = Case { world_size, elems, dtype, reduce, algorithm, in_place };
                check(case, Net::perfect(world_size));
                check(case, Net::new(world_size, lossy(u64::from(world_size), 10)));
            }
        }
    }
}

// test of: auto/one-shot
#[test]
fn one_shot_is_exact_for_every_world_size_up_to_16_and_any_length_though_contributions_are_sent_again() {
    for world_size in 1..=16 {
        for elems in [1, 352, 5_001, 16_384, 16_385] {
            // More ranks make sums that bfloat16 does not hold.
            let dtypes =
                [Dtype::F32, Dtype::I32, Dtype::Bf16].into_iter().take(if world_size <= 8 { 3 } else { 2 });
            for dtype in dtypes {
                let (algorithm, in_place) = (Algorithm::OneShot, elems % 2 == 0);
                let case = Case { world_size, elems, dtype, reduce: ReduceOp::Avg, algorithm, in_place };
                check(case, Net::new(world_size, lossy(u64::from(world_size), 10)));
            }
        }
    }
}

// test of: mlt/colocated-servers
#[test]
fn any_number_of_servers_is_exact_for_every_world_size_up_to_16_and_any_length() {
    for world_size in 1..=16 {
        for servers in [1, 3, 100] {
            for (elems, in_place) in [(1, true), (17, false), (5000, true)] {
                let (dtype, reduce, algorithm) = (Dtype::I16, ReduceOp::Sum, Algorithm::ParameterServer);
                let case = Case { world_size, elems, dtype, reduce, algorithm, in_place };
                check(case, Net::with_servers(world_size, servers, |_| common::NORMAL));
                check(case, Net::with_servers(world_size, servers, lossy(u64::from(world_size), 10)));
            }
        }
    }
}

// test of: ultima/incast-factor
#[test]
fn a_transpose_is_exact_at_every_incast_whether_its_sends_are_copied_or_not() {
    for world_size in [2, 3, 5, 8] {
        for incast in [1, 2, 3, 100] {
            for (elems, in_place) in [(1, true), (100, false), (100, true), (30_000, true), (30_000, false)] {
                let (dtype, reduce, algorithm) = (Dtype::F32, ReduceOp::Sum, Algorithm::Transpose);
                let case = Case { world_size, elems, dtype, reduce, algorithm, in_place };
                check(case, Net::with_incast(world_size, Some(incast), |_| common::NORMAL));
                check(case, Net::with_incast(world_size, Some(incast), lossy(7, 10)));
            }
        }
    }
}

#[test]
fn all_reduce_of_a_large_bucket_is_exact() {
    for world_size in [1, 2, 3, 4, 7, 8] {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::I64, Dtype::U32] {
            for (algorithm, in_place) in [
                (Algorithm::Ring, true),
                (Algorithm::Transpose, true),
                (Algorithm::WeightedTranspose, true),
                (Algorithm::WeightedTranspose, false),
                (Algorithm::Auto, false),
            ] {
                let case =
                    Case { world_size, elems: 100_003, dtype, reduce: ReduceOp::Avg, algorithm, in_place };
                check(case, Net::perfect(world_size));
            }
        }
    }
}

// test of: mlt/order-free, report/streaming
#[test]
fn loss_and_reordering_change_nothing_in_a_reliable_all_reduce() {
    for seed in 0..6 {
        for algorithm in [Algorithm::Ring, Algorithm::Transpose, Algorithm::WeightedTranspose] {
            let (dtype, reduce, in_place) = (Dtype::F32, ReduceOp::Avg, seed % 2 == 0);
            let case = Case { world_size: 4, elems: 20_000, dtype, reduce, algorithm, in_place };
            check(case, Net::new(4, lossy(seed, 5)));
        }
    }
}

#[test]
fn halves_are_summed_in_float32_and_rounded_once_by_every_schedule() {
    // 256 + 1 is not a bfloat16; summed there, each one would vanish. In float32 seven of them count.
    let results = |algorithm| {
        let mut tensors: Vec<Tensor> = (0..8_u32)
            .map(|rank| tensor(Dtype::Bf16, 100, move |_| if rank == 0 { 2 * 256 } else { 2 }))
            .collect();
        let mut net = Net::perfect(8);
        for rank in 0..8 {
            let request = all_reduce(&mut tensors[rank as usize], algorithm);
            net.submit(rank, Request { dtype: Dtype::Bf16, ..request });
        }
        net.run_all(1);
        tensors
    };
    // 256 + 7 = 263 rounds to 264, the nearest bfloat16.
    let want = tensor(Dtype::Bf16, 100, |_| 2 * 264);
    for algorithm in [
        Algorithm::Auto,
        Algorithm::Transpose,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::ParameterServer,
        Algorithm::WeightedTranspose,
        Algorithm::OneShot,
    ] {
        assert!(results(algorithm).iter().all(|tensor| tensor.0 == want.0), "{algorithm:?}");
    }
}

#[test]
fn every_reduction_reaches_every_rank() {
    type Formula = fn(u32, usize) -> i64;
    let cases: [(ReduceOp, Formula); 7] = [
        (ReduceOp::Min, |_, index| pattern(index)),
        (ReduceOp::Max, |world_size, index| i64::from(world_size) * pattern(index)),
        (ReduceOp::Product, |world_size, index| (0..world_size).map(|rank| input(rank, index)).product()),
        (ReduceOp::BitAnd, |world_size, index| {
            (0..world_size).map(|rank| input(rank, index)).fold(-1, |a, b| a & b)
        }),
        (ReduceOp::BitOr, |world_size, index| {
            (0..world_size).map(|rank| input(rank, index)).fold(0, |a, b| a | b)
        }),
        (ReduceOp::BitXor, |world_size, index| {
            (0..world_size).map(|rank| input(rank, index)).fold(0, |a, b| a ^ b)
        }),
        (ReduceOp::Sum, sum),
    ];
    for (reduce, formula) in cases {
        for algorithm in
            [Algorithm::Ring, Algorithm::Transpose, Algorithm::ParameterServer, Algorithm::WeightedTranspose]
        {
            let mut tensors: Vec<Tensor> =
                (0..3).map(|rank| tensor(Dtype::I32, 700, |index| 2 * input(rank, index))).collect();
            let mut net = Net::perfect(3);
            for rank in 0..3 {
                let request = all_reduce(&mut tensors[rank as usize], algorithm);
                net.submit(rank, Request { dtype: Dtype::I32, reduce, ..request });
            }
            net.run_all(1);
            let want = tensor(Dtype::I32, 700, |index| 2 * formula(3, index));
            assert!(tensors.iter().all(|tensor| tensor.0 == want.0), "{reduce:?} {algorithm:?}");
        }
    }
}

#[test]
fn a_scaled_sum_multiplies_by_the_factor() {
    for (world_size, algorithm) in [
        (1, Algorithm::Auto),
        (3, Algorithm::Ring),
        (3, Algorithm::Transpose),
        (3, Algorithm::ParameterServer),
        (3, Algorithm::WeightedTranspose),
    ] {
        let mut tensors: Vec<Tensor> =
            (0..world_size).map(|rank| tensor(Dtype::F32, 500, |index| 2 * input(rank, index))).collect();
        let mut net = Net::perfect(world_size);
        for rank in 0..world_size {
            let request = all_reduce(&mut tensors[rank as usize], algorithm);
            net.submit(rank, Request { reduce: ReduceOp::PremulSum(0.5), ..request });
        }
        net.run_all(1);
        let want = tensor(Dtype::F32, 500, |index| sum(world_size, index));
        assert!(tensors.iter().all(|tensor| tensor.0 == want.0));
    }
}

/// All that is sent to rank 3 for its shard is lost until a result has gone from rank 0 to rank 1: with a barrier in front of the
/// gather stage nothing would ever end.
// test of: ultima/transpose
#[test]
fn no_rank_waits_for_the_shard_of_another_before_it_sends_back_its_own() {
    let has_begun = Rc::new(Cell::new(false));
    let seen = Rc::clone(&has_begun);
    let mut net = Net::new(4, move |packet| {
        let stage = packet.header.transfer.index();
        let is_data = packet.header.kind == Kind::Data;
        seen.set(seen.get() || is_data && (stage, packet.from, packet.to) == (1, 0, 1));
        match is_data && stage == 0 && packet.to == 3 && !seen.get() {
            true => Fate::Drop,
            false => NORMAL,
        }
    });
    let mut tensors: Vec<Tensor> = (0..4).map(|_| Tensor::f32([1.0; 20_000])).collect();
    for (rank, tensor) in (0..).zip(&mut tensors) {
        net.submit(rank, all_reduce(tensor, Algorithm::Transpose));
    }
    net.run_all(1);
    assert!(has_begun.get() && tensors.iter().all(|tensor| tensor.to_f32() == [4.0; 20_000]));
}

/// More ranks than a mask of 64 bits holds; after a warm-up of one round, which is exact, nothing is sent again.
// test of: ultima/transpose
#[test]
fn a_transpose_among_65_ranks_is_exact_and_a_timed_one_is_the_mean_of_what_arrived() {
    const RANKS: u32 = 65;
    let elems = RANKS as usize * 400;
    let deadline = DeadlineRule::WarmUp { rounds: 1, percentile: 0.95 };
    let policy = Policy { deadline, ..Policy::ULTIMA };
    let mut count = 0;
    // Without jitter: datagrams that arrive together are handled together, or 4160 connections take minutes.
    let mut net = Net::new(RANKS, move |_| {
        count += 1;
        if scatter(count, 100) == 0 {
            Fate::Drop
        } else {
            NORMAL
        }
    });
    let value = |rank: u32, index: usize| (pattern(index) + i64::from(rank)) as f32;
    let mut uncounted = [0; 2];
    for (number, uncounted) in uncounted.iter_mut().enumerate() {
        let mut tensors: Vec<Tensor> =
            (0..RANKS).map(|rank| Tensor::f32((0..elems).map(|index| value(rank, index)))).collect();
        for (rank, tensor) in (0..RANKS).zip(&mut tensors) {
            let request = all_reduce(tensor, Algorithm::Transpose);
            net.submit(rank, Request { policy, reduce: ReduceOp::Avg, ..request });
        }
        net.run_all(number + 1);
        let report = |rank: u32| net.done[rank as usize].values().last().expect("it has ended").as_ref();
        let mut counted = vec![(0_u32, 0.0_f32); elems];
        for rank in 0..RANKS {
            let mut values: Vec<(u32, f32)> = (0..elems).map(|index| (1, value(rank, index))).collect();
            for range in &report(rank).expect("it ended well").uncounted {
                values[range.start as usize..range.end as usize].fill((0, 0.0));
                *uncounted += range.end - range.start;
            }
            counted.iter_mut().zip(values).for_each(|(sum, value)| *sum = (sum.0 + value.0, sum.1 + value.1));
        }
        for (rank, tensor) in (0..RANKS).zip(tensors.iter().map(Tensor::to_f32)) {
            let mut results: Vec<f32> = counted.iter().map(|(count, sum)| sum / *count as f32).collect();
            // Results are not sent again either.
            for range in &report(rank).expect("it ended well").filled {
                results[range.start as usize..range.end as usize].fill(0.0);
            }
            assert!(tensor == results, "call {number}");
        }
    }
    assert!(uncounted[0] == 0 && uncounted[1] > 0, "{uncounted:?}");
}
