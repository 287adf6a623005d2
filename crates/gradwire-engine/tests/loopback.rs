//! Whole groups over real sockets on loopback.

use crate::common::{
    all_reduce, check_all_reduce, cluster, config, engines, impatient, join, join_pending, Tensor, PATIENCE,
};
use gradwire_engine::collectives::{OpError, Policy, ReduceOp, Request};
use gradwire_engine::{
    Choice, Engine, EngineConfig, EngineError, GroupHandle, JoinError, Offload, PendingGroup, Security,
};
use std::net::UdpSocket;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

fn is_send_and_sync<T: Send + Sync>() {}

#[test]
fn handles_can_be_used_from_any_thread() {
    is_send_and_sync::<Engine>();
    is_send_and_sync::<GroupHandle>();
    is_send_and_sync::<gradwire_engine::OpHandle>();
    is_send_and_sync::<gradwire_engine::Completions>();
}

#[test]
fn all_reduce_is_exact_among_one_two_and_four_ranks() {
    for world_size in [1, 2, 4] {
        let (_engines, groups) = cluster(world_size, &config());
        for elems in [0, 1, 10, 1_000, 1_000_003] {
            check_all_reduce(&groups, elems);
        }
    }
}

#[test]
fn all_reduce_is_exact_without_offload_and_with_small_datagrams() {
    let config = EngineConfig { offload: Offload::Off, mtu: Some(1_500), ..config() };
    let (engines, groups) = cluster(3, &config);
    let features = engines[0].features();
    assert!(!features.gso && !features.gro && features.datagram_bytes == 1_472);
    check_all_reduce(&groups, 300_001);
}

#[test]
fn several_groups_and_several_operations_share_one_engine() {
    let engines = engines(2, &config());
    let mut clusters = Vec::new();
    for name in ["a", "b"] {
        clusters.push(join(&engines, name).into_iter().map(Result::unwrap).collect::<Vec<_>>());
    }
    let mut tensors: Vec<Tensor> = (0..16).map(|_| Tensor(vec![1.0; 50_000])).collect();
    let mut ops = Vec::new();
    for (i, tensor) in tensors.iter_mut().enumerate() {
        let group = &clusters[i / 8][i % 2];
        ops.push(group.submit(all_reduce(tensor.view()), Box::new(())).unwrap());
    }
    for op in &ops {
        assert!(op.wait(Some(PATIENCE)).expect("ends in time").is_ok());
    }
    assert!(tensors.iter().all(|tensor| tensor.0.iter().all(|value| *value == 2.0)));
}

/// Of each transfer the first packet leaves, then the last one, which is short, and then all the others: in bursts whose room is that of
/// the kernel's messages.
#[test]
fn calls_with_critical_packets_and_short_ends_wait_for_each_other() {
    let configs = [Security::Off, Security::On].map(|security| EngineConfig { security, ..config() });
    for config in configs {
        let (_engines, groups) = cluster(2, &EngineConfig { mtu: Some(1_500), ..config });
        // Half of each is 700 packets of 1408 bytes, and 128 bytes.
        let mut tensors: Vec<Tensor> = (0..40).map(|_| Tensor(vec![3.0; 2 * (700 * 352 + 32)])).collect();
        let mut ops = Vec::new();
        for (i, tensor) in tensors.iter_mut().enumerate() {
            let request = all_reduce(tensor.view());
            let request = Request { policy: Policy::LTP, reduce: ReduceOp::Avg, ..request };
            ops.push(groups[i % 2].submit(request, Box::new(())).expect("running"));
        }
        for op in &ops {
            let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
            assert!(outcome.is_ok(), "{outcome:?}");
        }
    }
}

#[test]
fn the_memory_is_released_before_the_waiter_wakes_and_completions_arrive_in_a_batch() {
    struct Owner(Arc<AtomicBool>);
    impl Drop for Owner {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let (engines, groups) = cluster(1, &config());
    let mut tensor = Tensor(vec![1.0; 10]);
    let released = Arc::new(AtomicBool::new(false));
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(Owner(Arc::clone(&released)))).unwrap();
    assert!(op.wait(Some(PATIENCE)).is_some());
    assert!(released.load(Ordering::SeqCst));
    op.notify();
    let batch = engines[0].completions().next_batch(Some(PATIENCE));
    assert_eq!(batch.iter().map(gradwire_engine::OpHandle::id).collect::<Vec<_>>(), [op.id()]);
}

