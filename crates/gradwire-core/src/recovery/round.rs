//! One round trip, as a rate controller sees it.

use super::filters::rate_of;
use super::headroom::LossCount;
use super::limits::UNIT;
use crate::Timestamp;
use core::time::Duration;

/// What a round trip has shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// When it began.
    since: Timestamp,
    pub(super) losses: LossCount,
    pub(super) rate_max: u64,
    pub(super) rtt_min: Option<Duration>,
    /// The least with what the acknowledgement waited, and what was in flight then, if that says something.
    whole_min: Option<(Duration, Option<u64>)>,
    pub(super) app_limited: bool,
}

impl Round {
    /// One that begins now.
    pub(super) fn begin(now: Timestamp) -> Self {
        Self { since: now, ..Self::default() }
    }

    /// Takes a round-trip time, what the acknowledgement waited on top of it, and what was in flight: zero where it acknowledged nothing new.
    pub(super) fn on_rtt(&mut self, rtt: Duration, waited: Duration, flight: Option<u64>) {
        let whole = rtt + waited;
        if flight != Some(0) && self.whole_min.is_none_or(|(least, _)| whole < least) {
            self.whole_min = Some((whole, flight));
        }
        self.rtt_min = Some(self.rtt_min.map_or(rtt, |least| least.min(rtt)));
    }

    /// By how much a later round trip, with what its acknowledgement waited, is shorter than a smaller flight makes it.
    pub(super) fn shorter_by(&self, whole: Duration, flight: Option<u64>) -> Duration {
        let Some((least, before)) = self.whole_min else { return Duration::ZERO };
        let left = match (flight, before) {
            (Some(flight), Some(before)) => flight.min(before).saturating_mul(UNIT) / before.max(1),
            _ => UNIT,
        };
        (least * left as u32 / UNIT as u32).saturating_sub(whole)
    }

    /// How long it has lasted.
    pub(super) fn time(&self, now: Timestamp) -> Duration {
        now.since(self.since)
    }

    /// What it delivered, over its time.
    pub(super) fn average(&self, now: Timestamp) -> u64 {
        rate_of(self.losses.acked, self.time(now)).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn a_round_trip_is_shorter_by_what_the_flight_does_not_explain() {
        let mut round = Round::default();
        round.on_rtt(US(3_000), US(1_000), Some(50_000));
        round.on_rtt(US(3_500), US(800), Some(51_000));
        round.on_rtt(US(2_900), US(0), Some(0));
        assert_eq!(round.rtt_min, Some(US(2_900)));
        assert_eq!(round.shorter_by(US(1_000), Some(50_000)), US(3_000), "another holds back");
        assert_eq!(round.shorter_by(US(1_000), Some(60_000)), US(3_000), "though this flow does not");
        assert_eq!(round.shorter_by(US(1_000), Some(12_500)), US(0), "the flow's own window");
        assert_eq!(
            round.shorter_by(US(4_000), Some(50_000)),
            US(0),
            "more waits on the way back, and less on the way out"
        );
        assert_eq!(round.shorter_by(US(1_000), Some(0)), US(0));
    }

    #[test]
    fn where_the_flight_says_nothing_all_of_it_counts() {
        let mut round = Round::default();
        round.on_rtt(US(3_000), US(0), None);
        assert_eq!(round.shorter_by(US(1_000), None), US(2_000));
        assert_eq!(round.shorter_by(US(1_000), Some(9_000)), US(2_000), "nor did it then");
        assert_eq!(Round::default().shorter_by(US(1_000), None), US(0), "no round trip before");
    }
}
