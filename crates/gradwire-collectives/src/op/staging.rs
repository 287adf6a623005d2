//! What an operation copies before it sends it.
//!
//! Small exact sends are copied first. Then nothing of the caller's is read any more, and the call can return when
//! its result is there instead of half a round trip later, when the last send is confirmed: for small messages that is a
//! third of the latency. Only where the result proves that everybody has joined: a send alone waits for its receiver. Of an
//! all-reduce that is above all the result, also of one whose contributions may be lost.

use super::Op;
use crate::memory::Side;
use crate::schedules::{Loss, Stage};
use crate::{Collective, Policy, Request};
use std::ops::Range;

/// Where the copy of a send is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Copied {
    /// From this byte of the operation's staging on.
    Staged(usize),
    /// The schedule has made it, among the contributions that it keeps apart.
    InRows,
}

/// How much of an operation's sends is copied.
#[derive(Clone, Copy, Debug)]
pub(super) struct StagedMax {
    contributions: usize,
    results: usize,
}

impl StagedMax {
    pub(super) fn of(request: &Request) -> Self {
        let (policy, joined) = (&request.policy, proves_that_all_joined(&request.collective));
        let is_small = request.bucket_bytes() <= STAGED_BUCKET_BYTES_MAX;
        let results = match joined && is_small && !policy.may_lose(Stage::Gather) {
            true => STAGED_BYTES_MAX + STAGED_BUCKET_BYTES_MAX,
            false => 0,
        };
        let contributions = match request.collective {
            _ if !joined || !policy.is_exact() => 0,
            Collective::AllReduce { .. } => STAGED_BYTES_MAX,
            // There is no result to confirm them with.
            _ if is_small => STAGED_BUCKET_BYTES_MAX,
            _ => STAGED_BYTES_MAX,
        };
        Self { contributions, results }
    }

    /// What it allows a server, once it knows the policy.
    pub(super) fn follow(&mut self, policy: &Policy) {
        self.contributions = if policy.is_exact() { self.contributions } else { 0 };
        self.results = if policy.may_lose(Stage::Gather) { 0 } else { self.results };
    }

    /// The call measures how long its stages take, until they are confirmed.
    pub(super) const fn measure(&mut self) {
        self.results = 0;
    }

    /// Nothing came of a transfer: its sender may not have called yet, and is waited for as before.
    pub(super) const fn stop(&mut self) {
        (self.contributions, self.results) = (0, 0);
    }

    const fn for_sends(self, loss: Loss) -> usize {
        match loss {
            Loss::In(Stage::Gather) => self.results,
            Loss::In(Stage::Reduce) | Loss::Never => self.contributions,
        }
    }
}

/// Whether the result of a collective can be there only when every rank has called it.
fn proves_that_all_joined(collective: &Collective) -> bool {
    matches!(
        collective,
        Collective::AllReduce { .. }
            | Collective::AllGather
            | Collective::ReduceScatter
            | Collective::Barrier
    )
}

impl Op {
    /// Copies the bytes of a send, if they are few. One copy serves all peers that are sent the same.
    pub(super) fn stage(&mut self, side: Side, range: &Range<usize>, loss: Loss) -> Option<Copied> {
        if side == Side::Rows {
            self.report.bytes_sent += range.len() as u64;
            return Some(Copied::InRows);
        }
        let (end, bytes_max) = (self.staging.len(), self.stages_up_to.for_sends(loss));
        let is_there = self.staged.as_ref().is_some_and(|staged| *staged == (side, range.clone()));
        let room = if is_there { 0 } else { range.len() };
        // Where nothing may be copied an empty send is not either: it waits for its receiver.
        if side == Side::Settings || bytes_max == 0 || end + room > bytes_max {
            return None;
        }
        self.report.bytes_sent += range.len() as u64;
        if is_there {
            return Some(Copied::Staged(end - range.len()));
        }
        self.staging.extend_from_slice(self.memory.view(side).part(range).as_slice());
        self.staged = Some((side, range.clone()));
        Some(Copied::Staged(end))
    }
}

/// Contributions are confirmed with the result at the latest, unless that confirmation is lost: not worth much copying.
const STAGED_BYTES_MAX: usize = 16 << 10;
/// Results are confirmed half a round trip after they are there. Copying a part of a larger bucket costs about what that does in a rack.
const STAGED_BUCKET_BYTES_MAX: usize = 256 << 10;
