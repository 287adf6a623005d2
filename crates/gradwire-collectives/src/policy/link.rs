//! What a rank knows about the way from one sender, for the times of its contracts.

use gradwire_core::{ConnectionStats, PACKETS_MEASURED};
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

    /// What the transfer takes at the measured bandwidth, without others, and before a measurement at the rate at which others came. Not at the
    /// higher of the two: what waited in the socket came at any rate, and its own is among those when a threshold is learned from it.
    pub(crate) fn shortest_time(&self) -> Duration {
        let ConnectionStats { bandwidth, reception_rate, .. } = self.stats;
        let rate = if bandwidth > 0 { bandwidth } else { reception_rate };
        if rate > 0 {
            self.time_at(rate as f64, 1.0)
        } else {
            Duration::ZERO
        }
    }

    /// The same where this rank sends nothing large to the sender, as in a ring: what its small packets were acknowledged at says nothing. The
    /// rate at which others came from there stands in for it, but no more than the best that any connection has sent at, which sends as much: so
    /// that what was read from the socket at once is not taken for the network. Where a transfer is too small to be measured, in packets of
    /// `chunk_bytes`, others as small say it, if no larger ones came. Before anything came there is no bandwidth: the best that this rank sends at
    /// to another, perhaps in its own rack, says nothing of a slower way to it, and would have its transfers cut while they flow.
    pub(crate) fn one_way(mut self, chunk_bytes: usize, fastest: impl FnOnce() -> u64) -> Self {
        let is_short = self.bytes <= PACKETS_MEASURED as usize * chunk_bytes;
        let received = match self.stats.reception_rate {
            0 if is_short => self.stats.reception_rate_short,
            rate => rate,
        };
        self.stats.bandwidth = match fastest() {
            0 => received,
            sent => received.min(sent),
        };
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
        let deadline_of = |chunk_bytes, [received, received_short]: [u64; 2], bytes, sent| {
            let stats =
                ConnectionStats { reception_rate: received, reception_rate_short: received_short, ..small };
            let link = Link { stats, bytes, incast: 1 }.one_way(chunk_bytes, || sent);
            let deadline = Policy::AUTO.contract(Stage::Reduce, &link, &Learned::default()).deadline;
            deadline.map(|deadline| deadline.as_millis())
        };
        let deadline = |received, bytes, sent| deadline_of(1408, received, bytes, sent);
        assert_eq!(deadline([12_500_000, 0], 1_250_000, 125_000_000), Some(410));
        assert_eq!(deadline([12_500_000, 0], 1_250_000, 0), Some(410));
        let at_once = [3_000_000_000, 0];
        assert_eq!(deadline(at_once, 1_250_000, 12_500_000), Some(410), "read from the socket at once");
        assert_eq!(deadline([0, 1_250_000], 12_500, 125_000_000), Some(50), "too small to be measured");
        assert_eq!(deadline([625_000, 1_250_000], 12_500, 125_000_000), Some(90), "larger ones know better");
        assert_eq!(deadline([0, 1_250_000], 1_250_000, 125_000_000), None, "to be measured when it is over");
        assert_eq!(deadline([0, 25_000_000], 250_000, 25_000_000), None, "so is this");
        assert_eq!(
            deadline_of(8908, [0, 25_000_000], 250_000, 25_000_000),
            Some(50),
            "of fewer, larger packets it never is"
        );
        assert_eq!(deadline([0, 0], 12_500, 125_000_000), None, "another link says nothing of this one");
    }
}
