//! The state machine of one member.
//!
//! ```text
//! JOINING --Decided with me--> IN AN EPOCH --promise--> FROZEN --Decided with me--> IN THE NEXT EPOCH
//!                                                          |--Decided without me--> EXCLUDED
//!                                                          '--no decision within the patience--> HALTED
//! ```

use crate::acceptor::Acceptor;
use crate::attempt::Attempt;
use crate::codec::COUNT_MAX;
use crate::epoch::{Ballot, Epoch, Member};
use crate::event::Event;
use crate::message::{Message, Promise, Transmit};
use crate::settings::Settings;
use crate::turn::{before, Turn};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::cmp::Ordering;
use core::time::Duration;
use gradwire_core::Timestamp;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Joining,
    Member,
    Over,
}

/// One member.
#[derive(Clone, Debug)]
pub struct Membership {
    me: Member,
    settings: Settings,
    phase: Phase,
    epoch: Epoch,
    progress: Option<u64>,
    suspects: BTreeSet<u32>,
    /// Those of the suspects that have said goodbye: they vote no more.
    left: BTreeSet<u32>,
    /// The latest life of each rank that wants to join.
    joining: BTreeMap<u32, Member>,
    acceptor: Acceptor,
    attempt: Option<Attempt>,
    /// Largest that was seen.
    counter: u64,
    attempts: u32,
    /// When to ask to join again.
    join_at: Option<Timestamp>,
    /// An own attempt that is to come.
    turn: Option<Turn>,
    halts_at: Option<Timestamp>,
    /// When each member of the epoch last said something.
    heard: BTreeMap<Member, Timestamp>,
    /// The latest promise, and how often it was asked for.
    asked: Option<(Ballot, u32)>,
    transmits: VecDeque<Transmit>,
    events: VecDeque<Event>,
}

impl Membership {
    /// A member of the first epoch.
    ///
    /// # Panics
    /// `me` is not in it.
    #[must_use]
    pub fn founder(me: Member, epoch: Epoch, settings: Settings) -> Self {
        assert!(epoch.has(me), "a founder is a member of the first epoch");
        let progress = Some(epoch.frontier);
        Self::new(me, Phase::Member, (epoch, progress), settings, None)
    }

    /// A rank that wants to become a member. `contacts` is any epoch that is known: its members are asked.
    #[must_use]
    pub fn joiner(me: Member, contacts: Epoch, settings: Settings, now: Timestamp) -> Self {
        Self::new(me, Phase::Joining, (contacts, None), settings, Some(now))
    }

    fn new(
        me: Member,
        phase: Phase,
        (epoch, progress): (Epoch, Option<u64>),
        settings: Settings,
        join_at: Option<Timestamp>,
    ) -> Self {
        Self {
            me,
            settings,
            phase,
            epoch,
            progress,
            suspects: BTreeSet::new(),
            left: BTreeSet::new(),
            joining: BTreeMap::new(),
            acceptor: Acceptor::default(),
            attempt: None,
            counter: 0,
            attempts: 0,
            join_at,
            turn: None,
            halts_at: None,
            heard: BTreeMap::new(),
            asked: None,
            transmits: VecDeque::new(),
            events: VecDeque::new(),
        }
    }

    /// The epoch that this rank is in, or whose members it asks to join.
    #[must_use]
    pub fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    /// Whether collectives may be called and completed here now.
    #[must_use]
    pub fn may_run(&self) -> bool {
        self.phase == Phase::Member && !self.acceptor.is_bound() && self.progress.is_some()
    }

    /// Steps that are done here; `None`: parameters are missing.
    #[must_use]
    pub fn progress(&self) -> Option<u64> {
        self.progress
    }

    /// A step was completed in the present epoch, with all of its members.
    ///
    /// # Panics
    /// [`Membership::may_run`] is false: a bug of the caller, whose result belongs to no epoch.
    pub fn completed(&mut self) {
        assert!(self.may_run(), "a step was completed after the promise to complete none");
        self.progress = self.progress.map(|steps| steps + 1);
    }

    /// Who wants to join has to say so again: nobody is taken in until then, unless it was put to the vote already.
    pub fn forget_joiners(&mut self) {
        self.joining.clear();
    }

