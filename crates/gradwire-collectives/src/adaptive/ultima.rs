//! ULTIMA's adaptive timeout (section 3.3): t_B, the most that a stage may take, and t_C, what it usually takes.
//!
//! t_B is a percentile of what both stages took on all ranks in exact rounds of the largest bucket. t_C is a moving
//! average for each stage and bucket size, and its median over the ranks: each rank tells its own when it closes a
//! transfer. A bucket larger than all before it warms up anew, since a limit learned on a smaller one would cut it. One that does
//! not come again is forgotten: DDP's first step has the whole model in one bucket, whose warm-up would never end.
//!
//! ```text
//!   begins() in the order of the calls, alike on every rank:     WARM-UP x rounds --> TIMED
//!                                                                   ^------ larger bucket ------'
//! ```

use super::StageEnd;
use crate::schedules::Stage;
use gradwire_core::CloseReason;
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

/// State of one rank.
#[derive(Debug, Default)]
pub(super) struct AdaptiveTimeout {
    /// Size of the largest bucket so far, with the exact rounds of it that have begun and ended.
    largest: usize,
    begun: u16,
    ended: u16,
    /// Times of stages in those rounds, of all ranks.
    times: Vec<Duration>,
    limit: Option<Duration>,
    /// The limit before the largest bucket came, for the results of rounds that began before it.
    former: Option<Duration>,
    averages: BTreeMap<(usize, Stage), Average>,
    /// The largest bucket since the largest of all came last, and how often it came.
    since: (usize, u32),
    /// How often that may be before the warm-up begins anew with it, in units of the rounds: doubled when a bucket that was
    /// given up comes again.
    patience: u32,
    /// The largest bucket that was given up.
    given_up: usize,
}

/// What one stage of one bucket size usually takes.
#[derive(Debug, Default)]
struct Average {
    own: Option<Duration>,
    /// The last time alone.
    latest: Option<Duration>,
    /// Latest word of each peer.
    peers: BTreeMap<u32, Duration>,
    /// The median as a call found it first, and the number of that call: every receive asks for it, and sorting the words of a large
    /// group for each would take longer than anything else that a receive costs.
    median: Option<(u64, Option<Duration>)>,
}

impl AdaptiveTimeout {
    pub(super) fn must_wait(&self, bytes: usize, rounds: u16) -> bool {
        bytes <= self.largest && self.begun >= rounds && self.ended < self.begun
    }

    /// A round begins. `true`: it is exact. Whatever is not has a limit, although rounds before it may have been told to
    /// warm up for longer.
    pub(super) fn begins(&mut self, bytes: usize, (rounds, percentile): (u16, f32)) -> bool {
        self.grow(bytes);
        self.give_up(bytes, rounds);
        let warms_up = self.begun < rounds;
        if warms_up && bytes == self.largest {
            self.begun += 1;
        }
        if !warms_up && self.limit.is_none() {
            self.limit = self::percentile(&mut self.times, percentile);
        }
        warms_up
    }

    /// A server's round: others have decided whether it warms up. What does not has their limit, since they may have learned it on a bucket
    /// that they warmed up with in the place of one that this server still takes for the largest; where they tell none, its own.
    pub(super) fn follows(
        &mut self,
        bytes: usize,
        warms_up: bool,
        percentile: f32,
        theirs: Option<Duration>,
    ) {
        self.grow(bytes);
        if !warms_up {
            let own = self.limit.or_else(|| self::percentile(&mut self.times, percentile));
            self.limit = theirs.or(own);
        }
    }

    /// While the largest bucket warms up and does not come again, another one takes its place.
    fn give_up(&mut self, bytes: usize, rounds: u16) {
        let (largest, times) = self.since;
        self.since = match bytes.cmp(&largest) {
            _ if bytes >= self.largest => (0, 0),
            Ordering::Greater => (bytes, 1),
            Ordering::Equal => (bytes, times + 1),
            Ordering::Less => self.since,
        };
        if self.begun < rounds && self.since.1 > u32::from(rounds) << self.patience {
            self.given_up = self.given_up.max(self.largest);
            self.largest = 0;
            self.grow(self.since.0);
        }
    }

