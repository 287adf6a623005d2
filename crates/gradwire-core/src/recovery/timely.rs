//! Rate control from the round-trip time and its gradient (MLT section 4.2.3, after TIMELY).
//!
//! Each round trip gives one delay, the least of its samples. While that is short, or falls, the rate grows by a step;
//! while it is too long, the rate shrinks in proportion to the excess; in between it stays. Loss is no signal at all.
//!
//! ```text
//!   LINE RATE --round trip > T_high, or a fifth is lost--> DELAY
//!   window doubles in each round trip                      rtt < T_low, or it falls:  rate + step
//!                                                          rtt > T_high:              rate * (1 - 0.8 (1 - T_high / rtt))
//! ```
//!
//! What differs from the paper, whose numbers are for one kind of network (100 Gbit/s, round trips of 24 us):
//! - T_low and T_high count from the least round-trip time, which the paper knew. They are at least what a few packets
//!   of this flow take: 125 us are not one packet at 100 Mbit/s. As a slower flow accepts a longer queue than a faster one,
//!   the rates of flows that share a queue become equal, which the gradient alone does not achieve.
//! - The step is what a packet more in each round trip makes, at most 40 Mbit/s, and it doubles while nothing stands
//!   against it: 40 Mbit/s are nearly half of a link of 100 Mbit/s.
//! - The rate changes once in each round trip instead of with each acknowledgement, from its least sample: what a
//!   descheduled thread adds to the others is no queue.
//! - The window bounds the flight to what the rate makes in T_high, so that a stale rate fills no buffer.

use super::filters::{bytes_in, rate_of};
use super::model::{PathModel, Round};
use super::{AckSample, ControllerSettings, RateController};
use crate::Timestamp;
use core::time::Duration;

// claim: mlt/rate-control
/// Follows the round-trip time; see the module.
#[derive(Debug)]
pub struct TimelyController {
    model: PathModel,
    rate: u64,
    starting: bool,
    /// Delay of the round before.
    previous: Option<Duration>,
    /// Rounds in a row that raised the rate.
    raises: u32,
    /// Largest delivery rate of the last round.
    delivered: u64,
    cwnd: u64,
}

impl TimelyController {
    /// Starts at line rate, with the first window divided by the incast.
    #[must_use]
    pub fn new(settings: &ControllerSettings) -> Self {
        let model = PathModel::new(settings);
        Self {
            rate: settings.initial_rate.max(model.rate_min()),
            cwnd: model.initial_cwnd(),
            model,
            starting: true,
            previous: None,
            raises: 0,
            delivered: 0,
        }
    }

    fn end_round(&mut self, now: Timestamp, round: &Round) {
        if round.rate_max > 0 {
            self.delivered = round.rate_max;
        }
        let Some(rtt) = round.rtt else { return };
        let queue = rtt.saturating_sub(self.model.path.min());
        if self.starting {
            self.end_starting_round(now, round, queue);
        } else if !self.model.path.is_dipping() {
            self.adjust(round, rtt, queue);
        }
        self.previous = Some(rtt);
    }

    /// Line rate may be more than the path has, and nobody knows the path: the first queue tells.
    fn end_starting_round(&mut self, now: Timestamp, round: &Round, queue: Duration) {
        // The link may also be faster than the rate to start with.
        self.rate = self.rate.max(self.delivered.saturating_mul(2));
        let full = self.delivered > 0 && queue > self.queue_max(self.delivered);
        if full || round.losses.exceeds(START_LOSS_PERCENT) {
            self.starting = false;
            self.rate = self.delivered.max(self.model.rate_min());
            self.model.look_soon(now);
        }
    }

    fn adjust(&mut self, round: &Round, rtt: Duration, queue: Duration) {
        let high = self.queue_max(self.rate);
        if queue > high {
            self.raises = 0;
            // rate * (1 - beta (1 - T_high / rtt))
            let over = per_mille(queue - high, rtt);
            self.rate = scaled(self.rate, UNIT - over * BETA / UNIT);
        } else if queue < high / QUEUE_RATIO || self.falls(rtt) {
            // What the application did not ask for proves nothing.
            if !round.app_limited {
                self.rate = self.rate.saturating_add(self.step(rtt)).min(self.rate_max());
                self.raises = (self.raises + 1).min(RAISES_MAX);
            }
        } else {
            self.raises = 0;
        }
        self.rate = self.rate.max(self.model.rate_min());
    }

