//! What a group knows about one peer: the connection, where it is, and the point-to-point traffic with it.

mod agenda;
mod peers;

use crate::call::Call;
use crate::group::PeerConfig;
use crate::ops::Key;
use crate::position::PositionRecord;
use gradwire_core::wire::Opening;
use gradwire_core::{Connection, Timestamp, TransferId};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

pub(crate) use peers::Peers;

/// Of a way that loses all data of so many bytes in a packet, while small packets pass.
fn large_are_lost(bytes: u32) -> String {
    format!("; of the last large packets that this rank sent there none arrived ({bytes} bytes of data each, or more), though smaller ones did: the MTU on the way may have become smaller (`gradwire doctor` finds it, GRADWIRE_MTU sets it), or something drops them")
}

/// One peer.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) host: String,
    /// Changed by [`Peers`] only.
    connection: Connection,
    pub(crate) is_connected: bool,
    pub(crate) has_left: bool,
    /// It is a dedicated server and this rank is none: the two number their calls apart from the group's.
    pub(crate) serves: bool,
    /// Where it last said it was.
    pub(crate) position: Option<PositionRecord>,
    /// The latest collective in which something came from it, or was taken by it: while that changes it says nothing.
    pub(crate) seen_in: Option<u64>,
    pub(crate) traffic: PointToPoint,
    /// It is heard at least so often, even while it waits.
    pub(crate) heartbeat: Duration,
}

impl Peer {
    pub(crate) fn new(config: PeerConfig, now: Timestamp) -> Self {
        Self {
            rank: config.rank,
            host: config.host,
            heartbeat: config.connection.heartbeat(),
            connection: Connection::new(config.connection, now),
            is_connected: false,
            has_left: false,
            serves: false,
            position: None,
            seen_in: None,
            traffic: PointToPoint::default(),
        }
    }

    /// The connection, to look at.
    pub(crate) const fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Whether it said that collective `sequence` is its oldest one in flight.
    pub(crate) fn is_in(&self, sequence: u64) -> bool {
        self.position.is_some_and(|position| position.sequence == sequence && position.call.is_some())
    }

    /// A transfer to or from it has ended that belongs to collective `sequence`.
    pub(crate) fn on_seen(&mut self, sequence: u64) {
        self.seen_in = self.seen_in.max(Some(sequence));
    }

    /// Where it last said it was, for people; or where it was seen, if that was later. And what is wrong with the way to it, where that is known.
    pub(crate) fn whereabouts(&self) -> String {
        let hole = self.connection().loses_all_data().map_or_else(String::new, large_are_lost);
        format!("{}{hole}", self.place())
    }

    fn place(&self) -> String {
        let said = self.position.map(|position| position.sequence);
        if let Some(seen) = self.seen_in.filter(|_| self.seen_in > said) {
            return format!("it last took part in collective {seen}");
        }
        match self.position {
            None => "it has said nothing about where it is".to_owned(),
            Some(PositionRecord { sequence, call: None }) => {
                format!("it last said that it was idle before collective {sequence}")
            }
            Some(PositionRecord { sequence, call: Some(call) }) => {
                let name =
                    Call::decode(&call).map_or("something unknown".to_owned(), |call| call.during(sequence));
                format!("it last said that it was in {name}")
            }
        }
    }
}

/// Point-to-point transfers with one peer. Each direction is numbered; the receiver takes those with a tag in the
/// order of their numbers, so that messages of one tag do not overtake each other whatever the network does.
#[derive(Debug, Default)]
pub(crate) struct PointToPoint {
    next_send: u32,
    pub(crate) sending: Vec<(TransferId, Key)>,
    pub(crate) receiving: Vec<(TransferId, Key)>,
    /// Number of the first transfer that has not been offered yet, and what was offered from there on.
    next_offer: u32,
    offered: VecDeque<Option<Opening>>,
    /// Offered without a gap before them, not yet received.
    waiting: VecDeque<Offer>,
    /// Received out of order, from the first that is not over yet.
    first_open: u32,
    over: BTreeSet<u32>,
}

