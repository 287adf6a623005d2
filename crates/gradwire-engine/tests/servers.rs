//! Dedicated parameter servers over real sockets.

use crate::common::{all_reduce, config, engines, impatient, join_pending, values, Tensor, PATIENCE};
use gradwire_engine::collectives::{Algorithm, Collective, OpError, Request};
use gradwire_engine::{DedicatedServers, Engine, EngineConfig, EngineError, GroupHandle, OpHandle};

/// Workers first, servers behind them.
fn cluster(
    workers: u32,
    count: u32,
    buffer_bytes: u64,
    config: &EngineConfig,
) -> (Vec<Engine>, Vec<GroupHandle>) {
    let engines = engines(workers + count, config);
    let servers = DedicatedServers { count, buffer_bytes };
    let pending = engines
        .iter()
        .zip(0..)
        .map(|(engine, rank)| engine.new_served_group(rank, workers, servers, "served").expect("valid rank"));
    let groups = join_pending(pending.collect(), PATIENCE).into_iter().map(Result::unwrap).collect();
    (engines, groups)
}

fn submit(groups: &[GroupHandle], tensors: &mut [Tensor]) -> Vec<OpHandle> {
    let collective = Collective::AllReduce { algorithm: Algorithm::ParameterServer };
    let request =
        |tensor: &mut Tensor| Request { collective: collective.clone(), ..all_reduce(tensor.view()) };
    let pairs = groups.iter().zip(tensors);
    pairs.map(|(group, tensor)| group.submit(request(tensor), Box::new(())).expect("running")).collect()
}

// test of: ltp/dedicated-servers
#[test]
fn servers_sum_what_workers_push_and_end_when_the_last_one_has_left() {
    let (_engines, groups) = cluster(3, 2, 1 << 30, &config());
    let (workers, servers) = groups.split_at(3);
    for elems in [1, 1_000, 300_001] {
        let mut tensors: Vec<Tensor> = (0..3).map(|rank| Tensor(values(rank, elems))).collect();
        for op in submit(workers, &mut tensors) {
            let report = op.wait(Some(PATIENCE)).expect("ends in time").as_ref().expect("nothing is lost");
            assert_eq!(report.collective, "all_reduce/parameter_server");
        }
        let right = |(index, value): (usize, &f32)| *value == (6 * (index % 1_000)) as f32;
        assert!(tensors.iter().all(|tensor| tensor.0.iter().enumerate().all(right)), "{elems} elements");
    }
    assert_eq!((groups[0].world_size(), servers[0].rank()), (3, 3));
    assert!(workers.iter().all(|group| group.leave(PATIENCE)));
    for server in servers {
        assert_eq!(server.wait_for_workers(PATIENCE).expect("running"), Some(Ok(())));
        let served = server.stats().expect("running").served;
        assert_eq!(served.calls, 3);
        assert_eq!(served.elems_received, served.elems_expected);
    }
}

#[test]
fn a_dead_server_is_named_to_every_worker_and_a_dead_worker_to_every_server() {
    for dead in [2, 0] {
        let (engines, groups) = cluster(2, 1, 1 << 30, &impatient());
        engines[dead].crash();
        let mut tensors: Vec<Tensor> = (0..2).map(|rank| Tensor(values(rank, 50_000))).collect();
        let living: Vec<usize> = (0..2).filter(|rank| *rank != dead).collect();
        for rank in living {
            let ops = submit(&groups[rank..=rank], &mut tensors[rank..=rank]);
            let error = ops[0].wait(Some(PATIENCE)).expect("ends in time").clone().expect_err("one is dead");
            assert!(matches!(&error, OpError::PeerLost { rank, .. } if *rank as usize == dead), "{error}");
            let host = error.to_string();
            assert_eq!(host.contains("parameter server 0 on "), dead == 2, "{host}");
        }
        if dead == 0 {
            let ended = groups[2].wait_for_workers(PATIENCE).expect("running").expect("ends in time");
            assert!(matches!(ended, Err(OpError::PeerLost { rank: 0, .. })), "{ended:?}");
        }
    }
}

#[test]
fn a_group_of_no_workers_or_no_servers_is_refused() {
    let engine = engines(1, &config()).remove(0);
    for (workers, count) in [(0, 1), (1, 0), (u32::MAX, 2)] {
        let servers = DedicatedServers { count, buffer_bytes: 1 };
        let refused = engine.new_served_group(0, workers, servers, "none").map(|_| ());
        assert!(matches!(refused, Err(EngineError::RankInvalid { .. })), "{workers}, {count}: {refused:?}");
    }
}
