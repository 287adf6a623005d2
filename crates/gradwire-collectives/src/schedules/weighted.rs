//! The weighted transpose: a transpose among ranks whose links differ in speed.
//!
//! With equal shards every link carries `2 (N - 1) / N S` each way, of a bucket of S bytes, and all wait for the slowest. But most of
//! that is avoidable: what a rank has to send and to receive is its own contribution and the result, S each way. A rank that reduces
//! the share s of the bucket carries `(1 + (N - 2) s) S`. So whoever has a slow link reduces less, or nothing, and the others reduce it
//! instead: all are done after
//!
//! ```text
//!   T = max over the ranks of (1 + (N - 2) s_i) S / R_i,   least with   s_i = max(0, (T R_i / S - 1) / (N - 2)).
//! ```
//!
//! With one of four links at half the rate that is 2 S / R instead of 3 S / R, and 1.5 S / R if none were slow.
//!
//! Both directions of a slow link must be in use at once for that: results have to come back while it still contributes. So the bucket is cut
//! into portions, some for each rank that reduces, in turns, the last ones smaller; each is reduced and sent back for itself, in the order
//! of the bucket.
//!
//! It holds on what a transpose does: contributions are added in float32 by one rank, only they may be lost, and the result of a portion
//! is received when the contribution to it, in the same memory, has concluded.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::links::LinkShares;
use crate::memory::{Memory, Pool, Side};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

// claim: auto/weighted-transpose
/// See the module.
#[derive(Debug)]
pub(super) struct Weighted {
    place: Place,
    portions: Portions,
    in_place: bool,
    /// Contributions to each portion that are not in; only those of own portions count.
    open: Vec<u32>,
}

impl Weighted {
    /// `links`: where some are slower than others; the same on every rank.
    pub(super) fn new(place: Place, bytes: usize, in_place: bool, links: Option<&LinkShares>) -> Self {
        let portions = Portions::new(place, bytes, links);
        let open = vec![place.peers(); portions.owners.len()];
        Self { place, portions, in_place, open }
    }

    fn post_contribution(&self, portion: usize, posts: &mut Vec<Post>) {
        let (to, range) = (self.portions.owners[portion], self.portions.range(portion));
        let (index, loss) = (self.portions.reduce_index(portion), Loss::In(Stage::Reduce));
        posts.push(Post::Send { to, index, side: Side::Input, range, weights: None, loss });
    }

    fn expect_contributions(&self, portion: usize, posts: &mut Vec<Post>) {
        let (range, chunk) = (self.portions.range(portion), self.portions.first_chunk(portion));
        for from in self.place.others() {
            let (target, loss) = (Target::Add { at: range.start, chunk }, Loss::In(Stage::Reduce));
            let (index, bytes) = (self.portions.reduce_index(portion), range.len());
            posts.push(Post::Receive { from, index, target, bytes, loss });
        }
    }

    fn expect_result(&self, portion: usize, posts: &mut Vec<Post>) {
        let (from, range) = (self.portions.owners[portion], self.portions.range(portion));
        let target = Target::Result { at: range.start, chunk: self.portions.first_chunk(portion) };
        let (index, bytes) = (self.portions.reduce_index(portion) + 1, range.len());
        let loss = Loss::In(Stage::Gather);
        posts.push(Post::Receive { from, index, target, bytes, loss });
    }

    fn post_result(&self, portion: usize, posts: &mut Vec<Post>) {
        for to in self.place.others() {
            let (index, range) = (self.portions.reduce_index(portion) + 1, self.portions.range(portion));
            let (weights, loss) = (Some(self.portions.first_chunk(portion)), Loss::In(Stage::Gather));
            posts.push(Post::Send { to, index, side: Side::Output, range, weights, loss });
        }
    }
}

