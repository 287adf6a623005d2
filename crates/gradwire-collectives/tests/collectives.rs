//! The exact collectives other than all-reduce, point to point, and many operations at once.

use crate::common::{all_reduce, lossy, request, Net, Tensor};
use gradwire_collectives::{Algorithm, Collective, DeadlineRule, OpError, Policy, ReduceOp, Request, View};
use std::time::Duration;

const WORLDS: [u32; 5] = [1, 2, 3, 5, 8];
const LENGTHS: [usize; 4] = [0, 1, 10, 3000];

/// Element `index` of row `row` of `rank`'s data; sums over 8 ranks stay below 2^24, so that float32 holds them exactly.
fn value(rank: u32, row: u32, index: usize) -> f32 {
    (rank * 100_000 + row * 10_000) as f32 + index as f32
}

fn row(rank: u32, row: u32, elems: usize) -> impl Iterator<Item = f32> {
    (0..elems).map(move |index| value(rank, row, index))
}

fn rows(rank: u32, world_size: u32, elems: usize) -> Tensor {
    Tensor::f32((0..world_size).flat_map(|r| row(rank, r, elems)))
}

fn zeros(elems: usize) -> Tensor {
    Tensor::f32((0..elems).map(|_| 0.0))
}

/// Runs one collective on every rank of a lossy network; `views` gives a rank's input and output.
fn run(world_size: u32, collective: &Collective, mut views: impl FnMut(u32) -> (View, View)) {
    let mut net = Net::new(world_size, lossy(u64::from(world_size), 3));
    for rank in 0..world_size {
        let (input, output) = views(rank);
        net.submit(rank, Request { input, output, ..request(collective.clone()) });
    }
    net.run_all(1);
    (0..world_size).for_each(|rank| _ = net.report(rank));
}

fn each(world_size: u32, make: impl Fn(u32) -> Tensor) -> Vec<Tensor> {
    (0..world_size).map(make).collect()
}

fn on_all(mut check: impl FnMut(u32, usize)) {
    for world_size in WORLDS {
        for elems in LENGTHS {
            check(world_size, elems);
        }
    }
}

#[test]
fn broadcast_gives_the_roots_data_to_everybody() {
    on_all(|world_size, elems| {
        for root in [0, world_size - 1] {
            let mut data = each(world_size, |rank| Tensor::f32(row(rank, 0, elems)));
            run(world_size, &Collective::Broadcast { root }, |rank| {
                (View::EMPTY, data[rank as usize].view())
            });
            let want = Tensor::f32(row(root, 0, elems));
            assert!(data.iter().all(|got| got.0 == want.0));
        }
    });
}

#[test]
fn all_gather_puts_every_row_in_its_place() {
    on_all(|world_size, elems| {
        let mut inputs = each(world_size, |rank| Tensor::f32(row(rank, 0, elems)));
        let mut outputs = each(world_size, |_| zeros(world_size as usize * elems));
        run(world_size, &Collective::AllGather, |rank| {
            (inputs[rank as usize].view(), outputs[rank as usize].view())
        });
        let want = Tensor::f32((0..world_size).flat_map(|rank| row(rank, 0, elems)));
        assert!(outputs.iter().all(|got| got.0 == want.0));
    });
}

#[test]
fn reduce_scatter_gives_each_rank_the_sum_of_its_row() {
    on_all(|world_size, elems| {
        let mut inputs = each(world_size, |rank| rows(rank, world_size, elems));
        let mut outputs = each(world_size, |_| zeros(elems));
        run(world_size, &Collective::ReduceScatter, |rank| {
            (inputs[rank as usize].view(), outputs[rank as usize].view())
        });
        for rank in 0..world_size {
            let sum = |index| (0..world_size).map(|from| value(from, rank, index)).sum();
            assert!(outputs[rank as usize].0 == Tensor::f32((0..elems).map(sum)).0);
        }
    });
}

