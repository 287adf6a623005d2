//! One round trip, as a rate controller sees it.

use super::filters::rate_of;
use super::headroom::LossCount;
use crate::Timestamp;
use core::time::Duration;

/// What the present round trip has shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// When it began.
    pub(super) since: Timestamp,
    pub(super) losses: LossCount,
    pub(super) rate_max: u64,
    pub(super) rtt_min: Option<Duration>,
    /// The least with what the acknowledgement waited.
    pub(super) whole_min: Duration,
    pub(super) app_limited: bool,
}

impl Round {
    /// Takes a round-trip time, and what the acknowledgement waited on top of it.
    pub(super) fn on_rtt(&mut self, rtt: Duration, waited: Duration) {
        let whole = rtt + waited;
        self.whole_min = if self.rtt_min.is_some() { self.whole_min.min(whole) } else { whole };
        self.rtt_min = Some(self.rtt_min.map_or(rtt, |least| least.min(rtt)));
    }

    /// What it delivered, over its time.
    pub(super) fn average(&self, now: Timestamp) -> u64 {
        rate_of(self.losses.acked, now.since(self.since)).unwrap_or(u64::MAX)
    }
}
