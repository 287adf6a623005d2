//! Round-trip estimates, loss detection, pacing and rate control of one path.
//!
//! Called by [`crate::Connection`] for each packet sent and each acknowledgement; all of it is driven by the
//! caller's clock and owns no buffers that grow with time.

mod bottleneck;
mod filters;
mod ledger;
mod ledger_ring;
mod pacer;
mod rate;
mod rtt;

pub use bottleneck::BottleneckController;
pub use ledger::{AckOutcome, Ledger, SentPacket};
pub use pacer::Pacer;
pub use rate::{AckSample, RateController};
pub use rtt::RttEstimator;
