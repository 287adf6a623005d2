//! Which connections of a group must be asked for datagrams, and which timer of theirs comes first.
//!
//! A rank of a large group hears one peer at a time: asking all of them after each datagram would take longer than anything else
//! that it does. A connection that had nothing to send has nothing until it is called or until its timer is due, so
//! [`super::Peers`] notes here who was called. The timers are a tournament: each node of a binary tree holds the earlier one
//! of its two children, so that the first is at the root and a change costs one way up.

use gradwire_core::{Timeout, Timestamp};

/// What is to be done about the peers, by their places.
#[derive(Debug)]
pub(super) struct Agenda {
    /// Peers that may have datagrams, by bit.
    ready: Vec<u64>,
    /// Peers that were called since their timer was noted, each once.
    called: Vec<usize>,
    is_called: Vec<bool>,
    timers: Vec<Option<Timeout>>,
    /// Nanoseconds of the timers: the root at 1, the children of `i` at `2 * i` and `2 * i + 1`, the peers from half of the
    /// length on. `u64::MAX`: none.
    tree: Vec<u64>,
    /// Whose timers are due, kept for its memory.
    due: Vec<usize>,
}

impl Agenda {
    /// Nobody has been asked yet.
    pub(super) fn new(peers: usize) -> Self {
        let mut agenda = Self {
            ready: vec![0; peers.div_ceil(64)],
            called: Vec::with_capacity(peers),
            is_called: vec![false; peers],
            timers: vec![None; peers],
            tree: vec![NEVER; 2 * peers.next_power_of_two()],
            due: Vec::with_capacity(peers),
        };
        (0..peers).for_each(|slot| agenda.on_called(slot));
        agenda
    }

    /// The connection of `slot` was called: it may have datagrams and another timer.
    pub(super) fn on_called(&mut self, slot: usize) {
        self.set_ready(slot);
        if !std::mem::replace(&mut self.is_called[slot], true) {
            self.called.push(slot);
            self.note_timer(slot, None);
        }
    }

    fn set_ready(&mut self, slot: usize) {
        self.ready[slot / 64] |= 1 << (slot % 64);
    }

    /// It had no datagram.
    pub(super) fn on_silent(&mut self, slot: usize) {
        self.ready[slot / 64] &= !(1 << (slot % 64));
    }

    /// The first peer that may have datagrams, from `from` on and then from the beginning.
    pub(super) fn next_ready(&self, from: usize) -> Option<usize> {
        let (word, above) = (from / 64, u64::MAX << (from % 64));
        let of = |index: usize, mask: u64| {
            let bits = self.ready.get(index)? & mask;
            (bits != 0).then(|| 64 * index + bits.trailing_zeros() as usize)
        };
        let behind = || (word + 1..self.ready.len()).find_map(|index| of(index, u64::MAX));
        let before = || (0..word).find_map(|index| of(index, u64::MAX));
        of(word, above).or_else(behind).or_else(before).or_else(|| of(word, !above))
    }

    /// Takes a peer that was called and whose timer is to be noted.
    pub(super) fn take_called(&mut self) -> Option<usize> {
        let slot = self.called.pop()?;
        self.is_called[slot] = false;
        Some(slot)
    }

    /// Peers whose timers are not noted.
    pub(super) fn called(&self) -> &[usize] {
        &self.called
    }

    pub(super) fn note_timer(&mut self, slot: usize, timer: Option<Timeout>) {
        self.timers[slot] = timer;
        let mut node = self.tree.len() / 2 + slot;
        self.tree[node] = timer.map_or(NEVER, |timer| timer.at.as_nanos());
        while node > 1 {
            node /= 2;
            let earlier = self.tree[2 * node].min(self.tree[2 * node + 1]);
            if std::mem::replace(&mut self.tree[node], earlier) == earlier {
                break;
            }
        }
    }

    /// The first of the noted timers, and of equals that of the first peer.
    pub(super) fn first_timer(&self) -> Option<(usize, Timeout)> {
        let (leaves, first) = (self.tree.len() / 2, self.tree[1]);
        let mut node = 1;
        while node < leaves {
            node = 2 * node + usize::from(self.tree[2 * node] != first);
        }
        Some((node - leaves, self.timers.get(node - leaves).copied()??))
    }

    /// Peers whose noted timers are due, in order. To be given back.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Vec<usize> {
        let mut due = std::mem::take(&mut self.due);
        due.clear();
        self.collect(1, now.as_nanos().min(NEVER - 1), &mut due);
        due
    }

    pub(super) fn give_back(&mut self, due: Vec<usize>) {
        self.due = due;
    }

    fn collect(&self, node: usize, now: u64, due: &mut Vec<usize>) {
        let leaves = self.tree.len() / 2;
        if self.tree[node] > now {
            return;
        }
        if node >= leaves {
            return due.push(node - leaves);
        }
        self.collect(2 * node, now, due);
        self.collect(2 * node + 1, now, due);
    }
}

const NEVER: u64 = u64::MAX;

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::TimeoutReason;

    fn timer(nanos: u64) -> Option<Timeout> {
        Some(Timeout { at: Timestamp::from_nanos(nanos), reason: TimeoutReason::Probe })
    }

    fn first(agenda: &Agenda) -> Option<(usize, u64)> {
        agenda.first_timer().map(|(slot, timer)| (slot, timer.at.as_nanos()))
    }

    #[test]
    fn ready_peers_take_turns_from_any_place_on() {
        for count in [1, 63, 64, 65, 200] {
            let mut agenda = Agenda::new(count);
            let ready = [0, count / 2, count - 1];
            (0..count).filter(|slot| !ready.contains(slot)).for_each(|slot| agenda.on_silent(slot));
            for from in 0..count {
                let in_turn = (from..count).chain(0..from).find(|slot| ready.contains(slot));
                assert_eq!(agenda.next_ready(from), in_turn, "{count} peers, from {from}");
            }
            ready.iter().for_each(|slot| agenda.on_silent(*slot));
            assert_eq!(agenda.next_ready(count / 2), None);
        }
    }

    #[test]
    fn the_first_timer_and_those_due_are_found_among_any_number() {
        for count in [1_usize, 2, 5, 64, 100] {
            let mut agenda = Agenda::new(count);
            while agenda.take_called().is_some() {}
            assert_eq!(first(&agenda), None);
            let at = |slot: usize| 100 + (slot as u64 * 37) % 64;
            (0..count).for_each(|slot| agenda.note_timer(slot, timer(at(slot))));
            let least = (0..count).min_by_key(|slot| at(*slot)).map(|slot| (slot, at(slot)));
            assert_eq!(first(&agenda), least);
            let due = agenda.take_due(Timestamp::from_nanos(130));
            assert_eq!(due, (0..count).filter(|slot| at(*slot) <= 130).collect::<Vec<_>>());
            agenda.give_back(due);
            (0..count).for_each(|slot| agenda.on_called(slot));
            assert_eq!(first(&agenda), None, "who was called is asked anew");
        }
    }
}
