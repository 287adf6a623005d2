//! Tolerant all-reduce: what is missing is exactly what the network dropped, the mean is over what counted, every
//! replica holds the same bits, and what did not count is in the residual.

use crate::common::{all_reduce, lossy, Fate, Net, Packet, Tensor, CHUNK_BYTES, NORMAL};
use gradwire_collectives::core::{Flags, Kind};
use gradwire_collectives::{
    Algorithm, DeliveryReport, DivideBy, Dtype, GatherRule, Policy, ReduceOp, Request,
};
use std::time::Duration;

/// Stops as soon as its bound is met; results arrive whole.
const MLT_PUSH: Policy = Policy { gather: GatherRule::EXACT, ..Policy::MLT };
const CHUNK_ELEMS: usize = CHUNK_BYTES / 4;
/// Not in any input: whoever reads it in a residual knows that nothing was written there.
const UNTOUCHED: f32 = -1.0;

/// Small integers that differ between ranks: every order of summation gives the same bits.
fn value(rank: u32, index: usize) -> f32 {
    (index % 5) as f32 + (rank * 16) as f32
}

struct Run {
    world_size: u32,
    elems: usize,
    policy: Policy,
    results: Vec<Vec<f32>>,
    residuals: Vec<Vec<f32>>,
    reports: Vec<DeliveryReport>,
}

#[derive(Clone, Copy)]
struct Setting {
    world_size: u32,
    elems: usize,
    algorithm: Algorithm,
    policy: Policy,
    reduce: ReduceOp,
    in_place: bool,
}

fn run(setting: Setting, mut net: Net) -> Run {
    let Setting { world_size, elems, .. } = setting;
    let tensors = |value: &dyn Fn(u32, usize) -> f32| -> Vec<Tensor> {
        (0..world_size).map(|rank| Tensor::f32((0..elems).map(|index| value(rank, index)))).collect()
    };
    let (mut data, mut outputs, mut residuals) =
        (tensors(&value), tensors(&value), tensors(&|_, _| UNTOUCHED));
    for rank in 0..world_size {
        let at = rank as usize;
        let mut request = all_reduce(&mut data[at], setting.algorithm);
        if !setting.in_place {
            request.output = outputs[at].view();
        }
        let (policy, reduce, residual) = (setting.policy, setting.reduce, residuals[at].view());
        net.submit(rank, Request { policy, reduce, residual, ..request });
    }
    net.run_all(1);
    let results = if setting.in_place { &data } else { &outputs };
    Run {
        world_size,
        elems,
        policy: setting.policy,
        results: results.iter().map(Tensor::to_f32).collect(),
        residuals: residuals.iter().map(Tensor::to_f32).collect(),
        reports: (0..world_size).map(|rank| net.report(rank).clone()).collect(),
    }
}

impl Run {
    fn counts(&self, rank: u32, index: usize) -> bool {
        !self.reports[rank as usize].uncounted.iter().any(|range| range.contains(&(index as u64)))
    }

    /// The mean over the ranks whose value counted, as the transpose computes it; for a sum, scaled to all ranks.
    fn assert_transpose(&self, reduce: ReduceOp) {
        for index in 0..self.elems {
            let counted: Vec<u32> = (0..self.world_size).filter(|rank| self.counts(*rank, index)).collect();
            let sum: f32 = counted.iter().map(|rank| value(*rank, index)).sum();
            let (world_size, of_all) = (self.world_size as f32, self.policy.divide_by == DivideBy::World);
            let want = match reduce {
                ReduceOp::Avg if of_all => sum / world_size,
                ReduceOp::Avg => sum / counted.len() as f32,
                _ if of_all || counted.len() as u32 == self.world_size => sum,
                _ => sum * (f64::from(self.world_size) / counted.len() as f64) as f32,
            };
            for result in &self.results {
                assert_eq!(result[index].to_bits(), want.to_bits(), "element {index}");
            }
            let stands_in = match reduce {
                _ if of_all => 0.0,
                ReduceOp::Avg => want,
                _ => (1.0 / f64::from(self.world_size)) as f32 * want,
            };
            for rank in 0..self.world_size {
                let owed = value(rank, index) - stands_in;
                let want = if self.counts(rank, index) { UNTOUCHED } else { owed };
                assert_eq!(self.residuals[rank as usize][index], want, "residual of {rank} at {index}");
            }
        }
    }

