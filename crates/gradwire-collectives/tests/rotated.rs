//! Rotated all-reduces: nothing changes where nothing is lost, what is lost is spread over the bucket, the mean is over what
//! counted of the rotated values, and what did not count is in the residual, turned back.

use crate::common::{all_reduce, lossy, request, Fate, Net, Packet, Tensor, CHUNK_BYTES, NORMAL};
use gradwire_collectives::core::wire::{HEADER_BYTES, OPENING_BYTES};
use gradwire_collectives::core::{Flags, Kind};
use gradwire_collectives::{
    Algorithm, Collective, DeadlineRule, DeliveryReport, Dtype, Fill, GatherRule, Hadamard, OpError, Policy,
    ReduceOp, Request, Rotation, WholeHadamard,
};
use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

const ROTATED: Policy = Policy { rotation: Rotation::On, ..Policy::AUTO };
/// What the groups of a test agree on when they connect.
const GROUP: u64 = 1;

/// Small integers that differ between ranks: every order of summation gives the same bits, rotated or not.
fn value(rank: u32, index: usize) -> f32 {
    (index % 5) as f32 + (rank * 16) as f32
}

struct Run {
    results: Vec<Vec<f32>>,
    residuals: Vec<Vec<f32>>,
    reports: Vec<DeliveryReport>,
}

fn run(elems: usize, request_of: impl Fn(Request) -> Request, mut net: Net) -> Run {
    let world_size = net.groups.len() as u32;
    let tensors = |value: &dyn Fn(u32, usize) -> f32| -> Vec<Tensor> {
        (0..world_size).map(|rank| Tensor::f32((0..elems).map(|index| value(rank, index)))).collect()
    };
    let (mut data, mut residuals) = (tensors(&value), tensors(&|_, _| 0.0));
    for rank in 0..world_size {
        let at = rank as usize;
        let base = all_reduce(&mut data[at], Algorithm::Transpose);
        let request = request_of(Request { policy: ROTATED, reduce: ReduceOp::Avg, ..base });
        net.submit(rank, Request { residual: residuals[at].view(), ..request });
    }
    net.run_all(1);
    Run {
        results: data.iter().map(Tensor::to_f32).collect(),
        residuals: residuals.iter().map(Tensor::to_f32).collect(),
        reports: (0..world_size).map(|rank| net.report(rank).clone()).collect(),
    }
}

fn spread(elems: usize, values: impl IntoIterator<Item = f32>) -> Vec<f32> {
    if let Some(whole) = WholeHadamard::of(elems) {
        let mut bucket = Tensor::f32(values);
        whole.spread(Dtype::F32, GROUP, &mut bucket.0, &mut Vec::new());
        return bucket.to_f32();
    }
    let hadamard = Hadamard::of(elems).expect("large enough");
    let mut target = Tensor(vec![0; 4 * hadamard.padded()]);
    hadamard.spread(Dtype::F32, GROUP, &Tensor::f32(values).0, &mut target.0, &mut Vec::new());
    target.to_f32()
}

fn restored(elems: usize, values: Vec<f32>) -> Vec<f32> {
    if let Some(whole) = WholeHadamard::of(elems) {
        let mut bucket = Tensor::f32(values);
        whole.restore(Dtype::F32, GROUP, &mut bucket.0, &mut Vec::new());
        return bucket.to_f32();
    }
    let hadamard = Hadamard::of(elems).expect("large enough");
    let mut target = Tensor(vec![0; 4 * elems]);
    hadamard.restore(Dtype::F32, GROUP, &Tensor::f32(values).0, &mut target.0, &mut Vec::new());
    target.to_f32()
}