impl Schedule for Weighted {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let (all, chunks) = (0..self.portions.bytes, self.portions.chunks());
        memory.accumulate_in(all.clone(), &all, chunks, true, pool);
        for portion in 0..self.portions.owners.len() {
            if self.portions.owners[portion] == self.place.rank {
                self.expect_contributions(portion, posts);
                continue;
            }
            self.post_contribution(portion, posts);
            if !self.in_place {
                self.expect_result(portion, posts);
            }
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        let Some(portion) = self.portions.reduced_by(self.place.rank, index) else { return };
        self.open[portion] -= 1;
        if self.open[portion] == 0 {
            memory.finish(&self.portions.range(portion), self.portions.first_chunk(portion));
            self.post_result(portion, posts);
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if let Some(portion) = self.portions.reduced_by(to, index).filter(|_| self.in_place) {
            self.expect_result(portion, posts);
        }
    }
}

/// A bucket cut into portions, and who reduces each.
#[derive(Debug)]
struct Portions {
    bytes: usize,
    chunk_bytes: usize,
    starts: Vec<usize>,
    owners: Vec<u32>,
    /// Of each portion its number among those of its owner, by which ranks name it to each other.
    numbers: Vec<u32>,
    /// Of each rank the portions that it reduces, in order.
    of_rank: Vec<Vec<usize>>,
}

impl Portions {
    /// On the grid of the bucket's own chunks, so that a chunk has one number wherever it is.
    fn new(place: Place, bytes: usize, links: Option<&LinkShares>) -> Self {
        let chunk_bytes = place.chunk_bytes;
        let weights = weights(place.world_size, links);
        let starts = starts(bytes, reducing(&weights), chunk_bytes);
        let ends = starts.iter().copied().skip(1).chain(std::iter::once(bytes));
        let sizes = starts.iter().zip(ends).map(|(start, end)| end - start);
        let owners = owners(&weights, sizes, place.turn() as usize);
        let mut of_rank = vec![Vec::new(); place.world_size as usize];
        let mut number = |(portion, owner): (usize, &u32)| {
            let own = &mut of_rank[*owner as usize];
            own.push(portion);
            own.len() as u32 - 1
        };
        let numbers = owners.iter().enumerate().map(&mut number).collect();
        Self { bytes, chunk_bytes, starts, owners, numbers, of_rank }
    }

    fn range(&self, portion: usize) -> Range<usize> {
        self.starts[portion]..self.starts.get(portion + 1).copied().unwrap_or(self.bytes)
    }

    fn first_chunk(&self, portion: usize) -> usize {
        self.starts[portion] / self.chunk_bytes
    }

    fn chunks(&self) -> usize {
        self.bytes.div_ceil(self.chunk_bytes)
    }

    /// Contributions to an owner have even indices, the results that it sends the odd ones behind.
    fn reduce_index(&self, portion: usize) -> u32 {
        2 * self.numbers[portion]
    }

