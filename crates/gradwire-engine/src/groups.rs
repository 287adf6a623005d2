//! The groups of a network thread, and those of them that a turn has to do with: something came for them, or something is due for them. All
//! others cost a turn nothing, however many they are.
//!
//! ```text
//!   IDLE --command, packet: `touch`; its time has come: `touch_due`--> TOUCHED --`next_touched`--> drained --`settle`--> IDLE
//!                                                                         '<--could not send all: `put_back`--'
//! ```
//!
//! What changes a group goes through here, so that none is forgotten: who gets one to change has touched it, or has it from the list of those
//! that are.

use crate::shared::GroupKey;
use gradwire_core::Timestamp;
use std::collections::{HashMap, VecDeque};

/// See the module's documentation.
pub(crate) struct Groups<G> {
    /// Places are used again; a datagram's route holds the place.
    places: Vec<Option<G>>,
    by_key: HashMap<GroupKey, usize>,
    /// In the order in which they are drained. Room for all: to touch one allocates nothing.
    touched: VecDeque<usize>,
    is_touched: Vec<bool>,
    wakes: Wakes,
}

impl<G> Default for Groups<G> {
    fn default() -> Self {
        Self {
            places: Vec::new(),
            by_key: HashMap::new(),
            touched: VecDeque::new(),
            is_touched: Vec::new(),
            wakes: Wakes::default(),
        }
    }
}

impl<G> Groups<G> {
    /// A new group, touched, and its place.
    pub(crate) fn insert(&mut self, key: GroupKey, group: G) -> (usize, &mut G) {
        let place = self.places.iter().position(Option::is_none).unwrap_or(self.places.len());
        if place == self.places.len() {
            self.places.push(None);
            self.is_touched.push(false);
            self.wakes.reach(place);
            self.touched.reserve(self.places.len() - self.touched.len());
        }
        self.by_key.insert(key, place);
        mark(&mut self.touched, &mut self.is_touched, place);
        (place, self.places[place].insert(group))
    }

    /// The group is gone.
    pub(crate) fn remove(&mut self, key: GroupKey) {
        if let Some(place) = self.by_key.remove(&key) {
            self.places[place] = None;
            self.wakes.set(place, None);
        }
    }

    /// A group to change, which has its turn therefore.
    pub(crate) fn touch(&mut self, place: usize) -> Option<&mut G> {
        let group = self.places.get_mut(place)?.as_mut()?;
        mark(&mut self.touched, &mut self.is_touched, place);
        Some(group)
    }

    /// As [`Groups::touch`].
    pub(crate) fn touch_key(&mut self, key: GroupKey) -> Option<&mut G> {
        self.touch(*self.by_key.get(&key)?)
    }

    /// Every group has its turn.
    pub(crate) fn touch_all(&mut self) {
        for place in (0..self.places.len()).filter(|place| self.places[*place].is_some()) {
            mark(&mut self.touched, &mut self.is_touched, place);
        }
    }

    /// Those that want to be called by now have their turn.
    pub(crate) fn touch_due(&mut self, now: Timestamp) {
        let Self { touched, is_touched, wakes, .. } = self;
        wakes.each_due(now, &mut |place| mark(touched, is_touched, place));
    }

    /// The place of the n-th of those that are touched.
    pub(crate) fn touched(&self, index: usize) -> Option<usize> {
        self.touched.get(index).copied()
    }

    /// How many those are.
    pub(crate) fn touched_count(&self) -> usize {
        self.touched.len()
    }

    /// Takes the first of those that are touched off the list, to be drained; then it is settled or put back.
    pub(crate) fn next_touched(&mut self) -> Option<usize> {
        let place = self.touched.pop_front()?;
        self.is_touched[place] = false;
        Some(place)
    }

    /// It has not been drained, and comes behind all that are touched.
    pub(crate) fn put_back(&mut self, place: usize) {
        mark(&mut self.touched, &mut self.is_touched, place);
    }

    /// It wants to be called then.
    pub(crate) fn settle(&mut self, place: usize, wake_at: Option<Timestamp>) {
        self.wakes.set(place, wake_at);
    }

    /// When the first of them wants to be called.
    pub(crate) fn wake_at(&self) -> Option<Timestamp> {
        self.wakes.first()
    }

    /// One to look at.
    pub(crate) fn find(&self, key: GroupKey) -> Option<&G> {
        self.at(*self.by_key.get(&key)?)
    }

    /// As [`Groups::find`].
    pub(crate) fn at(&self, place: usize) -> Option<&G> {
        self.places.get(place)?.as_ref()
    }

    /// One to change that has its turn already, or of which only that is changed on which its turns do not depend.
    pub(crate) fn at_mut(&mut self, place: usize) -> Option<&mut G> {
        self.places.get_mut(place)?.as_mut()
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &G> {
        self.places.iter().flatten()
    }

    /// All of them, to change: `touch_all` comes first where they go on.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut G> {
        self.places.iter_mut().flatten()
    }
}

/// One on the list is not put there again.
fn mark(touched: &mut VecDeque<usize>, is_touched: &mut [bool], place: usize) {
    if !std::mem::replace(&mut is_touched[place], true) {
        touched.push_back(place);
    }
}

