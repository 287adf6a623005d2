//! The calls of a group that goes on without lost ranks: what is needed to make one again, and the results that a survivor may
//! have missed.
//!
//! Counted are those whose result others can take over (all-reduce, broadcast, barrier): their number names them on all ranks alike. The others are
//! [`rows`]'s.
//!
//! A result is kept until every member must have it. A call starts only when all calls that lie more than a window before it
//! have ended here; so whoever holds a result of it, to which all members contributed, knows that theirs have ended too. A call with a
//! root ends without most of the others, so more windows pass until then ([`windows_until_all_have_ended`]). A result that
//! did not need everybody (a lossy gather stage, roots that take turns) may be forgotten too soon: then who missed it gets a typed error. A call
//! that was refused here, or whose result came from another rank, says nothing of what the others hold, and nothing is forgotten for it.

use crate::in_flight::InFlight;
use gradwire_collectives::{Collective, DeliveryReport, ReduceOp, Request};
use gradwire_core::Timestamp;
use rows::Rows;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

mod rows;

pub(crate) use rows::InFlight as RowsInFlight;

/// Bytes of results that are kept, and that calls in flight may have: a few large buckets.
const WINDOW_BYTES: u64 = 256 << 20;
/// As many calls as a group has in flight.
const WINDOW_CALLS: u64 = 64;

/// A result and the epoch under which it came about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) bytes: Vec<u8>,
    pub(crate) epoch: u64,
}

/// What a call may overwrite, as it was when it was made. Copied on the caller's thread.
#[derive(Debug, Default)]
pub(crate) struct Before {
    output: Vec<u8>,
    residual: Vec<u8>,
}

impl Before {
    /// Of a call that can be made again, here or by its caller: what it sums up in the caller's own values is kept.
    pub(crate) fn of(request: &Request) -> Self {
        let is_in_place = match request.collective {
            Collective::AllReduce { .. } => true,
            Collective::Reduce { .. } | Collective::ReduceScatter => request.input.overlaps(&request.output),
            _ => return Self::default(),
        };
        let output = if is_in_place { request.output.as_slice().to_vec() } else { Vec::new() };
        Self { output, residual: request.residual.as_slice().to_vec() }
    }

    fn restore(&self, request: &mut Request) {
        for (view, bytes) in [(&mut request.output, &self.output), (&mut request.residual, &self.residual)] {
            if !bytes.is_empty() {
                view.as_mut_slice().copy_from_slice(bytes);
            }
        }
    }
}

/// A call that has not ended.
pub(crate) struct Pending {
    pub(crate) request: Request,
    pub(crate) in_flight: InFlight,
    pub(crate) submitted: Timestamp,
    before: Before,
    was_started: bool,
}

impl Pending {
    /// When its timeout passes, however often it is made again.
    pub(crate) fn deadline(&self) -> Timestamp {
        self.submitted + self.request.timeout
    }

    /// A request that is to be started, with what the caller gave.
    fn start(&mut self) -> Box<Request> {
        self.restore();
        self.was_started = true;
        Box::new(self.request.clone())
    }

    /// Gives the caller back what it gave, where an attempt may have overwritten it.
    fn restore(&mut self) {
        if self.was_started {
            self.before.restore(&mut self.request);
        }
    }

    /// What is known of a call that ends with the result of another rank: of what was lost on its way nothing.
    pub(crate) fn taken_over(&self, number: u64, now: Timestamp) -> DeliveryReport {
        DeliveryReport {
            collective: "taken over".to_owned(),
            sequence: number,
            submitted_at: self.submitted,
            elapsed: now.since(self.submitted),
            replicas_identical: !self.request.policy.gather.may_lose(),
            ..DeliveryReport::default()
        }
    }
}

enum State {
    Pending(Box<Pending>),
    /// `None`: no other rank has a use for it, or it is no longer needed.
    Ended(Option<Held>),
}

struct Kept {
    state: State,
    /// Where it was started last.
    start: Start,
    /// Calls that are not counted and were made between the counted one before it and this one.
    rows_before: u64,
    /// Bytes of all-reduces and broadcasts up to this call, itself included: the same on all ranks, because they make the same calls.
    bytes_so_far: u64,
}

