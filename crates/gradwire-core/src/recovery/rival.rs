//! Another transport at the same bottleneck, for tests: what Linux's bbr keeps in flight and how fast it sends.
//!
//! Reduced to what decides how a link is shared: the largest delivery rate of ten round trips, the least round trip, the
//! cycle of gains, and a window of two bandwidth-delay products and three of its bursts, of a millisecond each. Losses
//! change nothing. It never looks for an empty path, as in Linux it does so only every ten seconds.

use super::filters::{bytes_in, MaxFilter, WindowedMin};
use super::{AckSample, RateController};
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct RivalController {
    packet_bytes: u64,
    bandwidth: MaxFilter,
    rtt: WindowedMin,
    /// Gain in thousandths, and how many rounds without growth the start has seen; `None` in steady state.
    start: Option<u32>,
    best: u64,
    phase: usize,
    phase_since: Timestamp,
}

impl RivalController {
    pub(super) fn new(packet_bytes: u64) -> Self {
        Self {
            packet_bytes,
            bandwidth: MaxFilter::default(),
            rtt: WindowedMin::default(),
            start: Some(0),
            best: 0,
            phase: 0,
            phase_since: Timestamp::ZERO,
        }
    }

    fn gain(&self) -> u64 {
        if self.start.is_some() {
            2_885
        } else {
            GAINS[self.phase]
        }
    }

    fn end_round(&mut self) {
        self.bandwidth.next_round();
        let Some(flat) = &mut self.start else { return };
        if self.bandwidth.max() > self.best * 5 / 4 {
            (self.best, *flat) = (self.bandwidth.max(), 0);
        } else {
            *flat += 1;
            if *flat == 3 {
                self.start = None;
            }
        }
    }
}

impl RateController for RivalController {
    fn on_ack(&mut self, sample: &AckSample) {
        if sample.round_ended {
            self.end_round();
        }
        if let Some(rtt) = sample.rtt {
            self.rtt.insert(sample.now, rtt);
        }
        if let Some(rate) = sample.delivery_rate {
            self.bandwidth.insert(rate);
        }
        if sample.now.since(self.phase_since) >= self.rtt.min().unwrap_or_default() {
            self.phase_since = sample.now;
            self.phase = (self.phase + 1) % GAINS.len();
        }
    }

    fn on_idle_restart(&mut self, _now: Timestamp) {}

    fn on_incast(&mut self, _flows: u32, _paths: u32) {}

    fn cwnd(&self) -> u64 {
        let gain = if self.start.is_some() { self.gain() } else { 2_000 };
        let bdp = bytes_in(self.bandwidth.max(), self.rtt.min().unwrap_or_default());
        let burst = bytes_in(self.bandwidth.max(), Duration::from_millis(1)).max(2 * self.packet_bytes);
        (bdp * gain / 1_000 + 3 * burst).max(10 * self.packet_bytes)
    }

    fn pacing_rate(&self) -> u64 {
        (self.bandwidth.max() * self.gain() / 1_000 * 99 / 100).max(10 * self.packet_bytes * 1_000)
    }

    fn bandwidth(&self) -> u64 {
        self.bandwidth.max()
    }
}

const GAINS: [u64; 8] = [1_250, 750, 1_000, 1_000, 1_000, 1_000, 1_000, 1_000];
