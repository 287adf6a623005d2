//! What a delivery report says: for every collective who sent what, and for every schedule whether a rank was slow or a link.

use crate::common::{all_reduce, request, Fate, Net, Packet, Tensor, NORMAL, PEER_TIMEOUT};
use gradwire_collectives::{Algorithm, Collective, DeliveryReport, ReduceOp, Request, View};
use std::time::Duration;

const RANKS: u32 = 4;
/// 240 KB.
const ELEMS: usize = 60_000;
const LATE: Duration = Duration::from_millis(300);

/// Every way to reduce a bucket.
#[derive(Clone, Copy, Debug)]
enum Way {
    Schedule(Algorithm, Option<u32>),
    Colocated(u32),
    Dedicated(u32),
}

const WAYS: [Way; 8] = [
    Way::Schedule(Algorithm::Transpose, None),
    Way::Schedule(Algorithm::Transpose, Some(1)),
    Way::Schedule(Algorithm::Ring, None),
    Way::Schedule(Algorithm::HalvingDoubling, None),
    Way::Schedule(Algorithm::WeightedTranspose, None),
    Way::Colocated(1),
    Way::Colocated(4),
    Way::Dedicated(2),
];

/// One all-reduce that rank 2 calls `late`; the reports.
fn reduce(way: Way, late: Duration, fate: impl FnMut(&Packet) -> Fate + 'static) -> Vec<DeliveryReport> {
    let (mut net, algorithm) = match way {
        Way::Schedule(algorithm, incast) => (Net::with_incast(RANKS, incast, fate), algorithm),
        Way::Colocated(count) => (Net::with_servers(RANKS, count, fate), Algorithm::ParameterServer),
        Way::Dedicated(count) => {
            (Net::with_dedicated(RANKS, (count, 1 << 30), fate), Algorithm::ParameterServer)
        }
    };
    net.run_until(Duration::from_secs(5), |net| net.connected.iter().all(|connected| *connected));
    // A few pings, which are short, show how fast the way is.
    net.run_for(PEER_TIMEOUT / 2);
    let mut tensors: Vec<Tensor> = (0..RANKS).map(|_| Tensor::f32(vec![1.0; ELEMS])).collect();
    for (rank, tensor) in tensors.iter_mut().enumerate().filter(|(rank, _)| *rank != 2) {
        net.submit(rank as u32, all_reduce(tensor, algorithm));
    }
    net.run_for(late);
    net.submit(2, all_reduce(&mut tensors[2], algorithm));
    net.run_all(1);
    assert!(tensors.iter().all(|tensor| tensor.to_f32() == vec![RANKS as f32; ELEMS]), "{way:?}");
    (0..RANKS).map(|rank| net.report(rank).clone()).collect()
}

// test of: report/delivery
#[test]
fn a_rank_that_calls_late_is_waiting_for_compute_in_every_schedule() {
    for way in WAYS {
        for (rank, report) in reduce(way, LATE, |_| NORMAL).into_iter().enumerate() {
            let waited = report.compute_wait;
            let expected = if rank == 2 { Duration::ZERO } else { LATE };
            // Half of the fastest round trip is taken off, which is what a packet takes here.
            assert!(waited.abs_diff(expected) < Duration::from_millis(1), "{way:?}, rank {rank}: {waited:?}");
            assert_eq!(waited + report.network_wait, report.elapsed, "{way:?}, rank {rank}");
        }
    }
}

