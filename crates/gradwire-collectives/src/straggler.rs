//! Who a collective had to wait for, and why: pure decisions over what its report or its transfers say.
//!
//! A rank is a straggler only beside others: it called later, its bytes came later, or it took what it was sent later than half of the
//! ranks did. What slows all of them alike is the network or the model, and nobody's fault. So a ring, where a rank receives from one
//! other only, shows who called late and nothing else; a call that does not end at all shows everything ([`PeerWait`]).

use crate::op::earlier;
use crate::{DeliveryReport, PeerDelivery};
use gradwire_core::Timestamp;
use std::time::Duration;

/// Why a rank was waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StragglerCause {
    /// It called later than the others: it computes.
    Compute,
    /// It had called, and its bytes came later than those of the others.
    Network,
    /// It took what was sent to it later than the others, or nothing is heard from it: its process cannot keep up, or has stopped.
    Receiver,
}

impl StragglerCause {
    /// All of them, in the order in which they are counted.
    pub const ALL: [Self; 3] = [Self::Compute, Self::Network, Self::Receiver];

    /// Its name in statistics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Network => "network",
            Self::Receiver => "receiver",
        }
    }
}

/// A rank that others waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Straggler {
    /// Which.
    pub rank: u32,
    /// Why.
    pub cause: StragglerCause,
    /// From when on it alone was waited for, on this rank's clock.
    pub since: Timestamp,
    /// Until when.
    pub until: Timestamp,
}

impl Straggler {
    fn new(cause: StragglerCause, (rank, until): (u32, Timestamp), since: Timestamp) -> Option<Self> {
        (until.since(since) >= NOTICED).then_some(Self { rank, cause, since, until })
    }

    /// How long.
    #[must_use]
    pub fn waited(&self) -> Duration {
        self.until.since(self.since)
    }
}

// claim: report/straggler
/// Who a collective that has ended had waited for: at most one rank that called late, and at most one whose bytes came late or that
/// took its bytes late.
pub fn stragglers_of(report: &DeliveryReport) -> impl Iterator<Item = Straggler> {
    let stage = first_stage(report);
    let known = stage.iter().filter_map(|peer| Some((peer.rank, earlier(peer.called_at?, peer.way))));
    let mut calls: Vec<(u32, Timestamp)> = known.collect();
    let others = calls.len();
    calls.push((u32::MAX, report.submitted_at));
    let (last, half) = last_and_half(&mut calls);
    // Nobody waits before it has called itself.
    let since = half.max(report.submitted_at);
    let caller = (others > 0).then(|| Straggler::new(StragglerCause::Compute, last, since)).flatten();
    // Of a rank whose own bytes are none of this rank's it may be known from others.
    let called = last.1.max(report.submitted_at + report.compute_wait);
    let after_call = |(rank, at): (u32, Timestamp)| (rank, at.max(called));
    let sent = stage.iter().map(|peer| after_call((peer.rank, peer.ended_at)));
    let taken = report.takings.iter().map(|peer| after_call((peer.rank, peer.taken_at)));
    let sender = last_of(StragglerCause::Network, sent.collect());
    let taker = last_of(StragglerCause::Receiver, taken.collect());
    // A slow way is seen in both directions, longer in the one that is slow.
    let slow = [sender, taker].into_iter().flatten().max_by_key(Straggler::waited);
    caller.into_iter().chain(slow)
}

/// What ranks send when they have called, and not when they have heard of others: a gather stage may be late because of anybody.
fn first_stage(report: &DeliveryReport) -> &[PeerDelivery] {
    let is_first = report.sources.iter().any(|peer| peer.called_at.is_some());
    match (report.peers.is_empty(), is_first) {
        (false, _) => &report.peers,
        (true, true) => &report.sources,
        (true, false) => &[],
    }
}

fn last_of(cause: StragglerCause, mut ends: Vec<(u32, Timestamp)>) -> Option<Straggler> {
    if ends.len() < 2 {
        return None;
    }
    let (last, half) = last_and_half(&mut ends);
    Straggler::new(cause, last, half)
}

