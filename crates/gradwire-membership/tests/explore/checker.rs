//! Judges a run from outside: it sees what ranks do, and knows nothing of ballots.

use gradwire_membership::{Epoch, Member};
use std::collections::{BTreeMap, BTreeSet};

/// What may not be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Violation {
    /// Two ranks are in different epochs of one number.
    SplitBrain(String),
    /// An epoch began although no majority of the one before had given that one up.
    NoMajority(String),
    /// Ranks went on from different parameters, or a step is another one on another rank.
    StatesDiffer(String),
    /// A result holds contributions made under another epoch, or not those of all members.
    MixedEpochs(String),
    /// A majority lives, and nothing goes on.
    Stuck(String),
}

/// All that was seen.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    pub(crate) epochs: BTreeMap<u64, Epoch>,
    given_up: BTreeMap<u64, BTreeSet<Member>>,
    /// Parameters, by epoch and steps that are done.
    states: BTreeMap<(u64, u64), u64>,
    pub(crate) violation: Option<Violation>,
}

impl Checker {
    pub(crate) fn new(first: &Epoch, state: u64) -> Self {
        let epochs = [(first.number, first.clone())].into();
        Self { epochs, states: [((first.number, first.frontier), state)].into(), ..Self::default() }
    }

    pub(crate) fn on_frozen(&mut self, member: Member, epoch: u64) {
        self.given_up.entry(epoch).or_default().insert(member);
    }

    pub(crate) fn on_entered(&mut self, member: Member, epoch: &Epoch) {
        let known = self.epochs.entry(epoch.number).or_insert_with(|| epoch.clone());
        if known != epoch {
            let text = format!("{member:?} is in {epoch:?}, another is in {known:?}");
            return self.found(Violation::SplitBrain(text));
        }
        let Some(before) = epoch.number.checked_sub(1).and_then(|number| self.epochs.get(&number)) else {
            return self.found(Violation::NoMajority(format!("{epoch:?} follows none")));
        };
        let votes = self
            .given_up
            .get(&before.number)
            .map_or(0, |given_up| given_up.iter().filter(|member| before.members.contains(member)).count());
        if 2 * votes <= before.members.len() {
            let text = format!("{epoch:?} after {votes} of {} gave up the one before", before.members.len());
            self.found(Violation::NoMajority(text));
        }
    }

    /// A rank may call its next collective, with these parameters.
    pub(crate) fn on_state(&mut self, member: Member, (epoch, steps): (u64, u64), state: u64) {
        let known = *self.states.entry((epoch, steps)).or_insert(state);
        if known != state {
            let text = format!("{member:?} in epoch {epoch} after {steps} steps");
            self.found(Violation::StatesDiffer(text));
        }
    }

    /// A rank has a result. `contributed`: who, and under which epoch.
    pub(crate) fn on_result(&mut self, member: Member, epoch: &Epoch, contributed: &BTreeSet<(Member, u64)>) {
        let announced: BTreeSet<(Member, u64)> =
            epoch.members.iter().map(|member| (*member, epoch.number)).collect();
        if *contributed != announced {
            let text = format!("{member:?} in {epoch:?} has the sum of {contributed:?}");
            self.found(Violation::MixedEpochs(text));
        }
    }

    pub(crate) fn found(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }
}