    fn assert_replicas_identical(&self) {
        for result in &self.results[1..] {
            assert!(result.iter().zip(&self.results[0]).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    fn uncounted(&self) -> u64 {
        self.reports.iter().flat_map(|report| &report.uncounted).map(|range| range.end - range.start).sum()
    }
}

/// Loses the first transmission of data in the reduce stage of the transpose, where `lose` says so.
fn lose_chunks(lose: impl Fn(&Packet, usize) -> bool + 'static) -> impl FnMut(&Packet) -> Fate {
    move |packet| {
        let header = &packet.header;
        let first = header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED);
        let is_reduce = header.transfer.index() == 0;
        if first && is_reduce && lose(packet, header.offset as usize / CHUNK_BYTES) {
            return Fate::Drop;
        }
        NORMAL
    }
}

/// 40 chunks for each shard of 4 ranks.
const SETTING: Setting = Setting {
    world_size: 4,
    elems: 4 * 40 * CHUNK_ELEMS,
    algorithm: Algorithm::Transpose,
    policy: Policy::AUTO,
    reduce: ReduceOp::Avg,
    in_place: true,
};

#[test]
fn what_does_not_count_is_exactly_what_the_network_lost() {
    let settings = [ReduceOp::Avg, ReduceOp::Sum].into_iter().flat_map(|reduce| {
        let divisors = [DivideBy::Contributions, DivideBy::World];
        divisors.into_iter().flat_map(move |by| [true, false].map(move |in_place| (reduce, by, in_place)))
    });
    for (reduce, divide_by, in_place) in settings {
        // One chunk of 40 from each rank to each other, at a place of its own: within the bound of 5 %.
        let lost = |packet: &Packet, chunk| chunk == 3 + (5 * packet.from + packet.to) as usize;
        let policy = Policy { divide_by, ..Policy::AUTO };
        let run = run(Setting { in_place, reduce, policy, ..SETTING }, Net::new(4, lose_chunks(lost)));
        run.assert_transpose(reduce);
        for (rank, report) in run.reports.iter().enumerate() {
            let rank = rank as u32;
            // The first collective: shard j belongs to rank j.
            let want: Vec<_> = (0..4)
                .filter(|to| *to != rank)
                .map(|to| {
                    let start = (40 * to + 3 + 5 * rank + to) as u64 * CHUNK_ELEMS as u64;
                    start..start + CHUNK_ELEMS as u64
                })
                .collect();
            assert_eq!(report.uncounted, want, "rank {rank}");
            assert!((report.lost_share() - 1.0 / 40.0).abs() < 1e-9);
            assert_eq!((report.contributors_least, report.contributors), (3, 4), "{divide_by:?}");
            assert_eq!(report.bytes_expected - report.bytes_received, 3 * CHUNK_BYTES as u64);
            assert!(report.peers.iter().all(|peer| peer.closed_by == "bound_met"), "{:?}", report.peers);
        }
    }
}

#[test]
fn what_exceeds_the_bound_is_asked_for_again() {
    // Every fifth chunk: 20 % of a transfer, where 5 % may be missing.
    let run = run(SETTING, Net::new(4, lose_chunks(|_, chunk| chunk % 5 == 0)));
    run.assert_transpose(ReduceOp::Avg);
    for report in &run.reports {
        assert!(report.lost_share() <= 0.05 + 1e-9, "{}", report.lost_share());
        assert!(report.bytes_retransmitted > 0);
    }
}

#[test]
fn a_network_that_loses_nothing_loses_nothing() {
    let jitter =
        |packet: &Packet| Fate::Deliver(Duration::from_micros(50 + u64::from(packet.header.offset) % 60));
    for algorithm in [Algorithm::Ring, Algorithm::Transpose, Algorithm::WeightedTranspose] {
        let run = run(Setting { algorithm, ..SETTING }, Net::new(4, jitter));
        assert_eq!(run.uncounted(), 0);
        run.assert_transpose(ReduceOp::Avg);
        assert!(run.reports.iter().all(|report| report.lost_share() == 0.0));
    }
}

// test of: mlt/mean-over-contributions, ltp/packet-bubble, report/streaming, ltp/exact-broadcast, auto/identical-replicas
#[test]
fn every_seed_gives_the_mean_over_what_counted_and_identical_replicas() {
    let mut lost = 0;
    for seed in 0..12 {
        let policy = if seed % 2 == 0 { Policy::AUTO } else { MLT_PUSH };
        let in_place = seed % 3 != 0;
        let algorithm = if seed % 4 < 2 { SETTING.algorithm } else { Algorithm::WeightedTranspose };
        let setting = Setting { policy, in_place, algorithm, ..SETTING };
        let run = run(setting, Net::new(4, lossy(seed, 1 + seed % 4)));
        run.assert_transpose(ReduceOp::Avg);
        lost += run.uncounted();
    }
    assert!(lost > 0, "no seed lost anything: the test proves nothing");
}

// test of: mlt/colocated-servers
#[test]
fn servers_count_what_arrives_and_hand_what_did_not_back_to_its_rank() {
    let mut lost = 0;
    for seed in 0..12 {
        let servers = [1, 2, 3, 4][seed as usize % 4];
        let policy = if seed % 2 == 0 { Policy::AUTO } else { MLT_PUSH };
        let (algorithm, in_place) = (Algorithm::ParameterServer, seed % 3 != 0);
        let setting = Setting { policy, algorithm, in_place, ..SETTING };
        let run = run(setting, Net::with_servers(4, servers, lossy(200 + seed, 1 + seed % 4)));
        run.assert_transpose(ReduceOp::Avg);
        let reducing = run.reports.iter().filter(|report| !report.peers.is_empty()).count();
        assert_eq!(reducing, servers as usize);
        assert!(run.reports.iter().all(|report| report.collective == "all_reduce/parameter_server"));
        lost += run.uncounted();
    }
    assert!(lost > 0, "no seed lost anything: the test proves nothing");
}

// test of: auto/error-feedback
#[test]
fn a_ring_hands_on_the_lost_partial_sum_less_the_means_that_stood_in() {
    let mut lost = 0;
    for seed in 0..8 {
        let divide_by = if seed % 4 < 2 { DivideBy::World } else { DivideBy::Contributions };
        let setting = Setting {
            algorithm: Algorithm::Ring,
            policy: Policy { divide_by, ..Policy::AUTO },
            in_place: seed % 2 == 0,
            ..SETTING
        };
        let run = run(setting, Net::new(4, lossy(100 + seed, 3)));
        run.assert_replicas_identical();
        for index in 0..run.elems {
            // The chain of this element's shard begins at rank `shard`; each hop that lost it starts anew.
            let shard = index / (40 * CHUNK_ELEMS);
            let result = run.results[0][index];
            let (mut sum, mut count) = (0.0, 0_u8);
            for step in 0..4 {
                let rank = (shard + step) % 4;
                sum += value(rank as u32, index);
                count += 1;
                if step < 3 && !run.counts(rank as u32, index) {
                    let stood_in = if divide_by == DivideBy::World { 0.0 } else { f32::from(count) * result };
                    assert_eq!(run.residuals[rank][index], sum - stood_in, "what rank {rank} sent in vain");
                    (sum, count) = (0.0, 0);
                }
            }
            let want = sum / if divide_by == DivideBy::World { 4.0 } else { f32::from(count) };
            assert_eq!(result.to_bits(), want.to_bits(), "element {index}");
        }
        lost += run.uncounted();
    }
    assert!(lost > 0, "no seed lost anything: the test proves nothing");
}

// test of: auto/error-feedback
#[test]
fn what_is_not_finite_is_not_fed_back() {
    let lost = |packet: &Packet, chunk| packet.from == 1 && packet.to == 0 && chunk == 7;
    let mut net = Net::new(2, lose_chunks(lost));
    let values = [f32::INFINITY, 1.0];
    let mut data = values.map(|value| Tensor::f32(vec![value; 2 * 40 * CHUNK_ELEMS]));
    let mut residuals = [0, 1].map(|_| Tensor::f32(vec![0.0; 2 * 40 * CHUNK_ELEMS]));
    for rank in 0..2 {
        let residual = residuals[rank].view();
        let request = all_reduce(&mut data[rank], Algorithm::Transpose);
        let (reduce, policy) = (ReduceOp::Avg, Policy::AUTO);
        net.submit(rank as u32, Request { reduce, policy, residual, ..request });
    }
    net.run_all(1);
    assert_eq!(net.report(1).uncounted, vec![7 * CHUNK_ELEMS as u64..8 * CHUNK_ELEMS as u64]);
    assert!(residuals[1].to_f32().iter().all(|value| *value == 0.0), "1 less infinity");
}

// test of: auto/error-feedback
#[test]
fn what_is_owed_in_float16_is_at_most_what_that_can_hold() {
    // 40 000, its opposite, and the largest finite number with that sign.
    const VALUES: [u16; 2] = [0x78E2, 0xF8E2];
    const LEAST: u16 = 0xFBFF;
    let mut net = Net::new(2, lose_chunks(|packet, chunk| packet.from == 1 && chunk == 7));
    let tensor = |bits: u16| Tensor(bits.to_le_bytes().repeat(2 * 40 * 704));
    let (mut data, mut residuals) = (VALUES.map(tensor), [tensor(0), tensor(0)]);
    for rank in 0..2 {
        let residual = residuals[rank].view();
        let request = all_reduce(&mut data[rank], Algorithm::Transpose);
        let (dtype, reduce, policy) = (Dtype::F16, ReduceOp::Avg, Policy::AUTO);
        net.submit(rank as u32, Request { dtype, reduce, policy, residual, ..request });
    }
    net.run_all(1);
    for (at, owed) in residuals[1].0.chunks(CHUNK_BYTES).enumerate() {
        // Its value less the mean that stood in for it, the other rank's: 80 000 below zero.
        let want = if at == 7 { LEAST } else { 0 };
        assert!(owed == want.to_le_bytes().repeat(704), "chunk {at}");
    }
}

#[test]
fn halves_are_averaged_over_what_counted() {
    let mut net = Net::new(2, lose_chunks(|packet, chunk| packet.from == 1 && chunk == 7));
    // 40 chunks of 704 bfloat16 for each rank; 1.0 here, 3.0 there.
    let bf16 = |value: f32| value.to_le_bytes()[2..].to_vec();
    let mut tensors: Vec<Tensor> =
        [1.0, 3.0].into_iter().map(|value| Tensor(bf16(value).repeat(2 * 40 * 704))).collect();
    for rank in 0..2 {
        let request = all_reduce(&mut tensors[rank as usize], Algorithm::Transpose);
        net.submit(
            rank,
            Request { dtype: Dtype::Bf16, reduce: ReduceOp::Avg, policy: Policy::AUTO, ..request },
        );
    }
    net.run_all(1);
    let chunk = |at: usize| tensors[0].0[at * CHUNK_BYTES..(at + 1) * CHUNK_BYTES].to_vec();
    assert_eq!(chunk(7), bf16(1.0).repeat(704), "rank 0 alone");
    assert!((0..80).filter(|at| *at != 7).all(|at| chunk(at) == bf16(2.0).repeat(704)));
    assert!(tensors[0].0 == tensors[1].0);
}

// test of: auto/moving-cut, auto/error-feedback
/// Though its end is cut in every step, each element has every rank's say in nearly all of them, so what is owed stays of the size of a gradient.
#[test]
fn what_a_contract_cuts_in_each_step_is_not_the_same_part_and_no_debt_grows() {
    const RANKS: u32 = 2;
    const ELEMS: usize = RANKS as usize * 40 * CHUNK_ELEMS;
    let gradient = |rank: usize| rank as f32 + 1.0;
    let mut net = Net::perfect(RANKS);
    let mut owed = vec![vec![0.0_f32; ELEMS]; RANKS as usize];
    let mut cut = 0;
    for step in 1..=200 {
        let of = |rank: usize| Tensor::f32(owed[rank].iter().map(|debt| gradient(rank) + debt));
        let mut data: Vec<Tensor> = (0..RANKS as usize).map(of).collect();
        let mut residuals = vec![Tensor::f32(vec![0.0; ELEMS]); RANKS as usize];
        for rank in 0..RANKS {
            let at = rank as usize;
            let request = all_reduce(&mut data[at], Algorithm::Transpose);
            let residual = residuals[at].view();
            let call = Request { policy: MLT_PUSH, reduce: ReduceOp::Avg, residual, ..request };
            net.submit(rank, call);
        }
        net.run_all(1);
        cut += (0..RANKS).filter(|rank| !net.report(*rank).uncounted.is_empty()).count();
        net.done.iter_mut().for_each(|done| done.clear());
        owed = residuals.iter().map(Tensor::to_f32).collect();
        let largest =
            data.iter().map(Tensor::to_f32).chain(owed.iter().cloned()).flatten().fold(0.0, f32::max);
        assert!(largest < 8.0, "{largest} after {step} steps of gradients 1 and 2");
    }
    assert!(cut > 300, "only {cut} of 400 contributions were cut");
}
