//! A group on the network thread: the machine, the addresses of its peers, the operations in flight. `continuing`: how it goes on
//! without a lost rank.

mod address;
mod continuing;
mod incoming;
mod sink;
mod told;

use crate::code_points::CodePoints;
use crate::cores::Cores;
use crate::group::GroupSetup;
use crate::here::Here;
use crate::in_flight::{shut_down, InFlight};
use crate::lanes::Lanes;
use crate::routes::{Route, Routes};
use crate::shared::Unanswered;
use crate::socket::{PathSockets, RawAddress};
use crate::succession::{Before, Succession};
use crate::tally::Tally;
use crate::{Outcome, ServedStats};
use address::PeerAddress;
use continuing::{is_relay, Door, Relay};
use gradwire_collectives::{Group, GroupEvent, Host, OpError, OpId, Request, Verdict};
use gradwire_core::wire::Opening;
use gradwire_core::{Header, Timestamp};
use sink::Sink;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::mpsc::Sender;
use std::time::Duration;

/// How long a group that has left still answers the goodbyes of its peers, so that they do not wait in vain.
const LINGER: Duration = Duration::from_secs(2);

/// Large calls so far: those that are never divided, and others.
#[derive(Clone, Copy, Default)]
struct LargeCalls {
    whole: u32,
    others: u32,
}

/// What may be worth a second thread.
const LARGE_BYTES: usize = 1 << 20;
/// So many say what a program calls: beyond what DDP broadcasts at the start, and the first exchanges of what ranks know.
const LARGE_CALLS_MIN: u32 = 200;

/// How far a group is with leaving.
enum Leaving {
    No,
    /// Saying goodbye; these callers wait for the end of it.
    Goodbye(Vec<Sender<()>>),
    /// Only answers peers, until then.
    Lingering(Timestamp),
}

/// See the module's documentation.
pub(crate) struct ActiveGroup {
    setup: GroupSetup,
    group: Group,
    /// By rank; the own entry has no candidates.
    peers: Vec<PeerAddress>,
    in_flight: HashMap<OpId, InFlight>,
    /// What is being handed to the group.
    starting: Option<InFlight>,
    /// Waits for the group to connect or to fail.
    connected: Option<Sender<Result<(), OpError>>>,
    leaving: Leaving,
    /// What this rank did as a dedicated server.
    served: ServedStats,
    /// What its collectives took and delivered.
    tally: Tally,
    /// How that ended, and who waits to know.
    workers_left: Option<Result<(), OpError>>,
    awaiting_workers: Option<Sender<Result<(), OpError>>>,
    /// When the group wants to be called.
    wake_at: Option<Timestamp>,
    /// When ways of paths are searched on, by rank.
    search_at: Vec<Option<Timestamp>>,
    /// Strangers flood the port.
    is_flooded: bool,
    /// How it goes on when a rank is lost; `None`: it ends.
    succession: Option<Box<Succession>>,
    /// On further network threads.
    lanes: Lanes,
    /// How long those may take to reach their peers.
    patience: Duration,
    large_calls: LargeCalls,
    /// Its connections of earlier epochs, latest first.
    relays: Vec<Relay>,
    /// By rank: how later lives of ranks are spoken to before they are members.
    doors: Vec<Option<Door>>,
}

impl ActiveGroup {
    /// Starts to connect.
    pub(crate) fn new(mut setup: GroupSetup, connected: Sender<Result<(), OpError>>, now: Timestamp) -> Self {
        let peers = addresses_of(&mut setup);
        let contacts = setup.contacts.take();
        let succession = setup.lineage.take().map(|lineage| match &contacts {
            None => Box::new(Succession::new(lineage)),
            Some(contacts) => Box::new(Succession::joiner(lineage, contacts.clone(), now)),
        });
        let group = Group::new(setup.config.clone(), now);
        let ranks = succession.as_ref().map_or(peers.len(), |succession| succession.ranks());
        let search_at = vec![None; peers.len()];
        let lanes = Lanes::new(std::mem::take(&mut setup.lanes.connecting));
        let patience = setup.ids.connect_timeout();
        let mut new = Self {
            setup,
            group,
            peers,
            in_flight: HashMap::new(),
            starting: None,
            connected: Some(connected),
            leaving: Leaving::No,
            served: ServedStats::default(),
            tally: Tally::new(ranks),
            workers_left: None,
            awaiting_workers: None,
            wake_at: None,
            search_at,
            is_flooded: false,
            succession,
            lanes,
            patience,
            large_calls: LargeCalls::default(),
            relays: Vec::new(),
            doors: Vec::new(),
        };
        for member in contacts.iter().flat_map(|contacts| &contacts.members) {
            new.open_door(*member);
        }
        new
    }

