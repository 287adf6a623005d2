//! Where a peer is: at all addresses of its record until it is connected, and where it has been heard.

use crate::interfaces::Source;
use crate::security::Channel;
use crate::socket::RawAddress;
use crate::ways::Ways;
use gradwire_core::wire::{Flags, Kind};
use gradwire_core::{Header, PathId};
use std::net::{IpAddr, SocketAddr};

/// Where a peer is.
#[derive(Debug)]
pub(super) struct PeerAddress {
    pub(super) host: String,
    pub(super) candidates: Vec<RawAddress>,
    /// The address at which it was heard, and what showed it.
    pub(super) locked: Option<RawAddress>,
    pub(super) shown: Option<Shown>,
    /// It is connected, and stays there.
    pub(super) is_settled: bool,
    /// Of each path, once an address has answered.
    pub(super) ways: Option<Ways>,
    /// What seals and opens its datagrams; `None`: they travel in clear.
    pub(super) channel: Option<Channel>,
}

/// That a peer is at an address: whether its record names it, and whether it has answered a hello from there. The greater the surer.
pub(super) type Shown = (bool, bool);

impl PeerAddress {
    pub(super) const NOWHERE: Self = Self {
        host: String::new(),
        candidates: Vec::new(),
        locked: None,
        shown: None,
        is_settled: false,
        ways: None,
        channel: None,
    };

    /// Whether a datagram from there shows that the peer is there. What was sealed, it has made, but anybody may have sent on. In clear anybody may
    /// have made it: then it must come from an address of the peer's record, or answer a hello, which nobody else was sent. Else who
    /// speaks first, under whatever address, would be sent hellos of full size in the peer's place.
    pub(super) fn shown_at(&self, from: SocketAddr, header: &Header, is_connected: bool) -> Option<Shown> {
        let is_published = |candidate: SocketAddr| {
            candidate.ip() == from.ip() && (header.path != PathId(0) || candidate.port() == from.port())
        };
        let answers = is_connected && header.kind == Kind::Hello && header.flags.contains(Flags::REPLY);
        let is_published = self.candidates.iter().filter_map(|raw| raw.to_socket_addr()).any(is_published);
        (self.channel.is_some() || answers || is_published).then_some((is_published, answers))
    }

    /// Whether it is surer than before that the peer is where this was shown.
    pub(super) fn is_surer(&self, shown: Option<Shown>) -> bool {
        shown > self.shown
    }

    /// The peer was heard from there, on this path: the first path ends there.
    pub(super) fn lock(
        &mut self,
        (from, path): (SocketAddr, PathId),
        shown: Option<Shown>,
        sources: &[Source],
        paths: u8,
    ) {
        self.shown = shown;
        let published = self.candidates.first().and_then(|candidate| candidate.to_socket_addr());
        // Further paths of the peer come from ports at which nobody need listen.
        let port = published.filter(|_| path != PathId(0)).map_or(from.port(), |published| published.port());
        let first = SocketAddr::new(from.ip(), port);
        let others = self.candidates.iter().filter_map(|raw| raw.to_socket_addr()).map(|to| to.ip());
        let others: Vec<IpAddr> = others.filter(|address| !address.is_loopback()).collect();
        self.locked = Some(RawAddress::new(first));
        self.ways = Some(Ways::new(first, &others, sources, paths));
    }
}