    /// A bucket larger than all before it warms up anew.
    fn grow(&mut self, bytes: usize) {
        if bytes > self.largest {
            self.former = self.limit.or(self.former);
            if self.largest > 0 && bytes <= self.given_up {
                self.patience = (self.patience + 1).min(PATIENCE_MAX);
            }
            self.since = (0, 0);
            (self.largest, self.begun, self.ended, self.limit) = (bytes, 0, 0, None);
            self.times.clear();
        }
    }

    /// t_B; `None` until the warm-up is over.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// What a stage of a round of `bytes` bytes may take. A timed round that began before a larger bucket keeps the limit of
    /// then: without one it would wait forever for a result of which nothing is sent again.
    pub(super) fn limit_of(&self, bytes: usize) -> Option<Duration> {
        self.limit.or(self.former.filter(|_| bytes < self.largest))
    }

    /// t_C: the median of what the ranks said when the latest of the calls began that have asked so far, or this one.
    pub(super) fn time_of(&mut self, stage: Stage, bytes: usize, call: u64) -> Option<Duration> {
        let average = self.averages.get_mut(&(bytes, stage))?;
        if let Some((_, found)) = average.median.filter(|(asked, _)| *asked >= call) {
            return found;
        }
        let mut times: Vec<Duration> = average.peers.values().copied().chain(average.own).collect();
        let found = median(&mut times);
        average.median = Some((call, found));
        found
    }

    /// What the others are told: while this size warms up what the last round took, for their t_B, which is a percentile
    /// of times and not of averages; later this rank's part of t_C.
    pub(super) fn told_time(&self, stage: Stage, bytes: usize) -> Option<Duration> {
        let average = self.averages.get(&(bytes, stage))?;
        if bytes == self.largest && self.limit.is_none() {
            average.latest
        } else {
            average.own
        }
    }

    /// This rank's part of it.
    #[cfg(test)]
    pub(super) fn own_time(&self, stage: Stage, bytes: usize) -> Option<Duration> {
        self.averages.get(&(bytes, stage))?.own
    }

    pub(super) fn on_told(&mut self, peer: u32, stage: Stage, bytes: usize, time: Duration) {
        if bytes == self.largest && self.limit.is_none() {
            self.times.push(time);
        }
        if let Some(average) = self.averages.get_mut(&(bytes, stage)) {
            average.peers.insert(peer, time);
        }
    }

    /// A round has ended; `warm_up` are the rounds and the percentile, if it was one of them.
    pub(super) fn on_ended(&mut self, bytes: usize, warm_up: Option<(u16, f32)>, stages: &[StageEnd; 2]) {
        for (stage, end) in [Stage::Reduce, Stage::Gather].into_iter().zip(stages) {
            self.update(stage, bytes, end);
        }
        let Some((rounds, percentile)) = warm_up.filter(|_| bytes == self.largest) else { return };
        self.times.extend(stages.iter().filter(|end| end.total > 0).map(StageEnd::duration));
        self.ended = self.ended.saturating_add(1);
        if self.ended >= rounds {
            self.limit = self::percentile(&mut self.times, percentile);
        }
    }

    // claim: ultima/t-c
    fn update(&mut self, stage: Stage, bytes: usize, end: &StageEnd) {
        let Some(latest) = self.completion_time(end) else { return };
        if self.averages.len() >= SIZES_MAX && !self.averages.contains_key(&(bytes, stage)) {
            self.averages.pop_first();
        }
        let average = self.averages.entry((bytes, stage)).or_default();
        average.latest = Some(latest);
        average.own =
            Some(average.own.map_or(latest, |before| latest.mul_f64(ALPHA) + before.mul_f64(1.0 - ALPHA)));
    }

