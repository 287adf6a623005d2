//! Which packet numbers arrived on a path, and when to say so.
//!
//! claim: mlt/one-ack-for-ten (section 4.2.3). An acknowledgement also goes out at once when a gap opens, because
//! that is when the sender can use it most. What left at one moment, dozens of packets where rates are high, waits for what leaves next:
//! on its way through a kernel an acknowledgement costs as much as a message of 64 KB does. A sender that waits for one asks for it.
//! Where packets come slowly it waits for a few of them ([`Hold`]).

use crate::hold::Hold;
use crate::{ConnectionConfig, Timestamp};
use core::time::Duration;
use gradwire_wire::{AckPath, Flags, Header, PacketNumber, PathId, ACK_WORDS_MAX};

/// Numbers further ahead than this cannot be: no window holds so many packets.
const AHEAD_MAX: i32 = 1 << 20;

/// A path on which nothing new came for so long has nothing under way.
const DELAY_FRESH: Duration = Duration::from_millis(100);

/// So many times as many packets are acknowledged though they left at one moment: with 10, two messages of 64 KB in packets of 1500 bytes.
const BURST_TIMES: u32 = 9;

/// Least bitmap of an acknowledgement: 256 packets.
const WORDS_MIN: usize = 4;

/// What a packet number told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arrival {
    /// Not seen before.
    New,
    /// Seen before: the network duplicated it.
    Duplicate,
    /// Too far ahead or behind to judge.
    Implausible,
}

/// The receiving side of one path.
#[derive(Debug)]
pub(crate) struct Arrivals {
    path: PathId,
    any: bool,
    largest: PacketNumber,
    /// Bit `i` is packet `largest - run - i`.
    bitmap: [u64; ACK_WORDS_MAX],
    /// So many packets up to the largest have come one after the other since the bitmap was last moved: moving it for each is most of
    /// what an arrival costs.
    run: usize,
    /// Packets since the last acknowledgement, the time stamp of the first of them, and the largest then.
    unacked: u32,
    unacked_sent_us: u32,
    acked_largest: PacketNumber,
    /// The oldest of those that came behind a later one: since the last acknowledgement, and in the time before it.
    overtaken: [Option<PacketNumber>; 2],
    oldest_unacked_at: Option<Timestamp>,
    /// Newest data packet: its time stamp and when it came.
    newest_sent_us: u32,
    newest_at: Timestamp,
    /// A gap opened, or the sender asked.
    at_once: bool,
    /// Time from the sender's stamp to the arrival here, microseconds of two clocks: only its difference from that of
    /// another path means something. Follows longer ones at once and shorter ones slowly. When it was last seen.
    delay_us: Option<(u32, Timestamp)>,
    every: u32,
    hold: Hold,
    tally: Tally,
}

/// How many packets were sent on a path, judged by their numbers, and how many came: what is missing is the network's
/// loss. A sender that takes packets for lost cannot tell it from what its receiver had no room for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) numbered: u64,
    pub(crate) arrived: u64,
    largest: Option<PacketNumber>,
}

impl Tally {
    fn count(&mut self, number: PacketNumber) {
        let ahead = self.largest.map_or(1, |largest| number.since(largest));
        if ahead > 0 {
            self.numbered += u64::from(ahead.unsigned_abs());
            self.largest = Some(number);
        }
        self.arrived += 1;
    }
}

impl Arrivals {
    pub(crate) fn new(path: PathId, config: &ConnectionConfig) -> Self {
        Self {
            path,
            any: false,
            largest: PacketNumber(0),
            bitmap: [0; ACK_WORDS_MAX],
            run: 0,
            unacked: 0,
            unacked_sent_us: 0,
            acked_largest: PacketNumber(0),
            overtaken: [None; 2],
            oldest_unacked_at: None,
            newest_sent_us: 0,
            newest_at: Timestamp::ZERO,
            at_once: false,
            delay_us: None,
            every: config.ack_every.max(1),
            hold: Hold::new(config),
            tally: Tally::default(),
        }
    }

    /// What this number is, without recording it.
    pub(crate) fn check(&self, number: PacketNumber) -> Arrival {
        if !self.any {
            return Arrival::New;
        }
        let ahead = number.since(self.largest);
        if ahead > AHEAD_MAX {
            return Arrival::Implausible;
        }
        if ahead > 0 {
            return Arrival::New;
        }
        let Some(back) = (ahead.unsigned_abs() as usize).checked_sub(self.run) else {
            return Arrival::Duplicate;
        };
        match self.bitmap.get(back / 64) {
            Some(word) if word >> (back % 64) & 1 == 1 => Arrival::Duplicate,
            Some(_) => Arrival::New,
            // Older than the window: its chunk decides whether it is new.
            None => Arrival::New,
        }
    }