/// Where in the order of an epoch's calls one was started, counted or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Start {
    /// It was not, or what is known of it is of no use to others.
    Never,
    /// So many calls of this epoch had been started before.
    At { epoch: u64, place: u64 },
    /// It is forgotten here.
    Unknown,
}

/// What a call is known by on this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CallId {
    /// Its number, the same on all ranks.
    Counted(u64),
    Row(u64),
}

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Calls {
    rows: Rows,
    /// Of what was started last, the epoch and how many calls have been started in it.
    latest: (u64, u64),
    /// The present epoch.
    epoch: u64,
    kept: VecDeque<Kept>,
    /// Number of the first of them.
    first: u64,
    bytes_so_far: u64,
    /// The next one to start in the present epoch.
    next_start: u64,
    /// Every call before it has ended.
    below: u64,
    /// Results of calls that this rank has not made yet.
    early: BTreeMap<u64, Held>,
    /// Calls before it were in flight somewhere when the present epoch began.
    changed_at: u64,
    /// Calls that ended well somewhere, and whose result nobody has.
    orphans: Vec<u64>,
    /// Calls before it were made before this rank joined.
    joined_at: u64,
}

/// What is to be done about the next call.
pub(crate) enum Next {
    Start(CallId, Box<Request>),
    /// The others have its result.
    Take(u64, Held),
    /// It cannot be finished among those who are left.
    Refuse(CallId),
}

impl Calls {
    /// This rank joins: its first call has this number.
    pub(crate) fn begin_at(&mut self, number: u64) {
        (self.first, self.next_start, self.below, self.joined_at) = (number, number, number, number);
    }

    /// Whether it was made before this rank joined.
    pub(crate) fn has_no_part_in(&self, number: u64) -> bool {
        number < self.joined_at
    }

    /// Takes a call. A counted one has the number that was [`Calls::next`].
    pub(crate) fn add(
        &mut self,
        request: Request,
        in_flight: InFlight,
        before: Before,
        now: Timestamp,
    ) -> CallId {
        if let Collective::AllReduce { .. } | Collective::Broadcast { .. } = request.collective {
            self.bytes_so_far += request.output.len() as u64;
        }
        let number = self.next();
        let is_counted = is_same_everywhere(&request.collective);
        let pending = Pending { request, in_flight, submitted: now, before, was_started: false };
        if !is_counted {
            return CallId::Row(self.rows.add(number, pending));
        }
        let (state, bytes_so_far) = (State::Pending(Box::new(pending)), self.bytes_so_far);
        let rows_before = self.rows.made_in(number);
        self.kept.push_back(Kept { state, start: Start::Never, rows_before, bytes_so_far });
        CallId::Counted(number)
    }

    /// Number of the next counted call that is made.
    pub(crate) fn next(&self) -> u64 {
        self.first + self.kept.len() as u64
    }

    /// Every call before it has ended.
    pub(crate) fn below(&self) -> u64 {
        self.below
    }

    /// These calls ended somewhere, and nobody can give their results away; and which rows were in flight.
    pub(crate) fn told(&mut self, orphans: Vec<u64>, rows: RowsInFlight) {
        self.orphans = orphans;
        self.rows.restart(rows);
    }

    /// In this epoch all that have not ended are to be started again; those before `changed_at` were in flight somewhere.
    pub(crate) fn restart(&mut self, epoch: u64, changed_at: u64) {
        (self.epoch, self.next_start, self.changed_at) = (epoch, self.below, changed_at);
    }

    /// What is to be done next; nothing while the window is full.
    pub(crate) fn next_to_start(&mut self, is_member: impl Fn(u32) -> bool, is_whole: bool) -> Option<Next> {
        loop {
            if let Some((id, was_in_flight, row)) = self.rows.next_to_start(self.next_start) {
                let id = CallId::Row(id);
                if !can_go_on(&row.request, is_member, is_whole, was_in_flight) {
                    return Some(Next::Refuse(id));
                }
                let request = row.start();
                self.take_place();
                return Some(Next::Start(id, request));
            }
            let number = self.next_start;
            if number >= self.next() || self.window_is_full(number) {
                return None;
            }
            self.next_start += 1;
            let was_in_flight = number < self.changed_at;
            let early = self.early.remove(&number);
            let is_orphan = self.orphans.contains(&number);
            let State::Pending(pending) = &mut self.at(number)?.state else { continue };
            if let Some(held) = early {
                return Some(Next::Take(number, held));
            }
            let id = CallId::Counted(number);
            if is_orphan || !can_go_on(&pending.request, is_member, is_whole, was_in_flight) {
                return Some(Next::Refuse(id));
            }
            let request = pending.start();
            let start = self.take_place();
            self.at(number)?.start = start;
            return Some(Next::Start(id, request));
        }
    }

