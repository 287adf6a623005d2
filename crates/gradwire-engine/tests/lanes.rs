//! Several network threads for each rank: what is large is divided between them, and callers see one call, one result and one verdict.

use crate::common::dividing::{agree, dividing, losing, reports, submit, with, CALLS_UNTIL_AGREED, ELEMS};
use crate::common::{self, all_reduce, check_all_reduce, engines, impatient, join, Broken, Tensor, PATIENCE};
use gradwire_engine::collectives::{Algorithm, Collective, Given, OpError, Policy, ReduceOp, Request, Tags};
use gradwire_engine::{
    Choice, Engine, EngineConfig, GroupHandle, JobSecret, OpHandle, PendingGroup, Security,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn elems_counted(group: &GroupHandle) -> u64 {
    group.stats().unwrap().calls.iter().filter(|calls| calls.preset == "exact").map(|calls| calls.elems).sum()
}

#[test]
fn a_divided_call_has_the_exact_result_and_one_report_of_the_whole() {
    let secret = Some(JobSecret::new(vec![1; 32]).unwrap());
    for (security, secret, paths) in
        [(Security::Off, None, 1), (Security::On, None, 2), (Security::Auto, secret, 2)]
    {
        let (engines, groups) = dividing(3, 3, &EngineConfig { security, secret, paths, ..with(3) });
        for elems in [1, ELEMS, 2_000_000] {
            check_all_reduce(&groups, elems);
        }
        let before: Vec<u64> = groups.iter().map(elems_counted).collect();
        let mut tensors: Vec<Tensor> = (0..3).map(|_| Tensor(vec![1.0; ELEMS])).collect();
        let ops = submit(&groups, &mut tensors, |request| request);
        for (rank, report) in reports(&ops).iter().enumerate() {
            assert_eq!((report.elems, report.lost_share()), (ELEMS as u64, 0.0), "rank {rank}");
            assert_eq!(report.bytes_received, report.bytes_expected);
            // In the schedule for links that differ, a rank that reduces nothing receives the result alone.
            assert!(report.bytes_received >= 4 * ELEMS as u64, "of all parts");
            assert!(report.peers.iter().chain(&report.sources).all(|peer| peer.elems_received > 0));
            assert_eq!(elems_counted(&groups[rank]) - before[rank], ELEMS as u64);
        }
        assert!(tensors.iter().all(|tensor| tensor.0 == vec![3.0; ELEMS]));
        for (engine, group) in engines.iter().zip(&groups) {
            let (stats, group) = (engine.stats().unwrap(), group.stats().unwrap());
            assert_eq!((stats.datagrams_not_authentic, stats.datagrams_replayed), (0, 0));
            let sent: u64 = group.peers.iter().map(|peer| peer.packets_sent).sum();
            assert!(sent > 0 && sent <= stats.datagrams_sent, "{sent} packets of {stats:?}");
        }
    }
}

#[test]
fn a_group_divides_between_as_many_threads_as_every_rank_has() {
    for (threads, least) in [([3, 2, 3], 2), ([3, 1, 2], 1)] {
        let engines: Vec<Engine> =
            threads.iter().map(|threads| Engine::start(with(*threads)).unwrap()).collect();
        let groups: Vec<GroupHandle> = join(&engines, "mixed").into_iter().map(Result::unwrap).collect();
        agree(&groups, least);
        check_all_reduce(&groups, 1_000_000);
    }
}

#[test]
fn what_one_rank_alone_asks_for_divides_no_other_call_and_is_answered_for_the_whole() {
    let (_engines, groups) = dividing(2, 3, &with(3));
    let mut tensors = [Tensor(vec![1.0; ELEMS]), Tensor(vec![1.0; ELEMS])];
    let [first, second] = &mut tensors;
    let asks = Request { wants_contributions: true, ..all_reduce(first.view()) };
    let importance = Some(Arc::new(Given::new(vec![true, false, true])) as _);
    let marks = Request { tags: Tags { importance, ..Tags::default() }, ..all_reduce(second.view()) };
    let ops: Vec<OpHandle> = groups
        .iter()
        .zip([asks, marks])
        .map(|(group, request)| group.submit(request, Box::new(())).unwrap())
        .collect();
    let reports = reports(&ops);
    let counts = reports[0].contributions.as_ref().expect("was asked for");
    assert!((0..ELEMS as u64).all(|elem| counts.of(elem) == 2));
    assert_eq!(reports[1].contributions, None);
}

#[test]
fn a_thread_that_sends_is_there_beside_others_where_it_is_asked_for() {
    let config = EngineConfig { send_thread: Choice::On, ..with(2) };
    let (engines, groups) = dividing(2, 2, &config);
    let started = Instant::now();
    let apart = |engine: &Engine| engine.stats().unwrap().batches_apart > 0;
    while engines[0].features().batched_calls && !engines.iter().all(apart) {
        check_all_reduce(&groups, 2_000_000);
        assert!(started.elapsed() < PATIENCE);
    }
}

#[test]
fn who_waits_in_a_part_of_another_thread_is_seen() {
    let (_engines, groups) = dividing(2, 2, &with(2));
    let mut tensor = Tensor(vec![1.0; ELEMS]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(())).unwrap();
    let started = Instant::now();
    while groups[0].watch().unwrap().waiting.is_none() {
        assert!(started.elapsed() < PATIENCE);
    }
    assert!(groups[0].stats().unwrap().waiting.is_some());
    groups[0].abort();
    assert!(op.wait(Some(PATIENCE)).is_some_and(Result::is_err));
}

#[test]
fn tolerant_reductions_lose_no_more_and_replicas_stay_alike() {
    let (_engines, groups, policy) = losing();
    let mut lost = 0.0;
    // Named: in the schedule for links that differ, which `auto` may take for a busy machine's, parts may be too small to lose anything.
    for algorithm in [Algorithm::Transpose, Algorithm::Ring].repeat(5) {
        let mut tensors: Vec<Tensor> = (0..3).map(|rank| Tensor(common::values(rank, ELEMS))).collect();
        let ops = submit(&groups, &mut tensors, |request| Request {
            collective: Collective::AllReduce { algorithm },
            policy,
            reduce: ReduceOp::Avg,
            ..request
        });
        for report in reports(&ops) {
            assert!(report.replicas_identical && report.lost_share() <= 0.051, "{}", report.lost_share());
            lost += report.lost_share();
        }
        let bits = |tensor: &Tensor| tensor.0.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
        assert!(tensors[1..].iter().all(|tensor| bits(tensor) == bits(&tensors[0])));
        let worst =
            tensors[0].0.iter().enumerate().map(|(i, value)| (value - 2.0 * (i % 1_000) as f32).abs());
        assert!(worst.fold(0.0, f32::max) <= 1_000.0, "a mean of those that came");
    }
    assert!(lost > 0.0, "nothing was lost at all");
}

/// Counts those that were given back.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_rank_that_is_gone_ends_divided_calls_on_all_others_with_one_verdict() {
    let config = EngineConfig { network_threads: Some(2), mtu: Some(1_500), ..impatient() };
    let (engines, groups) = dividing(3, 2, &config);
    engines[2].crash();
    let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(vec![1.0; ELEMS])).collect();
    let given_back = Arc::new(AtomicUsize::new(0));
    let ops: Vec<OpHandle> = groups[..2]
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| {
            group.submit(all_reduce(tensor.view()), Box::new(Counted(Arc::clone(&given_back)))).unwrap()
        })
        .collect();
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        assert!(matches!(outcome, Err(OpError::PeerLost { rank: 2, .. })), "{outcome:?}");
    }
    assert_eq!(given_back.load(Ordering::SeqCst), 2);
    let mut tensor = Tensor(vec![1.0; 10]);
    let later = groups[0].submit(all_reduce(tensor.view()), Box::new(())).unwrap();
    assert!(matches!(later.wait(Some(PATIENCE)), Some(Err(OpError::PeerLost { rank: 2, .. }))));
}