#[test]
fn a_port_in_use_is_named() {
    let first = Engine::start(config()).unwrap();
    let port = first.local_port();
    let error = Engine::start(EngineConfig { port, ..config() }).unwrap_err();
    assert_eq!(error, EngineError::PortInUse { port });
}

#[test]
fn a_peer_of_the_other_family_is_not_waited_for_and_both_families_are_named() {
    let engines = engines(2, &config());
    let a = engines[0].new_group(0, 2, "g").unwrap();
    let b = engines[1].new_group(1, 2, "g").unwrap();
    let mut other: serde_json::Value = serde_json::from_str(&b.record()).unwrap();
    let ours = other["ipv6"].as_bool().unwrap();
    (other["ipv6"], other["addresses"]) = ((!ours).into(), serde_json::Value::Array(Vec::new()));
    let records = [a.record(), other.to_string()];
    let error = a.join(&records, Some(PATIENCE)).unwrap_err();
    let JoinError::OtherFamily { ranks, .. } = &error else { panic!("{error}") };
    assert_eq!(ranks, &[1]);
    for said in ["IPv4", "IPv6", "GRADWIRE_INTERFACE"] {
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn a_peer_that_cannot_be_reached_ends_the_join_in_time_and_is_named() {
    let engines = engines(2, &config());
    let a = engines[0].new_group(0, 2, "g").unwrap();
    let b = engines[1].new_group(1, 2, "g").unwrap();
    let records = [a.record(), b.record()];
    engines[1].stop();
    let start = Instant::now();
    let error = a.join(&records, Some(Duration::from_millis(300))).unwrap_err();
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    let JoinError::Unreachable { peers, .. } = &error else { panic!("{error}") };
    assert_eq!(peers.iter().map(|peer| peer.rank).collect::<Vec<_>>(), [1]);
    let address = format!("127.0.0.1:{}", engines[1].local_port());
    assert!(error.to_string().contains(&address), "{error}");
    assert!(error.to_string().contains(". Let UDP through to these ports"), "{error}");
}

#[test]
fn where_the_boot_id_cannot_be_read_the_error_says_that_one_host_is_not_known_as_one() {
    let engines = engines(2, &config());
    let records = |boot_id: &str| {
        let a = engines[0].new_group(0, 2, "g").unwrap();
        let b = engines[1].new_group(1, 2, "g").unwrap();
        let mut other: serde_json::Value = serde_json::from_str(&b.record()).unwrap();
        other["boot_id"] = boot_id.into();
        other["addresses"] = serde_json::json!([]);
        (a, other.to_string())
    };
    for (boot_id, is_said) in [("pid-7-00ff", true), ("another-host", false)] {
        let (a, other) = records(boot_id);
        let own = a.record();
        let error = a.join(&[own, other], Some(Duration::from_millis(300))).unwrap_err().to_string();
        assert!(error.contains("loopback alone"), "{error}");
        assert_eq!(error.contains("/proc/sys/kernel/random/boot_id"), is_said, "{error}");
        assert_ne!(error.contains("GRADWIRE_INTERFACE"), is_said, "{error}");
    }
}

#[test]
fn a_join_that_is_called_off_ends_without_the_peers_that_did_not_come() {
    let engines = engines(2, &config());
    let pending =
        engines.iter().zip(0..).map(|(engine, rank)| engine.new_group(rank, 2, "off").expect("valid"));
    let mut pending: Vec<PendingGroup> = pending.collect();
    let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let mut asked = 0;
    let joined = pending.remove(0).join_while(&records, Some(PATIENCE), || {
        asked += 1;
        asked < 3
    });
    assert!(matches!(joined, Ok(None)), "{joined:?}");
    assert_eq!(asked, 3);
}

#[test]
fn a_wrong_world_size_is_named_on_every_rank() {
    let engines = engines(2, &config());
    let pending = vec![engines[0].new_group(0, 2, "g").unwrap(), engines[1].new_group(1, 3, "g").unwrap()];
    let outcomes = join_pending(pending, PATIENCE);
    let error = |i: usize| outcomes[i].as_ref().err().cloned();
    assert_eq!(error(0), Some(JoinError::WorldSizeMismatch { rank: 1, theirs: 3, ours: 2 }));
    assert_eq!(error(1), Some(JoinError::WorldSizeMismatch { rank: 0, theirs: 2, ours: 3 }));
}

#[test]
fn different_settings_are_named_on_every_rank() {
    let engines = [
        Engine::start(config()).unwrap(),
        Engine::start(EngineConfig { fingerprint: 7, ..config() }).unwrap(),
    ];
    for (rank, outcome) in join(&engines, "g").into_iter().enumerate() {
        let error = outcome.unwrap_err();
        let other = 1 - rank as u32;
        assert!(matches!(error, JoinError::SettingsMismatch { rank, .. } if rank == other), "{error}");
    }
}

#[test]
fn a_stale_record_fails_the_join_at_once() {
    let engines = engines(2, &config());
    let a = engines[0].new_group(0, 2, "g").unwrap();
    let b = engines[1].new_group(1, 2, "g").unwrap();
    let records = [a.record(), b.record()];
    let pid = format!("\"pid\":{}", std::process::id());
    // As if rank 1 had been restarted after rank 0 read the store: the same addresses, another process.
    let stale = [records[0].clone(), records[1].replace(&pid, "\"pid\":1")];
    assert_ne!(records, stale);
    let start = Instant::now();
    let other = std::thread::spawn(move || b.join(&records, Some(PATIENCE)));
    let error = a.join(&stale, Some(PATIENCE)).unwrap_err();
    assert!(matches!(error, JoinError::Failed(_)), "{error}");
    assert!(matches!(other.join().unwrap(), Err(JoinError::Failed(_))));
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
}

#[test]
fn a_crashed_peer_is_named_by_every_survivor_within_the_peer_timeout() {
    let (engines, groups) = cluster(3, &impatient());
    check_all_reduce(&groups, 1_000);
    engines[2].crash();
    let start = Instant::now();
    let mut tensors: Vec<Tensor> = (0..2).map(|_| Tensor(vec![1.0; 100_000])).collect();
    let ops: Vec<_> = groups
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| group.submit(all_reduce(tensor.view()), Box::new(())).unwrap())
        .collect();
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        assert!(matches!(outcome, Err(OpError::PeerLost { rank: 2, .. })), "{outcome:?}");
    }
    assert!(start.elapsed() < 3 * impatient().peer_timeout, "{:?}", start.elapsed());
}

