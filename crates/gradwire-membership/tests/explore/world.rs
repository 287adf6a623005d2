//! Ranks that train, on a network that loses, doubles, delays and tears, in virtual time.
//!
//! A step is a collective that needs the contribution of every member of the epoch. Its result is folded into the rank's
//! parameters, here one number, so that ranks that ever did something else can be told apart.

use crate::checker::{Checker, Violation};
use crate::rng::{mix, Rng};
use gradwire_core::Timestamp;
use gradwire_membership::{Epoch, Event, Member, Membership, Message, Settings, Transmit};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) const TICK: Duration = Duration::from_millis(10);
/// Who is not taken in for so long starts again: those whom it asks may be gone.
const JOINS_FOR: Duration = Duration::from_secs(1);
/// Of the ranks' failure detector.
pub(crate) const SILENCE: Duration = Duration::from_millis(60);
pub(crate) const SETTINGS: Settings = Settings {
    repeat: Duration::from_millis(15),
    attempt: Duration::from_millis(40),
    patience: Duration::from_millis(1_500),
    unheard: 1,
    silent: Duration::from_millis(30),
};
/// In the proportions of the engine's, which are parts of its peer timeout.
pub(crate) const ENGINE_SETTINGS: Settings = Settings {
    repeat: TICK,
    attempt: Duration::from_millis(500),
    patience: Duration::from_millis(3_000),
    unheard: 20,
    silent: Duration::from_millis(100),
};

/// Whom ranks take for lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Detector {
    /// Everybody who is silent.
    All,
    /// The one who was found first in an epoch, by anybody, who tells the others: with him the group of that epoch has failed, and its
    /// connections find nobody any more.
    First,
}

/// What is broken on purpose, so that the checker has something to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sabotage {
    None,
    /// One vote counts for everybody.
    VotesAreForged,
    /// Who promises does not say what it has accepted.
    AcceptedIsForgotten,
    /// A process that starts again takes its old life's place.
    AmnesiacsVote,
    /// Steps are completed after the promise to complete none.
    FreezeIsIgnored,
    /// Parameters are never fetched.
    NothingIsFetched,
    /// Contributions count whatever their epoch.
    EpochsAreMixed,
}

/// Done to the world at a time.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    Crash(u32),
    /// A host with all of its ranks.
    CrashAll(Vec<u32>),
    Restart(u32),
    /// In good order: it says goodbye to the members of its epoch, and votes no more.
    Leave(u32),
    /// Nothing passes from the first ones to the second ones.
    Block(Vec<u32>, Vec<u32>),
    Heal,
}

#[derive(Clone, Debug)]
enum Packet {
    Membership(Message),
    /// Also the heartbeat: what the sender contributes to its present step and to the one before.
    Contribution {
        epoch: u64,
        step: u64,
    },
    Fetch {
        epoch: u64,
    },
    Parameters {
        epoch: u64,
        steps: u64,
        state: u64,
    },
    /// The sender's group has lost a rank.
    Lost {
        epoch: u64,
        rank: u32,
    },
    Goodbye,
}

/// One rank.
struct Rank {
    member: Member,
    machine: Membership,
    steps: u64,
    state: u64,
    /// Epoch as it entered it, for collectives.
    epoch: Epoch,
    fetch: Option<Member>,
    contributions: BTreeMap<u64, BTreeSet<(Member, u64)>>,
    heard: BTreeMap<u32, Timestamp>,
    /// Under [`Detector::First`]: in the present epoch somebody is lost.
    has_failed: bool,
    is_over: bool,
    /// Since when it lives.
    since: Timestamp,
}

/// How bad the network is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    pub(crate) loss: u64,
    pub(crate) duplicate: u64,
    pub(crate) delay_max_us: u64,
}

