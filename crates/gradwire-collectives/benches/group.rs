//! What a packet costs in a group: two ranks all-reduce a bucket in virtual time, with the copy into the datagram that
//! a socket would make and the addition into the accumulator. `cargo bench -p gradwire-collectives`.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/pair.rs"]
mod pair;

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use gradwire_collectives::Policy;
use pair::{ones, Pair};

const ELEMS: usize = 2 << 20;

fn all_reduces(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("group");
    group.sample_size(20);
    for (name, policy) in [("reliable", Policy::RELIABLE), ("auto", Policy::AUTO)] {
        let mut pair = Pair::new(0);
        let mut tensors = ones(ELEMS);
        let mut all_reduce = |pair: &mut Pair| {
            pair.submit(&mut tensors, policy);
            pair.finish();
        };
        all_reduce(&mut pair);
        let before = pair.packets;
        all_reduce(&mut pair);
        // Data and control, each sent and received once.
        group.throughput(Throughput::Elements((pair.packets - before) as u64));
        group.bench_function(
            format!("packets of an all-reduce, {name}, sent, received and added"),
            |bencher| {
                bencher.iter(|| all_reduce(&mut pair));
            },
        );
    }
    group.finish();
}

criterion_group!(benches, all_reduces);
criterion_main!(benches);
