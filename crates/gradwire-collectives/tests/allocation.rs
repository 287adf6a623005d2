//! Nothing is allocated for each packet: the number of allocations inside the groups does not grow with the size
//! of a bucket.

mod common;
#[path = "../../gradwire-core/tests/common/counting.rs"]
mod counting;

use common::{peer_config, Tensor, DATAGRAM_BYTES};
use counting::allocations_in;
use gradwire_collectives::core::{Mark, Timestamp};
use gradwire_collectives::{
    Algorithm, Group, GroupConfig, GroupEvent, Policy, ReduceOp, Request, TransmitSink,
};
use std::time::Duration;

/// Datagrams for one rank, in memory that is there from the start.
struct Wire {
    datagrams: Vec<[u8; DATAGRAM_BYTES]>,
    lengths: Vec<usize>,
    count: usize,
}

impl Wire {
    fn new() -> Self {
        Self { datagrams: vec![[0; DATAGRAM_BYTES]; 256], lengths: vec![0; 256], count: 0 }
    }
}

impl TransmitSink for Wire {
    fn has_room(&self) -> bool {
        self.count < self.datagrams.len()
    }

    fn push(&mut self, _peer: u32, _mark: Mark, head: &[u8], payload: &[u8]) {
        let datagram = &mut self.datagrams[self.count];
        datagram[..head.len()].copy_from_slice(head);
        datagram[head.len()..head.len() + payload.len()].copy_from_slice(payload);
        self.lengths[self.count] = head.len() + payload.len();
        self.count += 1;
    }
}

/// Two ranks joined by a wire; each step takes 20 us.
struct Pair {
    now: Timestamp,
    groups: [Group; 2],
    wires: [Wire; 2],
    packets: usize,
    /// One in so many datagrams is lost; none when zero.
    lose_one_in: usize,
}

impl Pair {
    fn new(lose_one_in: usize) -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let group = |rank: u32| {
            let peers = vec![peer_config(rank, 1 - rank)];
            Group::new(GroupConfig { rank, world_size: 2, peers, incast: None }, now)
        };
        Self { now, groups: [group(0), group(1)], wires: [Wire::new(), Wire::new()], packets: 0, lose_one_in }
    }

    /// One round: what each rank sends arrives at the other.
    fn step(&mut self) {
        self.now = self.now + Duration::from_micros(20);
        for rank in 0..2 {
            self.groups[rank].poll_transmit(self.now, &mut self.wires[rank]);
        }
        for rank in 0..2 {
            let wire = &mut self.wires[rank];
            let to = &mut self.groups[1 - rank];
            for at in 0..wire.count {
                self.packets += 1;
                if self.lose_one_in == 0 || self.packets % self.lose_one_in > 0 {
                    to.handle_datagram(self.now, rank as u32, &wire.datagrams[at][..wire.lengths[at]]);
                }
            }
            wire.count = 0;
            self.groups[rank].handle_timeout(self.now);
        }
    }

    /// Submits an all-reduce of `elems` elements on both ranks; the tensors must outlive it.
    fn submit(&mut self, tensors: &mut [Tensor; 2], policy: Policy) {
        self.packets = 0;
        for (group, tensor) in self.groups.iter_mut().zip(tensors) {
            let request = Request { policy, ..common::all_reduce(tensor, Algorithm::Transpose) };
            group.submit(self.now, Request { reduce: ReduceOp::Avg, ..request });
        }
    }

    /// Runs until both have ended well.
    fn finish(&mut self) {
        let mut done = 0;
        while done < 2 {
            self.step();
            for group in &mut self.groups {
                while let Some(event) = group.poll_event() {
                    done += usize::from(matches!(event, GroupEvent::Done { outcome: Ok(_), .. }));
                }
            }
        }
    }

    /// Allocations and packets of one all-reduce of `elems` elements.
    fn all_reduce(&mut self, elems: usize, policy: Policy) -> (u64, usize) {
        let mut tensors = ones(elems);
        let counted = allocations_in(|| {
            self.submit(&mut tensors, policy);
            self.finish();
        });
        (counted, self.packets)
    }

    /// Allocations while the given packets of one all-reduce are on the wire.
    fn allocations_between(&mut self, packets: std::ops::Range<usize>, elems: usize, policy: Policy) -> u64 {
        let mut tensors = ones(elems);
        self.submit(&mut tensors, policy);
        while self.packets < packets.start {
            self.step();
        }
        let counted = allocations_in(|| {
            while self.packets < packets.end {
                self.step();
            }
        });
        self.finish();
        counted
    }
}

fn ones(elems: usize) -> [Tensor; 2] {
    [0, 1].map(|_| Tensor::f32((0..elems).map(|_| 1.0)))
}

#[test]
fn allocations_do_not_grow_with_the_packets_of_a_bucket() {
    for policy in [Policy::RELIABLE, Policy::AUTO] {
        let mut pair = Pair::new(0);
        // The largest first: buffers that are kept have their size from then on.
        (0..3).for_each(|_| _ = pair.all_reduce(4_000_000, policy));
        let (small, few) = pair.all_reduce(40_000, policy);
        let (large, many) = pair.all_reduce(4_000_000, policy);
        println!("{small} allocations for {few} packets, {large} for {many}");
        assert!(many > 50 * few, "{many} packets against {few}");
        assert!(large <= small + 40, "{large} allocations for {many} packets, {small} for {few}");
    }
}

#[test]
fn inside_a_stage_nothing_is_allocated_whether_packets_are_lost_or_not() {
    for lose_one_in in [0, 50] {
        for policy in [Policy::RELIABLE, Policy::AUTO] {
            let mut pair = Pair::new(lose_one_in);
            (0..3).for_each(|_| _ = pair.all_reduce(4_000_000, policy));
            // Two stages of two shards of 5,700 packets: the first half of the reduce stage.
            let counted = pair.allocations_between(1_000..6_000, 4_000_000, policy);
            assert_eq!(counted, 0, "5,000 packets of which one in {lose_one_in} was lost");
        }
    }
}
