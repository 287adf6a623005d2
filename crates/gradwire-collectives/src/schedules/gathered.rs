//! A large reduce: each rank but the root sums up a shard, and the root gathers the sums. The mirror of [`super::scattered`].
//!
//! With [`super::direct`] the root's link takes the tensors of all other ranks. Here every link carries one each way: of each shard all
//! send their part to its owner, and that sends the sum on, a piece at a time, so that the second half of the way begins soon after the first.
//!
//! ```text
//!   time = S / R * (1 + 1 / pieces) + rtt,   where the direct way takes S / R * (N - 1) + rtt / 2
//! ```
//!
//! The root's part goes to the owners too, although it could add it itself: so a sum of halves is rounded once, here as there. In both
//! the parts are added in the order in which they come.
//!
//! An owner sums in memory of the group's, as large as its shard: its tensor stays as it is. At the root, in place, the sum of a piece is received
//! when the send of the same memory has concluded. A reduce ends for nobody before all have called; a small one, whose messages
//! would cost more than its bytes, goes directly.

use super::pieces::{Pieces, PIECE_BYTES_MIN};
use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::memory::{Memory, Pool, Side};

/// See the module.
#[derive(Debug)]
pub(super) struct Gathered {
    pieces: Pieces,
    in_place: bool,
    /// Of each piece of this rank's shard, contributions that are not in.
    contributions_open: Vec<u32>,
    /// At the root: pieces that are not in.
    results_open: usize,
}

impl Gathered {
    /// Whether a reduce of so many bytes goes this way. A function of what all ranks know.
    pub(super) fn is_for(bytes: usize, world_size: u32) -> bool {
        // Among three a single piece would take as long as the direct way.
        let pieces = if world_size == 3 { 2 } else { 1 };
        world_size > 2 && bytes / (world_size - 1) as usize >= pieces * PIECE_BYTES_MIN
    }

    /// Bytes of a shard.
    pub(super) fn shard_bytes(place: Place, bytes: usize) -> usize {
        Pieces::new(place, 0, bytes).layout.shard_bytes()
    }

    /// `in_place`: the root's result is written where its contribution is read.
    pub(super) fn new(place: Place, root: u32, bytes: usize, in_place: bool) -> Self {
        let pieces = Pieces::new(place, root, bytes);
        let contributions_open = vec![place.peers(); pieces.count as usize];
        Self { pieces, in_place, contributions_open, results_open: 0 }
    }

    fn contribute(&self, to: u32, index: u32, posts: &mut Vec<Post>) {
        let (range, loss) = (self.pieces.piece(to, index), Loss::In(Stage::Reduce));
        if !range.is_empty() {
            posts.push(Post::Send { to, index, side: Side::Input, range, weights: None, loss });
        }
    }

    /// Where piece `index` of this rank's shard is in its accumulator: its first byte and chunk, and its bytes.
    fn own_piece(&self, index: u32) -> (usize, usize, usize) {
        let (chunk, bytes) =
            (index as usize * self.pieces.chunks(), self.pieces.piece(self.pieces.place.rank, index).len());
        (chunk * self.pieces.place.chunk_bytes, chunk, bytes)
    }

    fn expect_contributions(&self, index: u32, posts: &mut Vec<Post>) {
        let (at, chunk, bytes) = self.own_piece(index);
        let (target, loss) = (Target::Add { at, chunk }, Loss::In(Stage::Reduce));
        let others = self.pieces.place.others().filter(|_| bytes > 0);
        posts.extend(others.map(|from| Post::Receive { from, index, target, bytes, loss }));
    }

    fn send_result(&self, index: u32, posts: &mut Vec<Post>) {
        let (at, chunk, bytes) = self.own_piece(index);
        let (side, range, loss) = (Side::Output, at..at + bytes, Loss::In(Stage::Gather));
        posts.push(Post::Send { to: self.pieces.root, index, side, range, weights: Some(chunk), loss });
    }

    fn expect_result(&self, from: u32, index: u32, posts: &mut Vec<Post>) {
        let piece = self.pieces.piece(from, index);
        let first_chunk = self.pieces.layout.first_chunk(self.pieces.index_of(from));
        let chunk = first_chunk + index as usize * self.pieces.chunks();
        let (target, loss) = (Target::Result { at: piece.start, chunk }, Loss::In(Stage::Gather));
        if !piece.is_empty() {
            posts.push(Post::Receive { from, index, target, bytes: piece.len(), loss });
        }
    }
}

impl Schedule for Gathered {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let pieces = self.pieces;
        if pieces.is_at_root() {
            memory.count_results(pieces.layout.chunks(), pool);
        } else {
            memory.accumulate_apart(&pieces.shard(pieces.place.rank), pieces.layout.chunks_per_shard(), pool);
        }
        for index in 0..pieces.count {
            pieces.others().for_each(|owner| self.contribute(owner, index, posts));
            if !pieces.is_at_root() {
                self.expect_contributions(index, posts);
                continue;
            }
            self.results_open +=
                pieces.others().filter(|owner| !pieces.piece(*owner, index).is_empty()).count();
            if !self.in_place {
                pieces.others().for_each(|owner| self.expect_result(owner, index, posts));
            }
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        if self.pieces.is_at_root() {
            self.results_open -= 1;
            if self.results_open == 0 {
                memory.finish_sum(&(0..memory.output.len()));
            }
            return;
        }
        let open = &mut self.contributions_open[index as usize];
        *open -= 1;
        if *open == 0 {
            let (at, chunk, bytes) = self.own_piece(index);
            memory.finish(&(at..at + bytes), chunk);
            self.send_result(index, posts);
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if self.in_place && self.pieces.is_at_root() {
            self.expect_result(to, index, posts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_large_for_its_ranks_is_gathered_and_never_between_two() {
        let is_for = |world_size: u32, bytes| Gathered::is_for(bytes, world_size);
        assert!(!is_for(1, 1 << 30) && !is_for(2, 1 << 30));
        for (world_size, bytes) in [(3, 4), (4, 3), (5, 4), (16, 15)] {
            assert!(!is_for(world_size, bytes * PIECE_BYTES_MIN - 1), "{world_size}");
            assert!(is_for(world_size, bytes * PIECE_BYTES_MIN), "{world_size}");
        }
    }
}
