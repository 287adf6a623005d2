//! When what happened in the latest collectives, on this process's clock, and what that clock is.

use crate::stats::WaitingStats;
use crate::tally::CallRecord;
use gradwire_collectives::PeerDelivery;
use gradwire_core::Timestamp;
use serde::Serialize;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The latest collectives of one group.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Timeline {
    /// What the times count from.
    pub clock: Clock,
    /// When this was: nanoseconds since the start of the clock.
    pub asked_ns: u64,
    /// The oldest collective that has not ended; `None`: there is none.
    pub waiting: Option<WaitingStats>,
    /// Oldest first; all times in nanoseconds since the start of the clock.
    pub calls: Vec<CallTimes>,
}

/// What zero of an engine's clock is on the clocks of its host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Clock {
    /// On the monotonic clock, nanoseconds: the same for all processes of a host.
    pub monotonic_ns: u64,
    /// Since 1970, nanoseconds: as good as the host's clock is set.
    pub wall_ns: u64,
}

impl Clock {
    /// Of an engine whose clock counts from then, a moment ago.
    pub(crate) fn at(origin: Instant) -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: one live structure, which the call fills.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
        let since = u64::try_from(origin.elapsed().as_nanos()).unwrap_or(0);
        let monotonic_ns = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let wall_ns = u64::try_from(wall.as_nanos()).unwrap_or(u64::MAX);
        Self { monotonic_ns: monotonic_ns.saturating_sub(since), wall_ns: wall_ns.saturating_sub(since) }
    }
}

/// One collective that has ended well.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CallTimes {
    /// Name, with the schedule of an all-reduce.
    pub collective: String,
    /// Preset of its policy, `exact` without one.
    pub preset: &'static str,
    /// Number in the group's sequence, or of another call; see [`gradwire_collectives::DeliveryReport::sequence`].
    pub sequence: u64,
    /// Whether it is that of the group's sequence, of which each epoch has one.
    pub in_sequence: bool,
    /// Epoch of the group under which it ended; 0 is the first.
    pub epoch: u64,
    /// Elements of the result.
    pub elems: u64,
    /// When this rank called.
    pub submitted_ns: u64,
    /// When it ended.
    pub ended_ns: u64,
    /// When the last rank called.
    pub all_called_ns: u64,
    /// Share of the expected contributions that did not arrive.
    pub lost_share: f64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes that arrived.
    pub bytes_received: u64,
    /// What ended its stages; empty where nothing was received.
    pub reduce_ended_by: &'static str,
    /// See `reduce_ended_by`.
    pub gather_ended_by: &'static str,
    /// Who sent contributions.
    pub reduce: Vec<PeerTimes>,
    /// Who sent what is kept as it is.
    pub gather: Vec<PeerTimes>,
    /// Rank, and when it had taken what this rank sent it first.
    pub taken_ns: Vec<(u32, u64)>,
}

/// What one peer sent in one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct PeerTimes {
    /// The sender.
    pub rank: u32,
    /// When it called, by what its packets say, late by what they took to come here; `None`: they do not.
    pub called_ns: Option<u64>,
    /// When its first packet came.
    pub first_ns: u64,
    /// When the last of its transfers ended.
    pub ended_ns: u64,
    /// What ended it.
    pub ended_by: &'static str,
    /// Elements that arrived.
    pub elems_received: u64,
    /// Elements that were expected.
    pub elems_expected: u64,
}

impl From<&CallRecord> for CallTimes {
    fn from(record: &CallRecord) -> Self {
        let report = &record.report;
        Self {
            collective: report.collective.clone(),
            preset: record.preset,
            sequence: report.sequence,
            in_sequence: report.in_sequence,
            epoch: record.epoch,
            elems: report.elems,
            submitted_ns: report.submitted_at.as_nanos(),
            ended_ns: (report.submitted_at + report.elapsed).as_nanos(),
            all_called_ns: (report.submitted_at + report.compute_wait).as_nanos(),
            lost_share: report.lost_share(),
            bytes_sent: report.bytes_sent,
            bytes_received: report.bytes_received,
            reduce_ended_by: report.reduce_ended_by,
            gather_ended_by: report.gather_ended_by,
            reduce: report.peers.iter().map(PeerTimes::from).collect(),
            gather: report.sources.iter().map(PeerTimes::from).collect(),
            taken_ns: report.takings.iter().map(|peer| (peer.rank, peer.taken_at.as_nanos())).collect(),
        }
    }
}

impl From<&PeerDelivery> for PeerTimes {
    fn from(peer: &PeerDelivery) -> Self {
        Self {
            rank: peer.rank,
            called_ns: peer.called_at.map(Timestamp::as_nanos),
            first_ns: peer.began_at.as_nanos(),
            ended_ns: peer.ended_at.as_nanos(),
            ended_by: peer.closed_by,
            elems_received: peer.elems_received,
            elems_expected: peer.elems_expected,
        }
    }
}