#[test]
fn reduce_gives_the_sum_to_the_root_alone() {
    on_all(|world_size, elems| {
        let root = world_size / 2;
        let mut inputs = each(world_size, |rank| Tensor::f32(row(rank, 0, elems)));
        let mut output = zeros(elems);
        run(world_size, &Collective::Reduce { root }, |rank| {
            (inputs[rank as usize].view(), if rank == root { output.view() } else { View::EMPTY })
        });
        let sum = |index| (0..world_size).map(|from| value(from, 0, index)).sum();
        assert!(output.0 == Tensor::f32((0..elems).map(sum)).0);
    });
}

#[test]
fn gather_and_scatter_are_each_others_inverse() {
    on_all(|world_size, elems| {
        let root = world_size - 1;
        let mut inputs = each(world_size, |rank| Tensor::f32(row(rank, 0, elems)));
        let mut gathered = zeros(world_size as usize * elems);
        run(world_size, &Collective::Gather { root }, |rank| {
            (inputs[rank as usize].view(), if rank == root { gathered.view() } else { View::EMPTY })
        });
        assert!(gathered.0 == Tensor::f32((0..world_size).flat_map(|rank| row(rank, 0, elems))).0);
        let mut scattered = each(world_size, |_| zeros(elems));
        run(world_size, &Collective::Scatter { root }, |rank| {
            (if rank == root { gathered.view() } else { View::EMPTY }, scattered[rank as usize].view())
        });
        (0..world_size as usize).for_each(|rank| assert!(scattered[rank].0 == inputs[rank].0));
    });
}

#[test]
fn all_to_all_moves_parts_of_any_size() {
    for world_size in WORLDS {
        // Rank i gives i * 10 + j elements to rank j; zero from 0 to 0.
        let part = |from: u32, to: u32| (from * 10 + to) as usize;
        let mut net = Net::new(world_size, lossy(7, 3));
        let mut inputs = each(world_size, |from| {
            Tensor::f32((0..world_size).flat_map(|to| row(from, to, part(from, to))))
        });
        let mut outputs = each(world_size, |to| zeros((0..world_size).map(|from| part(from, to)).sum()));
        for rank in 0..world_size {
            let collective = Collective::AllToAll {
                input_split_bytes: (0..world_size).map(|to| 4 * part(rank, to)).collect(),
                output_split_bytes: (0..world_size).map(|from| 4 * part(from, rank)).collect(),
            };
            let (input, output) = (inputs[rank as usize].view(), outputs[rank as usize].view());
            net.submit(rank, Request { input, output, ..request(collective) });
        }
        net.run_all(1);
        for rank in 0..world_size {
            let want = Tensor::f32((0..world_size).flat_map(|from| row(from, rank, part(from, rank))));
            assert!(outputs[rank as usize].0 == want.0);
        }
    }
}

#[test]
fn a_barrier_holds_everybody_until_the_last_has_come() {
    let mut net = Net::perfect(4);
    (0..3).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
    net.run_for(std::time::Duration::from_millis(500));
    assert!(net.done.iter().all(|done| done.is_empty()), "rank 3 has not come");
    net.submit(3, request(Collective::Barrier));
    net.run_all(1);
}

fn send(net: &mut Net, from: u32, to: u32, tag: u32, data: &mut Tensor) {
    net.submit(from, Request { input: data.view(), ..request(Collective::Send { to, tag }) });
}

fn receive(net: &mut Net, at: u32, from: Option<u32>, tag: u32, data: &mut Tensor) {
    net.submit(at, Request { output: data.view(), ..request(Collective::Receive { from, tag }) });
}

#[test]
fn messages_are_matched_by_tag_and_do_not_overtake_each_other() {
    let mut net = Net::new(2, lossy(3, 10));
    let mut sent = each(12, |message| Tensor::f32(row(message, 0, 1000)));
    let mut got = each(12, |_| zeros(1000));
    for (message, data) in sent.iter_mut().enumerate() {
        send(&mut net, 0, 1, message as u32 % 3, data);
    }
    // The receiver asks tag by tag.
    for tag in 0..3 {
        for (_, data) in got.iter_mut().enumerate().filter(|(message, _)| *message as u32 % 3 == tag) {
            receive(&mut net, 1, Some(0), tag, data);
        }
    }
    net.run_all(12);
    assert!(sent.iter().zip(&got).all(|(sent, got)| sent.0 == got.0));
    let reports = net.done.iter().flatten().map(|(_, outcome)| outcome.as_ref().expect("arrived"));
    assert!(reports.into_iter().all(|report| !report.in_sequence), "their numbers are a rank's own");
}

