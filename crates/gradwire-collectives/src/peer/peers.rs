//! All peers of a group. Whoever changes a connection does it here, so that nobody is forgotten and nobody asked in vain.

use super::agenda::Agenda;
use super::{Peer, PointToPoint};
use gradwire_core::{Connection, Timeout, Timestamp, Transmit, TransmitRun};
use std::ops::{Index, IndexMut};
use std::time::Duration;

/// Every other rank, in rank order.
#[derive(Debug)]
pub(crate) struct Peers {
    list: Vec<Peer>,
    agenda: Agenda,
    /// When everybody was last asked for datagrams.
    looked_at: Timestamp,
    /// How often each of them has something to say at least.
    heartbeat: Duration,
}

impl Index<usize> for Peers {
    type Output = Peer;

    fn index(&self, slot: usize) -> &Peer {
        &self.list[slot]
    }
}

impl IndexMut<usize> for Peers {
    fn index_mut(&mut self, slot: usize) -> &mut Peer {
        &mut self.list[slot]
    }
}

impl Peers {
    pub(crate) fn new(list: Vec<Peer>, now: Timestamp) -> Self {
        let heartbeat = list.iter().map(|peer| peer.heartbeat).min().unwrap_or_default();
        Self { agenda: Agenda::new(list.len()), list, looked_at: now, heartbeat }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Peer> {
        self.list.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> std::slice::IterMut<'_, Peer> {
        self.list.iter_mut()
    }

    /// A connection, to change: it may have datagrams, and another timer, from now on.
    pub(crate) fn connection_mut(&mut self, slot: usize) -> &mut Connection {
        self.agenda.on_called(slot);
        &mut self.list[slot].connection
    }

    /// As [`Peers::connection_mut`], with what says whose a payload is: the rank, whether it serves, and point to point.
    pub(crate) fn receiving(&mut self, slot: usize) -> (&mut Connection, (u32, bool), &PointToPoint) {
        self.agenda.on_called(slot);
        let Peer { connection, rank, serves, traffic, .. } = &mut self.list[slot];
        (connection, (*rank, *serves), traffic)
    }

    /// When the first connection is due.
    pub(crate) fn timeout(&self) -> Option<Timeout> {
        let of = |slot: &usize| Some((*slot, self.list[*slot].connection.poll_timeout()?));
        let called = self.agenda.called().iter().filter_map(of);
        let first = called.chain(self.agenda.first_timer()).min_by_key(|(slot, timer)| (timer.at, *slot));
        first.map(|(_, timer)| timer)
    }

    /// Tells the connections that are due; `slots` gets whom.
    pub(crate) fn handle_timeout(&mut self, now: Timestamp, slots: &mut Vec<usize>) {
        self.wake(now);
        self.note_timers();
        let due = self.agenda.take_due(now);
        for slot in &due {
            self.connection_mut(*slot).handle_timeout(now);
        }
        slots.extend_from_slice(&due);
        self.agenda.give_back(due);
    }

    /// Before datagrams are asked for: who is due may have one.
    pub(crate) fn begin_turns(&mut self, now: Timestamp) {
        self.wake(now);
        let due = self.agenda.take_due(now);
        due.iter().for_each(|slot| self.agenda.on_called(*slot));
        self.agenda.give_back(due);
    }

    /// The next peer that may have a datagram, from `from` on and then from the first one.
    pub(crate) fn next_ready(&self, from: usize) -> Option<usize> {
        self.agenda.next_ready(from)
    }

    /// The next datagram to `slot`. A connection that has none has none until it is called or due, but for copies over a path
    /// that may have healed, which come due without a timer.
    pub(crate) fn poll_transmit(&mut self, now: Timestamp, slot: usize, body: &mut [u8]) -> Option<Transmit> {
        let connection = self.connection_mut(slot);
        let transmit = connection.poll_transmit(now, body);
        if transmit.is_none() && !connection.wants_polls() {
            self.agenda.on_silent(slot);
        }
        transmit
    }

    /// The datagrams like the one that [`Peers::poll_transmit`] has just given and behind it, `most` at most.
    pub(crate) fn poll_transmit_run(
        &mut self,
        now: Timestamp,
        slot: usize,
        most: usize,
    ) -> Option<TransmitRun> {
        self.connection_mut(slot).poll_transmit_run(now, most)
    }

    /// Everybody who may have a datagram was asked, or there is no room for more.
    pub(crate) fn end_turns(&mut self, now: Timestamp) {
        self.looked_at = now;
        self.note_timers();
    }

    fn note_timers(&mut self) {
        while let Some(slot) = self.agenda.take_called() {
            self.agenda.note_timer(slot, self.list[slot].connection.poll_timeout());
        }
    }

    /// After a pause in which each of them had something to say this rank stood still. All connections hear of that at once, and
    /// how long it was: those that had nothing to do were last called before it.
    fn wake(&mut self, now: Timestamp) {
        if now.since(self.looked_at) > self.heartbeat {
            for slot in 0..self.list.len() {
                let looked_at = self.looked_at;
                self.connection_mut(slot).awake_until(looked_at);
            }
        }
    }
}
