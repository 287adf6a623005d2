//! By which way each path to a peer goes: from which local address and interface, to which of the peer's addresses.
//!
//! All paths begin at the address at which the peer has answered a hello, as the kernel routes it: a way that works. Where
//! either side has several addresses, the further paths are then to take the others, so that every network card carries
//! its part, also on a host that does not route by source. But a card may lead nowhere, or not to this peer: a bridge of
//! virtual machines, a network for storage, a cut cable. So a way is asked first, and taken when its answer is here:
//!
//! ```text
//!   as the kernel routes --the question by the next candidate is answered--> that way, from now on
//!            |   ^
//!            '---'  nothing comes back: the next candidate; after the last one, a rest, and all once more
//! ```
//!
//! A way that died later is the transport's business: its path carries copies until it is well.

use crate::interfaces::Source;
use crate::socket::RawAddress;
use gradwire_collectives::Group;
use gradwire_core::{Attempt, PathId, PATHS_MAX};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The ways of all paths to one peer.
#[derive(Debug)]
pub(crate) struct Ways {
    /// In use, by path.
    ends: [RawAddress; PATHS_MAX as usize],
    searches: Vec<Search>,
    /// Questions asked by the present candidates.
    asked: u32,
}

/// A path that is to take another way.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Search {
    path: PathId,
    candidates: Vec<RawAddress>,
    /// The candidate that is tried, counted on.
    turn: usize,
    is_over: bool,
}

impl Ways {
    /// `first` is the end that works; the peer has these `addresses` for other hosts, all with the port of `first`.
    pub(crate) fn new(first: SocketAddr, addresses: &[IpAddr], sources: &[Source], paths: u8) -> Self {
        let search = |path: u8| {
            let candidates = candidates(usize::from(path), first, addresses, sources);
            Search { path: PathId(path), candidates, turn: 0, is_over: false }
        };
        let searches = (1..paths).map(search).filter(|search| !search.candidates.is_empty()).collect();
        Self { ends: [RawAddress::new(first); PATHS_MAX as usize], searches, asked: 0 }
    }

    /// Where a path ends, and from where it begins.
    pub(crate) fn end(&self, path: usize) -> RawAddress {
        self.ends.get(path).copied().unwrap_or(self.ends[0])
    }

    /// Where a question of [`Group::try_path`] goes.
    pub(crate) fn trial_end(&self, path: usize) -> RawAddress {
        let search = self.searches.iter().find(|search| usize::from(search.path.0) == path);
        search.map_or(self.end(path), Search::candidate)
    }

    /// Takes what was answered and asks on; returns when to look again, `None`: every path has its way.
    pub(crate) fn search(&mut self, group: &mut Group, peer: u32) -> Option<Duration> {
        let Self { ends, searches, asked } = self;
        for search in searches.iter_mut().filter(|search| !search.is_over) {
            if *asked > 0 && group.has_trial_answer(peer, search.path) {
                ends[usize::from(search.path.0)] = search.candidate();
                search.is_over = true;
            }
        }
        let mut searching = searches.iter_mut().filter(|search| !search.is_over).peekable();
        searching.peek()?;
        if *asked == QUESTIONS {
            *asked = 0;
            let mut rested = true;
            for search in searching {
                search.turn += 1;
                rested &= search.turn % search.candidates.len() == 0;
            }
            return Some(if rested { REST } else { Duration::ZERO });
        }
        let attempt = if *asked == 0 { Attempt::First } else { Attempt::Again };
        searching.for_each(|search| group.try_path(peer, search.path, attempt));
        *asked += 1;
        Some(PAUSE * 2_u32.pow(*asked - 1))
    }
}

impl Search {
    fn candidate(&self) -> RawAddress {
        self.candidates[self.turn % self.candidates.len()]
    }
}

/// Ways that a further path should rather take than the one that works, best first; none where nobody has a choice.
fn candidates(path: usize, first: SocketAddr, addresses: &[IpAddr], sources: &[Source]) -> Vec<RawAddress> {
    if first.ip().is_loopback() || addresses.len().max(sources.len()) < 2 {
        return Vec::new();
    }
    // Path 0 has the kernel's way, which is the card in the network of the address that answered; path 1 gets the next.
    let home = sources.iter().position(|source| source.is_near(first.ip())).unwrap_or(0);
    let mut ways = Vec::new();
    for turn in (home + path)..(home + path + sources.len().max(1)) {
        let place = turn % sources.len().max(1);
        let is_near = |address: &&IpAddr| sources.get(place).is_some_and(|source| source.is_near(**address));
        let near: Vec<IpAddr> = addresses.iter().filter(is_near).copied().collect();
        let among = if near.is_empty() { addresses } else { &near };
        let Some(to) = among.get(turn % among.len().max(1)) else { continue };
        let routed = RawAddress::new(SocketAddr::new(*to, first.port()));
        if sources.len() > 1 {
            ways.push(routed.by_source(place));
        }
        // Behind a router the kernel may know better through which card.
        if (near.is_empty() || sources.len() < 2) && routed != RawAddress::new(first) {
            ways.push(routed);
        }
    }
    ways
}