    /// The time that a stage took or would have taken, in the paper's three cases: it was complete; it ran into t_B;
    /// or it was given up, and the rest would have taken its share of time.
    fn completion_time(&self, end: &StageEnd) -> Option<Duration> {
        match end.reason {
            _ if end.total == 0 => None,
            CloseReason::AllArrived => Some(end.duration()),
            CloseReason::Deadline => self.limit.or(Some(end.duration())),
            _ if end.received == 0 => self.limit,
            _ => Some(end.duration().mul_f64(end.total as f64 / end.received as f64)),
        }
    }
}

/// The median, in place; of an even number the mean of the two in the middle.
fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort_unstable();
    let upper = *times.get(times.len() / 2)?;
    let lower = times[(times.len() - 1) / 2];
    Some((lower + upper) / 2)
}

/// The least value that at least `share` of the values do not exceed.
// claim: ultima/t-b
fn percentile(times: &mut [Duration], share: f32) -> Option<Duration> {
    times.sort_unstable();
    let rank = (f64::from(share) * times.len() as f64 - 1e-6).ceil() as usize;
    times.get(rank.max(1) - 1).copied()
}

/// Weight of the latest time in the moving average (section 3.3.2, appendix of the evaluation: 0.95).
const ALPHA: f64 = 0.95;
/// Doublings: 1024 times the rounds, more than the buckets of any model's step.
const PATIENCE_MAX: u32 = 10;
/// Bucket sizes remembered, for two stages.
const SIZES_MAX: usize = 1024;

#[cfg(test)]
mod tests {
    use super::super::stage_end::tests::receipt;
    use super::*;
    use gradwire_core::Receipt;

    fn exact_round(timeout: &mut AdaptiveTimeout, bytes: usize) -> bool {
        let warms_up = timeout.begins(bytes, (3, 0.95));
        timeout.on_ended(bytes, Some((3, 0.95)).filter(|_| warms_up), &[complete(5), complete(5)]);
        warms_up
    }

    // test of: ultima/t-b
    #[test]
    fn a_bucket_that_does_not_come_again_keeps_nobody_in_the_warm_up() {
        let mut timeout = AdaptiveTimeout::default();
        assert!(exact_round(&mut timeout, 9000), "DDP's first step: all in one bucket");
        let exact = (0..30).take_while(|_| {
            exact_round(&mut timeout, 1000);
            exact_round(&mut timeout, 500)
        });
        assert_eq!(
            exact.count(),
            5,
            "it is waited for as long as a warm-up takes, and then there is another one"
        );
        assert!(!exact_round(&mut timeout, 1000) && timeout.limit_of(1000).is_some());
    }

    #[test]
    fn a_largest_bucket_that_comes_seldom_is_waited_for_longer_each_time() {
        let mut timeout = AdaptiveTimeout::default();
        let mut steps = 0;
        while exact_round(&mut timeout, 9000) {
            steps += 1;
            assert!(steps < 20, "it never warms up");
            for _ in 0..20 {
                exact_round(&mut timeout, 1000);
            }
        }
        assert!(timeout.limit_of(9000).is_some() && timeout.largest == 9000);
    }

    // test of: ultima/t-b
    #[test]
    fn a_round_that_is_timed_keeps_its_limit_when_a_larger_bucket_warms_up() {
        let mut timeout = warm();
        assert!(!timeout.begins(1000, (20, 0.95)) && timeout.begins(5000, (20, 0.95)));
        assert_eq!((timeout.limit_of(1000), timeout.limit_of(5000)), (Some(ms(118)), None));
        timeout.follows(9000, true, 0.95, None);
        assert_eq!((timeout.limit_of(1000), timeout.limit_of(9000)), (Some(ms(118)), None));
    }

