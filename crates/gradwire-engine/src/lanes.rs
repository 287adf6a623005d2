//! The groups that a rank's further network threads have with those of the other ranks, each with a part of what is large.
//!
//! A lane is an engine of its own: a port, a socket, a network thread, and for each group that is divided a group of the same ranks. The group
//! that callers know is the first; it alone is called by them, agrees with the others between how many it divides, and hands out the parts
//! ([`gradwire_collectives::GroupEvent::Divided`]). A lane that has not connected is not used by any rank.
//!
//! ```text
//!   CALLER --call--> GROUP on THREAD 1 <--its packets--> the others' threads 1
//!                      |  ^
//!                 part |  | verdict, both ways
//!                      v  |
//!                    LANE  on THREAD 2 <--its packets--> the others' threads 2
//! ```
//!
//! What fails in one fails in all, with the verdict of the first; but a lane that has had no part yet is done without. Lanes tell callers nothing: a part ends where it is ([`InFlight`]).

use crate::group::GroupSetup;
use crate::in_flight::InFlight;
use crate::shared::{Command, GroupKey, Shared};
use crate::succession::Before;
use gradwire_collectives::{OpError, Request, Verdict};
use gradwire_core::Timestamp;
use std::sync::mpsc::{channel, Receiver, TryRecvError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A group on a network thread of this process, from another one.
#[derive(Clone)]
pub(crate) struct Lane {
    shared: Arc<Shared>,
    key: GroupKey,
}

impl Lane {
    pub(crate) fn new(shared: &Arc<Shared>, key: GroupKey) -> Self {
        Self { shared: Arc::clone(shared), key }
    }

    /// Has it connect in the background.
    pub(crate) fn connect(setup: Box<GroupSetup>, shared: &Arc<Shared>) -> Connecting {
        let (lane, (connected, wait)) = (Self::new(shared, setup.key), channel());
        // Of a thread that has ended the channel says so.
        _ = shared.send(Command::Join { setup, connected });
        Connecting { lane, wait }
    }

    /// Says there what has failed here.
    pub(crate) fn adopt(&self, verdict: Verdict) {
        _ = self.shared.send(Command::Adopt { group: self.key, verdict: Box::new(verdict) });
    }

    /// Leaves it; the channel says when nothing more has to be said.
    pub(crate) fn leave(&self) -> Receiver<()> {
        let (left, wait) = channel();
        _ = self.shared.send(Command::Leave { group: self.key, left: Some(left) });
        wait
    }

    /// The network thread that it is on.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn key(&self) -> GroupKey {
        self.key
    }

    /// Submits a part there. Of a thread that has ended the part is dropped, and has failed.
    fn submit(&self, request: Request, in_flight: InFlight) {
        let request = Box::new((request, Before::default()));
        _ = self.shared.send(Command::Submit { group: self.key, request, in_flight });
    }
}

/// A lane that tries to reach its peers.
pub(crate) struct Connecting {
    pub(crate) lane: Lane,
    wait: Receiver<Result<(), OpError>>,
}

impl Connecting {
    /// One that has reached its peers.
    #[cfg(test)]
    pub(crate) fn connected(lane: Lane) -> Self {
        let (connected, wait) = channel();
        connected.send(Ok(())).expect("the other end is here");
        Self { lane, wait }
    }

    /// `None`: nobody knows yet. Else whether it has reached them.
    fn has_connected(&self) -> Option<bool> {
        match self.wait.try_recv() {
            Ok(connected) => Some(connected.is_ok()),
            Err(TryRecvError::Disconnected) => Some(false),
            Err(TryRecvError::Empty) => None,
        }
    }
}

/// What a group has to do with others of the same rank.
#[derive(Default)]
pub(crate) struct LaneSetup {
    /// Its own lanes, in order.
    pub(crate) connecting: Vec<Connecting>,
    /// The group that this one is a lane of.
    pub(crate) first: Option<Lane>,
    /// Its lanes are used on slow links too, and where cores are few.
    pub(crate) insists: bool,
}

