//! Tags: what a switch is told about a gradient, so that it queues urgent packets first and drops unimportant ones first
//! (MLT section 4.2.2, DLCP section 3.2.2).
//!
//! Two rules, each for the user to replace. The **class** of a whole bucket is a number that the caller of the collective
//! computes, from the layers in the bucket ([`layer_class`]) or as it likes. The **importance** of its packets is an
//! [`ImportanceRule`], asked once when the collective starts; from then on a packet only looks up its bit.
//!
//! Only an all-reduce or reduce-scatter that may lose something is told apart: where everything must arrive, everything is important.

mod given;
mod layer;
mod magnitude;
mod values;

pub use given::Given;
pub use layer::layer_class;
pub use magnitude::Magnitude;

use crate::layout::Layout;
use crate::{Collective, Dtype, Request};
use gradwire_core::ChunkSet;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;
use values::Values;

/// Tags of one call. They need not agree between ranks: each speaks of its own packets.
#[derive(Clone, Debug, Default)]
pub struct Tags {
    /// Traffic class of the data, 0 the most urgent, below [`gradwire_core::CLASSES_MAX`].
    pub class: u8,
    /// Which packets a switch should keep longest; `None`: they are not told apart.
    pub importance: Option<Arc<dyn ImportanceRule>>,
}

impl Tags {
    /// Those of a part of a bucket, as a bucket of its own.
    pub(crate) fn of_part(&self, part: &PartOfBucket) -> Self {
        let importance =
            self.importance.as_ref().map(|rule| rule.of_part(part).unwrap_or_else(|| Arc::clone(rule)));
        Self { class: self.class, importance }
    }
}

/// Where the bytes of a bucket lie that is a part of another one: the same columns of each of its rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PartOfBucket {
    /// Bytes of the other.
    pub whole: usize,
    /// Bytes of each row of it; all, where it has none.
    pub row: usize,
    /// Those of a row that are in the part, at least one.
    pub columns: Range<usize>,
}

impl PartOfBucket {
    /// Where the byte `at` of the part lies in the whole.
    #[must_use]
    pub fn in_whole(&self, at: usize) -> usize {
        at / self.columns.len() * self.row + self.columns.start + at % self.columns.len()
    }
}

/// Decides which packets of a bucket are important.
pub trait ImportanceRule: Debug + Send + Sync {
    /// Marks the important packets. Called once for each bucket, before its first packet leaves, on the thread that
    /// sends them: its time is added to the bucket's. `scratch` is empty and keeps its memory from bucket to bucket.
    fn mark(&self, bucket: &Bucket<'_>, scratch: &mut Vec<f32>, marks: &mut Marks);

    /// The rule for a part of a bucket, as a bucket of its own; `None`: it is the same.
    fn of_part(&self, _part: &PartOfBucket) -> Option<Arc<dyn ImportanceRule>> {
        None
    }
}

/// A bucket of gradients, `[elems]` of `dtype`, on its way to be averaged.
#[derive(Clone, Copy, Debug)]
pub struct Bucket<'a> {
    /// Element type: a float.
    pub dtype: Dtype,
    /// This rank's.
    values: Values<'a>,
    /// Differs from bucket to bucket; equal in equal runs.
    pub seed: u64,
    grid: Grid,
}

impl<'a> Bucket<'a> {
    /// The bucket as `ranks` ranks cut it into packets of at most `packet_bytes` bytes.
    #[must_use]
    pub fn new(dtype: Dtype, bytes: &'a [u8], ranks: usize, packet_bytes: usize, seed: u64) -> Self {
        let values = Values::Whole(bytes);
        Self { dtype, values, seed, grid: Grid::new(bytes.len(), ranks, packet_bytes) }
    }

    /// Bytes of its values.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.values.bytes()
    }

    /// This rank's values of one of its packets.
    #[must_use]
    pub fn packet(&self, range: Range<usize>) -> &'a [u8] {
        self.values.of(range)
    }

    /// Number of elements.
    #[must_use]
    pub fn elems(&self) -> usize {
        self.bytes() / self.dtype.bytes()
    }

    /// Its packets: number and byte range.
    pub fn packets(&self) -> impl Iterator<Item = (u32, Range<usize>)> {
        self.grid.packets()
    }

    /// As many marks as it has packets, none set.
    #[must_use]
    pub fn marks(&self) -> Marks {
        let packets = self.grid.shards * self.grid.layout.chunks_per_shard();
        Marks { words: vec![0; packets.div_ceil(64)] }
    }
}

/// One bit for each packet of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marks {
    words: Vec<u64>,
}

impl Marks {
    /// The packet is important.
    pub fn set(&mut self, packet: u32) {
        if let Some(word) = self.words.get_mut(packet as usize / 64) {
            *word |= 1 << (packet % 64);
        }
    }

