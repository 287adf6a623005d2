//! Nothing is allocated for each packet: the number of allocations inside the groups does not grow with the size
//! of a bucket.

mod common;

use common::{peer_config, Tensor, DATAGRAM_BYTES};
use gradwire_collectives::core::Timestamp;
use gradwire_collectives::{
    Algorithm, Group, GroupConfig, GroupEvent, Policy, ReduceOp, Request, TransmitSink,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Duration;

struct Counting;

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

fn count_one() {
    // The thread's storage may be gone at its very end, when nothing is counted.
    _ = COUNTED.try_with(|counted| counted.set(counted.get().map(|count| count + 1)));
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count_one();
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

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

    fn push(&mut self, _peer: u32, head: &[u8], payload: &[u8]) {
        let datagram = &mut self.datagrams[self.count];
        datagram[..head.len()].copy_from_slice(head);
        datagram[head.len()..head.len() + payload.len()].copy_from_slice(payload);
        self.lengths[self.count] = head.len() + payload.len();
        self.count += 1;
    }
}

/// Two ranks joined by a wire without loss; each step takes 20 us.
struct Pair {
    now: Timestamp,
    groups: [Group; 2],
    wires: [Wire; 2],
    packets: usize,
}

impl Pair {
    fn new() -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let group = |rank: u32| {
            let peers = vec![peer_config(rank, 1 - rank)];
            Group::new(GroupConfig { rank, world_size: 2, peers }, now)
        };
        Self { now, groups: [group(0), group(1)], wires: [Wire::new(), Wire::new()], packets: 0 }
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
                to.handle_datagram(self.now, rank as u32, &wire.datagrams[at][..wire.lengths[at]]);
            }
            self.packets += wire.count;
            wire.count = 0;
            self.groups[rank].handle_timeout(self.now);
        }
    }

    /// Allocations and packets of one all-reduce of `elems` elements.
    fn all_reduce(&mut self, elems: usize, policy: Policy) -> (u64, usize) {
        let mut tensors = [0, 1].map(|_| Tensor::f32((0..elems).map(|_| 1.0)));
        self.packets = 0;
        let requests = tensors
            .each_mut()
            .map(|tensor| Request { policy, ..common::all_reduce(tensor, Algorithm::Transpose) });
        COUNTED.set(Some(0));
        for (group, request) in self.groups.iter_mut().zip(requests) {
            group.submit(self.now, Request { reduce: ReduceOp::Avg, ..request });
        }
        let mut done = 0;
        while done < 2 {
            self.step();
            for group in &mut self.groups {
                while let Some(event) = group.poll_event() {
                    done += usize::from(matches!(event, GroupEvent::Done { outcome: Ok(_), .. }));
                }
            }
        }
        let counted = COUNTED.replace(None).expect("it was counting");
        (counted, self.packets)
    }
}

#[test]
fn allocations_do_not_grow_with_the_packets_of_a_bucket() {
    for policy in [Policy::RELIABLE, Policy::AUTO] {
        let mut pair = Pair::new();
        // The largest first: buffers that are kept have their size from then on.
        (0..3).for_each(|_| _ = pair.all_reduce(4_000_000, policy));
        let (small, few) = pair.all_reduce(40_000, policy);
        let (large, many) = pair.all_reduce(4_000_000, policy);
        println!("{small} allocations for {few} packets, {large} for {many}");
        assert!(many > 50 * few, "{many} packets against {few}");
        assert!(large <= small + 40, "{large} allocations for {many} packets, {small} for {few}");
    }
}
