//! Who may join a group that runs, and until when.

use gradwire_membership::Member;

/// One life of one rank at a time: between two calls, where all members know its record.
#[derive(Debug, Default)]
pub(super) struct Admission {
    joiner: Option<Member>,
    boundary: u64,
}

impl Admission {
    /// This life may join until the call after the next one is made; whoever was admitted before may not any more: the others
    /// would meet it at a boundary that it was not told of.
    pub(super) fn open(&mut self, joiner: Member, next: u64) {
        *self = Self { joiner: Some(joiner), boundary: next + 1 };
    }

    /// Whether this life may join now.
    pub(super) fn is_open_to(&self, joiner: Member) -> bool {
        self.joiner == Some(joiner)
    }

    /// The call with this number was made here. `true`: it ends what was open.
    pub(super) fn called(&mut self, number: u64) -> bool {
        self.joiner.take_if(|_| number >= self.boundary).is_some()
    }

    /// First call of the rank that was admitted last.
    pub(super) fn boundary(&self) -> u64 {
        self.boundary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EARLIER: Member = Member { rank: 2, incarnation: 5 };
    const LATER: Member = Member { rank: 4, incarnation: 1 };

    #[test]
    fn the_life_that_was_admitted_last_may_join_and_only_before_the_call_after_the_next() {
        let mut admission = Admission::default();
        assert!(!admission.is_open_to(EARLIER) && !admission.called(0));
        admission.open(EARLIER, 7);
        assert!(admission.is_open_to(EARLIER) && !admission.is_open_to(LATER));
        assert!(!admission.called(7), "all members then know the record");
        admission.open(LATER, 8);
        assert!(admission.is_open_to(LATER) && !admission.is_open_to(EARLIER), "its boundary has passed");
        assert!(!admission.called(8) && admission.is_open_to(LATER));
        assert!(admission.called(9) && !admission.is_open_to(LATER));
        assert!(!admission.called(10), "ended once");
        assert_eq!(admission.boundary(), 9);
    }
}