    /// Its name in the engine.
    pub(crate) fn key(&self) -> crate::shared::GroupKey {
        self.setup.key
    }

    /// Enters its connections into the table, as the group at `place`.
    pub(crate) fn insert_routes(&self, place: u32, routes: &mut Routes) {
        for (peer, id) in self.setup.ids.by_rank.iter().enumerate() {
            if let Some(id) = *id {
                routes.insert(Route { id, group: place, peer: peer as u32 });
            }
        }
    }

    /// Takes its connections out of the table.
    pub(crate) fn remove_routes(&self, routes: &mut Routes) {
        let relays = self.relays.iter().map(|relay| &relay.ids);
        let doors = self.succession.as_ref().map(|succession| &succession.lineage.doors);
        let ids = std::iter::once(&self.setup.ids).chain(relays).chain(doors);
        ids.flat_map(|ids| ids.by_rank.iter().flatten()).for_each(|id| routes.remove(*id));
    }

    /// Starts a collective.
    pub(crate) fn submit(
        &mut self,
        now: Timestamp,
        (request, before): (Request, Before),
        in_flight: InFlight,
    ) {
        if !matches!(self.leaving, Leaving::No) {
            in_flight.end(Err(OpError::ShutDown("a call after leaving the group".to_owned())));
            return;
        }
        self.large_calls.count(&request);
        if self.succession.is_some() {
            return self.submit_kept(now, (request, before), in_flight);
        }
        self.start(now, request, in_flight);
    }

    /// Hands a call to the group, which asks rules of its caller's that may panic.
    fn start(&mut self, now: Timestamp, request: Request, in_flight: InFlight) {
        self.starting = Some(in_flight);
        let id = self.group.submit(now, request);
        self.in_flight.extend(self.starting.take().map(|in_flight| (id, in_flight)));
    }

    /// Strangers flood the port, or no longer.
    pub(crate) fn set_flooded(&mut self, is_flooded: bool) {
        self.is_flooded = is_flooded;
        self.group.set_flooded(is_flooded);
    }

    /// Its rank in the group.
    pub(crate) fn rank(&self) -> u32 {
        self.setup.config.rank
    }

    /// See [`Group::lossy_bytes`].
    pub(crate) fn lossy_bytes(
        &mut self,
        peer: u32,
        header: &Header,
        opening: Option<&Opening>,
    ) -> Option<u64> {
        if is_relay(peer) {
            return None;
        }
        self.group.lossy_bytes(peer, header, opening)
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp) {
        if self.wake_at.is_some_and(|at| at <= now) {
            self.group.handle_timeout(now);
            self.search_ways(now);
        }
    }

    fn search_ways(&mut self, now: Timestamp) {
        for (peer, at) in self.search_at.iter_mut().enumerate() {
            if at.is_some_and(|at| at <= now) {
                let ways = self.peers[peer].ways.as_mut();
                *at =
                    ways.and_then(|ways| ways.search(&mut self.group, peer as u32)).map(|pause| now + pause);
            }
        }
    }

    /// Those of its ranks that are on this host, in the present epoch.
    pub(crate) fn here(&self) -> Here {
        self.setup.here
    }

    /// Whether it has other ranks, and knows which: while it joins a group that goes on it does not.
    pub(crate) fn is_among_others(&self) -> bool {
        !self.setup.config.peers.is_empty() && !self.is_joining()
    }

    /// Says what the host is like, of which at most so many ranks are here in any group.
    pub(crate) fn tell_host(&mut self, now: Timestamp, cores: &Cores, most_ranks: usize) {
        let insists = self.setup.lanes.insists;
        if self.is_up() {
            self.lanes.look(now, self.patience);
        }
        if self.lanes.are_newly_missed(self.would_use_lanes()) {
            self.about().cannot_divide(self.lanes.count() + 1);
        }
        let most = if insists { usize::MAX } else { cores.for_each_of(most_ranks) };
        let threads = (1 + self.lanes.count()).min(most).clamp(1, usize::from(Host::THREADS_MAX)) as u8;
        let shares_cores = cores.are_shared_by(self.setup.here.ranks);
        self.group.set_host(Host { shares_cores, threads, insists });
    }

    /// What it was told last.
    #[cfg(test)]
    pub(crate) fn host(&self) -> Host {
        self.group.host()
    }

    /// Whether large calls would be divided between its lanes if all had connected, as far as this rank knows: it was asked for, or links are fast.
    fn would_use_lanes(&self) -> bool {
        self.setup.lanes.insists || self.group.has_fast_links()
    }

