//! How a group goes on when a rank is lost (`on_peer_loss="continue"`, docs/membership.md).
//!
//! ```text
//!   running --a rank is lost, or a member promises the next epoch--> waiting --no majority, or without this rank--> over
//!      ^                                                               |  ^
//!      |                                                     decided   v  | frozen again
//!   syncing <--all have answered-- connecting <--all are ready-- forming -+ <--decided with it-- waiting: a rank that joins
//! ```
//!
//! The protocol that decides is `gradwire-membership`. Here its messages travel, and each epoch gets a [`gradwire_collectives::Group`]
//! of its own, with connections and keys of its own: nothing that was sent under one epoch can be taken for a part of another. Calls
//! that had not ended are made again among those who are left (`calls`); a result that one of them has is sent to the others.
//! `active/continuing.rs` applies it to the group.

mod admission;
mod calls;
mod deadlines;
mod naming;
mod note;
mod sync;
#[cfg(test)]
mod tests;
mod times;

pub(crate) use calls::{Before, CallId, Calls, Held, Next};
pub(crate) use note::{Note, Ready, COUNT_MAX};
pub(crate) use sync::Sync;

use crate::group::ReservedIds;
use crate::lineage::Lineage;
use crate::rendezvous::Record;
use crate::{EpochStats, JoinError, JoinedStats, LostStats};
use admission::Admission;
use gradwire_collectives::{Collective, OpError, OpId, Request};
use gradwire_core::Timestamp;
use gradwire_membership::{Epoch, Event, Member, Membership, Message, Settings};
use note::AHEAD_MAX;
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
    /// What this rank has said of its calls: from the oldest that has not ended to the next one.
    own: Range<u64>,
    since: Timestamp,
    say_at: Timestamp,
}