    fn falls(&self, rtt: Duration) -> bool {
        self.previous.is_some_and(|previous| rtt < previous)
    }

    /// A packet more in each round trip, at most the paper's step; an eighth of a small rate, so that flows of less than
    /// a packet in each round trip do not leap; doubled again and again from the fifth round on that found room
    /// (TIMELY's hyperactive increase).
    fn step(&self, rtt: Duration) -> u64 {
        let packet = rate_of(self.model.packet_bytes, rtt).unwrap_or(STEP_MAX);
        let step = packet.min(STEP_MAX).min(self.rate / 8).max(1);
        step.saturating_mul(1 << self.raises.saturating_sub(RAISES_CALM))
    }

    /// The rate runs ahead of what is delivered at most by a quarter, or it would mean nothing when a queue comes.
    fn rate_max(&self) -> u64 {
        self.delivered.saturating_add(self.delivered / 4).max(self.model.rate_min())
    }

    /// The paper's T_high is for a flow that must find its share; the collective's word is worth more.
    fn queue_min(&self) -> Duration {
        if self.model.is_shared() {
            Duration::ZERO
        } else {
            QUEUE_MIN
        }
    }

    /// T_high without the path itself.
    fn queue_max(&self, rate: u64) -> Duration {
        let nanos = u128::from(self.model.queue_bytes()) * 1_000_000_000 / u128::from(rate.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).max(self.queue_min())
    }

    fn apply(&mut self, acked: u64) {
        self.cwnd = if self.model.path.is_dipping() {
            self.model.cwnd_min()
        } else if self.starting {
            self.model.start_window(self.cwnd, acked, self.delivered, self.rate)
        } else {
            self.model.window(self.rate).saturating_add(bytes_in(self.rate, self.queue_min()))
        };
    }
}

impl RateController for TimelyController {
    fn on_sent(&mut self, _now: Timestamp, _bytes: u64, _in_flight: u64) {}

    fn on_ack(&mut self, sample: &AckSample) {
        if let Some(round) = self.model.on_ack(sample, self.rate, self.cwnd) {
            self.end_round(sample.now, &round);
        }
        self.apply(sample.acked_bytes);
    }

    fn on_idle_restart(&mut self, now: Timestamp) {
        self.model.path.on_idle_restart(now);
        self.previous = None;
        self.raises = 0;
        self.apply(0);
    }

    fn on_incast(&mut self, flows: u32, paths: u32) {
        self.model.on_incast(flows, paths);
    }

    fn cwnd(&self) -> u64 {
        self.cwnd
    }

    fn pacing_rate(&self) -> u64 {
        self.rate
    }

    fn bandwidth(&self) -> u64 {
        self.delivered
    }
}

/// `part / whole` in thousandths, at most all.
fn per_mille(part: Duration, whole: Duration) -> u64 {
    let share = part.as_nanos() * u128::from(UNIT) / whole.as_nanos().max(1);
    u64::try_from(share).unwrap_or(UNIT).min(UNIT)
}

fn scaled(value: u64, per_mille: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(per_mille) / u128::from(UNIT)).unwrap_or(u64::MAX)
}

/// Shares are in thousandths.
const UNIT: u64 = 1_000;
/// Beta of the paper.
const BETA: u64 = 800;
/// T_high of the paper.
const QUEUE_MIN: Duration = Duration::from_micros(125);
/// Alpha of the paper, 40 Mbit/s, in bytes per second.
const STEP_MAX: u64 = 5_000_000;
/// T_high over T_low, both without the path: the paper's 125 us over 12.5 us would be half a packet of a flow's own
/// queue where T_high is five packets; two of them are what a burst of two makes.
const QUEUE_RATIO: u32 = 3;
/// Rounds that raise the rate by one step each before the steps double (TIMELY: five).
const RAISES_CALM: u32 = 5;
/// The largest step is 2^7 of the first.
const RAISES_MAX: u32 = RAISES_CALM + 7;
/// Random loss is a few percent at most; doubling into a full buffer loses up to half.
const START_LOSS_PERCENT: u64 = 20;