#[test]
fn without_loss_a_rotated_reduction_gives_the_same_bits_in_every_schedule() {
    for algorithm in [
        Algorithm::Transpose,
        Algorithm::Ring,
        Algorithm::HalvingDoubling,
        Algorithm::WeightedTranspose,
        Algorithm::OneShot,
        Algorithm::Auto,
    ] {
        for elems in [2_048, 10_001, 70_003] {
            let of = |request| Request {
                collective: Collective::AllReduce { algorithm },
                reduce: ReduceOp::Sum,
                ..request
            };
            let run = run(elems, of, Net::perfect(4));
            let sum = |index| (0..4).map(|rank| value(rank, index)).sum::<f32>();
            for result in &run.results {
                assert!(
                    result.iter().enumerate().all(|(index, got)| *got == sum(index)),
                    "{algorithm:?} {elems}"
                );
            }
            for report in &run.reports {
                assert_eq!(report.rotated_elems, Hadamard::of(elems).map_or(0, Hadamard::padded) as u64);
                assert!(report.elems == elems as u64 && report.uncounted.is_empty());
            }
            assert!(run.residuals.iter().flatten().all(|value| *value == 0.0));
        }
    }
}

// test of: ultima/hadamard
#[test]
fn what_is_lost_is_left_out_of_the_rotated_mean_and_comes_back_in_the_residual() {
    lost_and_found(150_007, 4, 8);
}

// test of: ultima/hadamard
#[test]
fn a_large_bucket_is_turned_where_it_is_whether_the_output_is_the_input_or_not() {
    lost_and_found((1 << 20) + 4_321, 2, 1);
    let elems = (1 << 20) + 77;
    let mut net = Net::perfect(2);
    let mut inputs: Vec<Tensor> =
        (0..2).map(|rank| Tensor::f32((0..elems).map(|at| value(rank, at)))).collect();
    let mut outputs: Vec<Tensor> = (0..2).map(|_| Tensor::f32((0..elems).map(|_| f32::NAN))).collect();
    for rank in 0..2 {
        let at = rank as usize;
        let base = all_reduce(&mut outputs[at], Algorithm::Transpose);
        let request = Request { policy: ROTATED, reduce: ReduceOp::Avg, input: inputs[at].view(), ..base };
        net.submit(rank, request);
    }
    net.run_all(1);
    for rank in 0..2 {
        assert_eq!(net.report(rank).rotated_elems, elems as u64);
        let input = inputs[rank as usize].to_f32();
        assert!(input.iter().enumerate().all(|(at, got)| *got == value(rank, at)), "the input is left alone");
        let result = outputs[rank as usize].to_f32();
        let off =
            result.iter().enumerate().map(|(at, got)| (got - (value(0, at) + value(1, at)) / 2.0).abs());
        assert!(off.fold(0.0, f32::max) < 1e-3, "off by more than the rounding of values up to 20");
    }
}

/// Reduces over links that lose packets, and compares results and residuals with what the reports say about the rotated values.
fn lost_and_found(elems: usize, ranks: u32, seeds: u64) {
    let mut lost = 0;
    for seed in 0..seeds {
        let run = run(elems, |request| request, Net::new(ranks, lossy(seed, 1 + seed % 4)));
        let inputs: Vec<Vec<f32>> =
            (0..ranks).map(|rank| spread(elems, (0..elems).map(|index| value(rank, index)))).collect();
        let counts = |rank: usize, place: usize| {
            !run.reports[rank].uncounted.iter().any(|range| range.contains(&(place as u64)))
        };
        let mean = |place: usize| {
            let counted: Vec<usize> = (0..inputs.len()).filter(|rank| counts(*rank, place)).collect();
            counted.iter().map(|rank| inputs[*rank][place]).sum::<f32>() / counted.len() as f32
        };
        let expected = restored(elems, (0..inputs[0].len()).map(mean).collect());
        for result in &run.results {
            assert!(result.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()), "seed {seed}");
        }
        for (rank, residual) in run.residuals.iter().enumerate() {
            // Its value less the mean that stood in for it.
            let late =
                |place: usize| if counts(rank, place) { 0.0 } else { inputs[rank][place] - mean(place) };
            assert!(*residual == restored(elems, (0..inputs[rank].len()).map(late).collect()), "rank {rank}");
        }
        lost += run.reports.iter().flat_map(|report| &report.uncounted).count();
    }
    assert!(lost > 0, "no seed lost anything: the test proves nothing");
}

