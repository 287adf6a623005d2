//! A group that goes on without a rank: its reports and errors name ranks as callers know them, and no call outlasts its timeout.

use crate::common::relay::Relay;
use crate::common::{cluster, config, engines, impatient, join_pending, Tensor, PATIENCE};
use gradwire_core::{Header, Kind};
use gradwire_engine::collectives::{Algorithm, Collective, Dtype, OpError, ReduceOp, Request, View};
use gradwire_engine::{
    Engine, EngineConfig, GroupHandle, JobSecret, OnPeerLoss, OpHandle, Outcome, PendingGroup,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

fn request(collective: Collective) -> Request {
    Request::exact(collective, Dtype::F32, PATIENCE)
}

fn submit(group: &GroupHandle, request: Request) -> OpHandle {
    group.submit(request, Box::new(())).expect("the engine runs")
}

fn outcome(op: &OpHandle) -> &Outcome {
    op.wait(Some(PATIENCE)).expect("ends in time")
}

fn receive(group: &GroupHandle, from: Option<u32>, memory: &mut Tensor) -> OpHandle {
    submit(group, Request { output: memory.view(), ..request(Collective::Receive { from, tag: 5 }) })
}

/// Of four ranks rank 1 has left, and the others have agreed to go on.
fn without_rank_1() -> (Vec<Engine>, Vec<GroupHandle>) {
    without(1, 4)
}

fn without(gone: usize, ranks: u32) -> (Vec<Engine>, Vec<GroupHandle>) {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..config() };
    let (engines, groups) = cluster(ranks, &config);
    engines[gone].stop();
    let left: Vec<u32> = (0..ranks).filter(|rank| *rank != gone as u32).collect();
    let call = |rank: &u32| submit(&groups[*rank as usize], request(Collective::Barrier));
    let ops: Vec<OpHandle> = left.iter().map(call).collect();
    for op in &ops {
        assert!(outcome(op).is_ok(), "{:?}", outcome(op));
        assert_eq!(op.epoch(), Some((1, &left[..])));
    }
    (engines, groups)
}

fn mean(group: &GroupHandle, memory: &mut Tensor) -> OpHandle {
    let collective = Collective::AllReduce { algorithm: Algorithm::Auto };
    let (input, output) = (memory.view(), memory.view());
    submit(group, Request { input, output, reduce: ReduceOp::Avg, ..request(collective) })
}

/// What rank `rank` brings to step `step`.
fn values(rank: usize, step: usize) -> Tensor {
    Tensor(vec![(100 * step + rank) as f32; 9])
}

/// A step of these ranks, whose mean is right.
fn step(groups: &[GroupHandle], ranks: &[usize], step: usize) {
    let mut tensors: Vec<Tensor> = ranks.iter().map(|rank| values(*rank, step)).collect();
    let call = |(rank, tensor): (&usize, &mut Tensor)| mean(&groups[*rank], tensor);
    let ops: Vec<OpHandle> = ranks.iter().zip(&mut tensors).map(call).collect();
    assert!(ops.iter().all(|op| outcome(op).is_ok()), "{:?}", ops.iter().map(outcome).collect::<Vec<_>>());
    let expected = ranks.iter().map(|rank| values(*rank, step).0[0]).sum::<f32>() / ranks.len() as f32;
    assert_eq!(tensors.iter().map(|tensor| tensor.0[0]).collect::<Vec<f32>>(), vec![expected; ranks.len()]);
}

#[test]
fn a_rank_that_makes_a_gather_again_which_only_it_was_refused_counts_its_calls_as_the_others_do() {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..config() };
    let (engines, groups) = cluster(4, &config);
    let (mut rows, mut place) = ([1.0, 2.0, 3.0].map(|value| Tensor(vec![value; 9])), Tensor(vec![0.0; 36]));
    let mut gather = |rank: usize| {
        let output = if rank == 0 { place.view() } else { View::EMPTY };
        let collective = Collective::Gather { root: 0 };
        submit(&groups[rank], Request { input: rows[rank].view(), output, ..request(collective) })
    };
    let [at_root, sent, other] = [0, 1, 2].map(&mut gather);
    assert!(outcome(&sent).is_ok() && outcome(&other).is_ok(), "they have done their part");
    engines[3].stop();
    let Err(OpError::PeerLost { rank: 3, .. }) = outcome(&at_root) else { panic!("{:?}", outcome(&at_root)) };
    let again = gather(0);
    let Err(OpError::PeerLost { rank: 3, .. }) = outcome(&again) else { panic!("{:?}", outcome(&again)) };
    (1..4).for_each(|number| step(&groups, &[0, 1, 2], number));
    let mut tensors = [0, 1].map(|rank| values(rank, 4));
    let ops: Vec<OpHandle> =
        groups.iter().zip(&mut tensors).map(|(group, tensor)| mean(group, tensor)).collect();
    engines[2].stop();
    assert!(ops.iter().all(|op| outcome(op).is_ok()), "{:?}", ops.iter().map(outcome).collect::<Vec<_>>());
    assert_eq!(tensors.map(|tensor| tensor.0[0]), [400.5; 2]);
    assert_eq!(ops[1].epoch(), Some((2, &[0, 1][..])));
    step(&groups, &[0, 1], 5);
}