pub(crate) struct World {
    ranks: Vec<Option<Rank>>,
    incarnations: Vec<u64>,
    pub(crate) checker: Checker,
    pub(crate) now: Timestamp,
    queue: BTreeMap<(Timestamp, u64), (Member, Member, Packet)>,
    sequence: u64,
    blocked: BTreeSet<(u32, u32)>,
    weather: Weather,
    rng: Rng,
    sabotage: Sabotage,
    settings: Settings,
    detector: Detector,
    /// Messages of the protocol that were taken in so far, by anybody.
    pub(crate) handled: u64,
    /// This happens when so many messages of the protocol have been sent to somebody and before the last one is taken in.
    pub(crate) fault_at: Option<(u64, Fault)>,
    latest: Epoch,
}

impl World {
    pub(crate) fn new(world_size: u32, weather: Weather, sabotage: Sabotage, seed: u64) -> Self {
        Self::with((SETTINGS, Detector::All), world_size, weather, sabotage, seed)
    }

    pub(crate) fn with(
        (settings, detector): (Settings, Detector),
        world_size: u32,
        weather: Weather,
        sabotage: Sabotage,
        seed: u64,
    ) -> Self {
        let members: Vec<Member> = (0..world_size).map(|rank| Member { rank, incarnation: 1 }).collect();
        let first = Epoch::first(members.clone());
        let start = Timestamp::from_nanos(0);
        let rank = |member: &Member| {
            Some(Rank {
                member: *member,
                machine: Membership::founder(*member, first.clone(), settings),
                steps: 0,
                state: 7,
                epoch: first.clone(),
                fetch: None,
                contributions: BTreeMap::new(),
                heard: members.iter().map(|member| (member.rank, start)).collect(),
                has_failed: false,
                is_over: false,
                since: start,
            })
        };
        Self {
            ranks: members.iter().map(rank).collect(),
            incarnations: vec![1; world_size as usize],
            checker: Checker::new(&first, 7),
            now: start,
            queue: BTreeMap::new(),
            sequence: 0,
            blocked: BTreeSet::new(),
            weather,
            rng: Rng(seed),
            sabotage,
            settings,
            detector,
            handled: 0,
            fault_at: None,
            latest: first,
        }
    }

    pub(crate) fn calm(world_size: u32) -> Self {
        Self::calm_with(world_size, Sabotage::None, 1)
    }

    pub(crate) fn calm_with(world_size: u32, sabotage: Sabotage, seed: u64) -> Self {
        Self::new(world_size, Weather { loss: 0, duplicate: 0, delay_max_us: 2_000 }, sabotage, seed)
    }