/// When each place wants to be called: a tree of the earliest times. The nodes below node `i` are `2i` and `2i + 1`, node 1 is the earliest of
/// all, and the second half are the places. It holds one time for each place, where a heap would have to find and take out the one before.
#[derive(Debug)]
struct Wakes(Vec<Timestamp>);

/// No time comes so late.
const NEVER: Timestamp = Timestamp::from_nanos(u64::MAX);

impl Default for Wakes {
    /// For one place.
    fn default() -> Self {
        Self(vec![NEVER; 2])
    }
}

impl Wakes {
    fn places(&self) -> usize {
        self.0.len() / 2
    }

    /// Makes room for a place.
    fn reach(&mut self, place: usize) {
        while self.places() <= place {
            let before = std::mem::take(self);
            self.0 = vec![NEVER; 4 * before.places()];
            let times = before.0[before.places()..].iter().enumerate();
            times.for_each(|(place, at)| self.set(place, Some(*at)));
        }
    }

    fn set(&mut self, place: usize, at: Option<Timestamp>) {
        let mut node = self.places() + place;
        self.0[node] = at.unwrap_or(NEVER);
        while node > 1 {
            let first = self.0[node].min(self.0[node ^ 1]);
            node /= 2;
            if self.0[node] == first {
                return;
            }
            self.0[node] = first;
        }
    }

    fn first(&self) -> Option<Timestamp> {
        Some(self.0[1]).filter(|at| *at != NEVER)
    }

    /// Hands out every place whose time has come, in order.
    fn each_due(&self, now: Timestamp, due: &mut impl FnMut(usize)) {
        self.each_due_below(1, now, due);
    }

    fn each_due_below(&self, node: usize, now: Timestamp, due: &mut impl FnMut(usize)) {
        if self.0[node] > now || self.0[node] == NEVER {
            return;
        }
        if let Some(place) = node.checked_sub(self.places()) {
            return due(place);
        }
        self.each_due_below(2 * node, now, due);
        self.each_due_below(2 * node + 1, now, due);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn at(nanos: u64) -> Timestamp {
        Timestamp::from_nanos(nanos)
    }

    fn groups(count: u64) -> Groups<u64> {
        let mut groups = Groups::default();
        (0..count).for_each(|key| _ = groups.insert(GroupKey(key), key));
        groups
    }

    fn drained(groups: &mut Groups<u64>) -> Vec<usize> {
        std::iter::from_fn(|| groups.next_touched()).collect()
    }

    #[test]
    fn a_turn_has_to_do_with_those_that_were_touched_or_are_due_and_with_no_other() {
        let mut groups = groups(1_000);
        assert_eq!(drained(&mut groups).len(), 1_000, "new ones have something to say");
        groups.settle(700, Some(at(5)));
        groups.settle(3, Some(at(6)));
        assert_eq!(groups.wake_at(), Some(at(5)));
        groups.touch_due(at(4));
        assert_eq!(groups.touched_count(), 0);
        *groups.touch_key(GroupKey(30)).expect("it is there") += 1;
        groups.touch(30);
        groups.touch_due(at(5));
        assert_eq!(drained(&mut groups), [30, 700]);
        groups.touch_due(at(5));
        assert_eq!(drained(&mut groups), [700], "its time has not been changed");
        groups.settle(700, None);
        assert_eq!(groups.wake_at(), Some(at(6)));
    }

    #[test]
    fn who_could_not_send_all_stays_and_goes_last() {
        let mut groups = groups(3);
        let first = groups.next_touched().expect("three are new");
        groups.put_back(first);
        groups.touch(first);
        assert_eq!(drained(&mut groups), [1, 2, 0]);
    }

    #[test]
    fn a_place_is_used_again_and_keeps_nothing_of_the_group_before() {
        let mut groups = groups(3);
        drained(&mut groups);
        groups.settle(1, Some(at(5)));
        groups.remove(GroupKey(1));
        assert!(groups.touch(1).is_none() && groups.touch_key(GroupKey(1)).is_none());
        assert_eq!((groups.wake_at(), groups.touched_count()), (None, 0));
        assert_eq!(groups.insert(GroupKey(9), 9), (1, &mut 9));
        assert_eq!((groups.find(GroupKey(9)), groups.touched(0)), (Some(&9), Some(1)));
    }

    proptest! {
        #[test]
        fn the_tree_knows_what_a_map_of_all_times_knows(
            changes in prop::collection::vec((0..40_usize, prop::option::of(0..50_u64), 0..50_u64), 1..100),
        ) {
            let (mut wakes, mut model) = (Wakes::default(), BTreeMap::new());
            for (place, time, now) in changes {
                wakes.reach(place);
                wakes.set(place, time.map(at));
                model.remove(&place);
                model.extend(time.map(|time| (place, time)));
                prop_assert_eq!(wakes.first(), model.values().min().copied().map(at));
                let mut due = Vec::new();
                wakes.each_due(at(now), &mut |place| due.push(place));
                let expected = model.iter().filter(|(_, time)| **time <= now).map(|(place, _)| *place);
                prop_assert_eq!(due, expected.collect::<Vec<_>>());
            }
        }
    }
}
