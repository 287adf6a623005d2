//! Round-trip estimates, loss detection, pacing and rate control of one path.
//!
//! Called by [`crate::Connection`] for each packet sent and each acknowledgement; all of it is driven by the
//! caller's clock and owns no buffers that grow with time.

mod average;
mod backoff;
mod bottleneck;
mod by_queue;
#[cfg(test)]
mod by_queue_tests;
mod controller;
#[cfg(test)]
mod controller_tests;
mod empty_path;
mod filters;
mod flooded;
mod full_pipe;
mod headroom;
mod incast;
mod kin;
mod ledger;
mod ledger_ring;
#[cfg(test)]
mod ledger_tests;
mod limits;
#[cfg(test)]
mod link;
#[cfg(test)]
mod link_tests;
mod looks;
mod model;
mod others;
mod pacer;
#[cfg(test)]
mod paper_tests;
mod rate;
mod receiving_rate;
mod reordering;
#[cfg(test)]
mod rival;
mod round;
mod rtt;
mod share;
mod sustained;
mod timely;
mod turn;
mod way_back;

pub use bottleneck::BottleneckController;
pub use controller::Controller;
pub(crate) use filters::rate_of;
pub use ledger::{AckOutcome, Ledger, SentPacket};
pub use pacer::Pacer;
pub use rate::{AckSample, ControllerKind, ControllerSettings, RateController};
pub use receiving_rate::ReceivingRateController;
pub use rtt::RttEstimator;
pub(crate) use sustained::SustainedRate;
pub use timely::TimelyController;
pub use turn::Turn;
pub(crate) use way_back::WayBack;
