//! What a cluster run was like: times, losses, cost.

use crate::fabric::{FabricViolation, PortStats};
use gradwire_collectives::OpError;
use gradwire_core::Timestamp;
use std::time::Duration;

/// Why a run is worth nothing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// The network broke its own rules.
    #[error(transparent)]
    Fabric(#[from] FabricViolation),
    /// A call failed.
    #[error("rank {rank}: {error}")]
    Failed {
        /// On which rank.
        rank: usize,
        /// Why.
        error: OpError,
    },
    /// Ranks did not end their calls.
    #[error("{open} calls have not ended after {after:?} of simulated time")]
    Stuck {
        /// Calls.
        open: usize,
        /// How long they had.
        after: Duration,
    },
    /// A result is not the mean.
    #[error("rank {rank}: element {elem} of the result is not the mean of all ranks")]
    Wrong {
        /// Whose.
        rank: usize,
        /// The first such element.
        elem: usize,
    },
    /// Sets that a hierarchy cannot have.
    #[error("sets of {set} do not divide {ranks} ranks into two or more sets of two or more: choose another size of a set")]
    Sets {
        /// Ranks of a set.
        set: usize,
        /// All ranks that call.
        ranks: usize,
    },
    /// What is done with one bucket only.
    #[error("{buckets} buckets: a hierarchy, and a run that is checked, take one")]
    OneBucket {
        /// Buckets of the plan.
        buckets: usize,
    },
    /// A hierarchy with a preset that it is not made for.
    #[error("a hierarchy tells the network nothing of importance: choose a preset without, such as auto or reliable")]
    Importance,
    /// It was told to stop.
    #[error("stopped before the end")]
    Stopped,
    /// More ranks than hosts.
    #[error("{ranks} ranks do not fit on {hosts} hosts")]
    TooManyRanks {
        /// Ranks.
        ranks: usize,
        /// Hosts.
        hosts: usize,
    },
}

/// What a run was like. Warm-up is left out of all but the cost.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Completion times of all transfers, sorted.
    pub flow_times: Vec<Duration>,
    /// The same of those that contribute: pushes.
    pub push_times: Vec<Duration>,
    /// The same of those that bring results: pulls.
    pub pull_times: Vec<Duration>,
    /// From the first call of each step to the last rank's last end.
    pub step_times: Vec<Duration>,
    /// What the cost model says of a step, one call after the other, on an empty network, with what a message costs a rank, which
    /// is nothing here. `None`: it knows nothing of the schedule.
    pub modelled_step: Option<Duration>,
    /// What did not count.
    pub losses: Losses,
    /// Payload bytes that ranks sent, and of these again.
    pub bytes_sent: u64,
    /// See above.
    pub bytes_retransmitted: u64,
    /// Switch ports, warm-up included.
    pub switches: PortStats,
    /// What it cost.
    pub cost: Cost,
}

/// Contributions that are in no sum, of all ranks and measured steps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Losses {
    /// For each bucket and layer of it, elements that were contributed and that did not count.
    pub layers: Vec<LayerLoss>,
    /// Elements of important packets: contributed, and not counted. Zero where importance is not told.
    pub important: (u64, u64),
    /// Elements of the other packets.
    pub unimportant: (u64, u64),
}

impl Losses {
    /// Share of all contributed elements that did not count.
    #[must_use]
    pub fn share(&self) -> f64 {
        let elems: u64 = self.layers.iter().map(|layer| layer.elems).sum();
        let lost: u64 = self.layers.iter().map(|layer| layer.lost).sum();
        lost as f64 / elems.max(1) as f64
    }
}

/// See [`Losses`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerLoss {
    /// Place of its bucket in the plan.
    pub bucket: usize,
    /// Its name.
    pub name: String,
    /// Elements contributed.
    pub elems: u64,
    /// Elements that did not count.
    pub lost: u64,
}

/// What a run cost the simulator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Events of all kinds.
    pub events: u64,
    /// Datagrams that hosts sent.
    pub datagrams: u64,
    /// Most packets under way at once.
    pub packets_most: usize,
    /// Simulated time.
    pub until: Timestamp,
}

/// Mean of some times; zero of none.
#[must_use]
pub fn mean(times: &[Duration]) -> Duration {
    times.iter().sum::<Duration>().checked_div(times.len() as u32).unwrap_or_default()
}

/// The smallest of the sorted `times` that `share` of them do not exceed (the nearest rank); zero of none.
#[must_use]
pub fn quantile(times: &[Duration], share: f64) -> Duration {
    let rank = (times.len() as f64 * share).ceil() as usize;
    times.get(rank.max(1) - 1).or(times.last()).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_times_that_were_seen() {
        let times: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        let at = |share| quantile(&times, share).as_millis();
        assert_eq!([at(0.0), at(0.5), at(0.99), at(0.999), at(1.0)], [1, 100, 198, 200, 200]);
        assert_eq!((quantile(&[], 0.5), mean(&[])), (Duration::ZERO, Duration::ZERO));
        assert_eq!(mean(&times), Duration::from_micros(100_500));
    }
}
