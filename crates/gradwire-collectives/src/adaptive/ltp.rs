//! LTP's loss-tolerant threshold (section III-B.1): how long a link needs for a transfer of one size.
//!
//! It begins each epoch at 1.5 times the round-trip propagation time and what the bytes take at the bottleneck's
//! bandwidth, and becomes the shortest time in which all of such a transfer arrived. Links do not share it. The
//! bandwidth is that which this rank measured as a sender on the same link, and its share in the incast: the
//! paper's sender puts its own into every packet. It is never shorter than the paper's expected completion time at the best
//! rate that was seen in either direction: what a rank takes from its socket at once seems to have arrived in no time.

use crate::policy::Link;
use std::collections::{btree_map, BTreeMap};
use std::time::Duration;

/// Thresholds by transfer size and peer. Sizes repeat, since the buckets of a model do.
#[derive(Debug, Default)]
pub(super) struct LinkThresholds {
    sizes: BTreeMap<u64, Links>,
    uses: u64,
}

/// Those of one size. Every receive asks for the largest: looking at all links for it would take longer in a large group than
/// anything else that a receive costs.
#[derive(Debug, Default)]
struct Links {
    entries: BTreeMap<u32, Entry>,
    /// How many entries have each threshold.
    thresholds: BTreeMap<Duration, u32>,
    /// The largest time to expect of links that have had no transfer, as a call found it first: more of them have one with each
    /// receive of that call, which begins at the time to expect.
    unmeasured: Option<(u64, Option<Duration>)>,
    used: u64,
}

#[derive(Debug, Default)]
struct Entry {
    /// Transfers that have begun in this epoch.
    begun: u32,
    initial: Option<Duration>,
    shortest: Option<Duration>,
    /// No such transfer is shorter, whatever was seen.
    least: Duration,
}

impl Entry {
    fn threshold(&self) -> Option<Duration> {
        self.shortest.map(|shortest| shortest.max(self.least)).or(self.initial)
    }
}

impl LinkThresholds {
    /// A transfer begins. Its threshold; `None` until the link has been measured.
    pub(super) fn begins(&mut self, peer: u32, link: &Link, epoch: u32) -> Option<Duration> {
        self.uses += 1;
        let bytes = link.bytes as u64;
        if self.sizes.len() >= SIZES_MAX && !self.sizes.contains_key(&bytes) {
            self.forget_oldest();
        }
        let links = self.sizes.entry(bytes).or_default();
        links.used = self.uses;
        links.change(peer, |entry| {
            if entry.begun >= epoch {
                *entry = Entry::default();
            }
            entry.initial = entry.initial.or_else(|| expected_time(link));
            entry.least = least_time(link);
            entry.begun += 1;
        })
    }

    /// All of a transfer of `bytes` bytes arrived, in this time.
    pub(super) fn on_complete(&mut self, peer: u32, bytes: u64, elapsed: Duration) {
        let links = self.sizes.get_mut(&bytes).filter(|links| links.entries.contains_key(&peer));
        if let Some(links) = links {
            links.change(peer, |entry| {
                entry.shortest = Some(entry.shortest.map_or(elapsed, |shortest| shortest.min(elapsed)));
            });
        }
    }

    /// The largest threshold for transfers of `bytes` bytes, of which one is part of the call of this number; of links that have had
    /// none, the time to expect.
    pub(super) fn slowest(
        &mut self,
        bytes: usize,
        call: u64,
        links: impl ExactSizeIterator<Item = (u32, Link)>,
    ) -> Option<Duration> {
        let of_size = self.sizes.entry(bytes as u64).or_default();
        let learned = of_size.thresholds.last_key_value().map(|(threshold, _)| *threshold);
        if of_size.entries.len() >= links.len() {
            return learned;
        }
        learned.max(of_size.unmeasured(call, links))
    }

