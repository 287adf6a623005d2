//! The ring all-reduce: N - 1 steps that sum, N - 1 that copy. Rank i talks to i + 1 and i - 1 only.
//!
//! In step s of the reduce stage rank i sends the partial sum of shard i - s on and adds what it receives to shard
//! i - s - 1, so that after N - 1 steps it holds the whole sum of shard i + 1. Each packet carries how many ranks are
//! in it: a partial sum that is lost leaves the receiver with its own values alone, and the mean divides by what is
//! there. The sums live in the output; halves are rounded to their dtype at each step.
//!
//! Memory that is still being sent is not overwritten: gather step s writes shard i - s, which reduce step s sends,
//! so it is posted when that send has concluded. At that moment a lost partial sum is still in place for the
//! residual of the rank that sent it.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};

/// See the module.
#[derive(Debug)]
pub(super) struct Ring {
    place: Place,
    layout: Layout,
}

impl Ring {
    pub(super) fn new(place: Place, layout: Layout) -> Self {
        Self { place, layout }
    }

    /// Steps of each stage.
    fn steps(&self) -> u32 {
        self.place.world_size - 1
    }

    /// Index of the shard `steps` before shard `rank + offset`.
    fn shard_before(&self, offset: u32, steps: u32) -> usize {
        let world_size = self.place.world_size;
        ((self.place.rank + offset + world_size - steps % world_size) % world_size) as usize
    }

    fn previous(&self) -> u32 {
        self.place.after(self.place.world_size - 1)
    }

    fn post_reduce_send(&self, step: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_before(0, step);
        posts.push(Post::Send {
            to: self.place.after(1),
            index: step,
            side: Side::Output,
            range: self.layout.shard(shard),
            weights: Some(self.layout.first_chunk(shard)),
            loss: Loss::In(Stage::Reduce),
        });
    }

    fn post_reduce_receive(&self, step: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_before(0, step + 1);
        let range = self.layout.shard(shard);
        posts.push(Post::Receive {
            from: self.previous(),
            index: step,
            target: Target::Add { at: range.start, chunk: self.layout.first_chunk(shard) },
            bytes: range.len(),
            loss: Loss::In(Stage::Reduce),
        });
    }

    fn post_gather_send(&self, step: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_before(1, step);
        posts.push(Post::Send {
            to: self.place.after(1),
            index: self.steps() + step,
            side: Side::Output,
            range: self.layout.shard(shard),
            weights: Some(self.layout.first_chunk(shard)),
            loss: Loss::In(Stage::Gather),
        });
    }

    fn post_gather_receive(&self, step: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_before(0, step);
        let range = self.layout.shard(shard);
        posts.push(Post::Receive {
            from: self.previous(),
            index: self.steps() + step,
            target: Target::Result { at: range.start, chunk: self.layout.first_chunk(shard) },
            bytes: range.len(),
            loss: Loss::In(Stage::Gather),
        });
    }

    /// The sum of shard i + 1 is complete.
    fn finish_sum(&self, memory: &mut Memory) {
        let shard = self.shard_before(1, 0);
        memory.finish(&self.layout.shard(shard), self.layout.first_chunk(shard));
    }
}

impl Schedule for Ring {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let all = 0..memory.output.len();
        memory.accumulate_in(all.clone(), &all, self.layout.chunks(), false, pool);
        if self.steps() == 0 {
            self.finish_sum(memory);
        } else {
            self.post_reduce_send(0, posts);
            // One step ahead, so that the grant is there before the data of the next step.
            (0..self.steps().min(2)).for_each(|step| self.post_reduce_receive(step, posts));
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        let steps = self.steps();
        if index < steps {
            if index + 2 < steps {
                self.post_reduce_receive(index + 2, posts);
            }
            if index + 1 < steps {
                self.post_reduce_send(index + 1, posts);
            } else {
                self.finish_sum(memory);
                self.post_gather_send(0, posts);
            }
        } else if index + 1 < 2 * steps {
            self.post_gather_send(index + 1 - steps, posts);
        }
    }

    fn on_sent(&mut self, _to: u32, index: u32, posts: &mut Vec<Post>) {
        if index < self.steps() {
            self.post_gather_receive(index, posts);
        }
    }
}
