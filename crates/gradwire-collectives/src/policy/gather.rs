//! What the gather stage, which sends results back to the ranks, may leave behind.
//!
//! Exact in `auto`, `ltp` and `reliable`: replicas stay identical. The other papers lose results too, each in its way: DLCP down to
//! a bound of its own, MLT down to the bound that it has for everything, ULTIMA whatever its timeouts leave.

use super::Fill;
use gradwire_core::{Contract, Reliability, Soft};

/// See the module.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GatherRule {
    /// Share of a transfer that may be missing. Above 0 the ranks' results may differ.
    pub loss_bound: f32,
    /// What senders do about losses: everything ([`Reliability::Exact`]), what the bound needs ([`Reliability::Tolerant`]), or
    /// nothing ([`Reliability::BestEffort`]; then the ranks' results may differ whatever the bound is).
    pub recovery: Reliability,
    /// What is put in the place of what is missing.
    pub fill: Fill,
}

impl GatherRule {
    /// Results arrive whole: replicas stay identical.
    pub const EXACT: Self = Self { loss_bound: 0.0, recovery: Reliability::Exact, fill: Fill::Zero };
    // claim: ultima/best-effort
    /// Nothing is sent again, and the timeouts of the reduce stage, with times of their own, end the wait.
    pub const BEST_EFFORT: Self = Self { recovery: Reliability::BestEffort, ..Self::EXACT };

    /// Results are repaired down to a bound.
    #[must_use]
    pub const fn bounded(loss_bound: f32, fill: Fill) -> Self {
        Self { loss_bound, recovery: Reliability::Tolerant, fill }
    }

    /// Whether results may be missing.
    #[must_use]
    pub fn may_lose(&self) -> bool {
        self.loss_bound > 0.0 || self.recovery == Reliability::BestEffort
    }

    pub(super) fn validate(&self) -> Result<(), String> {
        let Self { loss_bound, recovery, .. } = *self;
        if !(0.0..=1.0).contains(&loss_bound) {
            return Err(format!("gather bound {loss_bound} is not a share"));
        }
        match recovery {
            Reliability::Exact if loss_bound > 0.0 => {
                Err(format!("{loss_bound} of the results may be missing where all of them are repaired"))
            }
            Reliability::Deferred => Err("results cannot wait for everything else".to_owned()),
            _ => Ok(()),
        }
    }

    /// The contract of a result, from that of a contribution. Where results are repaired no rule accepts less than the bound.
    ///
    /// One bound for both stages stops both (MLT section 4.2.3). A smaller one of the results' own saves repairs alone: DLCP counts what
    /// is on its way when the bound is met (section 3.2.1), and no error feedback brings a lost result back.
    // claim: dlcp/pull-bound, ultima/t-b
    pub(super) fn contract(&self, contract: Contract) -> Contract {
        let bound = self.loss_bound;
        if self.recovery == Reliability::BestEffort {
            return Contract { loss_bound: bound, repairs: false, ..contract };
        }
        let least = 1.0 - bound;
        let soft = contract.soft.map(|soft| Soft { min_fraction: soft.min_fraction.max(least), ..soft });
        Contract {
            loss_bound: contract.loss_bound.min(bound),
            floor: contract.floor.max(least),
            soft,
            repairs: true,
            after_first_pass: contract.after_first_pass || bound < contract.loss_bound,
            ..contract
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::Learned;
    use crate::policy::{DeadlineRule, Link, Policy};
    use crate::schedules::Stage;
    use std::time::Duration;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    const LEARNED: Learned = Learned {
        soft: Some(Duration::from_millis(20)),
        slowest_link: Some(Duration::from_millis(50)),
        stage_limit: Some(Duration::from_millis(90)),
        stage_time: Some(Duration::from_millis(40)),
    };

    fn gather(policy: &Policy) -> Contract {
        let link = Link { stats: gradwire_core::ConnectionStats::default(), bytes: 1000, incast: 1 };
        policy.contract(Stage::Gather, &link, &LEARNED)
    }

    // test of: dlcp/pull-bound, mlt/lossy-pull
    #[test]
    fn no_rule_of_the_gather_stage_accepts_less_than_its_bound() {
        for (name, preset) in Policy::PRESETS {
            let policy = Policy { gather: GatherRule::bounded(0.02, Fill::Zero), ..preset };
            let contract = gather(&policy);
            let least = 1.0 - 0.02;
            assert!(contract.loss_bound <= 0.02 && contract.floor >= least && contract.repairs, "{name}");
            assert!(contract.soft.is_none_or(|soft| soft.min_fraction >= least), "{name}");
            assert_eq!(policy.reliability(Stage::Gather), Reliability::Tolerant, "{name}");
        }
        let (pull, push) = (Policy::DLCP.gather.loss_bound, Policy::DLCP.loss_bound);
        assert!((f32::MIN_POSITIVE..push).contains(&pull), "smaller than that of the push");
        assert_eq!(gather(&Policy::MLT).loss_bound, Policy::MLT.loss_bound, "one bound for all");
        assert!(!gather(&Policy::MLT).after_first_pass && gather(&Policy::DLCP).after_first_pass);
    }

    // test of: ultima/best-effort, ultima/t-b
    #[test]
    fn results_under_ultima_are_never_sent_again_and_wait_for_its_timeouts_alone() {
        let contract = gather(&Policy::ULTIMA);
        assert_eq!((contract.deadline, contract.repairs), (Some(ms(90)), false));
        assert_eq!(contract.early.map(|early| early.quiet.as_micros()), Some(4000));
        assert!(contract.floor <= 0.0 && contract.loss_bound <= 0.0);
        assert_eq!(Policy::ULTIMA.reliability(Stage::Gather), Reliability::BestEffort);
    }

    #[test]
    fn replicas_stay_identical_in_the_other_presets() {
        for policy in [Policy::AUTO, Policy::LTP, Policy::RELIABLE] {
            assert!(!policy.gather.may_lose());
            assert_eq!(gather(&policy), Contract::EXACT);
            assert_eq!(policy.reliability(Stage::Gather), Reliability::Exact);
        }
    }

    #[test]
    fn a_rule_that_contradicts_itself_is_refused() {
        let exact = GatherRule { loss_bound: 0.1, ..GatherRule::EXACT };
        let deferred = GatherRule { recovery: Reliability::Deferred, ..GatherRule::EXACT };
        for gather in [exact, deferred, GatherRule::bounded(1.1, Fill::Zero)] {
            assert!(Policy { gather, ..Policy::DLCP }.validate().is_err(), "{gather:?}");
        }
        // Nothing would end the wait.
        assert!(Policy { gather: GatherRule::BEST_EFFORT, ..Policy::MLT }.validate().is_err());
        let fixed = DeadlineRule::Fixed(ms(5));
        let ends = Policy { gather: GatherRule::BEST_EFFORT, deadline: fixed, floor: 0.0, ..Policy::MLT };
        assert_eq!(ends.validate(), Ok(()));
    }
}
