//! A stranger who knows a connection's id sends as much as it can: nothing is allocated for it, nothing is answered, and
//! what the ranks compute is exact.

mod common;
#[path = "../../gradwire-core/tests/common/counting.rs"]
mod counting;

use common::{check_all_reduce, cluster, config};
use counting::allocations_of_all_threads_in;
use gradwire_engine::core::wire::{Kind, PacketNumber};
use gradwire_engine::core::{ConnectionId, Header};
use gradwire_engine::{EngineConfig, Security};
use std::net::UdpSocket;
use std::time::Duration;

/// By count, not by time: a slow machine must not make it a smaller attack, nor a fast one an endless test.
const DATAGRAMS: u32 = 60_000;
/// Ids that an engine gives out first, whatever their random part is: the stranger tries them all.
const IDS: u32 = 1 << 8;

#[test]
fn a_flood_from_a_stranger_costs_no_memory_gets_no_answer_and_changes_nothing() {
    let config = EngineConfig { security: Security::On, peer_timeout: Duration::from_secs(10), ..config() };
    let (engines, groups) = cluster(2, &config);
    check_all_reduce(&groups, 100_000);
    let stranger = UdpSocket::bind("127.0.0.1:0").expect("loopback exists");
    stranger.connect(("127.0.0.1", engines[0].local_port())).expect("loopback exists");
    stranger.set_nonblocking(true).expect("a socket");
    let allocated = allocations_of_all_threads_in(|| {
        for number in 0..DATAGRAMS {
            // To each id by turns a data packet and what would end the group, with numbers near and far.
            let kind = if number / IDS % 2 == 0 { Kind::Data } else { Kind::Abort };
            let id = ConnectionId::new((number % IDS) << 16).or(ConnectionId::new(1 << 16)).expect("24 bits");
            let mut header = Header::control(kind, id);
            header.packet_number = PacketNumber(number.wrapping_mul(2_654_435_761) >> (number % 32));
            let mut datagram = [0; 200];
            datagram[..24].copy_from_slice(&header.encode());
            // A full buffer of the kernel is the flood's own loss.
            _ = stranger.send(&datagram);
        }
    });
    check_all_reduce(&groups, 100_000);
    let stats = engines[0].stats().expect("running");
    // Those with a number that has been used, or is too old, are not even tried.
    assert!(stats.datagrams_not_authentic + stats.datagrams_replayed > 10, "{stats:?}");
    assert!(stats.datagrams_unknown > 1_000, "{stats:?}");
    assert!(allocated < 200, "{allocated} allocations for {DATAGRAMS} datagrams");
    assert_eq!(
        groups[0].stats().expect("running").peers[0].datagrams_not_authentic,
        stats.datagrams_not_authentic
    );
    let answered = stranger.recv(&mut [0; 100]);
    assert!(answered.is_err(), "{answered:?}");
}
