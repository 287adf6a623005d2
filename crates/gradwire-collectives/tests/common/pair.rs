//! Two ranks joined by a wire in memory that is there from the start: what a packet costs, in instructions and in allocations,
//! is measured over it.
#![allow(dead_code)] // Each file that includes it uses its part.

use super::common::{all_reduce, peer_config, Tensor, DATAGRAM_BYTES};
use gradwire_collectives::core::{Mark, Timestamp};
use gradwire_collectives::{
    Algorithm, ExchangePlan, Group, GroupConfig, GroupEvent, Policy, ReduceOp, Request, Servers, TransmitSink,
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

    fn room_for(&self, _peer: u32, _bytes: usize, most: usize) -> usize {
        most.min(self.datagrams.len() - self.count)
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
pub(crate) struct Pair {
    now: Timestamp,
    groups: [Group; 2],
    wires: [Wire; 2],
    /// Datagrams that were sent.
    pub(crate) packets: usize,
    /// One in so many datagrams is lost; none when zero.
    lose_one_in: usize,
}

impl Pair {
    pub(crate) fn new(lose_one_in: usize) -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let group = |rank: u32| {
            let peers = vec![peer_config(rank, 1 - rank)];
            let (exchange, servers) = (ExchangePlan::DEFAULT, Servers::default());
            Group::new(GroupConfig { rank, world_size: 2, peers, incast: None, exchange, servers }, now)
        };
        Self { now, groups: [group(0), group(1)], wires: [Wire::new(), Wire::new()], packets: 0, lose_one_in }
    }

    /// One round: what each rank sends arrives at the other.
    pub(crate) fn step(&mut self) {
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

    /// Submits an all-reduce by mean on both ranks; the tensors must outlive it.
    pub(crate) fn submit(&mut self, tensors: &mut [Tensor; 2], policy: Policy) {
        for (group, tensor) in self.groups.iter_mut().zip(tensors) {
            let request = Request { policy, ..all_reduce(tensor, Algorithm::Transpose) };
            group.submit(self.now, Request { reduce: ReduceOp::Avg, ..request });
        }
    }

    /// Runs until both have ended well.
    pub(crate) fn finish(&mut self) {
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
}

/// A tensor of ones for each rank.
pub(crate) fn ones(elems: usize) -> [Tensor; 2] {
    [0, 1].map(|_| Tensor::f32((0..elems).map(|_| 1.0)))
}
