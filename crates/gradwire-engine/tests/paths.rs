//! Several paths between two ranks over loopback: from which ports packets leave, and that results stay exact.

use crate::common::{check_all_reduce, cluster, config, engines, join};
use gradwire_engine::core::RoundTrips;
use gradwire_engine::{
    Engine, EngineConfig, EngineError, GroupHandle, Offload, PathStats, Spray, TimeHistogram,
};
use std::net::UdpSocket;

fn connect(engines: &[Engine]) -> Vec<GroupHandle> {
    join(engines, "paths").into_iter().map(|group| group.expect("all ranks are there")).collect()
}

fn paths_of(group: &GroupHandle) -> Vec<PathStats> {
    group.stats().expect("running").peers[0].paths.clone()
}

#[test]
fn sums_are_exact_over_any_number_of_paths_with_every_spray_and_without_offload() {
    for (paths, spray, offload) in [
        (2, Spray::RoundRobin, Offload::Auto),
        (4, Spray::Adaptive, Offload::Auto),
        (4, Spray::Adaptive, Offload::Off),
        (16, Spray::Random, Offload::Auto),
    ] {
        // Enough packets for every path.
        let mtu = Some(9_000);
        let engines = engines(3, &EngineConfig { paths, spray, offload, mtu, ..config() });
        let groups = connect(&engines);
        // By chance one of 16 paths is left out of a few hundred packets once in some hundred times, of so many never.
        for elems in [1, 1_000, 1_000_003, 4_000_003] {
            check_all_reduce(&groups, elems);
        }
        for group in &groups {
            let stats = group.stats().expect("running");
            // A ring sends much to one neighbour only.
            let busy: Vec<_> = stats.peers.iter().filter(|peer| peer.packets_sent > 200).collect();
            assert!(!busy.is_empty(), "{stats:?}");
            for peer in busy {
                assert_eq!(peer.paths.len(), usize::from(paths));
                assert!(peer.paths.iter().all(|path| path.packets_sent > 0), "{spray:?}: {peer:?}");
            }
        }
    }
}

#[test]
fn each_path_sends_from_a_port_of_its_own_that_the_record_names() {
    let engines = engines(2, &EngineConfig { paths: 4, ..config() });
    let ports = engines[0].features().source_ports;
    assert_eq!(ports.len(), 4);
    assert_eq!(ports[0], engines[0].local_port());
    let mut distinct = ports.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), 4, "{ports:?}");
    let groups = connect(&engines);
    check_all_reduce(&groups, 100_000);
    let used: Vec<u16> = paths_of(&groups[0]).iter().map(|path| path.source_port).collect();
    assert_eq!(used, ports);
    let record = engines[0].new_group(0, 1, "alone").expect("valid").record();
    assert!(record.contains(&format!("\"source_ports\":{ports:?}").replace(' ', "")), "{record}");
}

#[test]
fn what_the_kernel_chooses_is_no_port_that_another_rank_of_the_host_may_be_about_to_bind() {
    let holder = UdpSocket::bind("127.0.0.1:0").unwrap();
    let base = holder.local_addr().unwrap().port();
    drop(holder);
    let config = EngineConfig { port: base, paths: 8, network_threads: Some(2), ..config() };
    // One of the kernel's choices in 28 would be near: of so many none was with a probability of one in 1,000.
    for _ in 0..25 {
        // The further thread's port is taken, by this or by who else has it: it has any.
        let _taken = UdpSocket::bind(("127.0.0.1", base.saturating_add(64)));
        let engine = match Engine::start(config.clone()) {
            Err(EngineError::PortInUse { port }) if port == base => {
                return eprintln!("skipped: {port} was taken")
            }
            engine => engine.expect("loopback exists"),
        };
        let [first, further] = engine.thread_ports()[..] else { panic!("two threads") };
        assert_eq!(first, base);
        let chosen = engine.features().source_ports.into_iter().skip(1).chain([further]);
        let near: Vec<u16> = chosen.filter(|port| port.abs_diff(base) < 512).collect();
        assert!(near.is_empty(), "{near:?} beside {base}");
        engine.stop();
    }
}

#[test]
fn ranks_with_different_numbers_of_paths_use_the_least() {
    let with = |paths| Engine::start(EngineConfig { paths, ..config() }).expect("loopback exists");
    let engines = [with(4), with(2), with(3)];
    let groups = connect(&engines);
    check_all_reduce(&groups, 300_000);
    for group in &groups {
        assert_eq!(paths_of(group).len(), 2);
    }
}

#[test]
fn one_path_is_the_published_port_and_has_all_the_share() {
    let (engines, groups) = cluster(2, &config());
    check_all_reduce(&groups, 300_000);
    let paths = paths_of(&groups[0]);
    let stats = &groups[0].stats().expect("running").peers[0];
    assert_eq!((paths.len(), paths[0].source_port), (1, engines[0].local_port()));
    assert_eq!((paths[0].share, paths[0].trusted), (1.0, true));
    assert_eq!(paths[0].packets_sent, stats.packets_sent);
}

#[test]
fn round_trips_are_counted_for_each_path_within_the_bounds_of_all_times() {
    let bounds = TimeHistogram::bounds();
    let as_micros = |bound: &f64| (bound * 1e6).round() as u128;
    let theirs = (0..bounds.len()).map(|bucket| RoundTrips::bound(bucket).as_micros());
    assert_eq!(theirs.collect::<Vec<_>>(), bounds.iter().map(as_micros).collect::<Vec<_>>());
    let (_engines, groups) = cluster(2, &EngineConfig { paths: 2, ..config() });
    let counted = || {
        let counts = |path: PathStats| path.round_trip_s.counts.iter().sum::<u64>();
        paths_of(&groups[0]).into_iter().map(counts).collect::<Vec<u64>>()
    };
    check_all_reduce(&groups, 1_000_000);
    let before = counted();
    check_all_reduce(&groups, 1_000_000);
    let after = counted();
    let grew: Vec<bool> = before.iter().zip(&after).map(|(before, after)| before < after).collect();
    assert!(grew.len() == 2 && grew.contains(&true), "{before:?}, {after:?}");
    assert!(before.iter().zip(&after).all(|(before, after)| before <= after), "{before:?}, {after:?}");
    for path in paths_of(&groups[0]) {
        let PathStats { round_trip_s: TimeHistogram { counts, sum }, .. } = path;
        let least: f64 = counts.iter().skip(1).zip(bounds).map(|(count, bound)| *count as f64 * bound).sum();
        let most: f64 = counts.iter().zip(bounds).map(|(count, bound)| *count as f64 * bound).sum();
        assert!(least < sum && sum <= most, "{least} to {most}: {path:?}");
    }
}
