//! What a collective delivered.

mod joined;

use gradwire_core::{CloseReason, Receipt, Timestamp};
use std::ops::Range;
use std::time::Duration;

/// One peer's part of one stage of a collective, as its receiver saw it.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerDelivery {
    /// The sender.
    pub rank: u32,
    /// Elements that arrived from it.
    pub elems_received: u64,
    /// Elements that were expected. What did not arrive is left out of a sum, or filled in where a result was expected.
    pub elems_expected: u64,
    /// Why its transfers closed, of several reasons the one that accepts least: `all_arrived`, `bound_met`, `soft_threshold`, `early_timeout`, `deadline`.
    pub closed_by: &'static str,
    /// How long its first packet was waited for: until it called, sent what goes first, and the way here. In a ring, over all steps.
    pub waited_for_peer: Duration,
    /// From its first packet to the end: the network. In a ring, over all steps.
    pub network_time: Duration,
    /// How long of it could at most be spent on what was lost, once the floor was in: the deadline of the transfer's contract.
    /// In a ring, over all steps. `None`: there was none, or nothing had been measured yet.
    pub deadline: Option<Duration>,
    /// When that rank called, on this rank's clock, by what its first transfer here said: late by what its fastest packet took to
    /// come here. `None`: no packet that says so came, or what it sent may tell of another rank's call.
    pub called_at: Option<Timestamp>,
    /// How long a packet takes to come here at least, as far as was known then: half of the shortest round trip.
    pub way: Duration,
    /// When the first packet of its first transfer came, or the end if none did.
    pub began_at: Timestamp,
    /// When the last of its transfers ended.
    pub ended_at: Timestamp,
}

/// When a peer had taken everything that this rank sends it in the first stage of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerTaking {
    /// The receiver.
    pub rank: u32,
    /// When it confirmed the last transfer, on this rank's clock.
    pub taken_at: Timestamp,
}

/// How many ranks' values are in each block of a reduced result, as this rank holds it. A block is what one packet carries.
///
/// # Loss
/// Zero is a block that nobody's values are in: no worker delivered it to its dedicated server, or its result did not
/// arrive here and was filled in ([`crate::Fill`]; filled with the rank's own value it counts one). Blocks beyond the last
/// element, in a short or empty shard, are zero too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contributions {
    /// `[shards, blocks]`, shard after shard: element `e` is in shard `e / shard_elems`, and there in block
    /// `e % shard_elems / block_elems`. Of a rotated bucket they are about the elements that were sent
    /// ([`DeliveryReport::rotated_elems`]): each element of the caller's has a share of many.
    pub counts: Vec<u16>,
    /// Elements of a shard; the last ones may be shorter.
    pub shard_elems: u64,
    /// Elements of a block; the last one of a shard may be shorter.
    pub block_elems: u64,
}

impl Contributions {
    /// From the counts of all chunks, for a bucket of `bytes` bytes.
    pub(crate) fn new(
        counts: &[u16],
        (shard_bytes, block_bytes): (usize, usize),
        bytes: usize,
        elem_bytes: usize,
    ) -> Self {
        let blocks = shard_bytes.div_ceil(block_bytes.max(1)).max(1);
        let in_bucket = |chunk: usize| {
            let at = chunk % blocks * block_bytes;
            chunk / blocks * shard_bytes + at < bytes && at < shard_bytes
        };
        let counts = counts.iter().enumerate();
        let counts = counts.map(|(chunk, count)| if in_bucket(chunk) { *count } else { 0 }).collect();
        let elems = |bytes: usize| (bytes / elem_bytes) as u64;
        Self { counts, shard_elems: elems(shard_bytes), block_elems: elems(block_bytes) }
    }

    /// Blocks of a shard.
    #[must_use]
    pub fn blocks(&self) -> usize {
        (self.shard_elems.div_ceil(self.block_elems.max(1)) as usize).max(1)
    }

    /// Ranks in element `elem`.
    ///
    /// # Panics
    /// When the result has no such element.
    #[must_use]
    pub fn of(&self, elem: u64) -> u16 {
        let (shard, within) = (elem / self.shard_elems, elem % self.shard_elems);
        self.counts[shard as usize * self.blocks() + (within / self.block_elems) as usize]
    }
}

