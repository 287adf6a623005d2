//! Whether tolerant transfers wait for more than they may, judged by their packets alone (`auto`, promise 2).
//!
//! Three things are seen on the wire. Nothing of a tolerant transfer is sent again before its receiver has asked. A
//! receiver asks only while it has less than its bound needs. And once the first pass is over and enough is in, the
//! transfer closes as soon as packets that were overtaken cannot come any more; after a deadline the floor is enough. The
//! deadline that a rank measured is in its report: the transfer is judged by it when that is there.
//!
//! What arrived before the receiver began is left out, because it may have been dropped: the watch then
//! believes that less is in than there is, and asks for less.

use crate::plan::OpPlan;
use crate::Violation;
use gradwire_collectives::{Algorithm, DeadlineRule, DeliveryReport};
use gradwire_core::wire::{Flags, Header, Kind, Opening, Reader, StatusBody, TransferState};
use gradwire_core::{Contract, Reliability, Timestamp};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A transfer on the wire: sender, receiver, id.
type Name = (usize, usize, u32);

/// All tolerant transfers of a run whose bound counts only after the first pass.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    transfers: BTreeMap<Name, Transfer>,
    /// The packet that each rank has sent last to each other: transfer, offset.
    latest_sent: BTreeMap<(usize, usize), (u32, u32)>,
    /// The longest that a datagram has taken from one rank to another.
    transit_max: BTreeMap<(usize, usize), Duration>,
    /// When new data has come last from one rank to another, of whatever transfer.
    data_at: BTreeMap<(usize, usize), Timestamp>,
    has_many_paths: bool,
    /// Ranks that call.
    world_size: usize,
    /// Transfers that were held against the deadline of their receiver's report.
    deadlines_judged: u64,
}

/// What is unknown, beside the network, about when a rank speaks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unsteady {
    /// How late its timers are, and its words after them.
    pub(crate) late_max: Duration,
    /// By how much hosts may have made the round trips longer that it measured.
    pub(crate) in_hosts: Duration,
}

#[derive(Debug)]
struct Transfer {
    op: usize,
    /// Bytes that the bound needs, and that a deadline needs.
    needed: u64,
    floor: u64,
    deadline: Option<Duration>,
    offsets: BTreeSet<u32>,
    received: u64,
    first_at: Option<Timestamp>,
    latest_at: Timestamp,
    first_pass_over_at: Option<Timestamp>,
    bound_met_at: Option<Timestamp>,
    floor_met_at: Option<Timestamp>,
    was_asked: bool,
    closed: Option<Closed>,
}

/// How it ended.
#[derive(Clone, Copy, Debug)]
struct Closed {
    at: Timestamp,
    /// What its receiver may have waited for overtaken packets, and been late.
    slack: Duration,
    late_max: Duration,
    /// When anything new had come last from its sender.
    data_at: Timestamp,
}

impl Watch {
    /// Nothing seen yet.
    pub(crate) fn new(paths: u8, world_size: usize) -> Self {
        Self { has_many_paths: paths > 1, world_size, ..Self::default() }
    }

    /// A rank sends the first packets of a transfer that belongs to collective `op`.
    pub(crate) fn on_data_sent(
        &mut self,
        now: Timestamp,
        (from, to): (usize, usize),
        (op, plan): (usize, &OpPlan),
        header: &Header,
        body: &[u8],
    ) -> Result<(), Violation> {
        let policy = &plan.policy;
        let may_ask = policy.recovery == Reliability::Tolerant && policy.critical_chunks == 0;
        if !policy.after_first_pass || policy.loss_bound <= 0.0 || !may_ask {
            return Ok(());
        }
        let name = (from, to, header.transfer.0);
        if header.flags.contains(Flags::OPENING) && !self.transfers.contains_key(&name) {
            if let Ok(opening) = Opening::decode(&mut Reader::new(body)) {
                let bound = bound_of(plan, &opening, self.world_size);
                self.transfers.insert(name, Transfer::new((op, plan), bound, opening.total_bytes));
            }
        }
        // A copy of the latest packet is no repair: it tries whether a path has healed.
        let latest = (header.transfer.0, header.offset);
        let is_again = header.flags.contains(Flags::RETRANSMITTED);
        let is_copy = self.latest_sent.insert((from, to), latest) == Some(latest);
        match self.transfers.get(&name) {
            Some(transfer) if is_again && !is_copy && !transfer.was_asked => {
                Err(Violation::RepairedUnasked { op, from, to, at: now })
            }
            _ => Ok(()),
        }
    }

