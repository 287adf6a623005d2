//! Where a peer is: at all addresses of its record, and where it is heard, until it has answered a hello that went to one of them.

use crate::interfaces::Source;
use crate::security::Channel;
use crate::socket::RawAddress;
use crate::ways::Ways;
use gradwire_core::wire::HEADER_BYTES;
use gradwire_core::PathId;
use std::net::{IpAddr, SocketAddr};

/// Where a peer is.
#[derive(Debug)]
pub(super) struct PeerAddress {
    pub(super) host: String,
    pub(super) candidates: Vec<RawAddress>,
    /// Where it was heard besides.
    pub(super) heard: Vec<RawAddress>,
    /// Of each path, once the peer has answered a hello: it stays where that went.
    pub(super) ways: Option<Ways>,
    /// What seals and opens its datagrams; `None`: they travel in clear.
    pub(super) channel: Option<Channel>,
}

/// A peer behind an address translator is heard from one address, or from one for each of ours. Hellos name places by their numbers, so none is
/// taken back. A copy of a datagram that has come before does not open: who sends on what a peer has sealed makes a place only with one that is
/// here before the peer's own. With four such, from four addresses, before any of the peer's own, it keeps a peer that is to be found only where
/// it is heard from being reached in this attempt to join, as who drops all of its datagrams does. Hellos to a peer whose record leads to it go there
/// all the same.
const HEARD_MAX: usize = 4;
/// Bytes of a header that say which address of the peer's a hello goes to.
const HEADER_ADDRESS: std::ops::Range<usize> = 16..20;

impl PeerAddress {
    pub(super) const NOWHERE: Self =
        Self { host: String::new(), candidates: Vec::new(), heard: Vec::new(), ways: None, channel: None };

    /// Whether it is known where the peer is.
    pub(super) fn is_settled(&self) -> bool {
        self.ways.is_some()
    }

    /// Everywhere it may be.
    pub(super) fn places(&self) -> impl Iterator<Item = RawAddress> + '_ {
        self.candidates.iter().chain(&self.heard).copied()
    }

    /// The peer was heard from there, on this path. What was sealed, it has made, but anybody may have sent on: it is said hello there as well,
    /// and an answer says which of the places it has got that hello at. In clear anybody may have made it, and would be sent hellos of full size in the peer's place.
    pub(super) fn on_heard(&mut self, from: SocketAddr, path: PathId) {
        if self.channel.is_none() || self.heard.len() == HEARD_MAX {
            return;
        }
        let published = self.candidates.first().and_then(|candidate| candidate.to_socket_addr());
        // Further paths of the peer come from ports at which nobody need listen.
        let port = published.filter(|_| path != PathId(0)).map_or(from.port(), |published| published.port());
        let place = RawAddress::new(SocketAddr::new(from.ip(), port));
        if !self.places().any(|known| known == place) {
            self.heard.push(place);
        }
    }

    /// The peer has answered a hello that went to this place ([`numbered`]): the first path ends there. Where the answer came from says nothing: it may
    /// have come by a way that is broken in the other direction.
    pub(super) fn settle(&mut self, number: u32, sources: &[Source], paths: u8) {
        let place = (number as usize).checked_sub(1).and_then(|place| self.places().nth(place));
        let Some(first) = place.and_then(RawAddress::to_socket_addr) else { return };
        let others = self.candidates.iter().filter_map(|raw| raw.to_socket_addr()).map(|to| to.ip());
        let others: Vec<IpAddr> = others.filter(|address| !address.is_loopback()).collect();
        self.ways = Some(Ways::new(first, &others, sources, paths));
    }
}

/// A hello as it goes to the place at `index`, with its number: what is 0 is the number of none.
pub(super) fn numbered(hello: &[u8], index: usize) -> Vec<u8> {
    debug_assert!(hello.len() >= HEADER_BYTES);
    let mut copy = hello.to_vec();
    copy[HEADER_ADDRESS].copy_from_slice(&(index as u32 + 1).to_le_bytes());
    copy
}
