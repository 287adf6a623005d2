//! The transpose all-reduce (TAR, ULTIMA section 3.1): peer to peer, two stages.
//!
//! Each rank is responsible for one shard. Stage one: everybody sends each shard to the rank that is responsible for
//! it, which adds what arrives. Stage two: it sends the result to everybody. Responsibility rotates with the number
//! of the collective, so that a short last shard, or a bucket of fewer elements than ranks, does not load the same
//! rank each time. Only stage one may lose data; every copy of a result is made from one rank's bits.
//!
//! In place, the result of a shard must not overwrite what is still being sent: the receive of stage two is posted
//! when the send of the same memory has concluded.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use std::ops::Range;

// claim: ultima/transpose
/// See the module.
#[derive(Debug)]
pub(super) struct Transpose {
    place: Place,
    layout: Layout,
    in_place: bool,
    contributions_open: u32,
}

impl Transpose {
    pub(super) fn new(place: Place, layout: Layout, in_place: bool) -> Self {
        Self { place, layout, in_place, contributions_open: 0 }
    }

    /// The shard that `rank` is responsible for in this collective.
    fn shard_of(&self, rank: u32) -> Range<usize> {
        let rotation = self.place.sequence % u64::from(self.place.world_size);
        self.layout.shard(rank as usize + rotation as usize)
    }

    // claim: ltp/exact-broadcast, auto/identical-replicas
    fn post_gather(&self, from: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_of(from);
        posts.push(Post::Receive {
            from,
            index: GATHER,
            target: Target::Place(shard.start),
            bytes: shard.len(),
            loss: Loss::In(Stage::Gather),
        });
    }

    fn post_result(&self, memory: &mut Memory, posts: &mut Vec<Post>) {
        let own = self.shard_of(self.place.rank);
        memory.finish(&(0..own.len()), 0);
        for to in self.place.others() {
            let range = own.clone();
            posts.push(Post::Send {
                to,
                index: GATHER,
                side: Side::Output,
                range,
                weights: None,
                loss: Loss::In(Stage::Gather),
            });
        }
    }
}

impl Schedule for Transpose {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let own = self.shard_of(self.place.rank);
        memory.accumulate_in(own.clone(), &own, self.layout.chunks_per_shard(), true, pool);
        for to in self.place.others() {
            let range = self.shard_of(to);
            if range.is_empty() {
                continue;
            }
            posts.push(Post::Send {
                to,
                index: REDUCE,
                side: Side::Input,
                range,
                weights: None,
                loss: Loss::In(Stage::Reduce),
            });
            if !self.in_place {
                self.post_gather(to, posts);
            }
        }
        if own.is_empty() {
            return;
        }
        self.contributions_open = self.place.world_size - 1;
        for from in self.place.others() {
            posts.push(Post::Receive {
                from,
                index: REDUCE,
                target: Target::Add { at: 0, chunk: 0 },
                bytes: own.len(),
                loss: Loss::In(Stage::Reduce),
            });
        }
        if self.contributions_open == 0 {
            self.post_result(memory, posts);
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        if index == REDUCE {
            self.contributions_open -= 1;
            if self.contributions_open == 0 {
                self.post_result(memory, posts);
            }
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if index == REDUCE && self.in_place {
            self.post_gather(to, posts);
        }
    }
}

const REDUCE: u32 = 0;
const GATHER: u32 = 1;
