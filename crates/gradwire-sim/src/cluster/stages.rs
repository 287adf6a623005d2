//! What a rank calls for: one all-reduce, or in a hierarchy three collectives of its two groups, one after the other.
//!
//! ```text
//! Whole
//! Scatter (within) -> Across (all-reduce of the shard) -> Gather (within)
//! ```
//!
//! This is what users do with two process groups (hybrid sharding): the product knows nothing of it.

use super::circle::{ACROSS, WITHIN};
use super::{Cluster, ClusterPlan, STEP_MAX};
use gradwire_collectives::{
    Algorithm, Collective, DeliveryReport, Dtype, GatherRule, OpId, Policy, ReduceOp, Request, Rotation, Tags,
};
use std::sync::Arc;

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// An all-reduce of all ranks.
    Whole,
    /// A reduce-scatter within the set.
    Scatter,
    /// An all-reduce of this rank's shard among those of the same number in other sets.
    Across,
    /// An all-gather within the set.
    Gather,
}

impl Stage {
    const fn next(self) -> Option<Self> {
        match self {
            Self::Scatter => Some(Self::Across),
            Self::Across => Some(Self::Gather),
            Self::Whole | Self::Gather => None,
        }
    }

    const fn level(self) -> usize {
        match self {
            Self::Across => ACROSS,
            _ => WITHIN,
        }
    }

    fn collective(self, algorithm: Algorithm) -> Collective {
        match self {
            Self::Whole | Self::Across => Collective::AllReduce { algorithm },
            Self::Scatter => Collective::ReduceScatter,
            Self::Gather => Collective::AllGather,
        }
    }

    /// What the stage may lose of what the preset allows: no result is lost on its way to a shard's owner or from it.
    fn policy(self, policy: Policy) -> Policy {
        match self {
            Self::Whole | Self::Across => policy,
            Self::Scatter if policy.is_exact() => policy,
            Self::Scatter => Policy { gather: GatherRule::EXACT, rotation: Rotation::Off, ..policy },
            Self::Gather => Policy::RELIABLE,
        }
    }
}

/// A call that has not ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    id: OpId,
    bucket: usize,
    stage: Stage,
}

impl ClusterPlan {
    const fn first_stage(&self) -> Stage {
        if self.hierarchy.is_some() {
            Stage::Scatter
        } else {
            Stage::Whole
        }
    }

    /// Bytes of a bucket in memory, filled up so that a set divides it evenly, and of one rank's shard in its set.
    pub(super) fn bytes_of(&self, bucket: usize) -> (usize, usize) {
        let (bytes, set) =
            (self.buckets[bucket].bytes(), self.hierarchy.map_or(1, |hierarchy| hierarchy.set));
        let shard = bytes.div_ceil(4 * set) * 4;
        (shard * set, shard)
    }
}

impl Cluster {
    pub(super) fn call(&mut self, rank: usize, bucket: usize) {
        self.called_at[rank][bucket] = self.now;
        self.submit(rank, bucket, self.plan.first_stage());
    }

    fn submit(&mut self, rank: usize, bucket: usize, stage: Stage) {
        let plan = &self.plan.buckets[bucket];
        let (input, output) = self.memory.views(rank, stage, self.plan.bytes_of(bucket));
        let importance = self.plan.preset.importance;
        let request = Request {
            reduce: ReduceOp::Avg,
            input,
            output,
            policy: stage.policy(self.plan.preset.policy),
            priority: plan.priority,
            tags: Tags { class: plan.class, importance: importance.map(|rule| Arc::new(rule) as Arc<_>) },
            ..Request::exact(stage.collective(self.plan.algorithm), Dtype::F32, STEP_MAX * 2)
        };
        let node = stage.level() * self.plan.ranks() + rank;
        let id = self.hosts[node].group.submit(self.now, request);
        self.hosts[node].calls.push(Call { id, bucket, stage });
        self.drain(node);
    }

    /// A call has ended: what comes after it in the same bucket is called for, or the bucket is done.
    pub(super) fn on_done(&mut self, node: usize, op: OpId, report: &DeliveryReport) {
        let Some(place) = self.hosts[node].calls.iter().position(|call| call.id == op) else { return };
        let Call { bucket, stage, .. } = self.hosts[node].calls.swap_remove(place);
        let rank = node % self.plan.ranks();
        if self.is_measuring {
            self.outcome.bytes_sent += report.bytes_sent;
            self.outcome.bytes_retransmitted += report.bytes_retransmitted;
            self.note_losses(rank, bucket, stage, report);
        }
        if let Some(next) = stage.next() {
            self.submit(rank, bucket, next);
            return;
        }
        let host = &mut self.hosts[rank];
        host.open -= 1;
        self.busy -= usize::from(host.open == 0);
    }

    fn note_losses(&mut self, rank: usize, bucket: usize, stage: Stage, report: &DeliveryReport) {
        match (stage, self.plan.hierarchy) {
            (Stage::Whole | Stage::Scatter, _) => self.tally.note(bucket, &report.uncounted),
            // A value that did not count across sets is the mean of a whole set's.
            (Stage::Across, Some(hierarchy)) => {
                let shard = self.plan.bytes_of(bucket).1 as u64 / 4;
                let first = (rank % hierarchy.set) as u64 * shard;
                let lost: Vec<_> =
                    report.uncounted.iter().map(|lost| first + lost.start..first + lost.end).collect();
                self.tally.note_lost(bucket, &lost, hierarchy.set as u64);
            }
            _ => {}
        }
    }
}