#[test]
fn a_lost_packet_costs_many_elements_a_little() {
    let elems = 70_000;
    let lost = |packet: &Packet| {
        let header = &packet.header;
        let is_new = header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED);
        // The third packet of what rank 1 sends to be reduced.
        let is_third = header.transfer.index() == 0 && header.offset as usize == 2 * CHUNK_BYTES;
        if packet.from == 1 && is_new && is_third {
            Fate::Drop
        } else {
            NORMAL
        }
    };
    // One of 13 packets is more than the bound of `auto`.
    let policy = Policy { loss_bound: 0.1, floor: 0.5, ..ROTATED };
    let run = run(elems, |request| Request { policy, ..request }, Net::new(4, lost));
    assert_eq!(run.reports[1].uncounted.len(), 3, "one packet on its way to each other rank");
    let mean = |index: usize| (0..4).map(|rank| value(rank, index)).sum::<f32>() / 4.0;
    let off = |at: usize, got: &f32| (got - mean(at)).abs();
    let result = &run.results[0];
    let touched = result.iter().enumerate().filter(|(at, got)| off(*at, got) > 1e-3).count();
    assert!(touched > elems / 2, "{touched} of {elems} elements are off");
    // A rank that is missing from the mean of a value moves it by up to 8.
    let worst = result.iter().enumerate().map(|(at, got)| off(at, got)).fold(0.0, f32::max);
    assert!(worst < 8.0, "an element is off by {worst}");
}

/// What rank 0 sends to be reduced in each of `calls` calls of the same tensor: bytes of the one other rank's shard.
fn sent_by_rank_0(elems: usize, calls: usize) -> Vec<Vec<u8>> {
    let sent = Rc::new(RefCell::new(vec![Vec::new(); calls]));
    let seen = Rc::clone(&sent);
    let mut net = Net::new(2, move |packet| {
        let header = &packet.header;
        if packet.from == 0 && header.kind == Kind::Data && header.transfer.index() == 0 {
            let opening = if header.flags.contains(Flags::OPENING) { OPENING_BYTES } else { 0 };
            let payload = &packet.bytes[HEADER_BYTES + opening..];
            let shard: &mut Vec<u8> = &mut seen.borrow_mut()[header.transfer.op() as usize];
            let end = header.offset as usize + payload.len();
            shard.resize(end.max(shard.len()), 0);
            shard[header.offset as usize..end].copy_from_slice(payload);
        }
        NORMAL
    });
    let mut tensors: Vec<Tensor> =
        (0..2 * calls).map(|_| Tensor::f32((0..elems).map(|index| value(0, index)))).collect();
    for (at, tensor) in tensors.iter_mut().enumerate() {
        let request = all_reduce(tensor, Algorithm::Transpose);
        net.submit(at as u32 % 2, Request { policy: ROTATED, ..request });
    }
    net.run_all(calls);
    drop(net);
    sent.take()
}

#[test]
fn each_collective_of_a_group_is_sent_with_signs_of_its_own() {
    let elems = 4_096;
    let rotated = |sequence: u64| {
        let seed = GROUP ^ sequence.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let tensor = Tensor::f32((0..elems).map(|index| value(0, index)));
        let hadamard = Hadamard::of(elems).expect("large enough");
        let mut target = vec![0; 4 * hadamard.padded()];
        hadamard.spread(Dtype::F32, seed, &tensor.0, &mut target, &mut Vec::new());
        target
    };
    for (sequence, sent) in (0..).zip(sent_by_rank_0(elems, 3)) {
        for other in 0..3 {
            let halves = rotated(other);
            let is_its_own = halves.chunks(halves.len() / 2).any(|half| half == sent);
            assert_eq!(is_its_own, sequence == other, "call {sequence} with the signs of {other}");
        }
    }
}

