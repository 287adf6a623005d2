//! Round-trip time estimates (RFC 9002 section 5).

use core::time::Duration;

/// Smoothed and least round-trip time.
#[derive(Clone, Copy, Debug, Default)]
pub struct RttEstimator;

impl RttEstimator {
    /// No sample yet; `smoothed` answers with `initial` until there is one.
    #[must_use]
    pub fn new(_initial: Duration) -> Self {
        Self
    }

    /// Takes a sample from which the peer's acknowledgement delay has been subtracted.
    pub fn on_sample(&mut self, _now: crate::Timestamp, _rtt: Duration) {
        todo!()
    }

    /// Smoothed round-trip time.
    #[must_use]
    pub fn smoothed(&self) -> Duration {
        todo!()
    }

    /// Least round-trip time over the last ten seconds.
    #[must_use]
    pub fn min(&self) -> Duration {
        todo!()
    }

    /// Latest sample.
    #[must_use]
    pub fn latest(&self) -> Duration {
        todo!()
    }

    /// Whether there was a sample.
    #[must_use]
    pub fn has_sample(&self) -> bool {
        todo!()
    }

    /// How long to wait for any answer before asking: smoothed + 4 * variation + the peer's longest
    /// acknowledgement delay.
    #[must_use]
    pub fn probe_timeout(&self, _ack_delay_max: Duration) -> Duration {
        todo!()
    }

    /// Time after which an overtaken packet is lost: 9/8 of the larger of smoothed and latest, at least
    /// the clock's granularity.
    #[must_use]
    pub fn loss_delay(&self) -> Duration {
        todo!()
    }
}
