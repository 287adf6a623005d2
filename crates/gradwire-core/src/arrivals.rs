//! Which packet numbers arrived on a path, and when to say so.
//!
//! claim: mlt/one-ack-for-ten (section 4.2.3). An acknowledgement also goes out at once when a gap opens, because
//! that is when the sender can use it most. What left at one moment, dozens of packets where rates are high, waits for what leaves next:
//! on its way through a kernel an acknowledgement costs as much as a message of 64 KB does. A sender that waits for one asks for it.
//! Where packets come slowly it waits for a few of them ([`Hold`]).

use crate::astray::Astray;
use crate::hold::Hold;
use crate::late_arrivals::{moved, LateArrivals, Window, WindowSet, REACH, WORDS_MIN};
use crate::{ConnectionConfig, Timestamp};
use alloc::boxed::Box;
use core::time::Duration;
use gradwire_wire::{AckPath, Flags, Header, PacketNumber, PathId, ACK_WORDS_MAX};

/// Numbers further ahead than this cannot be: no window holds so many packets.
pub(crate) const AHEAD_MAX: i32 = 1 << 20;

/// A path on which nothing new came for so long has nothing under way.
const DELAY_FRESH: Duration = Duration::from_millis(100);

/// So many times as many packets are acknowledged though they left at one moment: with 10, two messages of 64 KB in packets of 1500 bytes.
const BURST_TIMES: u32 = 9;

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
    /// Where the network has a queue for each traffic class.
    late: Option<Box<LateArrivals>>,
    /// Newest data packet: its time stamp and when it came.
    newest_sent_us: u32,
    newest_at: Timestamp,
    /// The same of the latest one, where those of several queues take turns.
    latest: (u32, Timestamp),
    /// A gap opened, or the sender asked.
    at_once: bool,
    /// Time from the sender's stamp to the arrival here, microseconds of two clocks: only its difference from that of
    /// another path means something. Follows longer ones at once and shorter ones slowly. When it was last seen.
    delay_us: Option<(u32, Timestamp)>,
    every: u32,
    hold: Hold,
    tally: Tally,
    astray: Astray,
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

    /// The next one to be counted, which may be far ahead: what lies between was lost while the path was dead, and says nothing of what the
    /// network loses now.
    fn go_on_at(&mut self, number: PacketNumber) {
        if self.largest.is_some_and(|largest| number.since(largest) > AHEAD_MAX) {
            self.largest = Some(PacketNumber(number.0.wrapping_sub(1)));
        }
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
            late: config.has_class_queues().then(Box::default),
            newest_sent_us: 0,
            newest_at: Timestamp::ZERO,
            latest: (0, Timestamp::ZERO),
            at_once: false,
            delay_us: None,
            every: config.ack_every.max(1),
            hold: Hold::new(config),
            tally: Tally::default(),
            astray: Astray::default(),
        }
    }

    /// What this number is, without recording it.
    pub(crate) fn check(&self, number: PacketNumber) -> Arrival {
        if !self.any {
            return Arrival::New;
        }
        let ahead = number.since(self.largest);
        if ahead > AHEAD_MAX || self.late.is_some() && self.largest.since(number) >= LateArrivals::BEHIND_MAX
        {
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
            _ if self.late.as_ref().is_some_and(|late| late.has(number)) => Arrival::Duplicate,
            Some(_) => Arrival::New,
            // Older than the window: its chunk decides whether it is new.
            None => Arrival::New,
        }
    }

    /// Whether a number that [`Arrivals::check`] called implausible is new all the same: so many that lie close together are as far ahead
    /// that its sender has come so far. Then it is to be counted.
    pub(crate) fn has_come_so_far(&mut self, number: PacketNumber) -> bool {
        let has = number.since(self.largest) > AHEAD_MAX && self.astray.agrees(number, self.largest);
        if has {
            self.tally.go_on_at(number);
        }
        has
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
        if number == self.largest || self.late.is_some() {
            self.latest = (sent_at_us, now);
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
        self.latest = (first.sent_at_us, now);
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
        if ahead <= 0 {
            return self.mark_overtaken(number);
        }
        self.bitmap = self.bitmap_now();
        self.run = 0;
        self.before_moving(ahead);
        self.at_once |= ahead > 1;
        self.bitmap = moved(&self.bitmap, ahead.unsigned_abs() as usize);
        self.bitmap[0] |= 1;
        self.largest = number;
    }

    fn mark_overtaken(&mut self, number: PacketNumber) {
        let behind = self.largest.since(number);
        if let Some(late) = self.late.as_mut().filter(|_| LateArrivals::is_late(behind)) {
            late.record(number);
            self.at_once |= late.is_full();
            return;
        }
        if self.overtaken[0].is_none_or(|oldest| number.since(oldest) < 0) {
            self.overtaken[0] = Some(number);
        }
        // Those of the run are there.
        let Some(back) = (behind.unsigned_abs() as usize).checked_sub(self.run) else { return };
        if let Some(word) = self.bitmap.get_mut(back / 64) {
            *word |= 1 << (back % 64);
        }
    }

    /// What the bitmap will no longer reach back to before it is acknowledged, or what another queue of the network was about, becomes a
    /// window of those that are late. `ahead`: of the newest packet, so far is the next one.
    fn before_moving(&mut self, ahead: i32) {
        let Some(late) = &mut self.late else { return };
        let unacked = self.acked_largest.next();
        let news = (self.largest.since(unacked) >= 0).then_some(unacked);
        let oldest = [news, self.overtaken[0], self.overtaken[1]]
            .into_iter()
            .flatten()
            .min_by_key(|number| number.since(self.largest));
        let reach = oldest.map_or(0, |oldest| self.largest.since(oldest) + 1);
        // A run of packets moves it unseen.
        if LateArrivals::is_late(ahead) || reach + ahead + RUN_MAX as i32 > REACH as i32 {
            let before = PacketNumber(self.largest.0.wrapping_sub(64 * WORDS_MIN as u32 - 1));
            late.add(Window::new(self.largest, self.bitmap, [oldest, Some(before)]));
            self.at_once |= late.is_full();
            self.acked_largest = PacketNumber(self.largest.0.wrapping_add(ahead as u32 - 1));
            self.overtaken = [None; 2];
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
        let is_one_burst = self.latest.0 == self.unacked_sent_us;
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
        self.hold.on_acknowledged(self.unacked, self.oldest_unacked_at, self.latest.1);
        self.unacked = 0;
        self.at_once = false;
        self.oldest_unacked_at = None;
        self.acked_largest = self.largest;
        self.overtaken = [None, self.overtaken[0]];
        let delay = u32::try_from(now.since(self.newest_at).as_micros()).unwrap_or(u32::MAX);
        Some((self.newest_sent_us, delay, path))
    }

    /// The next acknowledgement names what earlier ones did too, as far as there is room for it.
    pub(crate) fn say_again(&mut self) {
        self.acked_largest = PacketNumber(self.largest.0.wrapping_sub(AGAIN));
    }

    /// What waited in queues of the network and has come lately, as far as so many bytes of an acknowledgement have room for it.
    /// `all`: and what came earlier.
    pub(crate) fn late_to_acknowledge(&self, room: usize, all: bool) -> WindowSet {
        self.late.as_ref().map_or(WindowSet::default(), |late| late.to_acknowledge(room, all))
    }

    /// The entries for it, and no more.
    pub(crate) fn describe_late(&self, chosen: WindowSet) -> impl Iterator<Item = AckPath> + '_ {
        self.late.iter().flat_map(move |late| late.describe(self.path, chosen))
    }

    /// They are in an acknowledgement.
    pub(crate) fn on_late_acknowledged(&mut self, chosen: WindowSet) {
        if let Some(late) = &mut self.late {
            late.on_acknowledged(chosen, self.largest);
        }
    }
}