    /// Whether the packet is important.
    #[must_use]
    pub fn contains(&self, packet: u32) -> bool {
        self.words.get(packet as usize / 64).is_some_and(|word| word >> (packet % 64) & 1 == 1)
    }

    /// Important packets.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }
}

/// The packets of a bucket. Each shard begins a grid of its own, and the last of a shard may be short or missing.
#[derive(Clone, Copy, Debug)]
struct Grid {
    layout: Layout,
    shards: usize,
    packet_bytes: usize,
}

impl Grid {
    fn new(bytes: usize, shards: usize, packet_bytes: usize) -> Self {
        let packet_bytes = packet_bytes.max(1);
        Self { layout: Layout::new(bytes, shards, packet_bytes), shards: shards.max(1), packet_bytes }
    }

    /// Of a reduce-scatter: the shards are its rows.
    fn of_rows(row: usize, rows: usize, packet_bytes: usize) -> Self {
        let packet_bytes = packet_bytes.max(1);
        Self { layout: Layout::of_rows(row, rows, packet_bytes), shards: rows.max(1), packet_bytes }
    }

    fn packets(self) -> impl Iterator<Item = (u32, Range<usize>)> {
        (0..self.shards).flat_map(move |index| {
            let shard = self.layout.shard(index);
            let first = index * self.layout.chunks_per_shard();
            let starts = shard.clone().step_by(self.packet_bytes).enumerate();
            starts.map(move |(i, start)| {
                ((first + i) as u32, start..(start + self.packet_bytes).min(shard.end))
            })
        })
    }
}

/// The important packets of a collective in flight.
#[derive(Clone, Debug)]
pub(crate) struct Important {
    words: Arc<[u64]>,
    layout: Layout,
}

impl Important {
    /// Asks the rule of a request, if there is something to tell apart. `seed`: the number of the collective.
    pub(crate) fn of(
        request: &Request,
        (ranks, packet_bytes): (usize, usize),
        seed: u64,
        scratch: &mut Vec<f32>,
    ) -> Option<Self> {
        let may_lose = !request.policy.is_exact() && request.dtype.is_float() && !request.input.is_empty();
        let rule = request.tags.importance.as_ref().filter(|_| may_lose)?;
        let grid = match request.collective {
            Collective::ReduceScatter => Grid::of_rows(request.output.len(), ranks, packet_bytes),
            _ => Grid::new(request.input.len(), ranks, packet_bytes),
        };
        let bucket = Bucket { dtype: request.dtype, values: Values::In(&request.input), seed, grid };
        let mut marks = bucket.marks();
        scratch.clear();
        rule.mark(&bucket, scratch, &mut marks);
        Some(Self { words: marks.words.into(), layout: bucket.grid.layout })
    }

    /// Those from byte `start` on, where a shard begins or a piece of one.
    pub(crate) fn from(&self, start: usize) -> ChunkSet {
        ChunkSet::new(Arc::clone(&self.words), self.layout.chunk_at(start) as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_packets_of_a_bucket_cover_it_once_and_none_leaves_its_shard() {
        for (bytes, ranks) in [(0, 3), (64, 3), (10_000, 4), (100_000, 7), (1_408 * 8, 4)] {
            let values = vec![0; bytes];
            let bucket = Bucket::new(Dtype::F32, &values, ranks, 1_408, 0);
            let mut end = 0;
            let mut last = None;
            for (number, packet) in bucket.packets() {
                assert!(packet.start == end && packet.len() <= 1_408, "{bytes} bytes, packet {number}");
                assert!(last.is_none_or(|last| number > last));
                (end, last) = (packet.end, Some(number));
            }
            assert_eq!(end, bytes);
            assert!(last.is_none_or(|last| (last as usize) < bucket.marks().words.len() * 64));
        }
    }

    #[test]
    fn the_packets_of_a_shard_and_of_a_piece_are_found_by_where_it_begins() {
        let values = vec![0; 4 * 1_000_000];
        let bucket = Bucket::new(Dtype::F32, &values, 3, 1_408, 0);
        let mut marks = bucket.marks();
        let chosen: Vec<(u32, Range<usize>)> =
            bucket.packets().filter(|(number, _)| number % 7 == 3).collect();
        chosen.iter().for_each(|(number, _)| marks.set(*number));
        assert_eq!(marks.count(), chosen.len());
        let layout = bucket.grid.layout;
        let important = Important { words: marks.words.into(), layout };
        for shard in (0..3).map(|index| layout.shard(index)) {
            for before in [0, 1, 17] {
                let part = shard.start + before * 1_408..shard.end;
                let set = important.from(part.start);
                for (chunk, start) in part.clone().step_by(1_408).enumerate() {
                    let expected = chosen.iter().any(|(_, packet)| packet.start == start);
                    assert_eq!(
                        set.contains(chunk as u32),
                        expected,
                        "chunk {chunk} of {part:?} in {shard:?}"
                    );
                }
            }
        }
    }
}
