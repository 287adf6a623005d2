//! Schedules: who sends what to whom, and when. Each is a small state machine that posts transfers and reacts to
//! their ends; it sees neither packets nor connections.
//!
//! Called by [`crate::op::Op`], which keeps the transfers and moves their bytes. The invariant of every schedule:
//! while a collective is not over, at least one of its transfers is open; it is over when none is.

mod broadcast;
mod choice;
mod cost;
mod direct;
mod gathered;
mod halving;
mod one_shot;
mod pieces;
mod ring;
mod scattered;
mod server;
mod transpose;
mod weighted;

pub(crate) use choice::Chooser;

use crate::call::Call;
use crate::layout::Layout;
use crate::links::LinkShares;
use crate::memory::{Memory, Pool, Side};
use crate::{Algorithm, Collective, Request, Servers};
use gathered::Gathered;
use scattered::Scattered;
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
    /// Who reduces in an all-reduce over parameter servers.
    pub(crate) servers: Servers,
}

impl Place {
    /// The rank `distance` places after this one. Everybody sends to its neighbour first, so that no rank is hit by
    /// all at once.
    fn after(&self, distance: u32) -> u32 {
        (self.rank + distance) % self.world_size
    }

    // claim: ultima/rotating-responsibility
    /// By how many places the shards have moved on in this collective, 0 to `world_size - 1`: a function of its number alone, so
    /// that all ranks know it. Of `world_size` collectives in a row each has another turn, which loads all alike where some
    /// shards are short. The next so many begin anywhere: a training step of a multiple of `world_size` collectives would else
    /// give each bucket the same owners for ever, and what a bad link loses would always be of the same parameters.
    pub(crate) fn turn(&self) -> u32 {
        let world_size = u64::from(self.world_size.max(1));
        let (round, place) = (self.sequence / world_size, self.sequence % world_size);
        ((place + scattered(round) % world_size) % world_size) as u32
    }

    /// Ranks of the connections: dedicated servers are numbered behind the others.
    pub(crate) fn ranks(&self) -> u32 {
        self.servers.ranks(self.world_size)
    }

    /// Parameter servers of the group.
    fn server_count(&self) -> u32 {
        self.servers.count(self.world_size)
    }

    /// Shards that `algorithm` cuts a bucket into.
    pub(crate) fn shards(&self, algorithm: Algorithm) -> usize {
        match algorithm {
            Algorithm::ParameterServer => self.server_count() as usize,
            Algorithm::WeightedTranspose | Algorithm::OneShot => 1,
            _ => self.world_size as usize,
        }
    }

    /// Other ranks that call collectives: all of them, for a dedicated server.
    fn peers(&self) -> u32 {
        self.world_size - u32::from(self.rank < self.world_size)
    }

    /// Every other rank that calls collectives, the next one first.
    fn others(self) -> impl Iterator<Item = u32> {
        (1..=self.peers()).map(move |distance| self.after(distance))
    }
}

// claim: auto/moving-cut
/// At which of its packets `rank` begins to send what may be missing in the end, in collective `sequence`. A contract that cuts what still
/// flows leaves out what is last, and so does a queue that overflows. In the order of memory that would be the same part of the same
/// shard in every step, in which no rank but the owner ever has a say: what is owed for it would grow without bound
/// (docs/error-feedback.md). What is exact leaves in the order of memory, which caches like best.
pub(crate) const fn moving_begin(rank: u32, sequence: u64) -> u32 {
    (scattered(sequence << 16 | rank as u64 & 0xFFFF) >> 32) as u32
}

/// Spreads neighbouring numbers (the finisher of SplitMix64); 0 stays 0.
const fn scattered(number: u64) -> u64 {
    let word = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

/// The two stages of an all-reduce. A reduce-scatter has the first alone.
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
    /// To this byte of the output, which is in chunk `chunk` of the bucket: a result, whose packets say how many ranks are in it.
    Result { at: usize, chunk: usize },
    /// Added at this byte of the accumulator, which is in chunk `chunk` of the bucket.
    Add { at: usize, chunk: usize },
    /// Added at this byte of the output, all of which is the accumulator. Nothing may be missing, so nothing is counted.
    Sum { at: usize },
    /// To this byte of the contributions that are kept apart.
    Row { at: usize },
    /// To what a server is told about the call.
    Settings,
}