#[test]
fn ranks_of_which_one_has_made_a_call_that_the_others_have_not_end_all_and_take_over_nothing() {
    let (engines, groups) = without(4, 5);
    let mut tensor = Tensor(vec![0.0; 9]);
    let from_lost = Request { output: tensor.view(), ..request(Collective::Broadcast { root: 4 }) };
    let refused = submit(&groups[0], from_lost);
    let Err(OpError::PeerLost { rank: 4, .. }) = outcome(&refused) else { panic!("{:?}", outcome(&refused)) };
    (1..3).for_each(|number| step(&groups, &[0, 1, 2, 3], number));
    let mut tensors = [0, 1, 2].map(|rank| values(rank, 3));
    let ops: Vec<OpHandle> =
        groups.iter().zip(&mut tensors).map(|(group, tensor)| mean(group, tensor)).collect();
    engines[3].stop();
    for op in &ops {
        let Err(OpError::NotMember { epoch: 2, outcome, .. }) = outcome(op) else {
            panic!("{:?}", outcome(op));
        };
        assert!(outcome.starts_with("members count their calls so differently"), "{outcome}");
    }
}

#[test]
fn a_broadcast_from_a_lost_rank_names_it_under_whichever_epoch_it_is_made() {
    let (engines, groups) = without(4, 5);
    let mut tensors = [0, 2, 3].map(|_| Tensor(vec![0.0; 9]));
    let from_lost = |tensor: &mut Tensor, rank: usize| {
        let request = Request { output: tensor.view(), ..request(Collective::Broadcast { root: 4 }) };
        submit(&groups[rank], request)
    };
    let early = from_lost(&mut tensors[0], 0);
    assert!(outcome(&early).is_err());
    // Who needs something from rank 1 notices that it has left: what is called from then on is made under the next epoch.
    let mut places = [2, 3].map(|_| Tensor(vec![0.0; 9]));
    let received: Vec<OpHandle> = [2, 3]
        .into_iter()
        .zip(&mut places)
        .map(|(rank, place)| receive(&groups[rank], Some(1), place))
        .collect();
    engines[1].stop();
    assert!(received.iter().all(|op| outcome(op).is_err()));
    let late = [1, 2].map(|place: usize| from_lost(&mut tensors[place], place + 1));
    for op in [&early].into_iter().chain(&late) {
        let Err(OpError::PeerLost { rank: 4, .. }) = outcome(op) else { panic!("{:?}", outcome(op)) };
    }
    step(&groups, &[0, 2, 3], 1);
}

#[test]
fn a_receive_from_any_rank_says_who_has_sent_and_among_whom() {
    let (_engines, groups) = without_rank_1();
    let (mut sent, mut place) = (Tensor(vec![7.0; 9]), Tensor(vec![0.0; 9]));
    let received = receive(&groups[0], None, &mut place);
    let send = Request { input: sent.view(), ..request(Collective::Send { to: 0, tag: 5 }) };
    let sending = submit(&groups[3], send);
    let report = outcome(&received).as_ref().expect("ends well");
    assert!(outcome(&sending).is_ok(), "{:?}", outcome(&sending));
    assert_eq!(report.sources.iter().map(|source| source.rank).collect::<Vec<u32>>(), [3]);
    assert_eq!(place.0, [7.0; 9]);
    for op in [&received, &sending] {
        assert_eq!(op.epoch(), Some((1, &[0, 2, 3][..])));
    }
}