    /// The portion of `owner` that a contribution is for; `None` for a result.
    fn reduced_by(&self, owner: u32, index: u32) -> Option<usize> {
        let number = (index % 2 == 0).then_some(index as usize / 2)?;
        self.of_rank[owner as usize].get(number).copied()
    }
}

/// Where the portions of a bucket begin that so many ranks reduce: all of one size, the last of each rank in parts.
fn starts(bytes: usize, reducing: usize, chunk_bytes: usize) -> Vec<usize> {
    let (portion, part) = sizes(bytes, reducing, chunk_bytes);
    let whole = bytes.saturating_sub(reducing * portion) / portion;
    let wholes = (0..whole).map(|number| number * portion);
    wholes.chain((whole * portion..bytes).step_by(part)).collect()
}

/// Bytes of a portion, and of a part of the last ones.
fn sizes(bytes: usize, reducing: usize, chunk_bytes: usize) -> (usize, usize) {
    let wanted = PORTIONS_OF_EACH * reducing.max(1);
    let portion = bytes.div_ceil(wanted).max(PORTION_BYTES_MIN).next_multiple_of(chunk_bytes);
    (portion, (portion / PARTS_OF_LAST).next_multiple_of(chunk_bytes))
}

/// What each rank's share of the bucket is in proportion to: its `T R / S - 1`, with T as in the module, times the sum of the rates.
///
/// Ranks for which that is negative, or less than half a portion, reduce nothing, which makes T longer for the others and may leave one of
/// them more.
fn weights(world_size: u32, links: Option<&LinkShares>) -> Vec<u64> {
    let mut weights = vec![1; world_size as usize];
    if world_size < 3 {
        return weights;
    }
    loop {
        let before = reducing(&weights);
        weigh(&mut weights, links);
        if reducing(&weights) == before {
            return weights;
        }
    }
}

/// The same for the ranks that have a weight.
fn weigh(weights: &mut [u64], links: Option<&LinkShares>) {
    let whole = u64::from(LinkShares::WHOLE);
    let eighths = links.map_or(&[][..], LinkShares::eighths);
    let rate = |rank: usize| eighths.get(rank).map_or(whole, |eighths| u64::from(*eighths));
    let reducing: Vec<usize> = (0..weights.len()).filter(|rank| weights[*rank] > 0).collect();
    let rates: u64 = reducing.iter().map(|rank| rate(*rank)).sum();
    let (others, ranks) = (weights.len() as u64 - 2, reducing.len() as u64);
    // All weights are `others * rates`, and so many are half a portion.
    let least = (others * rates).div_ceil(2 * PORTIONS_OF_EACH as u64 * ranks);
    for rank in reducing {
        let weight = ((others + ranks) * rate(rank)).saturating_sub(rates);
        weights[rank] = if weight < least { 0 } else { weight };
    }
}

/// Ranks that reduce anything.
fn reducing(weights: &[u64]) -> usize {
    weights.iter().filter(|weight| **weight > 0).count()
}

/// Who reduces each portion of these sizes: the ranks in turns, from rank `turn` on, each as many bytes as its weight says. Stride
/// scheduling (Waldspurger and Weihl, 1995): a rank's next turn is so much later as its weight is smaller.
fn owners(weights: &[u64], sizes: impl Iterator<Item = usize>, turn: usize) -> Vec<u32> {
    let count = weights.len();
    let stride = |rank: usize, bytes: usize| bytes as u128 * STRIDE / u128::from(weights[rank]);
    let reducing =
        (0..count).map(|place| (place, (turn + place) % count)).filter(|(_, rank)| weights[*rank] > 0);
    let mut turns: BinaryHeap<_> =
        reducing.map(|(place, rank)| Reverse((stride(rank, 1) / 2, place, rank))).collect();
    let mut next = |bytes: usize| {
        let Some(mut first) = turns.peek_mut() else { return 0 };
        let Reverse((at, place, rank)) = *first;
        *first = Reverse((at + stride(rank, bytes), place, rank));
        rank as u32
    };
    sizes.map(&mut next).collect()
}

/// Bytes of the smallest portions, about, of a bucket of `bytes` bytes.
pub(super) fn part_bytes(world_size: u32, bytes: usize, links: Option<&LinkShares>) -> usize {
    sizes(bytes, reducing(&weights(world_size, links)), 1).1
}

/// Portions, about, that a rank reduces.
pub(super) fn portions_of_each(world_size: u32, bytes: usize, links: Option<&LinkShares>) -> f64 {
    let reducing = reducing(&weights(world_size, links));
    bytes as f64 / (sizes(bytes, reducing, 1).0 * reducing.max(1)) as f64
}

/// Bytes that cross a link of the typical rate in the time that the links of `world_size` ranks are busy, those of `bytes` bytes: of the
/// link that is busy for longest, and of its last portion, whose result comes back after everything else.
pub(super) fn bytes_in_time(world_size: u32, bytes: usize, links: &LinkShares) -> f64 {
    let weights = weights(world_size, Some(links));
    let total: u64 = weights.iter().sum();
    let slowness = |eighths: u8| f64::from(LinkShares::WHOLE) / f64::from(eighths);
    let busy = |(weight, eighths): (&u64, &u8)| {
        let share = *weight as f64 / total.max(1) as f64;
        (1.0 + f64::from(world_size.max(2) - 2) * share) * slowness(*eighths)
    };
    let (_, last) = sizes(bytes, reducing(&weights), 1);
    let longest = weights.iter().zip(links.eighths()).map(busy).fold(0.0, f64::max);
    longest * bytes as f64 + last as f64 / links.slowest()
}

/// What comes back waits for a portion of each rank that reduces. A slow link that needed 336 ms for a megabyte took 407 ms with 16 of them,
/// and 398 with 32; in the simulator half as many took 2 % longer, and twice as many as long.
const PORTIONS_OF_EACH: usize = 32;
/// When the last contribution is in, its result has yet to come back, at the pace of one of several flows.
const PARTS_OF_LAST: usize = 4;
/// Of one byte at a weight of one: weights are far smaller.
const STRIDE: u128 = 1 << 60;
/// Less is not worth the messages.
pub(super) const PORTION_BYTES_MIN: usize = 16 << 10;

#[cfg(test)]
mod tests;
