//! Presets: what an opted-in gradient reduction may leave behind.
//!
//! A preset is a value of [`Policy`] and nothing else; no code asks which one is in use. From it, from what the
//! connection has measured and from what [`crate::adaptive`] has learned comes the contract of each transfer.

mod gather;
mod link;

use crate::adaptive::Learned;
use crate::schedules::Stage;
use gradwire_core::{Contract, Early, Reliability, Soft};
use std::time::Duration;

pub use gather::GatherRule;
pub(crate) use link::Link;

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
    /// The largest soft threshold of all links into this rank, and this much more (LTP section III-B).
    SlowestLink {
        /// LTP's C: 30 ms in a data centre, 100 ms over long distances.
        margin: Duration,
    },
    /// A percentile of the time that stages of the largest bucket took in exact warm-up rounds (ULTIMA's t_B, section
    /// 3.3.1). Until then a reduction under this policy is exact.
    WarmUp {
        /// Rounds of the largest bucket.
        rounds: u16,
        /// The percentile, as a share.
        percentile: f32,
    },
}

/// LTP's soft threshold, learned for each link: the shortest complete transfer of the epoch.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SoftRule {
    /// Data percentage, as a share, that is enough after the threshold.
    pub min_fraction: f32,
    /// Transfers of one size on one link after which the threshold is learned anew.
    pub epoch: u32,
}

/// ULTIMA's early timeout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct EarlyRule {
    /// Share of t_C, the learned time of the stage, that a receiver waits once nothing arrives any more.
    pub quiet_share: f32,
}

// claim: mlt/fill
/// What a rank's result holds where the gather stage lost it, and where no rank's values reached a dedicated server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Fill {
    /// Zero, which SGD without momentum and weight decay makes no step of: the parameter is as in the iteration before.
    Zero = 0,
    /// What the output held before the call: where it holds the latest result, that (MLT's lost parameters, section 4.2.1). Refused
    /// in place, where it would be this rank's own value.
    Previous = 1,
    /// This rank's contribution in place of everybody's: itself for a mean, as many times itself as there are ranks for a sum. Also where
    /// a mean divides by all ranks.
    Local = 2,
}

/// What a mean divides by, and with it what stands in for a value that did not come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum DivideBy {
    /// The ranks that contributed to the element: the mean of the others stands in for a value (MLT appendix A).
    #[default]
    Contributions = 0,
    /// All ranks: zero stands in for a value, the bubble of LTP (section III-C).
    World = 1,
}

/// Whether a tolerant reduction sends its bucket rotated ([`crate::Hadamard`]): what a lost packet takes away is then spread
/// over the bucket. No preset has an opinion; the configuration does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Rotation {
    /// Never.
    Off = 0,
    /// When the ranks agree that the network loses so much that it pays: 5 % (ULTIMA section 5.3).
    Auto = 1,
    /// Whenever something may be lost.
    On = 2,
}

impl Rotation {
    // claim: ultima/hadamard
    /// Whether a reduction is rotated where the ranks have agreed that this share of values does not arrive; `None`: nobody
    /// has measured.
    pub(crate) fn is_wanted(self, agreed_loss: Option<f32>) -> bool {
        match self {
            Self::Off => false,
            Self::Auto => agreed_loss.is_some_and(|loss| loss >= ROTATION_LOSS_MIN),
            Self::On => true,
        }
    }
}

/// What a tolerant reduction may leave behind. Group-wide: every rank passes the same values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Policy {
    // claim: dlcp/per-tensor-bound
    /// Share of a transfer of the reduce stage that may be missing. Each call has its own.
    pub loss_bound: f32,
    /// See [`gradwire_core::Contract::after_first_pass`].
    pub after_first_pass: bool,
    /// The deadline.
    pub deadline: DeadlineRule,
    /// The most that waiting for retransmissions may delay the reduction: an upper bound of the deadlines, whatever they are derived
    /// from. Stages that wait for each other share it: the steps of a ring, the rounds of a transpose with an incast factor, the pieces
    /// of a large shard of halves, and the gather stage where that may lose something.
    pub deadline_max: Option<Duration>,
    /// Least fraction that a deadline or early timeout may accept.
    pub floor: f32,
    /// A threshold after which a part is enough.
    pub soft: Option<SoftRule>,
    /// The end of a wait for packets that do not come.
    pub early: Option<EarlyRule>,
    /// What a sender does about losses in the reduce stage.
    pub recovery: Reliability,
    /// Packets at each end of a transfer that always arrive (LTP section III-E).
    pub critical_chunks: u16,
    /// The gather stage.
    pub gather: GatherRule,
    /// What stands in for what did not come.
    pub divide_by: DivideBy,
    /// Whether the bucket is rotated.
    pub rotation: Rotation,
}