#[test]
fn a_receive_from_anybody_takes_what_comes_first() {
    let mut net = Net::perfect(3);
    let (mut first, mut second) = (Tensor::f32(row(1, 0, 50)), Tensor::f32(row(2, 0, 50)));
    let (mut one, mut two) = (zeros(50), zeros(50));
    send(&mut net, 2, 0, 9, &mut second);
    net.run_for(std::time::Duration::from_millis(5));
    send(&mut net, 1, 0, 9, &mut first);
    net.run_for(std::time::Duration::from_millis(5));
    receive(&mut net, 0, None, 9, &mut one);
    receive(&mut net, 0, None, 9, &mut two);
    net.run_until(Duration::from_secs(5), |net| net.done[0].len() == 2 && net.done[2].len() == 1);
    assert!(one.0 == second.0 && two.0 == first.0);
}

#[test]
fn many_buckets_in_flight_do_not_mix() {
    for algorithm in [Algorithm::Ring, Algorithm::Transpose] {
        let (world_size, buckets) = (4, 100_u32);
        let mut net = Net::new(world_size, lossy(11, 2));
        let elems = |bucket: u32| (bucket as usize * 37) % 900;
        let mut data: Vec<Vec<Tensor>> = (0..buckets)
            .map(|bucket| each(world_size, |rank| Tensor::f32(row(rank, bucket % 8, elems(bucket)))))
            .collect();
        // More than may be in flight: the rest waits its turn. Priorities differ on purpose.
        for (bucket, tensors) in data.iter_mut().enumerate() {
            for rank in 0..world_size {
                let request = all_reduce(&mut tensors[rank as usize], algorithm);
                net.submit(rank, Request { priority: bucket as u8 % 3, ..request });
            }
        }
        net.run_all(buckets as usize);
        for (bucket, tensors) in data.iter().enumerate() {
            let bucket = bucket as u32;
            let sum = |index| (0..world_size).map(|rank| value(rank, bucket % 8, index)).sum();
            let want = Tensor::f32((0..elems(bucket)).map(sum));
            assert!(tensors.iter().all(|got| got.0 == want.0), "bucket {bucket}");
        }
    }
}

#[test]
fn a_late_rank_loses_nothing_and_its_peers_report_the_wait() {
    let mut net = Net::perfect(3);
    let mut data = each(3, |rank| Tensor::f32(row(rank, 0, 200_000)));
    (0..2).for_each(|rank| _ = net.submit(rank, all_reduce(&mut data[rank as usize], Algorithm::Transpose)));
    net.run_for(std::time::Duration::from_millis(300));
    assert!(net.done.iter().all(|done| done.is_empty()));
    net.submit(2, all_reduce(&mut data[2], Algorithm::Transpose));
    net.run_all(1);
    let want = Tensor::f32((0..200_000).map(|index| (0..3).map(|rank| value(rank, 0, index)).sum()));
    assert!(data.iter().all(|got| got.0 == want.0));
    let waits: Vec<u128> = net.report(0).peers.iter().map(|peer| peer.waited_for_peer.as_millis()).collect();
    assert!(waits[0] < 10 && waits[1] >= 299, "waited for ranks 1 and 2: {waits:?} ms");
}

