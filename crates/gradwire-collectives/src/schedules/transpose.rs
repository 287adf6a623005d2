//! The transpose all-reduce (TAR, ULTIMA section 3.1): peer to peer, two stages.
//!
//! Each rank is responsible for one shard. Stage one: everybody sends each shard to the rank that is responsible for
//! it, which adds what arrives. Stage two: it sends the result to everybody. Responsibility rotates from collective to
//! collective, and for each bucket from step to step ([`Place::turn`]), so that neither a short shard nor a bad link is always
//! at the expense of the same rank or the same parameters. Only stage one may lose data; every copy of a result is made from one rank's bits.
//!
//! The incast factor I bounds the senders that share a receiver: a rank has at most I sends of a stage open, nearest peer
//! first, and begins the next one when a receiver has closed one. In step, that is the paper's 2 * ceil((N - 1) / I)
//! rounds: in each, a rank hears from the ranks a round's distances before it. No round is a barrier: receives are all
//! posted at the start and no stage waits for slots of the other, so a send waits for receivers alone. A rank that is
//! late holds one slot of each peer until it comes (its own sends, I at a time, are then still the longest chain), and
//! a rank that is dead ends the group with the silence of its connection.
//!
//! Parameter servers ([`super::server`]) are other owners of the shards, and everything else is the same: a dedicated one
//! owns a shard and contributes nothing to it.
//!
//! Halves are summed in float32, whose lower bits take as much memory as the shard while one rank is late ([`crate::halves`]). So a
//! large shard of them is contributed in pieces, each a transfer of its own: receives of the next one are posted when all
//! ranks' part of this one is in, and what is not posted waits at its sender. There it holds a slot, so of what may be sent the
//! earliest piece goes first, whoever owns it: a rank that has a piece left to send is never out of slots for later ones alone,
//! which would wait in turn for what other ranks hold back.
//!
//! In place, the result of a shard must not overwrite what is still being sent: the receive of stage two is posted
//! when the send of the same memory has concluded.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use crate::settings::CallSettings;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// A rank that reduces a shard, and sends the result to everybody.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    pub(super) rank: u32,
    /// Number of the shard.
    pub(super) index: usize,
    /// Bytes of the bucket.
    pub(super) shard: Range<usize>,
}

// claim: ultima/transpose, ultima/incast-factor
/// See the module.
#[derive(Debug)]
pub(super) struct Transpose {
    place: Place,
    layout: Layout,
    /// Every other owner, the first to be sent to first.
    owners: Vec<Owner>,
    /// This rank, with what it reduces; empty: nothing.
    own: Owner,
    in_place: bool,
    /// It contributes to its own shard. A dedicated server only sums.
    contributes: bool,
    /// Contributions follow the settings of the call: owners know nothing else of it.
    has_settings: bool,
    /// Most bytes of a shard that are contributed at a time.
    piece_bytes: usize,
    /// The piece of the own shard that is being summed, and contributions to it that are not in.
    piece: usize,
    contributions_open: u32,
    /// Sends of each stage that may be posted beside those that are open.
    slots: [u32; 2],
    /// Pieces that may be sent when there is a slot, with the place of their owner among `owners`: of each the first one whose
    /// predecessor has concluded. The earliest comes first.
    waiting: BinaryHeap<Reverse<(usize, usize)>>,
    /// The distance to the receiver of the next result; beyond the last one: none is left, or none is there yet.
    next_result: u32,
}

impl Transpose {
    /// The shard of `own` is reduced here, the shards of `owners` by them; all is sent at once.
    pub(super) fn new(place: Place, layout: Layout, (owners, own): (Vec<Owner>, Owner)) -> Self {
        Self {
            place,
            layout,
            waiting: BinaryHeap::with_capacity(owners.len()),
            owners,
            own,
            in_place: false,
            contributes: true,
            has_settings: false,
            piece_bytes: usize::MAX,
            piece: 0,
            contributions_open: 0,
            slots: [u32::MAX; 2],
            next_result: place.peers() + 1,
        }
    }

