//! How a group goes on without a lost rank: applies what `crate::succession` decides to the group, its routes and its calls.

use super::sink::Sink;
use super::{addresses_of, ActiveGroup, PeerAddress};
use crate::code_points::CodePoints;
use crate::group::ReservedIds;
use crate::in_flight::InFlight;
use crate::lineage::DoorSetup;
use crate::news::About;
use crate::routes::{Route, Routes};
use crate::socket::{PathSockets, RawAddress};
use crate::succession::{Before, CallId, Forming, Next, Note, Phase, Step, Sync};
use crate::{EpochStats, JoinError, Outcome};
use gradwire_collectives::{Collective, Group, OpError, OpId, Request, TransmitSink};
use gradwire_core::{ConnectionId, Header, Kind, Mark, Timestamp};
use gradwire_membership::Member;
use std::ops::Range;
use std::sync::Arc;

/// Connections of an epoch that is over: only notes go over them, to those who have not formed the next one.
#[derive(Debug)]
pub(super) struct Relay {
    /// Tells its routes apart from those of others.
    number: u32,
    members: Vec<Member>,
    peers: Vec<PeerAddress>,
    pub(super) ids: ReservedIds,
    remotes: Vec<Option<ConnectionId>>,
}

/// How a rank that joins is spoken to before it is a member, and by it the members: only notes pass.
#[derive(Debug)]
pub(super) struct Door {
    member: Member,
    peer: PeerAddress,
    remote: ConnectionId,
}

/// Marks the peer of a route as a door's, with RELAY; then comes the rank.
const DOOR: u32 = 1 << 30;
/// Marks the peer of a route as one of a relay's; then come its number and the rank.
const RELAY: u32 = 1 << 31;
const RELAY_SHIFT: u32 = 16;
/// Kept: who has not heard of the latest epochs is no member any more, and gives up by itself.
const RELAYS_MAX: usize = 4;
/// What the members of a new epoch tell each other takes as long at most, beyond the silence after which they are lost.
const SYNC_TIMEOUTS: u32 = 20;

/// Whether the peer of a route is one of a relay's.
pub(super) fn is_relay(peer: u32) -> bool {
    peer & RELAY != 0
}

