//! One rank of one process group, as one machine without IO.
//!
//! Holds a connection to each peer and the collectives in flight, and carries what the connections report to the
//! collectives and the transfers that those want to the connections. Driven by the engine or the simulator. Its
//! parts: `drive` (starting, events, ending), `point_to_point`, `serving` (dedicated servers), `failure` (the one verdict),
//! `transmit`.

mod drive;
mod exposed;
mod failure;
mod point_to_point;
mod serving;
mod told_incast;
mod transmit;
mod waiting;

use crate::adaptive::Adaptive;
use crate::agreement::{AgreedNetwork, Agreement, ExchangePlan};
use crate::memory::Pool;
use crate::ops::{Key, Ops};
use crate::peer::{Peer, Peers};
use crate::position::{History, PositionRecord};
use crate::schedules::{Chooser, Place, Post};
use crate::verdict::{AbortRecord, Cause};
use crate::{Collective, DeliveryReport, Host, OpError, OpId, Request, Servers, Verdict};
use gradwire_core::recovery::Turn;
use gradwire_core::wire::{chunk_bytes_for, HEADER_BYTES};
use gradwire_core::{
    Attempt, ConnectionConfig, ConnectionStats, Datagrams, Mark, PathId, PathStats, ReceivedMark, Timeout,
    TimeoutReason, Timestamp, TransmitRun,
};
use serving::Serving;
use std::collections::VecDeque;
use std::time::Duration;
use told_incast::ToldIncast;

/// A peer, as the group needs to know it.
#[derive(Clone, Debug)]
pub struct PeerConfig {
    /// Its rank in the group.
    pub rank: u32,
    /// Its host name, for messages.
    pub host: String,
    /// Settings of the connection to it.
    pub connection: ConnectionConfig,
}

/// Settings of a group on one rank.
#[derive(Clone, Debug)]
pub struct GroupConfig {
    /// This rank. A dedicated server is numbered behind the ranks of the group.
    pub rank: u32,
    /// Ranks in the group, dedicated servers left out.
    pub world_size: u32,
    /// Every other rank, dedicated servers included, in any order.
    pub peers: Vec<PeerConfig>,
    /// Most senders that share a receiver in a transpose (ULTIMA's incast factor); `None`: all at once. Every rank
    /// says the same.
    pub incast: Option<u32>,
    /// Where ranks exchange what they measured; see [`Group::agreed`]. Every rank says the same.
    pub exchange: ExchangePlan,
    /// Who reduces in an all-reduce over parameter servers. Every rank says the same.
    pub servers: Servers,
}

/// Where datagrams go. Called by [`Group::poll_transmit`] for one datagram at a time, or a run of data; consecutive calls for one
/// peer form a batch that the engine hands to the kernel at once.
pub trait TransmitSink {
    /// Whether another datagram fits.
    fn has_room(&self) -> bool;
    /// Takes one datagram for `peer`, which the network should treat as `mark` says: `head`, which must be copied at once, then `payload`, which points into the
    /// tensor and must be copied or sent before the group is called again. `head.len() + payload.len()` is at most
    /// the datagram size.
    fn push(&mut self, peer: u32, mark: Mark, head: &[u8], payload: &[u8]);
    /// How many datagrams of `bytes` bytes for `peer` fit, `most` at most.
    fn room_for(&self, _peer: u32, _bytes: usize, most: usize) -> usize {
        most.min(usize::from(self.has_room()))
    }
    /// As `push` for each packet of a run of data, with its part of `payload`: `run.count` times `run.bytes` bytes. `weight` is set.
    fn push_run(&mut self, peer: u32, run: &TransmitRun, payload: &[u8]) {
        for (place, part) in payload.chunks(run.bytes).enumerate() {
            self.push(peer, run.mark, &run.header_of(place).encode(), part);
        }
    }
    /// As `push`, a question that takes another way than the one in use ([`Group::try_path`]), if there is one.
    fn push_trial(&mut self, peer: u32, mark: Mark, head: &[u8]) {
        self.push(peer, mark, head, &[]);
    }
    /// As `push`, an acknowledgement that may leave behind data for `peer` that is pushed next.
    fn push_patient(&mut self, peer: u32, mark: Mark, head: &[u8]) {
        self.push(peer, mark, head, &[]);
    }
}

