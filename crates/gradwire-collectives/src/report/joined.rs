//! One report of a call whose parts were calls of their own ([`crate::GroupEvent::Divided`]).

use super::{stricter, Contributions, DeliveryReport, PeerDelivery, PeerTaking};
use std::ops::Range;

impl DeliveryReport {
    /// Of the parts of one call, in the order of their elements; all were timed by one clock. Name, number and times of the call are those
    /// of the first part, which is the one that the group called.
    #[must_use]
    pub fn joined(mut parts: Vec<Self>) -> Self {
        place_in_rows(&mut parts);
        let mut parts = parts.into_iter();
        let mut whole = parts.next().unwrap_or_default();
        for part in parts {
            whole.append(part);
        }
        whole.tidy();
        whole
    }

    fn append(&mut self, part: Self) {
        // Ranges and counts are about what was sent.
        let (before, more) = (self.sent_elems(), part.sent_elems());
        let is_rotated = self.rotated_elems + part.rotated_elems > 0;
        let ended_at = (self.submitted_at + self.elapsed).max(part.submitted_at + part.elapsed);
        self.elapsed = ended_at.since(self.submitted_at);
        self.compute_wait = self.compute_wait.max(part.compute_wait);
        self.elems += part.elems;
        self.rotated_elems = if is_rotated { before + more } else { 0 };
        let counts = self.contributions.take().zip(part.contributions);
        self.contributions = counts.map(|(first, second)| first.followed_by(before, &second, more));
        self.bytes_received += part.bytes_received;
        self.bytes_expected += part.bytes_expected;
        self.bytes_sent += part.bytes_sent;
        self.bytes_retransmitted += part.bytes_retransmitted;
        self.uncounted.extend(moved(part.uncounted, if self.is_of_rows() { 0 } else { before }));
        self.filled.extend(moved(part.filled, before));
        append_peers(&mut self.peers, part.peers);
        append_peers(&mut self.sources, part.sources);
        append_takings(&mut self.takings, &part.takings);
        self.contributors_least = match (self.contributors, part.contributors) {
            (_, 0) => self.contributors_least,
            (0, _) => part.contributors_least,
            _ => self.contributors_least.min(part.contributors_least),
        };
        self.contributors = self.contributors.max(part.contributors);
        self.reduce_ended_by = stricter(self.reduce_ended_by, part.reduce_ended_by);
        self.gather_ended_by = stricter(self.gather_ended_by, part.gather_ended_by);
        self.replicas_identical &= part.replicas_identical;
        self.warm_up |= part.warm_up;
    }
}

/// What did not count of a reduce-scatter are places in all of its rows, of which each part has some columns.
fn place_in_rows(parts: &mut [DeliveryReport]) {
    let row: u64 = parts.iter().map(|part| part.elems).sum();
    let mut first = 0;
    for part in parts.iter_mut().filter(|part| part.is_of_rows()) {
        let columns = first..first + part.elems;
        first = columns.end;
        let of_part = std::mem::take(&mut part.uncounted);
        part.uncounted = of_part.into_iter().flat_map(|range| in_rows(range, &columns, row)).collect();
    }
}

/// The elements `range` of a part that has `columns` of each row of `row` elements, row by row.
fn in_rows(range: Range<u64>, columns: &Range<u64>, row: u64) -> impl Iterator<Item = Range<u64>> {
    let (first, width) = (columns.start, (columns.end - columns.start).max(1));
    (range.start / width..range.end.div_ceil(width)).map(move |number| {
        let (start, end) = (range.start.max(number * width), range.end.min((number + 1) * width));
        let moved = |at: u64| number * row + first + at - number * width;
        moved(start)..moved(end)
    })
}

impl DeliveryReport {
    fn is_of_rows(&self) -> bool {
        self.collective == "reduce_scatter"
    }

    /// Elements of what was sent: of a rotated bucket with its padding.
    fn sent_elems(&self) -> u64 {
        if self.rotated_elems > 0 {
            self.rotated_elems
        } else {
            self.elems
        }
    }
}

