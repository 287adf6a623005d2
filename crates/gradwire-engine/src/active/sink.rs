//! From a group to the batch that the kernel is handed.

use super::address::{numbered, PeerAddress};
use crate::code_points::CodePoints;
use crate::socket::{PathSockets, RawAddress};
use gradwire_collectives::TransmitSink;
use gradwire_core::wire::{Flags, Kind, TAG_BYTES};
use gradwire_core::{Header, Mark, TransmitRun};

/// Byte of a header that names the path.
const HEADER_PATH: usize = 7;

/// Adds datagrams of one group to the batch.
pub(super) struct Sink<'a> {
    pub(super) sockets: &'a mut PathSockets,
    pub(super) codes: &'a CodePoints,
    pub(super) peers: &'a [PeerAddress],
}

impl TransmitSink for Sink<'_> {
    fn has_room(&self) -> bool {
        self.sockets.has_room()
    }

    fn push(&mut self, peer: u32, mark: Mark, head: &[u8], payload: &[u8]) {
        let octet = self.codes.octet(mark);
        let address = &self.peers[peer as usize];
        if let Some(ways) = &address.ways {
            let end = ways.end(usize::from(head[HEADER_PATH]));
            return self.put(peer, (end, octet), head, payload);
        }
        // Until the peer has answered only small control traffic flows: it goes to all its addresses, and where the peer was heard.
        let is_hello = Header::decode(head)
            .is_ok_and(|(header, _)| header.kind == Kind::Hello && !header.flags.contains(Flags::REPLY));
        for (index, to) in address.places().enumerate() {
            if !self.sockets.has_room() {
                return;
            }
            if is_hello {
                self.put(peer, (to, octet), &numbered(head, index), payload);
            } else {
                self.put(peer, (to, octet), head, payload);
            }
        }
    }

    fn room_for(&self, peer: u32, bytes: usize, most: usize) -> usize {
        let is_sealed = self.peers[peer as usize].channel.is_some();
        self.sockets.room_for(bytes + if is_sealed { TAG_BYTES } else { 0 }, most)
    }

    fn push_run(&mut self, peer: u32, run: &TransmitRun, payload: &[u8]) {
        let address = &self.peers[peer as usize];
        let path = usize::from(run.header.path.0);
        let Some(ways) = &address.ways else {
            for (place, part) in payload.chunks(run.bytes).enumerate() {
                self.push(peer, run.mark, &run.header_of(place).encode(), part);
            }
            return;
        };
        let to = (ways.end(path), self.codes.octet(run.mark));
        match &address.channel {
            Some(channel) => self.sockets.push_sealed_run(path, to, (run, payload), channel.sealer()),
            // SAFETY: as in `put`.
            None => unsafe { self.sockets.push_run(path, to, run, payload) },
        }
    }

    fn push_patient(&mut self, peer: u32, mark: Mark, head: &[u8]) {
        let path = usize::from(head[HEADER_PATH]);
        let waiting = self.sockets.waiting(path);
        self.push(peer, mark, head, &[]);
        if self.sockets.waiting(path) == waiting + 1 {
            self.sockets.let_last_follow(path);
        }
    }

    fn push_trial(&mut self, peer: u32, mark: Mark, head: &[u8]) {
        let Some(ways) = &self.peers[peer as usize].ways else { return };
        let end = ways.trial_end(usize::from(head[HEADER_PATH]));
        self.put(peer, (end, self.codes.octet(mark)), head, &[]);
    }
}

impl Sink<'_> {
    /// Adds one datagram, sealed where the peer's are.
    fn put(&mut self, peer: u32, to: (RawAddress, u8), head: &[u8], payload: &[u8]) {
        let path = usize::from(head[HEADER_PATH]);
        match &self.peers[peer as usize].channel {
            Some(channel) => self.sockets.push_sealed(path, to, (head, payload), channel.sealer()),
            // SAFETY: the driver hands the batch to the kernel (or copies its payload) before it calls the group again, and
            // until then the group's contract keeps the tensor's memory valid.
            None => unsafe { self.sockets.push(path, to, head, payload) },
        }
    }
}
