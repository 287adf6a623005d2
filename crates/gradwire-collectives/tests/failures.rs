//! How groups fail: every rank, within its time, with the same typed cause.

use crate::common::{all_reduce, lossy, request, Fate, Net, Tensor, NORMAL, PEER_TIMEOUT};
use gradwire_collectives::{Algorithm, Collective, Dtype, OpError, Policy, ReduceOp, Request, View};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

fn data(elems: usize) -> Tensor {
    Tensor::f32((0..elems).map(|index| index as f32))
}

/// Submits one request for each rank and gives the error of each.
fn errors(mut net: Net, requests: Vec<Request>) -> Vec<OpError> {
    let count = requests.len() as u32;
    for (rank, request) in requests.into_iter().enumerate() {
        net.submit(rank as u32, request);
    }
    net.run_all(1);
    (0..count).map(|rank| net.error(rank).clone()).collect()
}

/// All ranks raise the same mismatch between `pair`; returns the two calls as people read them.
fn assert_mismatch(errors: &[OpError], sequence: u64) -> (String, String) {
    let OpError::Mismatch(first) = &errors[0] else { panic!("{:?}", errors[0]) };
    assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
    assert_eq!((first.a.sequence, first.b.sequence), (sequence, sequence));
    assert!(first.rank_a < first.rank_b);
    (format!("{} {}", first.rank_a, first.a), format!("{} {}", first.rank_b, first.b))
}

#[test]
fn different_shapes_are_found_and_named_on_every_rank() {
    for elems in [1001, 0, 300_000] {
        let mut tensors = [data(1000), data(1000), data(elems)];
        let requests = tensors.iter_mut().map(|tensor| all_reduce(tensor, Algorithm::Transpose)).collect();
        for error in errors(Net::new(3, lossy(1, 2)), requests) {
            // Two ranks may find out at once, each about another pair; rank 2 is in every pair that disagrees.
            let (a, b) = assert_mismatch(&[error], 0);
            assert!(a.contains("all_reduce/transpose of 1000 x F32"), "{a}");
            assert_eq!(b, format!("2 all_reduce/transpose of {elems} x F32, Sum"));
        }
    }
}

#[test]
fn different_dtypes_reductions_policies_and_collectives_are_found() {
    type Change = fn(Request) -> Request;
    let changes: [(Change, &str); 5] = [
        (|request| Request { dtype: Dtype::I32, ..request }, "1 all_reduce/transpose of 1000 x I32, Sum"),
        (|request| Request { reduce: ReduceOp::Max, ..request }, "1 all_reduce/transpose of 1000 x F32, Max"),
        (|request| Request { policy: Policy::AUTO, ..request }, "1 all_reduce/transpose with settings"),
        (
            |request| Request { collective: Collective::AllReduce { algorithm: Algorithm::Ring }, ..request },
            "1 all_reduce/ring of 1000 x F32, Sum",
        ),
        (
            |request| Request {
                input: View::EMPTY,
                collective: Collective::Broadcast { root: 0 },
                ..request
            },
            "1 broadcast of 1000 x F32, root 0",
        ),
    ];
    for (change, named) in changes {
        let mut tensors = [data(1000), data(1000)];
        let mut requests: Vec<Request> =
            tensors.iter_mut().map(|tensor| all_reduce(tensor, Algorithm::Transpose)).collect();
        requests[1] = change(requests[1].clone());
        let errors = errors(Net::perfect(2), requests);
        let (_, b) = assert_mismatch(&errors, 0);
        assert!(b.starts_with(named), "{b} is not {named}");
        let says_what_settings_are = errors[0].to_string().contains("the preset and what is given beside it");
        assert_eq!(says_what_settings_are, named.contains("settings"), "{}", errors[0]);
    }
}

#[test]
fn a_mismatch_in_which_nobody_sends_is_found_by_heartbeats() {
    let mut tensors = [data(10), data(10)];
    let [first, second] = &mut tensors;
    let broadcast = |root, output| Request { output, ..request(Collective::Broadcast { root }) };
    // Each waits for the other.
    let errors = errors(Net::perfect(2), vec![broadcast(1, first.view()), broadcast(0, second.view())]);
    let (a, b) = assert_mismatch(&errors, 0);
    assert_eq!(
        (a.as_str(), b.as_str()),
        ("0 broadcast of 10 x F32, root 1", "1 broadcast of 10 x F32, root 0")
    );
}