/// Half of the packets that an acknowledgement names at most.
const AGAIN: u32 = 32 * ACK_WORDS_MAX as u32;
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

    fn of_queues() -> Arrivals {
        let config = ConnectionConfig { class_queues: 4, ..crate::config::tests::config() };
        Arrivals::new(PathId(0), &config)
    }

    /// All that an acknowledgement names that leaves now.
    fn named(arrivals: &mut Arrivals) -> BTreeSet<u32> {
        let (_, _, newest) = arrivals.acknowledge(Timestamp::ZERO).expect("something arrived");
        let chosen = arrivals.late_to_acknowledge(1_400 - 6 - 8 * usize::from(newest.words), false);
        let entries: Vec<AckPath> = arrivals.describe_late(chosen).chain([newest]).collect();
        arrivals.on_late_acknowledged(chosen);
        let bits = |entry: &AckPath| {
            let (bitmap, largest) = (entry.bitmap, entry.largest.0);
            let is_set = move |back: &u32| bitmap[(back / 64) as usize] >> (back % 64) & 1 == 1;
            (0..64 * u32::from(entry.words)).filter(is_set).map(move |back| largest.wrapping_sub(back))
        };
        entries.iter().flat_map(bits).collect()
    }

    proptest! {
        // Four queues, each of which keeps its order; of each burst some packets are lost.
        #[test]
        fn an_acknowledgement_names_all_that_came_since_the_last_one_out_of_any_queue(
            start: u32,
            bursts in prop::collection::vec((0_usize..4, prop_oneof![1_u32..4, 1_u32..700, 510_u32..520]), 1..120),
            turns in prop::collection::vec((0_usize..4, 1_usize..150), 1..120),
            every in 1_usize..300,
        ) {
            let mut arrivals = of_queues();
            let mut queues = [(); 4].map(|()| std::collections::VecDeque::new());
            let mut next = start;
            for (queue, packets) in bursts {
                queues[queue].extend((0..packets).map(|at| next.wrapping_add(at)).filter(|number| number % 17 != 3));
                next = next.wrapping_add(packets);
            }
            let (mut all, mut came) = (BTreeSet::new(), BTreeSet::new());
            for (queue, packets) in turns {
                for number in queues[queue].drain(..packets.min(queues[queue].len())).collect::<Vec<_>>() {
                    prop_assert_eq!(arrivals.check(PacketNumber(number)), Arrival::New);
                    arrivals.record(Timestamp::ZERO, PacketNumber(number), 0);
                    prop_assert_eq!(arrivals.check(PacketNumber(number)), Arrival::Duplicate);
                    all.insert(number);
                    came.insert(number);
                    if came.len() >= every || arrivals.at_once {
                        let named = named(&mut arrivals);
                        let missing: Vec<_> = came.difference(&named).collect();
                        prop_assert!(missing.is_empty(), "{missing:?}");
                        prop_assert!(all.is_superset(&named));
                        came.clear();
                    }
                }
            }
        }
    }

    #[test]
    fn an_acknowledgement_leaves_at_once_where_the_next_packet_could_displace_what_it_has_not_named() {
        let mut arrivals = of_queues();
        arrivals.record(Timestamp::ZERO, PacketNumber(100_000), 0);
        named(&mut arrivals);
        for place in 1..=7 {
            assert!(!arrivals.at_once, "before {place}");
            arrivals.record(Timestamp::ZERO, PacketNumber(600 * place), 0);
        }
        assert!(arrivals.at_once);
        assert!(named(&mut arrivals).is_superset(&(1..=7).map(|place| 600 * place).collect()));
        assert!(!arrivals.at_once);
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