    /// A receiver speaks about a transfer.
    pub(crate) fn on_status_sent(
        &mut self,
        now: Timestamp,
        (receiver, sender): (usize, usize),
        header: &Header,
        status: &StatusBody,
        unsteady: Unsteady,
    ) -> Result<(), Violation> {
        let slack = self.reorder_slack_max(receiver, sender) + unsteady.in_hosts;
        let data_at = self.data_at.get(&(sender, receiver)).copied().unwrap_or_default();
        let Some(transfer) = self.transfers.get_mut(&(sender, receiver, header.transfer.0)) else {
            return Ok(());
        };
        let op = transfer.op;
        if status.state == TransferState::Closed {
            if transfer.closed.is_some() {
                return Ok(());
            }
            let closed = Closed { at: now, slack, late_max: unsteady.late_max, data_at };
            transfer.closed = Some(closed);
            return match transfer.close_limit(&closed).map(|at| at + unsteady.late_max) {
                Some(limit) if now > limit => {
                    Err(Violation::WaitedTooLong { op, from: sender, to: receiver, at: now, limit })
                }
                _ => Ok(()),
            };
        }
        let asks = status.wanted_chunks > 0;
        transfer.was_asked |= asks;
        if asks && transfer.received >= transfer.needed {
            return Err(Violation::AskedForTooMuch { op, from: sender, to: receiver, at: now });
        }
        Ok(())
    }

    /// Rank `to` has ended collective `op` and tells which deadlines it had: none of its transfers may have gone on beyond
    /// its own, as [`Transfer::deadline_limit`] has it.
    pub(crate) fn on_report(
        &mut self,
        (op, to): (usize, usize),
        report: &DeliveryReport,
    ) -> Result<(), Violation> {
        if ["ring", "weighted"].iter().any(|name| report.collective.contains(name)) {
            // What it tells is the sum over its steps, or portions.
            return Ok(());
        }
        for ((from, receiver, _), transfer) in &self.transfers {
            if transfer.op != op || *receiver != to {
                continue;
            }
            let told = report.peers.iter().find(|peer| peer.rank as usize == *from);
            let Some((deadline, closed)) = told.and_then(|peer| peer.deadline).zip(transfer.closed) else {
                continue;
            };
            self.deadlines_judged += 1;
            let kept = transfer.deadline_limit(deadline, &closed).map(|at| at + closed.late_max);
            let is_kept = kept.is_none_or(|limit| closed.at <= limit);
            // What the call asked for binds whatever was measured.
            if !is_kept || transfer.deadline.is_some_and(|most| deadline > most) {
                let (from, at) = (*from, closed.at);
                return Err(Violation::PastDeadline { op, from, to, at, deadline });
            }
        }
        Ok(())
    }

    /// How many transfers were judged by the deadline that their receiver told.
    pub(crate) const fn deadlines_judged(&self) -> u64 {
        self.deadlines_judged
    }

    /// A datagram reaches its receiver. `has_begun`: whether the receiver has begun a collective.
    pub(crate) fn on_delivered(
        &mut self,
        now: Timestamp,
        sent_at: Timestamp,
        (from, to): (usize, usize),
        bytes: &[u8],
        has_begun: impl Fn(usize) -> bool,
    ) {
        let longest = self.transit_max.entry((from, to)).or_default();
        *longest = (*longest).max(now.since(sent_at));
        let Ok((header, body)) = Header::decode(bytes) else { return };
        if !matches!(header.kind, Kind::Data | Kind::Probe) {
            return;
        }
        if header.kind == Kind::Data {
            self.data_at.insert((from, to), now);
        }
        let Some(transfer) = self.transfers.get_mut(&(from, to, header.transfer.0)) else { return };
        if !has_begun(transfer.op) {
            return;
        }
        if header.flags.contains(Flags::ALL_SENT) {
            transfer.first_pass_over_at.get_or_insert(now);
        }
        if header.kind == Kind::Data {
            let opening = if header.flags.contains(Flags::OPENING) { OPENING_BYTES } else { 0 };
            transfer.on_data(now, header.offset, body.len().saturating_sub(opening) as u64);
        }
    }