#[test]
fn different_calls_are_a_mismatch_on_every_rank() {
    let (_engines, groups) = cluster(2, &config());
    let mut tensors = [Tensor(vec![1.0; 100]), Tensor(vec![1.0; 200])];
    let ops: Vec<_> = groups
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| group.submit(all_reduce(tensor.view()), Box::new(())).unwrap())
        .collect();
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        assert!(matches!(outcome, Err(OpError::Mismatch(_))), "{outcome:?}");
    }
}

#[test]
fn leaving_together_is_quick_and_later_calls_end_with_an_error() {
    let left = || {
        let (engines, groups) = cluster(3, &config());
        check_all_reduce(&groups, 10);
        let start = Instant::now();
        std::thread::scope(|scope| {
            for group in &groups {
                scope.spawn(|| assert!(group.leave(PATIENCE)));
            }
        });
        (start.elapsed(), engines, groups)
    };
    let (engines, groups) = quick(left);
    let mut tensor = Tensor(vec![1.0; 10]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(())).unwrap();
    assert!(matches!(op.wait(Some(PATIENCE)), Some(Err(OpError::ShutDown(_)))));
    engines[0].stop();
    let error = groups[0].submit(all_reduce(tensor.view()), Box::new(())).unwrap_err();
    assert_eq!(error, EngineError::Stopped { cause: None });
}

#[test]
fn stopping_waits_for_nothing_when_everybody_was_told() {
    quick(|| {
        let (engines, groups) = cluster(3, &config());
        check_all_reduce(&groups, 10);
        let start = Instant::now();
        engines.iter().for_each(Engine::stop);
        (start.elapsed(), engines, groups)
    });
}

/// A cluster that has parted in less than the half second for which the transport repeats a goodbye that nobody answers. Where all are
/// answered one of a few does, however busy the host; where one is not, none can.
fn quick(part: impl Fn() -> (Duration, Vec<Engine>, Vec<GroupHandle>)) -> (Vec<Engine>, Vec<GroupHandle>) {
    let mut parted = (0..5).map(|_| part());
    let quick = parted.find(|(took, ..)| *took < Duration::from_millis(480));
    quick.map(|(_, engines, groups)| (engines, groups)).expect("one of five is quick")
}

