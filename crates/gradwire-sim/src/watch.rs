//! Whether tolerant transfers wait for more than they may, judged by their packets alone (`auto`, promise 2).
//!
//! Three things are seen on the wire. Nothing of a tolerant transfer is sent again before its receiver has asked. A
//! receiver asks only while it has less than its bound needs. And once the first pass is over and enough is in, the
//! transfer closes as soon as packets that were overtaken cannot come any more; after a deadline the floor is enough.
//!
//! What arrived before the receiver began is left out, because it may have been dropped: the watch then
//! believes that less is in than there is, and asks for less.

use crate::plan::OpPlan;
use crate::Violation;
use gradwire_collectives::DeadlineRule;
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
    has_many_paths: bool,
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
    is_closed: bool,
}

impl Watch {
    /// Nothing seen yet.
    pub(crate) fn new(paths: u8) -> Self {
        Self { has_many_paths: paths > 1, ..Self::default() }
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
                self.transfers.insert(name, Transfer::new(op, plan, opening.total_bytes));
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

    /// A receiver speaks about a transfer. `late_max`: how late its timers may be; `None` when that is not known.
    pub(crate) fn on_status_sent(
        &mut self,
        now: Timestamp,
        (receiver, sender): (usize, usize),
        header: &Header,
        status: &StatusBody,
        late_max: Option<Duration>,
    ) -> Result<(), Violation> {
        let slack = self.reorder_slack_max(receiver, sender);
        let Some(transfer) = self.transfers.get_mut(&(sender, receiver, header.transfer.0)) else {
            return Ok(());
        };
        let op = transfer.op;
        if status.state == TransferState::Closed {
            let limit = transfer.close_limit(slack).zip(late_max).map(|(at, late)| at + late);
            return match (std::mem::replace(&mut transfer.is_closed, true), limit) {
                (false, Some(limit)) if now > limit => {
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
    fn new(op: usize, plan: &OpPlan, total_bytes: u64) -> Self {
        let fixed = match plan.policy.deadline {
            DeadlineRule::Fixed(deadline) => Some(deadline),
            _ => None,
        };
        let deadline = fixed.into_iter().chain(plan.policy.deadline_max).min();
        Self {
            op,
            needed: Contract::needed(total_bytes, 1.0 - plan.policy.loss_bound),
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
            is_closed: false,
        }
    }

    fn on_data(&mut self, now: Timestamp, offset: u32, bytes: u64) {
        if self.is_closed || !self.offsets.insert(offset) {
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
    fn close_limit(&self, slack: Duration) -> Option<Timestamp> {
        let quiet_since = self.latest_at.max(self.first_pass_over_at?);
        let by_deadline = self.deadline.and_then(|deadline| {
            Some((self.first_at? + deadline).max(self.floor_met_at?).max(quiet_since + slack))
        });
        let by_bound = self.bound_met_at.map(|at| at.max(quiet_since + slack));
        by_bound.into_iter().chain(by_deadline).min()
    }
}

const OPENING_BYTES: usize = gradwire_core::wire::OPENING_BYTES;