    /// Counts an arrival that [`Arrivals::check`] called new, whatever becomes of it.
    pub(crate) fn count(&mut self, number: PacketNumber) {
        self.tally.count(number);
    }

    /// What came and what did not.
    pub(crate) fn tally(&self) -> Tally {
        self.tally
    }

    /// Records an arrival that [`Arrivals::check`] called new.
    pub(crate) fn record(&mut self, now: Timestamp, number: PacketNumber, sent_at_us: u32) {
        if !self.any {
            self.any = true;
            self.largest = number;
            self.acked_largest = PacketNumber(number.0.wrapping_sub(1));
            self.bitmap[0] = 1;
        } else {
            self.mark(number);
        }
        if number == self.largest {
            self.newest_sent_us = sent_at_us;
            self.newest_at = now;
        }
        self.count_unacked(1, sent_at_us);
        self.oldest_unacked_at.get_or_insert(now);
    }

    fn count_unacked(&mut self, packets: u32, sent_at_us: u32) {
        if self.unacked == 0 {
            self.unacked_sent_us = sent_at_us;
        }
        self.unacked += packets;
    }

    /// Whether this is the number after the largest.
    pub(crate) fn is_next(&self, number: PacketNumber) -> bool {
        self.any && number.since(self.largest) == 1
    }

    /// What [`Arrivals::count`], [`Arrivals::record`] and the others do for each, for packets of a first pass that came one after the other:
    /// `first`, which [`Arrivals::is_next`], and those behind it.
    pub(crate) fn record_run(&mut self, now: Timestamp, first: &Header, packets: u32) {
        let mut number = first.packet_number;
        for _ in 0..packets {
            self.tally.count(number);
            self.mark(number);
            number = number.next();
        }
        (self.newest_sent_us, self.newest_at) = (first.sent_at_us, now);
        self.count_unacked(packets, first.sent_at_us);
        self.oldest_unacked_at.get_or_insert(now);
        // Each follows a shorter delay a little more, until it stays.
        for _ in 0..packets {
            let before = self.delay_us;
            self.on_first_pass(now, first.sent_at_us);
            if self.delay_us == before {
                break;
            }
        }
        if first.flags.contains(Flags::ACK_NOW) {
            self.on_asked();
        }
    }

    /// A packet of a first pass tells how long the path takes.
    pub(crate) fn on_first_pass(&mut self, now: Timestamp, sent_at_us: u32) {
        let delay = now.as_wire_us().wrapping_sub(sent_at_us);
        let before = self.delay_us.filter(|(_, at)| now.since(*at) < DELAY_FRESH).map_or(delay, |(us, _)| us);
        let change = delay.wrapping_sub(before) as i32;
        let next = before.wrapping_add((if change > 0 { change } else { change / 16 }) as u32);
        self.delay_us = Some((next, now));
    }

    /// How long packets take on this path, if any came lately.
    pub(crate) fn delay(&self, now: Timestamp) -> Option<u32> {
        self.delay_us.filter(|(_, at)| now.since(*at) < DELAY_FRESH).map(|(us, _)| us)
    }

    /// A duplicate says that the sender does not know what we have: tell it with the next chance.
    pub(crate) fn on_duplicate(&mut self, now: Timestamp) {
        self.oldest_unacked_at.get_or_insert(now);
    }

    /// The sender asked for an acknowledgement.
    pub(crate) fn on_asked(&mut self) {
        self.at_once = true;
    }

    fn mark(&mut self, number: PacketNumber) {
        let ahead = number.since(self.largest);
        if ahead == 1 && self.run < RUN_MAX {
            self.run += 1;
            self.largest = number;
            return;
        }
        self.bitmap = self.bitmap_now();
        self.run = 0;
        if ahead > 0 {
            self.at_once |= ahead > 1;
            self.bitmap = moved(&self.bitmap, ahead.unsigned_abs() as usize);
            self.largest = number;
        } else if self.overtaken[0].is_none_or(|oldest| number.since(oldest) < 0) {
            self.overtaken[0] = Some(number);
        }
        let back = self.largest.since(number).unsigned_abs() as usize;
        if let Some(word) = self.bitmap.get_mut(back / 64) {
            *word |= 1 << (back % 64);
        }
    }

