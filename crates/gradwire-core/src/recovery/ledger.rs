//! What is in flight: one entry for each packet sent, until it is acknowledged or lost.
//!
//! Called by the connection for each data packet and each acknowledgement. Numbers are never used twice: a
//! chunk that goes out again is a new packet, so an acknowledgement is never ambiguous.
//!
//! ```text
//!   IN FLIGHT --acknowledged--> ACKED            lost and forgotten packets stay known for a while:
//!       |  |--overtaken, too old--> LOST         a late acknowledgement still counts as delivered, and
//!       '--transfer is over--> FORGOTTEN         the flight is charged for each packet exactly once
//! ```
//!
//! It also takes the delivery-rate samples (IETF draft on delivery rate estimation): the bytes delivered
//! between the moment when a packet left and its acknowledgement, over the longer of the time that sending
//! and that acknowledging them took.

use super::by_queue::{insert, ByQueue, Newest, PACKET_THRESHOLD};
use super::filters::rate_of;
use super::ledger_ring::{Entry, Ring, State};
use super::reordering::{Overtaken, Reordering};
use crate::Timestamp;
use alloc::boxed::Box;
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, TransferId, ACK_WORDS_MAX};

/// One data packet in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentPacket {
    /// Its number on its path.
    pub number: PacketNumber,
    /// The transfer it belongs to.
    pub transfer: TransferId,
    /// The chunk of that transfer.
    pub chunk: u32,
    /// Payload bytes.
    pub bytes: u32,
    /// When it was sent.
    pub sent_at: Timestamp,
}

/// What an acknowledgement or a timer changed. Reused between calls: no allocation per acknowledgement. Every
/// call that takes one empties it first.
#[derive(Debug, Default)]
pub struct AckOutcome {
    /// Packets that arrived, oldest first; also those that counted as lost before.
    pub acked: Vec<SentPacket>,
    /// Packets that count as lost, oldest first.
    pub lost: Vec<SentPacket>,
    /// Delivery rate over the newest acknowledged packet's lifetime, bytes per second.
    pub delivery_rate: Option<u64>,
    /// Bytes that it was measured over.
    pub rate_bytes: u64,
    /// Whether that sample was limited by the application.
    pub app_limited: bool,
    /// Whether a round trip has ended: a packet sent after the last round's end was acknowledged.
    pub round_ended: bool,
    /// Of those that arrived, packets and bytes that had counted as lost and had only been overtaken.
    pub unlost: (u32, u64),
}

impl AckOutcome {
    /// Whether it is known of any packet what has become of it: had the pause before the next question grown, what goes out again and is
    /// lost too would wait for all of it.
    #[must_use]
    pub fn brings_news(&self) -> bool {
        !self.acked.is_empty() || !self.lost.is_empty()
    }
}

impl AckOutcome {
    pub(crate) fn clear(&mut self) {
        self.acked.clear();
        self.lost.clear();
        self.delivery_rate = None;
        self.rate_bytes = 0;
        self.app_limited = false;
        self.round_ended = false;
        self.unlost = (0, 0);
    }
}

