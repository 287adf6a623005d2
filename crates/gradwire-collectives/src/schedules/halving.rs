//! The all-reduce by recursive halving and doubling: log2(N) steps that halve what a rank sums, log2(N) that double
//! what it knows. Few messages for each rank, where a transpose has 2 (N - 1); for sizes at which messages cost more
//! than bytes.
//!
//! Let P be the largest power of two up to N. Ranks are numbered anew for each collective, so that the work rotates;
//! numbers below P form a hypercube, and each number `P + k` beyond it first hands its whole input to `k` and gets the
//! whole result from it in the end. In step s of the reduce stage a rank and the one whose number differs in bit
//! `P >> (s + 1)` split the range that both have summed so far: each sends the half that it gives up and adds the half
//! that it gets. After log2(P) steps every rank holds the sum of one shard; the gather stage goes the same way back.
//!
//! It is always exact. A lost packet of step s would take 2^s ranks' values with it, and blocks that were cut on the
//! grid of one step's transfer are counted on another's in the next: a reduction that may lose something takes the
//! transpose ([`super::choice`]). Each element is finished by one rank and copied by all, so replicas are identical.
//!
//! Sums live in the output. A receive only adds to what this rank keeps, never to what it still sends, so all of the
//! reduce stage is posted at the start. Gather step s writes what reduce step s sends: it is posted when that send has
//! concluded.

