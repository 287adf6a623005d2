//! How a group goes on when a rank is lost (`on_peer_loss="continue"`, docs/membership.md).
//!
//! ```text
//!   running --a rank is lost, or a member promises the next epoch--> waiting --no majority, or without this rank--> over
//!      ^                                                               |  ^
//!      |                                                     decided   v  | frozen again
//!   syncing <--all have answered-- connecting <--all are ready-- forming -+
//! ```
//!
//! The protocol that decides is `gradwire-membership`. Here its messages travel, and each epoch gets a [`gradwire_collectives::Group`]
//! of its own, with connections and keys of its own: nothing that was sent under one epoch can be taken for a part of another. Calls
//! that had not ended are made again among those who are left (`calls`); a result that one of them has is sent to the others.
//! `active/continuing.rs` applies it to the group.

mod calls;
mod note;
mod sync;

pub(crate) use calls::{Before, Calls, Held, Next};
pub(crate) use note::{Note, Ready};
pub(crate) use sync::Sync;

use crate::group::{Lineage, ReservedIds};
use crate::{EpochStats, LostStats};
use gradwire_collectives::{Collective, OpError, OpId, Request};
use gradwire_core::Timestamp;
use gradwire_membership::{Epoch, Event, Member, Membership, Message, Settings};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Where it is; see the module's documentation.
pub(crate) enum Phase {
    Running,
    Waiting { since: Timestamp, ask_at: Timestamp },
    Forming(Forming),
    Connecting { since: Timestamp, unsure: Range<u64> },
    Syncing(Box<Sync>),
    Over(OpError),
}

/// An epoch whose group is about to be formed.
pub(crate) struct Forming {
    pub(crate) epoch: Epoch,
    pub(crate) ids: ReservedIds,
    since: Timestamp,
    say_at: Timestamp,
}

/// One group's.
pub(crate) struct Succession {
    pub(crate) lineage: Box<Lineage>,
    pub(crate) phase: Phase,
    pub(crate) calls: Calls,
    /// Calls that the present group has started.
    pub(crate) running: HashMap<OpId, u64>,
    /// Of the present group: number, and members by their first ranks.
    pub(crate) epoch: u64,
    pub(crate) members: Arc<[u32]>,
    /// The latest loss.
    pub(crate) verdict: Option<OpError>,
    /// What is to be said to whom.
    pub(crate) notes: VecDeque<(u32, Vec<u8>)>,
    me: Member,
    membership: Membership,
    history: Vec<(u64, Arc<[u32]>)>,
    lost: Vec<LostStats>,
    /// The latest that each member said, and that was said to it.
    heard: BTreeMap<u32, Ready>,
    said: BTreeMap<u32, Ready>,
    peer_timeout: Duration,
    repeat: Duration,
    /// Memory of a collective that was broken off, until its group is gone.
    broken_off: Option<Box<Sync>>,
}

/// What the group has to do.
pub(crate) enum Step {
    /// A group of this epoch is to be formed.
    Reform(Forming, Range<u64>),
    /// This rank may not go on.
    End(OpError),
}

impl Succession {
    /// Of a group that begins.
    pub(crate) fn new(lineage: Box<Lineage>) -> Self {
        let me = life(lineage.rank);
        let epoch = Epoch::first((0..lineage.world_size()).map(life).collect());
        let peer_timeout = lineage.shared.local.config.peer_timeout;
        let repeat = (peer_timeout / REPEATS).max(REPEAT_MIN);
        // Who promises at once is not waited for; only a second loss in the middle of it costs an attempt.
        let attempt = peer_timeout / 2;
        let settings = Settings { repeat, attempt, patience: attempt * ATTEMPTS_MAX };
        let members: Arc<[u32]> = ranks_of(&epoch);
        Self {
            lineage,
            phase: Phase::Running,
            calls: Calls::default(),
            running: HashMap::new(),
            epoch: 0,
            members: Arc::clone(&members),
            verdict: None,
            notes: VecDeque::new(),
            me,
            membership: Membership::founder(me, epoch, settings),
            history: vec![(0, members)],
            lost: Vec::new(),
            heard: BTreeMap::new(),
            said: BTreeMap::new(),
            peer_timeout,
            repeat,
            broken_off: None,
        }
    }

