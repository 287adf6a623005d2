//! A tensor in shards, one for each rank but the root, and each shard in pieces: how a large broadcast is scattered and a large reduce gathered.

use super::Place;
use crate::layout::Layout;
use std::ops::Range;

/// See the module. A function of what all ranks know.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pieces {
    pub(super) place: Place,
    pub(super) root: u32,
    pub(super) layout: Layout,
    /// Pieces of each shard.
    pub(super) count: u32,
}

impl Pieces {
    pub(super) fn new(place: Place, root: u32, bytes: usize) -> Self {
        let layout = Layout::new(bytes, place.world_size as usize - 1, place.chunk_bytes);
        let count = (layout.shard_bytes() / PIECE_BYTES_MIN).clamp(1, PIECES_MAX) as u32;
        Self { place, root, layout, count }
    }

    pub(super) fn is_at_root(&self) -> bool {
        self.place.rank == self.root
    }

    /// Number of the shard of `rank`, which is not the root.
    pub(super) fn index_of(&self, rank: u32) -> usize {
        let distance = (rank + self.place.world_size - self.root) % self.place.world_size;
        distance as usize - 1
    }

    /// The shard of `rank`, which is not the root.
    pub(super) fn shard(&self, rank: u32) -> Range<usize> {
        self.layout.shard(self.index_of(rank))
    }

    /// Chunks of a full piece.
    pub(super) fn chunks(&self) -> usize {
        self.layout.chunks_per_shard().div_ceil(self.count as usize)
    }

    /// Piece `number` of the shard of `rank`, which is not the root. Of a short shard the last ones are short or empty.
    pub(super) fn piece(&self, rank: u32, number: u32) -> Range<usize> {
        let shard = self.shard(rank);
        let bytes = self.chunks() * self.place.chunk_bytes.max(1);
        let at = |number: u32| (shard.start + number as usize * bytes).min(shard.end);
        at(number)..at(number + 1)
    }

    /// Every other rank that has a shard, the next one first.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> {
        let root = self.root;
        self.place.others().filter(move |rank| *rank != root)
    }
}

/// What fewer bytes save costs more in messages: four full messages of the kernel's are half of it.
pub(super) const PIECE_BYTES_MIN: usize = 64 << 10;
/// More save less than a tenth.
const PIECES_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Servers;
    use proptest::prelude::*;

    fn place(rank: u32, world_size: u32) -> Place {
        Place { rank, world_size, sequence: 0, chunk_bytes: 1408, incast: 1, servers: Servers::Colocated(1) }
    }

    proptest! {
        #[test]
        fn the_pieces_of_all_ranks_are_the_whole_once(
            world_size in 3u32..20, root in 0u32..20, bytes in 1usize..10_000_000,
        ) {
            let root = root % world_size;
            let mut end = 0;
            for distance in 1..world_size {
                let rank = (root + distance) % world_size;
                let pieces = Pieces::new(place(rank, world_size), root, bytes);
                for number in 0..pieces.count {
                    let piece = pieces.piece(rank, number);
                    prop_assert_eq!(piece.start, end);
                    end = piece.end;
                }
            }
            prop_assert_eq!(end, bytes);
        }
    }
}
