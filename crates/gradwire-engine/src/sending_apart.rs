//! Whether a thread of its own sends ([`crate::socket`]): where it is asked for, or where as many ranks as share the host have two
//! cores each.
//!
//! Once begun it holds for as long as the network thread lives. A group of a few of the ranks says nothing of the others,
//! so the largest number of ranks on this host that any group has had decides; and a group of one rank sends nothing.

use crate::cores::Cores;
use crate::Choice;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct SendingApart {
    setting: Choice,
    ranks_here: usize,
    has_begun: bool,
}

impl SendingApart {
    pub(crate) const fn new(setting: Choice) -> Self {
        Self { setting, ranks_here: 0, has_begun: false }
    }

    /// A group of several ranks, or an epoch of one, has so many of them on this host. Whether the thread is to be started: `true`
    /// once.
    pub(crate) fn begins(&mut self, ranks_here: usize, cores: &Cores) -> bool {
        self.ranks_here = self.ranks_here.max(ranks_here);
        let is_wanted = match self.setting {
            Choice::Auto => cores.are_two_for_each_of(self.ranks_here),
            Choice::On => true,
            Choice::Off => false,
        };
        is_wanted && !std::mem::replace(&mut self.has_begun, is_wanted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_once_where_it_is_asked_for_and_never_where_it_must_not() {
        let (one, many) = (Cores::of(1), Cores::of(64));
        let mut on = SendingApart::new(Choice::On);
        assert!(on.begins(8, &one) && !on.begins(8, &one) && !on.begins(2, &many));
        let mut off = SendingApart::new(Choice::Off);
        assert!(!off.begins(1, &many));
    }

    #[test]
    fn unasked_it_begins_with_two_cores_for_each_of_the_largest_groups_ranks() {
        let eight = Cores::of(8);
        let mut apart = SendingApart::new(Choice::Auto);
        assert!(!apart.begins(5, &eight));
        assert!(!apart.begins(2, &eight), "the others have not gone");
        assert!(SendingApart::new(Choice::Auto).begins(4, &eight));
    }
}