/// One group's.
pub(crate) struct Succession {
    pub(crate) lineage: Box<Lineage>,
    pub(crate) phase: Phase,
    pub(crate) calls: Calls,
    /// Calls that the present group has started.
    pub(crate) running: HashMap<OpId, CallId>,
    /// Of the present group: number, and members by their first ranks, with their lives.
    pub(crate) epoch: u64,
    pub(crate) members: Arc<[u32]>,
    pub(crate) lives: Vec<Member>,
    /// The last epoch of which the log has a line.
    pub(crate) told: u64,
    /// The latest loss.
    pub(crate) verdict: Option<OpError>,
    /// What is to be said to whom.
    pub(crate) notes: VecDeque<(Member, Vec<u8>)>,
    me: Member,
    membership: Membership,
    history: Vec<(u64, Arc<[u32]>)>,
    /// Members of the latest epoch that was decided, whose group may not be formed yet.
    decided: Vec<Member>,
    lost: Vec<LostStats>,
    joined: Vec<JoinedStats>,
    /// The latest life of each rank that was admitted, whether it has come or not.
    admitted: BTreeMap<u32, Record>,
    admission: Admission,
    /// This rank has joined and has made no call.
    is_new: bool,
    /// The latest that each member said, and that was said to it.
    heard: BTreeMap<Member, Ready>,
    said: BTreeMap<Member, Ready>,
    peer_timeout: Duration,
    repeat: Duration,
    /// A member that waits for the next epoch as long has had its turn, and its patience is over.
    stuck_after: Duration,
    /// Memory of a collective that was broken off, until its group is gone.
    broken_off: Option<Box<Sync>>,
    /// This rank's group has ended where others may still go on.
    is_left_behind: bool,
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
        let epoch = Epoch::first(lineage.records.iter().map(Record::member).collect());
        let (members, lives) = (ranks_of(&epoch), epoch.members.clone());
        let begin = |me, settings| Membership::founder(me, epoch, settings);
        let mut new = Self::with(lineage, Phase::Running, begin);
        new.decided.clone_from(&lives);
        (new.members, new.lives, new.is_new) = (Arc::clone(&members), lives, false);
        new.history.push((0, members));
        new
    }

    /// Of a rank that joins a group that runs; `contacts`: whom it asks.
    pub(crate) fn joiner(lineage: Box<Lineage>, contacts: Epoch, now: Timestamp) -> Self {
        let phase = Phase::Waiting { since: now, ask_at: now };
        Self::with(lineage, phase, |me, settings| Membership::joiner(me, contacts, settings, now))
    }

    fn with(
        lineage: Box<Lineage>,
        phase: Phase,
        membership: impl FnOnce(Member, Settings) -> Membership,
    ) -> Self {
        let me = lineage.records[lineage.rank as usize].member();
        let peer_timeout = lineage.shared.local.config.peer_timeout;
        let settings = times::of(peer_timeout);
        Self {
            lineage,
            phase,
            calls: Calls::default(),
            running: HashMap::new(),
            epoch: 0,
            members: Arc::default(),
            lives: Vec::new(),
            told: 0,
            verdict: None,
            notes: VecDeque::new(),
            me,
            membership: membership(me, settings),
            history: Vec::new(),
            decided: Vec::new(),
            lost: Vec::new(),
            joined: Vec::new(),
            admitted: BTreeMap::new(),
            admission: Admission::default(),
            is_new: true,
            heard: BTreeMap::new(),
            said: BTreeMap::new(),
            peer_timeout,
            repeat: settings.repeat,
            stuck_after: settings.ends_within(),
            broken_off: None,
            is_left_behind: false,
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

    /// The members of an epoch that this rank has been in.
    pub(crate) fn members_of(&self, epoch: u64) -> Arc<[u32]> {
        let known = self.history.iter().rev().find(|(number, _)| *number == epoch);
        known.map_or_else(|| Arc::clone(&self.members), |(_, members)| Arc::clone(members))
    }

    /// For people.
    pub(crate) fn stats(&self) -> EpochStats {
        let lost = self.lost.iter().filter(|lost| lost.epoch <= self.epoch).cloned().collect();
        let joined = self.joined.iter().filter(|joined| joined.epoch <= self.epoch).cloned().collect();
        let is_member = !self.is_left_behind && !matches!(self.phase, Phase::Over(OpError::NotMember { .. }));
        EpochStats { number: self.epoch, members: self.members.to_vec(), lost, joined, is_member }
    }

    /// Ranks that the group began with.
    pub(crate) fn ranks(&self) -> usize {
        self.lineage.records.len()
    }

    /// Whether this rank is about to join.
    pub(crate) fn is_joining(&self) -> bool {
        self.is_new
    }

    /// Calls go on in the present epoch, with what this rank needs for them.
    pub(crate) fn settle(&mut self) {
        self.is_new = false;
        self.membership.fetched();
    }

    /// A rank has published that it wants to join. It may until this rank makes the call after the next one: all members are then between the
    /// same two calls, the first of which tells each that all others know the record.
    ///
    /// # Errors
    /// It has another secret or settings, is a member, or is no later than a life that is known: an old record brings nobody back.
    /// [`JoinError::Failed`]: the group is changing, and it may be tried again.
    pub(crate) fn admit(&mut self, text: &str) -> Result<(Member, String), JoinError> {
        let record = self.lineage.read(text)?;
        let (joiner, rank) = (record.member(), record.rank);
        let refused = |problem: &str| {
            let problem = format!("life {} of rank {rank} cannot join: {problem}", joiner.incarnation);
            Err(JoinError::RecordInvalid { position: rank as usize, problem })
        };
        if !self.is_running() {
            // Not its fault: it may be admitted by the next call.
            return Err(JoinError::Failed(self.unfinished()));
        }
        if self.members.contains(&rank) {
            return refused("its rank is a member that lives");
        }
        let admitted = self.admitted.get(&rank).filter(|admitted| **admitted != record).map(Record::member);
        if [self.lineage.member(rank), admitted].into_iter().flatten().any(|known| known >= joiner) {
            return refused("a life as late is known");
        }
        self.admitted.insert(rank, record);
        self.admission.open(joiner, self.calls.next());
        Ok((joiner, self.lineage.running(self.epoch, &self.lives)))
    }

    /// The call with this number was made here.
    pub(crate) fn called(&mut self, number: u64) {
        if self.admission.called(number) {
            self.membership.forget_joiners();
        }
    }

    /// What is known of a life of a rank that has been admitted, or that is a member.
    pub(crate) fn record(&self, member: Member) -> Option<&Record> {
        let member_of = |rank| self.lineage.records.get(rank as usize);
        [self.admitted.get(&member.rank), member_of(member.rank)]
            .into_iter()
            .flatten()
            .find(|record| record.member() == member)
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

    /// Whether the present group's failure says something new. What is said while the next epoch is decided comes from ranks that have stopped, but
    /// for the loss itself, where a member that knows of it has asked for a promise before. Once
    /// it is decided the present group is the one before, and only the loss of a rank that is to go on counts.
    pub(crate) fn concerns(&self, error: &OpError) -> bool {
        match &self.phase {
            Phase::Forming(forming) => loses_member(&forming.epoch, &self.lives, error),
            Phase::Waiting { .. } => !self.is_new && lost_rank(error).is_some() && self.just_lost().is_none(),
            Phase::Over(_) => false,
            _ => true,
        }
    }

    /// The present group has failed; `false`: for a reason that is no loss of a rank, and it ends.
    pub(crate) fn on_failed(&mut self, now: Timestamp, error: &OpError) -> bool {
        if !self.concerns(error) {
            return true;
        }
        let error = self.named_error(error.clone());
        let Some(rank) = lost_rank(&error) else { return false };
        let has_left = matches!(error, OpError::PeerLeft { .. });
        let life = self.lives.iter().find(|life| life.rank == rank).copied();
        self.verdict = Some(error);
        self.wait(now);
        match life {
            Some(life) if has_left => self.membership.has_left(now, life),
            Some(life) => self.membership.suspect(now, life),
            None => {}
        }
        true
    }

    /// A member of the present group, which has failed, had said goodbye, at whatever time: it does not vote on who goes on.
    pub(crate) fn on_left(&mut self, now: Timestamp, rank: u32) {
        let life = self.lives.get(rank as usize);
        life.into_iter().for_each(|life| self.membership.has_left(now, *life));
    }

    /// A member says something.
    pub(crate) fn on_note(&mut self, now: Timestamp, from: Member, note: Note) {
        if matches!(self.phase, Phase::Over(_)) {
            return; // nobody would take the answers
        }
        match note {
            Note::Membership(Message::Join) if !self.takes_in(from) => {}
            Note::Membership(message) => self.membership.handle_message(now, from, message),
            Note::Ready(ready) => {
                self.membership.hear_of(from, ready.epoch);
                self.heard.insert(from, ready);
                let is_past = !matches!(self.phase, Phase::Forming(_));
                let is_asked = is_past && ready.asks;
                if let Some(said) = self.said.get(&from).filter(|said| is_asked && said.epoch == ready.epoch)
                {
                    self.notes.push_back((from, Note::Ready(*said).encode()));
                }
            }
        }
    }

    /// Whether a rank that wants to join is heard: between two calls, by the first of the members alone, or because it is one already and
    /// does not know.
    fn takes_in(&self, joiner: Member) -> bool {
        self.membership.epoch().has(joiner)
            || (self.admission.is_open_to(joiner) && self.lives.first() == Some(&self.me))
    }

    /// Members that do not answer under the present epoch, by its numbers. None: the last answer has just come, and all are about to go on.
    pub(crate) fn on_unreachable(&mut self, now: Timestamp, ranks: &[u32]) {
        if ranks.is_empty() {
            return;
        }
        for place in ranks {
            let life = self.lives.get(*place as usize);
            life.into_iter().for_each(|life| self.membership.suspect(now, *life));
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
        // Before what is said under a new epoch: who has not heard that it was decided would ask.
        while let Some(transmit) = self.membership.poll_transmit() {
            self.notes.push_back((transmit.to, Note::Membership(transmit.message).encode()));
        }
        step.or_else(|| self.check_phase(now)).or_else(|| self.check_deadlines(now))
    }

    /// When [`Succession::advance`] has something to do, or notes are to be sent.
    pub(crate) fn wake_at(&self, now: Timestamp) -> Option<Timestamp> {
        let is_over = matches!(self.phase, Phase::Over(_));
        if !self.notes.is_empty() || (!is_over && self.membership.has_news()) {
            return Some(now);
        }
        let own = match &self.phase {
            Phase::Waiting { since, ask_at } => Some((*ask_at).min(*since + self.stuck_after())),
            Phase::Forming(forming) => Some(forming.say_at.min(forming.since + self.peer_timeout)),
            Phase::Connecting { since, .. } => Some(*since + self.peer_timeout),
            Phase::Running | Phase::Syncing(_) => None,
            Phase::Over(_) => return None,
        };
        own.into_iter().chain(self.membership.poll_timeout()).chain(self.next_deadline()).min()
    }

    /// The group of the epoch is there.
    pub(crate) fn entered(&mut self, now: Timestamp, epoch: &Epoch, unsure: Range<u64>) {
        let members = ranks_of(epoch);
        // Who is back is not to blame for what comes.
        if self.verdict_rank().is_some_and(|rank| members.contains(&rank)) {
            self.verdict = None;
        }
        self.lives.clone_from(&epoch.members);
        // What was said for an epoch before is asked for by nobody any more: lives come and go.
        self.heard.retain(|_, ready| ready.epoch >= epoch.number);
        keep(&mut self.history, (epoch.number, Arc::clone(&members)), EPOCHS_KEPT);
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
        for member in &epoch.members {
            match self.record(*member).cloned() {
                Some(record) => self.lineage.records[member.rank as usize] = record,
                // It cannot be reached from here: without this rank the others go on.
                None => return self.wait(now),
            }
        }
        self.note_changes(&epoch);
        let Ok(ids) = ReservedIds::draw(&self.lineage.shared, place, count as u32) else {
            // Without connection ids it falls silent, and the others go on.
            return self.wait(now);
        };
        let (below, next) = (self.calls.below(), self.calls.next());
        self.said.clear();
        for (member, id) in epoch.members.iter().zip(&ids.by_rank) {
            if let Some(id) = id {
                let (is_new, boundary) = (self.is_new, self.admission.boundary());
                let (epoch, connection, asks) = (epoch.number, id.value(), false);
                let ready = Ready { epoch, connection, below, next, asks, is_new, boundary };
                self.said.insert(*member, ready);
            }
        }
        self.change(Phase::Forming(Forming { epoch, ids, own: below..next, since: now, say_at: now }));
    }

    /// Who is lost and who has joined, by what was decided: an epoch may end before its group is formed, here or elsewhere.
    fn note_changes(&mut self, epoch: &Epoch) {
        let before = std::mem::replace(&mut self.decided, epoch.members.clone());
        for Member { rank, .. } in before.iter().copied().filter(|member| !epoch.has(*member)) {
            let host = self.lineage.host(rank);
            keep(&mut self.lost, LostStats { rank, host, epoch: epoch.number }, CHANGES_KEPT);
        }
        // Who joins knows of nobody else.
        let is_first = before.is_empty();
        let is_new = |member: &&Member| if is_first { **member == self.me } else { !before.contains(member) };
        for Member { rank, incarnation } in epoch.members.iter().filter(is_new).copied() {
            let host = self.lineage.host(rank);
            let joined = JoinedStats { rank, incarnation, host, epoch: epoch.number };
            keep(&mut self.joined, joined, CHANGES_KEPT);
        }
    }

    fn check_phase(&mut self, now: Timestamp) -> Option<Step> {
        match &mut self.phase {
            Phase::Waiting { since, ask_at } => {
                let (since, asks) = (*since, now >= *ask_at);
                if asks {
                    *ask_at = now + self.repeat;
                    self.ask();
                }
                (now >= since + self.stuck_after())
                    .then(|| self.end(if self.is_new { NOT_TAKEN_IN } else { NO_MAJORITY }))
            }
            Phase::Forming(_) => self.form(now),
            _ => None,
        }
    }

    /// Whoever was left out, or has missed what was decided, hears so.
    fn ask(&mut self) {
        let note = Note::Membership(Message::Ask { epoch: self.membership.epoch().number }).encode();
        for member in self.membership.epoch().members.iter().filter(|member| **member != self.me) {
            self.notes.push_back((*member, note.clone()));
        }
    }

    fn form(&mut self, now: Timestamp) -> Option<Step> {
        let Phase::Forming(forming) = &mut self.phase else { return None };
        let number = forming.epoch.number;
        let is_ready = |member: &Member| self.heard.get(member).is_some_and(|ready| ready.epoch == number);
        if now >= forming.say_at {
            forming.say_at = now + self.repeat;
            for (member, ready) in &self.said {
                self.notes.push_back((*member, Note::Ready(Ready { asks: true, ..*ready }).encode()));
            }
        }
        let missing: Vec<Member> = self.said.keys().copied().filter(|member| !is_ready(member)).collect();
        if missing.is_empty() {
            // Who has just joined has made none of these calls.
            let heard = self.heard.values().filter(|ready| ready.epoch == number && !ready.is_new);
            if self.is_new {
                self.calls.begin_at(heard.clone().map(|ready| ready.boundary).max()?);
            }
            // Who is alone has said nothing to anybody.
            let own = Some(forming.own.clone()).filter(|_| !self.is_new);
            let all = heard.map(|ready| ready.below..ready.next).chain(own);
            let unsure = all.clone().map(|calls| calls.start).min()?..all.map(|calls| calls.end).max()?;
            if unsure.end - unsure.start > AHEAD_MAX {
                return Some(self.end(AT_ODDS));
            }
            let phase = std::mem::replace(&mut self.phase, Phase::Running);
            let Phase::Forming(forming) = phase else { return None };
            return Some(Step::Reform(forming, unsure));
        }
        if now >= forming.since + self.peer_timeout {
            for member in missing {
                self.membership.suspect(now, member);
            }
            forming.since = now;
        }
        None
    }

    /// The connection id that a member wants to see.
    pub(crate) fn connection_of(&self, epoch: &Epoch, rank: u32) -> u32 {
        let said = epoch.of_rank(rank).and_then(|member| self.heard.get(&member));
        said.filter(|ready| ready.epoch == epoch.number).map_or(0, |ready| ready.connection)
    }

    /// What this rank and others have under one number are different calls.
    pub(crate) fn at_odds(&self) -> OpError {
        self.ended_by(AT_ODDS)
    }

    fn end(&self, outcome: &'static str) -> Step {
        Step::End(self.ended_by(outcome))
    }

    fn ended_by(&self, outcome: &'static str) -> OpError {
        let cause = match &self.verdict {
            Some(error) => error.to_string(),
            None if self.is_new => "it was to join: start it again".to_owned(),
            None => "the other ranks, which have lost somebody".to_owned(),
        };
        OpError::NotMember { epoch: self.membership.epoch().number, outcome, cause }
    }

    fn stuck_after(&self) -> Duration {
        if self.is_new {
            self.peer_timeout * JOIN_TIMEOUTS
        } else {
            self.stuck_after
        }
    }
}

/// Whether a group of these ranks has lost one that is a member of `epoch`.
fn loses_member(epoch: &Epoch, lives: &[Member], error: &OpError) -> bool {
    let life = lost_rank(error).and_then(|rank| lives.get(rank as usize));
    life.is_some_and(|life| epoch.has(*life))
}

/// The rank whose loss it is.
fn lost_rank(error: &OpError) -> Option<u32> {
    match error {
        OpError::PeerLost { rank, .. } | OpError::PeerLeft { rank, .. } => Some(*rank),
        _ => None,
    }
}

fn ranks_of(epoch: &Epoch) -> Arc<[u32]> {
    epoch.members.iter().map(|member| member.rank).collect()
}

/// Takes one more, and forgets the oldest where it would be more than `most`.
fn keep<T>(kept: &mut Vec<T>, one: T, most: usize) {
    if kept.len() >= most {
        kept.remove(0);
    }
    kept.push(one);
}

/// Who was lost, and who has joined: twice as many as such a group has ranks. Whoever asks gets them all, and the watch asks once a second.
const CHANGES_KEPT: usize = 128;
/// Members of so many epochs. No call that has not ended is as old.
const EPOCHS_KEPT: usize = 1024;
const AT_ODDS: &str = "members count their calls so differently that they cannot have made the same ones";
const EXCLUDED: &str = "the others go on without it";
pub(crate) const NOT_TAKEN_IN: &str = "the members of the group that runs did not take it in";
const NO_MAJORITY: &str = "no majority of the ranks can be reached, and fewer may not go on";
/// A rank that joins is taken in within one, and one more may pass until a member is lost meanwhile.
const JOIN_TIMEOUTS: u32 = 3;