#[test]
fn a_divided_call_that_one_rank_makes_differently_is_a_mismatch_everywhere_and_at_once() {
    let mb = 1 << 18;
    // Of the last two the first parts are of one size.
    for (one, other) in
        [(ELEMS, 10), (ELEMS, ELEMS - 200_000), (ELEMS, 2 * ELEMS), (3 * mb, 2 * mb), (mb, 3 * mb)]
    {
        let (_engines, groups) = dividing(2, 3, &with(3));
        let mut tensors = [Tensor(vec![1.0; one]), Tensor(vec![1.0; other])];
        let ops = submit(&groups, &mut tensors, |request| request);
        let mut numbers = Vec::new();
        for op in &ops {
            let outcome = op.wait(Some(PATIENCE / 2)).expect("long before the call's timeout");
            let Err(OpError::Mismatch(error)) = outcome else { panic!("{one} and {other}: {outcome:?}") };
            assert_eq!([error.a.elems, error.b.elems], [one as u64, other as u64], "as they were called");
            numbers.push(error.a.sequence);
        }
        assert!(numbers[0] == numbers[1] && numbers[0] as usize >= CALLS_UNTIL_AGREED, "{numbers:?}");
    }
}

#[test]
fn leaving_ends_divided_calls_at_once_on_this_rank_and_tells_the_others() {
    let (_engines, groups) = dividing(2, 2, &with(2));
    let mut tensors = [Tensor(vec![1.0; ELEMS]), Tensor(vec![1.0; ELEMS])];
    let [first, second] = &mut tensors;
    let waiting = groups[0].submit(all_reduce(first.view()), Box::new(())).unwrap();
    assert!(groups[0].leave(PATIENCE));
    assert!(matches!(waiting.wait(Some(PATIENCE)), Some(Err(OpError::ShutDown(_)))));
    let needs_it = groups[1].submit(all_reduce(second.view()), Box::new(())).unwrap();
    let outcome = needs_it.wait(Some(PATIENCE)).expect("ends in time");
    assert!(matches!(outcome, Err(OpError::PeerLeft { rank: 0, .. })), "{outcome:?}");
}

