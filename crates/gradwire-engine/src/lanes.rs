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
//! What fails in one fails in all, with the verdict of the first. Lanes tell callers nothing: a part ends where it is ([`InFlight`]).

use crate::group::GroupSetup;
use crate::in_flight::InFlight;
use crate::shared::{Command, GroupKey, Shared};
use crate::succession::Before;
use gradwire_collectives::{OpError, Request, Verdict};
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
        let until = Instant::now().checked_add(shared.local.config.connect_timeout);
        // Of a thread that has ended the channel says so.
        _ = shared.send(Command::Join { setup, connected });
        Connecting { lane, wait, until }
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
    until: Option<Instant>,
}

impl Connecting {
    /// `None`: nobody knows yet. Else whether it has reached them.
    fn has_connected(&self) -> Option<bool> {
        match self.wait.try_recv() {
            Ok(connected) => Some(connected.is_ok()),
            Err(TryRecvError::Disconnected) => Some(false),
            Err(TryRecvError::Empty) => {
                self.until.is_some_and(|until| until <= Instant::now()).then_some(false)
            }
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
    /// Those that have, before the first that has not.
    connected: Vec<Lane>,
}

impl Lanes {
    pub(crate) fn new(connecting: Vec<Connecting>) -> Self {
        Self { connecting, connected: Vec::new() }
    }

    /// Whether there are some, or may be soon.
    pub(crate) fn are_there(&self) -> bool {
        !self.connecting.is_empty() || !self.connected.is_empty()
    }

    /// How many may be used.
    pub(crate) fn count(&self) -> usize {
        self.connected.len()
    }

    /// Looks whether they have connected. Those behind one that cannot are of no use; whether that has shown now.
    pub(crate) fn look(&mut self) -> bool {
        while let Some(first) = self.connecting.first() {
            match first.has_connected() {
                None => return false,
                Some(true) => self.connected.push(self.connecting.remove(0).lane),
                Some(false) => {
                    self.connecting.drain(..).for_each(|one| drop(one.lane.leave()));
                    return true;
                }
            }
        }
        false
    }

    /// Hands out the parts of a call behind the first, which is returned.
    pub(crate) fn hand_out(&self, parts: Vec<Request>, in_flight: InFlight) -> InFlight {
        let mut shares = in_flight.divided(parts.len() + 1).into_iter();
        let own = shares.next().expect("a call has a first part");
        // A part without a lane is dropped, and has failed: ranks agree on no more lanes than each has.
        self.connected.iter().zip(parts.into_iter().zip(shares)).for_each(|(lane, (request, share))| {
            lane.submit(request, share);
        });
        own
    }

    /// The group has failed.
    pub(crate) fn adopt(&self, verdict: &Verdict) {
        self.connected.iter().for_each(|lane| lane.adopt(verdict.clone()));
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