/// What a group reports.
#[derive(Debug)]
#[non_exhaustive]
pub enum GroupEvent {
    /// Every peer has answered.
    Connected,
    /// The group failed: this is the verdict that every collective in flight, and every later one, ends with.
    Failed(OpError),
    /// A collective has been started with the first part of its request; the others are for the groups of further network threads. It has
    /// ended when all parts have, whose memory is the caller's until then.
    Divided {
        /// Which.
        op: OpId,
        /// The second part, and those behind it.
        parts: Vec<Request>,
    },
    /// This rank is a dedicated server and has ended its part of a call.
    Served(DeliveryReport),
    /// This rank is a dedicated server and every worker has left in good order.
    WorkersLeft,
    /// A collective ended; its memory is the caller's again.
    Done {
        /// Which.
        op: OpId,
        /// How.
        outcome: Result<DeliveryReport, OpError>,
    },
}

/// One rank of one process group. The drain contract is that of [`gradwire_core::Connection`].
#[derive(Debug)]
pub struct Group {
    rank: u32,
    world_size: u32,
    /// ULTIMA's I, within the group.
    incast: u32,
    servers: Servers,
    /// What only a dedicated server has.
    serving: Option<Serving>,
    /// Number of the next call over dedicated servers, and of the oldest one that is not over.
    next_served: u64,
    oldest_served: u64,
    /// What the connections were told about how many share a receiver.
    told_incast: ToldIncast,
    chunk_bytes: usize,
    /// Of every random choice that all ranks make alike: they compare it when they connect.
    seed: u64,
    /// Every other rank, in rank order.
    peers: Peers,
    /// Peers that have not answered yet.
    unconnected: usize,
    ops: Ops,
    /// Collectives that wait for room in flight.
    queue: VecDeque<Queued>,
    /// Receives that nothing was offered for yet.
    receives: VecDeque<Queued>,
    next_op: u64,
    /// Number of the next collective to be submitted, and to be started.
    next_sequence: u64,
    next_start: u64,
    /// Every collective before this one is over.
    oldest: u64,
    next_point_to_point: u64,
    offers: u64,
    history: History,
    position: Option<PositionRecord>,
    events: VecDeque<GroupEvent>,
    failed: Option<OpError>,
    /// What the peers were told then.
    record: Option<AbortRecord>,
    is_leaving: bool,
    has_said_goodbye: bool,
    /// No operation times out before this.
    next_deadline: Option<Timestamp>,
    pool: Pool,
    adaptive: Adaptive,
    agreement: Agreement,
    chooser: Chooser,
    /// Peers whose connection may have something to say.
    dirty: Vec<usize>,
    /// Transfers to post, kept for its memory.
    posts: Vec<Post>,
    /// Peer whose turn it is to send.
    turn: usize,
    scratch: Vec<u8>,
}

/// A request that has not been started.
#[derive(Debug)]
struct Queued {
    id: OpId,
    request: Request,
    submitted: Timestamp,
    sequence: u64,
    purpose: Purpose,
}

/// Who asked for what is queued.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    /// A caller, who waits for it.
    Call,
    /// It was refused and keeps the place of the call: its caller has the error already.
    StandIn,
    /// The group itself, to exchange what its ranks measured.
    Exchange,
}

impl Queued {
    fn deadline(&self) -> Timestamp {
        self.submitted + self.request.timeout
    }
}

impl Group {
    /// Starts to connect to every peer.
    ///
    /// # Panics
    /// When the peers are not the other ranks of the group, or the datagram sizes of their connections differ: the
    /// counts of contributions need one packet grid. When the exchange plan is out of range.
    #[must_use]
    pub fn new(config: GroupConfig, now: Timestamp) -> Self {
        let GroupConfig { rank, world_size, mut peers, incast, exchange, servers } = config;
        peers.sort_by_key(|peer| peer.rank);
        peers.iter_mut().for_each(|peer| peer.connection.turn = Turn::between(rank, peer.rank));
        let ranks = servers.ranks(world_size);
        assert!(
            peers.iter().map(|peer| peer.rank).eq((0..ranks).filter(|other| *other != rank)),
            "the peers of rank {rank} are every other rank below {ranks}"
        );
        let datagram_bytes =
            peers.first().map_or(DATAGRAM_BYTES_ALONE, |peer| peer.connection.datagram_bytes);
        assert!(
            peers.iter().all(|peer| peer.connection.datagram_bytes == datagram_bytes),
            "one packet grid in a group"
        );
        let mut group = Self {
            rank,
            world_size,
            incast: incast.unwrap_or(u32::MAX).clamp(1, world_size.max(2) - 1),
            servers,
            serving: None,
            next_served: 0,
            oldest_served: 0,
            told_incast: ToldIncast::default(),
            chunk_bytes: chunk_bytes_for(datagram_bytes).max(1),
            seed: peers.first().map_or(0, |peer| peer.connection.fingerprint),
            unconnected: peers.len(),
            peers: Peers::new(peers.into_iter().map(|peer| Peer::new(peer, now)).collect(), now),
            ops: Ops::new(),
            queue: VecDeque::new(),
            receives: VecDeque::new(),
            next_op: 0,
            next_sequence: 0,
            next_start: 0,
            oldest: 0,
            next_point_to_point: 0,
            offers: 0,
            history: History::new(),
            position: None,
            events: VecDeque::new(),
            failed: None,
            record: None,
            is_leaving: false,
            has_said_goodbye: false,
            next_deadline: None,
            pool: Pool::default(),
            adaptive: Adaptive::default(),
            agreement: Agreement::new(exchange, rank, world_size),
            chooser: Chooser::default(),
            dirty: Vec::new(),
            posts: Vec::new(),
            // The next rank first, so that not everybody begins with rank 0.
            turn: if rank + 1 < ranks { rank as usize } else { 0 },
            scratch: vec![0; datagram_bytes + HEADER_BYTES],
        };
        match servers {
            Servers::Dedicated { buffer_bytes, .. } if rank >= world_size => {
                group.serving = Some(Serving::new(buffer_bytes));
            }
            _ => group.peers.iter_mut().for_each(|peer| peer.serves = peer.rank >= world_size),
        }
        if group.peers.len() == 0 {
            group.events.push_back(GroupEvent::Connected);
        }
        group.update_position(now);
        group
    }