#[test]
fn stopping_an_engine_ends_its_divided_calls_and_gives_their_memory_back() {
    let (engines, groups) = dividing(2, 2, &with(2));
    let given_back = Arc::new(AtomicUsize::new(0));
    let mut tensor = Tensor(vec![1.0; ELEMS]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(Counted(Arc::clone(&given_back)))).unwrap();
    engines[0].stop();
    assert!(matches!(op.outcome(), Some(Err(OpError::ShutDown(_)))), "{:?}", op.outcome());
    assert_eq!(given_back.load(Ordering::SeqCst), 1);
}

#[test]
fn a_rule_that_panics_on_any_network_thread_ends_the_calls_of_all_ranks_and_gives_their_memory_back() {
    for (threads, on) in [(1, "gradwire-net"), (2, "gradwire-net"), (2, "gradwire-lane")] {
        let (_engines, groups) = dividing(2, threads, &EngineConfig { mtu: Some(1_500), ..impatient() });
        let given_back = Arc::new(AtomicUsize::new(0));
        let mut tensors = [Tensor(vec![1.0; ELEMS]), Tensor(vec![1.0; ELEMS])];
        let [first, second] = &mut tensors;
        let importance = Some(Arc::new(Broken { on }) as _);
        let tags = Tags { importance, ..Tags::default() };
        let breaks =
            Request { policy: Policy::AUTO, tags, reduce: ReduceOp::Avg, ..all_reduce(first.view()) };
        let fits = Request { policy: Policy::AUTO, reduce: ReduceOp::Avg, ..all_reduce(second.view()) };
        let ops: Vec<OpHandle> = groups
            .iter()
            .zip([breaks, fits])
            .map(|(group, request)| {
                group.submit(request, Box::new(Counted(Arc::clone(&given_back)))).unwrap()
            })
            .collect();
        let outcomes: Vec<_> = ops.iter().map(|op| op.wait(Some(PATIENCE)).expect("ends in time")).collect();
        let Err(OpError::Aborted { rank: 0, cause, .. }) = outcomes[0] else { panic!("{on}: {outcomes:?}") };
        assert!(cause.contains("the error in the rule"), "{on}: {cause}");
        let lost =
            matches!(outcomes[1], Err(OpError::PeerLost { rank: 0, .. } | OpError::PeerLeft { rank: 0, .. }));
        assert!(lost, "{on}: {:?}", outcomes[1]);
        assert_eq!(given_back.load(Ordering::SeqCst), 2, "{on}: memory of the caller is still held");
    }
}

