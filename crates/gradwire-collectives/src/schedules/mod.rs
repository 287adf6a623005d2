//! Schedules: who sends what to whom, and when. Each is a small state machine that posts transfers and reacts to
//! their ends; it sees neither packets nor connections.
//!
//! Called by [`crate::op::Op`], which keeps the transfers and moves their bytes. The invariant of every schedule:
//! while a collective is not over, at least one of its transfers is open; it is over when none is.

mod broadcast;
mod direct;
mod halving;
mod ring;
mod transpose;

use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use crate::{Algorithm, Collective, Request};
use std::ops::Range;

/// This rank's place in the collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) sequence: u64,
    pub(crate) chunk_bytes: usize,
    /// Most senders that share a receiver in a transpose: ULTIMA's I, 1 to `world_size - 1`.
    pub(crate) incast: u32,
}

impl Place {
    /// The rank `distance` places after this one. Everybody sends to its neighbour first, so that no rank is hit by
    /// all at once.
    fn after(&self, distance: u32) -> u32 {
        (self.rank + distance) % self.world_size
    }

    /// Every other rank, the next one first.
    fn others(self) -> impl Iterator<Item = u32> {
        (1..self.world_size).map(move |distance| self.after(distance))
    }
}

/// The two stages of an all-reduce.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Stage {
    /// Contributions on their way to be averaged.
    Reduce,
    /// Results on their way back.
    Gather,
}

/// Whether holes may be left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loss {
    /// Everything arrives.
    Never,
    /// What the request's policy allows in this stage.
    In(Stage),
}

/// Where received bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Target {
    /// To this byte of the output.
    Place(usize),
    /// Added at this byte of the accumulator, which is in its chunk `chunk`.
    Add { at: usize, chunk: usize },
    /// Added at this byte of the output, all of which is the accumulator. Nothing may be missing, so nothing is counted.
    Sum { at: usize },
}

/// A transfer to post.
#[derive(Clone, Debug)]
pub(crate) enum Post {
    /// `range` of `side` to `to`. Its weights are the counts from `weights` on; without them every weight is 1.
    Send { to: u32, index: u32, side: Side, range: Range<usize>, weights: Option<usize>, loss: Loss },
    /// `bytes` bytes from `from`.
    Receive { from: u32, index: u32, target: Target, bytes: usize, loss: Loss },
}

/// One collective's plan on this rank.
pub(crate) trait Schedule: std::fmt::Debug + Send {
    /// Prepares the memory and posts what can start at once.
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>);

    /// The receive `index` from `from` is over, its payload is in the memory.
    fn on_received(&mut self, from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>);

    /// The memory of the send `index` to `to` is no longer read: its receiver has closed it, or it was copied.
    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>);

    /// The receiver of the send `index` to `to` has closed it. Comes after [`Schedule::on_sent`].
    fn on_concluded(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}

    /// Whether sends are still to be posted, which will read the caller's memory.
    fn has_more(&self) -> bool {
        false
    }
}

/// So many ranks send to one receiver at once while this collective runs.
pub(crate) fn senders(collective: &Collective, algorithm: Algorithm, place: Place) -> u32 {
    match collective {
        Collective::AllReduce { .. } if algorithm != Algorithm::Transpose => 1,
        Collective::AllReduce { .. } => place.incast,
        Collective::Broadcast { .. } | Collective::Scatter { .. } => 1,
        Collective::Send { .. } | Collective::Receive { .. } => 1,
        _ => place.world_size.max(2) - 1,
    }
}

/// The schedule of a valid request. A collective of no elements is a barrier: only so do all ranks find out if one
/// of them calls it with elements, or calls something else.
pub(crate) fn schedule_for(request: &Request, algorithm: Algorithm, place: Place) -> Box<dyn Schedule> {
    if is_empty(request) {
        return Box::new(direct::Direct::barrier(place));
    }
    match request.collective {
        Collective::AllReduce { .. } => {
            let layout = Layout::new(request.output.len(), place.world_size as usize, place.chunk_bytes);
            let in_place = request.input.overlaps(&request.output);
            match algorithm {
                Algorithm::Ring => Box::new(ring::Ring::new(place, layout)),
                Algorithm::HalvingDoubling => {
                    Box::new(halving::HalvingDoubling::new(place, request.output.len()))
                }
                _ => Box::new(transpose::Transpose::new(place, layout, in_place)),
            }
        }
        Collective::Broadcast { root } => {
            Box::new(broadcast::Broadcast::new(place, root, request.output.len()))
        }
        _ => Box::new(direct::Direct::new(request, place)),
    }
}

