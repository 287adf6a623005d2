//! Bottleneck-bandwidth and round-trip based rate control (LTP section III-D, after BBR).

use super::{AckSample, RateController};
use crate::Timestamp;

/// Paces at the estimated bottleneck bandwidth and keeps about two bandwidth-delay products in flight.
/// Loss alone never slows it down.
#[derive(Debug)]
pub struct BottleneckController;

impl BottleneckController {
    /// Starts at `initial_rate` bytes per second with an initial window of ten packets divided by `incast`.
    /// `standing_bytes` is added to the window: what the receiver's socket can hold.
    #[must_use]
    pub fn new(_initial_rate: u64, _incast: u32, _packet_bytes: u64, _standing_bytes: u64) -> Self {
        Self
    }
}

impl RateController for BottleneckController {
    fn on_sent(&mut self, _now: Timestamp, _bytes: u64, _in_flight: u64) {
        todo!()
    }
    fn on_ack(&mut self, _sample: &AckSample) {
        todo!()
    }
    fn on_idle_restart(&mut self, _now: Timestamp) {
        todo!()
    }
    fn cwnd(&self) -> u64 {
        todo!()
    }
    fn pacing_rate(&self) -> u64 {
        todo!()
    }
    fn bandwidth(&self) -> u64 {
        todo!()
    }
}
