//! The transpose all-reduce (TAR, ULTIMA section 3.1): peer to peer, two stages.
//!
//! Each rank is responsible for one shard. Stage one: everybody sends each shard to the rank that is responsible for
//! it, which adds what arrives. Stage two: it sends the result to everybody. Responsibility rotates with the number
//! of the collective, so that a short last shard, or a bucket of fewer elements than ranks, does not load the same
//! rank each time. Only stage one may lose data; every copy of a result is made from one rank's bits.
//!
//! The incast factor I bounds the senders that share a receiver: a rank has at most I sends of a stage open, nearest peer
//! first, and begins the next one when a receiver has closed one. In step, that is the paper's 2 * ceil((N - 1) / I)
//! rounds: in each, a rank hears from the ranks a round's distances before it. No round is a barrier: receives are all
//! posted at the start and no stage waits for slots of the other, so a send waits for receivers alone. A rank that is
//! late holds one slot of each peer until it comes (its own sends, I at a time, are then still the longest chain), and
//! a rank that is dead ends the group with the silence of its connection.
//!
//! In place, the result of a shard must not overwrite what is still being sent: the receive of stage two is posted
//! when the send of the same memory has concluded.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use std::ops::Range;

// claim: ultima/transpose, ultima/incast-factor
/// See the module.
#[derive(Debug)]
pub(super) struct Transpose {
    place: Place,
    layout: Layout,
    in_place: bool,
    contributions_open: u32,
    /// Sends of each stage that may be posted beside those that are open.
    slots: [u32; 2],
    /// Distance to the receiver of the next contribution, and of the next result; the world size: none is left.
    next_contribution: u32,
    next_result: u32,
}

impl Transpose {
    pub(super) fn new(place: Place, layout: Layout, in_place: bool) -> Self {
        let (slots, none) = ([place.incast; 2], place.world_size);
        Self {
            place,
            layout,
            in_place,
            contributions_open: 0,
            slots,
            next_contribution: none,
            next_result: none,
        }
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

    fn finish_result(&mut self, memory: &mut Memory, posts: &mut Vec<Post>) {
        let own = self.shard_of(self.place.rank);
        memory.finish(&(0..own.len()), 0);
        self.next_result = 1;
        self.post_sends(posts);
    }

    /// Posts sends while there are slots.
    fn post_sends(&mut self, posts: &mut Vec<Post>) {
        let world_size = self.place.world_size;
        while self.slots[REDUCE as usize] > 0 && self.next_contribution < world_size {
            let to = self.place.after(self.next_contribution);
            self.next_contribution += 1;
            self.post_send(to, REDUCE, posts);
        }
        while self.slots[GATHER as usize] > 0 && self.next_result < world_size {
            let to = self.place.after(self.next_result);
            self.next_result += 1;
            self.post_send(to, GATHER, posts);
        }
    }

    fn post_send(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        let (side, owner, stage) = match index {
            REDUCE => (Side::Input, to, Stage::Reduce),
            _ => (Side::Output, self.place.rank, Stage::Gather),
        };
        let range = self.shard_of(owner);
        if !range.is_empty() {
            self.slots[index as usize] -= 1;
            posts.push(Post::Send { to, index, side, range, weights: None, loss: Loss::In(stage) });
        }
    }
}

impl Schedule for Transpose {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let own = self.shard_of(self.place.rank);
        memory.accumulate_in(own.clone(), &own, self.layout.chunks_per_shard(), true, pool);
        self.next_contribution = 1;
        self.post_sends(posts);
        if !self.in_place {
            let owners = self.place.others().filter(|rank| !self.shard_of(*rank).is_empty());
            owners.for_each(|from| self.post_gather(from, posts));
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
            self.finish_result(memory, posts);
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        if index == REDUCE {
            self.contributions_open -= 1;
            if self.contributions_open == 0 {
                self.finish_result(memory, posts);
            }
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if index == REDUCE && self.in_place {
            self.post_gather(to, posts);
        }
    }

    fn on_concluded(&mut self, _to: u32, index: u32, posts: &mut Vec<Post>) {
        self.slots[index as usize] += 1;
        self.post_sends(posts);
    }

    fn has_more(&self) -> bool {
        self.next_contribution.min(self.next_result) < self.place.world_size
    }
}

const REDUCE: u32 = 0;
const GATHER: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Reduction;
    use crate::{DivideBy, Dtype, ReduceOp, Servers, View};
    use std::collections::BTreeSet;