/// Packets in flight on one path.
#[derive(Debug, Default)]
pub struct Ledger {
    ring: Ring,
    /// First packet in flight, or the next number.
    oldest: PacketNumber,
    /// The three largest acknowledged numbers, largest first.
    newest_acked: Newest,
    /// Packets before it are overtaken by a question that was answered, where that is after the largest acknowledged number.
    asked_before: Option<PacketNumber>,
    reordering: Reordering,
    /// Where packets of some queues overtake those of others. What overtakes others within a queue is not learned.
    by_queue: Option<Box<ByQueue>>,
    in_flight: u64,
    sent_packets: u64,
    /// First number of the present round trip.
    round_start: PacketNumber,
    delivered: u64,
    delivered_at: Timestamp,
    first_sent_at: Timestamp,
    /// The sender ran dry after this packet: until it is acknowledged, samples show the application's rate.
    app_limited_until: Option<PacketNumber>,
    /// Until then acknowledgements of forgotten packets may still come.
    forgotten_until: Timestamp,
    loss_delay: Duration,
}

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same of packets that take several queues of the network, of which the most urgent is served first.
    #[must_use]
    pub fn by_queue() -> Self {
        Self { by_queue: Some(Box::default()), ..Self::default() }
    }

    /// Number that the next packet must carry.
    #[must_use]
    pub fn next_number(&self) -> PacketNumber {
        self.ring.next()
    }

    /// Records a packet that takes this queue of the network; `packet.number` is [`Ledger::next_number`]. `app_limited`:
    /// the sender had nothing more to send than its window allowed.
    pub fn on_sent(&mut self, packet: SentPacket, queue: u8, app_limited: bool) {
        debug_assert_eq!(packet.number, self.next_number(), "packet numbers have no holes");
        // Nothing is on its way, so the clock of the next sample starts now and not at the last acknowledgement.
        if self.in_flight == 0 && packet.sent_at >= self.forgotten_until {
            self.first_sent_at = packet.sent_at;
            self.delivered_at = packet.sent_at;
        }
        if app_limited {
            self.app_limited_until = Some(packet.number);
        }
        if let Some(by_queue) = &mut self.by_queue {
            by_queue.on_sent(&self.ring, queue, packet.number);
        }
        self.ring.push(Entry {
            packet,
            state: State::InFlight,
            queue,
            app_limited: self.app_limited_until.is_some(),
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent_at: self.first_sent_at,
        });
        self.in_flight += u64::from(packet.bytes);
        self.sent_packets += 1;
    }

    /// Applies an acknowledgement. A packet counts as lost when three packets sent later on this path were
    /// acknowledged (LTP section IV-B), or one was and `loss_delay` has passed since it was sent; more and longer where packets that
    /// counted as lost came after all. Where the network has several queues, what counts is not known before all parts of an
    /// acknowledgement are applied: it is for [`Ledger::on_timeout`] then.
    ///
    /// `waited`: how long the acknowledgement waited at the receiver and on its way back; delivery rates are those at the receiver.
    ///
    /// Returns `false` and changes nothing when `ack.largest` was never sent (forged or corrupt).
    pub fn on_ack(
        &mut self,
        now: Timestamp,
        waited: Duration,
        ack: &AckPath,
        loss_delay: Duration,
        outcome: &mut AckOutcome,
    ) -> bool {
        outcome.clear();
        if !self.was_sent(ack.largest) {
            return false;
        }
        self.loss_delay = loss_delay;
        let words = usize::from(ack.words).min(ACK_WORDS_MAX);
        let mut newest = None;
        // From the oldest word to the newest, so that `acked` is in the order of sending.
        for (at, word) in ack.bitmap.iter().enumerate().take(words).rev() {
            let top = PacketNumber(ack.largest.0.wrapping_sub(at as u32 * 64));
            let fresh = word.reverse_bits() & self.ring.unacked_up_to(top);
            newest = self.apply_word(now, top, fresh, outcome).or(newest);
        }
        let described = (words > 0).then(|| top_and_bottom(ack.largest, words));
        if let (Some(by_queue), Some(range)) = (&mut self.by_queue, described) {
            by_queue.note_described(range);
        }
        if let Some(newest) = newest {
            self.delivered_at = self.delivered_at.max(now.before(waited));
            self.sample(newest, outcome);
            if outcome.round_ended {
                self.reordering.on_round();
            }
            let largest = self.newest_acked[0];
            self.asked_before.take_if(|asked| largest.is_some_and(|largest| largest.since(*asked) >= 0));
            self.advance_oldest();
            if self.by_queue.is_none() {
                self.detect_lost(now, loss_delay, described, outcome);
            }
            self.prune();
        }
        true
    }

    /// Declares what counts as lost now, by time and, where some packets overtake others, by what was acknowledged; fills `outcome.lost`.
    pub fn on_timeout(&mut self, now: Timestamp, loss_delay: Duration, outcome: &mut AckOutcome) {
        outcome.clear();
        if let Some(by_queue) = &mut self.by_queue {
            by_queue.lose_overtaken(&mut self.ring, now, loss_delay, &mut outcome.lost);
            self.after_losing_by_queue(outcome);
        } else {
            self.detect_lost(now, loss_delay, None, outcome);
        }
        self.prune();
    }

    /// When [`Ledger::on_timeout`] should be called, if a gap is waiting for its time.
    #[must_use]
    pub fn loss_time(&self, loss_delay: Duration) -> Option<Timestamp> {
        if let Some(by_queue) = &self.by_queue {
            return by_queue.late_since.map(|since| since + loss_delay);
        }
        let overtaking = self.asked_before.or(self.newest_acked[0])?;
        let patience = self.reordering.patience(loss_delay);
        (self.oldest.since(overtaking) < 0).then_some(self.oldest_sent_at()? + patience)
    }

    /// Forgets the packets of a transfer that is over (they leave the flight without counting as lost).
    /// `held`: how long acknowledgements of them may be held back.
    pub fn forget(&mut self, transfer: TransferId, held: Duration) {
        let mut number = self.oldest;
        while let Some(entry) = self.ring.entry_mut(number) {
            if entry.state == State::InFlight && entry.packet.transfer == transfer {
                entry.state = State::Forgotten;
                self.in_flight -= u64::from(entry.packet.bytes);
                self.forgotten_until = entry.packet.sent_at + self.loss_delay + held;
            }
            number = number.next();
        }
        self.advance_oldest();
        self.prune();
    }

    /// The answer to a probe has come that left then, in this queue: what has a number before `next`, and was not overtaken by it, leaves the
    /// flight as lost.
    pub fn lose_older(&mut self, next: PacketNumber, (at, queue): (Timestamp, u8), outcome: &mut AckOutcome) {
        outcome.clear();
        self.lose_asked((at, queue), outcome, |entry| entry.packet.number.since(next) < 0);
    }

    /// The same of everything that was sent then or before.
    pub fn lose_asked_before(&mut self, at: Timestamp, queue: u8, outcome: &mut AckOutcome) {
        outcome.clear();
        self.lose_asked((at, queue), outcome, |entry| entry.packet.sent_at <= at);
    }

    fn lose_asked(
        &mut self,
        asked: (Timestamp, u8),
        outcome: &mut AckOutcome,
        is_older: impl Fn(&Entry) -> bool,
    ) {
        if let Some(by_queue) = &mut self.by_queue {
            by_queue.lose_asked(&mut self.ring, asked, &mut outcome.lost, is_older);
            self.after_losing_by_queue(outcome);
        } else if self.reordering.is_known() {
            self.lose_overtaken_by_question(outcome, is_older);
        } else {
            self.lose_while(outcome, |entry| is_older(entry).then_some(State::Lost));
        }
        self.prune();
    }

    /// Like any packet the question may have overtaken what is not lost. What it has not overtaken by far has its time.
    fn lose_overtaken_by_question(&mut self, outcome: &mut AckOutcome, is_older: impl Fn(&Entry) -> bool) {
        let mut next = self.oldest;
        while self.ring.entry(next).is_some_and(&is_older) {
            next = next.next();
        }
        let packets = self.reordering.packets();
        self.lose_while(outcome, |entry| {
            (next.since(entry.packet.number) >= packets).then_some(State::Overtaken)
        });
        let newest = self.asked_before.or(self.newest_acked[0]);
        if newest.is_none_or(|newest| next.since(newest) > 0) {
            self.asked_before = Some(next);
        }
    }

    /// Takes everything sent at or before `sent_before` out of the flight as lost (a path that fell silent).
    pub fn lose_before(&mut self, sent_before: Timestamp, outcome: &mut AckOutcome) {
        outcome.clear();
        self.lose_while(outcome, |entry| (entry.packet.sent_at <= sent_before).then_some(State::Lost));
        self.prune();
    }

    /// Whether this packet was neither acknowledged nor counts as lost or forgotten.
    #[must_use]
    pub fn is_in_flight(&self, number: PacketNumber) -> bool {
        self.ring.entry(number).is_some_and(|entry| entry.state == State::InFlight)
    }

    /// Payload bytes in flight.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// The oldest packet in flight.
    #[must_use]
    pub fn oldest(&self) -> Option<&SentPacket> {
        self.ring.entry(self.oldest).map(|entry| &entry.packet)
    }

    /// When the oldest packet in flight was sent.
    #[must_use]
    pub fn oldest_sent_at(&self) -> Option<Timestamp> {
        self.oldest().map(|packet| packet.sent_at)
    }

    /// Starts an unused ledger at another number.
    #[cfg(test)]
    pub(super) fn start_at(&mut self, number: PacketNumber) {
        self.ring.start_at(number);
        self.oldest = number;
        self.round_start = number;
    }

    /// Whether packets are known to overtake others.
    #[cfg(test)]
    pub(crate) fn reorders(&self) -> bool {
        self.reordering.is_known()
    }

    /// As if what is on its way had been lost, and so many more packets.
    #[cfg(test)]
    pub(crate) fn lose_unseen(&mut self, packets: u32) {
        self.lose_before(Timestamp::from_nanos(u64::MAX), &mut AckOutcome::default());
        while self.ring.first() != self.ring.next() {
            self.ring.pop();
        }
        self.start_at(PacketNumber(self.next_number().0.wrapping_add(packets)));
        self.sent_packets += u64::from(packets);
    }

    /// Entries held.
    #[cfg(test)]
    pub(super) fn remembered(&self) -> i32 {
        self.next_number().since(self.ring.first())
    }

    fn was_sent(&self, number: PacketNumber) -> bool {
        let age = self.next_number().0.wrapping_sub(number.0);
        (1..=u32::MAX / 2).contains(&age) && u64::from(age) <= self.sent_packets
    }

    /// Acknowledges the packets whose bits are set: bit `63 - i` is packet `top - i`. Returns the newest.
    fn apply_word(
        &mut self,
        now: Timestamp,
        top: PacketNumber,
        mut fresh: u64,
        outcome: &mut AckOutcome,
    ) -> Option<PacketNumber> {
        let mut newest = None;
        self.ring.acknowledge_up_to(top, fresh);
        while fresh != 0 {
            let number = PacketNumber(top.0.wrapping_sub(63 - fresh.trailing_zeros()));
            fresh &= fresh - 1;
            self.acknowledge(now, number, outcome);
            // Of those in order only the last three are among the three largest in the end.
            if let Some(by_queue) = &mut self.by_queue {
                let queue = self.ring.entry(number).map_or(0, |entry| entry.queue);
                by_queue.note_acked(queue, number);
            } else if fresh.count_ones() < PACKET_THRESHOLD as u32 {
                insert(&mut self.newest_acked, number);
            }
            newest = Some(number);
        }
        newest
    }

    fn acknowledge(&mut self, now: Timestamp, number: PacketNumber, outcome: &mut AckOutcome) {
        let Some(entry) = self.ring.entry_mut(number) else { return };
        let packet = entry.packet;
        let bytes = u64::from(packet.bytes);
        let before = core::mem::replace(&mut entry.state, State::Acked);
        self.delivered += bytes;
        if before == State::InFlight {
            self.in_flight -= bytes;
        }
        if before != State::Forgotten {
            outcome.acked.push(packet);
        }
        if before == State::Overtaken || self.reordering.is_known() {
            self.note_order(now, &packet, before, outcome);
        }
    }

    /// This packet is acknowledged: whether later ones were before it, and by how far.
    fn note_order(&mut self, now: Timestamp, packet: &SentPacket, state: State, outcome: &mut AckOutcome) {
        let by = self.newest_acked[0].map_or(0, |newest| newest.since(packet.number));
        if by <= 0 {
            return;
        }
        let (age, loss_delay) = (now.since(packet.sent_at), self.loss_delay);
        self.reordering.on_overtaken(Overtaken { state, by, age, loss_delay });
        if matches!(state, State::Overtaken | State::Late) {
            outcome.unlost.0 += 1;
            outcome.unlost.1 += u64::from(packet.bytes);
        }
    }

    /// The delivery-rate sample of the newest packet that this acknowledgement names for the first time.
    fn sample(&mut self, newest: PacketNumber, outcome: &mut AckOutcome) {
        let Some(entry) = self.ring.entry(newest) else { return };
        let send_elapsed = entry.packet.sent_at.since(entry.first_sent_at);
        let ack_elapsed = self.delivered_at.since(entry.delivered_at);
        outcome.rate_bytes = self.delivered - entry.delivered;
        outcome.delivery_rate = rate_of(outcome.rate_bytes, send_elapsed.max(ack_elapsed));
        outcome.app_limited = entry.app_limited;
        self.first_sent_at = self.first_sent_at.max(entry.packet.sent_at);
        if newest.since(self.round_start) >= 0 {
            outcome.round_ended = true;
            self.round_start = self.next_number();
        }
        if self.app_limited_until.is_some_and(|until| newest.since(until) >= 0) {
            self.app_limited_until = None;
        }
    }

    // claim: ltp/loss-by-three
    /// An acknowledgement says nothing about packets outside its bitmap (`described`: the newest and the oldest packet
    /// that it has room for). A short one that came over a faster path overtakes the one that names what is older.
    ///
    /// Nearly always both rules hold for a packet only if they hold for every older one, so the first survivor ends the
    /// search; what is not described waits for the next acknowledgement, or its time.
    fn detect_lost(
        &mut self,
        now: Timestamp,
        loss_delay: Duration,
        described: Option<(PacketNumber, PacketNumber)>,
        outcome: &mut AckOutcome,
    ) {
        let [Some(largest), _, third] = self.newest_acked else { return };
        let is_described = |number: PacketNumber| {
            described.is_some_and(|(newest, oldest)| number.since(newest) <= 0 && number.since(oldest) >= 0)
        };
        let overtaking = self.asked_before.unwrap_or(largest);
        let (packets, patience) = (self.reordering.packets(), self.reordering.patience(loss_delay));
        self.lose_while(outcome, |entry| {
            let number = entry.packet.number;
            let is_behind =
                third.is_some_and(|third| number.since(third) < 0) && largest.since(number) >= packets;
            let late = number.since(overtaking) < 0 && now.since(entry.packet.sent_at) >= patience;
            let overtaken = (is_behind && is_described(number)).then_some(State::Overtaken);
            overtaken.or(late.then_some(State::Late))
        });
    }

    /// `outcome` was empty before.
    fn after_losing_by_queue(&mut self, outcome: &AckOutcome) {
        self.in_flight -= outcome.lost.iter().map(|packet| u64::from(packet.bytes)).sum::<u64>();
        self.advance_oldest();
    }

    /// Takes packets out of the flight as lost, from the oldest to the first that `lost_as` spares.
    fn lose_while(&mut self, outcome: &mut AckOutcome, lost_as: impl Fn(&Entry) -> Option<State>) {
        while let Some(entry) = self.ring.entry_mut(self.oldest) {
            if entry.state == State::InFlight {
                let Some(state) = lost_as(entry) else { return };
                entry.state = state;
                self.in_flight -= u64::from(entry.packet.bytes);
                outcome.lost.push(entry.packet);
            }
            self.oldest = self.oldest.next();
        }
    }

    fn advance_oldest(&mut self) {
        while self.ring.entry(self.oldest).is_some_and(|entry| entry.state != State::InFlight) {
            self.oldest = self.oldest.next();
        }
    }

    /// Drops acknowledged packets from the front, and lost or forgotten ones once no acknowledgement will
    /// reach back to them.
    fn prune(&mut self) {
        while self.ring.first() != self.oldest {
            let acked = self.ring.entry(self.ring.first()).is_none_or(|entry| entry.state == State::Acked);
            if !acked && self.oldest.since(self.ring.first()) <= HISTORY {
                return;
            }
            self.ring.pop();
        }
    }
}

/// The newest and the oldest packet that a bitmap of so many words has room for.
fn top_and_bottom(largest: PacketNumber, words: usize) -> (PacketNumber, PacketNumber) {
    (largest, PacketNumber(largest.0.wrapping_sub(64 * words as u32 - 1)))
}

/// Packets that an entry of an acknowledgement can name. One of those that are late may name older ones that were lost; they went again then.
const HISTORY: i32 = ACK_WORDS_MAX as i32 * 64;
