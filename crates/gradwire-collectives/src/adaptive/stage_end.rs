//! How a stage of an all-reduce ended on this rank: its transfers taken together.

use gradwire_core::{CloseReason, Receipt, Timestamp};
use std::time::Duration;

/// See the module's documentation.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct StageEnd {
    /// Longest time of a transfer, from its first packet to its end.
    longest: Duration,
    /// Spans of time in which a transfer was under way, disjoint, in order.
    spans: Vec<(Timestamp, Timestamp)>,
    /// Bytes that arrived.
    pub(crate) received: u64,
    /// Bytes of all transfers; zero: the rank receives nothing in this stage.
    pub(crate) total: u64,
    /// What ended the wait, where that differed the last to be given up for.
    pub(crate) reason: CloseReason,
    /// Transfers.
    count: u32,
    /// Something was there before this rank called, so that the times are not what the network took.
    was_early: bool,
}

impl StageEnd {
    /// A stage of which nothing has ended yet.
    pub(crate) const NOTHING: Self = Self {
        longest: Duration::ZERO,
        spans: Vec::new(),
        received: 0,
        total: 0,
        reason: CloseReason::AllArrived,
        count: 0,
        was_early: false,
    };

    /// Adds a transfer; they come in the order in which they end.
    pub(crate) fn add(&mut self, receipt: &Receipt) {
        self.longest = self.longest.max(receipt.elapsed);
        self.add_span(receipt.began_at, receipt.began_at + receipt.elapsed);
        self.received += receipt.received_bytes;
        self.total += receipt.total_bytes;
        self.count += 1;
        self.was_early |= receipt.waited_for_peer.is_zero();
        self.reason = self.reason.max(receipt.reason);
    }

    fn add_span(&mut self, mut begin: Timestamp, end: Timestamp) {
        while let Some(last) = self.spans.last().filter(|last| last.1 >= begin) {
            begin = begin.min(last.0);
            self.spans.pop();
        }
        self.spans.push((begin, end));
    }

    /// How long this rank was receiving: the time in which at least one transfer was under way. What it waited for a sender
    /// that still computed is left out.
    pub(crate) fn duration(&self) -> Duration {
        self.spans.iter().map(|(begin, end)| end.since(*begin)).sum()
    }

    /// Bytes per second that this rank received while so many ranks sent to it at once; zero when that is not known. No more than it
    /// received while anything was under way: of ranks that call one after the other no two send at once.
    pub(crate) fn rate(&self, senders: u32) -> u64 {
        if self.was_early || self.count == 0 || self.longest < MEASURABLE {
            return 0;
        }
        let at_once = self.received as f64 / f64::from(self.count) * f64::from(senders.min(self.count));
        let at_most = self.received as f64 / self.duration().as_secs_f64();
        (at_once / self.longest.as_secs_f64()).min(at_most) as u64
    }
}

/// A shorter time is that of timers and of lumps of packets.
const MEASURABLE: Duration = Duration::from_millis(1);

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use gradwire_core::TransferId;

    fn ms(milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
    }

    /// Of a megabyte that arrived completely, its first packet a millisecond after the call.
    pub(crate) fn receipt(began_at: Timestamp, elapsed: Duration) -> Receipt {
        Receipt {
            transfer: TransferId::collective(0, 0),
            reason: CloseReason::AllArrived,
            received_bytes: 1_000_000,
            total_bytes: 1_000_000,
            waited_for_peer: ms(1),
            called_at: None,
            began_at,
            elapsed,
            deadline: None,
            missing: Vec::new(),
        }
    }

    /// Transfers that began and ended at these milliseconds.
    fn stage_of(spans: &[(u64, u64)]) -> StageEnd {
        let mut stage = StageEnd::NOTHING;
        for (begin, end) in spans {
            stage.add(&receipt(Timestamp::ZERO + ms(*begin), ms(end - begin)));
        }
        stage
    }

    // test of: ultima/t-b
    #[test]
    fn a_stage_lasts_while_something_is_under_way_and_not_while_a_sender_computes() {
        assert_eq!(StageEnd::NOTHING.duration(), ms(0));
        assert_eq!(stage_of(&[(0, 10), (10, 30), (30, 60)]).duration(), ms(60), "one after the other");
        assert_eq!(stage_of(&[(0, 40), (10, 50), (0, 60)]).duration(), ms(60), "all at once");
        assert_eq!(stage_of(&[(0, 10), (500, 510)]).duration(), ms(20), "the second called late");
        assert_eq!(stage_of(&[(0, 10), (20, 30), (5, 40)]).duration(), ms(40), "the last bridges a gap");
    }

    #[test]
    fn a_stage_tells_the_rate_at_which_a_rank_received() {
        assert_eq!(StageEnd::NOTHING.rate(3), 0);
        let mut stage = stage_of(&[(0, 250), (0, 300), (100, 300)]);
        assert_eq!(stage.rate(3), 10_000_000, "three at once took 300 ms");
        assert_eq!(stage.rate(1), 3_333_333, "one after the other: the slowest of three steps");
        let late = stage_of(&[(0, 100), (500, 600), (1000, 1100)]);
        assert_eq!(late.rate(3), 10_000_000, "two called late: each had the link to itself");
        stage.add(&Receipt { waited_for_peer: ms(0), ..receipt(Timestamp::ZERO + ms(300), ms(1)) });
        assert_eq!(stage.rate(3), 0, "a part was there before it was asked for");
    }
}
