//! Groups that divide large calls between several network threads of each rank.

use super::{all_reduce, check_all_reduce, cluster, config, Tensor, PATIENCE};
use gradwire_engine::collectives::{DeliveryReport, Policy, Request};
use gradwire_engine::{ChaosConfig, Engine, EngineConfig, GroupHandle, OpHandle};
use std::time::Instant;

/// Three parts and a rest.
pub(crate) const ELEMS: usize = 3 * (1 << 18) + 5;
/// A group divides behind its first exchange, which holds from here on.
pub(crate) const CALLS_UNTIL_AGREED: usize = 42;

pub(crate) fn with(threads: u8) -> EngineConfig {
    EngineConfig { network_threads: Some(threads), mtu: Some(1_500), ..config() }
}

/// As many calls as a group needs to know that all can divide; fails unless it does so into `threads` parts.
pub(crate) fn agree(groups: &[GroupHandle], threads: u8) {
    let started = Instant::now();
    // Lanes connect beside the first calls, and are agreed on by the exchange behind.
    loop {
        (0..CALLS_UNTIL_AGREED).for_each(|_| check_all_reduce(groups, 50_000));
        let agreed = groups[0].stats().unwrap().agreed.map(|agreed| agreed.threads);
        if agreed == Some(threads) {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "{agreed:?} threads");
    }
}

/// A group of `ranks` ranks that has agreed to divide between `threads` threads of each.
pub(crate) fn dividing(ranks: u32, threads: u8, config: &EngineConfig) -> (Vec<Engine>, Vec<GroupHandle>) {
    let (engines, groups) =
        cluster(ranks, &EngineConfig { network_threads: Some(threads), ..config.clone() });
    agree(&groups, threads);
    (engines, groups)
}

/// Three ranks of two threads each that lose every fiftieth datagram, and a policy that lets a twentieth of the contributions go, and no more
/// where a busy machine meets a deadline.
pub(crate) fn losing() -> (Vec<Engine>, Vec<GroupHandle>, Policy) {
    let chaos = Some(ChaosConfig { loss: 0.02, seed: 7, ..ChaosConfig::default() });
    let (engines, groups) = dividing(3, 2, &EngineConfig { chaos, ..with(2) });
    (engines, groups, Policy { loss_bound: 0.05, floor: 0.95, ..Policy::AUTO })
}

/// On each rank an exact all-reduce of its tensor, after a change.
pub(crate) fn submit(
    groups: &[GroupHandle],
    tensors: &mut [Tensor],
    change: impl Fn(Request) -> Request,
) -> Vec<OpHandle> {
    let calls = groups.iter().zip(tensors);
    calls
        .map(|(group, tensor)| group.submit(change(all_reduce(tensor.view())), Box::new(())).unwrap())
        .collect()
}

/// How they ended, which is well.
pub(crate) fn reports(ops: &[OpHandle]) -> Vec<DeliveryReport> {
    let report =
        |op: &OpHandle| op.wait(Some(PATIENCE)).expect("ends in time").as_ref().expect("ends well").clone();
    ops.iter().map(report).collect()
}
