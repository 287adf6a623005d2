//! What the collectives of one group took and delivered, counted once for each when it ends.
//!
//! The network thread adds to it, and copies it out when somebody asks. Histograms have fixed bounds, as Prometheus and
//! OpenTelemetry want them; adding to one is a search in an array of 23. Nothing here is done for a packet.

use crate::stats::{CallStats, EndedBy, Histogram, StageStats, StragglerStats};
use gradwire_collectives::{stragglers_of, DeliveryReport, PeerDelivery, Straggler, StragglerCause};
use gradwire_core::Timestamp;
use std::collections::VecDeque;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) calls: Vec<CallStats>,
    pub(crate) failed: u64,
    /// By rank.
    pub(crate) stragglers: Vec<Blame>,
    records: VecDeque<CallRecord>,
    /// Entries of peers in all records.
    recorded_peers: usize,
}

/// What one rank was waited for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Blame {
    pub(crate) stats: StragglerStats,
    /// By cause: collectives overlap, and the same time is counted once.
    until: [Timestamp; StragglerCause::ALL.len()],
}

/// One collective that has ended, for a timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct CallRecord {
    /// Preset of its policy, `exact` without one.
    pub preset: &'static str,
    /// Epoch of the group under which it ended.
    pub epoch: u64,
    /// What it delivered; of `contributions` and `choice` nothing is kept.
    pub report: DeliveryReport,
}

impl Tally {
    pub(crate) fn new(ranks: usize) -> Self {
        Self { stragglers: vec![Blame::default(); ranks], ..Self::default() }
    }

    /// A collective ended well, under this epoch.
    pub(crate) fn add(&mut self, preset: &'static str, epoch: u64, report: &DeliveryReport) {
        self.entry(preset, &report.collective).add(report);
        for straggler in stragglers_of(report) {
            self.blame(&straggler);
        }
        self.record(preset, epoch, report);
    }

    /// A collective ended with an error.
    pub(crate) fn add_failure(&mut self) {
        self.failed += 1;
    }

    /// The latest calls, oldest first: so many collectives of the group's sequence, and as many others.
    pub(crate) fn latest(&self, calls: usize) -> Vec<&CallRecord> {
        let mut left = [calls; 2];
        let mut is_wanted = |record: &&CallRecord| {
            let left = &mut left[usize::from(record.report.in_sequence)];
            let is_wanted = *left > 0;
            *left = left.saturating_sub(1);
            is_wanted
        };
        let mut latest: Vec<_> = self.records.iter().rev().filter(&mut is_wanted).collect();
        latest.reverse();
        latest
    }

    fn entry(&mut self, preset: &'static str, collective: &str) -> &mut CallStats {
        let known =
            self.calls.iter().position(|calls| calls.preset == preset && calls.collective == collective);
        let index = known.unwrap_or_else(|| {
            self.calls.push(CallStats { collective: collective.to_owned(), preset, ..CallStats::default() });
            self.calls.len() - 1
        });
        &mut self.calls[index]
    }

    fn blame(&mut self, straggler: &Straggler) {
        let Some(Blame { stats, until }) = self.stragglers.get_mut(straggler.rank as usize) else { return };
        let cause = straggler.cause as usize;
        let waited = straggler.until.since(straggler.since.max(until[cause])).as_secs_f64();
        let is_new = straggler.since >= until[cause];
        until[cause] = until[cause].max(straggler.until);
        let (seconds, episodes) = match straggler.cause {
            StragglerCause::Compute => (&mut stats.compute_s, &mut stats.compute_episodes),
            StragglerCause::Network => (&mut stats.network_s, &mut stats.network_episodes),
            StragglerCause::Receiver => (&mut stats.receiver_s, &mut stats.receiver_episodes),
        };
        *seconds += waited;
        *episodes += u64::from(is_new);
    }

    fn record(&mut self, preset: &'static str, epoch: u64, report: &DeliveryReport) {
        let report = DeliveryReport { contributions: None, choice: None, ..report.clone() };
        self.recorded_peers += peers_in(&report);
        self.records.push_back(CallRecord { preset, epoch, report });
        while self.records.len() > RECORDS_MAX || self.recorded_peers > RECORDED_PEERS_MAX {
            let Some(oldest) = self.records.pop_front() else { return };
            self.recorded_peers -= peers_in(&oldest.report);
        }
    }
}

fn peers_in(report: &DeliveryReport) -> usize {
    report.peers.len()
        + report.sources.len()
        + report.takings.len()
        + report.uncounted.len()
        + report.filled.len()
}

impl CallStats {
    fn add(&mut self, report: &DeliveryReport) {
        self.calls += 1;
        self.elapsed_s.add(report.elapsed.as_secs_f64());
        self.compute_wait_s.add(report.compute_wait.as_secs_f64());
        self.network_wait_s.add(report.network_wait.as_secs_f64());
        self.bytes_expected += report.bytes_expected;
        self.bytes_received += report.bytes_received;
        self.bytes_sent += report.bytes_sent;
        self.bytes_retransmitted += report.bytes_retransmitted;
        self.elems += report.elems;
        self.elems_uncounted += elems(&report.uncounted);
        self.elems_filled += elems(&report.filled);
        self.rotated += u64::from(report.rotated_elems > 0);
        self.warm_ups += u64::from(report.warm_up);
        if !report.reduce_ended_by.is_empty() {
            self.lost_share.add(report.lost_share());
        }
        self.reduce.add(report.reduce_ended_by, &report.peers);
        self.gather.add(report.gather_ended_by, &report.sources);
    }
}

