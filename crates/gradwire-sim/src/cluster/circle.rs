//! The process groups of a cluster: one of all ranks, or in a hierarchy two on each rank, one within its set and one across the sets.
//!
//! ```text
//! sets of 3:     0  1  2  |  3  4  5  |  6  7  8
//! rank 4:        within: 3 4 5          across: 1 4 7
//! ```
//!
//! A *node* is a rank's end of one group: `level * ranks + rank`. Which ranks a group has is arithmetic, so that no table grows with their
//! square.

use super::ClusterPlan;
use gradwire_collectives::Servers;

/// How ranks are divided into sets, one set after the other in the order of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    /// Ranks of a set. It divides all ranks into at least two sets, and has at least two.
    pub set: usize,
}

impl Hierarchy {
    /// Sets of about as many ranks as there are sets, which is where a rank has the fewest peers. `None`: the number is a prime.
    #[must_use]
    pub fn balanced(ranks: usize) -> Option<Self> {
        let peers = |set: &usize| set + ranks / set;
        let sets = (2..ranks).filter(|set| ranks % set == 0);
        sets.min_by_key(peers).map(|set| Self { set })
    }

    /// Whether it divides so many ranks.
    #[must_use]
    pub const fn fits(self, ranks: usize) -> bool {
        self.set >= 2 && ranks % self.set == 0 && ranks / self.set >= 2
    }
}

/// The ranks of one process group, in the order of their numbers in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Circle {
    first: usize,
    stride: usize,
    /// Ranks of the connections.
    pub(super) size: usize,
    /// Ranks that call.
    pub(super) callers: usize,
    pub(super) servers: Servers,
}

impl Circle {
    /// The rank of the cluster that has this number here.
    pub(super) const fn rank_of(&self, number: usize) -> usize {
        self.first + number * self.stride
    }

    /// The number that a rank of the cluster has here.
    pub(super) const fn number_of(&self, rank: usize) -> usize {
        (rank - self.first) / self.stride
    }
}

impl ClusterPlan {
    /// Process groups that each rank is in.
    pub(super) const fn levels(&self) -> usize {
        if self.hierarchy.is_some() {
            2
        } else {
            1
        }
    }

    /// The group of `rank` on a level.
    pub(super) fn circle(&self, level: usize, rank: usize) -> Circle {
        let (ranks, servers) = (self.ranks(), self.host.servers);
        let of =
            |first, stride, size| Circle { first, stride, size, callers: size, servers: Servers::EVERY_RANK };
        match (self.hierarchy, level) {
            (None, _) => Circle { callers: self.workers, servers, ..of(0, 1, ranks) },
            (Some(Hierarchy { set }), WITHIN) => of(rank - rank % set, 1, set),
            (Some(Hierarchy { set }), _) => of(rank % set, set, ranks / set),
        }
    }
}

/// The level of the groups within a set, and of the only group.
pub(super) const WITHIN: usize = 0;
/// The level of the groups across sets.
pub(super) const ACROSS: usize = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_is_in_one_set_and_in_one_group_across_them() {
        let mut plan = ClusterPlan::burst("reliable", 12, 4).expect("a preset");
        plan = plan.with_hierarchy(Hierarchy { set: 3 });
        let members = |level, rank| {
            let circle = plan.circle(level, rank);
            (0..circle.size).map(|number| circle.rank_of(number)).collect::<Vec<_>>()
        };
        assert_eq!((members(WITHIN, 4), members(ACROSS, 4)), (vec![3, 4, 5], vec![1, 4, 7, 10]));
        for (level, rank) in [(WITHIN, 11), (ACROSS, 11), (WITHIN, 0), (ACROSS, 5)] {
            let circle = plan.circle(level, rank);
            assert_eq!(circle.rank_of(circle.number_of(rank)), rank);
            assert!(members(level, rank)
                .into_iter()
                .all(|other| members(level, other) == members(level, rank)));
        }
    }

    #[test]
    fn a_balanced_hierarchy_has_as_many_sets_as_ranks_in_each_where_that_can_be() {
        let set = |ranks| Hierarchy::balanced(ranks).map(|hierarchy| hierarchy.set);
        assert_eq!([256, 1024, 4096, 144].map(set), [16, 32, 64, 12].map(Some));
        assert_eq!((set(4), set(7), set(2)), (Some(2), None, None));
        assert!(Hierarchy { set: 4 }.fits(8));
        assert!(![1, 3, 8].iter().any(|set| Hierarchy { set: *set }.fits(8)));
    }
}