impl Policy {
    /// Preset `reliable`: everything arrives.
    pub const RELIABLE: Self = Self {
        loss_bound: 0.0,
        after_first_pass: true,
        deadline: DeadlineRule::Never,
        deadline_max: None,
        floor: 1.0,
        soft: None,
        early: None,
        recovery: Reliability::Exact,
        critical_chunks: 0,
        gather: GatherRule::EXACT,
        divide_by: DivideBy::Contributions,
        rotation: Rotation::Off,
    };
    // claim: mlt/lossy-pull
    /// Preset `mlt` (MLT section 4.2.3): stop as soon as 90 % are in, the paper's conservative bound (6.1.1), gradients and
    /// what is pulled alike (4.2.1).
    pub const MLT: Self = Self {
        loss_bound: 0.1,
        after_first_pass: false,
        floor: 0.9,
        recovery: Reliability::Tolerant,
        gather: GatherRule::bounded(0.1, Fill::Zero),
        ..Self::RELIABLE
    };
    /// Preset `dlcp` (DLCP section 3.2.1): as `mlt`, and a smaller bound where results are sent back. The paper names
    /// 10 % for the one and no number for the other.
    pub const DLCP: Self = Self { gather: GatherRule::bounded(0.01, Fill::Zero), ..Self::MLT };
    /// Preset `ltp` (LTP section III): after the learned threshold of the link 80 % are enough, 30 ms after the slowest
    /// link's threshold anything is; the first and last packet of each transfer always arrive.
    pub const LTP: Self = Self {
        after_first_pass: false,
        deadline: DeadlineRule::SlowestLink { margin: Duration::from_millis(30) },
        floor: 0.0,
        soft: Some(SoftRule { min_fraction: 0.8, epoch: 1000 }),
        recovery: Reliability::Deferred,
        critical_chunks: 1,
        ..Self::RELIABLE
    };
    /// Preset `ultima` (ULTIMA sections 3.2 and 3.3): nothing is sent again; either stage ends when nothing comes any more for
    /// 10 % of its usual time, or at the 95th percentile of 20 exact rounds.
    pub const ULTIMA: Self = Self {
        after_first_pass: false,
        deadline: DeadlineRule::WarmUp { rounds: 20, percentile: 0.95 },
        floor: 0.0,
        early: Some(EarlyRule { quiet_share: 0.1 }),
        recovery: Reliability::BestEffort,
        gather: GatherRule::BEST_EFFORT,
        ..Self::RELIABLE
    };
    /// Preset `auto`: nothing that still flows is cut, and no retransmission is waited for beyond what the bound needs.
    pub const AUTO: Self = Self {
        loss_bound: 0.05,
        deadline: DeadlineRule::Measured { factor: 4.0 },
        floor: 0.5,
        recovery: Reliability::Tolerant,
        ..Self::RELIABLE
    };
    /// Every preset, by its name.
    pub const PRESETS: [(&'static str, Self); 6] = [
        ("auto", Self::AUTO),
        ("mlt", Self::MLT),
        ("dlcp", Self::DLCP),
        ("ltp", Self::LTP),
        ("ultima", Self::ULTIMA),
        ("reliable", Self::RELIABLE),
    ];

    /// The preset of this name.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        Self::PRESETS.iter().find(|(preset, _)| *preset == name).map(|(_, policy)| *policy)
    }