    fn take_place(&mut self) -> Start {
        let (epoch, place) = if self.latest.0 == self.epoch { self.latest } else { (self.epoch, 0) };
        self.latest = (epoch, place + 1);
        Start::At { epoch, place }
    }

    /// Of what was started last, the epoch and how many calls have been started in it.
    pub(crate) fn latest(&self) -> (u64, u64) {
        self.latest
    }

    /// Where a call was started.
    pub(crate) fn start_of(&self, number: u64) -> Start {
        match self.get(number) {
            Some(kept) => kept.start,
            None if number < self.first => Start::Unknown,
            None => Start::Never,
        }
    }

    /// How many that are not counted were made between the counted call before this one and this one.
    pub(crate) fn rows_before(&self, number: u64) -> u64 {
        self.get(number).map_or_else(|| self.rows.made_in(number), |kept| kept.rows_before)
    }

    /// How much of its timeout a call has left.
    pub(crate) fn time_left(&self, id: CallId, now: Timestamp) -> Duration {
        let pending = match id {
            CallId::Row(id) => self.rows.get(id),
            CallId::Counted(number) => match self.get(number).map(|kept| &kept.state) {
                Some(State::Pending(pending)) => Some(&**pending),
                _ => None,
            },
        };
        pending.map_or(Duration::ZERO, |pending| pending.deadline().max(now) - now)
    }

    /// Calls that have not ended, and have not been started in the present epoch where it runs; one that is not counted with the number of
    /// the next counted one.
    pub(crate) fn waiting(&self, is_running: bool) -> impl Iterator<Item = (u64, &Pending)> {
        let from = if is_running { self.next_start } else { self.below }.max(self.first);
        let counted = (from..self.next()).filter_map(|number| match &self.get(number)?.state {
            State::Pending(pending) => Some((number, &**pending)),
            State::Ended(_) => None,
        });
        counted.chain(self.rows.waiting(is_running))
    }

    /// It has ended among so many members, well or not; what is left of it. `epoch`: its result is to be kept, as that of this epoch.
    pub(crate) fn end(&mut self, id: CallId, epoch: Option<u64>, members: usize) -> Option<Pending> {
        let number = match id {
            CallId::Row(id) => return self.rows.end(id),
            CallId::Counted(number) => number,
        };
        let pending = self.end_here(number, epoch)?;
        if epoch.is_some() {
            self.forget(number, windows_until_all_have_ended(&pending.request.collective, members));
        }
        Some(pending)
    }

    /// It cannot be finished: its caller has its memory back as it was.
    pub(crate) fn refuse(&mut self, id: CallId) -> Option<Pending> {
        let number = match id {
            CallId::Row(id) => {
                let mut pending = self.rows.end(id)?;
                pending.restore();
                return Some(pending);
            }
            CallId::Counted(number) => number,
        };
        let State::Pending(pending) = &mut self.at(number)?.state else { return None };
        pending.restore();
        self.end_here(number, None)
    }

    fn end_here(&mut self, number: u64, epoch: Option<u64>) -> Option<Pending> {
        let kept = self.at(number)?;
        let State::Pending(_) = kept.state else { return None };
        let State::Pending(mut pending) = std::mem::replace(&mut kept.state, State::Ended(None)) else {
            return None;
        };
        if let Some(epoch) = epoch {
            let mut bytes = std::mem::take(&mut pending.before.output);
            bytes.clear();
            bytes.extend_from_slice(pending.request.output.as_slice());
            kept.state = State::Ended(Some(Held { bytes, epoch }));
        }
        while matches!(self.get(self.below).map(|kept| &kept.state), Some(State::Ended(_))) {
            self.below += 1;
        }
        Some(*pending)
    }