#[test]
fn a_call_that_one_rank_refuses_is_a_mismatch_for_the_others_and_hangs_nobody() {
    // The refusing rank is a receiver, or the root that everybody waits for; before or after the others call.
    type Wrong = fn(Request) -> Request;
    let mixed_up: Wrong = |request| Request { residual: request.output, ..request };
    let half: Wrong = |request| Request { input: View::EMPTY, ..request };
    let reduce = |tensor: &mut Tensor| all_reduce(tensor, Algorithm::Transpose);
    let ring = |tensor: &mut Tensor| all_reduce(tensor, Algorithm::Ring);
    let broadcast =
        |tensor: &mut Tensor| Request { output: tensor.view(), ..request(Collective::Broadcast { root: 0 }) };
    type Make<'a> = &'a dyn Fn(&mut Tensor) -> Request;
    let cases: [(Make<'_>, Wrong); 3] = [(&reduce, half), (&ring, half), (&broadcast, mixed_up)];
    for (case, (make, wrong)) in cases.into_iter().enumerate() {
        for refuses_first in [true, false] {
            let mut net = Net::new(3, lossy(case as u64, 2));
            let mut tensors = [data(2000), data(2000), data(2000)];
            let requests = tensors.each_mut().map(make);
            let refuse = |net: &mut Net| net.submit(0, wrong(requests[0].clone()));
            let first = refuses_first.then(|| refuse(&mut net));
            let others = [1, 2].map(|rank| net.submit(rank, requests[rank as usize].clone()));
            net.run_for(Duration::from_millis(5));
            let refused = first.unwrap_or_else(|| refuse(&mut net));
            let next = net.submit(0, request(Collective::Barrier));
            net.run_until(Duration::from_secs(5), |net| {
                net.done[0].len() == 2 && net.done[1].len() == 1 && net.done[2].len() == 1
            });
            assert!(matches!(net.outcome(0, refused), Err(OpError::Invalid(_))));
            let mut errors = vec![net.outcome(0, next).clone()];
            errors.extend([1, 2].map(|rank| net.outcome(rank, others[rank as usize - 1]).clone()));
            for error in errors {
                let (a, b) = assert_mismatch(&[error.expect_err("ranks disagree")], 0);
                assert!(a.starts_with("0 a call that it refused as invalid"), "{a} against {b}");
            }
        }
    }
}

#[test]
fn a_rank_that_refused_a_call_which_nobody_else_made_can_still_leave() {
    let mut net = Net::perfect(2);
    let mut tensor = data(10);
    let wrong = Request { input: View::EMPTY, ..all_reduce(&mut tensor, Algorithm::Ring) };
    net.submit(0, wrong);
    net.run_for(Duration::from_millis(50));
    let now = net.now;
    net.groups.iter_mut().for_each(|group| group.leave(now));
    net.run_until(Duration::from_secs(2), |net| net.groups.iter().all(|group| group.is_drained()));
}

#[test]
fn a_mismatch_late_in_the_sequence_names_its_number() {
    let mut net = Net::perfect(2);
    let mut tensors = [data(100), data(100)];
    for _ in 0..5 {
        (0..2).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
    }
    net.submit(0, all_reduce(&mut tensors[0], Algorithm::Auto));
    net.submit(1, request(Collective::Barrier));
    net.run_all(6);
    let errors: Vec<OpError> = (0..2).map(|rank| net.error(rank).clone()).collect();
    let (a, b) = assert_mismatch(&errors, 5);
    assert!(a.starts_with("0 all_reduce") && b.starts_with("1 barrier"));
}

#[test]
fn all_to_all_parts_that_do_not_fit_each_other_are_found() {
    let mut tensors = [data(4), data(4), data(4), data(3)];
    let [in0, out0, in1, out1] = &mut tensors;
    let exchange = |input: &mut Tensor, output: &mut Tensor, splits: [[usize; 2]; 2]| {
        let [give, take] = splits.map(|split| split.to_vec());
        let collective = Collective::AllToAll { input_split_bytes: give, output_split_bytes: take };
        Request { input: input.view(), output: output.view(), ..request(collective) }
    };
    // Rank 0 gives 12 bytes to rank 1, which expects 8.
    let requests = vec![exchange(in0, out0, [[4, 12], [4, 12]]), exchange(in1, out1, [[12, 4], [8, 4]])];
    let errors = errors(Net::perfect(2), requests);
    assert_mismatch(&errors, 0);
}

#[test]
fn a_message_of_another_size_is_a_mismatch() {
    let (mut long, mut short) = (data(100), data(50));
    let send = Request { input: long.view(), ..request(Collective::Send { to: 1, tag: 4 }) };
    let receive = Request { output: short.view(), ..request(Collective::Receive { from: Some(0), tag: 4 }) };
    let errors = errors(Net::perfect(2), vec![send, receive]);
    assert_mismatch(&errors, 0);
}

#[test]
fn a_dead_rank_is_named_by_every_survivor_within_the_peer_timeout() {
    let mut net = Net::perfect(4);
    let mut tensors: Vec<Tensor> = (0..4).map(|_| data(500_000)).collect();
    for rank in 0..4 {
        net.submit(rank, all_reduce(&mut tensors[rank as usize], Algorithm::Transpose));
    }
    net.run_for(Duration::from_micros(400));
    net.dead.push(2);
    let died = net.now;
    net.run_all(1);
    assert!(net.now - died < PEER_TIMEOUT + Duration::from_millis(500), "{:?}", net.now - died);
    for rank in [0, 1, 3] {
        let OpError::PeerLost { rank: lost, host, silent, during, detail, .. } = net.error(rank) else {
            panic!("{:?}", net.error(rank))
        };
        assert_eq!((*lost, host.as_str()), (2, "host2"));
        assert!(
            *silent >= PEER_TIMEOUT && during.starts_with("all_reduce/transpose #0"),
            "{silent:?} {during}"
        );
        assert!(detail.contains(" bytes from it arrived in the reduce stage"), "{detail}");
        assert!(!detail.contains("cut off"), "{detail}");
    }
    // What comes later fails at once, with the same cause.
    let op = net.submit(0, request(Collective::Barrier));
    net.run_for(Duration::ZERO);
    assert_eq!(net.outcome(0, op).as_ref().err(), Some(net.error(0)));
}

#[test]
fn a_rank_that_dies_while_it_works_is_named_with_the_collective_in_which_it_was_last_seen() {
    let mut net = Net::perfect(2);
    let mut tensors = [data(1000), data(1000)];
    for step in 0..20 {
        for rank in 0..2 {
            net.submit(rank, all_reduce(&mut tensors[rank as usize], Algorithm::Transpose));
        }
        net.run_all(step + 1);
    }
    // All of them took less than a heartbeat, so nobody has said where it is since the ranks met.
    net.dead.push(1);
    net.submit(0, all_reduce(&mut tensors[0], Algorithm::Transpose));
    net.run_until(PEER_TIMEOUT * 2, |net| net.done[0].len() == 21);
    let OpError::PeerLost { detail, during, .. } = net.error(0) else { panic!("{:?}", net.error(0)) };
    // One number of 0 to 20 was for the network that ranks agree on.
    assert!(
        during.contains("#21 ") && detail.contains("; it last took part in collective 20"),
        "{during}: {detail}"
    );
}

#[test]
fn a_rank_that_hears_nobody_is_told_that_it_may_be_cut_off() {
    let mut net = Net::perfect(3);
    net.run_for(Duration::from_millis(10));
    net.dead.extend([0, 1]);
    net.run_for(PEER_TIMEOUT * 2);
    net.submit(2, request(Collective::Barrier));
    net.run_for(Duration::ZERO);
    let OpError::PeerLost { detail, during, .. } = net.error(2) else { panic!("{:?}", net.error(2)) };
    assert!(detail.contains("nothing was under way with it") && detail.contains("cut off"), "{detail}");
    assert!(during.contains("idle"), "{during}");
}

#[test]
fn a_call_that_a_peer_never_joins_times_out_with_the_laggard_named() {
    let mut net = Net::perfect(3);
    let mut tensors: Vec<Tensor> = (0..2).map(|_| data(1000)).collect();
    for rank in 0..2 {
        let request = all_reduce(&mut tensors[rank as usize], Algorithm::Transpose);
        // Rank 1 would wait longer; it learns from rank 0.
        net.submit(rank, Request { timeout: Duration::from_secs(3 + 7 * u64::from(rank)), ..request });
    }
    net.run_until(Duration::from_secs(5), |net| net.done[0].len() == 1 && net.done[1].len() == 1);
    let OpError::TimedOut { during, waited, detail } = net.error(0) else { panic!("{:?}", net.error(0)) };
    assert_eq!((during.as_str(), *waited), ("all_reduce/transpose #0 (1000 x F32)", Duration::from_secs(3)));
    // Rank 1 is behind only because it waits for rank 2, and comes after it.
    assert!(detail.starts_with("rank 2 (host2): 0 of "), "{detail}");
    assert!(detail.contains("idle before collective 0"), "{detail}");
    let OpError::Aborted { rank: 0, host, cause, during: own, waited, detail } = net.error(1) else {
        panic!("{:?}", net.error(1))
    };
    assert!(cause.contains("all_reduce/transpose #0 (1000 x F32) timed out there after 3s"), "{cause}");
    // Who is told says what it has seen itself: it waited as long, for the same rank.
    assert_eq!((&**host, own), ("host0", during));
    assert!((Duration::from_secs(3)..Duration::from_secs(5)).contains(waited), "{waited:?}");
    assert!(detail.starts_with("rank 2 (host2): 0 of "), "{detail}");
    assert!(
        detail.contains(" bytes from it arrived in the reduce stage in all_reduce/transpose #0"),
        "{detail}"
    );
}

#[test]
fn a_way_that_begins_to_lose_large_packets_is_named_when_time_is_up() {
    let carries_all = Rc::new(Cell::new(true));
    let is_whole = Rc::clone(&carries_all);
    let mut net = Net::new(2, move |packet| {
        let is_lost = packet.from == 0 && packet.bytes.len() > 1_000 && !is_whole.get();
        if is_lost {
            Fate::Drop
        } else {
            NORMAL
        }
    });
    let mut tensors: Vec<Tensor> = (0..4).map(|_| data(1_000_000)).collect();
    let mut call = |net: &mut Net, rank: u32, place: usize| {
        let request = all_reduce(&mut tensors[place], Algorithm::Transpose);
        net.submit(rank, Request { timeout: Duration::from_secs(3), ..request })
    };
    let first = [0, 1].map(|rank| call(&mut net, rank, rank as usize));
    net.run_all(1);
    assert!((0..2).all(|rank| net.outcome(rank, first[rank as usize]).is_ok()));
    carries_all.set(false);
    (0..2).for_each(|rank| _ = call(&mut net, rank, 2 + rank as usize));
    net.run_all(2);
    let said = |rank: u32| net.error(rank).to_string();
    assert!(
        said(0).contains("of the last large packets that this rank sent there none arrived"),
        "{}",
        said(0)
    );
    assert!(!said(1).contains("large packets"), "its own arrive: {}", said(1));
}

#[test]
fn of_many_that_are_behind_the_one_that_has_not_come_is_named_first_and_seven_others() {
    let mut net = Net::perfect(12);
    let mut tensors: Vec<Tensor> = (0..11).map(|_| data(12_000)).collect();
    for (rank, tensor) in (0_u32..).zip(&mut tensors) {
        let request = all_reduce(tensor, Algorithm::Transpose);
        // The others would wait longer.
        net.submit(rank, Request { timeout: Duration::from_secs(if rank == 4 { 3 } else { 10 }), ..request });
    }
    net.run_until(Duration::from_secs(5), |net| net.done[4].len() == 1);
    let OpError::TimedOut { detail, .. } = net.error(4) else { panic!("{:?}", net.error(4)) };
    assert_eq!(detail.matches(" (host").count(), 8, "{detail}");
    assert!(detail.starts_with("rank 11 (host11)") && detail.ends_with("; and 3 more"), "{detail}");
}

#[test]
fn a_receive_that_nobody_answers_times_out() {
    let mut net = Net::perfect(2);
    let mut data = data(4);
    let receive = Request { output: data.view(), ..request(Collective::Receive { from: None, tag: 1 }) };
    net.submit(0, Request { timeout: Duration::from_secs(1), ..receive });
    net.run_until(Duration::from_secs(2), |net| net.done[0].len() == 1);
    assert!(matches!(net.error(0), OpError::TimedOut { .. }), "{:?}", net.error(0));
}

#[test]
fn a_rank_that_leaves_while_it_is_needed_is_named() {
    let mut net = Net::perfect(3);
    let mut tensors: Vec<Tensor> = (0..2).map(|_| data(10)).collect();
    net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
    let now = net.now;
    net.groups[2].leave(now);
    for rank in 0..2 {
        net.submit(rank, all_reduce(&mut tensors[rank as usize], Algorithm::Ring));
    }
    net.dead.clear();
    net.run_until(Duration::from_secs(5), |net| net.done[0].len() == 1 && net.done[1].len() == 1);
    for rank in 0..2 {
        assert!(matches!(net.error(rank), OpError::PeerLeft { rank: 2, .. }), "{:?}", net.error(rank));
    }
}

#[test]
fn who_waits_for_a_rank_that_leaves_says_how_long_for_what_and_in_which_stage() {
    let mut net = Net::perfect(2);
    let mut tensor = data(1000);
    net.submit(1, all_reduce(&mut tensor, Algorithm::Transpose));
    net.run_for(Duration::from_millis(50));
    let now = net.now;
    net.groups[0].leave(now);
    net.run_until(Duration::from_secs(5), |net| net.done[1].len() == 1);
    let OpError::PeerLeft { rank: 0, host, during, waited, detail } = net.error(1) else {
        panic!("{:?}", net.error(1))
    };
    assert_eq!((host.as_str(), during.as_str()), ("host0", "all_reduce/transpose #0 (1000 x F32)"));
    assert!((Duration::from_millis(50)..Duration::from_millis(100)).contains(waited), "{waited:?}");
    assert!(
        detail.starts_with("0 of ")
            && detail.contains(" bytes from it arrived in the reduce stage; it has said nothing"),
        "{detail}"
    );
}

#[test]
fn leaving_in_the_middle_of_a_call_ends_it_here_and_there() {
    let mut net = Net::perfect(2);
    let mut tensor = data(10);
    let mut other = data(10);
    net.submit(0, all_reduce(&mut tensor, Algorithm::Transpose));
    let mut barrier = request(Collective::Barrier);
    barrier.timeout = Duration::from_secs(20);
    net.run_for(Duration::from_millis(10));
    let now = net.now;
    net.groups[0].leave(now);
    net.submit(1, all_reduce(&mut other, Algorithm::Transpose));
    net.run_all(1);
    assert!(matches!(net.error(0), OpError::ShutDown(_)), "{:?}", net.error(0));
    let OpError::PeerLeft { rank: 0, host, detail, .. } = net.error(1) else { panic!("{:?}", net.error(1)) };
    assert_eq!(host, "host0");
    assert!(detail.starts_with("0 of 40 bytes from it arrived in the reduce stage; it "), "{detail}");
    net.run_until(PEER_TIMEOUT * 2, |net| net.groups[0].is_drained());
}

/// Rank 0 ends the group by `end` while rank 1 has called nothing; what rank 1's call is then told.
fn called_after(end: impl Fn(&mut Net)) -> OpError {
    let mut net = Net::perfect(2);
    let mut tensors = [data(10), data(10)];
    let [first, later] = &mut tensors;
    let timeout = Duration::from_secs(1);
    net.submit(0, Request { timeout, ..all_reduce(first, Algorithm::Transpose) });
    net.run_for(Duration::from_millis(10));
    end(&mut net);
    net.run_until(Duration::from_secs(2), |net| net.groups[1].has_failed());
    net.submit(1, all_reduce(later, Algorithm::Transpose));
    net.run_until(Duration::from_millis(1), |net| !net.done[1].is_empty());
    net.error(1).clone()
}

#[test]
fn a_call_after_the_group_has_failed_is_named_as_the_one_that_needs_who_is_gone() {
    let call = "all_reduce/transpose #0 (10 x F32)";
    let left = called_after(|net| {
        let now = net.now;
        net.groups[0].leave(now);
    });
    let OpError::PeerLeft { rank: 0, during, waited: Duration::ZERO, .. } = &left else { panic!("{left:?}") };
    assert_eq!(during, call);
    let said = format!("rank 0 (host0) left the group before {call}, which needs it: ");
    assert!(left.to_string().starts_with(&said), "{left}");
    let aborted = called_after(|_| ());
    let OpError::Aborted { rank: 0, during, .. } = &aborted else { panic!("{aborted:?}") };
    assert_eq!(during, call);
    assert!(aborted.to_string().contains(&format!("; {call} ends with it here: ")), "{aborted}");
}

#[test]
fn ranks_that_are_done_leave_without_an_error() {
    let mut net = Net::new(3, lossy(5, 5));
    (0..3).for_each(|rank| _ = net.submit(rank, request(Collective::Barrier)));
    net.run_all(1);
    let now = net.now;
    net.groups.iter_mut().for_each(|group| group.leave(now));
    net.run_until(Duration::from_secs(5), |net| net.groups.iter().all(|group| group.is_drained()));
    assert!(net.done.iter().flat_map(|done| done.values()).all(Result::is_ok));
}

#[test]
fn whatever_needs_a_rank_that_is_gone_in_good_order_ends_at_once_and_names_it() {
    let calls = [
        Collective::AllReduce { algorithm: Algorithm::Ring },
        Collective::Broadcast { root: 0 },
        Collective::Send { to: 1, tag: 3 },
        Collective::Receive { from: Some(1), tag: 3 },
        Collective::Receive { from: None, tag: 3 },
    ];
    for collective in calls {
        let mut net = Net::perfect(2);
        net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
        let now = net.now;
        net.groups[1].leave(now);
        net.run_until(Duration::from_secs(5), |net| net.groups[1].is_drained());
        net.dead.push(1);
        let mut tensor = data(100);
        let view = tensor.view();
        let (input, output) = match collective {
            Collective::Receive { .. } => (View::EMPTY, view),
            Collective::Send { .. } => (view, View::EMPTY),
            _ => (view, view),
        };
        net.submit(0, Request { input, output, ..request(collective.clone()) });
        net.run_until(Duration::from_millis(1), |net| !net.done[0].is_empty());
        let OpError::PeerLeft { rank: 1, during, detail, .. } = net.error(0) else {
            panic!("{collective:?}")
        };
        let seen = match collective {
            Collective::AllReduce { .. } => "0 of 400 bytes from it arrived in the reduce stage".to_owned(),
            Collective::Receive { .. } => format!("nothing of {during} was under way with it"),
            _ => "it has not taken 400 bytes sent to it".to_owned(),
        };
        assert!(detail.starts_with(&format!("{seen}; it ")), "{collective:?}: {detail}");
    }
}

#[test]
fn who_sends_to_a_rank_that_leaves_without_having_taken_it_learns_so() {
    let calls = [
        Collective::Broadcast { root: 0 },
        Collective::Scatter { root: 0 },
        Collective::Reduce { root: 1 },
        Collective::Gather { root: 1 },
        Collective::Send { to: 1, tag: 3 },
    ];
    for collective in calls {
        let mut net = Net::perfect(2);
        let (mut tensor, mut half) = (data(100), data(50));
        let (input, output) = match collective {
            Collective::Scatter { .. } => (tensor.view(), half.view()),
            Collective::Broadcast { .. } => (tensor.view(), tensor.view()),
            Collective::Reduce { .. } | Collective::Gather { .. } => (tensor.view(), View::EMPTY),
            _ => (tensor.view(), View::EMPTY),
        };
        net.submit(0, Request { input, output, ..request(collective.clone()) });
        net.run_for(Duration::from_millis(50));
        let now = net.now;
        net.groups[1].leave(now);
        net.run_until(Duration::from_secs(1), |net| !net.done[0].is_empty());
        let OpError::PeerLeft { rank: 1, detail, .. } = net.error(0) else {
            panic!("{collective:?}: {:?}", net.error(0))
        };
        assert!(detail.starts_with("it has not taken "), "{collective:?}: {detail}");
        net.run_until(Duration::from_secs(1), |net| net.groups[1].is_drained());
    }
}

#[test]
fn a_receive_from_any_rank_ends_when_the_last_other_one_has_left_and_not_before() {
    let mut net = Net::with_dedicated(3, (1, 1 << 20), |_| NORMAL);
    net.run_until(Duration::from_secs(1), |net| net.connected.iter().all(|connected| *connected));
    let mut tensor = data(10);
    let any = Collective::Receive { from: None, tag: 3 };
    net.submit(0, Request { output: tensor.view(), ..request(any) });
    for leaver in [1, 2] {
        assert!(net.done[0].is_empty(), "rank {leaver} may still send something");
        let now = net.now;
        net.groups[leaver].leave(now);
        net.run_for(Duration::from_secs(1));
    }
    // The server is still there, but sends nothing of its own.
    let OpError::PeerLeft { during, waited, .. } = net.error(0) else { panic!("{:?}", net.error(0)) };
    assert_eq!(during, "send/receive #0 (10 x F32)");
    assert!((Duration::from_secs(1)..Duration::from_secs(2)).contains(waited), "{waited:?}");
}
