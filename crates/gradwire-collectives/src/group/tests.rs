//! What a group tells its connections.

use super::*;
use crate::schedules::{Loss, Stage};
use crate::{Algorithm, Dtype, Policy, View};
use gradwire_core::wire::{OPENING_BYTES, TAG_BYTES};
use gradwire_core::CHUNKS_MAX;

const WORLD_SIZE: u32 = 6;

fn group(incast: Option<u32>) -> Group {
    let peers = (1..WORLD_SIZE).map(|peer| crate::fuzzing::peer_config(0, peer)).collect();
    let (exchange, servers) = (ExchangePlan::DEFAULT, Servers::default());
    let config = GroupConfig { rank: 0, world_size: WORLD_SIZE, peers, incast, exchange, servers };
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
