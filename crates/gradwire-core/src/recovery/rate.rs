//! The one trait behind which every rate controller lives.
//!
//! Called by [`crate::Connection`]'s path for each acknowledgement. Which controller serves is a setting of the
//! connection ([`ControllerKind`]); [`super::Controller`] holds any of them.

use super::Turn;
use crate::Timestamp;
use core::time::Duration;

/// What one acknowledgement taught, for the controller.
#[derive(Clone, Copy, Debug, Default)]
pub struct AckSample {
    /// Now.
    pub now: Timestamp,
    /// Round-trip time without what the acknowledgement waited, when this acknowledgement gave a sample.
    pub rtt: Option<Duration>,
    /// How long the acknowledgement waited in queues on its way back: those of the data that goes the other way.
    pub waited: Duration,
    /// Bytes newly acknowledged.
    pub acked_bytes: u64,
    /// Bytes newly taken for lost.
    pub lost_bytes: u64,
    /// Bytes still in flight afterwards.
    pub in_flight: u64,
    /// Delivery rate over the newest acknowledged packet's lifetime, bytes per second.
    pub delivery_rate: Option<u64>,
    /// Bytes that it was measured over.
    pub rate_bytes: u64,
    /// Whether that sample was limited by the application (a lower bound only).
    pub app_limited: bool,
    /// Whether a round trip has ended with this acknowledgement.
    pub round_ended: bool,
}

/// Decides how much may be in flight and how fast it may leave.
///
/// Holds for every implementation, whatever it is told: [`RateController::cwnd`] is at least two packets (or the loss
/// of one would silence the flow) and [`RateController::pacing_rate`] is above zero.
pub trait RateController: core::fmt::Debug + Send {
    /// An acknowledgement arrived.
    fn on_ack(&mut self, sample: &AckSample);
    /// Data starts to flow again after an idle time.
    fn on_idle_restart(&mut self, now: Timestamp);
    /// The receiver has asked for data again after it had all been sent once.
    fn on_repair(&mut self) {}
    /// The collective says that `flows` share the receiver from now on, `paths` of them this rank's own.
    fn on_incast(&mut self, flows: u32, paths: u32);
    /// Most bytes in flight.
    fn cwnd(&self) -> u64;
    /// Bytes per second at which packets leave.
    fn pacing_rate(&self) -> u64;
    /// Estimated bottleneck bandwidth, bytes per second; zero before the first estimate.
    fn bandwidth(&self) -> u64;
}

/// Which rate controller a connection uses, for its whole life.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum ControllerKind {
    /// Bottleneck bandwidth and round-trip time ([`super::BottleneckController`], LTP section III-D).
    #[default]
    Bottleneck,
    /// Round-trip time and its gradient ([`super::TimelyController`], MLT section 4.2.3).
    Timely,
    /// What the receiver gets against what is sent ([`super::ReceivingRateController`], DLCP section 3.2.1).
    ReceivingRate,
}

impl ControllerKind {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::Bottleneck, Self::Timely, Self::ReceivingRate];

    /// Its name in settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bottleneck => "bottleneck",
            Self::Timely => "timely",
            Self::ReceivingRate => "receiving_rate",
        }
    }
}

/// What every controller starts from.
#[derive(Clone, Copy, Debug)]
pub struct ControllerSettings {
    /// Bytes per second at which a fresh connection starts: the line rate, as far as it is known.
    pub initial_rate: u64,
    /// Flows to the same receiver at once, this rank's other paths among them; the first window is divided by it.
    pub flows: u32,
    /// So many of them are this rank's own, on other paths. Equal to `flows`: nothing is known of others.
    pub paths: u32,
    /// Its place among those that share the receiver.
    pub turn: Turn,
    /// Payload bytes of a full packet.
    pub packet_bytes: u64,
    /// Most bytes of a standing queue: what the receiver's socket can hold for this sender.
    pub standing_bytes: u64,
}

#[cfg(test)]
impl ControllerSettings {
    /// Of one flow at 1 Gbit/s that knows nothing of others.
    pub(super) const TEST: Self = Self {
        initial_rate: 125_000_000,
        flows: 1,
        paths: 1,
        turn: Turn::Any,
        packet_bytes: 1_408,
        standing_bytes: 1 << 20,
    };
}