    /// Starts a collective. Collectives of one group must be submitted in the same order on every rank. Every error,
    /// an invalid request too, arrives as [`GroupEvent::Done`].
    pub fn submit(&mut self, now: Timestamp, request: Request) -> OpId {
        let id = OpId(self.next_op);
        self.next_op += 1;
        if let Some(error) = self.refusal(&request) {
            let is_invalid = matches!(error, OpError::Invalid(_)) && !self.is_server();
            let takes_place = is_invalid && request.collective.is_in_sequence();
            self.events.push_back(GroupEvent::Done { op: id, outcome: Err(error) });
            if takes_place {
                self.stand_in(now, id);
            }
            return id;
        }
        let deadline = now + request.timeout;
        self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
        match request.collective {
            Collective::Send { to, .. } => self.start_send(now, id, to, request),
            Collective::Receive { .. } => {
                let sequence = self.next_point_to_point;
                self.next_point_to_point += 1;
                let purpose = Purpose::Call;
                let receive = Queued { id, request, submitted: now, sequence, purpose };
                self.call_receive(now, receive);
                self.check_deserted(now);
            }
            _ => self.enqueue(now, id, request, Purpose::Call),
        }
        self.drain(now);
        id
    }

    /// Gives a call its place in the sequence. An exchange that has this place comes before it, and is thus under way on
    /// every rank that makes the call.
    fn enqueue(&mut self, now: Timestamp, id: OpId, request: Request, purpose: Purpose) {
        if self.agreement.has_place(self.next_sequence) {
            let exchange = self.agreement.request();
            self.push(now, id, exchange, Purpose::Exchange);
        }
        self.push(now, id, request, purpose);
        self.start_queued(now);
    }