#[test]
fn stopping_ends_what_is_in_flight_and_closes_the_queue_of_completions() {
    let (engines, groups) = cluster(2, &config());
    let mut tensor = Tensor(vec![1.0; 10]);
    let op = groups[0].submit(all_reduce(tensor.view()), Box::new(())).unwrap();
    op.notify();
    engines[0].stop();
    assert!(matches!(op.outcome(), Some(Err(OpError::ShutDown(_)))), "{:?}", op.outcome());
    let completions = engines[0].completions();
    assert_eq!(completions.next_batch(Some(PATIENCE)).len(), 1);
    assert!(completions.next_batch(Some(PATIENCE)).is_empty() && completions.is_closed());
}

#[test]
fn a_group_is_used_again_after_another_was_left() {
    let engines = engines(2, &config());
    for round in 0..3 {
        let groups: Vec<GroupHandle> =
            join(&engines, &format!("round {round}")).into_iter().map(Result::unwrap).collect();
        check_all_reduce(&groups, 1_000);
    }
}

#[test]
fn counters_are_kept_for_each_peer_and_for_the_socket() {
    let (engines, groups) = cluster(2, &config());
    check_all_reduce(&groups, 100_000);
    let stats = groups[0].stats().unwrap();
    assert_eq!((stats.rank, stats.world_size, stats.peers.len()), (0, 2, 1));
    assert!(stats.peers[0].bytes_sent >= 400_000, "{stats:?}");
    // At whichever of this host's addresses had its hello answered first.
    let address: std::net::SocketAddr = stats.peers[0].address.parse().expect("an address and a port");
    assert_eq!(address.port(), engines[1].local_port(), "{address}");
    assert!(engines[0].stats().unwrap().bytes_sent >= 400_000);
}

#[test]
fn an_idle_group_lets_the_processor_rest() {
    for (busy_poll, give_way) in [(Duration::ZERO, Choice::On), (Duration::from_millis(1), Choice::Off)] {
        let (engines, _groups) = cluster(2, &EngineConfig { busy_poll, give_way, ..config() });
        let before = engines[0].stats().unwrap();
        // The subject is what happens in this time when nothing does: there is no event to wait for.
        std::thread::sleep(Duration::from_millis(500));
        let after = engines[0].stats().unwrap();
        let (woken, looked) = (after.sleeps - before.sleeps, after.busy_polls - before.busy_polls);
        assert!(woken < 60, "{woken} times in half a second");
        // For a millisecond, other threads may use turns of 50 us or more; nothing is due within 20 us.
        let yielded = after.yields - before.yields;
        assert!(yielded <= 21 * (woken + 1), "{yielded} turns given away for {woken} sleeps");
        // A few milliseconds of looking, a microsecond each, at this test's own questions and at heartbeats.
        assert!(looked < 40_000, "{looked} looks in half a second");
    }
}

/// Each turn takes a receive call at least, and an idle group is turned to for a heartbeat that comes or goes.
#[test]
fn a_turn_looks_at_no_group_for_which_nothing_has_come_and_nothing_is_due() {
    let engines = engines(2, &config());
    let join =
        |name: &str| -> Vec<GroupHandle> { join(&engines, name).into_iter().map(Result::unwrap).collect() };
    let _idle: Vec<Vec<GroupHandle>> = (0..30).map(|number| join(&format!("idle {number}"))).collect();
    let busy = join("busy");
    let before = engines[0].stats().unwrap();
    (0..200).for_each(|_| check_all_reduce(&busy, 100));
    let after = engines[0].stats().unwrap();
    let datagrams = (after.datagrams_received + after.datagrams_sent)
        - (before.datagrams_received + before.datagrams_sent);
    let may = after.receive_calls - before.receive_calls + datagrams;
    let turns = after.group_turns - before.group_turns;
    assert!(turns >= 200 && turns <= may, "{turns} turns of groups, {may} at most: {before:?}, {after:?}");
}

