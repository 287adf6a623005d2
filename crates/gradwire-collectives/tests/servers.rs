//! Dedicated parameter servers: ranks that call nothing and sum what the others push.

use crate::common::{self, all_reduce, lossy, request, scatter, Net, Tensor, NORMAL};
use gradwire_collectives::core::{Flags, Kind};
use gradwire_collectives::{
    Algorithm, Collective, DivideBy, Dtype, Fill, GatherRule, OpError, Policy, ReduceOp, Request, Tags,
};
use std::time::Duration;

const PLENTY: u64 = 1 << 30;
const PUSHED: Algorithm = Algorithm::ParameterServer;

fn input(rank: u32, index: usize) -> f32 {
    ((index % 7) as u32 + 16 * rank) as f32
}

fn inputs(world_size: u32, elems: usize) -> Vec<Tensor> {
    (0..world_size).map(|rank| Tensor::f32((0..elems).map(|index| input(rank, index)))).collect()
}

fn submit_all(net: &mut Net, tensors: &mut [Tensor], of: impl Fn(Request) -> Request) {
    for (rank, tensor) in tensors.iter_mut().enumerate() {
        net.submit(rank as u32, of(all_reduce(tensor, PUSHED)));
    }
}

fn sum(world_size: u32, index: usize) -> f32 {
    (0..world_size).map(|rank| input(rank, index)).sum()
}

