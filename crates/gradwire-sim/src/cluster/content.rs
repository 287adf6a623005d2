//! The ranks' gradients and results. Mostly nobody looks at what they hold, and all ranks share three tensors; in a run that is checked
//! each has its own, packets carry them, and every result is compared with the exact mean.

use super::stages::Stage;
use super::{losses, ClusterError, ClusterPlan};
use crate::{mix, Rng, Tensor};
use gradwire_collectives::View;

/// See the module.
#[derive(Debug)]
pub(super) struct Content {
    /// Of each rank, or one for all of them.
    ranks: Vec<Tensors>,
    /// Ranks of a run that is checked; zero in others.
    checked: usize,
}

#[derive(Debug)]
struct Tensors {
    input: Tensor,
    /// This rank's part of its set's mean, then of everybody's.
    shard: Tensor,
    output: Tensor,
}

impl Content {
    pub(super) fn new(plan: &ClusterPlan, rng: &Rng) -> Self {
        let sizes = (0..plan.buckets.len()).map(|bucket| plan.bytes_of(bucket));
        let (bytes, shard) = sizes.fold((0, 0), |most, sizes| (most.0.max(sizes.0), most.1.max(sizes.1)));
        let shard = if plan.hierarchy.is_some() { shard } else { 0 };
        let tensors =
            |input| Tensors { input, shard: Tensor::new(shard, STALE), output: Tensor::new(bytes, STALE) };
        if !plan.is_checked {
            return Self { ranks: vec![tensors(losses::gradients(bytes, rng))], checked: 0 };
        }
        let input = |rank| {
            let values = (0..bytes as u64 / 4)
                .flat_map(|elem| (value(rank, elem) * plan.workers as f32).to_le_bytes());
            Tensor::from_bytes(&values.collect::<Vec<_>>())
        };
        let ranks = (0..plan.workers).map(|rank| tensors(input(rank)));
        Self { ranks: ranks.collect(), checked: plan.workers }
    }

    /// The gradients of the first rank.
    pub(super) fn gradients(&self) -> &Tensor {
        &self.ranks[0].input
    }

    /// What a call of `rank` reads and writes.
    pub(super) fn views(&self, rank: usize, stage: Stage, (bytes, shard): (usize, usize)) -> (View, View) {
        let tensors = self.ranks.get(rank).unwrap_or(&self.ranks[0]);
        let (input, output) = (|| tensors.input.view_of(bytes), || tensors.output.view_of(bytes));
        let shard = || tensors.shard.view_of(shard);
        match stage {
            Stage::Whole => (input(), output()),
            Stage::Scatter => (input(), shard()),
            Stage::Across => (shard(), shard()),
            Stage::Gather => (shard(), output()),
        }
    }

    /// Nothing of an earlier step may pass for a result.
    pub(super) fn forget_results(&mut self) {
        for tensors in self.ranks.iter_mut().take(self.checked) {
            tensors.shard.fill(STALE);
            tensors.output.fill(STALE);
        }
    }

    /// Compares every rank's result with the mean, in a run that is checked.
    pub(super) fn check(&self) -> Result<(), ClusterError> {
        let elems = self.ranks[0].output.as_slice().len() as u64 / 4;
        let mean = |elem| (0..self.checked).map(|rank| value(rank, elem)).sum::<f32>();
        let expected: Vec<u8> = match self.checked {
            0 => return Ok(()),
            _ => (0..elems).flat_map(|elem| mean(elem).to_le_bytes()).collect(),
        };
        for (rank, tensors) in self.ranks.iter().enumerate() {
            let pairs = expected.iter().zip(tensors.output.as_slice());
            if let Some(byte) = pairs.clone().position(|(expected, got)| expected != got) {
                return Err(ClusterError::Wrong { rank, elem: byte / 4 });
            }
        }
        Ok(())
    }
}

/// What a rank contributes to an element, divided by the number of ranks: so the mean is a sum of small integers. It is exact whoever is
/// summed first, and of every set.
fn value(rank: usize, elem: u64) -> f32 {
    (mix((rank as u64) << 40 | elem) % 8) as f32
}

/// What no result holds.
const STALE: u8 = 0xEE;
