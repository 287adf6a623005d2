//! A large broadcast: the root scatters, and what each rank got it sends to all others (the scatter-allgather of van de Geijn).
//!
//! Along a tree ([`super::broadcast`]) a rank sends the whole once for each of its children, and a child begins when all of it has come:
//! with N ranks, log2(N) (log2(N) + 1) / 2 times as long as the root's link takes for the tensor. Here every link carries it about once. The root cuts it
//! into a shard for each other rank, and each shard into pieces, so that the second half of the way begins soon after the first.
//!
//! ```text
//!   time = S / R * (1 + 1 / pieces) + rtt,   where a tree takes S / R * log2(N) (log2(N) + 1) / 2 + log2(N) * rtt / 2
//! ```
//!
//! It ends for nobody before all have called, as an all-gather does; a small one, whose messages would cost more than its bytes, takes the tree.

use super::{Loss, Place, Post, Schedule, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use std::ops::Range;

/// See the module.
#[derive(Debug)]
pub(super) struct Scattered {
    place: Place,
    root: u32,
    layout: Layout,
    pieces: u32,
}

impl Scattered {
    /// Whether a broadcast of so many bytes goes this way. A function of what all ranks know.
    pub(super) fn is_for(bytes: usize, world_size: u32) -> bool {
        world_size > 2 && bytes / (world_size - 1) as usize >= PIECE_BYTES_MIN
    }

    pub(super) fn new(place: Place, root: u32, bytes: usize) -> Self {
        let layout = Layout::new(bytes, place.world_size as usize - 1, place.chunk_bytes);
        let pieces = (layout.shard_bytes() / PIECE_BYTES_MIN).clamp(1, PIECES_MAX) as u32;
        Self { place, root, layout, pieces }
    }

    /// Piece `number` of what `rank`, which is not the root, gets first.
    fn piece(&self, rank: u32, number: u32) -> Range<usize> {
        let distance = (rank + self.place.world_size - self.root) % self.place.world_size;
        let shard = self.layout.shard(distance as usize - 1);
        let chunks = self.layout.chunks_per_shard().div_ceil(self.pieces as usize);
        let bytes = chunks * self.place.chunk_bytes.max(1);
        let at = |number: u32| (shard.start + number as usize * bytes).min(shard.end);
        at(number)..at(number + 1)
    }

    /// Every other rank that is not the root, the next one first.
    fn others(&self) -> impl Iterator<Item = u32> {
        let root = self.root;
        self.place.others().filter(move |rank| *rank != root)
    }

    fn send(to: u32, index: u32, range: Range<usize>) -> Post {
        Post::Send { to, index, side: Side::Output, range, weights: None, loss: Loss::Never }
    }

    fn receive(from: u32, index: u32, range: &Range<usize>) -> Post {
        let target = Target::Place(range.start);
        Post::Receive { from, index, target, bytes: range.len(), loss: Loss::Never }
    }
}

impl Schedule for Scattered {
    fn start(&mut self, _memory: &mut Memory, _pool: &mut Pool, posts: &mut Vec<Post>) {
        let Place { rank, .. } = self.place;
        for number in 0..self.pieces {
            if rank == self.root {
                posts.extend(self.others().map(|to| Self::send(to, number, self.piece(to, number))));
            } else {
                posts.push(Self::receive(self.root, number, &self.piece(rank, number)));
                posts
                    .extend(self.others().map(|from| Self::receive(from, number, &self.piece(from, number))));
            }
        }
    }

    fn on_received(&mut self, from: u32, index: u32, _memory: &mut Memory, posts: &mut Vec<Post>) {
        if from == self.root {
            let piece = self.piece(self.place.rank, index);
            posts.extend(self.others().map(|to| Self::send(to, index, piece.clone())));
        }
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}

/// What fewer bytes save costs more in messages: four full messages of the kernel's are half of it.
const PIECE_BYTES_MIN: usize = 64 << 10;
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
                let schedule = Scattered::new(place(rank, world_size), root, bytes);
                for number in 0..schedule.pieces {
                    let piece = schedule.piece(rank, number);
                    prop_assert_eq!(piece.start, end);
                    end = piece.end;
                }
            }
            prop_assert_eq!(end, bytes);
        }
    }

    #[test]
    fn only_what_is_large_for_its_ranks_is_scattered_and_never_between_two() {
        let is_for = |world_size: u32, bytes| Scattered::is_for(bytes, world_size);
        assert!(!is_for(2, 1 << 30));
        assert!(!is_for(4, 3 * PIECE_BYTES_MIN - 1) && is_for(4, 3 * PIECE_BYTES_MIN));
    }
}
