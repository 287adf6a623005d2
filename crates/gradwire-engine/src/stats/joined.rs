//! Counters of several network threads as those of one.

use super::{
    CallStats, EndedBy, EngineStats, GroupStats, Histogram, PathStats, PeerStats, StageStats, StragglerStats,
    TagCounts, WatchStats,
};
use std::collections::BTreeMap;

impl EngineStats {
    /// Those of another network thread.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self {
            datagrams_sent,
            bytes_sent,
            send_calls,
            batches_apart,
            datagrams_received,
            bytes_received,
            datagrams_in_runs,
            receive_calls,
            datagrams_unknown,
            ecn_marked,
            send_refused,
            send_refused_errno,
            send_blocked,
            receive_overflows,
            group_turns,
            sleeps,
            busy_polls,
            yields,
            chaos_lost,
            datagrams_not_authentic,
            datagrams_replayed,
            seals_refused,
        } = other;
        self.datagrams_sent += datagrams_sent;
        self.bytes_sent += bytes_sent;
        self.send_calls += send_calls;
        self.batches_apart += batches_apart;
        self.datagrams_received += datagrams_received;
        self.bytes_received += bytes_received;
        self.datagrams_in_runs += datagrams_in_runs;
        self.receive_calls += receive_calls;
        self.datagrams_unknown += datagrams_unknown;
        self.ecn_marked += ecn_marked;
        self.send_refused += send_refused;
        if *send_refused_errno != 0 {
            self.send_refused_errno = *send_refused_errno;
        }
        self.send_blocked += send_blocked;
        self.receive_overflows += receive_overflows;
        self.group_turns += group_turns;
        self.sleeps += sleeps;
        self.busy_polls += busy_polls;
        self.yields += yields;
        self.chaos_lost += chaos_lost;
        self.datagrams_not_authentic += datagrams_not_authentic;
        self.datagrams_replayed += datagrams_replayed;
        self.seals_refused += seals_refused;
    }
}

impl GroupStats {
    /// Those of its part on another network thread. Calls were counted once, where they were made: their times, shares lost and what ended
    /// their stages are those of the first part.
    pub(crate) fn add_lane(&mut self, lane: &Self) {
        for part in &lane.calls {
            let is_it =
                |calls: &&mut CallStats| calls.preset == part.preset && calls.collective == part.collective;
            match self.calls.iter_mut().find(is_it) {
                Some(calls) => calls.add_part(part),
                None => {
                    let mut calls = CallStats {
                        collective: part.collective.clone(),
                        preset: part.preset,
                        ..CallStats::default()
                    };
                    calls.add_part(part);
                    self.calls.push(calls);
                }
            }
        }
        for part in &lane.peers {
            if let Some(peer) = self.peers.iter_mut().find(|peer| peer.rank == part.rank) {
                peer.add_part(part);
            }
        }
        if self.waiting.is_none() {
            self.waiting.clone_from(&lane.waiting);
        }
    }
}

impl WatchStats {
    /// Those of its part on another network thread, which waits at the same time.
    pub(crate) fn add_lane(&mut self, lane: Self) {
        self.waiting = self.waiting.take().or(lane.waiting);
        self.is_flooded |= lane.is_flooded;
        for (rank, part) in lane.stragglers {
            match self.stragglers.iter_mut().find(|(known, _)| *known == rank) {
                Some((_, stats)) => stats.take_longer(&part),
                None => self.stragglers.push((rank, part)),
            }
        }
    }
}

impl WatchStats {
    /// Leaves out the stragglers of whom nothing is new; `told` is what was told of each.
    pub(crate) fn keep_news(&mut self, told: &mut BTreeMap<u32, StragglerStats>) {
        self.stragglers.retain(|(rank, stats)| told.insert(*rank, *stats) != Some(*stats));
    }
}

impl StragglerStats {
    fn take_longer(&mut self, part: &Self) {
        self.compute_s = self.compute_s.max(part.compute_s);
        self.network_s = self.network_s.max(part.network_s);
        self.receiver_s = self.receiver_s.max(part.receiver_s);
        self.compute_episodes = self.compute_episodes.max(part.compute_episodes);
        self.network_episodes = self.network_episodes.max(part.network_episodes);
        self.receiver_episodes = self.receiver_episodes.max(part.receiver_episodes);
    }
}