fn is_empty(request: &Request) -> bool {
    match request.collective {
        Collective::AllReduce { .. } | Collective::Broadcast { .. } => request.output.is_empty(),
        Collective::ReduceScatter | Collective::Scatter { .. } => request.output.is_empty(),
        Collective::AllGather | Collective::Gather { .. } | Collective::Reduce { .. } => {
            request.input.is_empty()
        }
        Collective::AllToAll { .. } | Collective::Barrier => false,
        Collective::Send { .. } | Collective::Receive { .. } => false,
    }
}

/// What [`Algorithm::Auto`] is for this request: transpose, which takes two stages whatever the world size, unless a
/// ring is better. A ring has more steps, but one flow on each link, so that no flow is behind the others when a stage
/// ends; that pays once a shard takes longer than the steps' round trips. It rounds halves at each step, so it is not
/// chosen for them. It hands on partial sums, so that one lost packet takes several ranks' values with it (for four
/// ranks twice as many on average as in a transpose): where loss is tolerated it is chosen among few ranks only, and
/// never where a contract cuts what still flows, since that would use the bound up at every hop. Two ranks do the same
/// in both.
pub(crate) fn resolve(algorithm: Algorithm, request: &Request, world_size: u32) -> Algorithm {
    match algorithm {
        Algorithm::Auto => {
            let large = request.output.len() / world_size as usize >= RING_SHARD_BYTES_MIN;
            let policy = &request.policy;
            let few = world_size <= TOLERANT_RING_RANKS_MAX && policy.after_first_pass;
            // A ring would hand on what it has filled in for a lost result.
            let whole = policy.gather.loss_bound <= 0.0;
            let ring =
                large && whole && world_size > 2 && !request.dtype.is_half() && (policy.is_exact() || few);
            if ring {
                Algorithm::Ring
            } else {
                Algorithm::Transpose
            }
        }
        Algorithm::HalvingDoubling if !request.policy.is_exact() => Algorithm::Transpose,
        chosen => chosen,
    }
}

/// A lost packet takes half of the ranks' values with it on average: two of four.
const TOLERANT_RING_RANKS_MAX: u32 = 4;
/// Below this the round trips of the ring's steps outweigh what flows cost each other.
const RING_SHARD_BYTES_MIN: usize = 128 << 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dtype, Policy, ReduceOp, Tags, View};
    use std::time::Duration;

    fn all_reduce(memory: &mut [u8], dtype: Dtype, policy: Policy) -> Request {
        // SAFETY: the request only carries the view, nothing reads through it.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        Request {
            collective: Collective::AllReduce { algorithm: Algorithm::Auto },
            dtype,
            reduce: ReduceOp::Sum,
            input: view,
            output: view,
            policy,
            residual: View::EMPTY,
            timeout: Duration::from_secs(1),
            priority: 0,
            tags: Tags::default(),
        }
    }

    #[test]
    fn auto_is_a_ring_for_large_sums_that_lose_little_by_it() {
        let mut memory = vec![0; 8 * RING_SHARD_BYTES_MIN];
        let chosen = |request: &Request, world_size| resolve(Algorithm::Auto, request, world_size);
        let large = all_reduce(&mut memory, Dtype::F32, Policy::RELIABLE);
        assert_eq!(chosen(&large, 8), Algorithm::Ring);
        assert_eq!(chosen(&large, 2), Algorithm::Transpose);
        let tolerant = all_reduce(&mut memory, Dtype::F32, Policy::AUTO);
        assert_eq!(chosen(&tolerant, 4), Algorithm::Ring);
        assert_eq!(chosen(&tolerant, 8), Algorithm::Transpose);
        let cutting = all_reduce(&mut memory, Dtype::F32, Policy::MLT);
        assert_eq!(chosen(&cutting, 4), Algorithm::Transpose);
        let half = all_reduce(&mut memory, Dtype::Bf16, Policy::RELIABLE);
        assert_eq!(chosen(&half, 8), Algorithm::Transpose);
        let small = all_reduce(&mut memory[..1000], Dtype::F32, Policy::RELIABLE);
        assert_eq!(chosen(&small, 8), Algorithm::Transpose);
        assert_eq!(resolve(Algorithm::Ring, &small, 2), Algorithm::Ring, "what was asked for is kept");
    }
}