#[test]
fn a_slow_link_is_waiting_for_the_network_in_every_schedule() {
    for way in WAYS {
        // Everything that rank 2 sends goes through a queue of 1 MB/s without end.
        let mut free_us = 0;
        let slow = move |packet: &Packet| {
            if packet.from != 2 {
                return NORMAL;
            }
            let sent_us = u64::from(packet.header.sent_at_us);
            free_us = sent_us.max(free_us) + packet.bytes.len() as u64;
            Fate::Deliver(Duration::from_micros(50 + free_us - sent_us))
        };
        for (rank, report) in reduce(way, Duration::ZERO, slow).into_iter().enumerate() {
            let (waited, elapsed) = (report.compute_wait, report.elapsed);
            assert!(elapsed > Duration::from_millis(150), "{way:?}, rank {rank}: {elapsed:?} is not slow");
            // All called at once. A full packet takes 1.4 ms longer than those that the queue was measured with.
            assert!(waited < Duration::from_millis(2), "{way:?}, rank {rank}: {waited:?} of {elapsed:?}");
        }
    }
}

/// What a rank's report must say: peers that contributed, sources of copies, elements from each of them, ranks in what it reduced.
type Told = (Vec<u32>, Vec<u32>, u64, u16);

/// What every rank reports of a collective among `RANKS`, each with `elems` elements in and out of it.
fn told(request_of: &dyn Fn(u32, View, View) -> Option<Request>, case: &str) -> Vec<Option<Told>> {
    let mut net = Net::perfect(RANKS);
    let row = |_| Tensor::f32(vec![1.0; RANKS as usize * ROW]);
    let (mut inputs, mut outputs): (Vec<_>, Vec<_>) =
        ((0..RANKS).map(row).collect(), (0..RANKS).map(row).collect());
    let mut calls = Vec::new();
    for rank in 0..RANKS {
        let (input, output): (&mut Tensor, &mut Tensor) =
            (&mut inputs[rank as usize], &mut outputs[rank as usize]);
        calls.push(request_of(rank, input.view(), output.view()).map(|request| net.submit(rank, request)));
    }
    net.run_until(Duration::from_secs(5), |net| {
        calls.iter().zip(&net.done).all(|(call, done)| call.is_none() || done.len() == 1)
    });
    let reports = (0..RANKS).zip(&calls).map(|(rank, call)| {
        let report = call.map(|_| net.report(rank))?;
        let all = || report.peers.iter().chain(&report.sources);
        let elems: Vec<u64> = all().map(|peer| peer.elems_expected).collect();
        for peer in all() {
            assert_eq!((peer.closed_by, peer.elems_received), ("all_arrived", peer.elems_expected), "{case}");
        }
        assert!(elems.windows(2).all(|pair| pair[0] == pair[1]), "{case}: {elems:?}");
        let bytes = 4 * elems.iter().sum::<u64>();
        assert_eq!((report.bytes_received, report.bytes_expected), (bytes, bytes), "{case}");
        assert_eq!(report.compute_wait + report.network_wait, report.elapsed, "{case}");
        assert_eq!(report.contributors, report.contributors_least, "{case}: nothing was lost");
        assert!(report.uncounted.is_empty() && report.filled.is_empty() && report.replicas_identical);
        let ranks =
            |peers: &[gradwire_collectives::PeerDelivery]| peers.iter().map(|peer| peer.rank).collect();
        Some((
            ranks(&report.peers),
            ranks(&report.sources),
            elems.first().copied().unwrap_or(0),
            report.contributors,
        ))
    });
    reports.collect()
}

/// Elements of a row.
const ROW: usize = 1600;

fn others(rank: u32) -> Vec<u32> {
    (0..RANKS).filter(|other| *other != rank).collect()
}

/// The first row of a tensor of `RANKS` rows.
fn row(view: View) -> View {
    // SAFETY: the tensor behind `view` is so long, and outlives the call.
    unsafe { View::new(view.as_slice().as_ptr().cast_mut(), 4 * ROW) }
}

fn at_root(rank: u32, view: View) -> View {
    if rank == 3 {
        view
    } else {
        View::EMPTY
    }
}

fn call(collective: &Collective, input: View, output: View) -> Option<Request> {
    Some(Request { input, output, reduce: ReduceOp::Sum, ..request(collective.clone()) })
}