    pub(crate) fn apply(&mut self, fault: &Fault) {
        match fault {
            Fault::Crash(rank) => self.ranks[*rank as usize] = None,
            Fault::CrashAll(ranks) => ranks.iter().for_each(|rank| self.ranks[*rank as usize] = None),
            Fault::Restart(rank) => self.restart(*rank),
            Fault::Leave(rank) => self.leave(*rank),
            Fault::Block(from, to) => {
                let ways = from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to)));
                self.blocked.extend(ways.filter(|(from, to)| from != to));
            }
            Fault::Heal => self.blocked.clear(),
        }
    }

    pub(crate) fn heal(&mut self) {
        self.blocked.clear();
        self.weather = Weather { loss: 0, duplicate: 0, delay_max_us: 2_000 };
    }

    /// Runs for so long, or until something is wrong.
    pub(crate) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end && self.checker.violation.is_none() {
            let tick = self.now + TICK;
            while let Some(entry) = self.queue.first_entry().filter(|entry| entry.key().0 <= tick) {
                self.now = entry.key().0.max(self.now);
                let (from, to, packet) = entry.remove();
                self.deliver(from, to, packet);
            }
            self.now = tick;
            for rank in 0..self.ranks.len() {
                self.tick(rank);
            }
        }
    }

    /// The epoch with the largest number that anybody has entered.
    pub(crate) fn latest(&self) -> &Epoch {
        &self.latest
    }

    /// Of its members that live and have not given up, the steps that they have done.
    pub(crate) fn steps(&self) -> Vec<u64> {
        self.living().map(|rank| rank.steps).collect()
    }

    pub(crate) fn has_majority(&self) -> bool {
        self.living().count() >= self.latest.majority()
    }

    pub(crate) fn lives(&self, rank: u32) -> bool {
        self.ranks[rank as usize].as_ref().is_some_and(|rank| !rank.is_over)
    }

    /// Whether that rank is in the latest epoch that anybody is in.
    pub(crate) fn is_in_latest(&self, rank: u32) -> bool {
        self.ranks[rank as usize].as_ref().is_some_and(|rank| rank.epoch == self.latest)
    }

    /// Whether that rank's process ended by itself because it could not go on.
    pub(crate) fn has_given_up(&self, rank: u32) -> bool {
        self.ranks[rank as usize].as_ref().is_some_and(|rank| rank.is_over)
    }

    fn living(&self) -> impl Iterator<Item = &Rank> {
        self.ranks.iter().flatten().filter(|rank| !rank.is_over && self.latest.has(rank.member))
    }

    fn leave(&mut self, rank: u32) {
        let Some(rank) = self.ranks[rank as usize].take() else { return };
        let others = rank.epoch.members.iter().filter(|member| **member != rank.member);
        others.for_each(|other| self.send(rank.member, *other, Packet::Goodbye));
    }

    fn restart(&mut self, rank: u32) {
        let place = rank as usize;
        let contacts = self.latest.clone();
        let is_amnesiac = self.sabotage == Sabotage::AmnesiacsVote && self.ranks[place].is_none();
        if is_amnesiac {
            let member = Member { rank, incarnation: self.incarnations[place] };
            if contacts.has(member) {
                let machine = Membership::founder(member, contacts.clone(), self.settings);
                return self.start(member, machine, contacts);
            }
        }
        self.incarnations[place] += 1;
        let member = Member { rank, incarnation: self.incarnations[place] };
        let machine = Membership::joiner(member, contacts.clone(), self.settings, self.now);
        self.start(member, machine, contacts);
    }

    fn start(&mut self, member: Member, machine: Membership, epoch: Epoch) {
        let heard = (0..self.ranks.len() as u32).map(|rank| (rank, self.now)).collect();
        let (steps, state, fetch, contributions, since) = (0, 0, None, BTreeMap::new(), self.now);
        let (has_failed, is_over) = (false, false);
        let rank = Rank {
            member,
            machine,
            steps,
            state,
            epoch,
            fetch,
            contributions,
            heard,
            has_failed,
            is_over,
            since,
        };
        self.ranks[member.rank as usize] = Some(rank);
    }

    fn send(&mut self, from: Member, to: Member, packet: Packet) {
        if self.blocked.contains(&(from.rank, to.rank)) || self.rng.chance(self.weather.loss) {
            return;
        }
        let copies = 1 + u64::from(self.rng.chance(self.weather.duplicate));
        for _ in 0..copies {
            let delay = Duration::from_micros(100 + self.rng.below(self.weather.delay_max_us));
            self.sequence += 1;
            self.queue.insert((self.now + delay, self.sequence), (from, to, packet.clone()));
        }
    }

    fn deliver(&mut self, from: Member, to: Member, packet: Packet) {
        if matches!(packet, Packet::Membership(_)) {
            self.handled += 1;
            if let Some((_, fault)) = self.fault_at.take_if(|(at, _)| *at == self.handled) {
                self.apply(&fault);
            }
        }
        let (now, sabotage) = (self.now, self.sabotage);
        if self.blocked.contains(&(from.rank, to.rank)) {
            return;
        }
        let Some(rank) = self.ranks[to.rank as usize].as_mut().filter(|rank| rank.member == to) else {
            return;
        };
        rank.heard.insert(from.rank, now);
        match packet {
            Packet::Membership(message) => rank.take(now, from, message, sabotage),
            Packet::Contribution { epoch, step } => {
                if epoch == rank.epoch.number || sabotage == Sabotage::EpochsAreMixed {
                    let contributions = rank.contributions.entry(step).or_default();
                    if contributions.iter().all(|(member, _)| member.rank != from.rank) {
                        contributions.insert((from, epoch));
                    }
                }
            }
            Packet::Lost { epoch, rank: lost } => {
                if epoch == rank.epoch.number && !std::mem::replace(&mut rank.has_failed, true) {
                    rank.suspect(now, lost);
                }
            }
            Packet::Goodbye => rank.machine.has_left(now, from),
            Packet::Fetch { epoch } => {
                let has_it =
                    epoch == rank.epoch.number && rank.machine.progress() == Some(rank.epoch.frontier);
                if has_it {
                    let (steps, state) = (rank.steps, rank.state);
                    self.send(to, from, Packet::Parameters { epoch, steps, state });
                }
            }
            Packet::Parameters { epoch, steps, state } => {
                if epoch == rank.epoch.number && rank.fetch.is_some() {
                    rank.machine.fetched();
                    if rank.machine.progress().is_some() {
                        (rank.steps, rank.state, rank.fetch) = (steps, state, None);
                        self.checker.on_state(to, (epoch, steps), state);
                    }
                }
            }
        }
        self.drain(to.rank as usize);
        self.advance(to.rank as usize);
    }

    fn tick(&mut self, place: usize) {
        let Some(rank) = self.ranks[place].as_mut().filter(|rank| !rank.is_over) else { return };
        let (now, me) = (self.now, rank.member);
        if rank.machine.poll_timeout().is_some_and(|at| at <= now) {
            rank.machine.handle_timeout(now);
        }
        let is_member = rank.epoch.has(me);
        if !is_member && now.since(rank.since) > JOINS_FOR {
            return self.restart(me.rank);
        }
        let others: Vec<Member> = rank.epoch.members.iter().copied().filter(|member| *member != me).collect();
        let heard = |rank: &Rank, of: &Member| rank.heard.get(&of.rank).copied().unwrap_or(now);
        let is_silent = |member: &&Member| is_member && now.since(heard(rank, member)) > SILENCE;
        let silent: Vec<u32> = others.iter().filter(is_silent).map(|member| member.rank).collect();
        let lost = match self.detector {
            Detector::All => silent,
            Detector::First if rank.has_failed => Vec::new(),
            Detector::First => silent.into_iter().take(1).collect(),
        };
        for lost in &lost {
            rank.suspect(now, *lost);
        }
        rank.has_failed |= !lost.is_empty();
        let (epoch, step, runs, fetch) =
            (rank.epoch.number, rank.steps, rank.may_run(self.sabotage), rank.fetch);
        for member in others.iter().copied().filter(|_| is_member) {
            // A rank that waits for parameters says that it lives, and contributes nothing.
            for step in [step, step.wrapping_sub(1)] {
                let step = if runs { step } else { u64::MAX };
                self.send(me, member, Packet::Contribution { epoch, step });
            }
        }
        if let Some(source) = fetch {
            self.send(me, source, Packet::Fetch { epoch });
        }
        if let Some(rank) = lost.first().copied().filter(|_| self.detector == Detector::First) {
            others.iter().for_each(|to| self.send(me, *to, Packet::Lost { epoch, rank }));
        }
        self.drain(place);
        self.advance(place);
    }

    /// Completes the step if every member has contributed.
    fn advance(&mut self, place: usize) {
        let sabotage = self.sabotage;
        let Some(rank) = self.ranks[place].as_mut().filter(|rank| rank.may_run(sabotage)) else { return };
        let own = (rank.member, rank.epoch.number);
        let contributed = rank.contributions.entry(rank.steps).or_default();
        contributed.insert(own);
        if contributed.len() < rank.epoch.members.len() {
            return;
        }
        let contributed = rank.contributions.remove(&rank.steps).unwrap_or_default();
        let sum =
            contributed.iter().map(|(member, _)| mix(u64::from(member.rank) + 1)).fold(0, u64::wrapping_add);
        rank.state = mix(rank.state ^ sum.rotate_left(17));
        rank.steps += 1;
        if rank.machine.may_run() {
            rank.machine.completed();
        }
        let (member, at, state) = (rank.member, (rank.epoch.number, rank.steps), rank.state);
        self.checker.on_result(member, &rank.epoch.clone(), &contributed);
        self.checker.on_state(member, at, state);
    }

    fn drain(&mut self, place: usize) {
        let Some(rank) = self.ranks[place].as_mut() else { return };
        let me = rank.member;
        let mut sent = Vec::new();
        while let Some(Transmit { to, message }) = rank.machine.poll_transmit() {
            sent.push((to, message));
        }
        let mut excluded = None;
        while let Some(event) = rank.machine.poll_event() {
            match event {
                Event::Frozen { epoch } => self.checker.on_frozen(me, epoch),
                Event::Entered { epoch, fetch } => {
                    self.checker.on_entered(me, &epoch);
                    rank.enter(self.now, epoch.clone(), fetch, self.sabotage);
                    if rank.fetch.is_none() {
                        self.checker.on_state(me, (epoch.number, rank.steps), rank.state);
                    }
                    if epoch.number > self.latest.number {
                        self.latest = epoch;
                    }
                }
                Event::Excluded { epoch } => excluded = Some(epoch),
                Event::Halted { .. } => rank.is_over = true,
            }
        }
        for (to, message) in sent {
            self.forge(me, to, &message);
            self.send(me, to, Packet::Membership(message));
        }
        if excluded.is_some() {
            self.restart(me.rank);
        }
    }

    /// Under [`Sabotage::VotesAreForged`] a vote comes from every member at once.
    fn forge(&mut self, me: Member, to: Member, message: &Message) {
        let is_vote = matches!(message, Message::Promised { .. } | Message::Accepted { .. });
        let Some(rank) = &self.ranks[me.rank as usize] else { return };
        if self.sabotage == Sabotage::VotesAreForged && is_vote {
            let others: Vec<Member> =
                rank.epoch.members.iter().copied().filter(|other| *other != me && *other != to).collect();
            for other in others {
                self.queue.insert(
                    (self.now, u64::MAX - self.sequence),
                    (other, to, Packet::Membership(message.clone())),
                );
                self.sequence += 1;
            }
        }
    }
}

