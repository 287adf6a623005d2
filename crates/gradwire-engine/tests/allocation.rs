//! Over real sockets nothing is allocated for a packet either: the allocations of all threads during a collective do not
//! grow with its packets, whether the kernel's offloads are used or not.

mod common;
#[path = "../../gradwire-core/tests/common/counting.rs"]
mod counting;

use common::{all_reduce, cluster, config, Tensor, PATIENCE};
use counting::allocations_of_all_threads_in;
use gradwire_engine::collectives::{Policy, Request};
use gradwire_engine::{Choice, EngineConfig, GroupHandle, Offload, OpHandle, Security};

const FEW: usize = 100_000;
const MANY: usize = 8_000_000;
/// What more packets may add: buffers that double, and lists of what was lost where a receive buffer overflowed. One
/// allocation for each burst of 64 datagrams would be seven hundred.
const SLACK: u64 = 100;

/// A group with the memory of its ranks, all of it there before anything is counted.
struct Ranks {
    groups: Vec<GroupHandle>,
    tensors: Vec<Tensor>,
    policy: Policy,
}

impl Ranks {
    /// Allocations and datagrams of one all-reduce of the first `elems` elements.
    fn all_reduce(&mut self, elems: usize) -> (u64, u64) {
        let before = self.datagrams();
        let counted = allocations_of_all_threads_in(|| self.run(elems));
        (counted, self.datagrams() - before)
    }

    fn run(&mut self, elems: usize) {
        let ops: Vec<OpHandle> = self
            .groups
            .iter()
            .zip(&mut self.tensors)
            .map(|(group, tensor)| {
                let request = all_reduce(tensor.view_of(elems));
                group.submit(Request { policy: self.policy, ..request }, Box::new(())).expect("running")
            })
            .collect();
        for op in &ops {
            let outcome = op.wait(Some(PATIENCE)).expect("ends in time");
            assert!(outcome.is_ok(), "{outcome:?}");
        }
    }

    fn datagrams(&self) -> u64 {
        self.groups
            .iter()
            .flat_map(|group| group.stats().expect("running").peers)
            .map(|p| p.packets_sent)
            .sum()
    }
}

/// One test, because it counts what the whole process does.
#[test]
fn allocations_do_not_grow_with_the_packets_on_real_sockets() {
    for offload in [Offload::Auto, Offload::Off] {
        for (paths, policy, security, send_thread) in [
            (1, Policy::RELIABLE, Security::Off, Choice::Off),
            (4, Policy::RELIABLE, Security::Off, Choice::Off),
            (1, Policy::AUTO, Security::Off, Choice::On),
            (2, Policy::RELIABLE, Security::On, Choice::Off),
            (2, Policy::RELIABLE, Security::On, Choice::On),
        ] {
            let mtu = Some(1_500);
            let config = EngineConfig { offload, paths, security, send_thread, mtu, ..config() };
            let (_engines, groups) = cluster(2, &config);
            let tensors = (0..2).map(|_| Tensor(vec![1.0; MANY])).collect();
            let mut ranks = Ranks { groups, tensors, policy };
            // The largest first: buffers that are kept have their size from then on.
            (0..3).for_each(|_| _ = ranks.all_reduce(MANY));
            let (small, few) = ranks.all_reduce(FEW);
            let (large, many) = ranks.all_reduce(MANY);
            println!("{offload:?}, {security:?}, {paths} paths: {small} allocations for {few} packets, {large} for {many}");
            assert!(many > 50 * few, "{many} packets against {few}");
            assert!(large <= small + SLACK, "{large} allocations for {many} packets, {small} for {few}");
        }
    }
}
