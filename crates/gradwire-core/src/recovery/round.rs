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
    pub(super) app_limited: bool,
}

impl Round {
    /// What it delivered, over its time.
    pub(super) fn average(&self, now: Timestamp) -> u64 {
        rate_of(self.losses.acked, now.since(self.since)).unwrap_or(u64::MAX)
    }
}