impl StageStats {
    fn add(&mut self, ended_by: &str, peers: &[PeerDelivery]) {
        self.elems_expected += peers.iter().map(|peer| peer.elems_expected).sum::<u64>();
        self.elems_received += peers.iter().map(|peer| peer.elems_received).sum::<u64>();
        self.ended_by.add(ended_by);
        if let Some(longest) = peers.iter().map(|peer| peer.network_time).max() {
            self.network_s.add(longest.as_secs_f64());
        }
        for peer in peers {
            self.transfers_ended_by.add(peer.closed_by);
            if let Some(deadline) = peer.deadline {
                self.deadline_s = deadline.as_secs_f64();
            }
        }
    }
}

impl EndedBy {
    fn add(&mut self, reason: &str) {
        match reason {
            "all_arrived" => self.all_arrived += 1,
            "bound_met" => self.bound_met += 1,
            "soft_threshold" => self.soft_threshold += 1,
            "early_timeout" => self.early_timeout += 1,
            "deadline" => self.deadline += 1,
            _ => {}
        }
    }
}

impl<const N: usize> Histogram<N> {
    /// Counts one value.
    pub(crate) fn add(&mut self, value: f64) {
        let bounds: &[f64] = Self::bounds();
        self.counts[bounds.partition_point(|bound| *bound < value)] += 1;
        self.sum += value;
    }
}

fn elems(ranges: &[std::ops::Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

/// A minute of a model with 30 buckets and a step each second.
const RECORDS_MAX: usize = 2048;
/// Some MB, however many ranks there are.
const RECORDED_PEERS_MAX: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_collectives::PeerTaking;
    use std::time::Duration;

    fn ms(time: u64) -> Timestamp {
        Timestamp::from_nanos(time * 1_000_000)
    }

    /// Rank 2 took its bytes so much later than rank 1 did.
    fn report(submitted: u64, late: u64) -> DeliveryReport {
        let taking = |rank, at| PeerTaking { rank, taken_at: ms(at) };
        DeliveryReport {
            collective: "all_reduce/transpose".to_owned(),
            submitted_at: ms(submitted),
            elapsed: Duration::from_millis(late),
            takings: vec![taking(1, submitted), taking(2, submitted + late)],
            reduce_ended_by: "deadline",
            ..DeliveryReport::default()
        }
    }

    #[test]
    fn overlapping_collectives_blame_the_same_time_once() {
        let mut tally = Tally::new(3);
        tally.add("auto", 0, &report(0, 100));
        tally.add("auto", 0, &report(50, 100));
        tally.add("auto", 0, &report(500, 10));
        let StragglerStats { receiver_s, receiver_episodes, .. } = tally.stragglers[2].stats;
        assert_eq!(((receiver_s * 1e3).round(), receiver_episodes), (160.0, 2));
    }

    #[test]
    fn collectives_are_counted_by_name_and_preset_and_the_latest_are_kept() {
        let mut tally = Tally::new(3);
        for number in 0..RECORDS_MAX as u64 + 5 {
            tally.add(if number % 2 == 0 { "auto" } else { "mlt" }, 0, &report(number, 1));
        }
        let calls: Vec<(&str, u64)> = tally.calls.iter().map(|calls| (calls.preset, calls.calls)).collect();
        assert_eq!(calls, [("auto", 1027), ("mlt", 1026)]);
        assert_eq!(tally.calls[0].reduce.ended_by.deadline, 1027);
        let latest = tally.latest(usize::MAX);
        assert_eq!(latest.len(), RECORDS_MAX);
        assert_eq!(latest[0].report.submitted_at, ms(5));
        assert_eq!(tally.recorded_peers, 2 * RECORDS_MAX);
    }

    #[test]
    fn of_the_latest_calls_collectives_and_others_are_chosen_apart() {
        let mut tally = Tally::new(3);
        for number in 0..40 {
            let in_sequence = number % 10 == 0;
            tally.add("exact", 7, &DeliveryReport { in_sequence, ..report(number, 1) });
        }
        let times = |calls| {
            let latest = tally.latest(calls).into_iter();
            latest.map(|record| record.report.submitted_at.as_nanos() / 1_000_000).collect::<Vec<_>>()
        };
        assert_eq!(times(3), [10, 20, 30, 37, 38, 39]);
        assert_eq!(times(usize::MAX).len(), 40);
        assert!(times(0).is_empty());
        assert!(tally.latest(2).iter().all(|record| record.epoch == 7));
    }

    #[test]
    fn a_histogram_counts_a_value_below_the_first_bound_that_is_not_below_it() {
        let mut histogram = Histogram::<{ Histogram::SECONDS }>::default();
        for value in [0.0, 1e-5, 1.1e-5, 1e9] {
            histogram.add(value);
        }
        assert_eq!(
            (histogram.counts[0], histogram.counts[1], histogram.counts[Histogram::SECONDS - 1]),
            (2, 1, 1)
        );
    }
}