#[test]
fn requests_that_every_rank_refuses_leave_the_group_working() {
    let mut net = Net::perfect(2);
    let (mut short, mut long, mut other, mut flags) = (zeros(3), zeros(4), zeros(4), Tensor(vec![1; 16]));
    let wrong = |collective, input, output| Request { input, output, ..request(collective) };
    let all = Collective::AllReduce { algorithm: Algorithm::Auto };
    let requests = [
        wrong(all.clone(), short.view(), long.view()),
        wrong(Collective::Broadcast { root: 2 }, View::EMPTY, long.view()),
        wrong(Collective::AllGather, long.view(), long.view()),
        wrong(Collective::Send { to: 2, tag: 0 }, long.view(), View::EMPTY),
        wrong(
            Collective::AllToAll { input_split_bytes: vec![12, 4], output_split_bytes: vec![8, 12] },
            long.view(),
            other.view(),
        ),
        Request { reduce: ReduceOp::BitAnd, ..all_reduce(&mut long, Algorithm::Auto) },
        Request { residual: short.view(), ..all_reduce(&mut long, Algorithm::Auto) },
        Request { residual: long.view(), ..all_reduce(&mut long, Algorithm::Auto) },
        Request {
            dtype: gradwire_collectives::Dtype::Bool,
            reduce: ReduceOp::Avg,
            ..all_reduce(&mut flags, Algorithm::Auto)
        },
        Request {
            policy: gradwire_collectives::Policy::AUTO,
            ..wrong(Collective::Barrier, View::EMPTY, View::EMPTY)
        },
    ];
    let count = requests.len();
    for request in requests {
        for rank in 0..2 {
            let op = net.submit(rank, request.clone());
            net.run_for(std::time::Duration::ZERO);
            let outcome = net.outcome(rank, op);
            assert!(matches!(outcome, Err(OpError::Invalid(_))), "{outcome:?}");
        }
    }
    let barriers = [0, 1].map(|rank| net.submit(rank, request(Collective::Barrier)));
    net.run_all(count + 1);
    assert!((0..2).all(|rank| net.outcome(rank, barriers[rank as usize]).is_ok()));
}

#[test]
fn the_sixteen_bits_of_an_operation_number_may_wrap() {
    let mut net = Net::perfect(2);
    let rounds = 66_000;
    for round in 0..rounds / 50 {
        for _ in 0..50 {
            (0..2).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
        }
        net.run_all(50 * (round + 1));
    }
    let mut data = each(2, |rank| Tensor::f32(row(rank, 0, 100)));
    (0..2).for_each(|rank| _ = net.submit(rank, all_reduce(&mut data[rank as usize], Algorithm::Ring)));
    net.run_all(rounds + 1);
    assert!(net.done.iter().flat_map(|done| done.values()).all(Result::is_ok));
    let want = Tensor::f32((0..100).map(|index| value(0, 0, index) + value(1, 0, index)));
    assert!(data.iter().all(|got| got.0 == want.0));
}

#[test]
fn a_small_result_is_there_one_way_after_it_was_made_and_is_confirmed_before_the_goodbye() {
    let (mut net, mut data) = (Net::perfect(4), each(4, |rank| Tensor::f32(row(rank, 0, 256))));
    net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
    (0..4).for_each(|rank| _ = net.submit(rank, all_reduce(&mut data[rank as usize], Algorithm::Transpose)));
    let submitted = net.now;
    net.run_all(1);
    // Contributions one way, results another; a third for the confirmation would make it 150 us.
    assert_eq!((net.now - submitted).as_micros(), 100);
    let now = net.now;
    net.groups.iter_mut().for_each(|group| group.leave(now));
    assert!(!net.groups[0].is_drained());
    net.run_until(Duration::from_secs(1), |net| net.groups.iter().all(|group| group.is_drained()));
    assert!(net.done.iter().flat_map(|done| done.values()).all(Result::is_ok));
}

/// More is copied of a result than of contributions, and also where these may be lost. What is larger waits one way longer.
#[test]
fn a_result_of_a_quarter_of_a_megabyte_is_not_waited_for_until_it_is_confirmed() {
    const LARGEST: usize = 1 << 16;
    for (policy, algorithm) in [
        (Policy::RELIABLE, Algorithm::Transpose),
        (Policy::AUTO, Algorithm::Transpose),
        (Policy::RELIABLE, Algorithm::Ring),
    ] {
        let time_of = |elems: usize| {
            let (mut net, mut data) = (Net::perfect(4), each(4, |rank| Tensor::f32(row(rank, 0, elems))));
            net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
            let submitted = net.now;
            (0..4).for_each(|rank| {
                let request = all_reduce(&mut data[rank as usize], algorithm);
                _ = net.submit(rank, Request { policy, ..request });
            });
            net.run_all(1);
            let took = net.now - submitted;
            let now = net.now;
            net.groups.iter_mut().for_each(|group| group.leave(now));
            net.run_until(Duration::from_secs(1), |net| net.groups.iter().all(|group| group.is_drained()));
            let want = Tensor::f32((0..elems).map(|index| (0..4).map(|rank| value(rank, 0, index)).sum()));
            assert!(data.iter().all(|got| got.0 == want.0), "{policy:?} over {algorithm:?}");
            took
        };
        let (copied, confirmed) = (time_of(LARGEST), time_of(LARGEST + 1));
        let one_way = Duration::from_micros(50);
        assert!(confirmed >= copied + one_way, "{policy:?} over {algorithm:?}: {copied:?}, {confirmed:?}");
    }
}