    /// The parameters after the present epoch's frontier are here.
    pub fn fetched(&mut self) {
        if self.phase == Phase::Member && !self.acceptor.is_bound() {
            self.progress = Some(self.epoch.frontier);
        }
    }

    /// A member has said goodbye. As one that is suspected, but it votes no more: where fewer than a majority still do, nobody waits long for
    /// their votes, and not at all where the next epoch cannot have been decided before.
    pub fn has_left(&mut self, now: Timestamp, member: Member) {
        if self.phase != Phase::Member || member == self.me || !self.epoch.has(member) {
            return;
        }
        if !self.left.insert(member.rank) {
            return;
        }
        self.suspect(now, member);
        if self.can_be_ended() {
            return;
        }
        let needs_own_vote = self.epoch.members.len() - 1 < self.epoch.majority();
        if needs_own_vote && !self.acceptor.has_accepted() {
            return self.halt();
        }
        let patience = self.patience();
        self.halts_at = self.halts_at.map(|at| at.min(now + patience));
    }

    /// The transport has given a member up. For this epoch that stands; of another life of its rank it says nothing.
    pub fn suspect(&mut self, now: Timestamp, member: Member) {
        if self.phase == Phase::Member && member != self.me && self.epoch.has(member) {
            self.suspects.insert(member.rank);
            self.schedule(now);
            if let Some(turn) = &mut self.turn {
                // It may come sooner.
                turn.look_at = now;
            }
        }
    }

    /// Takes a message in. `from` is authentic: the transport's keys belong to one life of one rank.
    pub fn handle_message(&mut self, now: Timestamp, from: Member, message: Message) {
        if self.phase == Phase::Over || from == self.me {
            return;
        }
        if self.epoch.has(from) {
            self.heard.insert(from, now);
        }
        let about = match message {
            Message::Decided(epoch) => return self.on_decided(now, epoch),
            _ if self.phase == Phase::Joining => return,
            Message::Join => return self.on_join(now, from),
            Message::Prepare { epoch, .. }
            | Message::Promised { epoch, .. }
            | Message::Accept { epoch, .. }
            | Message::Accepted { epoch, .. }
            | Message::Refused { epoch, .. }
            | Message::Ask { epoch } => epoch,
        };
        // Whoever is ahead is asked, also where it is new in what this member has missed.
        self.hear_of(from, about);
        if about > self.epoch.number {
            return;
        }
        if about < self.epoch.number || !self.epoch.has(from) {
            return self.tell(from);
        }
        match message {
            Message::Prepare { ballot, .. } => self.on_prepare(now, from, ballot),
            Message::Promised { ballot, promise, .. } => self.on_promised(now, from, ballot, promise),
            Message::Accept { ballot, next, .. } => self.on_accept(now, from, ballot, next),
            Message::Accepted { ballot, .. } => self.on_accepted(now, from, ballot),
            Message::Refused { ballot, .. } => self.on_refused(now, ballot),
            _ => self.tell(from),
        }
    }