    /// Every rank has a shard, another one in each collective, and at most `place.incast` senders share a receiver.
    pub(super) fn rotating(place: Place, bytes: usize, in_place: bool) -> Self {
        let layout = Layout::new(bytes, place.world_size as usize, place.chunk_bytes);
        let turn = place.turn() as usize;
        let owner = |rank: u32| {
            let index = rank as usize + turn;
            Owner { rank, index, shard: layout.shard(index) }
        };
        let owners = place.others().map(owner).filter(|owner| !owner.shard.is_empty()).collect();
        let all = Self::new(place, layout, (owners, owner(place.rank))).in_place(in_place);
        Self { slots: [place.incast; 2], ..all }
    }

    /// Results are written where contributions are read.
    pub(super) fn in_place(self, in_place: bool) -> Self {
        Self { in_place, ..self }
    }

    /// This rank has no tensors: its shard is the whole of its memory.
    pub(super) fn summing_only(self) -> Self {
        Self { contributes: false, ..self }
    }

    /// Contributions follow what the owners are told about the call.
    pub(super) fn with_settings(self, has_settings: bool) -> Self {
        Self { has_settings, ..self }
    }

    /// Contributions of at most `bytes` bytes at a time, whole chunks.
    pub(super) fn in_pieces(self, bytes: usize) -> Self {
        let chunk = self.place.chunk_bytes;
        Self { piece_bytes: (bytes / chunk).max(1).saturating_mul(chunk), ..self }
    }

    /// Piece `number` of a shard; the first one of an empty shard is empty.
    fn piece(&self, shard: &Range<usize>, number: usize) -> Option<Range<usize>> {
        let start = number.saturating_mul(self.piece_bytes);
        let is_there = number == 0 || start < shard.len();
        let end = start.saturating_add(self.piece_bytes).min(shard.len());
        is_there.then(|| shard.start + start..shard.start + end)
    }

    /// The first chunk of what this rank reduces, which is the first of its accumulator.
    fn first_chunk(&self) -> usize {
        self.layout.first_chunk(self.own.index)
    }

    fn post_settings(&self, to: u32, posts: &mut Vec<Post>) {
        let (side, range, loss) = (Side::Settings, 0..CallSettings::BYTES, Loss::Never);
        posts.push(Post::Send { to, index: SETTINGS, side, range, weights: None, loss });
    }

    fn expect_settings(&self, from: u32, posts: &mut Vec<Post>) {
        let (target, bytes) = (Target::Settings, CallSettings::BYTES);
        posts.push(Post::Receive { from, index: SETTINGS, target, bytes, loss: Loss::Never });
    }

    fn expect_contribution(&self, from: u32, posts: &mut Vec<Post>) {
        let Some(piece) = self.piece(&self.own.shard, self.piece) else { return };
        let (at, bytes) = (piece.start - self.own.shard.start, piece.len());
        let target = Target::Add { at, chunk: self.first_chunk() + at / self.place.chunk_bytes };
        let index = index_of_piece(self.piece);
        posts.push(Post::Receive { from, index, target, bytes, loss: contribution_loss(bytes) });
    }

    /// Sends piece `number` of what this rank contributes to the shard of `owner`, if there is one.
    fn contribute(&self, owner: &Owner, number: usize, posts: &mut Vec<Post>) {
        let Some(range) = self.piece(&owner.shard, number) else { return };
        let (to, index, loss) = (owner.rank, index_of_piece(number), contribution_loss(range.len()));
        posts.push(Post::Send { to, index, side: Side::Input, range, weights: None, loss });
    }

    /// The piece behind `number` may be sent, if there is one.
    fn queue_after(&mut self, number: usize, to: u32) {
        let Some(at) = self.owners.iter().position(|owner| owner.rank == to) else { return };
        if self.piece(&self.owners[at].shard, number + 1).is_some() {
            self.waiting.push(Reverse((number + 1, at)));
        }
    }

    fn owner_at(&self, rank: u32) -> Option<Owner> {
        self.owners.iter().find(|owner| owner.rank == rank).cloned()
    }

    // claim: ltp/exact-broadcast, auto/identical-replicas
    fn expect_result(&self, owner: &Owner, posts: &mut Vec<Post>) {
        let (from, bytes) = (owner.rank, owner.shard.len());
        if bytes > 0 {
            let (at, chunk) = (owner.shard.start, self.layout.first_chunk(owner.index));
            let (target, loss) = (Target::Result { at, chunk }, Loss::In(Stage::Gather));
            posts.push(Post::Receive { from, index: GATHER, target, bytes, loss });
        }
    }