    fn forget_oldest(&mut self) {
        let oldest = self.sizes.iter().min_by_key(|(_, links)| links.used).map(|(bytes, _)| *bytes);
        if let Some(bytes) = oldest {
            self.sizes.remove(&bytes);
        }
    }
}

impl Links {
    /// Changes the entry of a peer, which is new if there was none. Its threshold.
    fn change(&mut self, peer: u32, change: impl FnOnce(&mut Entry)) -> Option<Duration> {
        let entry = self.entries.entry(peer).or_default();
        let before = entry.threshold();
        change(entry);
        let after = entry.threshold();
        if let Some(before) = before {
            if let btree_map::Entry::Occupied(mut count) = self.thresholds.entry(before) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                }
            }
        }
        if let Some(after) = after {
            *self.thresholds.entry(after).or_default() += 1;
        }
        after
    }

    fn unmeasured(&mut self, call: u64, links: impl Iterator<Item = (u32, Link)>) -> Option<Duration> {
        if let Some((_, slowest)) = self.unmeasured.filter(|(of, _)| *of == call) {
            return slowest;
        }
        let have_none = links.filter(|(peer, _)| !self.entries.contains_key(peer));
        let slowest = have_none.filter_map(|(_, link)| expected_time(&link)).max();
        self.unmeasured = Some((call, slowest));
        slowest
    }
}

/// 1.5 RTprop + size / BtlBw.
// claim: ltp/early-close
fn expected_time(link: &Link) -> Option<Duration> {
    Some(link.transfer_time(1.0)?.saturating_add(link.stats.rtt_min * 3 / 2))
}

/// RTprop + size / BtlBw, the paper's expected completion time, with the link to itself.
fn least_time(link: &Link) -> Duration {
    link.shortest_time().saturating_add(link.stats.rtt_min)
}