impl CallStats {
    fn add_part(&mut self, part: &Self) {
        self.elems += part.elems;
        self.bytes_expected += part.bytes_expected;
        self.bytes_received += part.bytes_received;
        self.bytes_sent += part.bytes_sent;
        self.bytes_retransmitted += part.bytes_retransmitted;
        self.elems_uncounted += part.elems_uncounted;
        self.elems_filled += part.elems_filled;
        self.reduce.add_part(&part.reduce);
        self.gather.add_part(&part.gather);
    }
}

impl StageStats {
    fn add_part(&mut self, part: &Self) {
        self.elems_expected += part.elems_expected;
        self.elems_received += part.elems_received;
        self.transfers_ended_by.add_all(&part.transfers_ended_by);
    }
}

impl EndedBy {
    fn add_all(&mut self, other: &Self) {
        let Self { all_arrived, bound_met, soft_threshold, early_timeout, deadline } = other;
        self.all_arrived += all_arrived;
        self.bound_met += bound_met;
        self.soft_threshold += soft_threshold;
        self.early_timeout += early_timeout;
        self.deadline += deadline;
    }
}

impl PeerStats {
    /// What only one of several connections can be asked for, such as a round trip, is that of the first; rates and windows add up.
    fn add_part(&mut self, part: &Self) {
        self.packets_sent += part.packets_sent;
        self.bytes_sent += part.bytes_sent;
        self.packets_retransmitted += part.packets_retransmitted;
        self.packets_lost += part.packets_lost;
        self.packets_received += part.packets_received;
        self.bytes_received += part.bytes_received;
        self.packets_duplicate += part.packets_duplicate;
        self.packets_dropped += part.packets_dropped;
        self.datagrams_not_authentic += part.datagrams_not_authentic;
        self.datagrams_replayed += part.datagrams_replayed;
        self.seals_refused += part.seals_refused;
        self.control_sent += part.control_sent;
        self.probes_sent += part.probes_sent;
        self.bandwidth += part.bandwidth;
        self.cwnd += part.cwnd;
        self.silent_s = self.silent_s.min(part.silent_s);
        self.straggler.take_longer(&part.straggler);
        self.tags.add_all(&part.tags);
        for path in &part.paths {
            if let Some(own) = self.paths.iter_mut().find(|own| own.path == path.path) {
                own.add_part(path);
            }
        }
    }
}

impl TagCounts {
    fn add_all(&mut self, other: &Self) {
        let add =
            |own: &mut [u64], other: &[u64]| own.iter_mut().zip(other).for_each(|(own, other)| *own += other);
        add(&mut self.sent, &other.sent);
        add(&mut self.received, &other.received);
        self.important_sent += other.important_sent;
        self.important_received += other.important_received;
        self.ecn_capable_received += other.ecn_capable_received;
        self.congestion_received += other.congestion_received;
    }
}

impl PathStats {
    fn add_part(&mut self, part: &Self) {
        self.packets_sent += part.packets_sent;
        self.copies_sent += part.copies_sent;
        self.packets_lost += part.packets_lost;
        self.round_trip_s.add_all(&part.round_trip_s);
        self.trusted &= part.trusted;
    }
}

impl<const N: usize> Histogram<N> {
    fn add_all(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(own, other)| *own += other);
        self.sum += other.sum;
    }
}

#[cfg(test)]
mod tests {
    use super::super::WaitingStats;
    use super::*;

    fn calls(collective: &str, calls: u64, elems: u64) -> CallStats {
        let reduce = StageStats { elems_expected: elems, elems_received: elems - 1, ..StageStats::default() };
        CallStats {
            collective: collective.to_owned(),
            preset: "auto",
            calls,
            elems,
            reduce,
            ..CallStats::default()
        }
    }

