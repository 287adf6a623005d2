//! A set of transfer ids that mostly follow each other.

use alloc::collections::BTreeMap;
use gradwire_wire::TransferId;

/// Ids as runs without a gap: first and last of each.
#[derive(Debug, Default)]
pub(crate) struct Runs(BTreeMap<u32, u32>);

impl Runs {
    pub(crate) fn insert(&mut self, id: TransferId) {
        if self.contains(id) {
            return;
        }
        let (mut first, mut last) = (id.0, id.0);
        if let Some((start, _)) = self.at_or_before(id.0).filter(|(_, end)| end.checked_add(1) == Some(id.0))
        {
            first = start;
        }
        if let Some(end) = id.0.checked_add(1).and_then(|next| self.0.remove(&next)) {
            last = end;
        }
        self.0.insert(first, last);
    }

    pub(crate) fn contains(&self, id: TransferId) -> bool {
        self.at_or_before(id.0).is_some_and(|(_, end)| id.0 <= end)
    }

    /// Forgets the runs that are before `mark` as a whole.
    pub(crate) fn forget_before(&mut self, mark: TransferId) {
        self.0.retain(|_, last| !TransferId(*last).is_before(mark));
    }

    fn at_or_before(&self, id: u32) -> Option<(u32, u32)> {
        self.0.range(..=id).next_back().map(|(start, end)| (*start, *end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u32) -> TransferId {
        TransferId::point_to_point(number)
    }

    #[test]
    fn what_follows_each_other_is_one_run_in_whatever_order_it_comes() {
        let mut runs = Runs::default();
        [3, 1, 9, 2, 2, 8].into_iter().for_each(|number| runs.insert(id(number)));
        assert_eq!(runs.0.len(), 2);
        let there: alloc::vec::Vec<u32> = (0..12).filter(|number| runs.contains(id(*number))).collect();
        assert_eq!(there, [1, 2, 3, 8, 9]);
        runs.forget_before(id(4));
        assert!(!runs.contains(id(3)) && runs.contains(id(8)));
        runs.forget_before(id(9));
        assert!(runs.contains(id(8)), "its run has not ended");
        runs.forget_before(id(10));
        assert!(runs.0.is_empty());
    }

    #[test]
    fn the_last_number_has_none_behind_it() {
        let mut runs = Runs::default();
        [u32::MAX, u32::MAX - 1].into_iter().for_each(|number| runs.insert(TransferId(number)));
        assert!(runs.contains(TransferId(u32::MAX)) && runs.0.len() == 1);
        runs.forget_before(id(0));
        assert!(runs.0.is_empty());
    }
}
