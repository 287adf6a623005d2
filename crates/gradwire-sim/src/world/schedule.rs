//! What happens to a rank: its calls, its timers, its ends, and that it stops and goes on.

use super::{Event, World};
use crate::oracle;
use crate::Violation;
use gradwire_collectives::{GroupEvent, OpError};
use gradwire_core::Timestamp;
use std::time::Duration;

impl World {
    /// The time as this rank's clock shows it.
    pub(super) fn local(&self, rank: usize) -> Timestamp {
        self.ranks[rank].clock.local(self.now)
    }

    pub(super) fn on_wake(&mut self, rank: usize, armed: u64) {
        if self.ranks[rank].armed != armed || !self.ranks[rank].is_running() {
            return;
        }
        self.ranks[rank].armed_at = None;
        let local = self.local(rank);
        self.ranks[rank].group.handle_timeout(local);
        self.count_wake(rank);
        self.drain(rank);
    }

    /// A driver looks at the clock before it sends again: what was due hid behind what could not leave.
    pub(super) fn on_room(&mut self, rank: usize) {
        self.ranks[rank].waits_for_room = false;
        if self.ranks[rank].is_running() && !self.saboteur.stops_timers() {
            let local = self.local(rank);
            self.ranks[rank].group.handle_timeout(local);
        }
        self.drain(rank);
    }

    /// A timer that fires again and again at the same time would hang a real network thread.
    fn count_wake(&mut self, rank: usize) {
        let (since, wakes) = &mut self.ranks[rank].idle_wakes;
        *wakes = if *since == self.now { *wakes + 1 } else { 0 };
        *since = self.now;
        if *wakes > IDLE_WAKES_MAX {
            let due = self.ranks[rank].group.poll_timeout();
            let reason = due.map_or_else(String::new, |timeout| format!("{timeout:?}"));
            self.report(Violation::TimeStandsStill { rank, at: self.now, reason });
        }
    }

    /// The rank does nothing for `length`; its clock stands still for `lost` of it.
    pub(super) fn stop(&mut self, rank: usize, length: Duration, lost: Duration) {
        self.ranks[rank].stops += 1;
        self.queue.schedule(self.now + length, Event::Resume { rank, lost });
    }

    pub(super) fn on_resume(&mut self, rank: usize, lost: Duration) {
        self.ranks[rank].stops -= 1;
        self.ranks[rank].clock.lose(lost);
        self.ranks[rank].armed_at = None;
        if !self.ranks[rank].is_running() {
            return;
        }
        self.trace.note(self.now, rank, || "goes on".into());
        self.ranks[rank].socket_bytes = 0;
        while let Some((from, packet)) = self.ranks[rank].socket.pop_front() {
            self.deliver(from, rank, packet);
            self.drain(rank);
        }
        self.submit(rank);
        self.drain(rank);
    }

    /// Submits what this rank may have in flight now.
    pub(super) fn submit(&mut self, index: usize) {
        let local = self.local(index);
        let rank = &mut self.ranks[index];
        while rank.is_running()
            && rank.next_op < self.scenario.ops.len()
            && rank.in_flight.len() < self.scenario.in_flight_max
        {
            let op = rank.next_op;
            rank.next_op += 1;
            if self.scenario.ops[op].involves(index) {
                self.trace.note(self.now, index, || format!("submits op {op}"));
                rank.submit((self.now, local), &self.scenario, op, index);
            } else {
                self.ended[op] += 1;
            }
        }
    }

    /// The drain contract: events, then datagrams, then the timer.
    pub(super) fn drain(&mut self, rank: usize) {
        if !self.ranks[rank].is_running() {
            return;
        }
        while let Some(event) = self.ranks[rank].group.poll_event() {
            self.on_group_event(rank, event);
        }
        self.transmit(rank);
        self.arm(rank);
    }

    fn on_group_event(&mut self, rank: usize, event: GroupEvent) {
        let (id, outcome) = match event {
            GroupEvent::Done { op, outcome } => (op, outcome),
            GroupEvent::Served(report) => {
                self.trace.note(self.now, rank, || format!("served {report:?}"));
                return self.ranks[rank].served.push(report);
            }
            other => {
                self.ranks[rank].has_failed |= matches!(other, GroupEvent::Failed(_));
                self.ranks[rank].deserted |= matches!(other, GroupEvent::WorkersLeft);
                self.ranks[rank].connected |= matches!(other, GroupEvent::Connected);
                return self.trace.note(self.now, rank, || format!("{other:?}"));
            }
        };
        self.trace.note(self.now, rank, || format!("{id:?} ended: {outcome:?}"));
        let Some(op) = self.ranks[rank].finish(self.now, id, outcome) else {
            return self.report(Violation::UnknownDone { rank });
        };
        self.saboteur.on_finished(op, self.ranks[rank].runs[op].as_mut());
        let finished = self.ranks[rank].runs[op].as_ref().and_then(|run| run.finished.as_ref());
        if let Some(Ok(report)) = finished.map(|finished| &finished.outcome) {
            if let Err(violation) = self.watch.on_report((op, rank), report) {
                self.report(violation);
            }
        }
        let compute = self.scenario.compute_of(rank) + self.rng.duration(self.scenario.think_max);
        self.queue.schedule(self.now + compute, Event::Submit { rank });
        self.ended[op] += 1;
        if let Err(violation) = self.check_outcome(op, rank).and_then(|()| self.check_op(op)) {
            self.report(violation);
        }
    }

    /// A collective may fail only because a rank was silent for too long, and must then name that rank, in time.
    fn check_outcome(&self, op: usize, rank: usize) -> Result<(), Violation> {
        let Some(run) = self.ranks[rank].runs[op].as_ref() else { return Ok(()) };
        let Some(Err(error)) = run.finished.as_ref().map(|finished| &finished.outcome) else { return Ok(()) };
        match error {
            OpError::PeerLost { rank: lost, .. } if self.scenario.may_accuse(rank, *lost as usize) => {}
            _ => return Err(Violation::Failed { op, rank, at: self.now, error: error.clone() }),
        }
        match self.scenario.verdict_bound().map(|bound| bound + self.left_behind) {
            Some(bound) if self.now > (Timestamp::ZERO + bound).max(run.submitted_at) => {
                Err(Violation::LateVerdict { op, rank, at: self.now, bound })
            }
            _ => Ok(()),
        }
    }

    /// Looks at a collective when the last rank has ended it.
    fn check_op(&self, op: usize) -> Result<(), Violation> {
        if self.ended[op] == self.scenario.world_size {
            oracle::check_op(self, op)?;
        }
        Ok(())
    }

    fn arm(&mut self, rank: usize) {
        // What is due but finds the NIC full leaves when the NIC has room; a driver that asked again at once would spin.
        let blocked = self.ranks[rank].waits_for_room;
        let local = self.local(rank);
        let due = self.ranks[rank].group.poll_timeout().map(|timeout| timeout.at);
        let due = due.filter(|due| !blocked || *due > local);
        if due == self.ranks[rank].armed_at || self.saboteur.stops_timers() {
            return;
        }
        self.ranks[rank].armed_at = due;
        self.ranks[rank].armed += 1;
        if let Some(due) = due {
            let late = self.rng.duration(self.scenario.host.wake_late_max) + self.saboteur.laziness();
            let at = self.now + due.since(local) + late;
            self.queue.schedule(at, Event::Wake { rank, armed: self.ranks[rank].armed });
        }
    }
}

/// A burst of work may need a few wake-ups at one time; a thousand is a loop.
const IDLE_WAKES_MAX: u32 = 1000;