    // test of: ultima/t-b
    #[test]
    fn a_server_has_the_limit_of_its_workers_whatever_bucket_it_takes_for_the_largest() {
        let mut server = AdaptiveTimeout::default();
        let mut round = |bytes, elapsed| {
            server.follows(bytes, true, 0.95, None);
            server.on_ended(bytes, Some((20, 0.95)), &[complete(elapsed), complete(elapsed)]);
        };
        round(9000, 90);
        (0..20).for_each(|_| round(1000, 5));
        server.follows(1000, false, 0.95, Some(ms(5)));
        assert_eq!(server.limit(), Some(ms(5)), "not that of a bucket which does not come again");
        server.follows(2000, false, 0.95, Some(ms(7)));
        assert_eq!(server.limit(), Some(ms(7)));
        server.follows(2000, false, 0.95, None);
        assert_eq!(server.limit(), Some(ms(7)), "nothing would end it");
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    fn end(elapsed: u64, received_bytes: u64, reason: CloseReason) -> StageEnd {
        let mut stage = StageEnd::NOTHING;
        let whole = receipt(gradwire_core::Timestamp::ZERO, ms(elapsed));
        stage.add(&Receipt { reason, received_bytes, total_bytes: 1000, ..whole });
        stage
    }

    fn complete(elapsed: u64) -> StageEnd {
        end(elapsed, 1000, CloseReason::AllArrived)
    }

    /// Warmed up by 20 rounds of 1000 bytes whose stages took 1 to 20 and 101 to 120 ms: t_B is 118 ms.
    fn warm() -> AdaptiveTimeout {
        let mut timeout = AdaptiveTimeout::default();
        for round in 1..=20 {
            assert!(timeout.begins(1000, (20, 0.95)));
            timeout.on_ended(1000, Some((20, 0.95)), &[complete(round), complete(100 + round)]);
        }
        assert_eq!(timeout.limit(), Some(ms(118)));
        timeout
    }

    // test of: ultima/t-b
    #[test]
    fn the_limit_is_the_95th_percentile_of_both_stages_of_twenty_rounds_on_all_ranks() {
        assert!(!warm().begins(1000, (20, 0.95)));
        let mut timeout = AdaptiveTimeout::default();
        for round in 1..=20 {
            timeout.begins(1000, (20, 0.95));
            assert_eq!(timeout.limit(), None);
            // Three more ranks, ten times slower: 120 of 160 values.
            for peer in 1..4 {
                timeout.on_told(peer, Stage::Reduce, 1000, ms(10 * round));
                timeout.on_told(peer, Stage::Gather, 1000, ms(10 * round));
            }
            timeout.on_ended(1000, Some((20, 0.95)), &[complete(1), complete(1)]);
        }
        // 152nd of 160, 40 of which are 1 ms: the 112th of six each of 10 to 200 ms.
        assert_eq!(timeout.limit(), Some(ms(190)));
    }

    #[test]
    fn a_larger_bucket_warms_up_anew_and_a_smaller_one_does_not_count() {
        let mut timeout = warm();
        assert!(!timeout.begins(500, (20, 0.95)));
        assert!(timeout.begins(2000, (20, 0.95)));
        assert_eq!(timeout.limit(), None, "a limit of the smaller one would cut it");
        for _ in 0..20 {
            assert!(timeout.begins(1000, (20, 0.95)), "exact while the largest warms up");
            timeout.on_ended(1000, Some((20, 0.95)), &[complete(1), complete(1)]);
        }
        for _ in 1..20 {
            assert!(timeout.begins(2000, (20, 0.95)));
        }
        assert!(timeout.must_wait(2000, 20) && timeout.must_wait(10, 20), "its exact rounds are under way");
        for _ in 0..20 {
            timeout.on_ended(2000, Some((20, 0.95)), &[complete(7), complete(7)]);
        }
        assert!(!timeout.must_wait(2000, 20) && !timeout.begins(2000, (20, 0.95)));
        assert_eq!(timeout.limit(), Some(ms(7)));
    }

    #[test]
    fn a_round_that_warms_up_for_less_than_those_before_it_has_a_limit() {
        let mut timeout = AdaptiveTimeout::default();
        assert!(timeout.begins(1000, (20, 0.95)));
        timeout.on_ended(1000, Some((20, 0.95)), &[complete(3), complete(5)]);
        assert_eq!(timeout.limit(), None);
        assert!(!timeout.begins(1000, (1, 0.95)));
        assert_eq!(timeout.limit(), Some(ms(5)), "nothing would end it");
    }

    #[test]
    fn others_are_told_raw_times_while_it_warms_up_and_averages_afterwards() {
        let mut timeout = AdaptiveTimeout::default();
        for round in 1..=20 {
            timeout.begins(1000, (20, 0.95));
            timeout.on_ended(1000, Some((20, 0.95)), &[complete(10 * round), complete(1)]);
            let told = (round < 20).then_some(ms(10 * round));
            assert_eq!(
                timeout.told_time(Stage::Reduce, 1000),
                told.or(timeout.own_time(Stage::Reduce, 1000))
            );
        }
        assert_ne!(timeout.told_time(Stage::Reduce, 1000), Some(ms(200)));
        assert_eq!(timeout.told_time(Stage::Reduce, 7), None);
    }

    // test of: ultima/t-c
    #[test]
    fn the_three_cases_of_the_usual_time() {
        let timeout = warm();
        assert_eq!(timeout.completion_time(&complete(30)), Some(ms(30)), "on time");
        assert_eq!(timeout.completion_time(&end(60, 900, CloseReason::Deadline)), Some(ms(118)), "timed out");
        let given_up = end(45, 900, CloseReason::EarlyTimeout);
        assert_eq!(timeout.completion_time(&given_up), Some(ms(50)), "the rest would have taken a tenth");
    }

    // The published code divides whole numbers here: its ratio is 1, or a division by zero.
    #[test]
    fn the_share_that_arrived_is_a_ratio_and_a_round_that_lost_everything_counts_as_timed_out() {
        let timeout = warm();
        let third = end(10, 333, CloseReason::EarlyTimeout);
        assert_eq!(timeout.completion_time(&third).map(|time| time.as_micros()), Some(30_030));
        assert_eq!(timeout.completion_time(&end(10, 0, CloseReason::EarlyTimeout)), Some(ms(118)));
        assert_eq!(timeout.completion_time(&StageEnd::NOTHING), None);
    }

    // test of: ultima/t-c
    #[test]
    fn the_moving_average_weighs_the_latest_time_by_095_and_keeps_stages_and_sizes_apart() {
        let mut timeout = warm();
        timeout.on_ended(3, None, &[complete(100), complete(40)]);
        timeout.on_ended(3, None, &[complete(200), complete(40)]);
        assert_eq!(timeout.own_time(Stage::Reduce, 3), Some(ms(195)));
        assert_eq!(timeout.own_time(Stage::Gather, 3), Some(ms(40)));
        assert_eq!(timeout.own_time(Stage::Reduce, 4), None);
    }

    // test of: ultima/t-c
    #[test]
    fn the_usual_time_is_the_median_over_any_number_of_ranks() {
        let mut timeout = warm();
        timeout.on_ended(3, None, &[complete(1), complete(1)]);
        assert_eq!(timeout.time_of(Stage::Reduce, 3, 1), Some(ms(1)));
        for peer in 1..=100 {
            timeout.on_told(peer, Stage::Reduce, 3, ms(u64::from(peer)));
        }
        // 1, 1, 2, ..., 100: the 51st of 101.
        assert_eq!(timeout.time_of(Stage::Reduce, 3, 2), Some(ms(50)));
        timeout.on_told(1, Stage::Reduce, 3, ms(1000));
        assert_eq!(
            timeout.time_of(Stage::Reduce, 3, 3),
            Some(ms(51)),
            "a rank's latest word replaces the one before"
        );
        for peer in 1..=100 {
            timeout.on_told(peer, Stage::Reduce, 3, ms(2000));
        }
        for call in [3, 2] {
            let kept = timeout.time_of(Stage::Reduce, 3, call);
            assert_eq!(
                kept,
                Some(ms(51)),
                "call {call} does not sort the words of all ranks for each receive"
            );
        }
        assert_eq!(timeout.time_of(Stage::Reduce, 3, 4), Some(ms(2000)));
        assert_eq!(median(&mut []), None);
        assert_eq!(median(&mut [ms(4), ms(2)]), Some(ms(3)));
    }
}