    /// It ends with what another rank has: copied to where the caller wants it. `None`: it does not fit.
    pub(crate) fn end_with(&mut self, number: u64, held: &Held) -> Option<Pending> {
        let State::Pending(pending) = &mut self.at(number)?.state else { return None };
        pending.restore();
        let output = pending.request.output.as_mut_slice();
        if output.len() != held.bytes.len() {
            return None;
        }
        output.copy_from_slice(&held.bytes);
        self.end_here(number, Some(held.epoch))
    }

    /// Keeps the result of a call that this rank has not made yet.
    pub(crate) fn hold(&mut self, number: u64, held: Held) {
        if number >= self.next() {
            self.early.insert(number, held);
        }
    }

    /// Whether it has been made and has not ended.
    pub(crate) fn is_pending(&self, number: u64) -> bool {
        matches!(self.get(number).map(|kept| &kept.state), Some(State::Pending(_)))
    }

    /// Whether it has ended here, or its result is here.
    pub(crate) fn has_ended(&self, number: u64) -> bool {
        number < self.below
            || self.early.contains_key(&number)
            || matches!(self.get(number).map(|kept| &kept.state), Some(State::Ended(_)))
    }

    /// Its result, if it is kept.
    pub(crate) fn held(&self, number: u64) -> Option<&Held> {
        match self.get(number).map(|kept| &kept.state) {
            Some(State::Ended(held)) => held.as_ref(),
            _ => self.early.get(&number),
        }
    }

    /// Ends everything.
    pub(crate) fn drain(&mut self) -> Vec<Pending> {
        let numbers: Vec<u64> = (self.first..self.next()).collect();
        let counted: Vec<Pending> =
            numbers.into_iter().filter_map(|number| self.end_here(number, None)).collect();
        counted.into_iter().chain(self.rows.drain()).collect()
    }

    fn get(&self, number: u64) -> Option<&Kept> {
        self.kept.get(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    fn at(&mut self, number: u64) -> Option<&mut Kept> {
        self.kept.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    fn window_is_full(&self, number: u64) -> bool {
        self.below < number && self.below < self.window_of(number)
    }

    /// The first call that lies in the window of this one: those before have ended on every rank that starts it.
    fn window_of(&self, number: u64) -> u64 {
        let bytes = self.get(number).map_or(0, |kept| kept.bytes_so_far);
        let is_before = |kept: &Kept| bytes.saturating_sub(kept.bytes_so_far) > WINDOW_BYTES;
        let oldest = self.first + self.kept.partition_point(is_before) as u64;
        oldest.max(number.saturating_sub(WINDOW_CALLS - 1))
    }

    /// What lies so many windows before a call that has ended has ended everywhere.
    fn forget(&mut self, ended: u64, windows: u32) {
        let mut kept_from = self.window_of(ended);
        for _ in 1..windows {
            kept_from = self.window_of(kept_from.saturating_sub(1));
        }
        while self.first < self.below.min(ended).min(kept_from) {
            self.kept.pop_front();
            self.first += 1;
        }
    }
}

/// Who ends a call knows that every rank which contributed has started it, and with that ended all a window before. Of a call with a root
/// that may be the root alone. It has ended one a window earlier, and so knows as much of the next ranks of the tree of a broadcast, these of
/// those after them: a window more for each step down to the last.
fn windows_until_all_have_ended(collective: &Collective, members: usize) -> u32 {
    match collective {
        Collective::Broadcast { .. } => 1 + members.max(1).ilog2(),
        _ => 1,
    }
}

/// Whether a rank that lacks its result can take it over from another: it is counted.
fn is_same_everywhere(collective: &Collective) -> bool {
    matches!(collective, Collective::AllReduce { .. } | Collective::Broadcast { .. } | Collective::Barrier)
}

/// Whether those who are left can make this call. A sum that was in flight is not for them to redefine; what has a row for each rank
/// needs each of them.
fn can_go_on(
    request: &Request,
    is_member: impl Fn(u32) -> bool,
    is_whole: bool,
    was_in_flight: bool,
) -> bool {
    let is_sum = matches!(request.reduce, ReduceOp::Sum | ReduceOp::PremulSum(_) | ReduceOp::Product);
    match request.collective {
        Collective::AllReduce { .. } => !(was_in_flight && is_sum && request.policy.is_exact()),
        Collective::Broadcast { root } => is_member(root),
        Collective::Barrier => true,
        _ => is_whole && !was_in_flight,
    }
}

#[cfg(test)]
mod tests;