    /// The name of the preset that has exactly these values; else `custom`.
    #[must_use]
    pub fn preset_name(&self) -> &'static str {
        Self::PRESETS.iter().find(|(_, policy)| policy == self).map_or("custom", |(preset, _)| preset)
    }

    /// The same with another bound. Where the bound stops a transfer (`mlt`, `dlcp`) and no lower floor was asked for, the floor goes with
    /// it: no deadline cuts more than the bound allows.
    #[must_use]
    pub fn bounded_by(self, loss_bound: f32) -> Self {
        let is_stopped = !self.after_first_pass && self.loss_bound > 0.0;
        let follows = is_stopped && self.floor >= 1.0 - self.loss_bound - FLOOR_ROUNDING;
        let floor = if follows { 1.0 - loss_bound } else { self.floor };
        Self { loss_bound, floor, ..self }
    }

    /// Whether nothing may be missing.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.loss_bound <= 0.0
            && self.deadline == DeadlineRule::Never
            && self.deadline_max.is_none()
            && self.soft.is_none()
            && self.early.is_none()
            && !self.gather.may_lose()
    }

    /// What is wrong with it, if anything.
    ///
    /// # Errors
    /// The first field that is out of range, or contradicts another one.
    pub fn validate(&self) -> Result<(), String> {
        let Self { loss_bound, floor, gather, .. } = *self;
        let is_share = |value: f32| (0.0..=1.0).contains(&value);
        if !is_share(loss_bound) || !is_share(floor) {
            return Err(format!("loss bound {loss_bound} or floor {floor} is not a share"));
        }
        gather.validate()?;
        let (soft, early) = (self.soft, self.early);
        if soft.is_some_and(|soft| !is_share(soft.min_fraction) || soft.epoch == 0) {
            return Err(format!("{soft:?}: a share, and an epoch of at least 1"));
        }
        if early.is_some_and(|early| !is_share(early.quiet_share)) {
            return Err(format!("{early:?} is not a share"));
        }
        match self.deadline {
            DeadlineRule::WarmUp { rounds, percentile } if rounds == 0 || !is_share(percentile) => {
                return Err(format!("a warm-up of {rounds} rounds, percentile {percentile}"));
            }
            _ => {}
        }
        let ends = matches!(self.deadline, DeadlineRule::Fixed(_) | DeadlineRule::WarmUp { .. });
        let never_repairs = [self.recovery, gather.recovery].contains(&Reliability::BestEffort);
        if never_repairs && !(ends && floor <= 0.0) {
            return Err("where nothing is sent again a deadline that does not depend on this rank's measurements must \
                        end the wait, whatever has arrived"
                .to_owned());
        }
        Ok(())
    }
}

impl Policy {
    /// The contract of one transfer of a stage that may lose something.
    pub(crate) fn contract(&self, stage: Stage, link: &Link, learned: &Learned) -> Contract {
        if self.is_exact() || !self.may_lose(stage) {
            return Contract::EXACT;
        }
        let deadline = self.deadline.resolve(link, learned);
        let soft = self.soft.zip(learned.soft);
        let early = self.early.zip(learned.stage_time);
        let contract = Contract {
            loss_bound: self.loss_bound,
            after_first_pass: self.after_first_pass,
            soft: soft.map(|(rule, after)| Soft { after, min_fraction: rule.min_fraction }),
            deadline: match (deadline, self.deadline_max) {
                (Some(deadline), Some(most)) => Some(deadline.min(most)),
                (deadline, most) => deadline.or(most),
            },
            floor: self.floor,
            early: early.map(|(rule, time)| Early { quiet: time.mul_f32(rule.quiet_share.clamp(0.0, 1.0)) }),
            reorder_slack: REORDER_SLACK_MIN,
            critical_chunks: self.critical_chunks,
            repairs: self.recovery != Reliability::BestEffort,
        };
        match stage {
            Stage::Reduce => contract,
            Stage::Gather => self.gather.contract(contract),
        }
    }

    // claim: auto/step-delay
    /// The same for one of the stages of a reduction that wait for each other: each gets an equal part of what the whole may
    /// be delayed. `senders`: how many ranks send to one receiver at once; `pieces`: in how many a shard is contributed.
    pub(crate) fn for_each_wait(&self, world_size: u32, senders: u32, pieces: u32) -> Self {
        let rounds = world_size.saturating_sub(1).div_ceil(senders.max(1)).max(1);
        let results = if self.may_lose(Stage::Gather) { rounds } else { 0 };
        let waits = rounds.saturating_mul(pieces).saturating_add(results);
        Self { deadline_max: self.deadline_max.map(|most| most / waits), ..*self }
    }

    // claim: auto/shared-cores
    /// The same for a ring of so many ranks. A partial sum that is lost takes half of the ranks' values with it on average, so among more
    /// than [`RING_RANKS_WHOLE_BOUND`] each of its transfers may lose less, as many times as there are more ranks: a call may lack
    /// no larger share of what the others contribute than among those. Deadlines that accept less than the bound do so here too.
    pub(crate) fn in_ring(&self, world_size: u32) -> Self {
        let ranks = world_size.max(RING_RANKS_WHOLE_BOUND);
        self.bounded_by(self.loss_bound * RING_RANKS_WHOLE_BOUND as f32 / ranks as f32)
    }