/// The lanes of a group, as its network thread sees them.
#[derive(Default)]
pub(crate) struct Lanes {
    connecting: Vec<Connecting>,
    /// When the first look was taken at those.
    since: Option<Timestamp>,
    /// Those that have, before the first that has not.
    connected: Vec<Lane>,
    /// So many have not, or stood behind one that had not.
    unreached: u32,
    /// The program has been told of those.
    are_told_missed: bool,
    /// Some have had parts.
    are_used: bool,
    /// Why they are gone, if one of them failed before that.
    lost: Option<Verdict>,
}

impl Lanes {
    pub(crate) fn new(connecting: Vec<Connecting>) -> Self {
        Self { connecting, ..Self::default() }
    }

    /// Whether there are some, or may be soon.
    pub(crate) fn are_there(&self) -> bool {
        !self.connecting.is_empty() || !self.connected.is_empty()
    }

    /// How many may be used.
    pub(crate) fn count(&self) -> usize {
        self.connected.len()
    }

    /// How many are of no use, since they have not reached their peers; none where nothing would be divided between them anyway.
    pub(crate) fn missed(&self, would_be_used: bool) -> u32 {
        if would_be_used {
            self.unreached
        } else {
            0
        }
    }

    /// Whether some are missed, asked for the first time since that has been so.
    pub(crate) fn are_newly_missed(&mut self, would_be_used: bool) -> bool {
        self.missed(would_be_used) > 0 && !std::mem::replace(&mut self.are_told_missed, true)
    }

    /// Looks whether they have connected, for so long since the group has. Those behind one that cannot are of no use.
    pub(crate) fn look(&mut self, now: Timestamp, patience: Duration) {
        let since = *self.since.get_or_insert(now);
        while let Some(first) = self.connecting.first() {
            match first.has_connected() {
                Some(true) => self.connected.push(self.connecting.remove(0).lane),
                None if now.since(since) < patience => return,
                Some(false) | None => {
                    self.unreached = self.connecting.len() as u32;
                    self.connecting.drain(..).for_each(|one| drop(one.lane.leave()));
                }
            }
        }
    }

    /// Hands out the parts of a call behind the first, which is returned; and why that will be in vain, if it is.
    pub(crate) fn hand_out(
        &mut self,
        parts: Vec<Request>,
        in_flight: InFlight,
    ) -> (InFlight, Option<Verdict>) {
        self.are_used = true;
        let mut shares = in_flight.divided(parts.len() + 1).into_iter();
        let own = shares.next().expect("a call has a first part");
        // A part without a lane is dropped, and has failed: ranks agree on no more lanes than each has had.
        self.connected.iter().zip(parts.into_iter().zip(shares)).for_each(|(lane, (request, share))| {
            lane.submit(request, share);
        });
        (own, self.lost.take())
    }

    /// The group has failed.
    pub(crate) fn adopt(&self, verdict: &Verdict) {
        self.connected.iter().for_each(|lane| lane.adopt(verdict.clone()));
    }

    /// One of them has failed. Returned where that is the group's failure too; lanes that have had no part are done without, unless the ranks
    /// have agreed on them already.
    pub(crate) fn on_lost(&mut self, verdict: Verdict) -> Option<Verdict> {
        if self.are_used {
            return Some(verdict);
        }
        let all = self.connecting.drain(..).map(|one| one.lane).chain(self.connected.drain(..));
        all.for_each(|lane| drop(lane.leave()));
        self.lost = Some(verdict);
        None
    }
}

/// Waits until all of these have said everything; `false` when `timeout` passed first.
pub(crate) fn wait_for_all(left: &[Receiver<()>], timeout: Duration) -> bool {
    let started = Instant::now();
    let has_left = |wait: &Receiver<()>| {
        let outcome = wait.recv_timeout(timeout.saturating_sub(started.elapsed()));
        !matches!(outcome, Err(std::sync::mpsc::RecvTimeoutError::Timeout))
    };
    left.iter().all(has_left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_nothing_would_be_divided_between_are_not_missed_and_others_once() {
        let mut lanes = Lanes { unreached: 2, ..Lanes::default() };
        assert_eq!((lanes.missed(false), lanes.are_newly_missed(false)), (0, false), "links are slow");
        let said = [true, true, false, true].map(|would_be_used| lanes.are_newly_missed(would_be_used));
        assert_eq!(said, [true, false, false, false]);
        assert_eq!(lanes.missed(true), 2);
    }
}
