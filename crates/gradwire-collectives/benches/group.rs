//! What a packet costs in a group: two ranks all-reduce a bucket in virtual time, with the copy into the datagram that
//! a socket would make and the addition into the accumulator. `cargo bench -p gradwire-collectives`.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

#[path = "../tests/common/mod.rs"]
#[allow(unused_imports)] // This file uses its part.
mod common;

use common::{peer_config, Tensor, DATAGRAM_BYTES};
use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use gradwire_collectives::core::{Mark, Timestamp};
use gradwire_collectives::{Algorithm, Group, GroupConfig, GroupEvent, Policy, Request, TransmitSink};
use std::time::Duration;

const ELEMS: usize = 2 << 20;

/// Datagrams for one rank, in memory that is there from the start.
struct Wire {
    datagrams: Vec<[u8; DATAGRAM_BYTES]>,
    lengths: Vec<usize>,
    count: usize,
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

struct Pair {
    now: Timestamp,
    groups: [Group; 2],
    wires: [Wire; 2],
    packets: u64,
}

impl Pair {
    fn new() -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let group = |rank: u32| {
            let peers = vec![peer_config(rank, 1 - rank)];
            Group::new(GroupConfig { rank, world_size: 2, peers, incast: None }, now)
        };
        let wire = || Wire { datagrams: vec![[0; DATAGRAM_BYTES]; 256], lengths: vec![0; 256], count: 0 };
        Self { now, groups: [group(0), group(1)], wires: [wire(), wire()], packets: 0 }
    }

    /// One round: what each rank sends arrives at the other 20 microseconds later.
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
            self.packets += wire.count as u64;
            wire.count = 0;
            self.groups[rank].handle_timeout(self.now);
        }
    }

    fn all_reduce(&mut self, tensors: &mut [Tensor; 2], policy: Policy) {
        for (group, tensor) in self.groups.iter_mut().zip(tensors) {
            let request = common::all_reduce(tensor, Algorithm::Transpose);
            group.submit(self.now, Request { policy, ..request });
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
    }
}

fn all_reduces(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("group");
    group.sample_size(20);
    for (name, policy) in [("reliable", Policy::RELIABLE), ("auto", Policy::AUTO)] {
        let mut pair = Pair::new();
        let mut tensors = [0, 1].map(|_| Tensor::f32((0..ELEMS).map(|_| 1.0)));
        pair.all_reduce(&mut tensors, policy);
        let before = pair.packets;
        pair.all_reduce(&mut tensors, policy);
        // Data and control, each sent and received once.
        group.throughput(Throughput::Elements(pair.packets - before));
        group.bench_function(
            format!("packets of an all-reduce, {name}, sent, received and added"),
            |bencher| {
                bencher.iter(|| pair.all_reduce(&mut tensors, policy));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, all_reduces);
criterion_main!(benches);