#[test]
fn a_send_of_nothing_waits_for_its_receiver_like_any_other() {
    let (mut net, mut nothing) = (Net::perfect(2), [Tensor(Vec::new()), Tensor(Vec::new())]);
    net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
    send(&mut net, 0, 1, 3, &mut nothing[0]);
    net.run_for(Duration::from_millis(500));
    assert!(net.done[0].is_empty(), "nobody has received it");
    receive(&mut net, 1, Some(0), 3, &mut nothing[1]);
    net.run_all(1);
    assert!(net.done.iter().flat_map(|done| done.values()).all(Result::is_ok));
}

/// A stage may end without anything of a rank: that its result is there says nothing about that rank.
#[test]
fn a_rank_of_which_nothing_came_is_waited_for_however_small_the_call() {
    for deadline_ms in [0, 5] {
        let deadline = DeadlineRule::Fixed(Duration::from_millis(deadline_ms));
        let policy = Policy { deadline, floor: 0.0, after_first_pass: false, ..Policy::AUTO };
        let (mut net, mut data) = (Net::perfect(3), each(3, |rank| Tensor::f32(row(rank, 0, 3000))));
        net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
        let mut submit = |net: &mut Net, rank: u32| {
            let request = all_reduce(&mut data[rank as usize], Algorithm::Transpose);
            _ = net.submit(rank, Request { policy, ..request });
        };
        (0..2).for_each(|rank| submit(&mut net, rank));
        net.run_for(Duration::from_millis(500));
        assert!(net.done.iter().all(|done| done.is_empty()), "it went on without rank 2");
        submit(&mut net, 2);
        net.run_all(1);
    }
}

#[test]
fn ranks_may_leave_at_once_after_a_small_call_on_a_lossy_network() {
    for seed in 0..20 {
        let elems = [100, 30_000][seed as usize % 2];
        let (mut net, mut data) =
            (Net::new(3, lossy(seed, 20)), each(3, |rank| Tensor::f32(row(rank, 0, elems))));
        (0..3).for_each(|rank| _ = net.submit(rank, all_reduce(&mut data[rank as usize], Algorithm::Ring)));
        for leaver in 0..3 {
            net.run_until(Duration::from_secs(20), |net| !net.done[leaver].is_empty());
            let now = net.now;
            net.groups[leaver].leave(now);
        }
        net.run_until(Duration::from_secs(20), |net| net.groups.iter().all(|group| group.is_drained()));
        let want = Tensor::f32((0..elems).map(|index| (0..3).map(|rank| value(rank, 0, index)).sum()));
        assert!(net.done.iter().flat_map(|done| done.values()).all(Result::is_ok), "{:?}", net.done);
        assert!(data.iter().all(|got| got.0 == want.0));
    }
}

#[test]
fn a_sum_scaled_by_what_is_no_number_is_none() {
    for algorithm in [Algorithm::Transpose, Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::OneShot] {
        for world_size in [1, 3] {
            let mut net = Net::perfect(world_size);
            let mut data = each(world_size, |rank| Tensor::f32(row(rank, 0, 1000)));
            for rank in 0..world_size {
                let request = all_reduce(&mut data[rank as usize], algorithm);
                net.submit(rank, Request { reduce: ReduceOp::PremulSum(f64::NAN), ..request });
            }
            net.run_all(1);
            let is_nan = |tensor: &Tensor| tensor.to_f32().iter().all(|value| value.is_nan());
            assert!(data.iter().all(is_nan), "{algorithm:?} among {world_size}");
        }
    }
}
