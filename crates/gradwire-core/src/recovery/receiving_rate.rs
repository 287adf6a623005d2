//! Rate control from what the receiver gets (DLCP section 3.2.1).
//!
//! The flow starts at line rate. As soon as it sends more than twice what is received it halves its rate; from then
//! on the two are compared in each period: more than twice as much halves the rate, else it grows by 5 % of the line rate.
//! What the receiver asks for again, and new data after an idle time, set the rate to the line's again.
//!
//! ```text
//!   LINE RATE --rate > 2 x received--> CONGESTION AVOIDANCE: each period  rate > 2 x received: rate / 2
//!                                                                         else:                rate + 5 % of the line
//!                                                            repair or idle restart:           rate = the line's
//! ```
//!
//! The receiving rate is what acknowledgements newly name in a period, over its length. The cumulative count of bytes in
//! the acknowledgement would do on one path; with several it would credit one path with what came over another.
//!
//! What differs from the paper:
//! - It halves when the rate is *larger* than twice the receiving rate, in both states. The text has it the other way round in
//!   congestion avoidance, which would halve whenever all is well.
//! - Twice the receiving rate is up to one lost packet of two, which a bound of a few percent does not allow. So the flight
//!   is bounded as well: by what the receiving rate makes in the least round-trip time, and a few packets. What the rate
//!   exceeds the path by then waits at the sender instead of being dropped.
//! - The period is 200 us or one round trip, whichever is longer: in less, no change can show.
//! - Repairs and restarts reset the rate, not the state: that window stays, or each of them would begin with an overflow.

use super::filters::rate_of;
use super::headroom::{Headroom, LossCount};
use super::limits::START_LOSS_PERCENT;
use super::model::{PathModel, Round};
use super::share::DecidedRate;
use super::{AckSample, ControllerSettings, RateController};
use crate::Timestamp;
use core::time::Duration;

// claim: dlcp/receiving-rate
/// Follows the rate at which the receiver gets data; see the module.
#[derive(Debug)]
pub struct ReceivingRateController {
    model: PathModel,
    /// The rate that the flow starts with, or the largest that it ever got through.
    line_rate: u64,
    rate: u64,
    state: State,
    period: Period,
    /// Receiving rate of the last period.
    received: u64,
    decided: DecidedRate,
    /// Rounds in a row without a queue.
    free_rounds: u32,
    cwnd: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    LineRate,
    CongestionAvoidance,
}

/// What the rounds of the present period have shown.
#[derive(Clone, Copy, Debug, Default)]
struct Period {
    elapsed: Duration,
    losses: LossCount,
    rate_max: u64,
    app_limited: bool,
}

impl ReceivingRateController {
    /// Starts at line rate, with the first window divided by the incast.
    #[must_use]
    pub fn new(settings: &ControllerSettings) -> Self {
        let model = PathModel::new(settings, Headroom::of_few_in_step);
        let line_rate = settings.initial_rate.max(model.rate_min());
        Self {
            line_rate,
            rate: line_rate,
            cwnd: model.initial_cwnd(),
            model,
            state: State::LineRate,
            period: Period::default(),
            received: 0,
            decided: DecidedRate::default(),
            free_rounds: 0,
        }
    }

    fn end_round(&mut self, now: Timestamp, round: &Round) {
        self.period.elapsed += round.elapsed;
        self.period.losses.acked += round.losses.acked;
        self.period.losses.lost += round.losses.lost;
        self.period.rate_max = self.period.rate_max.max(round.rate_max);
        self.period.app_limited |= round.app_limited;
        let queued = round.rtt.is_none_or(|rtt| rtt - self.model.path.min().min(rtt) > self.queue_short());
        self.free_rounds = if queued { 0 } else { (self.free_rounds + 1).min(FREE_ROUNDS_MAX) };
        if self.period.elapsed >= PERIOD && !self.model.path.is_dipping() {
            let period = core::mem::take(&mut self.period);
            self.end_period(now, &period);
        }
    }

    fn end_period(&mut self, now: Timestamp, period: &Period) {
        if period.rate_max == 0 || period.app_limited && period.rate_max < self.received {
            return;
        }
        self.received = period.rate_max;
        let losses = period.losses;
        self.decided.on_round(self.received, losses);
        if self.state == State::LineRate {
            // The link may be faster than the rate to start with.
            self.rate = self.rate.max(self.received.saturating_mul(2));
        }
        self.line_rate = self.line_rate.max(self.received.saturating_add(self.received / 4));
        let too_fast = self.sending_rate() / DELTA > self.received;
        match self.state {
            State::LineRate if too_fast || losses.exceeds(START_LOSS_PERCENT) => {
                self.state = State::CongestionAvoidance;
                self.decided.reset(self.received);
                self.rate /= 2;
                self.model.look_soon(now);
            }
            State::CongestionAvoidance if too_fast => self.rate /= 2,
            State::CongestionAvoidance => {
                self.rate = self.rate.saturating_add(self.line_rate / STEP_OF).min(self.line_rate);
            }
            State::LineRate => {}
        }
        self.rate = self.rate.max(self.model.rate_min());
    }

    /// While the window still grows it is the window that decides how fast the flow sends.
    fn sending_rate(&self) -> u64 {
        match self.state {
            State::LineRate => rate_of(self.cwnd, self.model.path.min()).unwrap_or(self.rate).min(self.rate),
            State::CongestionAvoidance => self.rate,
        }
    }

    /// Less than half of what this flow alone keeps in the queue.
    fn queue_short(&self) -> Duration {
        let nanos =
            u128::from(self.model.queue_bytes() / 2) * 1_000_000_000 / u128::from(self.received.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    /// The longer there is no queue, the more the flow asks for. Where the share of the queue is a large part of the window
    /// it finds what is free without that.
    fn more(&self, window: u64) -> u64 {
        let queue = self.model.queue_bytes();
        let doublings = self.free_rounds.saturating_sub(FREE_ROUNDS_CALM);
        if doublings > 0 && window > 4 * queue {
            queue.saturating_mul(1 << doublings).min(window / 2)
        } else {
            0
        }
    }

    fn apply(&mut self, acked: u64) {
        self.cwnd = match self.state {
            _ if self.model.path.is_dipping() => self.model.cwnd_min(),
            State::LineRate => self.model.start_window(self.cwnd, acked, self.received, self.line_rate),
            State::CongestionAvoidance => {
                let window = self.model.window(self.decided.get());
                window.saturating_add(self.more(window))
            }
        };
    }
}

impl RateController for ReceivingRateController {
    fn on_ack(&mut self, sample: &AckSample) {
        if let Some(round) = self.model.on_ack(sample, self.received, self.cwnd) {
            self.end_round(sample.now, &round);
        }
        self.apply(sample.acked_bytes);
    }

    fn on_idle_restart(&mut self, now: Timestamp) {
        self.model.path.on_idle_restart(now);
        self.rate = self.line_rate;
        self.apply(0);
    }

    fn on_repair(&mut self) {
        self.rate = self.line_rate;
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
        self.received
    }
}

/// The paper's period.
const PERIOD: Duration = Duration::from_micros(200);
/// The paper's factor between sending and receiving rate.
const DELTA: u64 = 2;
/// The paper's additive increase: 5 % of the line rate.
const STEP_OF: u64 = 20;
/// Rounds without a queue before the window asks for more.
const FREE_ROUNDS_CALM: u32 = 4;
/// The most is 2^16 times the usual queue, and never more than half a window.
const FREE_ROUNDS_MAX: u32 = FREE_ROUNDS_CALM + 16;
