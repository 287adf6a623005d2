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
//! A reduce-scatter is stage one alone: the shards are the rows of the input, each rank's is the one with its number, and what it has
//! reduced it keeps.
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
    /// There is a second stage.
    gathers: bool,
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
            gathers: true,
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

    /// A reduce-scatter: the shard of each rank is its row of the input, of `row` bytes, and nobody else gets the result.
    pub(super) fn scattering(place: Place, row: usize) -> Self {
        let layout = Layout::new(row, 1, place.chunk_bytes);
        let owner = |rank: u32| {
            let start = rank as usize * row;
            Owner { rank, index: 0, shard: start..start + row }
        };
        let all = Self::new(place, layout, (place.others().map(owner).collect(), owner(place.rank)));
        Self { slots: [place.incast; 2], gathers: false, ..all }
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
        let Some(at) = self.place_of(to) else { return };
        if self.piece(&self.owners[at].shard, number + 1).is_some() {
            self.waiting.push(Reverse((number + 1, at)));
        }
    }

    /// Where an owner is among the others: at its distance from here, unless owners of nothing were left out before it.
    fn place_of(&self, rank: u32) -> Option<usize> {
        let is_its = |at: &usize| self.owners.get(*at).is_some_and(|owner| owner.rank == rank);
        let world_size = self.place.world_size;
        let distance = (world_size + rank).checked_sub(self.place.rank).map(|distance| distance % world_size);
        let likely = distance.and_then(|distance| (distance as usize).checked_sub(1)).filter(is_its);
        likely.or_else(|| self.owners.iter().position(|owner| owner.rank == rank))
    }

    fn owner_at(&self, rank: u32) -> Option<Owner> {
        self.place_of(rank).map(|at| self.owners[at].clone())
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
            // What nobody else gets is all of the output.
            let area = if self.gathers { own.clone() } else { 0..own.len() };
            memory.accumulate_in(area, own, chunks, true, pool);
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

    /// When every contribution is in, sends the result to everybody who gets it.
    fn finish_sum(&mut self, memory: &mut Memory, posts: &mut Vec<Post>) {
        if self.contributions_open == 0 && !self.own.shard.is_empty() {
            memory.finish(&(0..self.own.shard.len()), self.first_chunk());
            if self.gathers {
                self.next_result = 1;
                self.post_sends(posts);
            }
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
        if self.gathers && !self.in_place {
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
mod tests;
