//! A peer behind an address translator, over real sockets: where its record says that it is nobody answers, and what it sends comes from
//! another address, by which it is reached as well (common/relay.rs).

use crate::common::relay::{Meddler, Relay};
use crate::common::{check_all_reduce, config, engines, PATIENCE};
use gradwire_engine::core::wire::Kind;
use gradwire_engine::core::Header;
use gradwire_engine::{Engine, EngineConfig, GroupHandle, JoinError, Security};
use std::net::UdpSocket;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

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
