//! The one trait behind which every rate controller lives.

use crate::Timestamp;
use core::time::Duration;

/// What one acknowledgement taught, for the controller.
#[derive(Clone, Copy, Debug)]
pub struct AckSample {
    /// Now.
    pub now: Timestamp,
    /// Round-trip time, when this acknowledgement gave a sample.
    pub rtt: Option<Duration>,
    /// Bytes newly acknowledged.
    pub acked_bytes: u64,
    /// Bytes newly taken for lost.
    pub lost_bytes: u64,
    /// Bytes still in flight afterwards.
    pub in_flight: u64,
    /// Delivery rate over the newest acknowledged packet's lifetime, bytes per second.
    pub delivery_rate: Option<u64>,
    /// Whether that sample was limited by the application (a lower bound only).
    pub app_limited: bool,
    /// Whether a round trip has ended with this acknowledgement.
    pub round_ended: bool,
}

/// Decides how much may be in flight and how fast it may leave.
pub trait RateController: core::fmt::Debug + Send {
    /// A data packet left.
    fn on_sent(&mut self, now: Timestamp, bytes: u64, in_flight: u64);
    /// An acknowledgement arrived.
    fn on_ack(&mut self, sample: &AckSample);
    /// Data starts to flow again after an idle time.
    fn on_idle_restart(&mut self, now: Timestamp);
    /// Most bytes in flight.
    fn cwnd(&self) -> u64;
    /// Bytes per second at which packets leave.
    fn pacing_rate(&self) -> u64;
    /// Estimated bottleneck bandwidth, bytes per second; zero before the first estimate.
    fn bandwidth(&self) -> u64;
}
