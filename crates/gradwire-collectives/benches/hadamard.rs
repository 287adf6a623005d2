//! The randomised Hadamard transform of a bucket of 25 MB, beside copying it. `cargo bench -p gradwire-collectives`.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use gradwire_collectives::Hadamard;
use std::hint::black_box;

const ELEMS: usize = 25 << 18;

fn hadamard(criterion: &mut Criterion) {
    let transform = Hadamard::of(ELEMS).expect("large enough");
    let mut values = vec![1.0_f32; transform.padded()];
    let mut copy = values.clone();
    let mut group = criterion.benchmark_group("25 MB of float32");
    group.throughput(Throughput::Bytes(ELEMS as u64 * 4)).sample_size(20);
    group.bench_function("copy", |bench| bench.iter(|| black_box(&mut copy).copy_from_slice(&values)));
    group.bench_function("spread", |bench| bench.iter(|| transform.spread(7, black_box(&mut values))));
    group.bench_function("restore", |bench| bench.iter(|| transform.restore(7, black_box(&mut values))));
    group.finish();
}

criterion_group!(benches, hadamard);
criterion_main!(benches);
