//! The round-trip time of the path without queues, and how a flow gets to see it.
//!
//! Every controller measures queues against the least round-trip time. A flow that started into a queue takes the
//! queue for distance, holds a larger window than the others, and makes the queue longer. So a flow that saw a queue
//! in every sample of some 200 ms, or of a hundred long round trips, dips: it holds its flight at two packets for one round trip. The others
//! see the queue fall and dip with it, and all of them see the path. What is queued keeps the link busy meanwhile.
//! One of many makes the queue fall by little. So that flows which know nothing of each other dip together all the same, the next
//! dip of each counts from the moment at which the queue was shortest, which all see alike.
//!
//! ```text
//!   WATCHING --no empty path seen for an interval, or others dip--> DIPPING --one round trip--> WATCHING
//! ```
//!
//! Gradients come in bursts, so the gap between two steps usually shows the empty path for free
//! ([`EmptyPath::on_idle_restart`]).

use super::filters::WindowedMin;
use super::limits::{DIP_MAX, FAR, REFRESH_MIN};
use crate::Timestamp;
use core::time::Duration;

/// Least round-trip time, that of the last round, and the dip.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EmptyPath {
    least: WindowedMin,
    round: Option<Duration>,
    previous_round: Option<Duration>,
    /// When to look for the empty path, unless it is seen before.
    dip_at: Timestamp,
    dip: Option<Dip>,
    /// The shortest round trip since the last dip began, and when it was.
    shortest: Option<(Duration, Timestamp)>,
    seldom: bool,
    /// Data goes the other way as well.
    crossed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Dip {
    since: Timestamp,
    /// When the flight was down to the least window.
    reached: Option<Timestamp>,
}

impl EmptyPath {
    /// Dips seldom: where the share of the queue is known, a wrong idea of the path hardly changes the window.
    pub(super) fn set_seldom(&mut self, seldom: bool) {
        self.seldom = seldom;
    }

    /// Acknowledgements wait for so long on their way back. Where they wait at all, data crosses them, the queue comes and
    /// goes with the steps of a schedule, and that it falls does not mean that others dip.
    pub(super) fn on_wait(&mut self, waited: Duration) {
        self.crossed = waited > self.min() / 16;
    }

    /// Takes a round-trip sample.
    pub(super) fn on_rtt(&mut self, now: Timestamp, rtt: Duration) {
        let before = self.least.min();
        self.least.insert(now, rtt);
        self.round = Some(self.round.map_or(rtt, |least| least.min(rtt)));
        match before {
            // Another flow dips: a flow that joins it sees the path without the queues of both.
            Some(least) if rtt < least - least / 8 => self.dip_at = now,
            _ if self.may_join(now) && self.previous_round.is_some_and(|previous| rtt < previous * 7 / 8) => {
                self.dip_at = now;
            }
            Some(least) if rtt > least + least / 32 => self.align(now, rtt),
            _ => {
                self.shortest = Some((rtt, now));
                self.dip_at = now + self.interval();
            }
        }
    }

    /// All flows see the same queue, so also when it is shortest: mostly while some of them look. Who looks an interval after that looks
    /// together with the others, and what all of them do is the shortest that any sees from then on.
    fn align(&mut self, now: Timestamp, rtt: Duration) {
        if self.shortest.is_none_or(|(shortest, _)| rtt < shortest) {
            self.shortest = Some((rtt, now));
            self.dip_at = now + self.interval();
        }
    }

    /// A round trip has ended. Returns its least time.
    pub(super) fn end_round(&mut self) -> Option<Duration> {
        self.previous_round = self.round.take();
        self.previous_round
    }

    /// Brings the next dip forward to `at`, but never closer to the last one than half the interval.
    pub(super) fn look_at(&mut self, now: Timestamp, at: Timestamp) {
        if self.may_dip(now) {
            self.dip_at = self.dip_at.min(at);
        }
    }

    /// Begins, continues or ends a dip; `flight_min` is the flight that a dip goes down to.
    pub(super) fn advance(&mut self, now: Timestamp, in_flight: u64, flight_min: u64) {
        let Some(Dip { since, reached }) = self.dip else {
            if now >= self.dip_at {
                self.dip = Some(Dip { since: now, reached: None });
                self.shortest = None;
            }
            return;
        };
        let rtt = self.min();
        let reached = reached.or((in_flight <= flight_min).then_some(now));
        self.dip = Some(Dip { since, reached });
        // Of the round trips as they were, so that flows that dip a little later are met.
        let hold = self.previous_round.unwrap_or(rtt).min(DIP_MAX).max(rtt);
        let held = reached.is_some_and(|at| now.since(at) >= hold);
        if held || now.since(since) >= (DIP_MAX + hold).max(rtt * DIP_ROUNDS_MAX) {
            self.dip = None;
            // Where a queue is so long that a dip takes an interval, the flow would do nothing else.
            let aligned = self.shortest.map_or(now, |(_, at)| at) + self.interval();
            self.dip_at = aligned.max(now + self.interval() / DIP_PAUSE);
        }
    }