    type Sends = Vec<(u32, u32, u32)>;

    /// One rank with memory of its own.
    struct Rank {
        schedule: Transpose,
        memory: Memory,
        _bytes: Vec<u8>,
    }

    impl Rank {
        fn new(rank: u32, world_size: u32, incast: u32) -> Self {
            let place =
                Place { rank, world_size, sequence: 5, chunk_bytes: 64, incast, servers: Servers::default() };
            let mut bytes = vec![0; 64 * world_size as usize];
            // SAFETY: the vector is kept beside the view and nobody else touches it.
            let view = unsafe { View::new(bytes.as_mut_ptr(), bytes.len()) };
            let (dtype, reduce) = (Dtype::F32, ReduceOp::Sum);
            let divide_by = DivideBy::Contributions;
            let reduction = Reduction { dtype, reduce, world_size: world_size as u16, divide_by };
            let memory = Memory::new((view, view, View::EMPTY), reduction, 64);
            let layout = Layout::new(bytes.len(), world_size as usize, 64);
            Self { schedule: Transpose::new(place, layout, true), memory, _bytes: bytes }
        }
    }

    fn sends_of(from: u32, posts: &mut Vec<Post>) -> Sends {
        let send = |post| match post {
            Post::Send { to, index, .. } => Some((from, to, index)),
            Post::Receive { .. } => None,
        };
        posts.drain(..).filter_map(send).collect()
    }

    /// The sends of each round, when all those of a round end together.
    fn rounds(world_size: u32, incast: u32) -> Vec<Sends> {
        let mut ranks: Vec<Rank> = (0..world_size).map(|rank| Rank::new(rank, world_size, incast)).collect();
        let (mut posts, mut pool) = (Vec::new(), Pool::default());
        let mut rounds = vec![Vec::new()];
        for (rank, from) in ranks.iter_mut().zip(0..) {
            rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
            rounds[0].extend(sends_of(from, &mut posts));
        }
        while let Some(ended) = rounds.last().filter(|round| !round.is_empty()).cloned() {
            let mut next = Vec::new();
            for (from, to, index) in ended {
                let receiver = &mut ranks[to as usize];
                receiver.schedule.on_received(from, index, &mut receiver.memory, &mut posts);
                next.extend(sends_of(to, &mut posts));
                ranks[from as usize].schedule.on_sent(to, index, &mut posts);
                ranks[from as usize].schedule.on_concluded(to, index, &mut posts);
                next.extend(sends_of(from, &mut posts));
            }
            rounds.push(next);
        }
        rounds.pop();
        rounds
    }

    // test of: ultima/incast-factor
    #[test]
    fn an_incast_of_i_takes_two_times_n_minus_1_over_i_rounds_and_never_more_senders() {
        for world_size in 2..=16 {
            for incast in 1..world_size {
                let rounds = rounds(world_size, incast);
                let case = format!("{world_size} ranks, incast {incast}");
                assert_eq!(rounds.len() as u32, 2 * (world_size - 1).div_ceil(incast), "{case}");
                let mut pairs = BTreeSet::new();
                for round in rounds {
                    for rank in 0..world_size {
                        let senders = round.iter().filter(|(_, to, _)| *to == rank).count();
                        assert!(senders as u32 <= incast, "{case}: {senders} send to {rank}");
                    }
                    assert!(round.into_iter().all(|send| pairs.insert(send)), "{case}: a pair met twice");
                }
                assert_eq!(pairs.len() as u32, 2 * world_size * (world_size - 1), "{case}");
            }
        }
    }

    #[test]
    fn sends_that_wait_for_a_slot_keep_the_memory() {
        let mut rank = Rank::new(0, 4, 1);
        let (mut posts, mut pool) = (Vec::new(), Pool::default());
        rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
        assert_eq!(sends_of(0, &mut posts), [(0, 1, REDUCE)]);
        assert!(rank.schedule.has_more());
        for to in 1..4 {
            rank.schedule.on_concluded(to, REDUCE, &mut posts);
        }
        assert_eq!(sends_of(0, &mut posts).len(), 2);
        assert!(!rank.schedule.has_more(), "the result is not there yet: receives hold the memory");
    }
}
