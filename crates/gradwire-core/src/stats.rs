//! Counters of one connection and of its paths.

use crate::TagStats;
use core::time::Duration;

/// Counters and estimates of one connection; counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ConnectionStats {
    /// Data packets sent, retransmissions included.
    pub packets_sent: u64,
    /// Payload bytes sent, retransmissions included.
    pub bytes_sent: u64,
    /// Data packets sent again.
    pub packets_retransmitted: u64,
    /// Data packets that the sender took for lost.
    pub packets_lost: u64,
    /// Data packets that arrived and counted.
    pub packets_received: u64,
    /// Payload bytes that arrived and counted.
    pub bytes_received: u64,
    /// Data packets that arrived again.
    pub packets_duplicate: u64,
    /// Datagrams dropped for any other reason.
    pub packets_dropped: u64,
    /// Data packets that the peer has sent so far, judged by the numbers of those that came.
    pub packets_numbered: u64,
    /// Of these, packets that came, used or not: the rest is what the network lost.
    pub packets_arrived: u64,
    /// Control packets sent.
    pub control_sent: u64,
    /// Probes sent because nothing was heard.
    pub probes_sent: u64,
    /// Smoothed round-trip time; zero before the first sample.
    pub rtt_smoothed: Duration,
    /// Least round-trip time.
    pub rtt_min: Duration,
    /// Estimated bottleneck bandwidth, bytes per second.
    pub bandwidth: u64,
    /// Best rate of the last eight times of 40 ms in which something was in flight, bytes per second; zero before the first, of any path.
    pub sustained_rate: u64,
    /// Best rate at which the last eight first passes of more than a few packets came from the peer, bytes per second; zero
    /// before the first.
    pub reception_rate: u64,
    /// The same of the last eight of two packets to those few: the link's own rate at most.
    pub reception_rate_short: u64,
    /// Congestion window, bytes.
    pub cwnd: u64,
    /// Classes, importance and congestion marks.
    pub tags: TagStats,
}

/// Counters and estimates of one path of a connection; counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PathStats {
    /// Which one.
    pub path: u8,
    /// Data packets sent, copies included.
    pub packets_sent: u64,
    /// Of these, copies of packets that went over another path too, to see whether this one has healed.
    pub copies_sent: u64,
    /// Data packets that the sender took for lost, copies included.
    pub packets_lost: u64,
    /// Smoothed round-trip time; zero before the first sample.
    pub rtt_smoothed: Duration,
    /// Every sample of it.
    pub round_trips: RoundTrips,
    /// Share of the last data packets (about a thousand, without copies) that took this path, 0 to 1.
    pub share: f32,
    /// Whether it carries data: it is not much worse than the others.
    pub trusted: bool,
}

/// Round trips by how long they took: `counts[i]` longer than [`RoundTrips::bound`] `i - 1` and no longer than bound `i`; the last
/// one is above all bounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundTrips {
    /// One more than there are bounds.
    pub counts: [u64; Self::BUCKETS],
    /// Of all of them.
    pub sum: Duration,
}

impl RoundTrips {
    /// Counts of a histogram.
    pub const BUCKETS: usize = 24;
    const FIRST_US: u64 = 10;

    /// The longest that `counts[bucket]` counts: 10 us doubled so often.
    #[must_use]
    pub const fn bound(bucket: usize) -> Duration {
        Duration::from_micros(Self::FIRST_US << bucket)
    }

    /// Counts a sample, which is a number of whole microseconds.
    pub(crate) fn add(&mut self, rtt: Duration) {
        let firsts = (rtt.as_micros() as u64).div_ceil(Self::FIRST_US);
        let doublings = u64::BITS - firsts.saturating_sub(1).leading_zeros();
        self.counts[(doublings as usize).min(Self::BUCKETS - 1)] += 1;
        self.sum += rtt;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_trip_counts_below_the_first_bound_that_it_does_not_exceed() {
        for us in (1..3_000).chain([u64::from(u32::MAX)]) {
            let rtt = Duration::from_micros(us);
            let mut trips = RoundTrips::default();
            trips.add(rtt);
            let bucket = (0..RoundTrips::BUCKETS - 1).find(|bucket| rtt <= RoundTrips::bound(*bucket));
            assert_eq!(trips.counts[bucket.unwrap_or(RoundTrips::BUCKETS - 1)], 1, "{us} us");
            assert_eq!((trips.counts.iter().sum::<u64>(), trips.sum), (1, rtt));
        }
    }
}
