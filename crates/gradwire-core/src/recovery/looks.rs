//! When a flow looks for the empty path: it holds back for a round trip, so that what it queued drains and the samples show the path.
//!
//! Asked by [`super::BottleneckController`]. A look is due when no round trip of the last 200 ms was as short as the
//! path, or where a queue falls because others look. One of many makes the queue fall by little. So that flows which know nothing of each
//! other look together all the same, the next look of each counts from the moment at which the queue was shortest, which all see alike,
//! and comes as long after it whatever each takes the path for.

use super::limits::FAR;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looks {
    /// When to look, unless the empty path is seen before.
    at: Timestamp,
    /// The shortest round trip since the last look began, and when it was.
    shortest: Option<(Duration, Timestamp)>,
    /// Seldom: where the share of the queue is known, a wrong idea of the path hardly changes the window.
    seldom: bool,
    /// Least round trip.
    least: Duration,
}

impl Looks {
    /// Whether the collective has told how many share the receiver.
    pub(super) fn set_seldom(&mut self, seldom: bool) {
        self.seldom = seldom;
    }

    /// Takes a round trip, the least one `before` it, and that of the round trip before. Least: with it.
    pub(super) fn on_rtt(
        &mut self,
        now: Timestamp,
        rtt: Duration,
        before: Option<Duration>,
        round: Option<Duration>,
    ) {
        self.least = before.map_or(rtt, |before| before.min(rtt));
        // The last look may have been one of a flow that was to look seldom.
        self.at = self.at.min(now + self.interval());
        let joins =
            !self.seldom && self.may_join(now) && round.is_some_and(|round| has_fallen(round, rtt, 4));
        match before {
            // Another flow looks: a flow that joins it sees the path without the queues of both.
            Some(least) if joins || has_fallen(least, rtt, 8) => {
                self.align(now, rtt);
                self.at = now;
            }
            Some(least) if rtt > least + (least / 32).max(RESOLUTION) => self.align(now, rtt),
            _ => {
                self.shortest = Some((rtt, now));
                self.at = now + self.interval();
            }
        }
    }

    /// All flows see the same queue, so also when it is shortest: mostly while some of them look. Who looks an interval after that
    /// looks together with the others, and what all of them do is the shortest that any sees from then on.
    fn align(&mut self, now: Timestamp, rtt: Duration) {
        if !self.seldom && self.shortest.is_none_or(|(shortest, _)| rtt < shortest) {
            self.shortest = Some((rtt, now));
            self.at = now + self.interval();
        }
    }

    /// Whether it is time.
    pub(super) fn is_due(&self, now: Timestamp) -> bool {
        now >= self.at
    }

    /// Looks at `at` unless before.
    pub(super) fn look_by(&mut self, at: Timestamp) {
        self.at = self.at.min(at);
    }

    /// All flows lose at the same time, so all look at the same time; not within half an interval of the last look.
    pub(super) fn look_with_others(&mut self, now: Timestamp) {
        if now + self.interval() / 2 >= self.at {
            self.at = now;
        }
    }

    /// A look begins.
    pub(super) fn begin(&mut self) {
        self.shortest = None;
    }

    /// It ends; `again`: another one follows soon.
    pub(super) fn end(&mut self, now: Timestamp, again: bool) {
        let interval = self.interval() / if again { LOOKS_AGAIN } else { 1 };
        let since = self.shortest.filter(|_| !self.seldom).map_or(now, |(_, at)| at);
        // Where a queue is so long that a look takes an interval, the flow would do nothing else.
        self.at = (since + interval).max(now + self.interval() / LOOKS_AGAIN);
    }

    /// Data flows again after an idle time: what comes now shows the path.
    pub(super) fn on_idle_restart(&mut self, now: Timestamp) {
        self.shortest = None;
        self.at = now + self.interval();
    }

    /// Whether the last look is at least an eighth of an interval ago: soon enough after it that flows whose turns differ
    /// come to look together.
    fn may_join(&self, now: Timestamp) -> bool {
        now + self.interval() * 7 / 8 >= self.at
    }

    fn interval(&self) -> Duration {
        if self.seldom {
            return (self.least * SELDOM_ROUNDS).max(INTERVAL_MIN) * SELDOM;
        }
        // Doubled, so that the turns of flows that take the path for longer than it is still fall on those of the others.
        let rounds = if self.least < FAR { ROUNDS } else { FAR_ROUNDS };
        let mut interval = INTERVAL_MIN;
        while interval < self.least * rounds {
            interval *= 2;
        }
        interval
    }
}

/// Whether a round trip has become shorter by more than one part in `parts`, and by more than a burst of the flow's own makes of it.
fn has_fallen(before: Duration, now: Duration, parts: u32) -> bool {
    now + (before / parts).max(FALL_MIN) < before
}

