//! What the program is told of a group when it asks.

use super::{ActiveGroup, PeerAddress};
use crate::security::Channel;
use crate::socket::RawAddress;
use crate::timeline::{Clock, Timeline};
use crate::{GroupStats, PathStats, PeerStats, StragglerStats, WaitingStats, WatchStats};
use gradwire_core::{ConnectionStats, Timestamp};

impl ActiveGroup {
    /// Counters.
    pub(crate) fn stats(&self, now: Timestamp) -> GroupStats {
        let peers = self.group.path_stats();
        GroupStats {
            name: self.setup.name.clone(),
            rank: self.known_as(self.setup.config.rank),
            world_size: self.setup.config.world_size,
            datagram_bytes: self.setup.datagram_bytes,
            security: self.setup.security,
            agreed: self.group.agreed().map(Into::into),
            served: self.served,
            calls: self.tally.calls.clone(),
            calls_failed: self.tally.failed,
            waiting: self.waiting(now),
            epoch: self.epoch(),
            peers: peers
                .iter()
                .map(|(rank, stats, paths)| PeerStats {
                    silent_s: self.group.silence(*rank, now).as_secs_f64(),
                    ..self.peer_stats(*rank, stats, paths)
                })
                .collect(),
        }
    }

    /// Who is waited for.
    pub(crate) fn watch(&self, now: Timestamp) -> WatchStats {
        let all = self.tally.stragglers.iter().zip(0_u32..).map(|(blame, rank)| (rank, blame.stats));
        WatchStats {
            waiting: self.waiting(now),
            stragglers: all.filter(|(_, stats)| *stats != StragglerStats::default()).collect(),
            epoch: self.epoch(),
            unreached_threads: self.lanes.missed(self.would_use_lanes()),
            is_flooded: self.is_flooded,
        }
    }

    /// The latest calls, so many of the group's sequence and as many others, and the one that is waited for.
    pub(crate) fn timeline(&self, now: Timestamp, clock: Clock, calls: usize) -> Timeline {
        Timeline {
            clock,
            asked_ns: now.as_nanos(),
            waiting: self.waiting(now),
            calls: self.tally.latest(calls).into_iter().map(Into::into).collect(),
        }
    }

    fn waiting(&self, now: Timestamp) -> Option<WaitingStats> {
        let mut waiting = WaitingStats::new(self.group.waiting(now)?, now);
        waiting.straggler = waiting.straggler.map(|rank| self.known_as(rank));
        Some(waiting)
    }

    fn path_stats(&self, path: &gradwire_core::PathStats, peer: &PeerAddress) -> PathStats {
        let end = peer.ways.as_ref().map(|ways| ways.end(usize::from(path.path)));
        let source = end.and_then(|end| self.setup.sources.get(end.source()?));
        PathStats {
            path: path.path,
            local_address: source.map(|source| source.address),
            peer_address: end.and_then(RawAddress::to_socket_addr).map(|end| end.ip()),
            source_port: self.setup.source_ports.get(usize::from(path.path)).copied().unwrap_or(0),
            packets_sent: path.packets_sent,
            copies_sent: path.copies_sent,
            packets_lost: path.packets_lost,
            rtt_smoothed_us: path.rtt_smoothed.as_secs_f64() * 1e6,
            round_trip_s: path.round_trips.into(),
            share: path.share,
            trusted: path.trusted,
        }
    }

    fn peer_stats(
        &self,
        rank: u32,
        stats: &ConnectionStats,
        paths: &[gradwire_core::PathStats],
    ) -> PeerStats {
        let peer = &self.peers[rank as usize];
        let address = peer.ways.as_ref().and_then(|ways| ways.end(0).to_socket_addr());
        let (not_authentic, replayed, refused) = peer.channel.as_ref().map_or((0, 0, 0), Channel::counts);
        PeerStats {
            rank: self.known_as(rank),
            host: peer.host.clone(),
            address: address.map_or(String::new(), |address| address.to_string()),
            packets_sent: stats.packets_sent,
            bytes_sent: stats.bytes_sent,
            packets_retransmitted: stats.packets_retransmitted,
            packets_lost: stats.packets_lost,
            packets_received: stats.packets_received,
            bytes_received: stats.bytes_received,
            packets_duplicate: stats.packets_duplicate,
            packets_dropped: stats.packets_dropped,
            datagrams_not_authentic: not_authentic,
            datagrams_replayed: replayed,
            seals_refused: refused,
            control_sent: stats.control_sent,
            probes_sent: stats.probes_sent,
            rtt_smoothed_us: stats.rtt_smoothed.as_secs_f64() * 1e6,
            rtt_min_us: stats.rtt_min.as_secs_f64() * 1e6,
            bandwidth: stats.bandwidth,
            cwnd: stats.cwnd,
            silent_s: 0.0,
            straggler: self.tally.stragglers[self.known_as(rank) as usize].stats,
            tags: stats.tags.into(),
            paths: paths.iter().map(|path| self.path_stats(path, peer)).collect(),
        }
    }
}
