//! The randomised Hadamard transform of a bucket of 25 MB, in blocks of 4096 and in its own memory as a reduction of that size
//! does it, beside copying it. `cargo bench -p gradwire-collectives --bench hadamard`.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use gradwire_collectives::{Dtype, WholeHadamard};
use std::hint::black_box;

const BYTES: usize = 25 << 20;

fn hadamard(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("hadamard of 25 MB");
    group.throughput(Throughput::Bytes(BYTES as u64)).sample_size(20);
    for (name, dtype) in [("float32", Dtype::F32), ("bfloat16", Dtype::Bf16), ("float16", Dtype::F16)] {
        let transform = WholeHadamard::of(BYTES / dtype.bytes()).expect("large enough");
        assert_eq!(transform.block(), 4096);
        let (mut bucket, mut copy) = (Vec::new(), Vec::new());
        let (bucket, copy) = (on_lines(&mut bucket, BYTES), on_lines(&mut copy, BYTES));
        let mut scratch = Vec::new();
        if dtype == Dtype::F32 {
            group
                .bench_function("copy", |bench| bench.iter(|| black_box(&mut *copy).copy_from_slice(bucket)));
        }
        group.bench_function(format!("{name} spread"), |bench| {
            bench.iter(|| transform.spread(dtype, 7, black_box(bucket), &mut scratch));
        });
        group.bench_function(format!("{name} restore"), |bench| {
            bench.iter(|| transform.restore(dtype, 7, black_box(bucket), &mut scratch));
        });
    }
    group.finish();
}

/// `bytes` bytes on a cache line, as torch and the group allocate; a `Vec` of that size lies 16 bytes behind one, and every
/// vector of 64 bytes straddles two.
fn on_lines(memory: &mut Vec<u8>, bytes: usize) -> &mut [u8] {
    memory.resize(bytes + 64, 0x3C);
    let offset = memory.as_ptr().align_offset(64);
    &mut memory[offset..offset + bytes]
}

criterion_group!(benches, hadamard);
criterion_main!(benches);
