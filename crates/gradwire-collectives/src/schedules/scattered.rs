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

use super::pieces::{Pieces, PIECE_BYTES_MIN};
use super::{Loss, Place, Post, Schedule, Target};
use crate::memory::{Memory, Pool, Side};
use std::ops::Range;

/// See the module.
#[derive(Debug)]
pub(super) struct Scattered {
    pieces: Pieces,
}

impl Scattered {
    /// Whether a broadcast of so many bytes goes this way. A function of what all ranks know.
    pub(super) fn is_for(bytes: usize, world_size: u32) -> bool {
        world_size > 2 && bytes / (world_size - 1) as usize >= PIECE_BYTES_MIN
    }

    pub(super) fn new(place: Place, root: u32, bytes: usize) -> Self {
        Self { pieces: Pieces::new(place, root, bytes) }
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
        let pieces = &self.pieces;
        let Pieces { root, place: Place { rank, .. }, .. } = *pieces;
        for number in 0..pieces.count {
            if pieces.is_at_root() {
                posts.extend(pieces.others().map(|to| Self::send(to, number, pieces.piece(to, number))));
            } else {
                posts.push(Self::receive(root, number, &pieces.piece(rank, number)));
                posts.extend(
                    pieces.others().map(|from| Self::receive(from, number, &pieces.piece(from, number))),
                );
            }
        }
    }

    fn on_received(&mut self, from: u32, index: u32, _memory: &mut Memory, posts: &mut Vec<Post>) {
        if from == self.pieces.root {
            let piece = self.pieces.piece(self.pieces.place.rank, index);
            posts.extend(self.pieces.others().map(|to| Self::send(to, index, piece.clone())));
        }
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_large_for_its_ranks_is_scattered_and_never_between_two() {
        let is_for = |world_size: u32, bytes| Scattered::is_for(bytes, world_size);
        assert!(!is_for(2, 1 << 30));
        assert!(!is_for(4, 3 * PIECE_BYTES_MIN - 1) && is_for(4, 3 * PIECE_BYTES_MIN));
    }
}