    /// Whether a stage may leave anything behind.
    pub(crate) fn may_lose(&self, stage: Stage) -> bool {
        match stage {
            Stage::Reduce => !self.is_exact(),
            Stage::Gather => self.gather.may_lose(),
        }
    }

    /// Whether reductions are served in the order of their calls: where the deadline of a transfer runs from its first
    /// packet on and cuts what still flows, a more urgent one must not stop it midway.
    pub(crate) fn keeps_order(&self) -> bool {
        !self.after_first_pass && (self.deadline != DeadlineRule::Never || self.deadline_max.is_some())
    }

    /// What the sender of a transfer of `stage` does about losses.
    pub(crate) fn reliability(&self, stage: Stage) -> Reliability {
        match stage {
            _ if !self.may_lose(stage) => Reliability::Exact,
            Stage::Reduce => self.recovery,
            Stage::Gather => self.gather.recovery,
        }
    }
}

impl DeadlineRule {
    /// The deadline of one transfer. A measured one divides the bandwidth of the connection by the incast: the
    /// estimate is the best that one flow has seen, perhaps alone on the link. Where this rank receives more slowly than it
    /// sends, what it has received at counts. `None` before there is either measurement.
    fn resolve(self, link: &Link, learned: &Learned) -> Option<Duration> {
        match self {
            Self::Never => None,
            Self::Fixed(deadline) => Some(deadline),
            Self::Measured { factor } => {
                let factor = factor.max(1.0);
                let network = link.transfer_time(factor).max(link.reception_time(factor))?;
                Some(network.saturating_add(link.stats.rtt_smoothed * DEADLINE_RTTS).max(DEADLINE_MIN))
            }
            Self::SlowestLink { margin } => Some(learned.slowest_link?.saturating_add(margin)),
            Self::WarmUp { .. } => learned.stage_limit,
        }
    }
}

