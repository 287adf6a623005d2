//! The all-reduce over parameter servers, which LTP (section III), MLT (section 4.2) and DLCP (section 3.2) are made for.
//!
//! Each of k servers is responsible for one shard. Push: every worker sends each shard to its server, which adds what
//! arrives where it lands. Pull: the server sends the mean back to every worker. One server is the classic incast of all
//! workers into one link; as many servers as workers load every link alike, as a transpose does.
//!
//! Colocated servers are workers too: what such a rank contributes to its own shard never crosses the network. Servers
//! are the same ranks in every collective, because they are what the user has provided for; a transpose rotates.
//!
//! Dedicated servers have no tensors and call nothing. They hear of a call by the descriptor that travels with its first
//! packet; where that is not all (a loss bound, a factor), the workers send the rest in front of their data. A server begins
//! with the first contribution instead of with one of its own, in a buffer of the group's.
//!
//! In place, the result of a shard must not overwrite what is still being sent: a pull is posted when the push of the
//! same memory has concluded.

use super::{Loss, Place, Post, Schedule, Stage, Target};
use crate::layout::Layout;
use crate::memory::{Memory, Pool, Side};
use crate::settings::CallSettings;
use std::ops::Range;

// claim: mlt/colocated-servers, ltp/dedicated-servers
/// See the module.
#[derive(Debug)]
pub(super) struct ParameterServer {
    place: Place,
    layout: Layout,
    in_place: bool,
    /// Dedicated servers are told the settings of the call.
    has_settings: bool,
    contributions_open: u32,
}

impl ParameterServer {
    pub(super) fn new(place: Place, bytes: usize, in_place: bool, has_settings: bool) -> Self {
        let layout = Layout::new(bytes, place.server_count() as usize, place.chunk_bytes);
        let has_settings = has_settings && place.servers.are_dedicated();
        Self { place, layout, in_place, has_settings, contributions_open: 0 }
    }

    /// The shard of the server `rank`; empty where it is none.
    fn shard_of(&self, rank: u32) -> Range<usize> {
        let Place { servers, world_size, .. } = self.place;
        servers.index_of(rank, world_size).map_or(0..0, |index| self.layout.shard(index as usize))
    }

    /// Every other server that takes part, with its shard. Workers begin with different ones, so that no server is hit by
    /// all at once. Dedicated ones take part in every call, so that they number the calls alike: an empty shard is a signal.
    fn other_servers(&self) -> impl Iterator<Item = (u32, Range<usize>)> + '_ {
        let Place { rank, world_size, servers, .. } = self.place;
        let count = self.place.server_count();
        (0..count)
            .map(move |turn| (rank + turn) % count)
            .map(move |index| (servers.rank_of(index, world_size), self.layout.shard(index as usize)))
            .filter(move |(server, shard)| *server != rank && (!shard.is_empty() || servers.are_dedicated()))
    }

    fn post_push(&self, to: u32, range: Range<usize>, posts: &mut Vec<Post>) {
        if self.has_settings {
            let (side, range, loss) = (Side::Settings, 0..CallSettings::BYTES, Loss::Never);
            posts.push(Post::Send { to, index: SETTINGS, side, range, weights: None, loss });
        }
        let loss = if range.is_empty() { Loss::Never } else { Loss::In(Stage::Reduce) };
        posts.push(Post::Send { to, index: PUSH, side: Side::Input, range, weights: None, loss });
    }

    fn post_pull(&self, from: u32, posts: &mut Vec<Post>) {
        let shard = self.shard_of(from);
        if shard.is_empty() {
            return;
        }
        posts.push(Post::Receive {
            from,
            index: PULL,
            target: Target::Place(shard.start),
            bytes: shard.len(),
            loss: Loss::In(Stage::Gather),
        });
    }

    /// Everything for the own shard is in: the result goes to all workers.
    fn finish_result(&self, memory: &mut Memory, posts: &mut Vec<Post>) {
        let range = self.shard_of(self.place.rank);
        memory.finish(&(0..range.len()), 0);
        self.place.others().for_each(|to| post_result(to, range.clone(), posts));
    }
}