/// A transfer that the peer wants to send.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    pub(crate) transfer: TransferId,
    pub(crate) opening: Opening,
    /// Place in the order of all offers to this rank.
    pub(crate) arrival: u64,
}

impl PointToPoint {
    /// The id of the next transfer to this peer.
    pub(crate) fn next_transfer(&mut self) -> TransferId {
        let transfer = TransferId::point_to_point(self.next_send);
        self.next_send = self.next_send.wrapping_add(1);
        transfer
    }

    /// Takes an offer.
    pub(crate) fn on_offer(&mut self, transfer: TransferId, opening: Opening, arrival: u64) {
        let ahead = transfer.0.wrapping_sub(self.next_offer) & NUMBER_MASK;
        if ahead as usize >= OFFERS_AHEAD_MAX {
            return;
        }
        if self.offered.len() <= ahead as usize {
            self.offered.resize(ahead as usize + 1, None);
        }
        self.offered[ahead as usize] = Some(opening);
        while let Some(Some(opening)) = self.offered.front().copied() {
            self.offered.pop_front();
            let transfer = TransferId::point_to_point(self.next_offer);
            self.waiting.push_back(Offer { transfer, opening, arrival });
            self.next_offer = self.next_offer.wrapping_add(1) & NUMBER_MASK;
        }
    }

    /// The first offer with `tag`.
    pub(crate) fn first_with(&self, tag: u32) -> Option<Offer> {
        self.waiting.iter().find(|offer| Self::tag_of(offer) == Some(tag)).copied()
    }

    /// Takes `offer` out of those waiting.
    pub(crate) fn take(&mut self, offer: &Offer) {
        self.waiting.retain(|waiting| waiting.transfer != offer.transfer);
    }

    /// A receive is over. Returns the first transfer that is not, when that has moved.
    pub(crate) fn on_over(&mut self, transfer: TransferId) -> Option<TransferId> {
        self.over.insert(transfer.0 & NUMBER_MASK);
        let before = self.first_open;
        while self.over.remove(&self.first_open) {
            self.first_open = self.first_open.wrapping_add(1) & NUMBER_MASK;
        }
        (self.first_open != before).then(|| TransferId::point_to_point(self.first_open))
    }

    fn tag_of(offer: &Offer) -> Option<u32> {
        Call::decode(&offer.opening.descriptor)?.tag()
    }
}

const NUMBER_MASK: u32 = TransferId::POINT_TO_POINT - 1;
/// Transfers that one peer may have on offer at once: beyond it their numbers are not believed.
const OFFERS_AHEAD_MAX: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Collective, Dtype, Request};
    use std::time::Duration;

    fn opening(tag: u32) -> Opening {
        let request = Request::exact(Collective::Send { to: 1, tag }, Dtype::Bytes, Duration::from_secs(1));
        Opening { total_bytes: 0, descriptor: Call::of(&request, Algorithm::Auto).encode(), called_us: 0 }
    }

    #[test]
    fn offers_are_taken_in_the_order_of_their_numbers_for_each_tag() {
        let mut traffic = PointToPoint::default();
        let id = TransferId::point_to_point;
        traffic.on_offer(id(1), opening(7), 0);
        assert!(traffic.first_with(7).is_none(), "the number before it has not come");
        traffic.on_offer(id(0), opening(7), 1);
        traffic.on_offer(id(2), opening(8), 2);
        assert_eq!(traffic.first_with(8).map(|offer| offer.transfer), Some(id(2)));
        for number in [0, 1] {
            let offer = traffic.first_with(7).expect("two offers with this tag");
            assert_eq!(offer.transfer, id(number));
            traffic.take(&offer);
        }
        assert!(traffic.first_with(7).is_none());
        traffic.on_offer(id(0), opening(7), 3);
        assert!(traffic.first_with(7).is_none(), "an old number is no new offer");
    }

    #[test]
    fn transfers_are_retired_up_to_the_first_open_one() {
        let mut traffic = PointToPoint::default();
        let id = TransferId::point_to_point;
        assert_eq!(traffic.on_over(id(1)), None);
        assert_eq!(traffic.on_over(id(0)), Some(id(2)));
        assert_eq!(traffic.on_over(id(2)), Some(id(3)));
    }
}
