//! The all-reduce over parameter servers, which LTP (section III), MLT (section 4.2) and DLCP (section 3.2) are made for.
//!
//! Each of k servers is responsible for one shard. Push: every worker sends each shard to its server, which adds what
//! arrives where it lands. Pull: the server sends the mean back to every worker. That is a transpose whose shards have
//! other owners, and [`super::transpose`] does all of it; what differs is said here. One server is the classic incast of
//! all workers into one link; as many servers as workers load every link alike, as a transpose does.
//!
//! Colocated servers are workers too: what such a rank contributes to its own shard never crosses the network. Servers
//! are the same ranks in every collective, because they are what the user has provided for; a transpose rotates.
//!
//! Dedicated servers have no tensors and call nothing. They hear of a call by the descriptor that travels with its first
//! packet; where that is not all (a loss bound, a factor), the workers send the rest in front of their data. A server begins
//! with the first contribution instead of with one of its own, in a buffer of the group's.

use super::transpose::{Owner, Transpose};
use super::Place;
use crate::layout::Layout;

// claim: mlt/colocated-servers, ltp/dedicated-servers
/// A worker's part; it may be a server too. `has_settings`: dedicated servers are told the settings of the call.
pub(super) fn worker(place: Place, bytes: usize, in_place: bool, has_settings: bool) -> Transpose {
    let layout = layout(place, bytes);
    let settings = has_settings && place.servers.are_dedicated();
    Transpose::new(place, layout, (other_servers(place, layout), own(place, layout)))
        .in_place(in_place)
        .with_settings(settings)
}

/// A dedicated server's part of a call over a bucket of `bytes` bytes.
pub(super) fn dedicated(place: Place, bytes: usize, has_settings: bool) -> Transpose {
    let shard = 0..shard_bytes(place, bytes);
    let layout = Layout::new(shard.len(), 1, place.chunk_bytes);
    let own = Owner { rank: place.rank, index: 0, shard };
    Transpose::new(place, layout, (Vec::new(), own)).summing_only().with_settings(has_settings)
}

/// Bytes of the shard that this rank reduces.
pub(super) fn shard_bytes(place: Place, bytes: usize) -> usize {
    own(place, layout(place, bytes)).shard.len()
}

fn layout(place: Place, bytes: usize) -> Layout {
    Layout::new(bytes, place.server_count() as usize, place.chunk_bytes)
}

/// This rank with its shard; empty where it is no server.
fn own(place: Place, layout: Layout) -> Owner {
    let index = place.servers.index_of(place.rank, place.world_size).map(|index| index as usize);
    let shard = index.map_or(0..0, |index| layout.shard(index));
    Owner { rank: place.rank, index: index.unwrap_or(0), shard }
}

/// Every other server that takes part, with its shard. Workers begin with different ones, so that no server is hit by
/// all at once. Dedicated ones take part in every call, so that they number the calls alike: an empty shard is a signal.
fn other_servers(place: Place, layout: Layout) -> Vec<Owner> {
    let Place { rank, world_size, servers, .. } = place;
    let count = place.server_count();
    (0..count)
        .map(|turn| (rank + turn) % count)
        .map(|index| {
            let shard = layout.shard(index as usize);
            Owner { rank: servers.rank_of(index, world_size), index: index as usize, shard }
        })
        .filter(|owner| owner.rank != rank && (!owner.shard.is_empty() || servers.are_dedicated()))
        .collect()
}