    /// Bit `i` is packet `largest - i`.
    fn bitmap_now(&self) -> [u64; ACK_WORDS_MAX] {
        let mut bitmap = moved(&self.bitmap, self.run);
        // A run is shorter than a word.
        bitmap[0] |= (1 << self.run) - 1;
        bitmap
    }

    /// Whether an acknowledgement is due.
    pub(crate) fn is_due(&self, now: Timestamp) -> bool {
        self.is_enough()
            || self.at_once
            || self.oldest_unacked_at.is_some_and(|oldest| now >= oldest + self.hold.longest())
    }

    /// Whether so many packets have come that they are worth an acknowledgement, which of what left at one moment are more.
    fn is_enough(&self) -> bool {
        let is_one_burst = self.newest_sent_us == self.unacked_sent_us;
        self.unacked >= if is_one_burst { self.every.saturating_mul(BURST_TIMES) } else { self.every }
    }

    /// How long acknowledgements are held back.
    pub(crate) fn hold(&self) -> &Hold {
        &self.hold
    }

    /// When one will be due though nothing arrives.
    pub(crate) fn due_at(&self) -> Option<Timestamp> {
        self.oldest_unacked_at.map(|oldest| oldest + self.hold.longest())
    }

    /// What arrived, in at least `words_min` words of bitmap; `None` when nothing ever did.
    pub(crate) fn describe(&self, words_min: usize, words_max: usize) -> Option<AckPath> {
        // Cover twice what is new, so that one lost acknowledgement costs nothing.
        let news = 2 * self.largest.since(self.acked_largest).unsigned_abs() as usize;
        let back = |number: &PacketNumber| self.largest.since(*number).unsigned_abs() as usize + 1;
        let news = self.overtaken.iter().flatten().map(back).fold(news, usize::max);
        let words = news.div_ceil(64).clamp(words_min, words_max.max(words_min)) as u8;
        let (path, largest) = (self.path, self.largest);
        self.any.then(|| AckPath { path, largest, words, bitmap: self.bitmap_now() })
    }

    /// The acknowledgement: `(echo_us, delay_us, bitmap)`; `None` when nothing ever arrived.
    pub(crate) fn acknowledge(&mut self, now: Timestamp) -> Option<(u32, u32, AckPath)> {
        let path = self.describe(WORDS_MIN, ACK_WORDS_MAX)?;
        self.hold.on_acknowledged(self.unacked, self.oldest_unacked_at, self.newest_at);
        self.unacked = 0;
        self.at_once = false;
        self.oldest_unacked_at = None;
        self.acked_largest = self.largest;
        self.overtaken = [None, self.overtaken[0]];
        let delay = u32::try_from(now.since(self.newest_at).as_micros()).unwrap_or(u32::MAX);
        Some((self.newest_sent_us, delay, path))
    }
}

/// The bitmap when so many newer packets are known of.
fn moved(bitmap: &[u64; ACK_WORDS_MAX], by: usize) -> [u64; ACK_WORDS_MAX] {
    let (words, bits) = (by / 64, by % 64);
    let mut moved = [0; ACK_WORDS_MAX];
    for (index, word) in moved.iter_mut().enumerate().skip(words) {
        let low = bitmap[index - words];
        let high = (index - words).checked_sub(1).map_or(0, |from| bitmap[from]);
        *word = if bits == 0 { low } else { low << bits | high >> (64 - bits) };
    }
    moved
}

