//! What tagging a bucket by magnitude costs, beside a copy of the same bytes: `cargo bench -p gradwire-collectives`.
//!
//! It is paid once for each bucket, on the network thread, before its first packet leaves.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

use criterion::{criterion_group, criterion_main, BenchmarkId, Criterion, Throughput};
use gradwire_collectives::{Bucket, Dtype, ImportanceRule, Magnitude};
use std::hint::black_box;

const RANKS: usize = 4;
const PACKET_BYTES: usize = 1_408;
const MEGABYTE: usize = 1 << 20;

fn importance(criterion: &mut Criterion) {
    // Any bits but those of infinities and NaNs.
    let bytes: Vec<u8> = (0..MEGABYTE).map(|i| (i * 31 % 113) as u8).collect();
    let mut group = criterion.benchmark_group("importance of a megabyte");
    group.throughput(Throughput::Bytes(MEGABYTE as u64));
    let mut target = vec![0; MEGABYTE];
    group.bench_function("copy", |bencher| bencher.iter(|| target.copy_from_slice(black_box(&bytes))));
    for (paper, rule) in [("mlt", Magnitude::MLT), ("dlcp", Magnitude::DLCP)] {
        for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
            let bucket = Bucket::new(dtype, &bytes, RANKS, PACKET_BYTES, 1);
            let mut scratch = Vec::new();
            group.bench_with_input(
                BenchmarkId::new(paper, format!("{dtype:?}")),
                &bucket,
                |bencher, bucket| {
                    bencher.iter(|| {
                        let mut marks = bucket.marks();
                        scratch.clear();
                        rule.mark(black_box(bucket), &mut scratch, &mut marks);
                        marks
                    });
                },
            );
        }
    }
    group.finish();
}

criterion_group!(benches, importance);
criterion_main!(benches);