impl Target {
    /// Whether what goes there is to be summed here.
    pub(crate) const fn is_contribution(self) -> bool {
        matches!(self, Self::Add { .. } | Self::Sum { .. } | Self::Row { .. })
    }
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
pub(crate) fn senders(request: &Request, algorithm: Algorithm, place: Place) -> u32 {
    match request.collective {
        Collective::AllReduce { .. } => match algorithm {
            Algorithm::Transpose => place.incast,
            Algorithm::WeightedTranspose | Algorithm::OneShot => place.world_size.max(2) - 1,
            Algorithm::ParameterServer => place.servers.senders(place.world_size),
            Algorithm::Auto | Algorithm::Ring | Algorithm::HalvingDoubling => 1,
        },
        Collective::ReduceScatter => place.incast,
        Collective::Broadcast { .. } if !Scattered::is_for(request.output.len(), place.world_size) => 1,
        Collective::Scatter { .. } => 1,
        Collective::Send { .. } | Collective::Receive { .. } => 1,
        _ => place.world_size.max(2) - 1,
    }
}

/// The schedule of a valid request. A collective of no elements is a barrier: only so do all ranks find out if one
/// of them calls it with elements, or calls something else. `links`: where some are slower than others.
pub(crate) fn schedule_for(
    request: &Request,
    algorithm: Algorithm,
    place: Place,
    links: Option<&LinkShares>,
) -> Box<dyn Schedule> {
    if is_empty(request) {
        return Box::new(direct::Direct::barrier(place));
    }
    match request.collective {
        Collective::AllReduce { .. } => all_reduce(request, algorithm, place, links),
        Collective::Broadcast { root } => broadcast(place, root, request.output.len()),
        Collective::ReduceScatter => {
            let transpose = transpose::Transpose::scattering(place, request.output.len());
            Box::new(transpose.in_pieces(piece_bytes(request, place)))
        }
        Collective::Reduce { root } if Gathered::is_for(request.input.len(), place.world_size) => {
            let in_place = request.input.overlaps(&request.output);
            Box::new(Gathered::new(place, root, request.input.len(), in_place))
        }
        _ => Box::new(direct::Direct::new(request, place)),
    }
}

fn broadcast(place: Place, root: u32, bytes: usize) -> Box<dyn Schedule> {
    if Scattered::is_for(bytes, place.world_size) {
        Box::new(Scattered::new(place, root, bytes))
    } else {
        Box::new(broadcast::Broadcast::new(place, root, bytes))
    }
}

fn all_reduce(
    request: &Request,
    algorithm: Algorithm,
    place: Place,
    links: Option<&LinkShares>,
) -> Box<dyn Schedule> {
    let (bytes, in_place) = (request.output.len(), request.input.overlaps(&request.output));
    match algorithm {
        Algorithm::Ring => {
            let layout = Layout::new(bytes, place.world_size as usize, place.chunk_bytes);
            Box::new(ring::Ring::new(place, layout))
        }
        Algorithm::HalvingDoubling => Box::new(halving::HalvingDoubling::new(place, bytes)),
        Algorithm::OneShot => Box::new(one_shot::OneShot::new(place, bytes)),
        Algorithm::WeightedTranspose => Box::new(weighted::Weighted::new(place, bytes, in_place, links)),
        Algorithm::ParameterServer => {
            let has_settings = Call::of(request, algorithm).has_settings();
            let worker = server::worker(place, bytes, in_place, has_settings);
            Box::new(worker.in_pieces(piece_bytes(request, place)))
        }
        Algorithm::Auto | Algorithm::Transpose => {
            let transpose = transpose::Transpose::rotating(place, bytes, in_place);
            Box::new(transpose.in_pieces(piece_bytes(request, place)))
        }
    }
}

/// Most bytes of a shard that are contributed at a time. A dedicated server is there for the sums, with memory of its own choosing.
fn piece_bytes(request: &Request, place: Place) -> usize {
    if request.dtype.is_half() && !place.servers.are_dedicated() {
        (PIECE_BYTES / request.parts() as usize / place.chunk_bytes).max(1) * place.chunk_bytes
    } else {
        usize::MAX
    }
}

/// Pieces of the largest shard, which are contributed one after the other.
pub(crate) fn pieces_of(request: &Request, algorithm: Algorithm, place: Place) -> u32 {
    let largest = match request.collective {
        Collective::AllReduce { .. }
            if matches!(algorithm, Algorithm::Transpose | Algorithm::ParameterServer) =>
        {
            Layout::new(request.output.len(), place.shards(algorithm), place.chunk_bytes).shard_bytes()
        }
        Collective::ReduceScatter => request.output.len(),
        _ => 0,
    };
    u32::try_from(largest.div_ceil(piece_bytes(request, place)).max(1)).unwrap_or(u32::MAX)
}

/// Of halves: what the lower bits of their sums take at most. Behind a late rank the others wait with what is beyond it, so
/// it is no smaller than it has to be: three quarters of what an all-reduce may take beside the tensor, all of its parts together.
const PIECE_BYTES: usize = 48 << 20;

/// The bytes of a shard and of a block whose contributions are counted, where `request` reduces on this rank.
pub(crate) fn blocks_of(request: &Request, algorithm: Algorithm, place: Place) -> Option<(usize, usize)> {
    let (bytes, chunk) = (request.output.len(), place.chunk_bytes);
    match request.collective {
        // Always exact, so that one count is that of all.
        Collective::AllReduce { .. } if algorithm == Algorithm::HalvingDoubling => Some((bytes, bytes)),
        Collective::AllReduce { .. }
            if matches!(algorithm, Algorithm::WeightedTranspose | Algorithm::OneShot) =>
        {
            Some((bytes, chunk))
        }
        Collective::AllReduce { .. } => {
            Some((Layout::new(bytes, place.shards(algorithm), chunk).shard_bytes(), chunk))
        }
        Collective::ReduceScatter => Some((bytes, chunk)),
        Collective::Reduce { root } if root == place.rank && Gathered::is_for(bytes, place.world_size) => {
            Some((Gathered::shard_bytes(place, bytes), chunk))
        }
        Collective::Reduce { root } if root == place.rank => Some((bytes, chunk)),
        _ => None,
    }
}

/// What the dedicated server of `place` does for `call`.
pub(crate) fn schedule_of_server(call: &Call, place: Place) -> Box<dyn Schedule> {
    Box::new(server::dedicated(place, call.bytes().unwrap_or(0), call.has_settings()))
}

/// Bytes of the shard that the dedicated server of `place` reduces for `call`.
pub(crate) fn shard_bytes_of_server(call: &Call, place: Place) -> usize {
    server::shard_bytes(place, call.bytes().unwrap_or(0))
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