#[test]
fn a_timeline_says_of_each_call_its_epoch_and_whether_all_ranks_number_it_alike() {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..config() };
    let (engines, groups) = cluster(3, &config);
    let barriers = |ranks: &[usize]| {
        let ops: Vec<_> =
            ranks.iter().map(|rank| submit(&groups[*rank], request(Collective::Barrier))).collect();
        assert!(ops.iter().all(|op| outcome(op).is_ok()));
    };
    barriers(&[0, 1, 2]);
    engines[1].stop();
    barriers(&[0, 2]);
    let (mut sent, mut place) = (Tensor(vec![7.0; 9]), Tensor(vec![0.0; 9]));
    let received = receive(&groups[0], Some(2), &mut place);
    submit(&groups[2], Request { input: sent.view(), ..request(Collective::Send { to: 0, tag: 5 }) });
    assert!(outcome(&received).is_ok());
    let told = |calls| {
        let timeline = groups[0].timeline(calls).expect("the engine runs");
        let calls = timeline.calls.into_iter();
        calls.map(|call| (call.collective, call.epoch, call.in_sequence)).collect::<Vec<_>>()
    };
    let [barrier, received] = ["barrier", "send/receive"].map(str::to_owned);
    let (first, second, third) = ((barrier.clone(), 0, true), (barrier, 1, true), (received, 1, false));
    assert_eq!(told(usize::MAX), [first, second.clone(), third.clone()]);
    assert_eq!(told(1), [second, third], "one of the sequence and one other");
    submit(&groups[0], request(Collective::Barrier));
    let timeline = groups[0].timeline(0).expect("the engine runs");
    let waiting = timeline.waiting.expect("nobody else has called it");
    assert!(waiting.during.starts_with("barrier"), "{waiting:?}");
    assert!(timeline.asked_ns > 0 && timeline.calls.is_empty());
}

#[test]
fn two_of_four_stop_when_the_others_have_left_in_good_order() {
    let peer_timeout = Duration::from_secs(10);
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, peer_timeout, ..config() };
    let (engines, groups) = cluster(4, &config);
    engines[2..].iter().for_each(Engine::stop);
    // By then they would still wait for votes, if they did not know of both that none will come.
    let timeout = 3 * peer_timeout - peer_timeout / 4;
    let ops =
        [0, 1].map(|rank: usize| submit(&groups[rank], Request { timeout, ..request(Collective::Barrier) }));
    for op in &ops {
        let Err(OpError::NotMember { epoch: 0, outcome, .. }) = outcome(op) else {
            panic!("{:?}", outcome(op));
        };
        assert!(outcome.starts_with("no majority"), "{outcome}");
    }
}

#[test]
fn a_receive_in_flight_names_the_rank_that_comes_back() {
    let secret = JobSecret::new(vec![1; 32]).expect("long enough");
    // With a secret each epoch's hellos prove it, those of the rank that comes back too.
    for secret in [None, Some(secret)] {
        rank_2_comes_back(EngineConfig { on_peer_loss: OnPeerLoss::Continue, secret, ..config() });
    }
}

fn rank_2_comes_back(config: EngineConfig) {
    let engines = engines(3, &config);
    let begin = |engine: &Engine, rank| engine.new_group(rank, 3, "test").expect("valid rank");
    let pending: Vec<PendingGroup> =
        engines.iter().zip(0..).map(|(engine, rank)| begin(engine, rank)).collect();
    let formed: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let groups =
        join_pending(pending, PATIENCE).into_iter().collect::<Result<Vec<_>, _>>().expect("all are there");
    engines[2].stop();
    let ops = [0, 1].map(|rank: usize| submit(&groups[rank], request(Collective::Barrier)));
    for op in &ops {
        assert!(outcome(op).is_ok(), "{:?}", outcome(op));
    }
    let mut place = Tensor(vec![0.0; 9]);
    let received = receive(&groups[0], Some(1), &mut place);
    let engine = Engine::start(config).expect("loopback exists");
    let mut again = begin(&engine, 2);
    again.live_again(1);
    let running = [0, 1].map(|rank: usize| groups[rank].admit(again.record()).expect("it was lost"));
    let joined = again.join_running_while(&formed, &running[0], PATIENCE, || true);
    let joined = joined.expect("it is taken in").expect("nobody called it off");
    assert_eq!(joined.stats().expect("the engine runs").security.cipher, None);
    let Err(OpError::PeerLost { rank: 2, .. }) = outcome(&received) else {
        panic!("{:?}", outcome(&received))
    };
}

#[test]
fn a_receive_in_flight_names_the_rank_that_is_lost_next_and_a_later_one_the_rank_that_it_is_from() {
    let (engines, groups) = without_rank_1();
    let (mut place, mut later) = (Tensor(vec![0.0; 9]), Tensor(vec![0.0; 9]));
    let received = receive(&groups[0], Some(3), &mut place);
    engines[3].stop();
    let Err(OpError::PeerLeft { rank: 3, .. }) = outcome(&received) else {
        panic!("{:?}", outcome(&received))
    };
    let refused = receive(&groups[0], Some(1), &mut later);
    let Err(OpError::PeerLost { rank: 1, .. }) = outcome(&refused) else { panic!("{:?}", outcome(&refused)) };
}

