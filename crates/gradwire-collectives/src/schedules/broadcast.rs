//! Broadcast along a binomial tree: in round k every rank that has the data sends it to the one 2^k places on
//! (counted from the root), so that it reaches all in log2(N) rounds and the root sends only that often.

use super::{Loss, Place, Post, Schedule, Target};
use crate::memory::{Memory, Pool, Side};

/// See the module.
#[derive(Debug)]
pub(super) struct Broadcast {
    place: Place,
    root: u32,
    bytes: usize,
}

impl Broadcast {
    pub(super) fn new(place: Place, root: u32, bytes: usize) -> Self {
        Self { place, root, bytes }
    }

    /// Places of this rank after the root.
    fn distance(&self) -> u32 {
        (self.place.rank + self.place.world_size - self.root) % self.place.world_size
    }

    fn rank_at(&self, distance: u32) -> u32 {
        (self.root + distance) % self.place.world_size
    }

    /// Sends to the ranks whose distance is this one's with one higher bit set; the farthest reaching first, because
    /// it has the most to hand on.
    fn post_children(&self, posts: &mut Vec<Post>) {
        let distance = self.distance();
        for bit in (0..u32::BITS - 1).rev().map(|k| 1 << k) {
            if bit > distance && distance + bit < self.place.world_size {
                let to = self.rank_at(distance + bit);
                let range = 0..self.bytes;
                posts.push(Post::Send {
                    to,
                    index: 0,
                    side: Side::Output,
                    range,
                    weights: None,
                    loss: Loss::Never,
                });
            }
        }
    }
}

impl Schedule for Broadcast {
    fn start(&mut self, _memory: &mut Memory, _pool: &mut Pool, posts: &mut Vec<Post>) {
        let distance = self.distance();
        if distance == 0 {
            return self.post_children(posts);
        }
        let highest_bit = 1 << distance.ilog2();
        let from = self.rank_at(distance - highest_bit);
        posts.push(Post::Receive {
            from,
            index: 0,
            target: Target::Place(0),
            bytes: self.bytes,
            loss: Loss::Never,
        });
    }

    fn on_received(&mut self, _from: u32, _index: u32, _memory: &mut Memory, posts: &mut Vec<Post>) {
        self.post_children(posts);
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}