    /// Data flows again after an idle time: the queue was empty a moment ago, so the samples that come now are good.
    pub(super) fn on_idle_restart(&mut self, now: Timestamp) {
        self.least.refresh(now, REFRESH_MIN);
        self.dip_at = now + self.interval();
        self.dip = None;
        self.shortest = None;
    }

    /// Whether the flight must be held down.
    pub(super) fn is_dipping(&self) -> bool {
        self.dip.is_some()
    }

    /// Least round-trip time; zero before the first sample.
    pub(super) fn min(&self) -> Duration {
        self.least.min().unwrap_or_default()
    }

    /// Whether the last dip is at least half an interval ago.
    fn may_dip(&self, now: Timestamp) -> bool {
        now + self.interval() / 2 >= self.dip_at
    }

    /// Whether a falling queue means that others dip. Not soon after a dip: the flow's own cuts let it fall as well.
    fn may_join(&self, now: Timestamp) -> bool {
        !self.crossed && self.may_dip(now)
    }

    fn interval(&self) -> Duration {
        let rounds = if self.min() < FAR { DIP_INTERVAL_ROUNDS } else { DIP_INTERVAL_ROUNDS_FAR };
        // Doubled, so that the turns of flows that take the path for longer than it is still fall on those of the others.
        let mut interval = DIP_INTERVAL_MIN;
        while interval < self.min() * rounds {
            interval *= 2;
        }
        interval * if self.seldom { DIP_SELDOM } else { 1 }
    }
}

/// A dip costs about one round trip of sending. Rather often, as a late flow that takes a queue for distance counts by it.
const DIP_INTERVAL_ROUNDS: u32 = 30;
/// A queue of others is shorter than these paths, and what a dip costs is at most one percent.
const DIP_INTERVAL_ROUNDS_FAR: u32 = 100;
/// On short paths a dip costs less.
const DIP_INTERVAL_MIN: Duration = Duration::from_millis(200);
/// So much longer where dips are seldom: still several times in the memory of the least round-trip time.
const DIP_SELDOM: u32 = 10;
/// Between two dips lies at least this part of the interval.
const DIP_PAUSE: u32 = 4;
/// `DIP_MAX`, on paths that are longer than that.
const DIP_ROUNDS_MAX: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    fn ms(value: u64) -> Duration {
        Duration::from_millis(value)
    }

    #[test]
    fn a_flow_that_never_sees_the_empty_path_dips_for_one_round_trip() {
        let mut path = EmptyPath::default();
        path.on_rtt(at(0), ms(1));
        let mut dipped = 0;
        for now in 1..400 {
            path.on_rtt(at(now), ms(3));
            path.advance(at(now), if path.is_dipping() { 0 } else { 100_000 }, 2_816);
            dipped += u32::from(path.is_dipping());
        }
        assert!((1..=8).contains(&dipped), "{dipped} of 400 ms");
    }

    #[test]
    fn a_flow_that_sees_the_empty_path_never_dips() {
        let mut path = EmptyPath::default();
        for now in 0..1_000 {
            path.on_rtt(at(now), if now % 50 == 0 { ms(1) } else { Duration::from_micros(1_100) });
            path.advance(at(now), 100_000, 2_816);
            assert!(!path.is_dipping());
        }
    }

    #[test]
    fn a_dip_that_takes_as_long_as_the_interval_is_not_followed_by_the_next_at_once() {
        let mut path = EmptyPath::default();
        path.on_rtt(at(0), ms(1));
        path.advance(at(200), 100_000, 2_816);
        path.on_rtt(at(201), ms(3));
        // Its packets wait in a queue of 230 ms, and its end is seen late.
        path.advance(at(430), 2_816, 2_816);
        assert!(!path.is_dipping());
        path.advance(at(479), 100_000, 2_816);
        assert!(!path.is_dipping(), "a quarter of the interval after the last");
        path.advance(at(480), 100_000, 2_816);
        assert!(path.is_dipping());
    }

    #[test]
    fn a_dip_ends_when_nothing_comes_back() {
        let mut path = EmptyPath::default();
        path.on_rtt(at(0), ms(1));
        path.advance(at(300), 100_000, 2_816);
        assert!(path.is_dipping());
        path.advance(at(320), 100_000, 2_816);
        assert!(!path.is_dipping());
    }
}