#[test]
fn what_receive_offload_brings_as_one_piece_is_taken_in_runs() {
    for (offload, security) in
        [(Offload::Auto, Security::Off), (Offload::Auto, Security::On), (Offload::Off, Security::Off)]
    {
        let (engines, groups) = cluster(2, &EngineConfig { offload, security, mtu: Some(1_500), ..config() });
        check_all_reduce(&groups, 500_000);
        for engine in &engines {
            let stats = engine.stats().unwrap();
            let expected = match engine.features().gro {
                true => stats.datagrams_in_runs > stats.datagrams_received / 4,
                false => stats.datagrams_in_runs == 0,
            };
            assert!(expected, "{offload:?}, {security:?}: {stats:?}");
        }
    }
}

#[test]
fn an_empty_datagram_is_refused_like_every_other_of_a_stranger() {
    for offload in [Offload::Auto, Offload::Off] {
        let engine = Engine::start(EngineConfig { offload, ..config() }).unwrap();
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        for datagram in [&[][..], &[1], &[0; 100]] {
            stranger.send_to(datagram, ("127.0.0.1", engine.local_port())).unwrap();
        }
        let asked = Instant::now();
        let stats = loop {
            let stats = engine.stats().unwrap();
            if stats.datagrams_received == 3 || asked.elapsed() > Duration::from_secs(10) {
                break stats;
            }
        };
        assert_eq!((stats.datagrams_received, stats.datagrams_unknown), (3, 3), "{offload:?}: {stats:?}");
        engine.stop();
    }
}

#[test]
fn a_thread_looks_again_between_small_calls_if_it_may() {
    for (busy_poll, may) in [(Duration::ZERO, false), (Duration::from_millis(1), true)] {
        let (engines, groups) = cluster(2, &EngineConfig { busy_poll, ..config() });
        (0..100).for_each(|_| check_all_reduce(&groups, 100));
        for engine in &engines {
            let stats = engine.stats().unwrap();
            assert_eq!(stats.busy_polls > 0, may, "{busy_poll:?}: {stats:?}");
        }
    }
}

#[test]
fn a_thread_lets_others_go_first_before_it_sleeps_where_it_is_told_to() {
    for (give_way, gives) in [(Choice::Off, false), (Choice::On, true)] {
        let (engines, groups) = cluster(2, &EngineConfig { give_way, ..config() });
        (0..100).for_each(|_| check_all_reduce(&groups, 100));
        for engine in &engines {
            let stats = engine.stats().unwrap();
            assert_eq!((stats.yields > 0, stats.busy_polls), (gives, 0), "{stats:?}");
        }
    }
}

#[test]
fn a_second_thread_sends_where_it_is_told_to_and_changes_no_result() {
    for (send_thread, security, paths) in [
        (Choice::Off, Security::Off, 1),
        (Choice::On, Security::Off, 1),
        (Choice::On, Security::On, 1),
        (Choice::On, Security::On, 3),
    ] {
        let mtu = Some(1_500);
        let (engines, groups) = cluster(3, &EngineConfig { send_thread, security, paths, mtu, ..config() });
        for elems in [10, 100_000, 2_000_000, 1] {
            check_all_reduce(&groups, elems);
        }
        let apart = |engine: &Engine| engine.stats().unwrap().batches_apart > 0;
        if send_thread == Choice::On && engines[0].features().batched_calls {
            // The thread takes batches when it has woken.
            let start = Instant::now();
            while !engines.iter().all(apart) {
                check_all_reduce(&groups, 2_000_000);
                assert!(start.elapsed() < PATIENCE, "{security:?}, {paths} paths");
            }
        }
        assert!(send_thread == Choice::On || !engines.iter().any(apart));
        for engine in &engines {
            let stats = engine.stats().unwrap();
            assert_eq!((stats.seals_refused, stats.datagrams_not_authentic), (0, 0), "{stats:?}");
        }
    }
}

#[test]
fn unasked_a_thread_lets_others_go_first_where_ranks_share_cores() {
    for (ranks, give_way) in [(1, Choice::Auto), (2, Choice::Auto), (2, Choice::Off)] {
        on_one_core(|| {
            let (engines, groups) = cluster(ranks, &EngineConfig { give_way, ..config() });
            (0..100).for_each(|_| check_all_reduce(&groups, 100));
            for engine in &engines {
                let stats = engine.stats().unwrap();
                let expected = ranks > 1 && give_way == Choice::Auto;
                assert_eq!(stats.yields > 0, expected, "{ranks} ranks, {give_way:?}: {stats:?}");
            }
        });
    }
}