// claim: report/delivery
/// What a collective delivered on this rank.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeliveryReport {
    /// Name of the collective, with its schedule for an all-reduce (`all_reduce/transpose`).
    pub collective: String,
    /// Its number in the group's sequence of collectives, which is a new one for each epoch of a group; see `in_sequence`.
    pub sequence: u64,
    /// Whether `sequence` is that. `false`: it is one of this rank's point-to-point calls, which are numbered apart and on each rank in
    /// its own way, or of a call whose result another rank gave.
    pub in_sequence: bool,
    /// Elements of the result.
    pub elems: u64,
    /// When this rank called, on its own clock.
    pub submitted_at: Timestamp,
    /// From submission to the end.
    pub elapsed: Duration,
    /// Payload bytes received in all stages, duplicates left out.
    pub bytes_received: u64,
    /// Payload bytes expected in all stages.
    pub bytes_expected: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Payload bytes sent again.
    pub bytes_retransmitted: u64,
    /// Elements of this rank's contribution that did not count somewhere, as ranges of the bucket, in order. In a
    /// ring they stand for the partial sum that this rank sent on.
    /// Of a reduce-scatter they are places in its input.
    pub uncounted: Vec<Range<u64>>,
    /// For each peer that sent contributions: the reduce stage of an all-reduce, or a reduction of one stage.
    pub peers: Vec<PeerDelivery>,
    /// For each peer that sent what is kept as it is: the gather stage of an all-reduce, or a collective that copies.
    pub sources: Vec<PeerDelivery>,
    /// For each peer that had taken what this rank sent it first before the collective ended: small sends are copied, and nobody waits for
    /// their confirmation.
    pub takings: Vec<PeerTaking>,
    /// Ranks whose values are in what this rank reduced, itself included: in the block that has the most, and in the one that
    /// has the fewest. Zero where it reduced nothing.
    pub contributors: u16,
    /// See `contributors`.
    pub contributors_least: u16,
    /// The same for each block of the result, wherever it was reduced: where [`crate::Request::wants_contributions`] asks for
    /// it, and something is reduced that this rank gets.
    pub contributions: Option<Contributions>,
    /// Waiting for compute: from this rank's call to the latest call of those that its result waited for. Each rank tells the others
    /// how long ago it called, and passes on what it knows of those that it waited for (a ring's partial sum, a server's result). Off by
    /// what a first packet takes beyond half of the shortest round trip.
    pub compute_wait: Duration,
    /// Waiting for the network: the rest of `elapsed`.
    pub network_wait: Duration,
    /// What ended the wait for contributions, of several reasons the one that accepts least; names as in
    /// [`PeerDelivery::closed_by`], empty where the stage received nothing.
    pub reduce_ended_by: &'static str,
    /// The same for the results that are sent back.
    pub gather_ended_by: &'static str,
    /// Elements of the result that did not arrive here and hold what the policy fills in, as ranges, in order.
    pub filled: Vec<Range<u64>>,
    /// Every rank has the same bits. `false` where results may be lost on their way back: then replicas may differ.
    pub replicas_identical: bool,
    /// The reduction was exact because its policy measures first (ULTIMA's warm-up).
    pub warm_up: bool,
    /// Elements of the rotated bucket that was sent in place of this one, padding included; zero: it was sent as it is. Of a
    /// rotated one `uncounted` and `filled` are places in what was sent, and so are the elements of `peers`: a value that did not
    /// count there is a share of many elements here.
    pub rotated_elems: u64,
    /// Why `auto` chose this schedule, when it is another one than before for this size; one line for people.
    pub choice: Option<String>,
}

impl DeliveryReport {
    /// Share of the elements that were expected in the reduce stage and did not arrive, 0 to 1. This is the
    /// share of gradient bytes lost on their way to this rank; results lost on their way back are in `filled`. A rank that reduces
    /// nothing, because others are the servers, tells the share of its own contribution that did not count there.
    #[must_use]
    pub fn lost_share(&self) -> f64 {
        match self.contributions_delivered() {
            (0, _) => 0.0,
            (expected, received) => (expected - received) as f64 / expected as f64,
        }
    }

    /// Elements of contributions that were expected, and those of them that arrived: here, or of this rank's own at its servers.
    #[must_use]
    pub fn contributions_delivered(&self) -> (u64, u64) {
        if self.peers.is_empty() && self.bytes_expected > 0 {
            let pushed = self.elems.max(self.rotated_elems);
            return (pushed, pushed - self.elems_uncounted());
        }
        let sum = |elems: fn(&PeerDelivery) -> u64| self.peers.iter().map(elems).sum();
        (sum(|peer| peer.elems_expected), sum(|peer| peer.elems_received))
    }

    /// Elements of this rank's contribution that did not count somewhere.
    #[must_use]
    pub fn elems_uncounted(&self) -> u64 {
        self.uncounted.iter().map(|range| range.end - range.start).sum()
    }