fn check(name: &str, of: &dyn Fn(u32, View, View) -> Option<Request>, want: &dyn Fn(u32) -> Option<Told>) {
    for (rank, told) in (0..RANKS).zip(told(of, name)) {
        assert_eq!(told, want(rank), "{name}, rank {rank}");
    }
}

// test of: report/delivery
#[test]
fn every_reduction_tells_who_sent_what() {
    let reducing = |algorithm| Collective::AllReduce { algorithm };
    check("transpose", &|_, input, output| call(&reducing(Algorithm::Transpose), input, output), &|rank| {
        Some((others(rank), others(rank), ROW as u64, 4))
    });
    check("ring", &|_, input, output| call(&reducing(Algorithm::Ring), input, output), &|rank| {
        Some((vec![(rank + 3) % 4], vec![(rank + 3) % 4], 3 * ROW as u64, 4))
    });
    check(
        "every rank a server",
        &|_, input, output| call(&reducing(Algorithm::ParameterServer), input, output),
        &|rank| Some((others(rank), others(rank), ROW as u64, 4)),
    );
    check(
        "reduce-scatter",
        &|_, input, output| call(&Collective::ReduceScatter, input, row(output)),
        &|rank| Some((others(rank), vec![], ROW as u64, 4)),
    );
    check(
        "reduce",
        &|rank, input, output| call(&Collective::Reduce { root: 3 }, input, at_root(rank, output)),
        &|rank| Some(if rank == 3 { (others(3), vec![], 4 * ROW as u64, 4) } else { (vec![], vec![], 0, 0) }),
    );
}

// test of: report/delivery
#[test]
fn every_collective_that_copies_tells_who_sent_what() {
    check(
        "broadcast",
        &|_, _, output| call(&Collective::Broadcast { root: 1 }, View::EMPTY, output),
        &|rank| {
            // A binomial tree: 1 to 3 and 2, 2 to 0.
            let parent = [vec![2], vec![], vec![1], vec![1]][rank as usize].clone();
            Some((vec![], parent.clone(), if parent.is_empty() { 0 } else { 4 * ROW as u64 }, 0))
        },
    );
    check("all-gather", &|_, input, output| call(&Collective::AllGather, row(input), output), &|rank| {
        Some((vec![], others(rank), ROW as u64, 0))
    });
    check(
        "gather",
        &|rank, input, output| call(&Collective::Gather { root: 3 }, row(input), at_root(rank, output)),
        &|rank| Some(if rank == 3 { (vec![], others(3), ROW as u64, 0) } else { (vec![], vec![], 0, 0) }),
    );
    check(
        "scatter",
        &|rank, input, output| call(&Collective::Scatter { root: 3 }, at_root(rank, input), row(output)),
        &|rank| Some(if rank == 3 { (vec![], vec![], 0, 0) } else { (vec![], vec![3], ROW as u64, 0) }),
    );
    let splits = vec![4 * ROW; RANKS as usize];
    let to_all = Collective::AllToAll { input_split_bytes: splits.clone(), output_split_bytes: splits };
    check("all-to-all", &|_, input, output| call(&to_all, input, output), &|rank| {
        Some((vec![], others(rank), ROW as u64, 0))
    });
    check("barrier", &|_, _, _| call(&Collective::Barrier, View::EMPTY, View::EMPTY), &|rank| {
        Some((vec![], others(rank), 0, 0))
    });
    let pair = |rank, input: View, output: View| match rank {
        0 => call(&Collective::Send { to: 2, tag: 7 }, row(input), View::EMPTY),
        2 => call(&Collective::Receive { from: Some(0), tag: 7 }, View::EMPTY, row(output)),
        _ => None,
    };
    check("send and receive", &pair, &|rank| match rank {
        0 => Some((vec![], vec![], 0, 0)),
        2 => Some((vec![], vec![0], ROW as u64, 0)),
        _ => None,
    });
}