/// Among so many ranks a partial sum that is lost takes two ranks' values with it on average, which is what a loss bound is taken for; and
/// so many share a tolerant ring whatever the network loses.
pub(crate) const RING_RANKS_WHOLE_BOUND: u32 = 4;
/// What single precision and the way of a number through other languages may do to 1 less a bound.
const FLOOR_ROUNDING: f32 = 1e-6;
/// From here on the paper's training is faster with the transform than without.
const ROTATION_LOSS_MIN: f32 = 0.05;
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
    use gradwire_core::ConnectionStats;

    const NO_TAGS: gradwire_core::TagStats = gradwire_core::TagStats {
        sent: [0; 8],
        received: [0; 8],
        important_sent: 0,
        important_received: 0,
        ecn_capable_received: 0,
        congestion_received: 0,
    };
    const STATS: ConnectionStats = ConnectionStats {
        packets_sent: 0,
        bytes_sent: 0,
        packets_retransmitted: 0,
        packets_lost: 0,
        packets_received: 0,
        bytes_received: 0,
        packets_duplicate: 0,
        packets_dropped: 0,
        packets_numbered: 0,
        packets_arrived: 0,
        control_sent: 0,
        probes_sent: 0,
        rtt_smoothed: Duration::from_millis(1),
        rtt_min: Duration::from_millis(1),
        bandwidth: 12_500_000,
        sustained_rate: 0,
        reception_rate: 0,
        reception_rate_short: 0,
        cwnd: 0,
        tags: NO_TAGS,
    };

    fn link(stats: ConnectionStats, bytes: usize, incast: u32) -> Link {
        Link { stats, bytes, incast }
    }

    /// The contract of a transfer of the reduce stage before anything was learned.
    fn reduce(policy: Policy, link: &Link) -> Contract {
        policy.contract(Stage::Reduce, link, &Learned::default())
    }

    #[test]
    fn auto_rotates_from_five_percent_of_agreed_loss_up() {
        for (loss, wanted) in
            [(None, false), (Some(0.0), false), (Some(0.0499), false), (Some(0.05), true), (Some(1.0), true)]
        {
            assert_eq!(Rotation::Auto.is_wanted(loss), wanted, "{loss:?}");
            assert!(Rotation::On.is_wanted(loss) && !Rotation::Off.is_wanted(loss));
        }
    }

    #[test]
    fn a_reliable_policy_is_the_exact_contract() {
        assert_eq!(reduce(Policy::RELIABLE, &link(STATS, 1000, 3)), Contract::EXACT);
        assert!(!reduce(Policy::AUTO, &link(STATS, 1000, 3)).is_exact());
    }

    #[test]
    fn a_measured_deadline_is_a_multiple_of_the_transfer_time_at_the_shared_bandwidth() {
        // 1.25 MB at 12.5 MB/s shared by 2 take 200 ms; 4 times that and 10 round trips.
        let contract = reduce(Policy::AUTO, &link(STATS, 1_250_000, 2));
        assert_eq!(contract.deadline, Some(Duration::from_millis(810)));
        assert_eq!(reduce(Policy::AUTO, &link(STATS, 0, 2)).deadline, Some(DEADLINE_MIN));
    }

    // test of: auto/no-needless-wait
    #[test]
    fn a_measured_deadline_knows_that_this_rank_receives_more_slowly_than_it_sends() {
        // 1.25 MB at 1.25 MB/s take 1 s, however many share the link by now; a faster reception changes nothing.
        for (reception_rate, ms) in [(1_250_000, 4_010), (125_000_000, 810)] {
            let contract =
                reduce(Policy::AUTO, &link(ConnectionStats { reception_rate, ..STATS }, 1_250_000, 2));
            assert_eq!(contract.deadline, Some(Duration::from_millis(ms)));
        }
        let fresh = ConnectionStats { bandwidth: 0, reception_rate: 1_250_000, ..STATS };
        assert_eq!(
            reduce(Policy::AUTO, &link(fresh, 1_250_000, 2)).deadline,
            Some(Duration::from_millis(4_010)),
            "nothing was sent to that peer"
        );
    }

    #[test]
    fn there_is_no_deadline_before_a_measurement() {
        let fresh = ConnectionStats { bandwidth: 0, ..STATS };
        assert_eq!(reduce(Policy::AUTO, &link(fresh, 1_000_000, 3)).deadline, None);
        assert_eq!(reduce(Policy::MLT, &link(STATS, 1_000_000, 3)).deadline, None);
    }

    #[test]
    fn the_most_that_a_step_is_delayed_bounds_a_deadline_and_stands_in_for_one() {
        let most = Duration::from_millis(100);
        let policy = Policy { deadline_max: Some(most), ..Policy::AUTO };
        assert_eq!(reduce(policy, &link(STATS, 1_250_000, 2)).deadline, Some(most));
        assert_eq!(reduce(policy, &link(STATS, 12_500, 2)).deadline, Some(Duration::from_millis(18)));
        let fresh = ConnectionStats { bandwidth: 0, ..STATS };
        assert_eq!(reduce(policy, &link(fresh, 12_500, 2)).deadline, Some(most));
        assert!(reduce(policy, &link(STATS, 12_500, 2)).after_first_pass, "it cuts nothing that still flows");
    }

    #[test]
    fn ltp_takes_what_its_links_have_learned() {
        let learned = Learned {
            soft: Some(Duration::from_millis(20)),
            slowest_link: Some(Duration::from_millis(50)),
            ..Learned::default()
        };
        let contract = Policy::LTP.contract(Stage::Reduce, &link(STATS, 1000, 1), &learned);
        assert_eq!(contract.soft, Some(Soft { after: Duration::from_millis(20), min_fraction: 0.8 }));
        assert_eq!(contract.deadline, Some(Duration::from_millis(80)), "C is 30 ms");
        assert_eq!((contract.critical_chunks, contract.floor), (1, 0.0));
        let unknown = reduce(Policy::LTP, &link(STATS, 1000, 1));
        assert!(unknown.is_exact(), "an unmeasured link is waited for");
        assert_eq!(Policy::LTP.contract(Stage::Gather, &link(STATS, 1000, 1), &learned), Contract::EXACT);
    }

    #[test]
    fn ultima_waits_for_a_share_of_the_usual_time_and_at_most_for_the_limit() {
        let learned = Learned {
            stage_limit: Some(Duration::from_millis(90)),
            stage_time: Some(Duration::from_millis(40)),
            ..Learned::default()
        };
        let contract = Policy::ULTIMA.contract(Stage::Reduce, &link(STATS, 1000, 1), &learned);
        assert_eq!(contract.deadline, Some(Duration::from_millis(90)));
        let quiet = contract.early.map(|early| early.quiet.as_micros());
        assert_eq!((quiet, contract.repairs), (Some(4000), false));
        assert_eq!(Policy::ULTIMA.reliability(Stage::Reduce), Reliability::BestEffort);
    }

    // test of: ultima/early-timeout
    #[test]
    fn a_receiver_waits_for_1_5_10_or_20_percent_of_the_usual_time_as_it_is_told() {
        let stage_time = Some(Duration::from_millis(40));
        let learned =
            Learned { stage_limit: Some(Duration::from_millis(90)), stage_time, ..Learned::default() };
        for (quiet_share, micros) in [(0.01, 400.0), (0.05, 2000.0), (0.1, 4000.0), (0.2, 8000.0)] {
            let policy = Policy { early: Some(EarlyRule { quiet_share }), ..Policy::ULTIMA };
            let contract = policy.contract(Stage::Reduce, &link(STATS, 1000, 1), &learned);
            let quiet = contract.early.map(|early| early.quiet.as_secs_f64() * 1e6);
            // A float32 holds the share to seven digits.
            assert!(
                quiet.is_some_and(|quiet: f64| (quiet - micros).abs() < 0.01),
                "{quiet:?} of {micros} us"
            );
        }
    }

    // test of: mlt/bounded-loss
    #[test]
    fn where_a_bound_stops_transfers_a_deadline_cuts_no_more_than_it_allows_unless_asked() {
        for preset in [Policy::MLT, Policy::DLCP] {
            for bound in [0.0, 0.01, 0.1, 0.3] {
                let deadline_max = Some(Duration::from_millis(20));
                let policy = Policy { deadline_max, ..preset.bounded_by(bound) };
                let contract = reduce(policy, &link(STATS, 1000, 3));
                assert_eq!((contract.loss_bound, contract.floor), (bound, 1.0 - bound));
            }
        }
        let ring = Policy::MLT.in_ring(8);
        assert_eq!((ring.loss_bound, ring.floor), (0.05, 0.95));
        for lower in [Policy::AUTO, Policy { floor: 0.5, ..Policy::MLT }] {
            let policy = lower.bounded_by(0.2);
            assert_eq!((policy.loss_bound, policy.floor), (0.2, 0.5));
        }
    }

    // test of: auto/shared-cores
    #[test]
    fn a_ring_of_more_than_four_may_lose_less_of_each_transfer_and_no_other_number_changes() {
        let bound = |ranks| Policy::AUTO.in_ring(ranks).loss_bound;
        assert_eq!([2, 3, 4].map(bound).map(f32::to_bits), [Policy::AUTO.loss_bound.to_bits(); 3]);
        for (ranks, wanted) in [(5, 0.04), (8, 0.025), (16, 0.0125)] {
            assert!((bound(ranks) - wanted).abs() < 1e-6, "{ranks}: {}", bound(ranks));
        }
        let auto = Policy { loss_bound: bound(8), ..Policy::AUTO };
        assert_eq!(Policy::AUTO.in_ring(8), auto);
        assert_eq!(Policy::RELIABLE.in_ring(8), Policy::RELIABLE);
    }

    #[test]
    fn whoever_may_cut_what_still_flows_by_a_deadline_is_served_in_order() {
        let limited = |policy| Policy { deadline_max: Some(Duration::from_millis(90)), ..policy };
        assert!(!Policy::MLT.keeps_order() && limited(Policy::MLT).keeps_order());
        assert!(!limited(Policy::AUTO).keeps_order(), "it cuts nothing that still flows");
    }

    // test of: auto/step-delay
    #[test]
    fn stages_that_wait_for_each_other_share_what_a_reduction_may_be_delayed() {
        let ms = Duration::from_millis;
        let most = |policy: Policy, senders| {
            let limited = Policy { deadline_max: Some(ms(90)), ..policy };
            limited.for_each_wait(4, senders, 1).deadline_max
        };
        // All at once, two rounds, the three steps of a ring, dedicated servers (all workers send at once).
        let parts = [3, 2, 1, 4].map(|senders| most(Policy::AUTO, senders));
        assert_eq!(parts, [ms(90), ms(45), ms(30), ms(90)].map(Some));
        assert_eq!(most(Policy::DLCP, 3), Some(ms(45)), "results wait too");
        let in_pieces = |policy: Policy| {
            Policy { deadline_max: Some(ms(90)), ..policy }.for_each_wait(4, 2, 4).deadline_max
        };
        assert_eq!(in_pieces(Policy::AUTO), Some(ms(90) / 8), "two rounds of four pieces");
        assert_eq!(in_pieces(Policy::DLCP), Some(ms(9)), "and two of results, which are whole");
        assert_eq!(Policy::AUTO.for_each_wait(1, 0, 1), Policy::AUTO);
    }
}
