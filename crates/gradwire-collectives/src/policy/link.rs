//! What a rank knows about the way from one sender, for the times of its contracts.

use gradwire_core::ConnectionStats;
use std::time::Duration;

/// What is known about the link of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Link {
    /// Of the connection to its sender.
    pub(crate) stats: ConnectionStats,
    /// Size of the transfer.
    pub(crate) bytes: usize,
    /// Ranks that send to this one at once, by the schedule.
    pub(crate) incast: u32,
}

impl Link {
    /// `factor` times what the transfer takes at its share of the measured bandwidth; `None` before a measurement.
    pub(crate) fn transfer_time(&self, factor: f32) -> Option<Duration> {
        let stats = &self.stats;
        if stats.bandwidth == 0 || stats.rtt_smoothed.is_zero() {
            return None;
        }
        let share = stats.bandwidth as f64 / f64::from(self.incast.max(1));
        Some(self.time_at(share, factor))
    }

    /// `factor` times what the transfer takes at the rate at which others came, which the others of the incast had shared
    /// already; `None` before a measurement.
    pub(super) fn reception_time(&self, factor: f32) -> Option<Duration> {
        let rate = self.stats.reception_rate;
        (rate > 0).then(|| self.time_at(rate as f64, factor))
    }

    /// What the transfer takes at the best rate that was seen in either direction, without others.
    pub(crate) fn shortest_time(&self) -> Duration {
        let rate = self.stats.bandwidth.max(self.stats.reception_rate);
        if rate > 0 {
            self.time_at(rate as f64, 1.0)
        } else {
            Duration::ZERO
        }
    }

    /// The same where this rank sends nothing large to the sender, as in a ring: what its small packets were acknowledged at says nothing. The
    /// rate at which others came from there stands in for it, and before there is one the best that any connection has sent at.
    pub(crate) fn one_way(mut self, fastest: impl FnOnce() -> u64) -> Self {
        let received = self.stats.reception_rate;
        self.stats.bandwidth = if received > 0 { received } else { fastest() };
        self
    }

    fn time_at(&self, rate: f64, factor: f32) -> Duration {
        let seconds = f64::from(factor) * self.bytes as f64 / rate;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::Learned;
    use crate::policy::Policy;
    use crate::schedules::Stage;

    // test of: auto/no-needless-wait
    #[test]
    fn a_link_over_which_this_rank_sends_nothing_large_is_as_fast_as_what_came_over_it() {
        // The bandwidth is that of acknowledgements and of messages of a few bytes.
        let rtt_smoothed = Duration::from_millis(1);
        let small = ConnectionStats { bandwidth: 10_000, rtt_smoothed, ..ConnectionStats::default() };
        for (reception_rate, ms) in [(12_500_000, 410), (0, 50)] {
            let stats = ConnectionStats { reception_rate, ..small };
            let link = Link { stats, bytes: 1_250_000, incast: 1 }.one_way(|| 125_000_000);
            let deadline = Policy::AUTO.contract(Stage::Reduce, &link, &Learned::default()).deadline;
            assert_eq!(deadline, Some(Duration::from_millis(ms)), "{reception_rate}");
        }
    }
}