/// The last, and when half of them (of two: the first) had come.
fn last_and_half(times: &mut [(u32, Timestamp)]) -> ((u32, Timestamp), Timestamp) {
    times.sort_unstable_by_key(|(_, at)| *at);
    (times[times.len() - 1], times[(times.len() - 1) / 2].1)
}

/// What a call that has not ended waits for from one peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerWait {
    /// Which.
    pub rank: u32,
    /// Whether it is known to have made the same call.
    pub has_called: bool,
    /// Bytes that came of those that are outstanding.
    pub bytes_received: u64,
    /// Bytes that are outstanding, those that came included.
    pub bytes_expected: u64,
    /// Something that only it can send is outstanding: its contribution, or what it alone has.
    pub owes_contribution: bool,
    /// Something from it is outstanding.
    pub owes: bool,
    /// It has not confirmed what was sent to it.
    pub has_to_take: bool,
    /// How long nothing was heard from it.
    pub silent: Duration,
    /// That is longer than a living process is silent.
    pub is_stalled: bool,
}

/// The oldest call of this rank that has not ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiting {
    /// Name, size and number, for people.
    pub during: String,
    /// Its number in the group's sequence.
    pub sequence: u64,
    /// When this rank called it.
    pub submitted_at: Timestamp,
    /// Peers that something is outstanding with.
    pub peers: Vec<PeerWait>,
}

impl Waiting {
    /// Who it waits for first: who is not heard at all, then who has not called, then whose bytes are outstanding, then who has not
    /// taken its bytes. The others may wait for the same rank.
    #[must_use]
    pub fn straggler(&self, now: Timestamp) -> Option<Straggler> {
        let found = |cause, peer: &PeerWait| Straggler {
            rank: peer.rank,
            cause,
            since: self.submitted_at,
            until: now,
        };
        let stalled = self.peers.iter().filter(|peer| peer.is_stalled).max_by_key(|peer| peer.silent);
        let absent = || self.peers.iter().find(|peer| !peer.has_called);
        let owing = || {
            let contributes = self.peers.iter().any(|peer| peer.owes_contribution);
            let owes = |peer: &&PeerWait| if contributes { peer.owes_contribution } else { peer.owes };
            self.peers.iter().filter(owes).max_by_key(|peer| peer.bytes_expected - peer.bytes_received)
        };
        let taking = || self.peers.iter().find(|peer| peer.has_to_take);
        stalled
            .map(|peer| found(StragglerCause::Receiver, peer))
            .or_else(|| absent().map(|peer| found(StragglerCause::Compute, peer)))
            .or_else(|| owing().map(|peer| found(StragglerCause::Network, peer)))
            .or_else(|| taking().map(|peer| found(StragglerCause::Receiver, peer)))
    }
}

