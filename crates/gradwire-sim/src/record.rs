//! What the network saw of tolerant reductions: the oracle's source of truth, independent of the code under test.
//!
//! A rank hands datagrams out together with a slice of its tensor, so the address of the payload tells which
//! elements a packet carries, without knowing how a bucket is cut. A transfer counts as over when its receiver
//! hands out a status that says so; until then, and from the moment of its own call, everything that is delivered
//! must count.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Elements that one packet carries from a rank's input to the rank that reduces them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Provenance {
    /// The collective.
    pub(crate) op: usize,
    /// Its transfer id on the wire.
    pub(crate) transfer: u32,
    /// The elements.
    pub(crate) elems: Range<u64>,
    /// The first element of the transfer, which may leave late, or never.
    pub(crate) begin: u64,
}

/// When a packet reached its receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Arrival {
    /// Before the receiver made its call, or could talk at all: it may be buffered, dropped or late.
    Early,
    /// While the receiver waited for it: it must count.
    Open,
}

/// Names a contribution: a collective, its sender, its receiver.
pub(crate) type Route = (usize, usize, usize);

/// Deliveries of a whole run.
#[derive(Debug, Default)]
pub(crate) struct DeliveryRecord {
    sent: BTreeMap<Route, Vec<Range<u64>>>,
    begins: BTreeMap<Route, u64>,
    arrived: BTreeMap<Route, Vec<(Range<u64>, Arrival)>>,
    closed: BTreeSet<(usize, usize, u32)>,
}

impl DeliveryRecord {
    /// `from` handed out a packet.
    pub(crate) fn on_sent(&mut self, from: usize, to: usize, packet: &Provenance) {
        let route = (packet.op, from, to);
        self.sent.entry(route).or_default().push(packet.elems.clone());
        let begin = self.begins.entry(route).or_insert(packet.begin);
        *begin = packet.begin.min(*begin);
    }

    /// `to` received a packet.
    pub(crate) fn on_arrived(&mut self, from: usize, to: usize, packet: &Provenance, arrival: Arrival) {
        if !self.closed.contains(&(from, to, packet.transfer)) {
            let arrivals = self.arrived.entry((packet.op, from, to)).or_default();
            arrivals.push((packet.elems.clone(), arrival));
        }
    }

    /// `to` told `from` that a transfer is over.
    pub(crate) fn on_closed(&mut self, from: usize, to: usize, transfer: u32) {
        self.closed.insert((from, to, transfer));
    }

    /// Every route of a collective with the span of elements that went over it, from the first of its first transfer on.
    pub(crate) fn routes(&self, op: usize) -> impl Iterator<Item = (Route, Range<u64>)> + '_ {
        self.sent.range((op, 0, 0)..(op + 1, 0, 0)).map(|(route, ranges)| {
            let start = self.begins.get(route).copied().unwrap_or(0);
            let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
            (*route, start..end)
        })
    }

    /// Elements that were sent on a route, sorted and merged.
    #[must_use]
    pub(crate) fn sent(&self, route: Route) -> Vec<Range<u64>> {
        merge(self.sent.get(&route).cloned().unwrap_or_default())
    }

    /// Elements that arrived on a route before it was over, sorted and merged; only those that had to count when
    /// `which` is [`Arrival::Open`].
    #[must_use]
    pub(crate) fn arrived(&self, route: Route, which: Arrival) -> Vec<Range<u64>> {
        let arrivals = self.arrived.get(&route).map_or(&[][..], Vec::as_slice);
        let wanted = |arrival: Arrival| which == Arrival::Early || arrival == Arrival::Open;
        merge(
            arrivals.iter().filter(|(_, arrival)| wanted(*arrival)).map(|(range, _)| range.clone()).collect(),
        )
    }
}

/// Sorts and joins overlapping and adjacent ranges.
#[must_use]
pub(crate) fn merge(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges.into_iter().filter(|range| !range.is_empty()) {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// First element of `inner` that `outer` does not contain. Both sorted and merged.
#[must_use]
pub(crate) fn first_outside(inner: &[Range<u64>], outer: &[Range<u64>]) -> Option<u64> {
    inner.iter().find_map(|range| {
        let cover = outer.partition_point(|candidate| candidate.end <= range.start);
        match outer.get(cover) {
            Some(candidate) if candidate.start <= range.start => {
                (candidate.end < range.end).then_some(candidate.end)
            }
            _ => Some(range.start),
        }
    })
}

/// Elements in sorted, disjoint ranges.
#[must_use]
pub(crate) fn count(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_merge_and_the_first_uncovered_element_is_found() {
        let merged = merge(vec![5..7, 0..2, 2..4, 6..9, 3..3]);
        assert_eq!(merged, [0..4, 5..9]);
        assert_eq!(count(&merged), 8);
        assert_eq!(first_outside(&[1..3, 5..9], &merged), None);
        assert_eq!(first_outside(std::slice::from_ref(&(1..6)), &merged), Some(4));
        assert_eq!(first_outside(std::slice::from_ref(&(9..10)), &merged), Some(9));
        assert_eq!(first_outside(std::slice::from_ref(&(4..6)), &merged), Some(4));
    }

    #[test]
    fn what_arrives_after_the_close_does_not_have_to_count() {
        let mut record = DeliveryRecord::default();
        let packet = |elems: Range<u64>| Provenance { op: 3, transfer: 77, elems, begin: 0 };
        record.on_sent(0, 1, &packet(0..10));
        record.on_sent(0, 1, &packet(10..20));
        record.on_sent(0, 1, &packet(20..30));
        record.on_arrived(0, 1, &packet(0..10), Arrival::Early);
        record.on_arrived(0, 1, &packet(20..30), Arrival::Open);
        record.on_closed(0, 1, 77);
        record.on_arrived(0, 1, &packet(10..20), Arrival::Open);
        assert_eq!(record.arrived((3, 0, 1), Arrival::Early), [0..10, 20..30]);
        assert_eq!(record.arrived((3, 0, 1), Arrival::Open), std::slice::from_ref(&(20..30)));
        assert_eq!(record.routes(3).collect::<Vec<_>>(), [((3, 0, 1), 0..30)]);
    }
}