    /// Elements of the result that did not arrive here and were filled in, and elements of the result; both of a rotated one as it was
    /// sent.
    #[must_use]
    pub fn results_filled(&self) -> (u64, u64) {
        let filled = self.filled.iter().map(|range| range.end - range.start).sum();
        (filled, self.elems.max(self.rotated_elems))
    }

    /// Peers whose contributions a time limit closed, and not what had arrived.
    #[must_use]
    pub fn ended_by_time(&self) -> usize {
        let at_limit =
            |reason: CloseReason| self.peers.iter().filter(|peer| peer.closed_by == reason.name()).count();
        [CloseReason::SoftThreshold, CloseReason::EarlyTimeout, CloseReason::Deadline]
            .map(at_limit)
            .iter()
            .sum()
    }

    /// A transfer from a rank, whose packets are under way for `way` at least, has ended: a contribution or something to keep.
    pub(crate) fn add(
        &mut self,
        (from, way): (u32, Duration),
        receipt: &Receipt,
        elem_bytes: u64,
        is_contribution: bool,
        places: &mut Places,
    ) {
        self.bytes_received += receipt.received_bytes;
        let (peers, places) = match is_contribution {
            true => (&mut self.peers, &mut places.peers),
            false => (&mut self.sources, &mut places.sources),
        };
        let peer = places.entry(peers, from, || PeerDelivery::before(from, receipt));
        peer.way = way;
        peer.ended_at = receipt.began_at + receipt.elapsed;
        peer.elems_expected += receipt.total_bytes / elem_bytes;
        peer.elems_received += receipt.received_bytes / elem_bytes;
        peer.closed_by = stricter(peer.closed_by, receipt.reason.name());
        peer.waited_for_peer += receipt.waited_for_peer;
        peer.network_time += receipt.elapsed;
        let so_far = peer.deadline.unwrap_or_default();
        peer.deadline = receipt.deadline.map(|deadline| so_far.saturating_add(deadline));
    }

    /// Puts in order what was filled, and joins neighbours.
    pub(crate) fn join_filled(&mut self) {
        join(&mut self.filled);
    }

    /// Divides the time, puts ranges in order and joins neighbours.
    pub(crate) fn tidy(&mut self) {
        self.compute_wait = self.compute_wait.min(self.elapsed);
        self.network_wait = self.elapsed - self.compute_wait;
        join(&mut self.uncounted);
        self.join_filled();
        for peer in self.peers.iter_mut().chain(&mut self.sources) {
            // Of several transfers that were waited for at once, once.
            peer.waited_for_peer = peer.waited_for_peer.min(self.elapsed);
        }
        self.peers.sort_by_key(|peer| peer.rank);
        self.sources.sort_by_key(|peer| peer.rank);
    }
}

impl PeerDelivery {
    /// Of `rank`, before its first transfer is counted.
    fn before(rank: u32, receipt: &Receipt) -> Self {
        Self {
            rank,
            elems_received: 0,
            elems_expected: 0,
            closed_by: "all_arrived",
            waited_for_peer: Duration::ZERO,
            network_time: Duration::ZERO,
            deadline: None,
            called_at: receipt.called_at,
            way: Duration::ZERO,
            began_at: receipt.began_at,
            ended_at: receipt.began_at,
        }
    }
}

/// Where the entries of each rank are in a report that is being made: each transfer looks for one, and a search among all would take
/// as long as the transfer does in a large group.
#[derive(Debug, Default)]
pub(crate) struct Places {
    peers: PlacesOf,
    sources: PlacesOf,
    pub(crate) takings: PlacesOf,
}

/// Of one list: by rank, one more than the index; 0 where there is none.
#[derive(Debug, Default)]
pub(crate) struct PlacesOf(Vec<u32>);

impl PlacesOf {
    /// The entry of `rank` in `list`, made when it is its first.
    pub(crate) fn entry<'a, T>(
        &mut self,
        list: &'a mut Vec<T>,
        rank: u32,
        new: impl FnOnce() -> T,
    ) -> &'a mut T {
        let rank = rank as usize;
        if self.0.len() <= rank {
            self.0.resize(rank + 1, 0);
        }
        if self.0[rank] == 0 {
            list.push(new());
            self.0[rank] = list.len() as u32;
        }
        &mut list[self.0[rank] as usize - 1]
    }
}

fn join(ranges: &mut Vec<Range<u64>>) {
    ranges.sort_by_key(|range| range.start);
    ranges.dedup_by(|next, previous| {
        let joined = next.start <= previous.end;
        if joined {
            previous.end = previous.end.max(next.end);
        }
        joined
    });
}

