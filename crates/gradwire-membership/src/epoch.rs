//! What is agreed on.

use alloc::vec::Vec;

/// One life of a rank. A process that is started again is another member: it has forgotten what the one before it promised.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Member {
    /// Its rank.
    pub rank: u32,
    /// Which of its lives: larger ones are later.
    pub incarnation: u64,
}

/// A number of the group's life with the members that take part in it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Epoch {
    /// Counts up by one.
    pub number: u64,
    /// Sorted, at least one. The mean of a collective under this epoch is over all of them.
    pub members: Vec<Member>,
    /// Steps that are done when it begins: every member's parameters are those after so many.
    pub frontier: u64,
    /// A member that has them; who has others gets them from it, exactly.
    pub source: Member,
}

impl Epoch {
    /// The first one, in which everybody begins alike.
    ///
    /// # Panics
    /// There is no member.
    #[must_use]
    pub fn first(mut members: Vec<Member>) -> Self {
        members.sort_unstable();
        members.dedup();
        let source = *members.first().expect("a group has members");
        Self { number: 0, members, frontier: 0, source }
    }

    /// Whether that life of that rank takes part.
    #[must_use]
    pub fn has(&self, member: Member) -> bool {
        self.members.binary_search(&member).is_ok()
    }

    /// The member that has this rank.
    #[must_use]
    pub fn of_rank(&self, rank: u32) -> Option<Member> {
        self.members.iter().copied().find(|member| member.rank == rank)
    }

    /// More than half of the members. Half is not enough: the other half may think the same.
    #[must_use]
    pub fn majority(&self) -> usize {
        self.members.len() / 2 + 1
    }
}

/// Orders attempts to choose the next epoch; two attempts never have the same one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ballot {
    /// Larger than all that its proposer has seen.
    pub counter: u64,
    /// Who attempts.
    pub proposer: Member,
}
