//! The paths between two ranks, as one set.
//!
//! Packets are spread over them, but numbers, flight, round trips, rate and arrivals belong to each path alone
//! ([`crate::path::Path`]), so that a packet that another path overtakes never looks lost.

use crate::path::Path;
use crate::recovery::RateController;
use crate::{ConnectionConfig, ConnectionStats, Timestamp};
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{PathId, TransferId};

/// Path `i` is at index `i`; there is at least one.
#[derive(Debug)]
pub(crate) struct Paths(Vec<Path>);

impl Paths {
    pub(crate) fn new(config: &ConnectionConfig, now: Timestamp) -> Self {
        let mut paths = Vec::new();
        paths.push(Path::new(PathId(0), config, now));
        Self(paths)
    }

    /// The path with this id, if both ranks agreed on so many.
    pub(crate) fn get_mut(&mut self, id: PathId) -> Option<&mut Path> {
        self.0.get_mut(usize::from(id.0))
    }

    /// The path at an index that came out of this set.
    pub(crate) fn at(&self, index: usize) -> &Path {
        &self.0[index]
    }

    /// As [`Paths::at`], to change it.
    pub(crate) fn at_mut(&mut self, index: usize) -> &mut Path {
        &mut self.0[index]
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn contains(&self, id: PathId) -> bool {
        usize::from(id.0) < self.0.len()
    }

    /// There is nothing to send.
    pub(crate) fn on_starved(&mut self) {
        self.0.iter_mut().for_each(Path::on_starved);
    }

    /// The path that a data packet may take now.
    pub(crate) fn choose(&mut self, now: Timestamp) -> Option<usize> {
        self.0[0].may_send(now).then_some(0)
    }

    /// When a pacer lets the next packet go; `None` while acknowledgements must come first.
    pub(crate) fn sends_at(&self) -> Option<Timestamp> {
        self.0.iter().filter_map(Path::sends_at).min()
    }

    /// The path whose arrivals must be acknowledged now.
    pub(crate) fn ack_due(&self, now: Timestamp) -> Option<usize> {
        self.0.iter().position(|path| path.arrivals.is_due(now))
    }

    /// When arrivals must be acknowledged though nothing more comes.
    pub(crate) fn ack_due_at(&self) -> Option<Timestamp> {
        self.0.iter().filter_map(|path| path.arrivals.due_at()).min()
    }

    /// When [`Path::is_loss_due`] becomes true for some path.
    pub(crate) fn loss_time(&self) -> Option<Timestamp> {
        self.0.iter().filter_map(Path::loss_time).min()
    }

    /// A transfer is over.
    pub(crate) fn forget(&mut self, transfer: TransferId) {
        self.0.iter_mut().for_each(|path| path.ledger.forget(transfer));
    }

    /// How long to wait for an answer, and the least round trip, of the path that takes longest.
    pub(crate) fn probe_timeout(&self, ack_delay_max: Duration) -> (Duration, Duration) {
        let of = |path: &Path| (path.rtt.probe_timeout(ack_delay_max), path.rtt.min());
        self.0.iter().map(of).max().unwrap_or_default()
    }

    /// Adds the estimates.
    pub(crate) fn fill_stats(&self, stats: &mut ConnectionStats) {
        let sampled = self.0.iter().filter(|path| path.rtt.has_sample());
        if let Some(best) = sampled.min_by_key(|path| path.rtt.smoothed()) {
            stats.rtt_smoothed = best.rtt.smoothed();
            stats.rtt_min = best.rtt.min();
        }
        stats.bandwidth = self.0.iter().map(|path| path.controller.bandwidth()).sum();
        stats.cwnd = self.0.iter().map(|path| path.controller.cwnd()).sum();
    }
}