#[test]
fn what_cannot_lose_anything_or_is_small_is_sent_as_it_is() {
    let of = |elems: usize, policy: Policy| {
        run(elems, |request| Request { policy, ..request }, Net::perfect(2)).reports[0].rotated_elems
    };
    assert_eq!(of(2_047, ROTATED), 0);
    assert_eq!(of(2_048, ROTATED), 2_048);
    assert_eq!(of(2_048, Policy { rotation: Rotation::On, ..Policy::RELIABLE }), 0);
    assert_eq!(
        of(2_048, Policy { rotation: Rotation::Auto, ..Policy::AUTO }),
        0,
        "nobody has measured a loss"
    );
    let warm_up = DeadlineRule::WarmUp { rounds: 2, percentile: 0.95 };
    assert_eq!(of(2_048, Policy { rotation: Rotation::On, deadline: warm_up, ..Policy::ULTIMA }), 0);
}

#[test]
fn auto_rotates_from_the_place_on_at_which_all_ranks_know_that_much_is_lost() {
    let rotated_by_auto = |percent| {
        let mut net = Net::new(3, lossy(1, percent));
        let policy = Policy { rotation: Rotation::Auto, ..Policy::AUTO };
        let mut rotated = vec![Vec::new(); 3];
        for round in 1..=60 {
            let mut tensors: Vec<Tensor> = (0..3).map(|_| Tensor::f32(vec![1.0; 20_000])).collect();
            for (rank, tensor) in tensors.iter_mut().enumerate() {
                net.submit(rank as u32, Request { policy, ..all_reduce(tensor, Algorithm::Transpose) });
            }
            net.run_all(round);
        }
        for (rank, reports) in net.done.iter().enumerate() {
            let reports = reports.values().flatten();
            rotated[rank].extend(reports.map(|report| (report.sequence, report.rotated_elems > 0)));
        }
        assert!(rotated[1] == rotated[0] && rotated[2] == rotated[0], "every rank rotates the same ones");
        rotated.swap_remove(0)
    };
    assert!(rotated_by_auto(0).iter().all(|(_, rotated)| !rotated));
    let (before, after): (Vec<_>, Vec<_>) = rotated_by_auto(15).into_iter().partition(|(at, _)| *at < 40);
    assert!(!before.is_empty() && before.iter().all(|(_, rotated)| !rotated), "nobody knows yet");
    assert!(!after.is_empty() && after.iter().all(|(_, rotated)| *rotated), "{after:?}");
}

#[test]
fn ranks_that_disagree_about_the_rotation_find_out() {
    let mut net = Net::perfect(2);
    let mut tensors = [Tensor::f32(vec![1.0; 5_000]), Tensor::f32(vec![1.0; 5_000])];
    for (rank, rotation) in [Rotation::On, Rotation::Off].into_iter().enumerate() {
        let policy = Policy { rotation, ..Policy::AUTO };
        net.submit(rank as u32, Request { policy, ..all_reduce(&mut tensors[rank], Algorithm::Transpose) });
    }
    net.run_all(1);
    for rank in 0..2 {
        let OpError::Mismatch(mismatch) = net.error(rank) else { panic!("{}", net.error(rank)) };
        assert!(mismatch.a.collective.contains("rotated") && !mismatch.b.collective.contains("rotated"));
    }
}

#[test]
fn what_cannot_be_rotated_is_refused() {
    let refused = |change: &dyn Fn(Request) -> Request| {
        let mut net = Net::perfect(2);
        let (mut input, mut output) = (Tensor(vec![0; 80_000]), Tensor(vec![0; 80_000]));
        let collective = Collective::AllReduce { algorithm: Algorithm::Transpose };
        let (input, output) = (input.view(), output.view());
        let base = Request { input, output, policy: ROTATED, ..request(collective) };
        let op = net.submit(0, change(base));
        net.run_for(Duration::from_millis(1));
        matches!(net.done[0].get(&op), Some(Err(OpError::Invalid(_))))
    };
    assert!(refused(&|request| Request { dtype: Dtype::F64, ..request }));
    let previous = GatherRule::bounded(0.1, Fill::Previous);
    let fills =
        |request: Request| Request { policy: Policy { gather: previous, ..request.policy }, ..request };
    assert!(refused(&fills));
    assert!(refused(&|request| Request { output: request.input, ..fills(request) }));
    assert!(!refused(&|request| request));
}
