//! The all-reduce in one shot: every rank sends all of its input to every other one, and each sums for itself. One stage, where
//! every other schedule has two or more: half a round trip instead of a whole one. For sizes at which round trips cost more than
//! bytes, of which it moves N / 2 times as many as a transpose: as many, between two ranks.
//!
//! Contributions are kept apart until all are there, and then added in the order of the ranks, whatever order they came in: so
//! every rank gets the same bits. What is sent is a copy as well, so that the result may be written where the input is while a
//! contribution is still sent again.
//!
//! It is always exact: a rank that summed without a contribution would have another result than the others.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::memory::{Memory, Pool, Side};

// claim: auto/one-shot
/// See the module.
#[derive(Debug)]
pub(super) struct OneShot {
    place: Place,
    bytes: usize,
    receives_open: u32,
}

impl OneShot {
    pub(super) fn new(place: Place, bytes: usize) -> Self {
        Self { place, bytes, receives_open: place.peers() }
    }

    fn finish(&self, memory: &mut Memory) {
        memory.sum_rows(self.bytes);
        memory.finish(&(0..self.bytes), 0);
    }
}

impl Schedule for OneShot {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let (bytes, row) = (self.bytes, |rank: u32| rank as usize * self.bytes);
        memory.keep_rows(self.place.rank, self.place.world_size, pool);
        let own = row(self.place.rank)..row(self.place.rank) + bytes;
        for other in self.place.others() {
            posts.push(Post::Receive {
                from: other,
                index: 0,
                target: Target::Row { at: row(other) },
                bytes,
                loss: Loss::In(Stage::Reduce),
            });
            posts.push(Post::Send {
                to: other,
                index: 0,
                side: Side::Rows,
                range: own.clone(),
                weights: None,
                loss: Loss::In(Stage::Reduce),
            });
        }
        if self.receives_open == 0 {
            self.finish(memory);
        }
    }

    fn on_received(&mut self, _from: u32, _index: u32, memory: &mut Memory, _posts: &mut Vec<Post>) {
        self.receives_open -= 1;
        if self.receives_open == 0 {
            self.finish(memory);
        }
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}