    /// Another phase. What the present group may still write into stays.
    pub(crate) fn change(&mut self, phase: Phase) {
        if let Phase::Syncing(sync) = std::mem::replace(&mut self.phase, phase) {
            self.broken_off = Some(sync);
        }
    }

    /// Whether calls start and end.
    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running)
    }

    /// Whether every rank of the first epoch takes part.
    pub(crate) fn is_whole(&self) -> bool {
        self.members.len() == self.lineage.world_size() as usize
    }

    /// First rank of the present group's rank `rank`.
    pub(crate) fn first_rank(&self, rank: u32) -> u32 {
        self.members.get(rank as usize).copied().unwrap_or(rank)
    }

    /// The members of an epoch that this rank has been in.
    pub(crate) fn members_of(&self, epoch: u64) -> Arc<[u32]> {
        let known = self.history.iter().find(|(number, _)| *number == epoch);
        known.map_or_else(|| Arc::clone(&self.members), |(_, members)| Arc::clone(members))
    }

    /// The error of a call that cannot be finished without the lost ranks: the same on all who are left, whether they were told why the
    /// epoch ended or only that it did.
    pub(crate) fn unfinished(&self) -> OpError {
        let said = match &self.verdict {
            Some(OpError::PeerLost { rank, silent, during, detail, .. }) => {
                Some((*rank, *silent, during, detail))
            }
            _ => None,
        };
        let latest = self.lost.iter().filter(|lost| lost.epoch == self.epoch).map(|lost| lost.rank).min();
        let rank = latest.or(said.map(|(rank, ..)| rank)).unwrap_or(self.lineage.rank);
        let said = said.filter(|(lost, ..)| *lost == rank);
        let (silent, during, detail) = said.map_or_else(
            || (Duration::ZERO, "a call that it is needed for".to_owned(), "others found out"),
            |(_, silent, during, detail)| (silent, during.clone(), &**detail),
        );
        let detail = format!(
            "{detail}; in epoch {} the others go on, but this call cannot be finished among them",
            self.epoch
        );
        OpError::PeerLost {
            rank,
            host: self.lineage.host(rank),
            silent,
            during,
            detail: detail.into(),
            reported_by: None,
        }
    }

    /// For people.
    pub(crate) fn stats(&self) -> EpochStats {
        EpochStats { number: self.epoch, members: self.members.to_vec(), lost: self.lost.clone() }
    }

    /// Ranks in a request, as the present group numbers them.
    pub(crate) fn renumber(&self, request: &mut Request) {
        let place = |rank: u32| self.members.iter().position(|member| *member == rank);
        // A lost one is refused before, or nobody.
        let place = |rank: u32| place(rank).map_or(u32::MAX, |place| place as u32);
        match &mut request.collective {
            Collective::Broadcast { root }
            | Collective::Reduce { root }
            | Collective::Gather { root }
            | Collective::Scatter { root } => *root = place(*root),
            Collective::Send { to, .. } => *to = place(*to),
            Collective::Receive { from: Some(from), .. } => *from = place(*from),
            _ => {}
        }
    }

    /// The present group has failed; `false`: for a reason that is no loss of a rank, and it ends. What is said while the next epoch is
    /// decided comes from ranks that have stopped.
    pub(crate) fn on_failed(&mut self, now: Timestamp, error: &OpError) -> bool {
        if matches!(self.phase, Phase::Waiting { .. } | Phase::Over(_)) {
            return true;
        }
        let mut error = error.clone();
        let (OpError::PeerLost { rank, .. } | OpError::PeerLeft { rank, .. }) = &mut error else {
            return false;
        };
        *rank = self.members.get(*rank as usize).copied().unwrap_or(*rank);
        let rank = *rank;
        if let OpError::PeerLost { reported_by: Some(reporter), .. } = &mut error {
            *reporter = self.members.get(*reporter as usize).copied().unwrap_or(*reporter);
        }
        self.verdict = Some(error);
        self.wait(now);
        self.membership.suspect(now, rank);
        true
    }

    /// A member says something.
    pub(crate) fn on_note(&mut self, now: Timestamp, from: u32, note: Note) {
        match note {
            Note::Membership(message) => self.membership.handle_message(now, life(from), message),
            Note::Ready(ready) => {
                self.heard.insert(from, ready);
                let is_past = !matches!(self.phase, Phase::Forming(_));
                if let Some(said) = self.said.get(&from).filter(|said| is_past && said.epoch == ready.epoch) {
                    self.notes.push_back((from, Note::Ready(*said).encode()));
                }
            }
        }
    }

    /// Members that do not answer under the present epoch, by its numbers.
    pub(crate) fn on_unreachable(&mut self, now: Timestamp, ranks: &[u32]) {
        for rank in ranks {
            self.membership.suspect(now, self.first_rank(*rank));
        }
        self.wait(now);
    }

    /// Does what is due.
    pub(crate) fn advance(&mut self, now: Timestamp) -> Option<Step> {
        if matches!(self.phase, Phase::Over(_)) {
            return None;
        }
        if self.membership.poll_timeout().is_some_and(|at| at <= now) {
            self.membership.handle_timeout(now);
        }
        let mut step = None;
        while let Some(event) = self.membership.poll_event() {
            match event {
                Event::Frozen { .. } => self.wait(now),
                Event::Entered { epoch, .. } => self.enter(now, epoch),
                Event::Excluded { .. } => step = Some(self.end(EXCLUDED)),
                Event::Halted { .. } => step = Some(self.end(NO_MAJORITY)),
            }
        }
        step = step.or_else(|| self.check_phase(now));
        while let Some(transmit) = self.membership.poll_transmit() {
            self.notes.push_back((transmit.to.rank, Note::Membership(transmit.message).encode()));
        }
        step
    }

    /// When [`Succession::advance`] has something to do.
    pub(crate) fn wake_at(&self) -> Option<Timestamp> {
        let own = match &self.phase {
            Phase::Waiting { since, ask_at } => Some((*ask_at).min(*since + self.stuck_after())),
            Phase::Forming(forming) => Some(forming.say_at.min(forming.since + self.peer_timeout)),
            Phase::Connecting { since, .. } => Some(*since + self.peer_timeout),
            Phase::Running | Phase::Syncing(_) => None,
            Phase::Over(_) => return None,
        };
        own.into_iter().chain(self.membership.poll_timeout()).min()
    }

    /// The group of the epoch is there.
    pub(crate) fn entered(&mut self, now: Timestamp, epoch: &Epoch, unsure: Range<u64>) {
        let members = ranks_of(epoch);
        for rank in self.members.iter().filter(|rank| !members.contains(rank)) {
            let host = self.lineage.host(*rank);
            self.lost.push(LostStats { rank: *rank, host, epoch: epoch.number });
        }
        self.history.push((epoch.number, Arc::clone(&members)));
        (self.epoch, self.members) = (epoch.number, members);
        self.running.clear();
        self.broken_off = None;
        self.phase = Phase::Connecting { since: now, unsure };
    }

    /// Whether no peer of the present epoch has answered for so long.
    pub(crate) fn connects_too_long(&self, now: Timestamp) -> bool {
        matches!(self.phase, Phase::Connecting { since, .. } if now >= since + self.peer_timeout)
    }

    fn wait(&mut self, now: Timestamp) {
        if !matches!(self.phase, Phase::Waiting { .. } | Phase::Over(_)) {
            self.change(Phase::Waiting { since: now, ask_at: now });
        }
    }

    fn enter(&mut self, now: Timestamp, epoch: Epoch) {
        let (place, count) =
            (epoch.members.iter().position(|member| *member == self.me), epoch.members.len());
        let place = place.unwrap_or_default() as u32;
        let Some(ids) = ReservedIds::draw(&self.lineage.shared, place, count as u32) else {
            // Without connection ids it falls silent, and the others go on.
            return self.wait(now);
        };
        let (below, next) = (self.calls.below(), self.calls.next());
        self.said.clear();
        for (member, id) in epoch.members.iter().zip(&ids.by_rank) {
            if let Some(id) = id {
                let ready = Ready { epoch: epoch.number, connection: id.value(), below, next };
                self.said.insert(member.rank, ready);
            }
        }
        self.phase = Phase::Forming(Forming { epoch, ids, since: now, say_at: now });
    }

    fn check_phase(&mut self, now: Timestamp) -> Option<Step> {
        match &mut self.phase {
            Phase::Waiting { since, ask_at } => {
                let (since, asks) = (*since, now >= *ask_at);
                if asks {
                    *ask_at = now + self.repeat;
                    self.ask();
                }
                (now >= since + self.stuck_after()).then(|| self.end(NO_MAJORITY))
            }
            Phase::Forming(_) => self.form(now),
            _ => None,
        }
    }

    /// Whoever was left out, or has missed what was decided, hears so.
    fn ask(&mut self) {
        let note = Note::Membership(Message::Ask { epoch: self.membership.epoch().number }).encode();
        for member in self.membership.epoch().members.iter().filter(|member| **member != self.me) {
            self.notes.push_back((member.rank, note.clone()));
        }
    }

    fn form(&mut self, now: Timestamp) -> Option<Step> {
        let Phase::Forming(forming) = &mut self.phase else { return None };
        let number = forming.epoch.number;
        let is_ready = |rank: &u32| self.heard.get(rank).is_some_and(|ready| ready.epoch == number);
        if now >= forming.say_at {
            forming.say_at = now + self.repeat;
            for (rank, ready) in &self.said {
                self.notes.push_back((*rank, Note::Ready(*ready).encode()));
            }
        }
        let missing: Vec<u32> = self.said.keys().copied().filter(|rank| !is_ready(rank)).collect();
        if missing.is_empty() {
            // What was said is said once more when somebody asks.
            let heard = self.heard.values().filter(|ready| ready.epoch == number);
            let all = || heard.clone().chain(self.said.values().take(1));
            let unsure = all().map(|ready| ready.below).min()?..all().map(|ready| ready.next).max()?;
            let phase = std::mem::replace(&mut self.phase, Phase::Running);
            let Phase::Forming(forming) = phase else { return None };
            return Some(Step::Reform(forming, unsure));
        }
        if now >= forming.since + self.peer_timeout {
            for rank in missing {
                self.membership.suspect(now, rank);
            }
            forming.since = now;
        }
        None
    }

    /// The connection id that a member wants to see.
    pub(crate) fn connection_of(&self, rank: u32) -> u32 {
        self.heard.get(&rank).map_or(0, |ready| ready.connection)
    }

    fn end(&mut self, outcome: &'static str) -> Step {
        let cause = match &self.verdict {
            Some(error) => error.to_string(),
            None => "the other ranks, which have lost somebody".to_owned(),
        };
        Step::End(OpError::NotMember { epoch: self.membership.epoch().number, outcome, cause })
    }

    fn stuck_after(&self) -> Duration {
        self.peer_timeout * ATTEMPTS_MAX
    }
}

/// The first life of a rank.
fn life(rank: u32) -> Member {
    Member { rank, incarnation: 0 }
}

fn ranks_of(epoch: &Epoch) -> Arc<[u32]> {
    epoch.members.iter().map(|member| member.rank).collect()
}

const EXCLUDED: &str = "the others go on without it";
const NO_MAJORITY: &str = "no majority of the ranks can be reached, and fewer may not go on";
/// What was not answered is said again so often in the peer timeout.
const REPEATS: u32 = 100;
/// Less would be a burst while a host is busy.
const REPEAT_MIN: Duration = Duration::from_millis(20);
/// Attempts of half the peer timeout until a rank without a majority gives up: the first may be in the way of others' attempts, and
/// every further one waits longer.
const ATTEMPTS_MAX: u32 = 6;
