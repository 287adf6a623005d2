//! What a group tells its connections.

use super::*;
use crate::call::Call;
use crate::schedules::{Loss, Stage};
use crate::{Algorithm, Dtype, Policy, View};
use gradwire_core::wire::{Opening, OPENING_BYTES, TAG_BYTES};
use gradwire_core::{TransferId, CHUNKS_MAX};

const WORLD_SIZE: u32 = 6;

fn group(incast: Option<u32>) -> Group {
    of_ranks(WORLD_SIZE, incast)
}

fn of_ranks(world_size: u32, incast: Option<u32>) -> Group {
    let peers = (1..world_size).map(|peer| crate::fuzzing::peer_config(0, peer)).collect();
    let (exchange, servers) = (ExchangePlan::DEFAULT, Servers::default());
    let config = GroupConfig { rank: 0, world_size, peers, incast, exchange, servers };
    Group::new(config, Timestamp::ZERO)
}

fn submit(group: &mut Group, collective: Collective, memory: &mut [u8]) {
    // SAFETY: the caller keeps the memory longer than the group uses it.
    let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
    let request = Request {
        input: view,
        output: view,
        ..Request::exact(collective, Dtype::F32, Duration::from_secs(1))
    };
    group.submit(Timestamp::ZERO, request);
}

// test of: auto/shared-cores
#[test]
fn a_transfer_of_a_large_tolerant_ring_may_lose_less_than_one_of_a_transpose_also_where_it_was_asked_for() {
    let mut memory = vec![0; 64 << 10];
    // SAFETY: the memory outlives the group, which nothing moves on.
    let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
    let bound = |algorithm, stage| {
        let mut group = group(None);
        let collective = Collective::AllReduce { algorithm };
        let request = Request::exact(collective, Dtype::F32, Duration::from_secs(1));
        group.submit(Timestamp::ZERO, Request { input: view, output: view, policy: Policy::AUTO, ..request });
        let key = group.ops.key_of(0).expect("it has started");
        group.terms(key, 0, 10_000, Loss::In(stage)).0.loss_bound
    };
    let whole = Policy::AUTO.loss_bound;
    assert!((bound(Algorithm::Transpose, Stage::Reduce) - whole).abs() < 1e-6);
    assert!((bound(Algorithm::Ring, Stage::Reduce) - whole * 4.0 / 6.0).abs() < 1e-6);
    assert!(bound(Algorithm::Ring, Stage::Gather) <= 0.0, "results arrive");
}

// test of: auto/schedule-aware-incast
#[test]
fn connections_are_told_the_most_senders_at_one_receiver_that_any_collective_has_had() {
    let mut memory = vec![0; 64 << 10];
    let all_reduce = |algorithm| Collective::AllReduce { algorithm };
    for (incast, transpose) in [(None, 5), (Some(2), 2), (Some(100), 5)] {
        let mut group = group(incast);
        let mut told = |collective| {
            submit(&mut group, collective, &mut memory);
            group.told_incast.told()
        };
        assert_eq!(told(all_reduce(Algorithm::Ring)), 1);
        assert_eq!(told(all_reduce(Algorithm::Transpose)), transpose);
        assert_eq!(told(all_reduce(Algorithm::Ring)), transpose, "never fewer than before");
        assert_eq!(told(Collective::Barrier), 5, "everybody signals to everybody");
    }
}

#[test]
fn a_call_whose_transfers_have_more_packets_than_a_connection_counts_is_refused_and_blames_the_mtu() {
    const CHUNK_BYTES: usize = 64;
    let mut peers: Vec<PeerConfig> = (1..3).map(|peer| crate::fuzzing::peer_config(0, peer)).collect();
    for peer in &mut peers {
        peer.connection.datagram_bytes = HEADER_BYTES + OPENING_BYTES + TAG_BYTES + CHUNK_BYTES;
    }
    let (exchange, servers) = (ExchangePlan::DEFAULT, Servers::default());
    let config = GroupConfig { rank: 0, world_size: 3, peers, incast: None, exchange, servers };
    let mut group = Group::new(config, Timestamp::ZERO);
    // Nobody touches it, so it takes no memory.
    let most = CHUNKS_MAX as usize * CHUNK_BYTES;
    let mut memory = vec![0; most + 4];
    let done = |group: &mut Group| {
        std::iter::from_fn(|| group.poll_event()).find_map(|event| match event {
            GroupEvent::Done { outcome, .. } => Some(outcome),
            _ => None,
        })
    };
    submit(&mut group, Collective::Broadcast { root: 1 }, &mut memory[..most]);
    assert!(done(&mut group).is_none(), "it fits");
    submit(&mut group, Collective::Broadcast { root: 1 }, &mut memory);
    let refused = done(&mut group).expect("it ends at once");
    let Err(OpError::Invalid(reason)) = refused else { panic!("{refused:?}") };
    assert!(reason.contains("the MTU is too small") && reason.contains("268435456"), "{reason}");
}

