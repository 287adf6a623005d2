//! What a rank learns about its links and about how long stages take, for the contracts of later transfers.
//!
//! Pure state machines, fed by the group with what ended and how; they answer with thresholds. [`ltp`] keeps one
//! threshold for each link, [`ultima`] the limit and the average time of the two stages of an all-reduce.

mod ltp;
pub(crate) mod stage_end;
mod ultima;

use crate::policy::{DeadlineRule, Link, Policy};
use crate::schedules::Stage;
use crate::settings::CallSettings;
use gradwire_core::{CloseReason, Receipt};
use std::time::Duration;

pub(crate) use stage_end::StageEnd;

/// Thresholds for one transfer. `None`: nothing is known yet, so the rule that needs it does not hold.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Learned {
    /// LTP's threshold of the link.
    pub(crate) soft: Option<Duration>,
    /// The largest such threshold of all links.
    pub(crate) slowest_link: Option<Duration>,
    /// ULTIMA's t_B.
    pub(crate) stage_limit: Option<Duration>,
    /// ULTIMA's t_C of this stage and size.
    pub(crate) stage_time: Option<Duration>,
}

/// What a rank has learned.
#[derive(Debug, Default)]
pub(crate) struct Adaptive {
    links: ltp::LinkThresholds,
    timeout: ultima::AdaptiveTimeout,
}

impl Adaptive {
    /// Whether a reduction of `bytes` bytes must wait until the exact rounds before it have ended here: without their
    /// times it would have no deadline.
    pub(crate) fn must_wait(&self, policy: &Policy, bytes: usize) -> bool {
        warm_up_of(policy).is_some_and(|(rounds, _)| self.timeout.must_wait(bytes, rounds))
    }

    /// The next reduction in the group's order begins. `true`: it is exact, to warm up. Every rank decides alike, because
    /// the answer depends on nothing but the order and sizes of the calls.
    pub(crate) fn begins(&mut self, policy: &Policy, bytes: usize) -> bool {
        warm_up_of(policy).is_some_and(|warm_up| self.timeout.begins(bytes, warm_up))
    }

    /// A server takes part in a reduction that `warms_up` or does not, as its workers say. They also say what
    /// they allow for a stage, in case that this server has seen none of the rounds from which it is learned.
    pub(crate) fn follows(&mut self, settings: &CallSettings, bytes: usize) {
        if let Some((_, percentile)) = warm_up_of(&settings.policy) {
            self.timeout.follows(bytes, settings.warms_up, percentile, settings.stage_limit);
        }
    }

    /// What a stage may take under `policy`, once that has been learned.
    pub(crate) fn stage_limit(&self, policy: &Policy) -> Option<Duration> {
        warm_up_of(policy).and_then(|_| self.timeout.limit())
    }

    /// Thresholds for a transfer over `link` from `peer`, part of reduction number `call`, of `bytes` bytes. `others`: the links from
    /// all ranks.
    pub(crate) fn learned(
        &mut self,
        policy: &Policy,
        (call, stage, bytes): (u64, Stage, usize),
        (peer, link): (u32, &Link),
        others: impl ExactSizeIterator<Item = (u32, Link)>,
    ) -> Learned {
        let mut learned = Learned::default();
        if let Some(rule) = policy.soft {
            learned.soft = self.links.begins(peer, link, rule.epoch);
            learned.slowest_link = self.links.slowest(link.bytes, call, others);
        }
        if times_stages(policy) {
            learned.stage_limit = self.timeout.limit_of(bytes);
            learned.stage_time = self.timeout.time_of(stage, bytes, call);
        }
        learned
    }

    /// What the senders of a stage are told about this rank's time for it, microseconds; zero when there is none.
    pub(crate) fn told(&self, policy: &Policy, stage: Stage, bytes: usize) -> u32 {
        let time = if times_stages(policy) { self.timeout.told_time(stage, bytes) } else { None };
        time.map_or(0, |time| u32::try_from(time.as_micros()).unwrap_or(u32::MAX).max(1))
    }

    /// A transfer from `peer` has ended: an exact result of the same size comes over the same link among as many. How long it took is
    /// not known where something of it was there before this rank called.
    pub(crate) fn on_received(&mut self, policy: &Policy, peer: u32, receipt: &Receipt) {
        let was_early = receipt.waited_for_peer.is_zero();
        if policy.soft.is_some() && receipt.reason == CloseReason::AllArrived && !was_early {
            self.links.on_complete(peer, receipt.total_bytes, receipt.elapsed);
        }
    }

    /// `peer` has told its time for a stage.
    pub(crate) fn on_told(
        &mut self,
        policy: &Policy,
        peer: u32,
        (stage, bytes): (Stage, usize),
        stage_us: u32,
    ) {
        if stage_us > 0 && times_stages(policy) {
            self.timeout.on_told(peer, stage, bytes, Duration::from_micros(u64::from(stage_us)));
        }
    }

    /// Both stages of a reduction have ended here.
    pub(crate) fn on_ended(
        &mut self,
        policy: &Policy,
        bytes: usize,
        was_exact: bool,
        stages: &[StageEnd; 2],
    ) {
        if !times_stages(policy) {
            return;
        }
        let warm_up = warm_up_of(policy).filter(|_| was_exact);
        self.timeout.on_ended(bytes, warm_up, stages);
    }
}

/// Whether a policy uses the times of stages.
fn times_stages(policy: &Policy) -> bool {
    policy.early.is_some() || warm_up_of(policy).is_some()
}

fn warm_up_of(policy: &Policy) -> Option<(u16, f32)> {
    match policy.deadline {
        DeadlineRule::WarmUp { rounds, percentile } => Some((rounds, percentile)),
        _ => None,
    }
}
