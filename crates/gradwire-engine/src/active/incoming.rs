//! What comes for a group: opened, and handed to it, runs at once.

use super::continuing::is_relay;
use super::ActiveGroup;
use crate::code_points::CodePoints;
use crate::security::Refusal;
use crate::socket::RawAddress;
use crate::ways;
use gradwire_core::wire::{Flags, Kind};
use gradwire_core::{Datagrams, Header, ReceivedMark, Timestamp};
use std::net::SocketAddr;

impl ActiveGroup {
    /// Opens a datagram that says it is from `peer`; as it is where the group's travel in clear, unless those never leave this host and it
    /// comes from elsewhere. For a place that was kept for a later life of a rank, and that nobody has come to, there is no key yet.
    ///
    /// # Errors
    /// [`Refusal`]: it is to be dropped.
    pub(crate) fn open<'d>(
        &mut self,
        now: Timestamp,
        peer: u32,
        (datagram, from): (&'d mut [u8], &RawAddress),
    ) -> Result<&'d mut [u8], Refusal> {
        let is_strange = self.setup.security.stays_within_host() && !from.is_loopback();
        match &mut self.address_of(peer).ok_or(Refusal::NotAuthentic)?.channel {
            Some(channel) => channel.open(now, datagram),
            None if is_strange => Err(Refusal::NotAuthentic),
            None => Ok(datagram),
        }
    }

    /// Takes datagrams of `peer` that came as one piece from an address with a traffic class octet: its runs at once. Returns how
    /// many of them were in runs.
    pub(crate) fn handle_datagrams(
        &mut self,
        now: Timestamp,
        peer: u32,
        datagrams: Datagrams<'_>,
        (from, octet): (&RawAddress, u8),
        codes: &CodePoints,
    ) -> usize {
        let (mut rest, mut in_runs) = (datagrams, 0);
        while let Some(first) = rest.iter().next() {
            let in_run = self.handle_run(now, peer, rest, codes.read(octet));
            if in_run == 0 {
                self.handle_datagram(now, peer, first, (from, octet), codes);
            }
            in_runs += in_run;
            rest = rest.behind(in_run.max(1));
        }
        in_runs
    }

    /// Takes the run with which `datagrams` begin; how many they are.
    fn handle_run(
        &mut self,
        now: Timestamp,
        peer: u32,
        datagrams: Datagrams<'_>,
        mark: ReceivedMark,
    ) -> usize {
        // What comes over a relay is not for the group as it is now, and the first datagrams of a peer show where that is (`hear`).
        let is_known = !is_relay(peer) && self.peers[peer as usize].is_settled();
        if !is_known || !datagrams.are_several() {
            return 0;
        }
        self.group.handle_run(now, peer, datagrams, mark)
    }

    /// Takes a datagram of `peer`.
    pub(crate) fn handle_datagram(
        &mut self,
        now: Timestamp,
        peer: u32,
        bytes: &[u8],
        (from, octet): (&RawAddress, u8),
        codes: &CodePoints,
    ) {
        if self.takes_note(now, peer, bytes) {
            return;
        }
        let is_settled = self.peers[peer as usize].is_settled();
        self.group.handle_marked_datagram(now, peer, bytes, codes.read(octet));
        if let (false, Ok((header, _)), Some(from)) =
            (is_settled, Header::decode(bytes), from.to_socket_addr())
        {
            self.hear(now, peer, from, &header);
        }
    }

    /// Where the peer is has not been settled: it is where the hello went whose answer has connected it.
    fn hear(&mut self, now: Timestamp, peer: u32, from: SocketAddr, header: &Header) {
        let is_answer = header.kind == Kind::Hello && header.flags.contains(Flags::REPLY);
        let address = &mut self.peers[peer as usize];
        if !(is_answer && self.group.is_connected(peer)) {
            return address.on_heard(from, header.path);
        }
        address.settle(header.offset, &self.setup.sources, self.setup.paths);
        // First pings by the way in use are on their way, and a question at the same instant would not count.
        self.search_at[peer as usize] = address.is_settled().then_some(now + ways::PAUSE);
    }
}
