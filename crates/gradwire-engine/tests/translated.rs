//! A peer behind an address translator, over real sockets: where its record says that it is nobody answers, and what it sends comes from
//! another address, by which it is reached as well (common/relay.rs).

use crate::common::relay::{Meddler, Relay};
use crate::common::{check_all_reduce, config, engines, PATIENCE};
use crate::security::{stranger_of, until_all_are_seen};
use gradwire_engine::core::wire::{Flags, Kind};
use gradwire_engine::core::Header;
use gradwire_engine::{Engine, EngineConfig, GroupHandle, JoinError, Security};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What has become of two ranks, the second of which is behind a translator.
struct Translated {
    _engines: Vec<Engine>,
    relay: Relay,
    joined: Vec<Result<GroupHandle, JoinError>>,
    /// Where the second rank's record says that it is.
    published: String,
    /// Datagrams that came to the translator from each rank.
    carried: Arc<[AtomicUsize; 2]>,
}

fn translated(security: Security, timeout: Duration) -> Translated {
    let engines = engines(2, &EngineConfig { security, ..config() });
    let carried: Arc<[AtomicUsize; 2]> = Arc::default();
    let meddler: Arc<Meddler> = {
        let carried = Arc::clone(&carried);
        Arc::new(move |from: usize, datagram: &[u8]| {
            carried[from].fetch_add(1, Ordering::SeqCst);
            // Who gives up first says so, and the other one would name that instead.
            let gives_up = Header::decode(datagram).is_ok_and(|(header, _)| header.kind == Kind::Abort);
            (if gives_up { Vec::new() } else { vec![datagram.to_vec()] }, Vec::new())
        })
    };
    let relay = Relay::new(&engines, meddler);
    // Bound, or another test might be given the port; nobody reads it.
    let dead = UdpSocket::bind("127.0.0.1:0").expect("loopback exists");
    let published = dead.local_addr().expect("bound");
    let joined = relay.join_at(&engines, "translated", [relay.face_of(0).port(), published.port()], timeout);
    Translated { _engines: engines, relay, joined, published: published.to_string(), carried }
}

#[test]
fn a_sealed_peer_that_is_reached_only_where_it_was_heard_is_settled_there() {
    let Translated { _engines, relay, joined, .. } = translated(Security::On, PATIENCE);
    let groups: Vec<GroupHandle> = joined.into_iter().map(|group| group.expect("connected")).collect();
    let address = &groups[0].stats().expect("running").peers[0].address;
    assert_eq!(*address, relay.face_of(1).to_string());
    check_all_reduce(&groups, 100_003);
}

/// Anybody may have made what was heard: nothing is sent there, and the group does not form.
#[test]
fn a_peer_in_clear_is_not_looked_for_where_it_was_heard() {
    let Translated { joined, published, carried, .. } = translated(Security::Off, Duration::from_secs(1));
    for (rank, outcome) in joined.into_iter().enumerate() {
        let error = outcome.expect_err("it must not form");
        let JoinError::Unreachable { peers, .. } = &error else { panic!("{error}") };
        assert_eq!(peers.iter().map(|peer| peer.rank as usize).collect::<Vec<_>>(), [1 - rank]);
        assert!(rank == 1 || error.to_string().contains(&published), "{error}");
    }
    let [to_the_peer, from_it] = [0, 1].map(|rank| carried[rank].load(Ordering::SeqCst));
    assert!(from_it > 0, "it was heard");
    assert_eq!(to_the_peer, 0);
}

/// As many places as hellos go to besides those of the record.
const HEARD_MAX: usize = 4;

/// Five who send on what the peer has sealed, each one datagram that has not come before.
#[test]
fn hellos_go_to_four_places_where_a_peer_was_heard_and_to_its_own_all_the_same() {
    let (captured, is_open) =
        (Arc::new(Mutex::new([Vec::new(), Vec::new()])), Arc::new(AtomicBool::new(false)));
    let meddler: Arc<Meddler> = {
        let (captured, is_open) = (Arc::clone(&captured), Arc::clone(&is_open));
        Arc::new(move |from: usize, datagram: &[u8]| {
            if is_open.load(Ordering::SeqCst) {
                return (vec![datagram.to_vec()], Vec::new());
            }
            captured.lock().expect("no panic")[from].push(datagram.to_vec());
            (Vec::new(), Vec::new())
        })
    };
    let engines = engines(2, &EngineConfig { security: Security::On, ..config() });
    let relay = Relay::new(&engines, meddler);
    let strangers: Vec<UdpSocket> = (0..=HEARD_MAX).map(|_| stranger_of(&engines[0])).collect();
    let joined = std::thread::scope(|scope| {
        let joining = scope.spawn(|| relay.join(&engines, "overtaken"));
        let begun = Instant::now();
        let counts = || captured.lock().expect("no panic").each_ref().map(Vec::len);
        // Rank 0 has joined as well, or it would hear nothing yet.
        while counts()[0] == 0 || counts()[1] < strangers.len() {
            assert!(begun.elapsed() < PATIENCE, "no hellos go anywhere");
            std::thread::yield_now();
        }
        let copies = captured.lock().expect("no panic")[1].clone();
        for (stranger, copy) in strangers.iter().zip(&copies) {
            stranger.send(copy).expect("loopback");
            until_all_are_seen(stranger, &engines[0]);
        }
        // Sent after the last one was heard, to which they would go in the same round.
        strangers.iter().take(HEARD_MAX).for_each(wait_for_next_hello);
        is_open.store(true, Ordering::SeqCst);
        joining.join().expect("join does not panic")
    });
    let groups: Vec<GroupHandle> = joined.into_iter().map(|group| group.expect("connected")).collect();
    let address = &groups[0].stats().expect("running").peers[0].address;
    assert_eq!(*address, relay.face_of(1).to_string());
    check_all_reduce(&groups, 1_000);
    let last = strangers.last().expect("five");
    last.set_nonblocking(true).expect("a setting of ours");
    assert!(last.recv(&mut [0; 1]).is_err(), "one too many is sent hellos");
}

/// Returns once a hello that is no answer comes after those that are here.
fn wait_for_next_hello(stranger: &UdpSocket) {
    let mut buffer = vec![0; 1 << 16];
    stranger.set_nonblocking(true).expect("a setting of ours");
    while stranger.recv(&mut buffer).is_ok() {}
    stranger.set_nonblocking(false).expect("a setting of ours");
    stranger.set_read_timeout(Some(PATIENCE)).expect("a setting of ours");
    let mut is_hello = false;
    while !is_hello {
        let bytes = stranger.recv(&mut buffer).expect("it is sent hellos");
        is_hello = Header::decode(&buffer[..bytes])
            .is_ok_and(|(header, _)| header.kind == Kind::Hello && !header.flags.contains(Flags::REPLY));
    }
}