impl Contributions {
    /// Of `elems` elements and `more` that follow them. One shard, in blocks that lie in one of the blocks before.
    fn followed_by(&self, elems: u64, next: &Self, more: u64) -> Self {
        // Where one shard ends and nothing follows there is no border that a block could cross.
        let borders = if next.shard_elems < more { next.shard_elems } else { 0 };
        let lengths = [self.shard_elems, self.block_elems, elems, borders, next.block_elems];
        let block_elems = lengths.into_iter().fold(0, greatest_divisor).max(1);
        let firsts = |elems: u64| (0..elems).step_by(usize::try_from(block_elems).unwrap_or(usize::MAX));
        let counts = firsts(elems).map(|elem| self.of(elem)).chain(firsts(more).map(|elem| next.of(elem)));
        Self { counts: counts.collect(), shard_elems: elems + more, block_elems }
    }
}

/// The greatest number that divides both; zero is divided by all.
fn greatest_divisor(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        greatest_divisor(b, a % b)
    }
}

fn moved(ranges: Vec<Range<u64>>, by: u64) -> impl Iterator<Item = Range<u64>> {
    ranges.into_iter().map(move |range| range.start + by..range.end + by)
}

fn append_peers(peers: &mut Vec<PeerDelivery>, parts: Vec<PeerDelivery>) {
    for part in parts {
        let Some(peer) = peers.iter_mut().find(|peer| peer.rank == part.rank) else {
            peers.push(part);
            continue;
        };
        peer.elems_received += part.elems_received;
        peer.elems_expected += part.elems_expected;
        peer.closed_by = stricter(peer.closed_by, part.closed_by);
        peer.waited_for_peer = peer.waited_for_peer.max(part.waited_for_peer);
        peer.network_time = peer.network_time.max(part.network_time);
        peer.deadline = peer.deadline.max(part.deadline);
        peer.called_at = [peer.called_at, part.called_at].into_iter().flatten().min();
        peer.way = peer.way.min(part.way);
        peer.began_at = peer.began_at.min(part.began_at);
        peer.ended_at = peer.ended_at.max(part.ended_at);
    }
}

fn append_takings(takings: &mut Vec<PeerTaking>, parts: &[PeerTaking]) {
    // Taken is what was taken of both.
    takings.retain_mut(|taking| {
        let part = parts.iter().find(|part| part.rank == taking.rank);
        part.inspect(|part| taking.taken_at = taking.taken_at.max(part.taken_at)).is_some()
    });
}

#[cfg(test)]
mod tests {
    use super::super::Places;
    use super::*;
    use crate::adaptive::stage_end::tests::receipt;
    use gradwire_core::{CloseReason, Receipt, Timestamp};
    use std::time::Duration;

    fn part(began_ms: u64, received: u64, reason: CloseReason) -> DeliveryReport {
        let ms = Duration::from_millis;
        let began = Timestamp::ZERO + ms(began_ms);
        let receipt =
            Receipt { reason, received_bytes: received * 4, total_bytes: 400, ..receipt(began, ms(5)) };
        let mut report = DeliveryReport {
            elems: 200,
            submitted_at: began,
            elapsed: ms(6),
            compute_wait: ms(began_ms),
            takings: vec![PeerTaking { rank: 1, taken_at: began + ms(3) }],
            replicas_identical: true,
            ..DeliveryReport::default()
        };
        report.add((1, Duration::ZERO), &receipt, 4, true, &mut Places::default());
        report.uncounted.push(10..20);
        report
    }

    #[test]
    fn a_whole_has_the_elements_of_its_parts_and_ends_with_the_last() {
        let parts = [(1, 100, CloseReason::AllArrived), (2, 70, CloseReason::BoundMet)];
        let whole = DeliveryReport::joined(parts.map(|(at, got, why)| part(at, got, why)).to_vec());
        assert_eq!((whole.elems, whole.uncounted.clone()), (400, vec![10..20, 210..220]));
        assert_eq!(whole.elapsed, Duration::from_millis(7));
        assert_eq!(
            (whole.compute_wait, whole.network_wait),
            (Duration::from_millis(2), Duration::from_millis(5))
        );
        let [peer] = &whole.peers[..] else { panic!("{:?}", whole.peers) };
        assert_eq!((peer.elems_expected, peer.elems_received, peer.closed_by), (200, 170, "bound_met"));
        assert_eq!((peer.began_at.as_nanos(), peer.ended_at.as_nanos()), (1_000_000, 7_000_000));
        assert!((whole.lost_share() - 0.15).abs() < 1e-9);
        assert_eq!(whole.takings[0].taken_at.as_nanos(), 5_000_000);
    }

