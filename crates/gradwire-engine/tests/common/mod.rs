//! Several engines in one process, each a rank, over loopback with ephemeral ports.
#![allow(dead_code)] // Each test file uses its part.

pub(crate) mod dividing;
pub(crate) mod relay;

use gradwire_engine::collectives::{
    Algorithm, Bucket, Collective, Dtype, ImportanceRule, Marks, Request, View,
};
use gradwire_engine::{Engine, EngineConfig, GroupHandle, JoinError, OpHandle, PendingGroup};
use std::ops::Range;
use std::time::Duration;

/// Longest that anything in these tests may take before it counts as hung.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Settings for tests: everything by default, the peer timeout as well, or a busy host would lose peers that live.
#[must_use]
pub(crate) fn config() -> EngineConfig {
    EngineConfig::default()
}

/// The same for a test in which a peer is lost.
#[must_use]
pub(crate) fn impatient() -> EngineConfig {
    EngineConfig { peer_timeout: Duration::from_secs(6), ..config() }
}

/// Starts `world_size` engines.
#[must_use]
pub(crate) fn engines(world_size: u32, config: &EngineConfig) -> Vec<Engine> {
    (0..world_size).map(|_| Engine::start(config.clone()).expect("loopback exists")).collect()
}

/// Joins one group of all engines; every rank sees every record.
pub(crate) fn join(engines: &[Engine], name: &str) -> Vec<Result<GroupHandle, JoinError>> {
    let world_size = engines.len() as u32;
    let pending: Vec<PendingGroup> = engines
        .iter()
        .zip(0..)
        .map(|(e, rank)| e.new_group(rank, world_size, name).expect("valid rank"))
        .collect();
    join_pending(pending, PATIENCE)
}

/// Joins pending groups, each on its own thread.
pub(crate) fn join_pending(
    pending: Vec<PendingGroup>,
    timeout: Duration,
) -> Vec<Result<GroupHandle, JoinError>> {
    let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
    let threads: Vec<_> = pending
        .into_iter()
        .map(|group| {
            let records = records.clone();
            std::thread::spawn(move || group.join(&records, Some(timeout)))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().expect("join does not panic")).collect()
}

/// A connected group of `world_size` ranks.
#[must_use]
pub(crate) fn cluster(world_size: u32, config: &EngineConfig) -> (Vec<Engine>, Vec<GroupHandle>) {
    let engines = engines(world_size, config);
    let groups =
        join(&engines, "test").into_iter().map(|group| group.expect("all ranks are there")).collect();
    (engines, groups)
}

/// Memory that an operation reads and writes. The heap block does not move when the value does.
pub(crate) struct Tensor(pub(crate) Vec<f32>);

impl Tensor {
    /// The whole tensor.
    pub(crate) fn view(&mut self) -> View {
        // SAFETY: the tests wait for the operation, or stop the engine, before they touch or drop the memory.
        unsafe { View::new(self.0.as_mut_ptr().cast(), self.0.len() * 4) }
    }

    /// Its first `elems` elements.
    pub(crate) fn view_of(&mut self, elems: usize) -> View {
        self.view_within(0..elems)
    }

    /// Its elements `elems`.
    pub(crate) fn view_within(&mut self, elems: Range<usize>) -> View {
        let part = &mut self.0[elems];
        // SAFETY: as in `view`.
        unsafe { View::new(part.as_mut_ptr().cast(), part.len() * 4) }
    }
}

/// An exact all-reduce of the whole of `view`.
#[must_use]
pub(crate) fn all_reduce(view: View) -> Request {
    Request {
        input: view,
        output: view,
        ..Request::exact(Collective::AllReduce { algorithm: Algorithm::Auto }, Dtype::F32, PATIENCE)
    }
}

/// Values of a rank whose sums are whole numbers that a float holds exactly.
#[must_use]
pub(crate) fn values(rank: usize, elems: usize) -> Vec<f32> {
    (0..elems).map(|i| ((rank + 1) * (i % 1_000)) as f32).collect()
}

/// One all-reduce on every group; panics unless every rank has the exact sum.
pub(crate) fn check_all_reduce(groups: &[GroupHandle], elems: usize) {
    let mut tensors: Vec<Tensor> = (0..groups.len()).map(|rank| Tensor(values(rank, elems))).collect();
    let ops: Vec<OpHandle> = groups
        .iter()
        .zip(&mut tensors)
        .map(|(group, tensor)| group.submit(all_reduce(tensor.view()), Box::new(())).expect("running"))
        .collect();
    for op in &ops {
        let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
        assert!(outcome.is_ok(), "{outcome:?}");
    }
    let ranks = groups.len();
    let factor = ranks * (ranks + 1) / 2;
    for tensor in &tensors {
        let wrong = tensor.0.iter().enumerate().find(|(i, value)| **value != (factor * (i % 1_000)) as f32);
        assert_eq!(wrong, None, "{elems} elements among {ranks} ranks");
    }
}

/// A rule with an error in it, which shows on the network thread of one name.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) on: &'static str,
}

impl ImportanceRule for Broken {
    fn mark(&self, _bucket: &Bucket<'_>, _scratch: &mut Vec<f32>, _marks: &mut Marks) {
        assert_ne!(std::thread::current().name(), Some(self.on), "the error in the rule");
    }
}