    /// Somebody is in this epoch; `from` is authentic as above. Where that is a later one it is asked for it, once each time, since who has
    /// decided it may be dead by now.
    pub fn hear_of(&mut self, from: Member, epoch: u64) {
        if self.phase != Phase::Over && from != self.me && epoch > self.epoch.number {
            self.transmit(from, Message::Ask { epoch: self.epoch.number });
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if self.phase == Phase::Over {
            return;
        }
        if self.halts_at.is_some_and(|at| now >= at) {
            return self.halt();
        }
        if let Some(attempt) = &self.attempt {
            if now >= attempt.until {
                self.end_attempt(now);
            } else if now >= attempt.repeat_at {
                self.say_attempt(now);
            }
        }
        if self.join_at.is_some_and(|at| now >= at) {
            self.ask_to_join(now);
        }
        if let Some(turn) = self.turn.filter(|turn| now >= turn.look_at) {
            self.take_turn(now, turn);
        }
    }

    /// What is to be sent, until `None`.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// What changed, until `None`.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Whether [`Membership::poll_event`] has something, for which no time comes.
    #[must_use]
    pub fn has_news(&self) -> bool {
        !self.events.is_empty()
    }

    /// When [`Membership::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        if self.phase == Phase::Over {
            return None;
        }
        let attempt = self.attempt.as_ref().map(|attempt| attempt.until.min(attempt.repeat_at));
        let turn = self.turn.as_ref().map(|turn| turn.look_at);
        [attempt, turn, self.join_at, self.halts_at].into_iter().flatten().min()
    }

    // The member's vote.

    fn on_prepare(&mut self, now: Timestamp, from: Member, ballot: Ballot) {
        self.note(ballot);
        let epoch = self.epoch.number;
        let message = match self.acceptor.promise(ballot) {
            Err(ballot) => Message::Refused { epoch, ballot },
            Ok(accepted) => {
                self.freeze(now);
                match self.asked_before(ballot).cmp(&self.settings.unheard) {
                    Ordering::Less => self.stand_back(now, ballot),
                    Ordering::Equal => self.give_up_on(now, from),
                    Ordering::Greater => {}
                }
                let promise = Promise { accepted, progress: self.progress };
                Message::Promised { epoch, ballot, promise }
            }
        };
        self.transmit(from, message);
    }

    fn on_accept(&mut self, now: Timestamp, from: Member, ballot: Ballot, next: Epoch) {
        self.note(ballot);
        let epoch = self.epoch.number;
        let message = match self.acceptor.accept(ballot, next) {
            Err(ballot) => Message::Refused { epoch, ballot },
            Ok(()) => {
                self.freeze(now);
                self.stand_back(now, ballot);
                Message::Accepted { epoch, ballot }
            }
        };
        self.transmit(from, message);
    }

    /// From the first promise on nothing is completed here, so that what was said about progress stays true.
    fn freeze(&mut self, now: Timestamp) {
        if self.halts_at.is_none() {
            self.halts_at = Some(now + self.patience());
            self.events.push_back(Event::Frozen { epoch: self.epoch.number });
        }
    }

    /// Whether members enough for a majority may still vote on the next epoch.
    fn can_be_ended(&self) -> bool {
        self.epoch.members.len() - self.left.len() >= self.epoch.majority()
    }

    /// How long it stays frozen. Where nothing can be decided any more there is only the word of what may have been, before the goodbyes: who
    /// has it and lives is asked for it again and again, and gets the time that another's attempt gets.
    fn patience(&self) -> Duration {
        if self.can_be_ended() {
            self.settings.patience
        } else {
            self.settings.attempt * 2
        }
    }

    /// How often this was asked before, and answered.
    fn asked_before(&mut self, ballot: Ballot) -> u32 {
        let before = self.asked.filter(|(latest, _)| *latest == ballot).map_or(0, |(_, times)| times + 1);
        self.asked = Some((ballot, before));
        before
    }

    /// A member that asks the same again and again does not hear the answers. It takes all others for lost, and they would wait
    /// until it gives up; without it they can go on.
    // claim: faults/deaf-proposer-is-left
    fn give_up_on(&mut self, now: Timestamp, proposer: Member) {
        self.suspects.insert(proposer.rank);
        self.turn = Some(Turn::new(now, Duration::ZERO));
    }

    /// Somebody else attempts: an own attempt would only be in its way, until it has had its time.
    fn stand_back(&mut self, now: Timestamp, ballot: Ballot) {
        if self.attempt.as_ref().is_some_and(|attempt| attempt.ballot < ballot) {
            self.attempt = None;
        }
        self.turn = Some(Turn::new(now, self.settings.attempt * 2));
    }

    // The proposer.

    fn begin_attempt(&mut self, now: Timestamp) {
        if self.attempt.is_some() || !self.needs_change() {
            return;
        }
        // Only a member that does not keep to the protocol brings numbers so far, and what follows nobody would read.
        if self.counter.max(self.epoch.number) + 1 >= COUNT_MAX {
            return self.freeze(now);
        }
        self.counter += 1;
        self.attempts += 1;
        let ballot = Ballot { counter: self.counter, proposer: self.me };
        let until = now + self.settings.attempt * self.attempts.min(BACKOFF_MAX);
        let (promises, accepts) = (BTreeMap::new(), BTreeSet::new());
        self.attempt = Some(Attempt { ballot, promises, next: None, accepts, repeat_at: now, until });
        if let Ok(accepted) = self.acceptor.promise(ballot) {
            self.freeze(now);
            let promise = Promise { accepted, progress: self.progress };
            self.on_promised(now, self.me, ballot, promise);
        }
        self.say_attempt(now);
    }

    fn on_promised(&mut self, now: Timestamp, from: Member, ballot: Ballot, promise: Promise) {
        let Some(attempt) = &mut self.attempt else { return };
        if attempt.ballot != ballot || attempt.next.is_some() {
            return;
        }
        attempt.promises.insert(from, promise);
        let promises = &attempt.promises;
        let is_heard =
            |member: &Member| promises.contains_key(member) || self.suspects.contains(&member.rank);
        if promises.len() >= self.epoch.majority() && self.epoch.members.iter().all(is_heard) {
            self.put_to_the_vote(now);
        }
    }

    fn put_to_the_vote(&mut self, now: Timestamp) {
        let Some(attempt) = &mut self.attempt else { return };
        let (suspects, left, joining) = (&self.suspects, &self.left, &self.joining);
        let stays = |member: &Member| !suspects.contains(&member.rank);
        // A later life of a rank says that the earlier one is over.
        let is_gone = |member: &Member| left.contains(&member.rank) || joining.contains_key(&member.rank);
        // Who is slow to promise may have the parameters, and is waited for once.
        let promises = &attempt.promises;
        let is_heard = |member: &Member| promises.contains_key(member) || !stays(member);
        let is_last_way = self.attempts > 1 || self.epoch.members.iter().all(is_heard);
        let may_stay = |member: &Member| is_last_way && !is_gone(member);
        let Ok(next) = attempt.choose(&self.epoch, stays, may_stay, joining.values().copied()) else {
            // Who has the parameters may yet be heard, or hears others where this rank does not.
            return if is_last_way { self.give_way(now) } else { self.attempt_again(now, 1) };
        };
        attempt.next = Some(next.clone());
        attempt.until = now + self.settings.attempt;
        let ballot = attempt.ballot;
        if self.acceptor.accept(ballot, next).is_ok() {
            self.on_accepted(now, self.me, ballot);
        }
        self.say_attempt(now);
    }

    fn on_accepted(&mut self, now: Timestamp, from: Member, ballot: Ballot) {
        let Some(attempt) = &mut self.attempt else { return };
        let Some(next) = attempt.next.clone().filter(|_| attempt.ballot == ballot) else { return };
        attempt.accepts.insert(from);
        if attempt.accepts.len() < self.epoch.majority() {
            return;
        }
        let told: BTreeSet<Member> = self.epoch.members.iter().chain(&next.members).copied().collect();
        let me = self.me;
        for member in told.into_iter().filter(|member| *member != me) {
            self.transmit(member, Message::Decided(next.clone()));
        }
        self.on_decided(now, next);
    }

    fn on_refused(&mut self, now: Timestamp, ballot: Ballot) {
        self.note(ballot);
        if self.attempt.as_ref().is_some_and(|attempt| attempt.ballot < ballot) {
            self.attempt = None;
            self.turn = Some(Turn::new(now, self.settings.attempt));
        }
    }

    /// Time is up: a majority is enough to go on, less is not.
    fn end_attempt(&mut self, now: Timestamp) {
        let Some(attempt) = &self.attempt else { return };
        if attempt.next.is_none() && attempt.promises.len() >= self.epoch.majority() {
            return self.put_to_the_vote(now);
        }
        self.give_way(now);
    }

    /// An attempt has come to nothing. Longer each time: it may be this rank that hears nobody, and the others wait for it.
    fn give_way(&mut self, now: Timestamp) {
        self.attempt_again(now, 3 * self.attempts.min(BACKOFF_MAX));
    }

    /// After so many times that of an attempt.
    fn attempt_again(&mut self, now: Timestamp, times: u32) {
        self.attempt = None;
        self.turn = Some(Turn::new(now, self.settings.attempt * times));
    }

    fn say_attempt(&mut self, now: Timestamp) {
        let Some(attempt) = &mut self.attempt else { return };
        attempt.repeat_at = now + self.settings.repeat;
        let (epoch, ballot) = (self.epoch.number, attempt.ballot);
        let message = match attempt.next.clone() {
            None => Message::Prepare { epoch, ballot },
            Some(next) => Message::Accept { epoch, ballot, next },
        };
        let has_answered = |member: &Member| match attempt.next {
            None => attempt.promises.contains_key(member),
            Some(_) => attempt.accepts.contains(member),
        };
        let asked: Vec<Member> =
            self.epoch.members.iter().copied().filter(|member| !has_answered(member)).collect();
        let me = self.me;
        for member in asked.into_iter().filter(|member| *member != me) {
            self.transmit(member, message.clone());
        }
    }

    /// Whether there is a reason to end this epoch: somebody is lost, somebody wants in, or it is already ending.
    fn needs_change(&self) -> bool {
        !self.suspects.is_empty() || self.acceptor.is_bound() || !self.joining.is_empty()
    }

    /// An attempt of this rank's, at its turn: the first of those who are left begins at once.
    fn schedule(&mut self, now: Timestamp) {
        if self.attempt.is_none() && self.turn.is_none() {
            self.turn = Some(Turn::new(now, Duration::ZERO));
        }
    }

    /// Attempts, or asks those who go first whether they are there.
    fn take_turn(&mut self, now: Timestamp, mut turn: Turn) {
        let before = before(self.me, &self.epoch, &self.suspects);
        let at = turn.comes_at(now, &before, &self.heard, &self.settings);
        if now >= at {
            self.turn = None;
            return self.begin_attempt(now);
        }
        turn.look_at = at.min(now + self.settings.repeat);
        self.turn = Some(turn);
        for member in before {
            self.transmit(member, Message::Ask { epoch: self.epoch.number });
        }
    }

    // Epochs begin.

    fn on_decided(&mut self, now: Timestamp, epoch: Epoch) {
        let is_next = self.phase == Phase::Member && epoch.number == self.epoch.number + 1;
        if self.phase == Phase::Member && epoch.number <= self.epoch.number {
            return;
        }
        if !epoch.has(self.me) {
            return self.on_others_decided(epoch);
        }
        let keeps = is_next && self.progress == Some(epoch.frontier);
        self.progress = if keeps { self.progress } else { None };
        self.phase = Phase::Member;
        self.suspects.clear();
        self.left.clear();
        self.joining.retain(|rank, joiner| epoch.of_rank(*rank).is_none_or(|member| member < *joiner));
        (self.acceptor, self.attempt, self.attempts) = (Acceptor::default(), None, 0);
        (self.join_at, self.turn, self.halts_at, self.asked) = (None, None, None, None);
        self.heard.clear();
        self.epoch = epoch.clone();
        let fetch = (!keeps).then_some(epoch.source);
        self.events.push_back(Event::Entered { epoch, fetch });
        if self.needs_change() {
            self.schedule(now);
        }
    }

    fn on_others_decided(&mut self, epoch: Epoch) {
        if self.phase == Phase::Joining {
            if epoch.number > self.epoch.number {
                self.epoch = epoch;
            }
            return;
        }
        self.phase = Phase::Over;
        self.events.push_back(Event::Excluded { epoch });
    }

    fn on_join(&mut self, now: Timestamp, from: Member) {
        match self.epoch.of_rank(from.rank) {
            Some(member) if member >= from => return self.tell(from),
            // Its rank lives again, so that life is over.
            Some(member) => self.suspect(now, member),
            None => {}
        }
        let latest = self.joining.entry(from.rank).or_insert(from);
        *latest = from.max(*latest);
        // Whom it may ask from now on.
        self.tell(from);
        self.schedule(now);
    }

    fn ask_to_join(&mut self, now: Timestamp) {
        for member in self.epoch.members.clone() {
            self.transmit(member, Message::Join);
        }
        // Members take a rank in only between two of their steps, and wait there for no longer than they have to.
        self.join_at = Some(now + self.settings.repeat);
    }

    fn halt(&mut self) {
        self.phase = Phase::Over;
        self.events.push_back(Event::Halted { epoch: self.epoch.number });
    }

    fn tell(&mut self, to: Member) {
        let epoch = self.epoch.clone();
        self.transmit(to, Message::Decided(epoch));
    }

    fn note(&mut self, ballot: Ballot) {
        self.counter = self.counter.max(ballot.counter);
    }

    fn transmit(&mut self, to: Member, message: Message) {
        self.transmits.push_back(Transmit { to, message });
    }
}

/// Attempts wait longer each time, up to so many times: many members may be slow at once.
const BACKOFF_MAX: u32 = 4;