    /// Whether it has reached its peers, and neither failed nor begun to leave.
    fn is_up(&self) -> bool {
        self.connected.is_none() && matches!(self.leaving, Leaving::No) && !self.group.has_failed()
    }

    /// Whether its large calls are divided, or most of them will be soon: a thread that sends would have little to do.
    pub(crate) fn is_divided(&self) -> bool {
        let LargeCalls { whole, others } = self.large_calls;
        let is_settled = whole.saturating_add(others) >= LARGE_CALLS_MIN;
        let divides = self.group.agreed_threads().is_some_and(|threads| threads > 1);
        self.lanes.are_there() && !(is_settled && (whole > others || !divides))
    }

    /// Another group of this rank's, of which it has parts or which has parts of it, has failed.
    pub(crate) fn adopt(&mut self, now: Timestamp, verdict: Verdict) {
        let verdict = if self.is_lane() { Some(verdict) } else { self.lanes.on_lost(verdict) };
        if let Some(verdict) = verdict {
            self.group.adopt(now, verdict);
        }
    }

    /// The network thread ends by a bug: the groups that have parts of it, or of which it has parts, fail.
    pub(crate) fn tell_end(&self, cause: &str) {
        self.tell_others(self.group.ended(cause, "nothing (it was idle)"));
    }

    /// When it wants to be called.
    pub(crate) fn wake_at(&self) -> Option<Timestamp> {
        self.wake_at
    }

    /// Takes every event.
    pub(crate) fn poll_events(&mut self, now: Timestamp) {
        while let Some(event) = self.group.poll_event() {
            match event {
                GroupEvent::Connected => {
                    if !self.is_joining() {
                        self.announce(Ok(()));
                    }
                    self.on_connected(now);
                }
                GroupEvent::Divided { op, parts } => {
                    if let Some(in_flight) = self.in_flight.remove(&op) {
                        let (own, lost) = self.lanes.hand_out(parts, in_flight);
                        self.in_flight.insert(op, own);
                        if let Some(verdict) = lost {
                            self.group.adopt(now, verdict);
                        }
                    }
                }
                GroupEvent::Failed(error) => {
                    if let Some(verdict) = self.group.verdict() {
                        self.tell_others(verdict);
                    }
                    self.on_failed(now, &error);
                    if !self.is_joining() {
                        self.announce(Err(error.clone()));
                    }
                    self.on_workers_left(Err(error));
                }
                GroupEvent::Served(report) => self.served.add(&report),
                GroupEvent::WorkersLeft => self.on_workers_left(Ok(())),
                GroupEvent::Done { op, outcome } => self.complete(now, op, outcome),
                // What a later version reports is of no use to this one.
                _ => {}
            }
        }
    }

    /// Whether it has parts of what is called elsewhere: it tells callers nothing.
    fn is_lane(&self) -> bool {
        self.setup.lanes.first.is_some()
    }

    fn tell_failed(&self, error: &OpError) {
        if !self.is_lane() {
            self.about().failed(error);
        }
    }

    /// It has failed. A lane that has never connected, which is not used, tells nobody.
    fn tell_others(&self, verdict: Verdict) {
        self.lanes.adopt(&verdict);
        if let Some(first) = self.setup.lanes.first.as_ref().filter(|_| self.connected.is_none()) {
            first.adopt(verdict);
        }
    }

    /// Tells `ended` how the work of a dedicated server ended, once it has.
    pub(crate) fn await_workers(&mut self, ended: Sender<Result<(), OpError>>) {
        match &self.workers_left {
            Some(outcome) => _ = ended.send(outcome.clone()),
            None => self.awaiting_workers = Some(ended),
        }
    }

    fn on_workers_left(&mut self, outcome: Result<(), OpError>) {
        if let Some(waiting) = self.awaiting_workers.take() {
            // The caller may have stopped waiting, and asks again.
            let _ = waiting.send(outcome.clone());
        }
        self.workers_left.get_or_insert(outcome);
    }

    /// Lets the group fill the batch, which must be handed to the kernel before any other call.
    pub(crate) fn fill(&mut self, now: Timestamp, sockets: &mut PathSockets, codes: &CodePoints) {
        self.fill_notes(sockets, codes);
        let mut sink = Sink { sockets, codes, peers: &self.peers };
        self.group.poll_transmit(now, &mut sink);
    }