/// Below this nobody is late: the scheduler of a busy host, or the way of a first packet.
const NOTICED: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PeerTaking;

    fn ms(time: u64) -> Timestamp {
        Timestamp::from_nanos(time * 1_000_000)
    }

    fn delivery(rank: u32, called: u64, ended: u64) -> PeerDelivery {
        PeerDelivery {
            rank,
            elems_received: 1,
            elems_expected: 1,
            closed_by: "all_arrived",
            waited_for_peer: Duration::ZERO,
            network_time: Duration::ZERO,
            deadline: None,
            called_at: Some(ms(called + 7)),
            way: Duration::from_millis(7),
            began_at: ms(called),
            ended_at: ms(ended),
        }
    }

    fn report(peers: &[(u32, u64, u64)], takings: &[(u32, u64)]) -> DeliveryReport {
        DeliveryReport {
            submitted_at: ms(100),
            peers: peers.iter().map(|&(rank, called, ended)| delivery(rank, called, ended)).collect(),
            takings: takings.iter().map(|&(rank, at)| PeerTaking { rank, taken_at: ms(at) }).collect(),
            ..DeliveryReport::default()
        }
    }

    fn found(report: &DeliveryReport) -> Vec<(u32, &'static str, u64)> {
        let of = |late: Straggler| (late.rank, late.cause.as_str(), late.waited().as_millis() as u64);
        stragglers_of(report).map(of).collect()
    }

    // test of: report/straggler
    #[test]
    fn a_late_caller_is_blamed_for_what_it_alone_was_waited_for() {
        assert_eq!(found(&report(&[(1, 100, 210), (2, 180, 210)], &[])), [(2, "compute", 80)]);
        assert_eq!(found(&report(&[(1, 150, 160)], &[])), [(1, "compute", 50)], "two ranks");
        let all_but_me = report(&[(1, 150, 160), (2, 150, 160), (3, 150, 160)], &[]);
        assert_eq!(found(&all_but_me), [], "it is this rank that is early");
        assert_eq!(found(&report(&[(1, 20, 120), (2, 30, 120)], &[])), [], "this rank is the late one");
    }

    #[test]
    fn late_bytes_count_from_the_last_call_and_only_beside_those_of_others() {
        assert_eq!(found(&report(&[(1, 100, 120), (2, 100, 190)], &[])), [(2, "network", 70)]);
        assert_eq!(found(&report(&[(1, 100, 190), (2, 100, 190)], &[])), [], "all are slow alike");
        assert_eq!(found(&report(&[(1, 100, 190)], &[])), [], "nobody to compare with");
        let both = found(&report(&[(1, 100, 120), (2, 150, 190)], &[]));
        assert_eq!(
            both,
            [(2, "compute", 50), (2, "network", 40)],
            "its bytes could not come before the call"
        );
    }

    #[test]
    fn a_receiver_that_cannot_drain_is_told_from_a_slow_sender_by_the_longer_wait() {
        let ends = [(1, 100, 120), (2, 100, 130)];
        assert_eq!(found(&report(&ends, &[(1, 120), (2, 180)])), [(2, "receiver", 60)]);
        assert_eq!(
            found(&report(&[(1, 100, 120), (2, 100, 190)], &[(1, 120), (2, 140)])),
            [(2, "network", 70)]
        );
    }

    fn wait(rank: u32) -> PeerWait {
        PeerWait {
            rank,
            has_called: true,
            bytes_received: 0,
            bytes_expected: 100,
            owes_contribution: false,
            owes: true,
            has_to_take: true,
            silent: Duration::ZERO,
            is_stalled: false,
        }
    }

    #[test]
    fn results_that_come_late_blame_nobody() {
        let unknown = |rank, ended| PeerDelivery { called_at: None, ..delivery(rank, 100, ended) };
        let gathered = DeliveryReport { sources: vec![unknown(1, 120), unknown(2, 190)], ..report(&[], &[]) };
        assert_eq!(found(&gathered), []);
        let copied = DeliveryReport {
            sources: vec![delivery(1, 100, 120), delivery(2, 100, 190)],
            ..report(&[], &[])
        };
        assert_eq!(found(&copied), [(2, "network", 70)]);
    }

    #[test]
    fn a_call_in_flight_waits_for_the_root_of_the_trouble() {
        let of = |peers: Vec<PeerWait>| {
            let waiting = Waiting { during: String::new(), sequence: 0, submitted_at: ms(100), peers };
            waiting.straggler(ms(150)).map(|late| (late.rank, late.cause.as_str()))
        };
        let absent = PeerWait { has_called: false, ..wait(3) };
        let stalled = PeerWait { is_stalled: true, ..wait(4) };
        let contribution = PeerWait { owes_contribution: true, bytes_received: 90, ..wait(2) };
        assert_eq!(
            of(vec![wait(1), contribution]),
            Some((2, "network")),
            "the other waits for its bytes too"
        );
        assert_eq!(of(vec![wait(1), contribution, absent]), Some((3, "compute")));
        assert_eq!(of(vec![wait(1), absent, stalled]), Some((4, "receiver")));
        let only_takes = PeerWait { owes: false, ..wait(5) };
        assert_eq!(of(vec![only_takes]), Some((5, "receiver")));
        let is_not_there = PeerWait { has_called: false, ..only_takes };
        assert_eq!(of(vec![wait(1), contribution, is_not_there]), Some((5, "compute")));
        assert_eq!(of(vec![]), None);
    }
}