#[test]
fn ranks_that_disagree_are_named_and_so_are_the_roots_that_they_called() {
    let (_engines, groups) = without_rank_1();
    let mut tensors = [Tensor(vec![0.0; 9]), Tensor(vec![0.0; 9])];
    for (root, tensor) in [2, 3].into_iter().zip(&mut tensors) {
        let request = Request { output: tensor.view(), ..request(Collective::Broadcast { root }) };
        submit(&groups[root as usize], request);
    }
    for rank in [2, 3] {
        // The root of a broadcast may be done before it hears of the other one.
        let next = submit(&groups[rank], request(Collective::Barrier));
        let Err(OpError::Mismatch(mismatch)) = outcome(&next) else { panic!("{:?}", outcome(&next)) };
        assert_eq!((mismatch.rank_a, mismatch.a.root), (2, Some(2)), "{mismatch:?}");
        assert_eq!((mismatch.rank_b, mismatch.b.root), (3, Some(3)), "{mismatch:?}");
    }
}

/// Whether a datagram is one of those in which members agree on who goes on.
fn is_note(datagram: &[u8]) -> bool {
    matches!(Header::decode(datagram), Ok((header, _)) if header.kind == Kind::Members)
}

#[test]
fn of_two_that_gave_each_other_up_and_both_vote_one_goes_on_alone() {
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, ..impatient() };
    let engines = engines(2, &config);
    // From the time that it is cut until both have given the other one up.
    let is_cut = Arc::new(AtomicBool::new(false));
    let has_voted = [false, false].map(AtomicBool::new);
    let cut = Arc::clone(&is_cut);
    let meddler = move |from: usize, datagram: &[u8]| {
        if cut.load(Ordering::SeqCst) && is_note(datagram) {
            has_voted[from].store(true, Ordering::SeqCst);
        }
        let is_open =
            !cut.load(Ordering::SeqCst) || has_voted.iter().all(|voted| voted.load(Ordering::SeqCst));
        (if is_open { vec![datagram.to_vec()] } else { Vec::new() }, Vec::new())
    };
    let relay = Relay::new(&engines, Arc::new(meddler));
    let groups: Vec<GroupHandle> =
        relay.join(&engines, "two").into_iter().map(|group| group.expect("connected")).collect();
    is_cut.store(true, Ordering::SeqCst);
    let ops = [0, 1].map(|rank: usize| submit(&groups[rank], request(Collective::Barrier)));
    let [first, second] = [0, 1].map(|rank: usize| outcome(&ops[rank]).is_ok());
    assert!(first != second, "{:?}", [0, 1].map(|rank: usize| outcome(&ops[rank])));
    let (alone, other) = if first { (0, 1) } else { (1, 0) };
    assert_eq!(ops[alone].epoch(), Some((1, &[alone as u32][..])));
    let excluded = outcome(&ops[other]);
    assert!(matches!(excluded, Err(OpError::NotMember { .. })), "{excluded:?}");
    let later = submit(&groups[alone], request(Collective::Barrier));
    assert!(outcome(&later).is_ok(), "{:?}", outcome(&later));
}

#[test]
fn who_is_left_by_the_only_other_rank_does_not_wait_for_its_vote() {
    // Three of these are longer than these tests wait.
    let peer_timeout = Duration::from_secs(120);
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, peer_timeout, ..config() };
    let (engines, groups) = cluster(2, &config);
    engines[1].stop();
    let op = submit(&groups[0], request(Collective::Barrier));
    let Err(OpError::NotMember { epoch, outcome, cause }) = outcome(&op) else {
        panic!("{:?}", outcome(&op))
    };
    assert!(*epoch == 0 && outcome.starts_with("no majority"), "{epoch} {outcome}");
    assert!(cause.contains("left the group"), "{cause}");
}

#[test]
fn a_call_that_waits_for_a_majority_ends_by_its_timeout() {
    // Three of these are longer than these tests wait.
    let peer_timeout = Duration::from_secs(120);
    let config = EngineConfig { on_peer_loss: OnPeerLoss::Continue, peer_timeout, ..config() };
    let (engines, groups) = cluster(3, &config);
    engines[1].stop();
    engines[2].stop();
    let timeout = Duration::from_secs(1);
    let op = submit(&groups[0], Request { timeout, ..request(Collective::Barrier) });
    let Err(OpError::TimedOut { during, waited, detail }) = outcome(&op) else {
        panic!("{:?}", outcome(&op))
    };
    assert!(during.starts_with("barrier #0") && *waited >= timeout, "{during} {waited:?}");
    assert!(detail.contains("left the group"), "{detail}");
    let later = submit(&groups[0], request(Collective::Barrier));
    assert_eq!(outcome(&later), outcome(&op), "the group is over");
    let epoch = groups[0].stats().expect("the engine runs").epoch.expect("it goes on without lost ranks");
    assert!(!epoch.is_member, "it may come back: the others may go on");
}
