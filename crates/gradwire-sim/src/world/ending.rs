//! How a run ends: how long it may take, who may still talk when all is done, and what it was like.

use super::World;
use crate::plan::OpKind;
use crate::rank::Rank;
use crate::{Summary, Violation};
use gradwire_collectives::OpError;
use gradwire_core::wire::{Header, Kind};
use gradwire_core::Timestamp;
use std::time::Duration;

/// What ranks must not send any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Hush {
    /// They may send anything.
    Nothing,
    /// Everything is done: heartbeats only.
    AllButHeartbeats,
    /// Everybody has left: nothing.
    Everything,
}

impl World {
    /// How long the collectives may take once all faults are over. A second covers the longest back-off (100 ms)
    /// many times; sixteen times the ideal covers incast on small buffers and a rate that has to be found again; a step
    /// that waits for the one before it has three more round trips to find and repair its losses, and so has connecting.
    pub(super) fn liveness_bound(&self) -> Duration {
        let late = self.scenario.start.iter().max().copied().unwrap_or_default();
        let think = (self.scenario.think_max
            + self.scenario.longest_compute()
            + self.scenario.host.wake_late_max * 20)
            * self.scenario.ops.len() as u32;
        late + think
            + self.verdict_time()
            + self.scenario.ideal_time() * 16
            + self.scenario.rounds_time() * 4
            + self.scenario.hello_time() * 4
            + Duration::from_secs(1)
    }

    /// Time in which a silent rank is found out by everybody, where one may be silent.
    fn verdict_time(&self) -> Duration {
        if self.scenario.may_fail() {
            self.scenario.host.peer_timeout * 5 / 4
        } else {
            Duration::ZERO
        }
    }

    /// When all is done and healed, nothing but heartbeats may be sent. A group that failed repeats its verdict for
    /// one peer timeout to those who do not answer.
    pub(super) fn fall_silent(&mut self) -> Result<(), Violation> {
        let healed = (Timestamp::ZERO + self.scenario.healed_at()).max(self.now);
        let repeats = if self.scenario.may_fail() { self.scenario.host.peer_timeout } else { Duration::ZERO };
        self.run_until(healed + SETTLE + self.verdict_time() + repeats)?;
        self.hush = Hush::AllButHeartbeats;
        self.saboteur.on_silence(&mut self.ranks, self.now);
        (0..self.ranks.len()).for_each(|rank| self.drain(rank));
        self.run_until(self.now + self.scenario.host.peer_timeout / 2)
    }

    /// Every rank says goodbye; half a second is what the protocol gives it (docs/protocol.md section 6). Then there
    /// is silence.
    pub(super) fn leave(&mut self) -> Result<(), Violation> {
        self.hush = Hush::Nothing;
        self.leave_group(0..self.scenario.world_size);
        self.run_until(self.now + SETTLE)?;
        // Dedicated servers stay until the last of the others has gone.
        self.leave_group(self.scenario.world_size..self.ranks.len());
        self.run_until(self.now + SETTLE)?;
        let servers = self.scenario.world_size..self.ranks.len();
        let healthy = self.ranks.iter().all(|rank| !rank.crashed && !rank.has_failed);
        if let Some(rank) = servers.into_iter().find(|rank| healthy && !self.ranks[*rank].deserted) {
            return Err(Violation::ServerStays { rank });
        }
        let talking = self.undrained();
        if !talking.is_empty() {
            return Err(Violation::NotDrained { ranks: talking, waited: SETTLE });
        }
        self.hush = Hush::Everything;
        self.run_until(self.now + self.scenario.host.peer_timeout)
    }

    fn leave_group(&mut self, ranks: std::ops::Range<usize>) {
        for rank in ranks {
            if !self.ranks[rank].crashed {
                let local = self.local(rank);
                self.ranks[rank].group.leave(local);
                self.drain(rank);
            }
        }
    }

    fn run_until(&mut self, end: Timestamp) -> Result<(), Violation> {
        while self.queue.next_at().is_some_and(|at| at <= end) {
            self.step(end)?;
        }
        self.now = end;
        Ok(())
    }

    pub(super) fn check_hush(&mut self, rank: usize, bytes: &[u8]) {
        let kind = Header::decode(bytes).map(|(header, _)| header.kind).ok();
        let is_allowed = match self.hush {
            Hush::Nothing => true,
            Hush::AllButHeartbeats => kind == Some(Kind::Ping),
            Hush::Everything => false,
        };
        if !is_allowed {
            let what = kind.map_or_else(|| "an unknown datagram".into(), |kind| format!("{kind:?}"));
            self.report(Violation::NotQuiet { rank, at: self.now, what });
        }
    }