impl Rank {
    fn suspect(&mut self, now: Timestamp, lost: u32) {
        let lost = self.epoch.of_rank(lost);
        lost.into_iter().for_each(|member| self.machine.suspect(now, member));
    }

    fn may_run(&self, sabotage: Sabotage) -> bool {
        let is_free = self.fetch.is_none() && self.epoch.has(self.member);
        self.machine.may_run() || (sabotage == Sabotage::FreezeIsIgnored && is_free)
    }

    fn take(&mut self, now: Timestamp, from: Member, message: Message, sabotage: Sabotage) {
        let message = match message {
            Message::Promised { epoch, ballot, mut promise } if sabotage == Sabotage::AcceptedIsForgotten => {
                promise.accepted = None;
                Message::Promised { epoch, ballot, promise }
            }
            other => other,
        };
        self.machine.handle_message(now, from, message);
    }

    fn enter(&mut self, now: Timestamp, epoch: Epoch, fetch: Option<Member>, sabotage: Sabotage) {
        for member in &epoch.members {
            self.heard.insert(member.rank, now);
        }
        self.contributions.clear();
        self.has_failed = false;
        self.fetch = fetch;
        if sabotage == Sabotage::NothingIsFetched && self.fetch.take().is_some() {
            self.steps = epoch.frontier;
            self.machine.fetched();
        }
        self.epoch = epoch;
    }
}

/// After the last fault: while a majority lives something must go on, and everybody who lives must be part of it.
pub(crate) fn check_liveness(world: &mut World) {
    world.heal();
    world.run_for(Duration::from_millis(2_500));
    if world.checker.violation.is_some() || !world.has_majority() {
        return;
    }
    let before = world.steps();
    world.run_for(Duration::from_millis(300));
    let (after, epoch) = (world.steps(), world.latest().clone());
    let goes_on =
        before.len() == after.len() && before.iter().zip(&after).all(|(before, after)| after > before);
    let outside: Vec<u32> = (0..world.ranks.len() as u32)
        .filter(|rank| world.lives(*rank) && epoch.of_rank(*rank).is_none())
        .collect();
    if !goes_on || !outside.is_empty() {
        let text = format!("steps {before:?}, later {after:?} in {epoch:?}; outside: {outside:?}");
        world.checker.found(Violation::Stuck(text));
    }
}