/// Runs `what` on a thread that may use one core, as may those that it starts.
fn on_one_core(what: impl FnOnce() + Send) {
    let bound = || {
        // SAFETY: a set of cores is bits, for which all are valid, and the calls read or write no further than one.
        unsafe {
            let size = size_of::<libc::cpu_set_t>();
            let (mut all, mut one) = std::mem::zeroed::<(libc::cpu_set_t, libc::cpu_set_t)>();
            assert_eq!(libc::sched_getaffinity(0, size, &raw mut all), 0);
            let first = (0..libc::CPU_SETSIZE as usize).find(|core| libc::CPU_ISSET(*core, &all));
            libc::CPU_SET(first.expect("this thread runs on one"), &mut one);
            assert_eq!(libc::sched_setaffinity(0, size, &raw const one), 0);
        }
        what();
    };
    std::thread::scope(|scope| scope.spawn(bound).join())
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Forked children hold copies of all sockets of this process.
static FORKS: Mutex<()> = Mutex::new(());

/// Lives on when its parent has ended, as a worker that loads data may.
#[test]
fn a_forked_child_holds_no_port_of_its_parent_and_closes_nothing_else() {
    let engine = Engine::start(EngineConfig { network_threads: Some(2), paths: 3, ..config() }).unwrap();
    let ports = [&engine.thread_ports()[1..], &engine.features().source_ports].concat();
    let _others = FORKS.lock();
    // SAFETY: the child only calls code that takes no lock of the engine, stops itself, and is killed.
    let child = unsafe { libc::fork() };
    if child == 0 {
        engine.let_go_in_child();
        let others: Vec<UdpSocket> = ports.iter().map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        engine.let_go_in_child();
        engine.stop();
        if others.iter().all(|other| other.local_addr().is_ok()) {
            // SAFETY: waits for the parent.
            unsafe { libc::raise(libc::SIGSTOP) };
        }
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(1) };
    }
    let mut status = 0;
    // SAFETY: `child` is ours, `status` is live.
    unsafe { libc::waitpid(child, &mut status, libc::WUNTRACED) };
    engine.let_go_in_child();
    assert!(engine.stats().is_ok(), "in the parent it does nothing");
    engine.stop();
    let bound: Vec<_> = ports.iter().map(|port| UdpSocket::bind(("0.0.0.0", *port))).collect();
    let has_stopped = libc::WIFSTOPPED(status);
    // SAFETY: `child` is ours, `status` is live.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, &mut status, 0);
    }
    assert!(has_stopped, "what the child opened was closed");
    assert!(bound.iter().all(Result::is_ok), "{bound:?}");
}

#[test]
fn a_forked_child_is_refused_and_its_parent_goes_on() {
    let (engines, groups) = cluster(2, &config());
    let others = FORKS.lock();
    // SAFETY: the child only calls code that takes no lock, and leaves with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = matches!(engines[0].new_group(0, 1, "child"), Err(EngineError::Forked { .. }));
        engines[0].stop();
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!forked)) };
    }
    let mut status = 0;
    // SAFETY: `child` is ours, `status` is live.
    unsafe { libc::waitpid(child, &mut status, 0) };
    drop(others);
    assert_eq!(status, 0);
    check_all_reduce(&groups, 1_000);
}

/// It would be detached otherwise, although it is not there: one of the child's has its stack by then, and is it for the system's library.
#[test]
fn an_engine_that_a_forked_child_drops_leaves_the_threads_of_the_child_alone() {
    let engine = Engine::start(config()).unwrap();
    let others = FORKS.lock();
    // SAFETY: the child starts threads, drops what takes no lock, and leaves with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // More than there were threads in the parent.
        let own: Vec<_> = (0..64).map(|_| std::thread::spawn(std::thread::park)).collect();
        drop(engine);
        own.iter().for_each(|thread| thread.thread().unpark());
        let join = || own.into_iter().all(|thread| thread.join().is_ok());
        let are_joined = catch_unwind(AssertUnwindSafe(join)).unwrap_or(false);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(i32::from(!are_joined)) };
    }
    let mut status = 0;
    // SAFETY: `child` is ours, `status` is live.
    unsafe { libc::waitpid(child, &mut status, 0) };
    drop(others);
    assert_eq!(status, 0);
}
