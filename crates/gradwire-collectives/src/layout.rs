//! How a bucket is cut into shards.

use std::ops::Range;

/// Shards begin at multiples of this many bytes, a cache line, so that no element and no packet grid is split.
const ALIGNMENT_BYTES: usize = 64;

/// A bucket of `elems` elements as `world_size` shards of equal size; the last ones may be shorter or empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Layout {
    bytes: usize,
    shard_bytes: usize,
    shards: usize,
    chunk_bytes: usize,
}

impl Layout {
    /// Cuts `bytes` bytes (whole elements of any dtype) into `shards` shards, sent in chunks of `chunk_bytes`.
    pub(crate) fn new(bytes: usize, shards: usize, chunk_bytes: usize) -> Self {
        let shards = shards.max(1);
        let shard_bytes = bytes.div_ceil(shards).next_multiple_of(ALIGNMENT_BYTES);
        Self { bytes, shard_bytes, shards, chunk_bytes: chunk_bytes.max(1) }
    }

    /// `rows` rows of `row` bytes, each a shard wherever it begins.
    pub(crate) fn of_rows(row: usize, rows: usize, chunk_bytes: usize) -> Self {
        Self { bytes: row * rows, shard_bytes: row, shards: rows.max(1), chunk_bytes: chunk_bytes.max(1) }
    }

    /// Byte range of shard `index` (modulo the number of shards).
    pub(crate) fn shard(&self, index: usize) -> Range<usize> {
        let start = (index % self.shards).saturating_mul(self.shard_bytes).min(self.bytes);
        start..start.saturating_add(self.shard_bytes).min(self.bytes)
    }

    /// Bytes of a full shard.
    pub(crate) fn shard_bytes(&self) -> usize {
        self.shard_bytes
    }

    /// Number of the first chunk of shard `index` (modulo the number of shards), counted over the bucket.
    pub(crate) fn first_chunk(&self, index: usize) -> usize {
        index % self.shards * self.chunks_per_shard()
    }

    /// Chunks of the bucket.
    pub(crate) fn chunks(&self) -> usize {
        self.shards * self.chunks_per_shard()
    }

    /// Index of the shard that begins at byte `start`.
    pub(crate) fn index_at(&self, start: usize) -> usize {
        start / self.shard_bytes.max(1)
    }

    /// Number of the chunk that begins at byte `start`, counted over the bucket.
    pub(crate) fn chunk_at(&self, start: usize) -> usize {
        let index = self.index_at(start);
        index * self.chunks_per_shard() + (start - index * self.shard_bytes) / self.chunk_bytes
    }

    /// Chunks of a full shard, at least one.
    pub(crate) fn chunks_per_shard(&self) -> usize {
        self.shard_bytes.div_ceil(self.chunk_bytes).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn shards_cover_the_bucket_once_and_begin_at_cache_lines(
            elems in 0_usize..100_000, elem_bytes in prop::sample::select(vec![1_usize, 2, 4, 8]), shards in 1_usize..17,
        ) {
            let layout = Layout::new(elems * elem_bytes, shards, 1408);
            let mut end = 0;
            for index in 0..shards {
                let shard = layout.shard(index);
                prop_assert_eq!(shard.start, end);
                prop_assert!(shard.is_empty() || shard.start % 64 == 0);
                prop_assert_eq!(shard.len() % elem_bytes, 0);
                prop_assert!(shard.len().div_ceil(1408) <= layout.chunks_per_shard());
                end = shard.end;
            }
            prop_assert_eq!(end, elems * elem_bytes);
        }
    }

    #[test]
    fn fewer_elements_than_ranks_leave_empty_shards() {
        let layout = Layout::new(4, 8, 1408);
        assert_eq!(layout.shard(0), 0..4);
        assert!((1..8).all(|index| layout.shard(index).is_empty()));
        assert!(Layout::new(0, 4, 1408).shard(0).is_empty());
    }
}
