//! Adding packets to a bucket, beside copying them there: `cargo bench -p gradwire-collectives --bench add`.
//!
//! Packets of the common size come from a receive buffer that stays in the cache and go to a bucket of 25 MB that does not;
//! the ways take turns, and the median of each counts. The last packet of a mean divides in the same pass. Called without
//! `--bench`, as `cargo test` does, it takes one turn and judges nothing: it only shows that it works.

use gradwire_collectives::fuzzing::{add_last_packet, add_packet};
use std::hint::black_box;
use std::time::{Duration, Instant};

const PACKET_BYTES: usize = 1408;
const PACKETS: usize = 32;
const BUCKET_BYTES: usize = (25 << 20) / PACKET_BYTES * PACKET_BYTES;
const TURNS: usize = 41;

/// Time in which every packet of the bucket went through `put`.
fn time(bucket: &mut [u8], packets: &[u8], put: fn(&mut [u8], &[u8])) -> Duration {
    #[allow(clippy::disallowed_methods)] // A benchmark measures.
    let started = Instant::now();
    for (place, packet) in
        bucket.chunks_exact_mut(PACKET_BYTES).zip(packets.chunks_exact(PACKET_BYTES).cycle())
    {
        put(black_box(place), black_box(packet));
    }
    started.elapsed()
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    BUCKET_BYTES as f64 / times[times.len() / 2].as_secs_f64() / 1e9
}

fn main() {
    let packets: Vec<u8> = (0..PACKETS * PACKET_BYTES / 4).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let mut bucket = vec![0; BUCKET_BYTES];
    let (mut copies, mut sums, mut means) = (Vec::new(), Vec::new(), Vec::new());
    let measures = std::env::args().any(|argument| argument == "--bench");
    for _ in 0..if measures { TURNS } else { 1 } {
        copies.push(time(&mut bucket, &packets, |place, packet| place.copy_from_slice(packet)));
        sums.push(time(&mut bucket, &packets, add_packet));
        means.push(time(&mut bucket, &packets, add_last_packet));
    }
    let (copy, sum, mean) = (median(&mut copies), median(&mut sums), median(&mut means));
    println!("adding packets of float32: {sum:.2} GB/s, the last ones of a mean: {mean:.2} GB/s, memcpy: {copy:.2} GB/s");
    if measures {
        println!(
            "ratio {:.2}, of the last ones {:.2}, target at least 0.80: {}",
            sum / copy,
            mean / copy,
            if sum.min(mean) >= 0.8 * copy { "reached" } else { "MISSED" }
        );
    }
}
