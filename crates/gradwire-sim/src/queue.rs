//! What happens when: events in the order of (time, order of scheduling).
//!
//! The second key makes ties deterministic; without it a binary heap would return equal times in an order
//! that depends on the heap's history.

use gradwire_core::Timestamp;
use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// A queue of future events.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    scheduled: u64,
}

impl<E> EventQueue<E> {
    /// An empty queue.
    #[must_use]
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new(), scheduled: 0 }
    }

    /// Lets `event` happen at `at`, after everything scheduled earlier for the same time.
    pub fn schedule(&mut self, at: Timestamp, event: E) {
        self.heap.push(Reverse(Entry { at, order: self.scheduled, event }));
        self.scheduled += 1;
    }

    /// When the next event happens.
    #[must_use]
    pub fn next_at(&self) -> Option<Timestamp> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// The next event and its time.
    pub fn pop(&mut self) -> Option<(Timestamp, E)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at, entry.event))
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug)]
struct Entry<E> {
    at: Timestamp,
    order: u64,
    event: E,
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at, self.order).cmp(&(other.at, other.order))
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_by_time_and_ties_in_the_order_of_scheduling() {
        let mut queue = EventQueue::new();
        for (nanos, name) in [(5, "b"), (1, "a"), (5, "c"), (5, "d"), (9, "e")] {
            queue.schedule(Timestamp::from_nanos(nanos), name);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, name)| name).collect();
        assert_eq!(order, ["a", "b", "c", "d", "e"]);
    }
}