use super::{Loss, Place, Post, Schedule, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use std::ops::Range;

// claim: auto/halving-doubling
/// See the module.
#[derive(Debug)]
pub(super) struct HalvingDoubling {
    place: Place,
    layout: Layout,
    /// Ranks in the hypercube, a power of two.
    cube: u32,
    /// Number of this rank in this collective.
    number: u32,
    /// The partner beyond the cube has handed over its input, or there is none.
    is_folded: bool,
    /// Bit s: step s of the stage has been received.
    reduced: u32,
    gathered: u32,
    /// The next step to send.
    next_reduce: u32,
    is_finished: bool,
    /// Gather steps that are still to be sent; they go from the last to the first.
    gathers_left: u32,
}

impl HalvingDoubling {
    pub(super) fn new(place: Place, bytes: usize) -> Self {
        let cube = 1 << place.world_size.max(1).ilog2();
        let number = (place.rank + place.turn()) % place.world_size;
        Self {
            place,
            layout: Layout::new(bytes, cube as usize, place.chunk_bytes),
            cube,
            number,
            is_folded: number + cube >= place.world_size,
            reduced: 0,
            gathered: 0,
            next_reduce: 0,
            is_finished: false,
            gathers_left: cube.ilog2(),
        }
    }

    /// Steps of each stage.
    fn steps(&self) -> u32 {
        self.cube.ilog2()
    }

    /// The rank that has this number.
    fn rank_of(&self, number: u32) -> u32 {
        let world_size = self.place.world_size;
        (self.place.rank + number + world_size - self.number) % world_size
    }

    /// The number `P + k` that hands its input to this rank `k`.
    fn folded_in(&self) -> Option<u32> {
        let beyond = self.number + self.cube;
        (beyond < self.place.world_size).then_some(beyond)
    }

    /// The rank that this one splits its range with in `step`.
    fn partner(&self, step: u32) -> u32 {
        self.rank_of(self.number ^ self.cube >> (step + 1))
    }

    /// The whole bucket.
    fn all(&self) -> Range<usize> {
        self.shards(0, self.cube)
    }

    /// What this rank still sums after `step` steps.
    fn kept(&self, step: u32) -> Range<usize> {
        let width = self.cube >> step;
        self.shards(self.number & !(width - 1), width)
    }

    /// What it gives up in `step`: the other half of what it had.
    fn given(&self, step: u32) -> Range<usize> {
        let width = self.cube >> (step + 1);
        self.shards((self.number ^ width) & !(width - 1), width)
    }

    /// Bytes of `count` shards from `first` on.
    fn shards(&self, first: u32, count: u32) -> Range<usize> {
        let last = self.layout.shard((first + count - 1) as usize);
        self.layout.shard(first as usize).start..last.end
    }

    fn step_with(&self, rank: u32) -> Option<u32> {
        (0..self.steps()).find(|step| self.partner(*step) == rank)
    }

    fn send(to: u32, index: u32, range: Range<usize>) -> Post {
        Post::Send { to, index, side: Side::Output, range, weights: None, loss: Loss::Never }
    }

    fn sum(from: u32, range: Range<usize>) -> Post {
        let (target, bytes) = (Target::Sum { at: range.start }, range.len());
        Post::Receive { from, index: REDUCE, target, bytes, loss: Loss::Never }
    }

    fn copy(from: u32, range: Range<usize>) -> Post {
        let (target, bytes) = (Target::Place(range.start), range.len());
        Post::Receive { from, index: GATHER, target, bytes, loss: Loss::Never }
    }

    /// Sends what has become ready: a step of the reduce stage when all before it have been received.
    fn advance(&mut self, memory: &mut Memory, posts: &mut Vec<Post>) {
        if !self.is_folded {
            return;
        }
        while self.next_reduce < self.steps() && self.reduced.trailing_ones() >= self.next_reduce {
            posts.push(Self::send(self.partner(self.next_reduce), REDUCE, self.given(self.next_reduce)));
            self.next_reduce += 1;
        }
        if self.reduced.count_ones() < self.steps() {
            return;
        }
        if !std::mem::replace(&mut self.is_finished, true) {
            memory.finish_sum(&self.kept(self.steps()));
        }
        while self.gathers_left > 0 && self.has_gathered(self.gathers_left) {
            let step = self.gathers_left - 1;
            posts.push(Self::send(self.partner(step), GATHER, self.kept(step + 1)));
            self.gathers_left = step;
        }
        if let (true, Some(beyond)) = (self.has_result(), self.folded_in()) {
            posts.push(Self::send(self.rank_of(beyond), GATHER, self.all()));
        }
    }

    /// Whether every gather step from `step` on has been received.
    fn has_gathered(&self, step: u32) -> bool {
        (step..self.steps()).all(|later| self.gathered >> later & 1 == 1)
    }

    /// Whether the whole result is here.
    fn has_result(&self) -> bool {
        self.gathers_left == 0 && self.has_gathered(0)
    }
}

impl Schedule for HalvingDoubling {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let all = self.all();
        memory.accumulate_in(all.clone(), &all, 1, false, pool);
        memory.note_count(0, self.place.world_size as u16);
        if self.number >= self.cube {
            let within = self.rank_of(self.number - self.cube);
            return posts.push(Self::send(within, REDUCE, all));
        }
        let contributions = self.steps() + u32::from(self.folded_in().is_some());
        memory.expect_sums(&self.kept(self.steps()), contributions as u16, pool);
        if let Some(beyond) = self.folded_in() {
            posts.push(Self::sum(self.rank_of(beyond), all));
        }
        for step in 0..self.steps() {
            posts.push(Self::sum(self.partner(step), self.kept(step + 1)));
        }
        self.advance(memory, posts);
    }

    fn on_received(&mut self, from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        match (self.step_with(from), index) {
            (_, _) if self.number >= self.cube => return,
            (None, _) => self.is_folded = true,
            (Some(step), REDUCE) => self.reduced |= 1 << step,
            (Some(step), _) => self.gathered |= 1 << step,
        }
        self.advance(memory, posts);
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if index != REDUCE {
            return;
        }
        match self.step_with(to) {
            _ if self.number >= self.cube => posts.push(Self::copy(to, self.all())),
            Some(step) => posts.push(Self::copy(to, self.given(step))),
            None => {}
        }
    }
}

const REDUCE: u32 = 0;
const GATHER: u32 = 1;