/// Shorter than a word of the bitmap.
const RUN_MAX: usize = 63;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_between_numbers_is_counted_as_lost_until_it_comes() {
        let mut tally = Tally::default();
        let mut after = |numbers: &[u32]| {
            numbers.iter().for_each(|number| tally.count(PacketNumber(*number)));
            (tally.numbered, tally.arrived)
        };
        assert_eq!(after(&[u32::MAX - 1, u32::MAX, 0]), (3, 3), "numbers wrap around");
        assert_eq!(after(&[3]), (6, 4));
        assert_eq!(after(&[2]), (6, 5), "overtaken, not lost");
    }
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    fn arrivals() -> Arrivals {
        Arrivals::new(PathId(0), &crate::config::tests::config())
    }

    proptest! {
        #[test]
        fn the_bitmap_lists_exactly_what_arrived(steps in prop::collection::vec(1u32..90, 1..60), late in prop::collection::vec(any::<prop::sample::Index>(), 0..20)) {
            let mut arrivals = arrivals();
            let mut model = BTreeSet::new();
            let mut skipped = Vec::new();
            let mut number = u32::MAX - 500;
            for step in steps {
                // Half of the steps are runs, longer than a word of the bitmap at times.
                for _ in 0..if step % 2 == 0 { step } else { 0 } {
                    number = number.wrapping_add(1);
                    arrivals.record(Timestamp::ZERO, PacketNumber(number), 0);
                    model.insert(number);
                }
                skipped.extend((1..step).map(|i| number.wrapping_add(i)));
                number = number.wrapping_add(step);
                arrivals.record(Timestamp::ZERO, PacketNumber(number), 0);
                model.insert(number);
            }
            for index in late {
                if !skipped.is_empty() {
                    let number = skipped[index.index(skipped.len())];
                    if arrivals.check(PacketNumber(number)) == Arrival::New {
                        arrivals.record(Timestamp::ZERO, PacketNumber(number), 0);
                        model.insert(number);
                    }
                }
            }
            for back in 0..(64 * ACK_WORDS_MAX as u32) {
                let number = number.wrapping_sub(back);
                let came = arrivals.check(PacketNumber(number)) == Arrival::Duplicate;
                prop_assert_eq!(came, model.contains(&number), "packet {} back", back);
            }
            let (_, _, path) = arrivals.acknowledge(Timestamp::ZERO).expect("something arrived");
            prop_assert_eq!(path.largest, PacketNumber(number));
            for back in 0..(64 * ACK_WORDS_MAX as u32) {
                let bit = path.bitmap[(back / 64) as usize] >> (back % 64) & 1 == 1;
                prop_assert_eq!(bit, model.contains(&number.wrapping_sub(back)), "packet {} back", back);
            }
        }
    }

    // test of: mlt/one-ack-for-ten
    #[test]
    fn an_acknowledgement_is_due_after_ten_packets_a_gap_or_the_delay() {
        let mut arrivals = arrivals();
        for number in 0..9 {
            arrivals.record(Timestamp::ZERO, PacketNumber(number), number);
            assert!(!arrivals.is_due(Timestamp::ZERO));
        }
        assert!(arrivals.is_due(Timestamp::ZERO + arrivals.hold.longest()));
        arrivals.record(Timestamp::ZERO, PacketNumber(9), 9);
        assert!(arrivals.is_due(Timestamp::ZERO));
        arrivals.acknowledge(Timestamp::ZERO);
        assert!(!arrivals.is_due(Timestamp::ZERO));
        arrivals.record(Timestamp::ZERO, PacketNumber(12), 12);
        assert!(arrivals.is_due(Timestamp::ZERO), "10 and 11 are missing");
    }

    #[test]
    fn where_packets_come_slowly_an_acknowledgement_is_about_a_few_of_them() {
        let mut arrivals = arrivals();
        let gap = arrivals.hold.longest() / 2 * 3;
        let mut acknowledged = 0;
        for number in 0..300 {
            let now = Timestamp::ZERO + gap * number;
            if arrivals.due_at().is_some_and(|at| at <= now) {
                assert!(arrivals.is_due(now));
                arrivals.acknowledge(now);
                acknowledged += 1;
            }
            arrivals.record(now, PacketNumber(number), number);
        }
        assert!((70..110).contains(&acknowledged), "{acknowledged}");
    }

    #[test]
    fn what_left_at_one_moment_waits_for_what_left_later_but_for_no_more_than_two_bursts() {
        let mut arrivals = arrivals();
        let mut due_after = |stamps: &[u32]| {
            let first = arrivals.largest.0;
            for (number, stamp) in (first + 1..).zip(stamps) {
                arrivals.record(Timestamp::ZERO, PacketNumber(number), *stamp);
            }
            let is_due = arrivals.is_due(Timestamp::ZERO);
            arrivals.acknowledge(Timestamp::ZERO);
            is_due
        };
        assert!(!due_after(&[7; 44]));
        assert!(due_after(&[&[7; 44][..], &[8]].concat()));
        assert!(!due_after(&[8; 89]));
        assert!(due_after(&[8; 90]));
        assert!(!due_after(&[8, 9]));
    }

    #[test]
    fn a_number_from_nowhere_is_implausible() {
        let mut arrivals = arrivals();
        arrivals.record(Timestamp::ZERO, PacketNumber(5), 0);
        assert_eq!(arrivals.check(PacketNumber(5)), Arrival::Duplicate);
        assert_eq!(arrivals.check(PacketNumber(5 + (1 << 21))), Arrival::Implausible);
    }
}
