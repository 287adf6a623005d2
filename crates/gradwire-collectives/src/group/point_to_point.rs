//! Sends and receives between two ranks. They are not part of the group's sequence: only two ranks know of them.

use super::{Group, Key, Queued};
use crate::call::Call;
use crate::op::{Name, Op};
use crate::peer::Offer;
use crate::{Algorithm, Collective, OpId, Request};
use gradwire_core::wire::Opening;
use gradwire_core::{Timestamp, TransferId};

impl Group {
    pub(super) fn start_send(&mut self, now: Timestamp, id: OpId, to: u32, request: Request) {
        let Some(slot) = self.slot_of(to) else { return };
        let transfer = self.peers[slot].traffic.next_transfer();
        let name = Name { id, submitted: now, point_to_point: Some(transfer), rotation: None, links: None };
        let op =
            Op::new(request, Algorithm::Auto, self.place(self.next_point_to_point), name, &mut self.pool);
        self.next_point_to_point += 1;
        let key = self.ops.insert_point_to_point(Box::new(op));
        self.peers[slot].traffic.sending.push((transfer, key));
        self.begin(now, key);
    }

    /// A peer sends something that this rank has not asked for yet.
    pub(super) fn on_offered(
        &mut self,
        now: Timestamp,
        slot: usize,
        transfer: TransferId,
        opening: &Opening,
    ) {
        if transfer.is_point_to_point() {
            self.offers += 1;
            self.peers[slot].traffic.on_offer(transfer, *opening, self.offers);
            return self.match_offer(now, slot);
        }
        if self.is_server() {
            return self.on_call_offered(now, slot, transfer, opening);
        }
        if self.peers[slot].serves {
            let key = self.ops.key_of_served(transfer.op());
            let Some(op) = key.and_then(|key| self.ops.at(key)) else { return };
            let (sequence, ours) = (op.sequence(), op.call.encode());
            return self.compare(now, slot, sequence, (ours, opening.descriptor));
        }
        // Something that this rank will never ask for, if it has called something else there.
        let Some((sequence, ours)) = self.history.at_op(transfer.op()) else { return };
        self.compare(now, slot, sequence, (ours, opening.descriptor));
    }

    /// Starts the receives that fit what a peer has just offered, in the order in which they were called. None fits what others have
    /// offered, or it would not wait.
    fn match_offer(&mut self, now: Timestamp, slot: usize) {
        let peer = self.peers[slot].rank;
        let mut at = 0;
        while at < self.receives.len() && self.failed.is_none() {
            looked();
            let offer = match self.receives[at].request.collective {
                Collective::Receive { from, tag } if from.is_none_or(|from| from == peer) => {
                    self.peers[slot].traffic.first_with(tag)
                }
                _ => None,
            };
            match offer.and_then(|offer| Some((offer, self.receives.remove(at)?))) {
                Some((offer, receive)) => self.start_receive(now, receive, slot, &offer),
                None => at += 1,
            }
        }
    }

    /// Starts a receive, or has it wait for an offer: those before it fit nothing that was offered.
    pub(super) fn call_receive(&mut self, now: Timestamp, receive: Queued) {
        match self.offer_for(&receive.request) {
            Some((slot, offer)) => self.start_receive(now, receive, slot, &offer),
            None => self.receives.push_back(receive),
        }
    }

    /// The earliest offer that fits, with its peer.
    fn offer_for(&self, request: &Request) -> Option<(usize, Offer)> {
        let Collective::Receive { from, tag } = request.collective else { return None };
        let slots = match from {
            Some(from) => self.slot_of(from).map(|slot| slot..slot + 1)?,
            None => 0..self.peers.len(),
        };
        let offers = slots.filter_map(|slot| {
            looked();
            Some((slot, self.peers[slot].traffic.first_with(tag)?))
        });
        offers.min_by_key(|(_, offer)| offer.arrival)
    }

    fn start_receive(&mut self, now: Timestamp, receive: Queued, slot: usize, offer: &Offer) {
        let Queued { id, mut request, submitted, sequence, .. } = receive;
        if let Collective::Receive { from, .. } = &mut request.collective {
            *from = Some(self.peers[slot].rank);
        }
        let ours = Call::of(&request, Algorithm::Auto).encode();
        self.peers[slot].traffic.take(offer);
        let name = Name { id, submitted, point_to_point: Some(offer.transfer), rotation: None, links: None };
        let op = Op::new(request, Algorithm::Auto, self.place(sequence), name, &mut self.pool);
        let key = self.ops.insert_point_to_point(Box::new(op));
        self.peers[slot].traffic.receiving.push((offer.transfer, key));
        if ours != offer.opening.descriptor {
            let sequence = self.sequence_of(slot, offer.transfer);
            return self.fail_mismatch(now, slot, sequence, (ours, offer.opening.descriptor));
        }
        self.begin(now, key);
    }

    /// Forgets an ended transfer, and tells its connection which ones are over.
    pub(super) fn retire_point_to_point(&mut self, key: Key) {
        for slot in 0..self.peers.len() {
            let traffic = &mut self.peers[slot].traffic;
            traffic.sending.retain(|(_, of)| *of != key);
            let Some(at) = traffic.receiving.iter().position(|(_, of)| *of == key) else { continue };
            let (transfer, _) = traffic.receiving.swap_remove(at);
            if let Some(below) = traffic.on_over(transfer) {
                self.peers.connection_mut(slot).retire(below);
            }
        }
    }
}

#[cfg(test)]
thread_local! {
    /// How often a receive or a peer was looked at, to find what fits what.
    pub(super) static LOOKS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

fn looked() {
    #[cfg(test)]
    LOOKS.with(|looks| looks.set(looks.get() + 1));
}