    fn undrained(&self) -> Vec<usize> {
        let talks = |rank: &usize| !self.ranks[*rank].crashed && !self.ranks[*rank].group.is_drained();
        (0..self.ranks.len()).filter(talks).collect()
    }

    pub(super) fn stuck(&self) -> Violation {
        let healed = Timestamp::ZERO + self.scenario.healed_at();
        let pending = self.ranks.iter().enumerate().filter(|(_, rank)| !rank.crashed).map(|(index, rank)| {
            let ops: Vec<usize> = rank.in_flight.iter().map(|(_, op)| *op).collect();
            let due = rank.group.poll_timeout();
            format!(
                "rank {index} in ops {ops:?}, {} not submitted, next {due:?}",
                self.scenario.ops.len() - rank.next_op
            )
        });
        Violation::Stuck { waited: self.now.since(healed), pending: pending.collect::<Vec<_>>().join("; ") }
    }

    pub(super) fn summary(&self) -> Summary {
        let reports = self.ranks.iter().flat_map(|rank| rank.runs.iter().flatten());
        let reports: Vec<_> =
            reports.filter_map(|run| run.finished.as_ref()?.outcome.as_ref().ok()).collect();
        let uncounted =
            reports.iter().flat_map(|report| &report.uncounted).map(|range| range.end - range.start);
        Summary {
            trace_hash: self.trace.hash(),
            network: self.network.stats(),
            op_times: (0..self.scenario.ops.len()).map(|op| self.op_time(op)).collect(),
            op_names: (0..self.scenario.ops.len()).map(|op| self.op_name(op)).collect(),
            verdicts: self.ranks.iter().map(verdict).collect(),
            elems_uncounted: uncounted.sum(),
            bytes_sent: reports.iter().map(|report| report.bytes_sent).sum(),
            bytes_retransmitted: reports.iter().map(|report| report.bytes_retransmitted).sum(),
            path_shares_judged: self.path_watch.judged(),
            deadlines_judged: self.watch.deadlines_judged(),
            repairs_judged: self.repair_watch.judged(),
            agreed: self.ranks.first().and_then(|rank| rank.group.agreed()),
            sabotaged: self.saboteur.has_struck(),
        }
    }

    fn op_time(&self, op: usize) -> Option<Duration> {
        let runs = || self.ranks.iter().filter_map(|rank| rank.runs[op].as_ref());
        let start = runs().map(|run| run.submitted_at).min()?;
        let ends: Option<Vec<Timestamp>> = runs()
            .map(|run| run.finished.as_ref().filter(|end| end.outcome.is_ok()).map(|end| end.at))
            .collect();
        Some(ends?.into_iter().max()?.since(start))
    }

    /// As the first rank that ended it tells it.
    fn op_name(&self, op: usize) -> Option<String> {
        let finished = self.ranks.iter().filter_map(|rank| rank.runs[op].as_ref()?.finished.as_ref());
        finished.filter_map(|end| end.outcome.as_ref().ok()).map(|report| report.collective.clone()).next()
    }

    /// Whether the ranks that take part in a collective all ended it well.
    pub(crate) fn succeeded(&self, op: usize) -> bool {
        let kind = self.scenario.ops[op].kind;
        let involved =
            |rank: usize| !matches!(kind, OpKind::SendReceive { .. }) || self.scenario.ops[op].involves(rank);
        (0..self.scenario.world_size).filter(|rank| involved(*rank)).all(|rank| {
            let finished = self.ranks[rank].runs[op].as_ref().and_then(|run| run.finished.as_ref());
            finished.is_some_and(|finished| finished.outcome.is_ok())
        })
    }
}

/// Whom a rank called lost.
fn verdict(rank: &Rank) -> Option<u32> {
    let outcomes = rank.runs.iter().flatten().filter_map(|run| run.finished.as_ref());
    outcomes.map(|finished| &finished.outcome).find_map(|outcome| match outcome {
        Err(OpError::PeerLost { rank, .. }) => Some(*rank),
        _ => None,
    })
}

/// Longer than any chain of repetitions that is under way when all is done: the longest pause between two is 100 ms, and
/// a goodbye is repeated for 500 ms.
const SETTLE: Duration = Duration::from_secs(1);