/// Sizes of a model's transfers, which its buckets have two of each: far more than a job has.
const SIZES_MAX: usize = 256;

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::ConnectionStats;

    /// 1 MB at 100 MB/s shared by 2: 20 ms, and 1.5 round trips of 2 ms.
    const INITIAL: Duration = Duration::from_millis(23);
    /// The same with the link to itself: 10 ms and a round trip.
    const LEAST: Duration = Duration::from_millis(12);

    fn link(bytes: usize) -> Link {
        let rtt = Duration::from_millis(2);
        let stats = ConnectionStats {
            bandwidth: 100_000_000,
            rtt_min: rtt,
            rtt_smoothed: rtt * 2,
            ..Default::default()
        };
        Link { stats, bytes, incast: 2 }
    }

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    // test of: ltp/early-close
    #[test]
    fn the_threshold_begins_at_one_and_a_half_round_trips_and_the_transfer_time() {
        let mut links = LinkThresholds::default();
        assert_eq!(links.begins(1, &link(1_000_000), 10), Some(INITIAL));
        let unmeasured = Link { stats: ConnectionStats::default(), ..link(1_000_000) };
        assert_eq!(links.begins(2, &unmeasured, 10), None, "an unmeasured link waits for everything");
        assert_eq!(links.begins(2, &link(1_000_000), 10), Some(INITIAL), "measured within the epoch");
    }

    // test of: ltp/early-close
    #[test]
    fn the_shortest_complete_transfer_of_the_epoch_takes_its_place() {
        let mut links = LinkThresholds::default();
        links.begins(1, &link(1_000_000), 10);
        for (elapsed, threshold) in [(40, 40), (18, 18), (30, 18)] {
            links.on_complete(1, 1_000_000, ms(elapsed));
            assert_eq!(links.begins(1, &link(1_000_000), 10), Some(ms(threshold)));
        }
        assert_eq!(links.begins(1, &link(500_000), 10), Some(ms(13)), "another size is another flow");
        assert_eq!(links.begins(2, &link(1_000_000), 10), Some(INITIAL), "another link is independent");
    }

    // test of: ltp/early-close
    #[test]
    fn each_epoch_learns_anew() {
        let mut links = LinkThresholds::default();
        for _ in 0..3 {
            links.begins(1, &link(1_000_000), 3);
            links.on_complete(1, 1_000_000, ms(15));
        }
        assert_eq!(links.begins(1, &link(1_000_000), 3), Some(INITIAL));
        links.on_complete(1, 1_000_000, ms(19));
        assert_eq!(links.begins(1, &link(1_000_000), 3), Some(ms(19)));
    }

    // test of: ltp/early-close
    #[test]
    fn what_was_taken_from_the_socket_at_once_makes_no_threshold_shorter_than_the_link_can_be() {
        let mut links = LinkThresholds::default();
        links.begins(1, &link(1_000_000), 10);
        links.on_complete(1, 1_000_000, ms(0));
        assert_eq!(links.begins(1, &link(1_000_000), 10), Some(LEAST));
        let all = std::iter::once((1, link(1_000_000)));
        assert_eq!(links.slowest(1_000_000, 0, all), Some(LEAST), "nor any deadline");
        let mut burst = link(1_000_000);
        burst.stats.reception_rate = 1_000_000_000;
        assert_eq!(links.begins(1, &burst, 10), Some(LEAST), "nor does the rate of what was taken so");
    }

    #[test]
    fn the_slowest_link_is_the_largest_threshold_learned_or_expected() {
        let mut links = LinkThresholds::default();
        let all = || (1..4).map(|peer| (peer, link(1_000_000)));
        assert_eq!(links.slowest(1_000_000, 0, all()), Some(INITIAL));
        for (peer, elapsed) in [(1, 14), (2, 50), (3, 16)] {
            links.begins(peer, &link(1_000_000), 10);
            links.on_complete(peer, 1_000_000, ms(elapsed));
            // The others are expected to take as long as before.
            let slowest = if peer == 3 { ms(50) } else { INITIAL.max(ms(elapsed)) };
            assert_eq!(links.slowest(1_000_000, 1, all()), Some(slowest), "peer {peer}");
        }
        links.on_complete(2, 1_000_000, ms(15));
        assert_eq!(links.slowest(1_000_000, 2, all()), Some(ms(16)), "the largest one has become shorter");
    }

    #[test]
    fn the_slowest_link_is_found_without_asking_all_of_a_large_group_for_each_transfer() {
        let (mut links, asked) = (LinkThresholds::default(), std::cell::Cell::new(0));
        let all = || {
            let of = |peer| {
                asked.set(asked.get() + 1);
                (peer, link(1_000_000))
            };
            (0..1000).map(of)
        };
        for call in 0..3 {
            for peer in 0..1000 {
                links.begins(peer, &link(1_000_000), 10);
                assert_eq!(links.slowest(1_000_000, call, all()), Some(INITIAL));
            }
        }
        assert_eq!(asked.get(), 1000, "once, before each of them had a transfer");
    }

    #[test]
    fn sizes_of_a_model_are_kept_for_every_peer_of_a_large_group() {
        let mut links = LinkThresholds::default();
        for bytes in (1..41).map(|size| size * 1408) {
            for peer in 0..1000 {
                links.begins(peer, &link(bytes), 10);
                links.on_complete(peer, bytes as u64, ms(3));
            }
        }
        assert_eq!(links.begins(0, &link(1408), 10), Some(ms(3)));
    }

    #[test]
    fn a_job_of_ever_new_sizes_costs_bounded_memory() {
        let mut links = LinkThresholds::default();
        for bytes in 1..SIZES_MAX + 10 {
            links.begins(1, &link(bytes), 10);
            links.on_complete(1, bytes as u64, ms(3));
        }
        assert_eq!(links.sizes.len(), SIZES_MAX);
        assert_eq!(links.begins(1, &link(SIZES_MAX), 10), Some(ms(3)), "the latest are kept");
    }
}