    #[test]
    fn one_part_is_a_whole_and_ranges_of_rotated_parts_are_places_in_what_was_sent() {
        let one = part(1, 100, CloseReason::AllArrived);
        let mut tidied = one.clone();
        tidied.tidy();
        assert_eq!(DeliveryReport::joined(vec![one.clone()]), tidied);
        let rotated = DeliveryReport { rotated_elems: 256, ..one };
        let whole = DeliveryReport::joined(vec![rotated.clone(), rotated.clone()]);
        assert_eq!((whole.rotated_elems, whole.uncounted), (512, vec![10..20, 266..276]));
        let plain = part(1, 100, CloseReason::AllArrived);
        let whole = DeliveryReport::joined(vec![plain.clone(), rotated, plain]);
        assert_eq!((whole.rotated_elems, whole.uncounted), (656, vec![10..20, 210..220, 466..476]));
        assert_eq!(DeliveryReport::joined(Vec::new()), DeliveryReport::default());
    }

    #[test]
    fn what_did_not_count_of_a_reduce_scatter_are_places_in_its_rows() {
        let part = |elems, uncounted: &[(u64, u64)]| DeliveryReport {
            collective: "reduce_scatter".to_owned(),
            elems,
            uncounted: uncounted.iter().map(|(start, end)| *start..*end).collect(),
            ..DeliveryReport::default()
        };
        // Rows of 100 elements, of which the parts have 40, 40 and 20.
        let parts = vec![part(40, &[(0, 5), (35, 45)]), part(40, &[(80, 120)]), part(20, &[(15, 62)])];
        let whole = DeliveryReport::joined(parts);
        assert_eq!(whole.elems, 100);
        // What the first and the last part have beside each other is one range.
        let expected = [0..5, 35..40, 95..105, 180..200, 240..300, 380..382];
        assert_eq!(whole.uncounted, expected);
        let elems = |ranges: &[Range<u64>]| ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        assert_eq!(elems(&whole.uncounted), 5 + 10 + 40 + 47);
    }

    #[test]
    fn contributions_of_the_whole_are_those_of_the_part_that_an_element_is_in() {
        let of = |first: u16, shard_elems, block_elems, counts: u16| Contributions {
            counts: (first..first + counts).collect(),
            shard_elems,
            block_elems,
        };
        // Two shards of 100 elements in blocks of 40, and one of 60 in blocks of 32.
        let (one, two) = (of(1, 100, 40, 6), of(7, 60, 32, 2));
        let whole = one.followed_by(200, &two, 60);
        assert!((0..200).all(|elem| whole.of(elem) == one.of(elem)));
        assert!((0..60).all(|elem| whole.of(200 + elem) == two.of(elem)));
        assert_eq!((whole.shard_elems, whole.counts.len() as u64 * whole.block_elems), (260, 260));
        let last = of(1, 101, 32, 4);
        let whole = of(1, 320, 32, 10).followed_by(320, &last, 101);
        assert_eq!((whole.block_elems, whole.counts.len()), (32, 14), "a last shard of any length");
        assert!((0..101).all(|elem| whole.of(320 + elem) == last.of(elem)));
        let with = |contributors, contributors_least, contributions, elems| DeliveryReport {
            contributors,
            contributors_least,
            contributions,
            elems,
            ..DeliveryReport::default()
        };
        let joined = DeliveryReport::joined(vec![with(0, 0, Some(one), 200), with(3, 2, Some(two), 60)]);
        assert_eq!((joined.contributors, joined.contributors_least), (3, 2), "one part reduced nothing here");
        assert!(joined.contributions.is_some());
        assert_eq!(DeliveryReport::joined(vec![joined, with(1, 1, None, 5)]).contributions, None);
    }

    #[test]
    fn what_one_part_has_not_taken_is_not_taken() {
        let (mut first, second) = (part(1, 1, CloseReason::AllArrived), part(1, 1, CloseReason::Deadline));
        first.takings.push(PeerTaking { rank: 2, taken_at: Timestamp::ZERO });
        let whole = DeliveryReport::joined(vec![second, first]);
        assert_eq!(whole.takings.iter().map(|taking| taking.rank).collect::<Vec<_>>(), [1]);
        assert_eq!(whole.peers[0].closed_by, "deadline");
    }
}
