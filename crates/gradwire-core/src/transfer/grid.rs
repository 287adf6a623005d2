//! The packet grid of a transfer: both ranks cut it at the same places.

/// How a transfer of `total` bytes is cut into chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grid {
    total: u64,
    chunk: u32,
}

impl Grid {
    /// `total` bytes in chunks of `chunk` bytes.
    pub(crate) fn new(total: u64, chunk: u32) -> Self {
        debug_assert!(chunk > 0);
        Self { total, chunk }
    }

    /// Number of chunks; a transfer of nothing has one empty chunk, so that its end can be seen.
    pub(crate) fn chunks(self) -> u32 {
        self.total.div_ceil(u64::from(self.chunk)).max(1) as u32
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
        if offset % u64::from(self.chunk) != 0 {
            return None;
        }
        let chunk = u32::try_from(offset / u64::from(self.chunk)).ok()?;
        (chunk < self.chunks() && self.len(chunk) as usize == len).then_some(chunk)
    }
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
    }
}