// test of: ltp/dedicated-servers
#[test]
fn any_number_of_servers_sums_exactly_for_every_world_size_and_length() {
    for world_size in [1, 2, 3, 5, 8, 16] {
        for count in [1, 2, 5] {
            for elems in [0, 1, 17, 5000] {
                for percent in [0, 10] {
                    let case =
                        format!("{world_size} ranks, {count} servers, {elems} elements, {percent} % loss");
                    let seed = u64::from(world_size * 8 + count);
                    let mut net = Net::with_dedicated(world_size, (count, PLENTY), lossy(seed, percent));
                    let mut tensors = inputs(world_size, elems);
                    submit_all(&mut net, &mut tensors, |request| request);
                    net.run_all(1);
                    for tensor in &tensors {
                        let right = |(index, got): (usize, f32)| got == sum(world_size, index);
                        assert!(tensor.to_f32().into_iter().enumerate().all(right), "{case}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_server_counts_the_contributions_and_not_what_it_is_told_about_the_call() {
    let (workers, elems) = (3, 5000);
    let mut net = Net::with_dedicated(workers, (2, PLENTY), |_| NORMAL);
    let mut tensors = inputs(workers, elems);
    let tolerant = |request| Request { reduce: ReduceOp::Avg, policy: Policy::AUTO, ..request };
    submit_all(&mut net, &mut tensors, tolerant);
    net.run_all(1);
    net.run_for(Duration::from_secs(1));
    let served: Vec<_> = net.served.iter().flatten().collect();
    assert_eq!(served.len(), 2);
    let total = u64::from(workers) * elems as u64 * 4;
    assert_eq!(served.iter().map(|report| report.bytes_received).sum::<u64>(), total);
    assert_eq!(served.iter().map(|report| report.bytes_expected).sum::<u64>(), total);
    assert!(served.iter().all(|report| report.sources.is_empty()));
}

#[test]
fn every_reduction_of_every_dtype_begins_with_the_first_contribution_and_not_with_zero() {
    let reductions = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::BitAnd];
    for dtype in Dtype::ALL {
        for reduce in reductions.into_iter().filter(|reduce| dtype.supports(*reduce)) {
            let run = |algorithm, mut net: Net| {
                let mut tensors: Vec<Tensor> = (0..3_u64)
                    .map(|rank| Tensor((0..640).map(|at| numbers(dtype, rank * 640 + at)).collect()))
                    .collect();
                for (rank, tensor) in tensors.iter_mut().enumerate() {
                    let request = all_reduce(tensor, algorithm);
                    net.submit(rank as u32, Request { dtype, reduce, ..request });
                }
                net.run_all(1);
                tensors.into_iter().map(|tensor| tensor.0).collect::<Vec<_>>()
            };
            let served = run(PUSHED, Net::with_dedicated(3, (2, PLENTY), |_| NORMAL));
            assert!(served == run(Algorithm::Transpose, Net::perfect(3)), "{reduce:?} of {dtype:?}");
        }
    }
}

/// A byte of a tensor: small whole numbers in floats, so that every order of summation gives the same bits.
fn numbers(dtype: Dtype, at: u64) -> u8 {
    let (elem, byte) = (at / dtype.bytes() as u64, (at % dtype.bytes() as u64) as usize);
    let exponent = scatter(elem, 3);
    match dtype {
        Dtype::F32 => (2_f32.powi(exponent as i32)).to_le_bytes()[byte],
        Dtype::F64 => (2_f64.powi(exponent as i32)).to_le_bytes()[byte],
        Dtype::Bf16 => (2_f32.powi(exponent as i32)).to_le_bytes()[byte + 2],
        Dtype::F16 => (((15 + exponent) << 10) as u16).to_le_bytes()[byte],
        Dtype::Bool => scatter(at, 2) as u8,
        _ => scatter(at, 256) as u8,
    }
}

#[test]
fn halves_that_leave_a_server_without_a_shard_are_summed_by_the_others() {
    for elems in [1_usize, 40] {
        let mut net = Net::with_dedicated(2, (3, PLENTY), |_| NORMAL);
        let one = 1.0_f32.to_le_bytes()[2..].to_vec();
        let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(one.repeat(elems))).collect();
        submit_all(&mut net, &mut tensors, |request| Request { dtype: Dtype::Bf16, ..request });
        net.run_all(1);
        let two = 2.0_f32.to_le_bytes()[2..].to_vec();
        assert!(tensors.iter().all(|tensor| tensor.0 == two.repeat(elems)), "{elems}");
    }
}

#[test]
fn calls_over_servers_mix_with_others_and_many_are_in_flight() {
    let mut net = Net::with_dedicated(3, (2, PLENTY), lossy(5, 8));
    let mut tensors: Vec<Vec<Tensor>> = (0..30).map(|op| inputs(3, 100 + 211 * op)).collect();
    for tensors in &mut tensors {
        submit_all(&mut net, tensors, |request| request);
        (0..3).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
    }
    net.run_all(60);
    for tensor in tensors.iter().flatten() {
        assert!(tensor.to_f32().into_iter().enumerate().all(|(index, got)| got == sum(3, index)));
    }
    // A server's part is over when its workers have confirmed the last result.
    net.run_for(Duration::from_secs(1));
    assert!(net.served[3].len() == 30 && net.served[4].len() == 30);
    assert!(net.served[3].iter().all(|report| report.collective == "all_reduce/parameter_server"));
}

#[test]
fn a_scaled_sum_has_its_factor_and_a_mean_its_count() {
    // A factor of one is no setting that travels.
    let premul = ReduceOp::PremulSum;
    for (reduce, divisor) in [(premul(0.25), 4.0), (premul(1.0), 1.0), (ReduceOp::Avg, 2.0)] {
        let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
        let mut tensors = inputs(2, 3000);
        submit_all(&mut net, &mut tensors, |request| Request { reduce, ..request });
        net.run_all(1);
        let right = |(index, got): (usize, f32)| got == sum(2, index) / divisor;
        assert!(
            tensors.iter().all(|tensor| tensor.to_f32().into_iter().enumerate().all(right)),
            "{reduce:?}"
        );
    }
}

// test of: ltp/dedicated-servers
#[test]
fn a_server_keeps_the_contract_of_each_call_and_every_lost_value_is_in_its_residual() {
    let mut lost = 0;
    let mlt = Policy { gather: GatherRule::EXACT, ..Policy::MLT };
    let bounds = [mlt, Policy::AUTO, Policy { loss_bound: 0.2, floor: 0.8, ..mlt }];
    for (seed, policy) in (0..9).zip(bounds.into_iter().cycle()) {
        let (count, elems) = (1 + seed as u32 % 3, 40_000);
        let mut net = Net::with_dedicated(4, (count, PLENTY), lossy(seed, 6));
        let (mut tensors, mut residuals) = (inputs(4, elems), inputs(4, elems));
        for (rank, (tensor, residual)) in tensors.iter_mut().zip(&mut residuals).enumerate() {
            residual.0.fill(0);
            let request = all_reduce(tensor, PUSHED);
            let residual = residual.view();
            net.submit(rank as u32, Request { reduce: ReduceOp::Avg, policy, residual, ..request });
        }
        net.run_all(1);
        let results: Vec<Vec<f32>> = tensors.iter().map(Tensor::to_f32).collect();
        let rest: Vec<Vec<f32>> = residuals.iter().map(Tensor::to_f32).collect();
        for rank in 0..4 {
            let report = net.report(rank);
            let uncounted: u64 = report.uncounted.iter().map(|range| range.end - range.start).sum();
            assert_eq!(report.lost_share(), uncounted as f64 / elems as f64, "of what it pushed");
        }
        for index in 0..elems {
            let counts = |rank: &u32| {
                let uncounted = &net.report(*rank).uncounted;
                !uncounted.iter().any(|range| range.contains(&(index as u64)))
            };
            let counted: Vec<u32> = (0..4).filter(counts).collect();
            let total: f32 = counted.iter().map(|rank| input(*rank, index)).sum();
            let mean = if counted.is_empty() { 0.0 } else { total / counted.len() as f32 };
            for rank in 0..4 {
                assert_eq!(results[rank as usize][index].to_bits(), mean.to_bits(), "element {index}");
                let kept = if counted.contains(&rank) { 0.0 } else { input(rank, index) - mean };
                assert_eq!(rest[rank as usize][index], kept, "residual of {rank} at {index}");
            }
            lost += 4 - counted.len();
        }
        net.run_for(Duration::from_secs(1));
        for report in net.served[4..].iter().flatten() {
            assert!(report.lost_share() <= f64::from(policy.loss_bound), "{}", report.lost_share());
            assert_eq!(report.peers.len(), 4);
        }
    }
    assert!(lost > 0, "nothing was lost: the test proves nothing");
}

/// Loses the first packet of every push, once.
fn lose_first_pushes(packet: &common::Packet) -> common::Fate {
    let header = &packet.header;
    let is_push = header.kind == Kind::Data && header.transfer.index() == 0;
    match is_push && header.offset == 0 && !header.flags.contains(Flags::RETRANSMITTED) {
        true => common::Fate::Drop,
        false => NORMAL,
    }
}

// test of: mlt/fill
#[test]
fn a_block_that_no_worker_delivers_is_filled_and_reported_and_owed_less_what_fills_it() {
    let (elems, first) = (40 * common::CHUNK_BYTES / 4, common::CHUNK_BYTES / 4);
    let cases = [Fill::Zero, Fill::Local, Fill::Previous]
        .into_iter()
        .flat_map(|fill| [DivideBy::Contributions, DivideBy::World].map(move |by| (fill, by)));
    for (fill, divide_by) in cases {
        let mut net = Net::with_dedicated(2, (1, PLENTY), lose_first_pushes);
        let mut tensors = inputs(2, elems);
        let (mut outputs, mut residuals) = (inputs(2, elems), inputs(2, elems));
        let policy = Policy { gather: GatherRule { fill, ..GatherRule::EXACT }, divide_by, ..Policy::AUTO };
        for rank in 0..2 {
            outputs[rank].0.copy_from_slice(&Tensor::f32(vec![7.0; elems]).0);
            residuals[rank].0.fill(0);
            let (output, residual) = (outputs[rank].view(), residuals[rank].view());
            let request = all_reduce(&mut tensors[rank], PUSHED);
            net.submit(rank as u32, Request { reduce: ReduceOp::Avg, policy, output, residual, ..request });
        }
        net.run_all(1);
        for rank in 0..2 {
            let (output, owed) = (outputs[rank].to_f32(), residuals[rank].to_f32());
            let report = net.report(rank as u32);
            assert_eq!(report.filled, std::iter::once(0..first as u64).collect::<Vec<_>>(), "{fill:?}");
            assert_eq!(report.replicas_identical, fill == Fill::Zero, "{fill:?}");
            for index in 0..elems {
                let own = input(rank as u32, index);
                let filled = match fill {
                    Fill::Zero => 0.0,
                    Fill::Local => own,
                    Fill::Previous => 7.0,
                };
                let want = if index < first { (filled, own - filled) } else { (sum(2, index) / 2.0, 0.0) };
                assert_eq!((output[index], owed[index]), want, "{fill:?} {divide_by:?} {index}");
            }
        }
    }
}

#[test]
fn the_previous_result_cannot_be_kept_where_the_own_values_are() {
    let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
    let mut tensors = inputs(2, 100);
    let gather = GatherRule { fill: Fill::Previous, ..GatherRule::EXACT };
    submit_all(&mut net, &mut tensors, |request| Request {
        policy: Policy { gather, ..Policy::AUTO },
        ..request
    });
    net.run_all(1);
    assert!(matches!(net.error(0), OpError::Invalid(why) if why.to_string().contains("in place")));
}

// test of: ltp/dedicated-servers
#[test]
fn learned_thresholds_and_lossy_pulls_work_over_servers_too() {
    let warm_up = gradwire_collectives::DeadlineRule::WarmUp { rounds: 2, percentile: 0.95 };
    let dlcp = Policy { gather: GatherRule::bounded(0.05, Fill::Local), ..Policy::DLCP };
    for policy in [Policy { deadline: warm_up, ..Policy::ULTIMA }, Policy::LTP, dlcp] {
        let mut net = Net::with_dedicated(3, (2, PLENTY), lossy(11, 3));
        let mut rounds: Vec<Vec<Tensor>> = (0..6).map(|_| inputs(3, 30_000)).collect();
        for tensors in &mut rounds {
            submit_all(&mut net, tensors, |request| Request { reduce: ReduceOp::Avg, policy, ..request });
        }
        net.run_all(6);
        assert!((0..3).all(|rank| net.done[rank].values().all(Result::is_ok)), "{policy:?}");
    }
}

// test of: mlt/gradient-aware-queueing
#[test]
fn a_server_sends_results_in_the_class_of_the_gradients() {
    let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
    let mut tensors = inputs(2, 30_000);
    submit_all(&mut net, &mut tensors, |request| Request {
        reduce: ReduceOp::Avg,
        policy: Policy::AUTO,
        tags: Tags { class: 2, importance: None },
        ..request
    });
    net.run_all(1);
    for (worker, stats) in net.groups[2].stats() {
        let sent = stats.tags.sent;
        assert!(sent[2] > 0 && sent.iter().sum::<u64>() == sent[2], "to worker {worker}: {sent:?}");
    }
}

#[test]
fn a_call_that_exceeds_the_memory_of_a_server_fails_on_every_rank_with_both_numbers() {
    let mut net = Net::with_dedicated(2, (1, 10_000), |_| NORMAL);
    let mut tensors = inputs(2, 5000);
    submit_all(&mut net, &mut tensors, |request| request);
    net.run_all(1);
    for rank in 0..2 {
        let OpError::ServerMemory { rank, needed, bytes_max, .. } = net.error(rank) else {
            panic!("{}", net.error(rank))
        };
        assert_eq!((*rank, *needed, *bytes_max), (2, 20_000, 10_000));
    }
}

#[test]
fn who_comes_later_to_a_call_that_exceeds_the_memory_of_a_server_is_told_which() {
    let mut net = Net::with_dedicated(2, (1, 10_000), |_| NORMAL);
    let mut tensors = inputs(2, 5000);
    // Calls over servers have numbers of their own.
    (0..2).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
    net.run_all(1);
    net.submit(0, all_reduce(&mut tensors[0], PUSHED));
    net.run_until(Duration::from_secs(5), |net| net.groups[1].has_failed());
    net.submit(1, all_reduce(&mut tensors[1], PUSHED));
    net.run_until(Duration::from_secs(5), |net| net.done[0].len() == 2 && net.done[1].len() == 2);
    for (rank, number) in [(0, 1), (1, 0)] {
        let failed = net.done[rank].values().find_map(|outcome| outcome.as_ref().err());
        let Some(OpError::ServerMemory { during, .. }) = failed else { panic!("{failed:?}") };
        assert_eq!(*during, format!("all_reduce/parameter_server #{number} (5000 x F32)"), "rank {rank}");
    }
}

#[test]
fn calls_that_do_not_fit_together_wait_for_each_other() {
    let mut net = Net::with_dedicated(2, (1, 20_000), lossy(3, 5));
    let mut tensors: Vec<Vec<Tensor>> = (0..12).map(|op| inputs(2, 5000 - 300 * op)).collect();
    tensors.iter_mut().for_each(|tensors| submit_all(&mut net, tensors, |request| request));
    net.run_all(12);
    for tensor in tensors.iter().flatten() {
        assert!(tensor.to_f32().into_iter().enumerate().all(|(index, got)| got == sum(2, index)));
    }
}

// test of: ltp/dedicated-servers
#[test]
fn a_server_that_dies_is_named_by_every_worker_and_a_worker_that_dies_by_every_server() {
    for (dead, named) in [(3, "host3"), (1, "host1")] {
        let mut net = Net::with_dedicated(3, (2, PLENTY), |_| NORMAL);
        net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
        net.dead.push(dead);
        let mut tensors = inputs(3, 50_000);
        submit_all(&mut net, &mut tensors, |request| request);
        net.run_all(1);
        for rank in (0..3).filter(|rank| *rank != dead) {
            let error = net.error(rank).to_string();
            assert!(error.contains(&format!("rank {dead} ({named}) is lost")), "{error}");
        }
        net.run_for(Duration::from_secs(5));
        assert!(net.deserted.is_empty(), "nobody left in good order");
    }
}

#[test]
fn a_server_is_done_when_the_last_worker_has_left_and_calls_nothing_itself() {
    let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
    let mut tensors = inputs(2, 100);
    submit_all(&mut net, &mut tensors, |request| request);
    net.submit(2, request(Collective::Barrier));
    net.run_all(1);
    assert!(matches!(net.error(2), OpError::Invalid(_)));
    let now = net.now;
    net.groups[0].leave(now);
    net.run_for(Duration::from_secs(1));
    assert!(net.deserted.is_empty());
    let now = net.now;
    net.groups[1].leave(now);
    net.run_for(Duration::from_secs(1));
    assert_eq!(net.deserted, [2]);
}

#[test]
fn workers_that_call_different_things_are_told_which() {
    let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
    let (mut short, mut long) = (Tensor::f32([1.0; 500]), Tensor::f32([1.0; 501]));
    net.submit(0, all_reduce(&mut short, PUSHED));
    net.submit(1, all_reduce(&mut long, PUSHED));
    net.run_all(1);
    for rank in 0..2 {
        let OpError::Mismatch(mismatch) = net.error(rank) else { panic!("{}", net.error(rank)) };
        assert_eq!((mismatch.rank_a, mismatch.a.elems, mismatch.rank_b, mismatch.b.elems), (0, 500, 1, 501));
    }
}

/// As of workers of another version: byte 1 of the settings names a rule that nobody knows.
#[test]
fn settings_that_a_server_cannot_read_fail_the_call_on_every_rank_and_name_the_worker() {
    let spoil = |packet: &common::Packet| match (packet.header.kind, packet.header.transfer.index()) {
        (Kind::Data, 2) => common::Fate::Damage(packet.bytes.len() - 72 + 1, 200),
        _ => NORMAL,
    };
    let mut net = Net::with_dedicated(2, (1, PLENTY), spoil);
    let mut tensors = inputs(2, 5000);
    submit_all(&mut net, &mut tensors, |request| Request { policy: Policy::AUTO, ..request });
    net.run_all(1);
    for rank in 0..2 {
        let error = net.error(rank).to_string();
        assert!(error.contains("rank 2 (host2) aborted") && error.contains("rank 0 ("), "{error}");
    }
}

#[test]
fn a_server_that_left_while_nothing_went_on_is_named_by_the_next_call_over_it() {
    let mut net = Net::with_dedicated(2, (1, PLENTY), |_| NORMAL);
    let mut tensors = inputs(2, 200_000);
    submit_all(&mut net, &mut tensors, |request| request);
    net.run_all(1);
    let now = net.now;
    net.groups[2].leave(now);
    net.run_until(Duration::from_secs(20), |net| net.groups[2].is_drained());
    // Its process is gone: nothing answers any more.
    net.dead.push(2);
    submit_all(&mut net, &mut tensors, |request| request);
    net.run_until(Duration::from_secs(20), |net| net.done[..2].iter().all(|done| done.len() == 2));
    for rank in 0..2 {
        let last = net.done[rank].values().last().expect("it has ended");
        assert!(matches!(last, Err(OpError::PeerLeft { rank: 2, .. })), "{last:?}");
    }
}