    /// Prepares the sum, and waits for what the others contribute to it.
    fn start_sum(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let (own, chunks) = (&self.own.shard, self.layout.chunks());
        if self.contributes {
            memory.accumulate_in(own.clone(), own, chunks, true, pool);
        } else {
            memory.accumulate_nothing(own.len(), chunks, pool);
        }
        self.contributions_open = self.place.peers();
        for from in self.place.others() {
            if self.has_settings {
                self.expect_settings(from, posts);
            } else {
                self.expect_contribution(from, posts);
            }
        }
    }

    /// Sends the result to everybody when every contribution is in.
    fn finish_sum(&mut self, memory: &mut Memory, posts: &mut Vec<Post>) {
        if self.contributions_open == 0 && !self.own.shard.is_empty() {
            memory.finish(&(0..self.own.shard.len()), self.first_chunk());
            self.next_result = 1;
            self.post_sends(posts);
        }
    }

    /// Posts sends while there are slots.
    fn post_sends(&mut self, posts: &mut Vec<Post>) {
        while self.slots[REDUCE as usize] > 0 {
            let Some(Reverse((number, at))) = self.waiting.pop() else { break };
            let owner = self.owners[at].clone();
            self.slots[REDUCE as usize] -= 1;
            if self.has_settings && number == 0 {
                self.post_settings(owner.rank, posts);
            }
            self.contribute(&owner, number, posts);
        }
        while self.slots[GATHER as usize] > 0 && self.next_result <= self.place.peers() {
            let to = self.place.after(self.next_result);
            self.next_result += 1;
            self.slots[GATHER as usize] -= 1;
            let (side, range, loss) = (Side::Output, self.own.shard.clone(), Loss::In(Stage::Gather));
            let weights = Some(self.first_chunk());
            posts.push(Post::Send { to, index: GATHER, side, range, weights, loss });
        }
    }
}

