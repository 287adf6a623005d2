//! Which packets are lost, where the network has a queue for each traffic class.
//!
//! The switches serve the more urgent queue first (MLT section 5.2), so a packet overtakes those of less urgent ones, and is overtaken
//! by those of more urgent ones: what of these arrives says nothing about it. Packets of its own queue, or of a less urgent one, that were
//! sent later and have arrived do. Whatever anything has overtaken is lost after [`STARVED_MAX`], so that nothing waits for ever for a
//! packet behind it that does not come.
//!
//! What holds for a packet holds for every older one of its queue. So each queue has a list of its own, whose oldest packet ends the search:
//! one that waits behind tens of thousands of more urgent packets costs no more than any other.

use super::ledger_ring::{Entry, Ring, State};
use super::SentPacket;
use crate::{Timestamp, CLASSES_MAX};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::PacketNumber;

/// So long more urgent packets may hold one up.
pub(super) const STARVED_MAX: Duration = Duration::from_millis(100);

/// Later packets that must be acknowledged before a packet is lost (LTP section IV-B; RFC 9002 section 6.1.1).
pub(super) const PACKET_THRESHOLD: usize = 3;

/// The largest acknowledged numbers, largest first.
pub(super) type Newest = [Option<PacketNumber>; PACKET_THRESHOLD];

/// What a [`super::Ledger`] knows of each queue.
#[derive(Debug, Default)]
pub(super) struct ByQueue {
    queues: [Queue; CLASSES_MAX],
    /// The largest acknowledged number.
    newest_acked: Option<PacketNumber>,
    /// What the entries of an acknowledgement have room for since the last search: the newest and the oldest packet of each.
    described: [Option<(PacketNumber, PacketNumber)>; CLASSES_MAX],
    /// Since when a packet is late that a later one has overtaken, as far as the last search saw.
    pub(super) late_since: Option<Timestamp>,
}

#[derive(Debug, Default)]
struct Queue {
    /// In flight, in the order of sending; others among them leave once they are the oldest.
    sent: VecDeque<PacketNumber>,
    /// Of packets of this queue, or of a less urgent one.
    newest_acked: Newest,
}

impl ByQueue {
    /// A packet leaves.
    pub(super) fn on_sent(&mut self, ring: &Ring, queue: u8, number: PacketNumber) {
        let place = place(queue);
        let sent = &mut self.queues[place].sent;
        while sent.front().is_some_and(|oldest| !is_in_flight(ring, *oldest)) {
            sent.pop_front();
        }
        // Everything that was acknowledged is older than this one, and in time no older number could be told from a newer one.
        if sent.is_empty() {
            self.queues[place].newest_acked = Newest::default();
            if self.queues.iter().all(|queue| queue.sent.is_empty()) {
                self.newest_acked = None;
            }
        }
        self.queues[place].sent.push_back(number);
    }

    /// A packet of this queue is acknowledged.
    pub(super) fn note_acked(&mut self, queue: u8, number: PacketNumber) {
        self.newest_acked = self.newest_acked.filter(|newest| newest.since(number) > 0).or(Some(number));
        self.queues[..=place(queue)].iter_mut().for_each(|queue| insert(&mut queue.newest_acked, number));
    }

    /// An entry of an acknowledgement has room for these packets, and says of each whether it has come.
    pub(super) fn note_described(&mut self, (newest, oldest): (PacketNumber, PacketNumber)) {
        if let Some(free) = self.described.iter_mut().find(|range| range.is_none()) {
            *free = Some((newest, oldest));
        }
    }

    /// Packets that three later ones have overtaken, where the acknowledgement would have named them, or one, after `loss_delay`, or any
    /// after [`STARVED_MAX`] more.
    pub(super) fn lose_overtaken(
        &mut self,
        ring: &mut Ring,
        now: Timestamp,
        loss_delay: Duration,
        lost: &mut Vec<SentPacket>,
    ) {
        let newest_of_all = self.newest_acked;
        let described = core::mem::take(&mut self.described);
        let is_described = |number: PacketNumber| {
            described
                .iter()
                .flatten()
                .any(|(newest, oldest)| number.since(*newest) <= 0 && number.since(*oldest) >= 0)
        };
        let mut late_since: Option<Timestamp> = None;
        self.lose(ring, lost, |queue, entry| {
            let [largest, _, third] = queue.newest_acked;
            let is_before = |newest: Option<PacketNumber>| {
                newest.is_some_and(|newest| entry.packet.number.since(newest) < 0)
            };
            if !is_before(newest_of_all) {
                return false;
            }
            let sent_at = entry.packet.sent_at;
            let since = if is_before(largest) { sent_at } else { sent_at + STARVED_MAX };
            let is_lost = is_before(third) && is_described(entry.packet.number) || now >= since + loss_delay;
            if !is_lost {
                late_since = Some(late_since.map_or(since, |at| at.min(since)));
            }
            is_lost
        });
        self.late_since = late_since;
    }

    /// The answer has come to a question of this queue, which left then: what it has not overtaken and `is_older` is lost.
    pub(super) fn lose_asked(
        &mut self,
        ring: &mut Ring,
        (at, queue): (Timestamp, u8),
        lost: &mut Vec<SentPacket>,
        is_older: impl Fn(&Entry) -> bool,
    ) {
        self.lose(ring, lost, |_, entry| {
            // It overtakes packets of less urgent queues, but not for ever.
            entry.queue <= queue && is_older(entry) || entry.packet.sent_at + STARVED_MAX <= at
        });
    }

    /// Takes packets out of the flight, in each queue from the oldest to the first that `is_lost` spares.
    fn lose(
        &mut self,
        ring: &mut Ring,
        lost: &mut Vec<SentPacket>,
        mut is_lost: impl FnMut(&Queue, &Entry) -> bool,
    ) {
        let from = lost.len();
        for queue in &mut self.queues {
            while let Some(number) = queue.sent.front() {
                if let Some(entry) = ring.entry_mut(*number).filter(|entry| entry.state == State::InFlight) {
                    if !is_lost(queue, entry) {
                        break;
                    }
                    entry.state = State::Lost;
                    lost.push(entry.packet);
                }
                queue.sent.pop_front();
            }
        }
        let first = ring.first();
        lost[from..].sort_unstable_by_key(|packet| packet.number.since(first));
    }
}

/// Inserts into the three largest numbers.
pub(super) fn insert(newest: &mut Newest, mut number: PacketNumber) {
    for slot in newest {
        match *slot {
            Some(held) if number.since(held) < 0 => {}
            Some(held) => number = slot.replace(number).unwrap_or(held),
            None => {
                *slot = Some(number);
                return;
            }
        }
    }
}

fn is_in_flight(ring: &Ring, number: PacketNumber) -> bool {
    ring.entry(number).is_some_and(|entry| entry.state == State::InFlight)
}

fn place(queue: u8) -> usize {
    usize::from(queue).min(CLASSES_MAX - 1)
}
