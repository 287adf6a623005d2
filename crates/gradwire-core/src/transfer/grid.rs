//! The packet grid of a transfer: both ranks cut it at the same places.

use super::Bitmap;
use alloc::vec::Vec;
use core::ops::Range;

/// How a transfer of `total` bytes is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    total: u64,
    chunk: u32,
    /// Follows from the others. It is asked for several times for each packet, and a division takes as long as much of the rest.
    chunks: u32,
}

impl Grid {
    /// `total` bytes in chunks of `chunk` bytes.
    pub(crate) fn new(total: u64, chunk: u32) -> Self {
        debug_assert!(chunk > 0);
        let chunks = total.div_ceil(u64::from(chunk)).max(1) as u32;
        Self { total, chunk, chunks }
    }

    /// Number of chunks; a transfer of nothing has one empty chunk, so that its end can be seen.
    pub(crate) const fn chunks(self) -> u32 {
        self.chunks
    }

    /// Byte offset of a chunk.
    pub(crate) fn offset(self, chunk: u32) -> u64 {
        u64::from(chunk) * u64::from(self.chunk)
    }

    /// Bytes of a chunk.
    pub(crate) fn len(self, chunk: u32) -> u32 {
        self.total.saturating_sub(self.offset(chunk)).min(u64::from(self.chunk)) as u32
    }

    /// The chunk that `len` bytes at `offset` are, if they are exactly one.
    pub(crate) fn chunk_at(self, offset: u64, len: usize) -> Option<u32> {
        let chunk = u32::try_from(offset / u64::from(self.chunk)).ok()?;
        let is_chunk =
            chunk < self.chunks() && self.offset(chunk) == offset && self.len(chunk) as usize == len;
        is_chunk.then_some(chunk)
    }

    /// How many chunks are critical when `ends` at each end are: a rule that both ranks compute.
    pub(crate) fn critical(self, ends: u16) -> u32 {
        self.chunks().min(2 * u32::from(ends))
    }

    /// Whether `chunk` is among the `ends` chunks at one of the ends.
    pub(crate) fn is_critical(self, chunk: u32, ends: u16) -> bool {
        let ends = u32::from(ends);
        chunk < ends || chunk + ends >= self.chunks()
    }
}

/// Byte ranges of the set chunks; neighbours are joined.
pub(crate) fn byte_ranges(missing: &Bitmap, grid: Grid) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for chunk in missing.iter() {
        let start = grid.offset(chunk);
        let end = start + u64::from(grid.len(chunk));
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_tile_the_transfer(total in 0u64..100_000, chunk in 1u32..2_000) {
            let grid = Grid::new(total, chunk);
            let mut at = 0;
            for index in 0..grid.chunks() {
                prop_assert_eq!(grid.offset(index), at);
                prop_assert_eq!(grid.chunk_at(at, grid.len(index) as usize), Some(index));
                at += u64::from(grid.len(index));
            }
            prop_assert_eq!(at, total);
        }

        #[test]
        fn anything_off_the_grid_is_refused(total in 1u64..100_000, chunk in 1u32..2_000, offset: u64, len in 0usize..4_000) {
            let grid = Grid::new(total, chunk);
            if let Some(index) = grid.chunk_at(offset, len) {
                prop_assert!(index < grid.chunks());
                prop_assert!(offset + len as u64 <= total);
            }
        }

        /// Inside of its transfer and of a length that some chunk has: only its place is wrong.
        #[test]
        fn a_payload_that_is_not_aligned_to_the_grid_is_refused(total in 1u64..100_000, chunk in 2u32..2_000, place: u64) {
            let grid = Grid::new(total, chunk);
            for len in [u64::from(chunk).min(total), u64::from(grid.len(grid.chunks() - 1))] {
                let offset = place % (total - len + 1);
                let is_a_chunk = offset % u64::from(chunk) == 0 && len == (total - offset).min(u64::from(chunk));
                prop_assert_eq!(grid.chunk_at(offset, len as usize).is_some(), is_a_chunk, "{} of {}", len, offset);
            }
        }
    }
}