/// A record whose lane is at a port where nobody is.
fn walled(record: &str) -> String {
    changed(record, |lane| {
        lane["addresses"] = serde_json::json!(["127.0.0.2"]);
        lane["loopback"] = serde_json::json!(false);
        lane["datagram_bytes"] = lane["datagram_bytes_local"].clone();
        lane["port"] = serde_json::json!(9);
    })
}

/// A record whose lane has the rank of another.
fn forged(record: &str) -> String {
    changed(record, |lane| lane["rank"] = serde_json::json!(7))
}

fn changed(record: &str, change: impl Fn(&mut serde_json::Value)) -> String {
    let mut record: serde_json::Value = serde_json::from_str(record).unwrap();
    change(&mut record["lanes"][0]);
    record.to_string()
}

#[test]
fn lanes_that_do_not_reach_their_peers_or_fit_no_other_are_not_used() {
    let connect_timeout = Duration::from_millis(500);
    // One that fits no other is none from the start.
    for (change, without_way) in [(walled as fn(&str) -> String, 1), (forged, 0)] {
        let all = engines(2, &EngineConfig { connect_timeout, ..with(2) });
        let pending: Vec<PendingGroup> =
            all.iter().zip(0..).map(|(engine, rank)| engine.new_group(rank, 2, "walled").unwrap()).collect();
        let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
        let seen = [[records[0].clone(), change(&records[1])], [change(&records[0]), records[1].clone()]];
        let joining: Vec<_> = pending
            .into_iter()
            .zip(seen)
            .map(|(group, records)| std::thread::spawn(move || group.join(&records, Some(PATIENCE)).unwrap()))
            .collect();
        let groups: Vec<GroupHandle> = joining.into_iter().map(|thread| thread.join().unwrap()).collect();
        let agreed = |group: &GroupHandle| group.stats().unwrap().agreed.map(|agreed| agreed.threads);
        let unreached = |group: &GroupHandle| group.watch().unwrap().unreached_threads;
        let started = Instant::now();
        let has_shown = |group: &GroupHandle| agreed(group).is_some() && unreached(group) == without_way;
        while started.elapsed() < 2 * connect_timeout || !groups.iter().all(has_shown) {
            check_all_reduce(&groups, ELEMS);
            assert!(started.elapsed() < PATIENCE, "{:?}", groups.iter().map(unreached).collect::<Vec<_>>());
        }
        // Behind another exchange too.
        (0..3 * CALLS_UNTIL_AGREED).for_each(|_| check_all_reduce(&groups, 50_000));
        check_all_reduce(&groups, ELEMS);
        assert!(groups.iter().all(|group| agreed(group) == Some(1) && unreached(group) == without_way));
        assert!(groups.iter().all(|group| group.leave(PATIENCE)));
    }
}