impl Schedule for Transpose {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        self.waiting.extend((0..self.owners.len()).map(|at| Reverse((0, at))));
        self.post_sends(posts);
        if !self.in_place {
            self.owners.iter().for_each(|owner| self.expect_result(owner, posts));
        }
        if !self.own.shard.is_empty() || !self.contributes {
            self.start_sum(memory, pool, posts);
            self.finish_sum(memory, posts);
        } else {
            memory.count_results(self.layout.chunks(), pool);
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        match index {
            GATHER => {}
            // The first worker's are everybody's: their fingerprint is compared with every transfer.
            SETTINGS if std::mem::replace(&mut self.has_settings, false) => {
                self.place.others().for_each(|from| self.expect_contribution(from, posts));
            }
            SETTINGS => {}
            _ => {
                self.contributions_open -= 1;
                if self.contributions_open == 0 && self.piece(&self.own.shard, self.piece + 1).is_some() {
                    self.piece += 1;
                    self.contributions_open = self.place.peers();
                    self.place.others().for_each(|from| self.expect_contribution(from, posts));
                }
                self.finish_sum(memory, posts);
            }
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        let Some(number) = piece_of_index(index).filter(|_| self.in_place) else { return };
        let owner = self.owner_at(to).filter(|owner| self.piece(&owner.shard, number + 1).is_none());
        owner.iter().for_each(|owner| self.expect_result(owner, posts));
    }

    fn on_concluded(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        let stage = match (index, piece_of_index(index)) {
            (SETTINGS, _) => return,
            (_, None) => GATHER,
            (_, Some(number)) => {
                self.queue_after(number, to);
                REDUCE
            }
        };
        self.slots[stage as usize] = self.slots[stage as usize].saturating_add(1);
        self.post_sends(posts);
    }

    fn has_more(&self) -> bool {
        !self.waiting.is_empty() || self.next_result <= self.place.peers()
    }
}

/// An empty shard is a bare signal.
fn contribution_loss(bytes: usize) -> Loss {
    if bytes == 0 {
        Loss::Never
    } else {
        Loss::In(Stage::Reduce)
    }
}

/// The transfers of the first piece and of those behind it.
fn index_of_piece(number: usize) -> u32 {
    if number == 0 {
        REDUCE
    } else {
        SETTINGS + number as u32
    }
}

/// The inverse; `None`: no contribution.
fn piece_of_index(index: u32) -> Option<usize> {
    match index {
        REDUCE => Some(0),
        GATHER | SETTINGS => None,
        later => Some((later - SETTINGS) as usize),
    }
}

const REDUCE: u32 = 0;
const GATHER: u32 = 1;
/// What a dedicated server is told about the call, from each worker.
const SETTINGS: u32 = 2;

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
            Self::with_bytes(rank, world_size, incast, 64 * world_size as usize)
        }

        fn with_bytes(rank: u32, world_size: u32, incast: u32, bytes: usize) -> Self {
            let place = place(rank, world_size, 5, incast);
            let mut bytes = vec![0; bytes];
            // SAFETY: the vector is kept beside the view and nobody else touches it.
            let view = unsafe { View::new(bytes.as_mut_ptr(), bytes.len()) };
            let (dtype, reduce) = (Dtype::F32, ReduceOp::Sum);
            let divide_by = DivideBy::Contributions;
            let reduction = Reduction { dtype, reduce, world_size: world_size as u16, divide_by };
            let memory = Memory::new((view, view, View::EMPTY), reduction, 64);
            Self { schedule: Transpose::rotating(place, bytes.len(), true), memory, _bytes: bytes }
        }
    }

    fn place(rank: u32, world_size: u32, sequence: u64, incast: u32) -> Place {
        Place { rank, world_size, sequence, chunk_bytes: 64, incast, servers: Servers::default() }
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

    /// Every transfer between two ranks of a shard of four chunks, in pieces of one and a half, in the order of its start.
    #[test]
    fn a_shard_in_pieces_is_contributed_piece_by_piece_when_all_have_sent_the_one_before() {
        let mut rank = Rank::with_bytes(1, 3, 2, 3 * 256);
        rank.schedule = rank.schedule.in_pieces(96);
        let (mut posts, mut pool) = (Vec::new(), Pool::default());
        rank.schedule.start(&mut rank.memory, &mut pool, &mut posts);
        let own = rank.schedule.own.shard.clone();
        let sends = |posts: &[Post]| -> Vec<(u32, u32, usize)> {
            let send = |post: &Post| match post {
                Post::Send { to, index, range, .. } => Some((*to, *index, range.len())),
                Post::Receive { .. } => None,
            };
            posts.iter().filter_map(send).collect()
        };
        let receives = |posts: &[Post]| -> Vec<(u32, u32, Target)> {
            let receive = |post: &Post| match post {
                Post::Receive { from, index, target, bytes: 64, .. } => Some((*from, *index, *target)),
                _ => None,
            };
            posts.iter().filter_map(receive).collect()
        };
        assert_eq!(sends(&posts), [(2, 0, 64), (0, 0, 64)], "a chunk at a time");
        assert_eq!(receives(&posts).len(), 2);
        posts.clear();
        let first_chunk = rank.schedule.first_chunk();
        for (piece, index) in [(1, 3), (2, 4), (3, 5)] {
            let before = index_of_piece(piece - 1);
            rank.schedule.on_received(0, before, &mut rank.memory, &mut posts);
            assert!(posts.is_empty(), "rank 2 has not sent piece {}", piece - 1);
            rank.schedule.on_received(2, before, &mut rank.memory, &mut posts);
            let target = Target::Add { at: 64 * piece, chunk: first_chunk + piece };
            assert_eq!(receives(&posts), [(2, index, target), (0, index, target)]);
            posts.clear();
            rank.schedule.on_sent(2, before, &mut posts);
            assert!(posts.is_empty(), "the memory of a shard is free when all of it has been sent");
            rank.schedule.on_concluded(2, before, &mut posts);
            assert_eq!(sends(&posts), [(2, index, 64)]);
            posts.clear();
        }
        rank.schedule.on_sent(2, 5, &mut posts);
        assert!(matches!(posts[..], [Post::Receive { from: 2, index: GATHER, bytes: 256, .. }]));
        posts.clear();
        rank.schedule.on_received(0, 5, &mut rank.memory, &mut posts);
        rank.schedule.on_received(2, 5, &mut rank.memory, &mut posts);
        assert_eq!(sends(&posts), [(2, GATHER, own.len()), (0, GATHER, own.len())]);
    }

    /// How many of the ranks finish their sum where a receive takes what was sent before or after it, in any order of ranks.
    fn sums_finished(world_size: u32, incast: u32, pieces: usize) -> usize {
        let bytes = 64 * pieces * world_size as usize;
        let mut ranks: Vec<Rank> = (0..world_size)
            .map(|rank| {
                let mut made = Rank::with_bytes(rank, world_size, incast, bytes);
                made.schedule = made.schedule.in_pieces(64);
                made
            })
            .collect();
        let (mut posts, mut pool) = (Vec::new(), Pool::default());
        let (mut sent, mut awaited, mut summed) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        let mut take =
            |rank: u32, posts: &mut Vec<Post>, sent: &mut BTreeSet<_>, awaited: &mut BTreeSet<_>| {
                for post in posts.drain(..) {
                    match post {
                        Post::Send { index: GATHER, .. } => _ = summed.insert(rank),
                        Post::Send { to, index, .. } => _ = sent.insert((rank, to, index)),
                        Post::Receive { index: GATHER, .. } => {}
                        Post::Receive { from, index, .. } => _ = awaited.insert((from, rank, index)),
                    }
                }
            };
        for rank in 0..world_size {
            let one = &mut ranks[rank as usize];
            one.schedule.start(&mut one.memory, &mut pool, &mut posts);
            take(rank, &mut posts, &mut sent, &mut awaited);
        }
        while let Some(met) = sent.intersection(&awaited).copied().next() {
            let (from, to, index) = met;
            sent.remove(&met);
            awaited.remove(&met);
            let receiver = &mut ranks[to as usize];
            receiver.schedule.on_received(from, index, &mut receiver.memory, &mut posts);
            take(to, &mut posts, &mut sent, &mut awaited);
            let sender = &mut ranks[from as usize].schedule;
            sender.on_sent(to, index, &mut posts);
            sender.on_concluded(to, index, &mut posts);
            take(from, &mut posts, &mut sent, &mut awaited);
        }
        summed.len()
    }

    #[test]
    fn pieces_of_all_shards_arrive_with_any_incast_factor() {
        for world_size in 2..=8 {
            for incast in 1..world_size {
                for pieces in 1..=5 {
                    let case = format!("{world_size} ranks, incast {incast}, {pieces} pieces");
                    assert_eq!(sums_finished(world_size, incast, pieces), world_size as usize, "{case}");
                }
            }
        }
    }

    /// The rank that owns the first shard of a bucket in collective `sequence`, as each rank sees it.
    fn owner_of_first_shard(world_size: u32, sequence: u64) -> u32 {
        let bytes = 64 * world_size as usize;
        let owner_by = |rank: u32| {
            let transpose = Transpose::rotating(place(rank, world_size, sequence, 1), bytes, true);
            let mut owners = transpose.owners;
            owners.push(transpose.own);
            let first = owners.iter().find(|owner| owner.shard.start == 0).map(|owner| owner.rank);
            first.expect("somebody owns it")
        };
        let owner = owner_by(0);
        assert!((1..world_size).all(|rank| owner_by(rank) == owner), "ranks disagree about {sequence}");
        owner
    }

    // test of: ultima/rotating-responsibility
    #[test]
    fn no_rank_owns_a_part_of_a_bucket_more_often_than_others_however_many_buckets_a_step_has() {
        for world_size in [2, 3, 4, 7, 8, 16] {
            let rounds = 32;
            for buckets in (1..=world_size).chain([2 * world_size, 4 * world_size, 360]) {
                for bucket in [0, buckets - 1] {
                    let mut owned = vec![0; world_size as usize];
                    for step in 0..rounds * world_size {
                        let sequence = u64::from(step) * u64::from(buckets) + u64::from(bucket);
                        owned[owner_of_first_shard(world_size, sequence) as usize] += 1;
                    }
                    let case = format!("{world_size} ranks, bucket {bucket} of {buckets}: {owned:?}");
                    // By chance 32 +- 5.6; a period in common with the step would leave ranks out.
                    assert!(owned.iter().all(|times| (8..=60).contains(times)), "{case}");
                }
            }
        }
    }

    #[test]
    fn of_as_many_collectives_as_ranks_each_gives_a_short_shard_to_another_rank() {
        for world_size in 1..=16 {
            for round in 0..20 {
                let sequences = round * world_size..(round + 1) * world_size;
                let owner = |sequence| owner_of_first_shard(world_size, u64::from(sequence));
                assert_eq!(sequences.map(owner).collect::<BTreeSet<_>>().len(), world_size as usize);
            }
        }
    }
}