    /// The protocol waits for overtaken packets for half a smoothed round trip, and as much longer as the slower path
    /// takes. No round trip that it measured can be longer than the two longest ways seen, and no path's lead longer than
    /// the longest way here; the 500 us are the protocol's least.
    fn reorder_slack_max(&self, receiver: usize, sender: usize) -> Duration {
        let way = |pair| self.transit_max.get(&pair).copied().unwrap_or_default();
        let (there, back) = (way((receiver, sender)), way((sender, receiver)));
        let skew_max = if self.has_many_paths { back } else { Duration::ZERO };
        ((there + back) / 2).max(Duration::from_micros(500)) + skew_max
    }
}

impl Transfer {
    fn new((op, plan): (usize, &OpPlan), loss_bound: f32, total_bytes: u64) -> Self {
        let fixed = match plan.policy.deadline {
            DeadlineRule::Fixed(deadline) => Some(deadline),
            _ => None,
        };
        let deadline = fixed.into_iter().chain(plan.policy.deadline_max).min();
        Self {
            op,
            needed: Contract::needed(total_bytes, 1.0 - loss_bound),
            floor: Contract::needed(total_bytes, plan.policy.floor),
            deadline,
            offsets: BTreeSet::new(),
            received: 0,
            first_at: None,
            latest_at: Timestamp::ZERO,
            first_pass_over_at: None,
            bound_met_at: None,
            floor_met_at: None,
            was_asked: false,
            closed: None,
        }
    }

    fn on_data(&mut self, now: Timestamp, offset: u32, bytes: u64) {
        if self.closed.is_some() || !self.offsets.insert(offset) {
            return;
        }
        self.received += bytes;
        self.first_at.get_or_insert(now);
        self.latest_at = now;
        if self.received >= self.needed {
            self.bound_met_at.get_or_insert(now);
        }
        if self.received >= self.floor {
            self.floor_met_at.get_or_insert(now);
        }
    }

    /// When it must be over; `None` while it may go on.
    fn close_limit(&self, closed: &Closed) -> Option<Timestamp> {
        let quiet_since = self.latest_at.max(self.first_pass_over_at?);
        let by_deadline = self.deadline.and_then(|deadline| self.deadline_limit(deadline, closed));
        let by_bound = self.bound_met_at.map(|at| at.max(quiet_since + closed.slack));
        by_bound.into_iter().chain(by_deadline).min()
    }

    /// When a deadline must have ended it: from then on only the floor is waited for, and packets that were overtaken, or
    /// for a sender that has not sent everything until it has been silent for a quarter of the deadline.
    fn deadline_limit(&self, deadline: Duration, closed: &Closed) -> Option<Timestamp> {
        let silent_at = match self.first_pass_over_at {
            Some(over) => over + closed.slack,
            None => self.latest_at.max(closed.data_at) + closed.slack.max(deadline / 4),
        };
        Some((self.first_at? + deadline).max(self.floor_met_at?).max(silent_at))
    }
}

/// What a transfer may lose.
fn bound_of(plan: &OpPlan, opening: &Opening, world_size: usize) -> f32 {
    // No other collective that may lose anything has an algorithm.
    let is_ring = opening.descriptor[3] & !ROTATED == Algorithm::Ring as u8;
    if is_ring {
        ring_bound(plan.policy.loss_bound, world_size)
    } else {
        plan.policy.loss_bound
    }
}

/// What of a loss bound holds for each transfer of a ring: among more than four ranks as many times less.
pub(crate) fn ring_bound(loss_bound: f32, world_size: usize) -> f32 {
    loss_bound * 4.0 / world_size.max(4) as f32
}

/// Beside the schedule in its byte of the descriptor.
const ROTATED: u8 = 128;
const OPENING_BYTES: usize = gradwire_core::wire::OPENING_BYTES;