impl Schedule for ParameterServer {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        self.other_servers().for_each(|(to, range)| self.post_push(to, range, posts));
        if !self.in_place {
            self.other_servers().for_each(|(from, _)| self.post_pull(from, posts));
        }
        let own = self.shard_of(self.place.rank);
        if own.is_empty() {
            return;
        }
        memory.accumulate_in(own.clone(), &own, self.layout.chunks_per_shard(), true, pool);
        self.contributions_open = self.place.world_size - 1;
        self.place.others().for_each(|from| post_contribution(from, own.len(), posts));
        if self.contributions_open == 0 {
            self.finish_result(memory, posts);
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        if index == PUSH {
            self.contributions_open -= 1;
            if self.contributions_open == 0 {
                self.finish_result(memory, posts);
            }
        }
    }

    fn on_sent(&mut self, to: u32, index: u32, posts: &mut Vec<Post>) {
        if index == PUSH && self.in_place {
            self.post_pull(to, posts);
        }
    }
}

/// A dedicated server's part of a call.
#[derive(Debug)]
pub(super) struct Serving {
    place: Place,
    /// Of the shard that it sums.
    bytes: usize,
    awaits_settings: bool,
    contributions_open: u32,
}

impl Serving {
    /// `bytes`: of the bucket.
    pub(super) fn new(place: Place, bytes: usize, has_settings: bool) -> Self {
        let layout = Layout::new(bytes, place.server_count() as usize, place.chunk_bytes);
        let index = place.servers.index_of(place.rank, place.world_size);
        let bytes = index.map_or(0, |index| layout.shard(index as usize).len());
        Self { place, bytes, awaits_settings: has_settings, contributions_open: place.world_size }
    }

    /// Bytes of the shard.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn workers(&self) -> Range<u32> {
        0..self.place.world_size
    }
}

impl Schedule for Serving {
    fn start(&mut self, memory: &mut Memory, pool: &mut Pool, posts: &mut Vec<Post>) {
        let chunks = self.bytes.div_ceil(self.place.chunk_bytes).max(1);
        memory.accumulate_nothing(self.bytes, chunks, pool);
        for from in self.workers() {
            if self.awaits_settings {
                let (target, bytes) = (Target::Settings, CallSettings::BYTES);
                posts.push(Post::Receive { from, index: SETTINGS, target, bytes, loss: Loss::Never });
            } else {
                post_contribution(from, self.bytes, posts);
            }
        }
    }

    fn on_received(&mut self, _from: u32, index: u32, memory: &mut Memory, posts: &mut Vec<Post>) {
        if index == SETTINGS {
            // The first worker's are everybody's: their fingerprint is compared with every transfer.
            if std::mem::replace(&mut self.awaits_settings, false) {
                self.workers().for_each(|from| post_contribution(from, self.bytes, posts));
            }
            return;
        }
        self.contributions_open -= 1;
        if self.contributions_open == 0 && self.bytes > 0 {
            memory.finish(&(0..self.bytes), 0);
            self.workers().for_each(|to| post_result(to, 0..self.bytes, posts));
        }
    }

    fn on_sent(&mut self, _to: u32, _index: u32, _posts: &mut Vec<Post>) {}
}

fn post_contribution(from: u32, bytes: usize, posts: &mut Vec<Post>) {
    let loss = if bytes == 0 { Loss::Never } else { Loss::In(Stage::Reduce) };
    posts.push(Post::Receive { from, index: PUSH, target: Target::Add { at: 0, chunk: 0 }, bytes, loss });
}

fn post_result(to: u32, range: Range<usize>, posts: &mut Vec<Post>) {
    let loss = Loss::In(Stage::Gather);
    posts.push(Post::Send { to, index: PULL, side: Side::Output, range, weights: None, loss });
}

const PUSH: u32 = 0;
const PULL: u32 = 1;
/// What a dedicated server is told about the call, from each worker.
const SETTINGS: u32 = 2;