fn receive_from(group: &mut Group, from: Option<u32>, tag: u32) -> OpId {
    let request = Request::exact(Collective::Receive { from, tag }, Dtype::Bytes, Duration::from_secs(1));
    group.submit(Timestamp::ZERO, request)
}

fn offer(group: &mut Group, peer: u32, number: u32, tag: u32) {
    let request = Request::exact(Collective::Send { to: 0, tag }, Dtype::Bytes, Duration::from_secs(1));
    let descriptor = Call::of(&request, Algorithm::Auto).encode();
    let opening = Opening { total_bytes: 0, descriptor, called_us: 0 };
    let slot = group.slot_of(peer).expect("a peer");
    group.on_offered(Timestamp::ZERO, slot, TransferId::point_to_point(number), &opening);
}

/// The receives that have begun, by their calls, and from whom.
fn taken(group: &mut Group) -> Vec<(OpId, u32)> {
    let Group { peers, ops, .. } = group;
    let keys = |peer: &Peer| {
        let rank = peer.rank;
        peer.traffic.receiving.iter().map(move |(_, key)| (*key, rank)).collect::<Vec<_>>()
    };
    let keys = peers.iter().flat_map(keys);
    let mut taken: Vec<(OpId, u32)> = keys.filter_map(|(key, rank)| Some((ops.at(key)?.id, rank))).collect();
    taken.sort_unstable();
    taken
}

#[test]
fn receives_from_all_ranks_are_found_what_was_offered_for_without_looking_at_all_ranks_for_each() {
    const RANKS: u32 = 256;
    const LOOKS_MAX: usize = 4 * (RANKS * RANKS) as usize;
    let looks = || point_to_point::LOOKS.with(std::cell::Cell::take);
    for offers_come_first in [false, true] {
        let mut group = of_ranks(RANKS, None);
        looks();
        for step in [offers_come_first, !offers_come_first] {
            for peer in 1..RANKS {
                match step {
                    true => offer(&mut group, peer, 0, 7),
                    false => drop(receive_from(&mut group, Some(peer), 7)),
                }
            }
        }
        let looked = looks();
        assert_eq!(taken(&mut group).len(), RANKS as usize - 1);
        assert!(looked <= LOOKS_MAX, "{looked}");
    }
}

#[test]
fn receives_take_offers_in_the_order_of_their_calls_whatever_comes_first() {
    let mut group = of_ranks(WORLD_SIZE, None);
    let waiting: Vec<OpId> = [(Some(2), 1), (None, 1), (Some(3), 2), (None, 1)]
        .map(|(from, tag)| receive_from(&mut group, from, tag))
        .into();
    offer(&mut group, 3, 0, 1);
    assert_eq!(taken(&mut group), [(waiting[1], 3)], "the first that names nobody");
    // The second comes before the first: both are there at once.
    offer(&mut group, 2, 1, 1);
    assert_eq!(taken(&mut group).len(), 1);
    offer(&mut group, 2, 0, 1);
    assert_eq!(taken(&mut group), [(waiting[0], 2), (waiting[1], 3), (waiting[3], 2)]);
    offer(&mut group, 4, 0, 2);
    offer(&mut group, 1, 0, 2);
    let late = receive_from(&mut group, None, 2);
    assert_eq!(taken(&mut group).last(), Some(&(late, 4)), "the earliest offer");
    offer(&mut group, 3, 1, 2);
    assert!(taken(&mut group).contains(&(waiting[2], 3)));
}
