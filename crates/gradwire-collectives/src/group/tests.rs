//! What a group tells its connections.

use super::*;
use crate::{Algorithm, Dtype, View};

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

// test of: auto/schedule-aware-incast
#[test]
fn connections_are_told_the_most_senders_at_one_receiver_that_any_collective_has_had() {
    let mut memory = vec![0; 64 << 10];
    let all_reduce = |algorithm| Collective::AllReduce { algorithm };
    for (incast, transpose) in [(None, 5), (Some(2), 2), (Some(100), 5)] {
        let mut group = group(incast);
        let mut told = |collective| {
            submit(&mut group, collective, &mut memory);
            group.told_incast
        };
        assert_eq!(told(all_reduce(Algorithm::Ring)), 1);
        assert_eq!(told(all_reduce(Algorithm::Transpose)), transpose);
        assert_eq!(told(all_reduce(Algorithm::Ring)), transpose, "never fewer than before");
        assert_eq!(told(Collective::Barrier), 5, "everybody signals to everybody");
    }
}
