//! One attempt to choose the next epoch.

use crate::epoch::{Ballot, Epoch, Member};
use crate::message::Promise;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use gradwire_core::Timestamp;

/// What its proposer keeps.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) ballot: Ballot,
    pub(crate) promises: BTreeMap<Member, Promise>,
    /// What was put to the vote.
    pub(crate) next: Option<Epoch>,
    pub(crate) accepts: BTreeSet<Member>,
    /// When to say it again to those who have not answered.
    pub(crate) repeat_at: Timestamp,
    /// When to go on with a majority, or to give up.
    pub(crate) until: Timestamp,
}

/// Why nothing can be put to the vote.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StateIsLost;

impl Attempt {
    /// What may be chosen, given the promises of a majority: what may have been chosen already; else those who promised and for whom `stays`
    /// holds, with as many of `joining` as cannot outvote them should all of these fail at once. Where none of them has the parameters, those
    /// who do and for whom `may_stay` holds stay too.
    ///
    /// Only who has promised stays: whoever has not may still complete a step that the others do not have.
    pub(crate) fn choose(
        &self,
        epoch: &Epoch,
        stays: impl Fn(&Member) -> bool,
        may_stay: impl Fn(&Member) -> bool,
        joining: impl Iterator<Item = Member>,
    ) -> Result<Epoch, StateIsLost> {
        let accepted = self.promises.values().filter_map(|promise| promise.accepted.as_ref());
        if let Some((_, next)) = accepted.max_by_key(|(ballot, _)| *ballot) {
            return Ok(next.clone());
        }
        let progress = |member: &Member| self.promises.get(member).and_then(|promise| promise.progress);
        let mut staying: Vec<Member> = self.promises.keys().copied().filter(stays).collect();
        if staying.iter().all(|member| progress(member).is_none()) {
            // They were heard all the same: without them all would halt.
            let has_them = |member: &Member| progress(member).is_some() && may_stay(member);
            staying.extend(self.promises.keys().copied().filter(has_them));
        }
        let frontier = staying.iter().filter_map(progress).max().ok_or(StateIsLost)?;
        let has_it = |member: &&Member| progress(member) == Some(frontier);
        let source = staying.iter().find(has_it).copied().ok_or(StateIsLost)?;
        // Who is alone takes one in all the same, and needs it from then on: it could never be more than one otherwise.
        let room = (staying.len() - 1).max(1);
        let is_new = |member: &Member| staying.iter().all(|other| other.rank != member.rank);
        let mut members = staying.clone();
        members.extend(joining.filter(is_new).take(room));
        members.sort_unstable();
        Ok(Epoch { number: epoch.number + 1, members, frontier, source })
    }
}