/// Of two reasons the one that accepts less: of what came in several transfers it is that of the whole.
fn stricter(a: &'static str, b: &'static str) -> &'static str {
    // No reason at all accepts most.
    let place = |name| CloseReason::ALL.iter().position(|reason| reason.name() == name);
    if place(b) > place(a) {
        b
    } else {
        a
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adaptive::stage_end::tests::receipt;
    use gradwire_core::Timestamp;

    #[test]
    fn ranges_that_did_not_count_are_in_order_and_joined() {
        let mut report =
            DeliveryReport { uncounted: vec![8..9, 0..2, 2..4, 3..5, 7..8], ..Default::default() };
        report.tidy();
        assert_eq!(report.uncounted, vec![0..5, 7..9]);
    }

    #[test]
    fn stages_are_told_apart_and_waiting_for_compute_is_never_longer_than_the_whole() {
        let ms = Duration::from_millis;
        let mut report = DeliveryReport { elapsed: ms(10), compute_wait: ms(12), ..Default::default() };
        let contribution = |waited, received_bytes| Receipt {
            reason: CloseReason::BoundMet,
            received_bytes,
            total_bytes: 400,
            waited_for_peer: Duration::from_millis(waited),
            deadline: Some(Duration::from_millis(20)),
            ..receipt(Timestamp::ZERO, Duration::from_millis(1))
        };
        let (places, way) = (&mut Places::default(), ms(2));
        report.add((2, way), &contribution(3, 200), 4, true, places);
        report.add((1, way), &contribution(7, 400), 4, true, places);
        report.add((1, ms(1)), &contribution(9, 400), 4, false, places);
        report.add((1, ms(1)), &contribution(9, 400), 4, false, places);
        report.tidy();
        assert_eq!(report.sources[0].waited_for_peer, ms(10));
        let told: Vec<_> = report.peers.iter().map(|peer| (peer.rank, peer.elems_received)).collect();
        assert_eq!(told, [(1, 100), (2, 50)]);
        assert_eq!(
            report.sources.iter().map(|peer| (peer.rank, peer.closed_by)).collect::<Vec<_>>(),
            [(1, "bound_met")]
        );
        assert_eq!((report.compute_wait, report.network_wait), (ms(10), ms(0)));
        assert_eq!((report.peers[0].deadline, report.peers[0].way), (Some(ms(20)), way));
    }

    #[test]
    fn a_peer_some_of_whose_transfers_were_cut_short_has_not_arrived_in_full() {
        use CloseReason::{AllArrived, BoundMet, Deadline};
        let (mut report, mut places) = (DeliveryReport::default(), Places::default());
        for (from, reasons) in
            [(1, [Deadline, AllArrived]), (2, [AllArrived, BoundMet]), (3, [AllArrived; 2])]
        {
            for reason in reasons {
                let receipt = Receipt { reason, ..receipt(Timestamp::ZERO, Duration::ZERO) };
                let sender = (from, Duration::ZERO);
                report.add(sender, &receipt, 4, true, &mut places);
                report.add(sender, &receipt, 4, false, &mut places);
            }
        }
        for peers in [&report.peers, &report.sources] {
            let told: Vec<_> = peers.iter().map(|peer| peer.closed_by).collect();
            assert_eq!(told, ["deadline", "bound_met", "all_arrived"]);
        }
    }

    #[test]
    fn the_lost_share_is_about_the_reduce_stage() {
        let mut report = DeliveryReport { bytes_expected: 1000, bytes_received: 990, ..Default::default() };
        assert_eq!(report.lost_share(), 0.0);
        for (rank, expected, received) in [(1, 75, 50), (2, 25, 25)] {
            let peer = PeerDelivery::before(rank, &receipt(Timestamp::ZERO, Duration::ZERO));
            let counted = PeerDelivery { elems_expected: expected, elems_received: received, ..peer };
            report.peers.push(counted);
        }
        assert_eq!(report.lost_share(), 0.25);
        let uncounted = vec![0..10, 50..60];
        let worker = DeliveryReport { elems: 100, bytes_expected: 400, uncounted, ..Default::default() };
        let filled = DeliveryReport { filled: vec![3..5, 9..10], ..worker.clone() };
        assert_eq!((filled.results_filled(), filled.lost_share()), ((3, 100), 0.2));
        let rotated = DeliveryReport { rotated_elems: 128, ..filled };
        assert_eq!(rotated.results_filled(), (3, 128));
        assert_eq!(worker.lost_share(), 0.2, "its server has averaged what arrived there");
        assert_eq!(worker.contributions_delivered(), (100, 80));
        assert_eq!(DeliveryReport { rotated_elems: 200, ..worker }.lost_share(), 0.1);
    }
}