/// A look costs about one round trip of sending.
const ROUNDS: u32 = 30;
/// On short paths that is less.
const INTERVAL_MIN: Duration = Duration::from_millis(200);
/// Over long paths it keeps half of the window.
const FAR_ROUNDS: u32 = 20;
/// Among known others a hundred round trips, and ten times as long: on short paths still several times in the memory of the least
/// round-trip time.
const SELDOM_ROUNDS: u32 = 100;
const SELDOM: u32 = 10;
/// A second look is taken after this part of the interval.
const LOOKS_AGAIN: u32 = 4;
/// Of round trips: an acknowledgement says in whole microseconds how long it waited.
const RESOLUTION: Duration = Duration::from_micros(1);
/// A queue that falls by less may be that of one burst: 64 KB take 5 us at 100 Gbit/s. A look for it would last twenty round trips.
const FALL_MIN: Duration = Duration::from_micros(20);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::from_nanos(ms * 1_000_000)
    }

    fn us(value: u64) -> Duration {
        Duration::from_micros(value)
    }

    /// One that takes the path for `least` and has seen `rtts` (milliseconds, microseconds).
    fn after(least: u64, rtts: &[(u64, u64)]) -> Looks {
        let mut looks = Looks::default();
        looks.on_rtt(at(0), us(least), None, None);
        looks.begin();
        rtts.iter().for_each(|(ms, rtt)| looks.on_rtt(at(*ms), us(*rtt), Some(us(least)), None));
        looks
    }

    /// The millisecond at which the next look is due.
    fn due(looks: &Looks) -> u64 {
        (0..100_000).find(|ms| looks.is_due(at(*ms))).expect("a look is due some time")
    }

    #[test]
    fn a_look_is_due_when_the_empty_path_was_not_seen_for_so_long() {
        assert_eq!(due(&after(1_000, &[])), 200);
        assert_eq!(due(&after(1_000, &[(150, 1_020)])), 350, "a thirty-second more is the path");
        assert_eq!(due(&after(40_000, &[])), 800, "over a long path");
    }

    #[test]
    fn flows_that_see_the_same_queue_look_at_the_same_moment_whatever_they_take_the_path_for() {
        let queue = [(20, 6_000), (50, 5_000), (90, 5_500), (120, 7_000)];
        for least in [200, 1_000, 4_000] {
            assert_eq!(due(&after(least, &queue)), 250, "least {least} us");
            let mut looks = after(least, &queue);
            looks.end(at(53), false);
            assert_eq!(due(&looks), 250, "of the shortest queue, not of the moment at which a look ends");
            looks.end(at(49), true);
            assert_eq!(due(&looks), 100, "again");
            looks.end(at(400), false);
            assert_eq!(due(&looks), 450, "where a look takes so long, not at once again");
        }
    }

    #[test]
    fn a_queue_that_falls_is_a_look_of_others_and_joined_unless_one_has_just_been() {
        let fall = |ms| {
            let mut looks = after(1_000, &[]);
            looks.on_rtt(at(ms), us(2_900), Some(us(1_000)), Some(us(4_000)));
            looks.is_due(at(ms))
        };
        assert!(fall(30) && !fall(20));
        let mut looks = after(1_000, &[]);
        looks.on_rtt(at(5), us(800), Some(us(1_000)), Some(us(1_000)));
        assert!(looks.is_due(at(5)), "a path that is shorter than it was ever seen is looked at in any case");
    }

    #[test]
    fn after_an_overflow_a_flow_looks_unless_it_has_just_looked() {
        for (ms, is_due) in [(90, false), (110, true)] {
            let mut looks = after(1_000, &[]);
            looks.look_with_others(at(ms));
            assert_eq!(looks.is_due(at(ms)), is_due, "{ms} ms after the last");
        }
    }

    #[test]
    fn where_the_share_of_the_queue_is_known_a_look_comes_seldom_and_counts_from_its_end() {
        let mut looks = after(1_000, &[]);
        looks.set_seldom(true);
        looks.on_rtt(at(50), us(5_000), Some(us(1_000)), None);
        assert_eq!(due(&looks), 200, "a queue moves nothing");
        looks.on_rtt(at(55), us(1_000), Some(us(1_000)), None);
        assert_eq!(due(&looks), 2_055);
        looks.end(at(60), false);
        assert_eq!(due(&looks), 2_060);
    }

    #[test]
    fn where_the_share_of_the_queue_is_known_a_queue_that_falls_is_no_look_of_others() {
        let fall = |seldom| {
            let mut looks = after(1_000, &[]);
            looks.set_seldom(seldom);
            looks.on_rtt(at(50), us(1_000), Some(us(1_000)), None);
            looks.on_rtt(at(350), us(2_900), Some(us(1_000)), Some(us(4_000)));
            looks.is_due(at(350))
        };
        assert!(fall(false) && !fall(true));
    }

    #[test]
    fn a_flow_that_is_told_no_longer_who_shares_the_queue_looks_as_often_as_others_again() {
        let mut looks = after(1_000, &[]);
        looks.set_seldom(true);
        looks.end(at(10), false);
        looks.set_seldom(false);
        looks.on_rtt(at(20), us(5_000), Some(us(1_000)), None);
        assert_eq!(due(&looks), 220);
    }
}
