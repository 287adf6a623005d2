//! Spreads packets over time: a token bucket whose depth is one burst.

use crate::Timestamp;

/// Token bucket.
#[derive(Clone, Copy, Debug)]
pub struct Pacer;

impl Pacer {
    /// A full bucket.
    #[must_use]
    pub fn new(_now: Timestamp) -> Self {
        Self
    }

    /// Whether a packet may leave now. `rate` in bytes per second, `burst` in bytes.
    pub fn allows(&mut self, _now: Timestamp, _rate: u64, _burst: u64) -> bool {
        todo!()
    }

    /// Charges a packet.
    pub fn on_sent(&mut self, _bytes: u64) {
        todo!()
    }

    /// When the next burst may leave. The bucket lets a burst of `burst` bytes go at a time, so that the
    /// driver wakes up once for each burst and not once for each packet.
    #[must_use]
    pub fn next_send(&self, _rate: u64, _burst: u64) -> Timestamp {
        todo!()
    }
}