    /// Its events were taken, and what it could send.
    pub(crate) fn settle(&mut self, now: Timestamp) {
        let due = self.group.poll_timeout().map(|timeout| timeout.at);
        self.wake_at = self.search_at.iter().copied().flatten().chain(due).min();
        if let Leaving::Goodbye(waiting) = &mut self.leaving {
            if self.group.is_drained() {
                waiting.drain(..).for_each(|left| _ = left.send(()));
                self.leaving = Leaving::Lingering(now + LINGER);
                self.end_all(None);
            }
        }
        if let Some(at) = self.succession_wakes_at(now) {
            self.wake_at = Some(self.wake_at.map_or(at, |due| due.min(at)));
        }
        if let Leaving::Lingering(until) = self.leaving {
            self.wake_at = Some(self.wake_at.map_or(until, |at| at.min(until)));
        }
    }

    /// Starts to leave. `left` is told when nothing more has to be said.
    pub(crate) fn leave(&mut self, now: Timestamp, left: Option<Sender<()>>) {
        match &mut self.leaving {
            Leaving::No => {
                if !self.is_lane() {
                    self.about().leaves();
                }
                self.group.leave(now);
                self.end_succession(OpError::ShutDown("the call".to_owned()));
                self.leaving = Leaving::Goodbye(left.into_iter().collect());
            }
            Leaving::Goodbye(waiting) => waiting.extend(left),
            Leaving::Lingering(_) => _ = left.map(|left| left.send(())),
        }
    }

    /// Whether nothing more has to be said to the peers.
    pub(crate) fn has_left(&self) -> bool {
        matches!(self.leaving, Leaving::Lingering(_))
    }

    /// Whether it can be forgotten.
    pub(crate) fn is_over(&self, now: Timestamp) -> bool {
        matches!(self.leaving, Leaving::Lingering(until) if until <= now)
    }

    /// Ends what the group has not ended itself, where its network thread ends, or has panicked with `cause`.
    pub(crate) fn end_all(&mut self, cause: Option<&str>) {
        let error = self.why_ended(cause);
        let in_flight = self.in_flight.drain().map(|(_, in_flight)| in_flight).chain(self.starting.take());
        in_flight.for_each(|in_flight| in_flight.end(Err(error.clone())));
        self.end_succession(error);
    }

    /// What a call hears that its network thread has not ended.
    pub(crate) fn why_ended(&self, cause: Option<&str>) -> OpError {
        let Some(cause) = cause else { return shut_down() };
        let error = self.group.ended(cause, "the start of a call").error().clone();
        match &self.succession {
            Some(succession) => succession.named_error(error),
            None => error,
        }
    }

    /// Peers that have not answered.
    pub(crate) fn unanswered(&self) -> Vec<Unanswered> {
        let tried = |rank: u32| {
            let candidates = &self.peers[rank as usize].candidates;
            candidates.iter().filter_map(|raw| raw.to_socket_addr()).collect::<Vec<SocketAddr>>()
        };
        let missing = self.group.unreachable_peers().into_iter();
        missing.map(|(rank, answers_small)| Unanswered { rank, answers_small, tried: tried(rank) }).collect()
    }

    fn announce(&mut self, connected: Result<(), OpError>) {
        if let Some(waiting) = self.connected.take() {
            if connected.is_ok() && !self.is_lane() {
                self.about().formed(self.setup.config.peers.len(), &self.setup.security);
            }
            // The caller may have stopped waiting: its handle leaves the group when it is dropped.
            let _ = waiting.send(connected);
        }
    }

    fn complete(&mut self, now: Timestamp, id: OpId, outcome: Outcome) {
        match self.in_flight.remove(&id) {
            Some(in_flight) => self.finish_in_epoch(in_flight, outcome),
            None => self.complete_kept(now, id, outcome),
        }
    }

    fn finish(&mut self, in_flight: InFlight, outcome: Outcome) {
        match &outcome {
            Ok(report) => self.tally.add(in_flight.preset, in_flight.epoch, report),
            Err(_) => self.tally.add_failure(),
        }
        in_flight.end(outcome);
    }
}

impl LargeCalls {
    fn count(&mut self, request: &Request) {
        if request.input.len().max(request.output.len()) < LARGE_BYTES {
            return;
        }
        let kind = if request.can_be_divided() { &mut self.others } else { &mut self.whole };
        *kind = kind.saturating_add(1);
    }
}

/// Where the peers of a group are, by rank.
fn addresses_of(setup: &mut GroupSetup) -> Vec<PeerAddress> {
    let mut peers = Vec::new();
    peers.resize_with(setup.config.peers.len() + 1, || PeerAddress::NOWHERE);
    let channels = std::mem::take(&mut setup.channels);
    for ((peer, candidates), channel) in setup.config.peers.iter().zip(&setup.candidates).zip(channels) {
        let place = &mut peers[peer.rank as usize];
        place.channel = channel;
        place.host.clone_from(&peer.host);
        place.candidates = candidates.iter().map(|address| RawAddress::new(*address)).collect();
    }
    peers
}
