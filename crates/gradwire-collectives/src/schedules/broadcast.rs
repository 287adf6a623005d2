//! Broadcast along a binomial tree: in round k every rank that has the data sends it to the one 2^k places on
//! (counted from the root), so that it reaches all in log2(N) rounds and the root sends only that often.
//!
//! What is large goes to one child after the other, in the order of the rounds: the first has the most to hand on. Sent at once they
//! would share this rank's link and all come last: the way over the first child of each rank, which is the longest, would take
//! k + (k - 1) + ... + 1 times the bucket in place of k. So a child that has not called holds up those behind it, as it does its own.

use super::{Loss, Place, Post, Schedule, Target};
use crate::memory::{Memory, Pool, Side};

/// See the module.
#[derive(Debug)]
pub(super) struct Broadcast {
    place: Place,
    root: u32,
    bytes: usize,
    /// Ranks that this one has still to send to, the next one last.
    children: Vec<u32>,
}

impl Broadcast {
    pub(super) fn new(place: Place, root: u32, bytes: usize) -> Self {
        Self { place, root, bytes, children: Vec::new() }
    }

    /// Places of this rank after the root.
    fn distance(&self) -> u32 {
        (self.place.rank + self.place.world_size - self.root) % self.place.world_size
    }

    fn rank_at(&self, distance: u32) -> u32 {
        (self.root + distance) % self.place.world_size
    }

    /// This rank has the data: its children are those whose distance is its own with one higher bit set.
    fn hand_on(&mut self, posts: &mut Vec<Post>) {
        let distance = self.distance();
        let bits = (0..u32::BITS - 1).rev().map(|k| 1 << k);
        let children = bits.filter(|bit| *bit > distance && distance + bit < self.place.world_size);
        self.children = children.map(|bit| self.rank_at(distance + bit)).collect();
        let at_once = if self.bytes > AT_ONCE_BYTES_MAX { 1 } else { self.children.len() };
        (0..at_once).for_each(|_| self.post_next(posts));
    }

    fn post_next(&mut self, posts: &mut Vec<Post>) {
        let Some(to) = self.children.pop() else { return };
        let (side, range) = (Side::Output, 0..self.bytes);
        posts.push(Post::Send { to, index: 0, side, range, weights: None, loss: Loss::Never });
    }
}

impl Schedule for Broadcast {
    fn start(&mut self, _memory: &mut Memory, _pool: &mut Pool, posts: &mut Vec<Post>) {
        let distance = self.distance();
        if distance == 0 {
            return self.hand_on(posts);
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
        self.hand_on(posts);
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}

    fn on_concluded(&mut self, _to: u32, _index: u32, posts: &mut Vec<Post>) {
        self.post_next(posts);
    }

    fn has_more(&self) -> bool {
        !self.children.is_empty()
    }
}

/// What takes no longer on the wire at 10 Gbit/s than the answer to it does in a hall, which is waited for between two children.
const AT_ONCE_BYTES_MAX: usize = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Reduction;
    use crate::{DivideBy, Dtype, ReduceOp, Servers, View};

    /// The sends `(from, to)` of each round, when all those of a round end together.
    fn rounds(world_size: u32, root: u32, bytes: usize) -> Vec<Vec<(u32, u32)>> {
        let place = |rank| Place {
            rank,
            world_size,
            sequence: 0,
            chunk_bytes: 64,
            incast: 1,
            servers: Servers::default(),
        };
        let mut ranks: Vec<Broadcast> =
            (0..world_size).map(|rank| Broadcast::new(place(rank), root, bytes)).collect();
        let (dtype, reduce, divide_by) = (Dtype::F32, ReduceOp::Sum, DivideBy::World);
        let reduction = Reduction { dtype, reduce, world_size: world_size as u16, divide_by };
        let mut memory = Memory::new((View::EMPTY, View::EMPTY, View::EMPTY), reduction, 64);
        let (mut posts, mut rounds) = (Vec::new(), vec![Vec::new()]);
        let take = |from, posts: &mut Vec<Post>, round: &mut Vec<(u32, u32)>| {
            round.extend(posts.drain(..).filter_map(|post| match post {
                Post::Send { to, .. } => Some((from, to)),
                Post::Receive { .. } => None,
            }));
        };
        for (rank, schedule) in (0..).zip(&mut ranks) {
            schedule.start(&mut memory, &mut Pool::default(), &mut posts);
            take(rank, &mut posts, &mut rounds[0]);
        }
        while let Some(ended) = rounds.last().filter(|round| !round.is_empty()).cloned() {
            let mut next = Vec::new();
            for (from, to) in ended {
                ranks[to as usize].on_received(from, 0, &mut memory, &mut posts);
                take(to, &mut posts, &mut next);
                ranks[from as usize].on_sent(to, 0, &mut posts);
                ranks[from as usize].on_concluded(to, 0, &mut posts);
                take(from, &mut posts, &mut next);
            }
            rounds.push(next);
        }
        rounds.pop();
        assert!(ranks.iter().all(|schedule| !schedule.has_more()));
        rounds
    }

    #[test]
    fn a_large_one_reaches_all_in_the_rounds_of_its_tree_while_no_rank_sends_to_two_at_once() {
        for world_size in 2..=70_u32 {
            let root = world_size / 3;
            let rounds = rounds(world_size, root, 1 << 20);
            assert_eq!(
                rounds.len() as u32,
                u32::BITS - (world_size - 1).leading_zeros(),
                "{world_size} ranks"
            );
            let mut reached = vec![root];
            for mut round in rounds {
                assert!(round.iter().all(|(from, to)| reached.contains(from) && !reached.contains(to)));
                reached.extend(round.iter().map(|(_, to)| *to));
                let sends = round.len();
                round.sort_unstable();
                round.dedup_by_key(|(from, _)| *from);
                assert_eq!(round.len(), sends, "{world_size} ranks: one sends to two at once");
            }
            reached.sort_unstable();
            assert!(reached.into_iter().eq(0..world_size), "{world_size} ranks");
        }
    }

    #[test]
    fn a_small_one_leaves_for_all_children_at_once() {
        let first: Vec<u32> = rounds(64, 0, AT_ONCE_BYTES_MAX)[0].iter().map(|(_, to)| *to).collect();
        assert_eq!(first, [1, 2, 4, 8, 16, 32]);
    }
}
