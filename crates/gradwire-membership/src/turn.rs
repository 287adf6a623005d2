//! Whose turn it is to end an epoch: its members attempt one after the other, so that the first of those who live does, and no two meet
//! again and again.
//!
//! Who is before a rank but says nothing takes next to no time from it: a host that dies with many ranks leaves many silent ones
//! behind, of which the transport may have given up one alone.

use crate::codec::MEMBERS_MAX;
use crate::epoch::{Epoch, Member};
use crate::settings::Settings;
use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;
use gradwire_core::Timestamp;

/// So many of those before a rank it lets go first. If all of them live and none can end the epoch, it is no use to wait for more.
pub(crate) const AHEAD_MAX: u32 = 2;

/// A rank's wait for its turn.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turn {
    /// Since when those before it are asked whether they are there.
    since: Timestamp,
    /// From here the time of its turn counts.
    from: Timestamp,
    /// When to look again whether it has come.
    pub(crate) look_at: Timestamp,
}

impl Turn {
    /// Its time counts after `delay`.
    pub(crate) fn new(now: Timestamp, delay: Duration) -> Self {
        Self { since: now, from: now + delay, look_at: now }
    }

    /// When it comes, as far as is known now. `before`: whom the rank lets go first, unless they are silent.
    pub(crate) fn comes_at(
        &self,
        now: Timestamp,
        before: &[Member],
        heard: &BTreeMap<Member, Timestamp>,
        settings: &Settings,
    ) -> Timestamp {
        let last_heard = |member: &Member| heard.get(member).map_or(self.since, |at| self.since.max(*at));
        let lives = |member: &&Member| now < last_heard(member) + settings.silent;
        let ahead = (before.iter().filter(lives).count() as u32).min(AHEAD_MAX);
        // A little for each of the others: two ranks that do not hear each other do not begin together for ever.
        let others = before.len() as u32 - ahead;
        self.from + settings.attempt * ahead + settings.attempt * others / MEMBERS_MAX as u32
    }
}

/// Members before `me` of whom nothing says that they are lost.
pub(crate) fn before(me: Member, epoch: &Epoch, suspects: &BTreeSet<u32>) -> alloc::vec::Vec<Member> {
    let is_before = |member: &Member| *member < me && !suspects.contains(&member.rank);
    epoch.members.iter().copied().filter(is_before).collect()
}
