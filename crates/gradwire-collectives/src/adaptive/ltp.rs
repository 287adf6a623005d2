//! LTP's loss-tolerant threshold (section III-B.1): how long a link needs for a transfer of one size.
//!
//! It begins each epoch at 1.5 times the round-trip propagation time and what the bytes take at the bottleneck's
//! bandwidth, and becomes the shortest time in which all of such a transfer arrived. Links do not share it. The
//! bandwidth is that which this rank measured as a sender on the same link, and its share in the incast: the
//! paper's sender puts its own into every packet.

use crate::policy::Link;
use std::collections::BTreeMap;
use std::time::Duration;

/// Thresholds by transfer size and peer. Sizes repeat, since the buckets of a model do.
#[derive(Debug, Default)]
pub(super) struct LinkThresholds {
    entries: BTreeMap<(u64, u32), Entry>,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    /// Transfers that have begun in this epoch.
    begun: u32,
    initial: Option<Duration>,
    shortest: Option<Duration>,
    used: u64,
}

impl Entry {
    fn threshold(&self) -> Option<Duration> {
        self.shortest.or(self.initial)
    }
}

impl LinkThresholds {
    /// A transfer begins. Its threshold; `None` until the link has been measured.
    pub(super) fn begins(&mut self, peer: u32, link: &Link, epoch: u32) -> Option<Duration> {
        self.uses += 1;
        let key = (link.bytes as u64, peer);
        if self.entries.len() >= ENTRIES_MAX && !self.entries.contains_key(&key) {
            self.forget_oldest();
        }
        let entry =
            self.entries.entry(key).or_insert(Entry { begun: 0, initial: None, shortest: None, used: 0 });
        if entry.begun >= epoch {
            (entry.begun, entry.initial, entry.shortest) = (0, None, None);
        }
        entry.initial = entry.initial.or_else(|| expected_time(link));
        entry.begun += 1;
        entry.used = self.uses;
        entry.threshold()
    }

    /// All of a transfer of `bytes` bytes arrived, in this time.
    pub(super) fn on_complete(&mut self, peer: u32, bytes: u64, elapsed: Duration) {
        if let Some(entry) = self.entries.get_mut(&(bytes, peer)) {
            entry.shortest = Some(entry.shortest.map_or(elapsed, |shortest| shortest.min(elapsed)));
        }
    }

    /// The largest threshold for transfers of `bytes` bytes; of links that have had none, the time to expect.
    pub(super) fn slowest(&self, bytes: usize, links: impl Iterator<Item = (u32, Link)>) -> Option<Duration> {
        let of = |(peer, link): (u32, Link)| match self.entries.get(&(bytes as u64, peer)) {
            Some(entry) => entry.threshold(),
            None => expected_time(&link),
        };
        links.filter_map(of).max()
    }

    fn forget_oldest(&mut self) {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.used).map(|(key, _)| *key);
        if let Some(key) = oldest {
            self.entries.remove(&key);
        }
    }
}

/// 1.5 RTprop + size / BtlBw.
// claim: ltp/early-close
fn expected_time(link: &Link) -> Option<Duration> {
    Some(link.transfer_time(1.0)?.saturating_add(link.stats.rtt_min * 3 / 2))
}

/// Buckets of a model times peers, far more than a job has.
const ENTRIES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::ConnectionStats;

    /// 1 MB at 100 MB/s shared by 2: 20 ms, and 1.5 round trips of 2 ms.
    const INITIAL: Duration = Duration::from_millis(23);

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
            links.on_complete(1, 1_000_000, ms(5));
        }
        assert_eq!(links.begins(1, &link(1_000_000), 3), Some(INITIAL));
        links.on_complete(1, 1_000_000, ms(9));
        assert_eq!(links.begins(1, &link(1_000_000), 3), Some(ms(9)));
    }

    #[test]
    fn the_slowest_link_is_the_largest_threshold_learned_or_expected() {
        let mut links = LinkThresholds::default();
        let all = || (1..4).map(|peer| (peer, link(1_000_000)));
        assert_eq!(links.slowest(1_000_000, all()), Some(INITIAL));
        for (peer, elapsed) in [(1, 10), (2, 50), (3, 12)] {
            links.begins(peer, &link(1_000_000), 10);
            links.on_complete(peer, 1_000_000, ms(elapsed));
        }
        assert_eq!(links.slowest(1_000_000, all()), Some(ms(50)));
    }

    #[test]
    fn a_job_of_ever_new_sizes_costs_bounded_memory() {
        let mut links = LinkThresholds::default();
        for bytes in 1..ENTRIES_MAX + 10 {
            links.begins(1, &link(bytes), 10);
            links.on_complete(1, bytes as u64, ms(1));
        }
        assert_eq!(links.entries.len(), ENTRIES_MAX);
        assert_eq!(links.begins(1, &link(ENTRIES_MAX), 10), Some(ms(1)), "the latest are kept");
    }
}