    fn push(&mut self, now: Timestamp, id: OpId, request: Request, purpose: Purpose) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        self.queue.push_back(Queued { id, request, submitted: now, sequence, purpose });
    }

    /// Keeps the place of a refused collective in the sequence, with bare signals that agree with nothing but another
    /// refusal. Without it the next call of this rank would meet the refused one of the others.
    fn stand_in(&mut self, now: Timestamp, id: OpId) {
        self.enqueue(now, id, Request::nothing(), Purpose::StandIn);
        self.drain(now);
    }

    /// Takes a datagram from `peer` (found by its connection id). Whatever is wrong with it is only counted.
    pub fn handle_datagram(&mut self, now: Timestamp, peer: u32, datagram: &[u8]) {
        self.handle_marked_datagram(now, peer, datagram, ReceivedMark::default());
    }

    /// As [`Group::handle_datagram`], for one whose class and ECN field are known.
    pub fn handle_marked_datagram(&mut self, now: Timestamp, peer: u32, datagram: &[u8], mark: ReceivedMark) {
        let Some(slot) = self.slot_of(peer) else { return };
        let Self { peers, ops, .. } = self;
        let (connection, from, traffic) = peers.receiving(slot);
        if let Ok(Some(payload)) = connection.handle_marked_datagram(now, datagram, mark) {
            drive::deliver(from, traffic, ops, &payload);
        }
        self.carry_news(now, slot);
    }

    /// As [`Group::handle_marked_datagram`] for each datagram of the run with which `datagrams` begin, at once; how many they are. Zero: the
    /// first is to be taken on its own.
    pub fn handle_run(
        &mut self,
        now: Timestamp,
        peer: u32,
        datagrams: Datagrams<'_>,
        mark: ReceivedMark,
    ) -> usize {
        let Some(slot) = self.slot_of(peer) else { return 0 };
        let Self { peers, ops, .. } = self;
        let (connection, from, traffic) = peers.receiving(slot);
        let Some(payloads) = connection.handle_run(now, datagrams, mark) else { return 0 };
        drive::deliver_run(from, traffic, ops, payloads);
        self.carry_news(now, slot);
        payloads.count
    }

    /// Carries on what the connection reports, if it reports anything: hardly any packet is an event.
    fn carry_news(&mut self, now: Timestamp, slot: usize) {
        if self.peers[slot].connection().has_event() || !self.dirty.is_empty() {
            self.dirty.push(slot);
            self.drain(now);
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        self.peers.handle_timeout(now, &mut self.dirty);
        self.drain(now);
        if self.next_deadline.is_some_and(|deadline| deadline <= now) {
            self.check_deadlines(now);
        }
    }

    /// When `handle_timeout` is due (then also call `poll_transmit`).
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timeout> {
        let operation = self.next_deadline.map(|at| Timeout { at, reason: TimeoutReason::Operation });
        self.peers.timeout().into_iter().chain(operation).min_by_key(|timeout| timeout.at)
    }

    /// Gives every datagram that may leave now, until the sink is full. Peers take turns, a burst at a time.
    pub fn poll_transmit(&mut self, now: Timestamp, sink: &mut dyn TransmitSink) {
        self.transmit(now, sink);
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<GroupEvent> {
        self.events.pop_front()
    }

    /// Ends everything in flight with [`OpError::ShutDown`] and says goodbye to the peers. Callers who want what is
    /// in flight to end well wait for it first; what has ended for them is still confirmed to the peers before the
    /// goodbye. Peers who still needed this rank get [`OpError::PeerLeft`].
    pub fn leave(&mut self, now: Timestamp) {
        if self.is_leaving {
            return;
        }
        self.is_leaving = true;
        if self.failed.is_some() {
            return;
        }
        if let Some(during) = self.during_any() {
            let record = AbortRecord::about(Cause::ShutDown, self.rank, self.rank);
            return self.fail(now, OpError::ShutDown(during), &record);
        }
        self.say_goodbye(now);
        self.drain(now);
    }

    /// Says goodbye when this rank leaves and has no more to send.
    fn say_goodbye(&mut self, now: Timestamp) {
        // Nobody waits for what is internal, and peers who never come to it would hold it up for ever.
        let is_busy = self.ops.iter().any(|op| !op.is_internal);
        if !self.is_leaving || self.has_said_goodbye || is_busy {
            return;
        }
        self.has_said_goodbye = true;
        for slot in 0..self.peers.len() {
            self.peers.connection_mut(slot).leave(now);
            self.dirty.push(slot);
        }
    }

    /// Whether nothing more has to be said after [`Group::leave`].
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let has_ended = self.failed.is_some() || self.has_said_goodbye;
        has_ended && self.peers.iter().all(|peer| peer.connection().is_drained())
    }

    /// Counters of the connection to each peer.
    #[must_use]
    pub fn stats(&self) -> Vec<(u32, ConnectionStats)> {
        self.peers.iter().map(|peer| (peer.rank, peer.connection().stats())).collect()
    }

    /// See [`gradwire_core::Connection::set_flooded`].
    pub fn set_flooded(&mut self, is_flooded: bool) {
        for slot in 0..self.peers.len() {
            self.peers.connection_mut(slot).set_flooded(is_flooded);
        }
    }

    /// What this rank's host is like. The other ranks know it from the next exchange on ([`AgreedNetwork::shares_cores`],
    /// [`AgreedNetwork::threads`]).
    pub fn set_host(&mut self, host: Host) {
        self.agreement.set_host(host);
    }

    /// What was said of it last.
    #[must_use]
    pub fn host(&self) -> Host {
        self.agreement.host()
    }

    /// Whether it has failed.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Why it failed, if it did, for the groups of this rank's other network threads.
    #[must_use]
    pub fn verdict(&self) -> Option<Verdict> {
        Some(Verdict { error: self.failed.clone()?, record: self.record? })
    }

    /// What ends those groups, and what is in flight here, where this one's thread ends of `what` before it. `during`: what it did then, where no
    /// call is known to be in progress.
    #[must_use]
    pub fn ended(&self, what: &str, during: &str) -> Verdict {
        let record = AbortRecord::about(Cause::ShutDown, self.rank, self.rank);
        let during = self.during_any().unwrap_or_else(|| during.to_owned());
        let (rank, host, cause, waited) = (self.rank, "this rank".into(), what.into(), Duration::ZERO);
        let detail = "nothing is known of the others".into();
        Verdict { error: OpError::Aborted { rank, host, cause, during, waited, detail }, record }
    }

    /// Fails as that group has, unless it has failed already.
    pub fn adopt(&mut self, now: Timestamp, verdict: Verdict) {
        self.fail(now, verdict.error, &verdict.record);
        self.drain(now);
    }

    /// How long nothing was heard from `peer`; zero for a rank that is none.
    #[must_use]
    pub fn silence(&self, peer: u32, now: Timestamp) -> Duration {
        self.slot_of(peer).map_or(Duration::ZERO, |slot| self.peers[slot].connection().silence(now))
    }

    /// As [`Group::stats`], with what each path to the peer did.
    #[must_use]
    pub fn path_stats(&self) -> Vec<(u32, ConnectionStats, Vec<PathStats>)> {
        let of = |peer: &Peer| (peer.rank, peer.connection().stats(), peer.connection().path_stats());
        self.peers.iter().map(of).collect()
    }

    /// See [`gradwire_core::Connection::try_path`]; the question goes to [`TransmitSink::push_trial`].
    pub fn try_path(&mut self, peer: u32, path: PathId, attempt: Attempt) {
        if let Some(slot) = self.slot_of(peer) {
            self.peers.connection_mut(slot).try_path(path, attempt);
        }
    }

    /// See [`gradwire_core::Connection::has_trial_answer`].
    #[must_use]
    pub fn has_trial_answer(&self, peer: u32, path: PathId) -> bool {
        self.slot_of(peer).is_some_and(|slot| self.peers[slot].connection().has_trial_answer(path))
    }

    /// Whether a call is no longer queued, for checkers: until then its payload may be early.
    #[doc(hidden)]
    #[must_use]
    pub fn has_begun(&self, op: OpId) -> bool {
        !self.queue.iter().any(|queued| queued.id == op && queued.purpose == Purpose::Call)
    }

    /// Between how many network threads each rank divides what is large, by what [`Group::agreed`] says.
    #[must_use]
    pub fn agreed_threads(&self) -> Option<u8> {
        self.agreement.current().map(|network| network.threads)
    }

    /// Whether ranks have agreed on links so fast that calls wait for processors ([`AgreedNetwork::has_fast_links`]).
    #[must_use]
    pub fn has_fast_links(&self) -> bool {
        self.agreement.current().is_some_and(AgreedNetwork::has_fast_links)
    }

    /// What every rank knows alike about the network at the collective that was started last: ranks that have started
    /// the same collectives get the same answer. `None` until the first exchange has ended, and for a group of one rank.
    #[must_use]
    pub fn agreed(&self) -> Option<AgreedNetwork> {
        self.agreement.current().cloned()
    }

    /// For a timeout while connecting: peers that have not answered full datagrams, and whether they answer small ones.
    #[must_use]
    pub fn unreachable_peers(&self) -> Vec<(u32, bool)> {
        let missing = self.peers.iter().filter(|peer| !peer.is_connected);
        missing.map(|peer| (peer.rank, peer.connection().answers_small_ones_only())).collect()
    }

    /// Peers that have said goodbye, whether this rank still needed something from them or not.
    pub fn peers_that_left(&self) -> impl Iterator<Item = u32> + '_ {
        self.peers.iter().filter(|peer| peer.has_left).map(|peer| peer.rank)
    }

    /// Whether `peer` has answered a hello.
    #[must_use]
    pub fn is_connected(&self, peer: u32) -> bool {
        self.slot_of(peer).is_some_and(|slot| self.peers[slot].is_connected)
    }

    /// Index of `rank` in `peers`.
    fn slot_of(&self, rank: u32) -> Option<usize> {
        let slot = rank as usize - usize::from(rank > self.rank);
        (rank != self.rank && slot < self.peers.len()).then_some(slot)
    }

    fn place(&self, sequence: u64) -> Place {
        let Self { rank, world_size, chunk_bytes, incast, servers, .. } = *self;
        Place { rank, world_size, sequence, chunk_bytes, incast, servers }
    }
}

/// A group of one rank sends nothing; its grid only divides its counts.
const DATAGRAM_BYTES_ALONE: usize = 1472;

#[cfg(test)]
mod tests;