    fn group(calls: Vec<CallStats>, sent: u64) -> GroupStats {
        let mut round_trip_s = Histogram::default();
        round_trip_s.add(0.001);
        let path = PathStats { packets_sent: sent, trusted: true, round_trip_s, ..PathStats::default() };
        let tags = TagCounts { sent: [sent; 8], ..TagCounts::default() };
        let peer = PeerStats {
            rank: 1,
            bytes_sent: sent,
            rtt_min_us: 5.0,
            paths: vec![path],
            tags,
            ..PeerStats::default()
        };
        GroupStats { calls, calls_failed: 1, peers: vec![peer], ..GroupStats::default() }
    }

    #[test]
    fn calls_are_counted_once_and_what_they_carried_as_a_whole() {
        let mut whole = group(vec![calls("all_reduce/ring", 3, 10), calls("barrier", 2, 1)], 7);
        let lane = group(vec![calls("all_reduce/ring", 3, 10), calls("all_reduce/transpose", 1, 4)], 5);
        whole.add_lane(&lane);
        let told: Vec<_> =
            whole.calls.iter().map(|of| (of.collective.as_str(), of.calls, of.elems)).collect();
        assert_eq!(told, [("all_reduce/ring", 3, 20), ("barrier", 2, 1), ("all_reduce/transpose", 0, 4)]);
        assert_eq!((whole.calls[0].reduce.elems_expected, whole.calls[0].reduce.elems_received), (20, 18));
        assert_eq!(whole.calls_failed, 1, "what fails in one fails in all");
        let peer = &whole.peers[0];
        assert_eq!((peer.bytes_sent, peer.rtt_min_us, peer.tags.sent), (12, 5.0, [12; 8]));
        assert_eq!((peer.paths[0].packets_sent, peer.paths[0].round_trip_s.counts.iter().sum()), (12, 2_u64));
    }

    #[test]
    fn who_is_waited_for_in_any_part_is_waited_for() {
        let straggler =
            |network_s| StragglerStats { network_s, network_episodes: 1, ..StragglerStats::default() };
        let of = |sequence, rank, network_s| WatchStats {
            waiting: Some(WaitingStats { sequence, ..WaitingStats::default() }),
            stragglers: vec![(rank, straggler(network_s))],
            is_flooded: rank == 2,
            ..WatchStats::default()
        };
        let mut watch = WatchStats::default();
        watch.add_lane(of(7, 1, 2.0));
        watch.add_lane(of(8, 1, 3.0));
        assert!(!watch.is_flooded);
        watch.add_lane(of(9, 2, 1.0));
        assert_eq!(watch.waiting.map(|waiting| waiting.sequence), Some(7));
        assert_eq!(watch.stragglers, [(1, straggler(3.0)), (2, straggler(1.0))]);
        assert!(watch.is_flooded, "at the port of any part");
    }

    #[test]
    fn a_watch_hears_of_those_alone_who_were_waited_for_since_it_asked_last() {
        let straggler =
            |compute_s| StragglerStats { compute_s, compute_episodes: 1, ..StragglerStats::default() };
        let mut told = BTreeMap::new();
        let mut news = |of_500: f64| {
            let stragglers = (0..511).map(|rank| (rank, straggler(if rank == 500 { of_500 } else { 1.0 })));
            let mut watch = WatchStats { stragglers: stragglers.collect(), ..WatchStats::default() };
            watch.keep_news(&mut told);
            watch.stragglers
        };
        assert_eq!(news(1.0).len(), 511);
        assert_eq!(news(1.0), []);
        assert_eq!(news(3.0), [(500, straggler(3.0))]);
        assert_eq!(news(3.0), []);
    }

    #[test]
    fn counters_of_engines_add_up() {
        let mut all =
            EngineStats { sleeps: 1, bytes_sent: 2, send_refused_errno: 90, ..EngineStats::default() };
        all.add(&EngineStats { sleeps: 3, seals_refused: 4, ..EngineStats::default() });
        let both = EngineStats { sleeps: 4, bytes_sent: 2, seals_refused: 4, ..EngineStats::default() };
        assert_eq!(all, EngineStats { send_refused_errno: 90, ..both }, "the latest that any of them knows");
    }
}