/// Questions by one way: of a way that loses 30 %, both directions counted, one in fifteen is left out until the next
/// time.
const QUESTIONS: u32 = 4;
/// Before the first of them, and between the first two; twice as long each time, so that an answer may take 300 ms at least.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);
/// After all ways have been tried in vain: a few small packets in that time cost nothing, and a cut cable may be mended.
const REST: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    const PORT: u16 = 47_400;

    fn source(text: &str, interface: u32) -> Source {
        Source { address: text.parse().unwrap(), bits: 24, interface }
    }

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    /// Each way as the place of its source and its address.
    fn ways(path: usize, first: &str, theirs: &[&str], ours: &[Source]) -> Vec<(Option<usize>, String)> {
        let first = SocketAddr::new(first.parse().unwrap(), PORT);
        let found = candidates(path, first, &ips(theirs), ours);
        let shown = |way: &RawAddress| {
            let to = way.to_socket_addr().unwrap();
            assert_eq!(to.port(), PORT);
            (way.source(), to.ip().to_string())
        };
        found.iter().map(shown).collect()
    }

    fn way(source: Option<usize>, to: &str) -> (Option<usize>, String) {
        (source, to.to_owned())
    }

    #[test]
    fn one_address_on_each_side_leaves_nothing_to_choose() {
        assert!(ways(1, "10.0.0.2", &["10.0.0.2"], &[source("10.0.0.1", 2)]).is_empty());
        assert!(ways(1, "127.0.0.1", &["10.0.0.2", "10.1.0.2"], &[source("10.0.0.1", 2)]).is_empty());
    }

    #[test]
    fn each_rail_leads_to_the_peers_address_in_its_own_network() {
        let ours = [source("10.0.0.1", 2), source("10.1.0.1", 3)];
        // The peer lists a bridge of its own first.
        let theirs = ["172.18.0.1", "10.1.0.2", "10.0.0.2"];
        let [near, far] = [way(Some(0), "10.0.0.2"), way(Some(1), "10.1.0.2")];
        assert_eq!(ways(1, "10.0.0.2", &theirs, &ours), [far.clone(), near.clone()]);
        assert_eq!(ways(2, "10.0.0.2", &theirs, &ours), [near.clone(), far]);
        assert_eq!(ways(1, "10.1.0.2", &theirs, &ours)[0], near, "the rail that path 0 is not on");
    }

    #[test]
    fn a_card_that_may_lead_nowhere_is_followed_by_the_others() {
        let ours = [source("10.0.0.1", 2), source("172.30.0.1", 3), source("10.1.0.1", 4)];
        let theirs = ["10.0.0.2", "172.30.0.2", "10.1.0.2"];
        let all = [way(Some(1), "172.30.0.2"), way(Some(2), "10.1.0.2"), way(Some(0), "10.0.0.2")];
        assert_eq!(ways(1, "10.0.0.2", &theirs, &ours), all);
    }

    #[test]
    fn two_cards_in_one_network_pair_up() {
        let ours = [source("10.0.0.1", 2), source("10.0.0.3", 3)];
        let theirs = ["10.0.0.2", "10.0.0.4"];
        assert_eq!(ways(1, "10.0.0.2", &theirs, &ours)[0], way(Some(1), "10.0.0.4"));
        assert_eq!(ways(2, "10.0.0.2", &theirs, &ours)[0], way(Some(0), "10.0.0.2"));
    }

    #[test]
    fn what_is_in_no_network_of_ours_is_tried_from_the_card_and_as_the_kernel_routes() {
        let ours = [source("10.0.0.1", 2), source("10.1.0.1", 3)];
        let theirs = ["10.7.0.2", "10.8.0.2"];
        let found = ways(1, "10.7.0.2", &theirs, &ours);
        assert_eq!(found, [way(Some(1), "10.8.0.2"), way(None, "10.8.0.2"), way(Some(0), "10.7.0.2")]);
        assert_eq!(ways(1, "10.7.0.2", &theirs, &ours[..1]), [way(None, "10.8.0.2")]);
        assert_eq!(ways(2, "10.7.0.2", &theirs, &ours[..1]), []);
    }
}
