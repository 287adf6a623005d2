//! When this rank says hello, and which hellos are as large as a datagram may be.
//!
//! An answer to a full one proves that full datagrams pass, and the first is full, so that ranks meet in one round trip. What repeats
//! it is small: many ranks behind a slow link would otherwise fill its queue with hellos, and wait for their answers behind them all.
//! When a small one is answered that left after the full one, that one was lost. From then on all are full again, with pauses that
//! grow to the time scale of the round trip, which is known now: of a queue that is filled with them it is as long as the queue.

use crate::Timestamp;
use core::time::Duration;

/// Shortest pause between hellos: the first one.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// Longest pause where no longer round trip is known, and longest first one of those that are full again: a round trip that
/// seemed long may be that of a rank that stood still.
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// Longest pause, whatever round trip is known.
const PAUSE_CEILING: Duration = Duration::from_secs(10);

/// What an answer to a hello shows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shown {
    /// Full datagrams pass, in both directions.
    FullPasses,
    /// Only that the peer is there.
    PeerIsThere,
}

/// The hellos of a connection.
#[derive(Debug)]
pub(super) struct Hellos {
    at: Timestamp,
    pause: Duration,
    pause_max: Duration,
    /// When the first one left, which is full.
    first_at: Option<Timestamp>,
    /// From when on all are full: a peer is there that has not answered the first.
    full_from: Option<Timestamp>,
}

impl Hellos {
    pub(super) const fn new(now: Timestamp) -> Self {
        Self { at: now, pause: PAUSE_MIN, pause_max: PAUSE_MAX, first_at: None, full_from: None }
    }

    /// When the next one is due.
    pub(super) const fn at(&self) -> Timestamp {
        self.at
    }

    /// Whether a small one was answered that left after a full one: full datagrams do not pass, or were lost so far.
    pub(super) const fn is_peer_there(&self) -> bool {
        self.full_from.is_some()
    }

    /// A hello leaves, with the stamp of now; whether it is to be as large as a datagram may be.
    pub(super) fn on_sent(&mut self, now: Timestamp) -> bool {
        self.at = now + self.pause;
        self.pause = (self.pause * 2).min(self.pause_max);
        let is_first = self.first_at.is_none();
        self.first_at.get_or_insert(stamped(now));
        is_first || self.full_from.is_some()
    }

    /// The hello with this stamp is answered. `None`: this rank never wrote such a stamp.
    pub(super) fn on_answer(&mut self, now: Timestamp, stamp: u32) -> Option<Shown> {
        let sent_at = now.of_wire_us(stamp)?;
        let first_at = self.first_at?;
        if sent_at == first_at || self.full_from.is_some_and(|from| sent_at >= from) {
            return Some(Shown::FullPasses);
        }
        if sent_at > first_at && self.full_from.is_none() {
            // A small one may have left in this microsecond, which is all that a stamp says.
            self.at = now + Duration::from_micros(1);
            self.full_from = Some(stamped(self.at));
            let round_trips = now.since(sent_at) * 2;
            self.pause = round_trips.clamp(PAUSE_MIN, PAUSE_MAX);
            self.pause_max = round_trips.clamp(PAUSE_MAX, PAUSE_CEILING);
        }
        Some(Shown::PeerIsThere)
    }
}

/// What the stamp of this moment says.
fn stamped(now: Timestamp) -> Timestamp {
    now.of_wire_us(now.as_wire_us()).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;

    const fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    /// Says hello whenever one is due until `end_ms`; which were full, and when each left.
    fn say(hellos: &mut Hellos, end_ms: u64) -> Vec<(u64, bool)> {
        let mut said = Vec::new();
        while hellos.at() <= at(end_ms) {
            let now = hellos.at();
            said.push((now.as_nanos() / 1_000_000, hellos.on_sent(now)));
        }
        said
    }

    fn answer(hellos: &mut Hellos, now_ms: u64, sent_ms: u64) -> Shown {
        hellos.on_answer(at(now_ms), at(sent_ms).as_wire_us()).expect("said before")
    }

    #[test]
    fn the_first_is_full_and_what_repeats_it_is_small_for_as_long_as_nobody_answers() {
        let said = say(&mut Hellos::new(at(0)), 10_000);
        assert_eq!(&said[..5], &[(0, true), (20, false), (60, false), (140, false), (300, false)]);
        assert!(said[5..].iter().all(|(_, is_full)| !is_full));
        assert!(said[4..].windows(2).all(|pair| pair[1].0 - pair[0].0 == 200));
    }

    #[test]
    fn once_a_small_one_is_answered_that_left_after_the_full_one_all_are_full_at_the_time_scale_of_the_round_trip(
    ) {
        let mut hellos = Hellos::new(at(0));
        say(&mut hellos, 300);
        assert_eq!(answer(&mut hellos, 360, 300), Shown::PeerIsThere);
        let said = say(&mut hellos, 1_300);
        assert_eq!(said, [(360, true), (480, true), (680, true), (880, true), (1_080, true), (1_280, true)]);
        assert_eq!(
            answer(&mut hellos, 1_300, 60),
            Shown::PeerIsThere,
            "a small one proves nothing, however late"
        );
        assert_eq!(
            answer(&mut hellos, 1_300, 360),
            Shown::PeerIsThere,
            "one that left in the microsecond of the answer"
        );
        for full_ms in [360, 480, 1_280] {
            let stamp = at(full_ms).as_wire_us() + 1;
            assert_eq!(hellos.on_answer(at(1_300), stamp), Some(Shown::FullPasses), "however long ago");
        }
    }

    #[test]
    fn where_the_round_trip_takes_seconds_so_do_the_pauses_after_some() {
        let mut hellos = Hellos::new(at(0));
        say(&mut hellos, 4_000);
        assert_eq!(answer(&mut hellos, 4_060, 60), Shown::PeerIsThere);
        let left: Vec<u64> = say(&mut hellos, 33_000)
            .iter()
            .map(|(at, is_full)| at - if *is_full { 4_060 } else { 0 })
            .collect();
        assert_eq!(left, [0, 200, 600, 1_400, 3_000, 6_200, 12_600, 20_600, 28_600]);
    }

    #[test]
    fn an_answer_to_what_was_never_said_shows_nothing() {
        let mut hellos = Hellos::new(at(0));
        say(&mut hellos, 300);
        assert_eq!(hellos.on_answer(at(300), at(301).as_wire_us()), None);
        assert!(!hellos.on_sent(at(500)));
    }

    #[test]
    fn the_first_one_is_known_by_its_answer_however_many_small_ones_left_since() {
        let mut hellos = Hellos::new(at(0));
        say(&mut hellos, 9_000);
        assert_eq!(answer(&mut hellos, 9_000, 0), Shown::FullPasses);
    }
}
