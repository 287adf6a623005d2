//! Where a peer is: at all addresses of its record until it has been heard, then where it was heard.

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
    /// The first address that answered.
    pub(super) locked: Option<RawAddress>,
    /// Of each path, once an address has answered.
    pub(super) ways: Option<Ways>,
    /// What seals and opens its datagrams; `None`: they travel in clear.
    pub(super) channel: Option<Channel>,
}

impl PeerAddress {
    pub(super) const NOWHERE: Self =
        Self { host: String::new(), candidates: Vec::new(), locked: None, ways: None, channel: None };

    /// Whether a datagram from there shows that the peer is there. What was sealed, it has made. In clear anybody may have: then it must
    /// come from an address of the peer's record, or answer a hello, which nobody else was sent. Else who speaks first,
    /// under whatever address, would be sent hellos of full size in the peer's place.
    pub(super) fn is_heard_at(&self, from: SocketAddr, header: &Header, is_connected: bool) -> bool {
        let is_published = |candidate: SocketAddr| {
            candidate.ip() == from.ip() && (header.path != PathId(0) || candidate.port() == from.port())
        };
        let answers = is_connected && header.kind == Kind::Hello && header.flags.contains(Flags::REPLY);
        self.channel.is_some()
            || answers
            || self.candidates.iter().filter_map(|raw| raw.to_socket_addr()).any(is_published)
    }

    /// The peer was heard from there, on this path: the first path ends there.
    pub(super) fn lock(&mut self, from: SocketAddr, path: PathId, sources: &[Source], paths: u8) {
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
