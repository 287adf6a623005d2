//! Presets: what an opted-in gradient reduction may leave behind.

use gradwire_core::{ConnectionStats, Contract};
use std::time::Duration;

/// How the deadline of a transfer comes about.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DeadlineRule {
    /// None.
    Never,
    /// Fixed time since the first packet.
    Fixed(Duration),
    /// A multiple of the time that the transfer's bytes take at the measured bandwidth, plus round trips.
    Measured {
        /// The multiple.
        factor: f32,
    },
}

/// What a tolerant reduction may leave behind. Group-wide: every rank passes the same values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Policy {
    /// Share of a transfer that may be missing.
    pub loss_bound: f32,
    /// See [`gradwire_core::Contract::after_first_pass`].
    pub after_first_pass: bool,
    /// The deadline.
    pub deadline: DeadlineRule,
    /// Least fraction that a deadline may accept.
    pub floor: f32,
}

impl Policy {
    /// Preset `reliable`: everything arrives.
    pub const RELIABLE: Self =
        Self { loss_bound: 0.0, after_first_pass: true, deadline: DeadlineRule::Never, floor: 1.0 };
    /// Preset `mlt` (MLT section 4.2.3): stop as soon as 90 % are in, the paper's conservative bound (6.1.1).
    pub const MLT: Self =
        Self { loss_bound: 0.1, after_first_pass: false, deadline: DeadlineRule::Never, floor: 0.9 };
    /// Preset `auto`: nothing that still flows is cut, and no retransmission is waited for beyond what the bound needs.
    pub const AUTO: Self = Self {
        loss_bound: 0.05,
        after_first_pass: true,
        deadline: DeadlineRule::Measured { factor: 4.0 },
        floor: 0.5,
    };

    /// Whether nothing may be missing.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.loss_bound <= 0.0 && self.deadline == DeadlineRule::Never
    }
}

impl Policy {
    /// The contract of one reduce-stage transfer of `bytes` from a peer whose connection has these `stats`, while
    /// `incast` ranks send to this one.
    pub(crate) fn contract(&self, stats: &ConnectionStats, bytes: usize, incast: u32) -> Contract {
        if self.is_exact() {
            return Contract::EXACT;
        }
        Contract {
            loss_bound: self.loss_bound,
            after_first_pass: self.after_first_pass,
            soft: None,
            deadline: self.deadline.resolve(stats, bytes, incast),
            floor: self.floor,
            early: None,
            reorder_slack: (stats.rtt_smoothed / 2).max(REORDER_SLACK_MIN),
        }
    }
}

impl DeadlineRule {
    /// The deadline of one transfer. A measured one divides the bandwidth of the connection by the incast: the
    /// estimate is the best that one flow has seen, perhaps alone on the link. `None` before there is a measurement.
    fn resolve(self, stats: &ConnectionStats, bytes: usize, incast: u32) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Fixed(deadline) => Some(deadline),
            Self::Measured { .. } if stats.bandwidth == 0 || stats.rtt_smoothed.is_zero() => None,
            Self::Measured { factor } => {
                let share = stats.bandwidth as f64 / f64::from(incast.max(1));
                let seconds = f64::from(factor.max(1.0)) * bytes as f64 / share;
                let network = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
                Some(network.saturating_add(stats.rtt_smoothed * DEADLINE_RTTS).max(DEADLINE_MIN))
            }
        }
    }
}

/// Packets of one flow overtake each other by fractions of a round trip; where that is short by scheduling, since
/// the packets of one flow may pass several processors. Waiting is cheap, and what is cut here the network did not lose.
const REORDER_SLACK_MIN: Duration = Duration::from_micros(500);
/// Room for a few rounds of probes and status beside the transfer time itself.
const DEADLINE_RTTS: u32 = 10;
/// Below this a deadline measures the scheduler, not the network.
const DEADLINE_MIN: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: ConnectionStats = ConnectionStats {
        packets_sent: 0,
        bytes_sent: 0,
        packets_retransmitted: 0,
        packets_lost: 0,
        packets_received: 0,
        bytes_received: 0,
        packets_duplicate: 0,
        packets_dropped: 0,
        control_sent: 0,
        probes_sent: 0,
        rtt_smoothed: Duration::from_millis(1),
        rtt_min: Duration::from_millis(1),
        bandwidth: 12_500_000,
        cwnd: 0,
    };

    #[test]
    fn a_reliable_policy_is_the_exact_contract() {
        assert_eq!(Policy::RELIABLE.contract(&STATS, 1000, 3), Contract::EXACT);
        assert!(!Policy::AUTO.contract(&STATS, 1000, 3).is_exact());
    }

    #[test]
    fn a_measured_deadline_is_a_multiple_of_the_transfer_time_at_the_shared_bandwidth() {
        // 1.25 MB at 12.5 MB/s shared by 2 take 200 ms; 4 times that and 10 round trips.
        let contract = Policy::AUTO.contract(&STATS, 1_250_000, 2);
        assert_eq!(contract.deadline, Some(Duration::from_millis(810)));
        assert_eq!(Policy::AUTO.contract(&STATS, 0, 2).deadline, Some(DEADLINE_MIN));
    }

    #[test]
    fn there_is_no_deadline_before_a_measurement() {
        let fresh = ConnectionStats { bandwidth: 0, ..STATS };
        assert_eq!(Policy::AUTO.contract(&fresh, 1_000_000, 3).deadline, None);
        assert_eq!(Policy::MLT.contract(&STATS, 1_000_000, 3).deadline, None);
    }

    #[test]
    fn reorder_slack_follows_the_round_trip_time() {
        let far = ConnectionStats { rtt_smoothed: Duration::from_millis(40), ..STATS };
        assert_eq!(Policy::AUTO.contract(&far, 0, 1).reorder_slack, Duration::from_millis(20));
        let near = ConnectionStats { rtt_smoothed: Duration::from_micros(50), ..STATS };
        assert_eq!(Policy::AUTO.contract(&near, 0, 1).reorder_slack, REORDER_SLACK_MIN);
    }
}