impl ActiveGroup {
    /// Itself, for lines in a log.
    pub(super) fn about(&self) -> About<'_> {
        About { group: &self.setup.name, rank: self.known_as(self.setup.config.rank) }
    }

    /// The peer of a route.
    pub(super) fn address_of(&mut self, peer: u32) -> Option<&mut PeerAddress> {
        if !is_relay(peer) {
            return self.peers.get_mut(peer as usize);
        }
        if let Some(rank) = door_place(peer) {
            return self.doors.get_mut(rank)?.as_mut().map(|door| &mut door.peer);
        }
        let (number, rank) = relay_place(peer);
        let relay = self.relays.iter_mut().find(|relay| relay.number == number)?;
        relay.peers.get_mut(rank as usize)
    }

    /// A rank of the present group, as callers know it.
    pub(super) fn known_as(&self, rank: u32) -> u32 {
        self.succession.as_ref().map_or(rank, |succession| succession.first_rank(rank))
    }

    /// Who is in the group.
    pub(super) fn epoch(&self) -> Option<EpochStats> {
        self.succession.as_ref().map(|succession| succession.stats())
    }

    /// Whether a datagram was for the succession, or is of an epoch that is over.
    pub(super) fn takes_note(&mut self, now: Timestamp, peer: u32, bytes: &[u8]) -> bool {
        if self.succession.is_none() {
            return false;
        }
        let Some((_, body)) = Header::decode(bytes).ok().filter(|(header, _)| header.kind == Kind::Members)
        else {
            return is_relay(peer);
        };
        let from = self.life_of(peer);
        if let (Some(succession), Some(from), Ok(note)) = (&mut self.succession, from, Note::decode(body)) {
            succession.on_note(now, from, note);
        }
        true
    }

    fn life_of(&self, peer: u32) -> Option<Member> {
        if !is_relay(peer) {
            return self.succession.as_ref()?.lives.get(peer as usize).copied();
        }
        if let Some(rank) = door_place(peer) {
            return self.doors.get(rank)?.as_ref().map(|door| door.member);
        }
        let (number, rank) = relay_place(peer);
        let relay = self.relays.iter().find(|relay| relay.number == number)?;
        relay.members.get(rank as usize).copied()
    }

    /// Whether this rank is about to join a group that runs.
    pub(super) fn is_joining(&self) -> bool {
        self.succession.as_ref().is_some_and(|succession| succession.is_joining())
    }

    /// Takes a rank in, if it comes before the call after the next one.
    pub(crate) fn admit(&mut self, record: &str) -> Result<String, JoinError> {
        let Some(succession) = &mut self.succession else {
            let problem = "only a group with on_peer_loss = continue can be joined".to_owned();
            return Err(JoinError::RecordInvalid { position: 0, problem });
        };
        let (joiner, running) = succession.admit(record)?;
        self.open_door(joiner);
        Ok(running)
    }

    /// From now on a life of a rank can be spoken to.
    pub(super) fn open_door(&mut self, member: Member) {
        let Some(succession) = &self.succession else { return };
        let setup = succession.record(member).and_then(|record| succession.lineage.door(record));
        let host = succession.lineage.host(member.rank);
        let Some(DoorSetup { candidates, channel, remote }) = setup else { return };
        self.doors.resize_with(succession.ranks(), || None);
        let door = &mut self.doors[member.rank as usize];
        if door.as_ref().is_some_and(|door| door.member == member) {
            // What has come over it does not come again.
            return;
        }
        let candidates = candidates.into_iter().map(RawAddress::new).collect();
        let peer = PeerAddress { host, candidates, channel, ..PeerAddress::NOWHERE };
        *door = Some(Door { member, peer, remote });
    }

    /// Enters the ids by which later lives of ranks are heard into the table.
    pub(crate) fn insert_doors(&self, place: u32, routes: &mut Routes) {
        let Some(succession) = &self.succession else { return };
        for (rank, id) in succession.lineage.doors.by_rank.iter().enumerate() {
            if let Some(id) = *id {
                routes.insert(Route { id, group: place, peer: RELAY | DOOR | rank as u32 });
            }
        }
    }

    /// Takes a call of a group that goes on.
    pub(super) fn submit_kept(
        &mut self,
        now: Timestamp,
        (mut request, before): (Request, Before),
        in_flight: InFlight,
    ) {
        let Some(succession) = &mut self.succession else { return };
        if let Phase::Over(error) = &succession.phase {
            let error = error.clone();
            return self.finish(in_flight, Err(error));
        }
        if let Collective::Send { to: peer, .. } | Collective::Receive { from: Some(peer), .. } =
            request.collective
        {
            if !succession.members.contains(&peer) {
                let error = succession.unfinished_without(peer);
                return self.finish(in_flight, Err(error));
            }
            if !succession.is_running() {
                let error = succession.unfinished();
                return self.finish(in_flight, Err(error));
            }
        }
        if let Collective::Send { .. } | Collective::Receive { .. } = request.collective {
            succession.renumber(&mut request);
            return self.start(now, request, in_flight);
        }
        if let CallId::Counted(number) = succession.calls.add(request, in_flight, before, now) {
            succession.called(number);
        }
        self.start_calls(now);
    }

    fn start_calls(&mut self, now: Timestamp) {
        while let Some(succession) = &mut self.succession {
            if !succession.is_running() {
                return;
            }
            let (members, is_whole) = (Arc::clone(&succession.members), succession.is_whole());
            match succession.calls.next_to_start(|rank| members.contains(&rank), is_whole) {
                None => return,
                Some(Next::Start(call, mut request)) => {
                    succession.renumber(&mut request);
                    request.timeout = succession.calls.time_left(call, now);
                    let id = self.group.submit(now, *request);
                    succession.running.insert(id, call);
                }
                Some(Next::Take(number, held)) => self.end_with(now, number, &held),
                Some(Next::Refuse(call)) => self.refuse(call),
            }
        }
    }

    fn refuse(&mut self, call: CallId) {
        let Some(succession) = &mut self.succession else { return };
        let Some(pending) = succession.calls.refuse(call) else { return };
        let error = match pending.request.collective {
            // Under whichever epoch it is made.
            Collective::Broadcast { root } if !succession.members.contains(&root) => {
                succession.unfinished_without(root)
            }
            _ => succession.unfinished(),
        };
        self.finish(pending.in_flight, Err(error));
    }

    fn end_with(&mut self, now: Timestamp, number: u64, held: &crate::succession::Held) {
        let Some(succession) = &mut self.succession else { return };
        let Some(mut pending) = succession.calls.end_with(number, held) else {
            return self.refuse(CallId::Counted(number));
        };
        pending.in_flight.set_epoch(held.epoch, succession.members_of(held.epoch));
        let report = pending.taken_over(number, now);
        self.finish(pending.in_flight, Ok(report));
    }

    /// A collective of the group ended that is not in `in_flight`.
    pub(super) fn complete_kept(&mut self, now: Timestamp, id: OpId, outcome: Outcome) {
        let Some(succession) = &mut self.succession else { return };
        match &mut succession.phase {
            Phase::Syncing(sync) if sync.op == Some(id) => self.on_synced(now, outcome),
            Phase::Running => {
                let Some(call) = succession.running.remove(&id) else { return };
                let epoch = outcome.is_ok().then_some(succession.epoch);
                let members = succession.members.len();
                let Some(pending) = succession.calls.end(call, epoch, members) else { return };
                self.finish_in_epoch(pending.in_flight, outcome);
                self.start_calls(now);
            }
            // Broken off: it is made again under the next epoch.
            _ => {}
        }
    }

    /// An operation of the present group ends, with ranks as callers know them.
    pub(super) fn finish_in_epoch(&mut self, mut in_flight: InFlight, outcome: Outcome) {
        let Some(succession) = &self.succession else { return self.finish(in_flight, outcome) };
        in_flight.set_epoch(succession.epoch, Arc::clone(&succession.members));
        let outcome = succession.named(outcome);
        self.finish(in_flight, outcome);
    }

    /// The group has failed.
    pub(super) fn on_failed(&mut self, now: Timestamp, error: &OpError) {
        let is_forming = self.connected.is_some() && !self.is_joining();
        let Some(succession) = &mut self.succession else { return self.tell_failed(error) };
        let is_news = succession.concerns(error);
        if is_forming || !succession.on_failed(now, error) {
            let error = succession.named_error(error.clone());
            return self.end_succession(error);
        }
        let verdict = succession.verdict.clone().filter(|_| is_news);
        if let Some(verdict) = verdict {
            self.about().lost(&verdict);
        }
    }

    /// All members of the epoch have answered.
    pub(super) fn on_connected(&mut self, now: Timestamp) {
        let Some(succession) = &mut self.succession else { return };
        let Phase::Connecting { unsure, .. } = &succession.phase else { return };
        let (unsure, members) = (unsure.clone(), succession.members.len());
        let timeout = succession.lineage.shared.local.config.peer_timeout * SYNC_TIMEOUTS;
        let mut sync = match Sync::new(unsure, members, &succession.calls, timeout) {
            Ok(sync) => Box::new(sync),
            Err(error) => {
                self.group.leave(now);
                return self.end_succession(error);
            }
        };
        sync.op = Some(self.group.submit(now, sync.gather()));
        succession.change(Phase::Syncing(sync));
    }

    fn on_synced(&mut self, now: Timestamp, outcome: Outcome) {
        let Some(succession) = &mut self.succession else { return };
        let Phase::Syncing(sync) = &mut succession.phase else { return };
        if let Err(error) = outcome {
            // A loss has been noticed already, and changed the phase.
            let error = succession.named_error(error);
            return self.end_succession(error);
        }
        let taken = sync.take();
        if taken.is_none() {
            let Ok(told) = sync.read() else {
                // All members find it in the same table; who has not got it yet still gets it from this group.
                let error = succession.at_odds();
                return self.end_succession(error);
            };
            succession.calls.told(told.orphans, told.rows);
        }
        if let Some((number, held)) = taken {
            if succession.calls.is_pending(number) {
                self.end_with(now, number, &held);
            } else {
                succession.calls.hold(number, held);
            }
        }
        let Some(succession) = &mut self.succession else { return };
        let Phase::Syncing(sync) = &mut succession.phase else { return };
        match sync.broadcast(&succession.calls) {
            Ok(Some(request)) => sync.op = Some(self.group.submit(now, request)),
            Ok(None) => {
                let end = sync.unsure.end;
                self.go_on(now, end);
            }
            Err(error) => {
                // The others would wait for what it cannot take.
                self.group.leave(now);
                self.end_succession(error);
            }
        }
    }

    fn go_on(&mut self, now: Timestamp, changed_at: u64) {
        let Some(succession) = &mut self.succession else { return };
        succession.calls.restart(succession.epoch, changed_at);
        succession.change(Phase::Running);
        succession.settle();
        let told = std::mem::replace(&mut succession.told, succession.epoch);
        let epoch = succession.stats();
        // Of a group that it joins a rank says only that it is in.
        if self.connected.is_none() {
            self.about().goes_on(&epoch, told);
        }
        self.announce(Ok(()));
        self.start_calls(now);
    }

    /// Does what is due for the next epoch.
    pub(crate) fn succeed(&mut self, now: Timestamp, routes: (&mut Routes, u32)) {
        let Some(succession) = &mut self.succession else { return };
        if succession.connects_too_long(now) {
            let silent: Vec<u32> = self.group.unreachable_peers().into_iter().map(|(rank, _)| rank).collect();
            succession.on_unreachable(now, &silent);
        }
        // Whenever they did: before the loss that failed the group, which has its name by now, or after it.
        if succession.verdict.is_some() && self.group.has_failed() {
            self.group.peers_that_left().for_each(|peer| succession.on_left(now, peer));
        }
        match succession.advance(now) {
            Some(Step::Reform(forming, unsure)) => self.reform(now, routes, (forming, unsure)),
            Some(Step::End(error)) => {
                // It lets go of the callers' memory.
                self.group.leave(now);
                self.end_succession(error);
            }
            None => {}
        }
    }

    fn reform(
        &mut self,
        now: Timestamp,
        (routes, place): (&mut Routes, u32),
        (forming, unsure): (Forming, Range<u64>),
    ) {
        let Some(succession) = &mut self.succession else { return };
        let Forming { epoch, ids, .. } = forming;
        let members: Vec<u32> = epoch.members.iter().map(|member| member.rank).collect();
        let remote = |rank| succession.connection_of(&epoch, rank);
        let setup = succession.lineage.setup(self.setup.key, (epoch.number, &members), ids, remote);
        let mut setup = match setup {
            Ok(setup) => setup,
            // Somebody asked for a connection id that cannot be.
            Err(error) => {
                // It lets go of the callers' memory.
                self.group.leave(now);
                return self.end_succession(OpError::Invalid(error.to_string()));
            }
        };
        let peers = std::mem::replace(&mut self.peers, addresses_of(&mut setup));
        self.group = Group::new(setup.config.clone(), now);
        self.group.set_flooded(self.is_flooded);
        self.search_at = vec![None; self.peers.len()];
        let old = std::mem::replace(&mut self.setup, setup);
        let number = self.relays.first().map_or(0, |relay| (relay.number + 1) & 0x3FFF);
        let mut remotes = vec![None; peers.len()];
        for peer in &old.config.peers {
            remotes[peer.rank as usize] = Some(peer.connection.remote);
        }
        let relay = Relay { number, members: succession.lives.clone(), peers, ids: old.ids, remotes };
        for (rank, id) in relay.ids.by_rank.iter().enumerate() {
            if let Some(id) = *id {
                let peer = RELAY | number << RELAY_SHIFT | rank as u32;
                routes.insert(Route { id, group: place, peer });
            }
        }
        self.relays.insert(0, relay);
        while self.relays.len() > RELAYS_MAX {
            let old = self.relays.pop();
            old.iter().flat_map(|old| old.ids.by_rank.iter().flatten()).for_each(|id| routes.remove(*id));
        }
        succession.entered(now, &epoch, unsure);
        let error = succession.unfinished();
        let broken_off: Vec<InFlight> = self.in_flight.drain().map(|(_, in_flight)| in_flight).collect();
        broken_off.into_iter().for_each(|in_flight| self.finish(in_flight, Err(error.clone())));
        self.insert_routes(place, routes);
    }

    /// Ends every call, and all later ones, with `error`.
    pub(super) fn end_succession(&mut self, error: OpError) {
        let Some(succession) = &mut self.succession else { return };
        let was_over = matches!(succession.phase, Phase::Over(_));
        if !was_over {
            succession.change(Phase::Over(error.clone()));
        }
        succession.notes.clear();
        if !was_over {
            self.about().failed(&error);
        }
        self.announce(Err(error.clone()));
        let Some(succession) = &mut self.succession else { return };
        let ended = succession.calls.drain();
        ended.into_iter().for_each(|pending| self.finish(pending.in_flight, Err(error.clone())));
    }

    /// When it has something to do.
    pub(super) fn succession_wakes_at(&self, now: Timestamp) -> Option<Timestamp> {
        self.succession.as_ref()?.wake_at(now)
    }

    /// Adds what members have to be told to the batch: over every connection to them, because nobody knows yet which of these the other end
    /// still has.
    pub(super) fn fill_notes(&mut self, sockets: &mut PathSockets, codes: &CodePoints) {
        let Some(succession) = &mut self.succession else { return };
        while sockets.has_room() {
            let Some((to, body)) = succession.notes.pop_front() else { break };
            let place = |members: &[Member]| members.iter().position(|member| *member == to);
            let present = place(&succession.lives).and_then(|place| {
                let peer = self.setup.config.peers.iter().find(|peer| peer.rank as usize == place)?;
                Some((peer.connection.remote, place))
            });
            let mut send = |peers: &[PeerAddress], (remote, place): (ConnectionId, usize)| {
                let head = [&Header::control(Kind::Members, remote).encode()[..], &body].concat();
                let mut sink = Sink { sockets: &mut *sockets, codes, peers };
                if sink.has_room() {
                    sink.push(place as u32, Mark::CONTROL, &head, &[]);
                }
            };
            if let Some(to) = present {
                send(&self.peers, to);
            }
            for relay in &self.relays {
                let to = place(&relay.members).and_then(|place| Some((relay.remotes[place]?, place)));
                if let Some(to) = to {
                    send(&relay.peers, to);
                }
            }
            let door = self.doors.get(to.rank as usize).and_then(Option::as_ref);
            if let Some(door) = door.filter(|door| door.member == to) {
                send(std::slice::from_ref(&door.peer), (door.remote, 0));
            }
        }
    }
}

fn door_place(peer: u32) -> Option<usize> {
    (peer & DOOR != 0).then_some((peer & !(RELAY | DOOR)) as usize)
}

fn relay_place(peer: u32) -> (u32, u32) {
    ((peer & !RELAY) >> RELAY_SHIFT, peer & ((1 << RELAY_SHIFT) - 1))
}
