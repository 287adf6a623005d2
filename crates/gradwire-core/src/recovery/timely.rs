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
//!   of this flow take (three to twelve by the number of senders, ten where nobody knows it, a third of them for T_low): 125 us are one
//!   packet at 100 Mbit/s.
//!   Where the collective has said how many share the receiver, they are that alone.
//! - Above T_high the rate is cut even while the round trip falls, where the paper's first rule raises it: one draining queue would
//!   let all of its flows grow at once. As a slower flow accepts a longer queue than a faster one,
//!   the rates of flows that share a queue become equal, which the gradient alone does not achieve.
//! - A cut leaves three quarters of what is delivered. Its round trip is that of packets which left before the last cut.
//! - The step is what a packet more in each round trip makes, at most 40 Mbit/s, and it doubles while nothing stands
//!   against it: 40 Mbit/s are nearly half of a link of 100 Mbit/s.
//! - The rate changes once in each round trip instead of with each acknowledgement, from its least sample: what a
//!   descheduled thread adds to the others is no queue.
//! - The window bounds the flight to what the rate makes in T_high, so that a stale rate fills no buffer.

use super::filters::{bytes_in, rate_of};
use super::headroom::Headroom;
use super::limits::{gain, DIP_ROUNDS, START_LOSS_PERCENT, UNIT};
use super::model::{PathModel, Round};
use super::{AckSample, ControllerSettings, RateController};
use crate::Timestamp;
use core::time::Duration;

/// The paper's numbers; the default is what it names.
#[derive(Clone, Copy, Debug)]
struct Parameters {
    /// T_low: a shorter queue is none.
    queue_low: Duration,
    /// T_high: a longer queue slows the flow down.
    queue_high: Duration,
    /// Alpha, bytes per second.
    step: u64,
    /// Beta, in thousandths.
    beta: u64,
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            queue_low: Duration::from_nanos(12_500),
            queue_high: Duration::from_micros(125),
            // 40 Mbit/s.
            step: 5_000_000,
            beta: 800,
        }
    }
}

// claim: mlt/rate-control
/// Follows the round-trip time; see the module.
#[derive(Debug)]
pub struct TimelyController {
    model: PathModel,
    parameters: Parameters,
    rate: u64,
    starting: bool,
    /// Delay of the round before.
    previous: Option<Duration>,
    /// Rounds in a row that raised the rate.
    raises: u32,
    /// Largest delivery rate of the last round.
    delivered: u64,
    /// Rounds whose samples a dip still holds down.
    held_down: u32,
    cwnd: u64,
}

impl TimelyController {
    /// Starts at line rate, with the first window divided by the incast.
    #[must_use]
    pub fn new(settings: &ControllerSettings) -> Self {
        let model = PathModel::new(settings, Headroom::of_few);
        Self {
            rate: settings.initial_rate.max(model.rate_min()),
            cwnd: model.initial_cwnd(),
            model,
            parameters: Parameters::default(),
            starting: true,
            previous: None,
            raises: 0,
            delivered: 0,
            held_down: 0,
        }
    }

    fn end_round(&mut self, now: Timestamp, round: &Round) {
        self.held_down =
            if self.model.path.is_dipping() { DIP_ROUNDS } else { self.held_down.saturating_sub(1) };
        // What the application did not ask for could not be delivered.
        let idle = round.app_limited && round.rate_max < self.delivered;
        if round.rate_max > 0 && !idle && (self.starting || self.held_down == 0) {
            self.delivered = round.rate_max;
        }
        let Some(rtt) = round.rtt else { return };
        let queue = rtt.saturating_sub(self.model.path.min());
        if self.starting {
            self.end_starting_round(now, round, queue);
        } else if self.held_down == 0 {
            self.adjust(round, rtt, queue);
        }
        self.previous = Some(rtt);
    }

    /// Line rate may be more than the path has, and nobody knows the path: the first queue tells.
    fn end_starting_round(&mut self, now: Timestamp, round: &Round, queue: Duration) {
        // The link may also be faster than the rate to start with.
        self.rate = self.rate.max(self.delivered.saturating_mul(2));
        let full = self.delivered > 0 && queue > self.queue_max(self.delivered);
        if full || self.overflows(round) {
            self.starting = false;
            self.rate = self.delivered.max(self.model.rate_min());
            self.model.look_soon(now);
        }
    }

    /// Known senders start within a buffer that they share, with two packets each where they are many: one of these that a switch
    /// drops, because others are more important, would tell of a path that carries next to nothing.
    fn overflows(&self, round: &Round) -> bool {
        !self.model.is_shared() && round.losses.exceeds(START_LOSS_PERCENT)
    }

    fn adjust(&mut self, round: &Round, rtt: Duration, queue: Duration) {
        let high = self.queue_max(self.rate);
        if queue > high {
            self.raises = 0;
            // rate * (1 - beta (1 - T_high / rtt))
            let over = per_mille(queue - high, rtt);
            let cut = gain(self.rate, UNIT - over * self.parameters.beta / UNIT);
            // The delay is that of packets that left before the last cut: less than what the path delivers drains the queue.
            self.rate = cut.max(gain(self.delivered, DRAINING)).min(self.rate);
        } else if queue < self.queue_low(self.rate) || self.falls(rtt) {
            // What the application did not ask for proves nothing.
            if !round.app_limited {
                let raised = self.rate.saturating_add(self.step(rtt)).min(self.rate_max());
                // In an empty path a step up takes nothing away: after a pause, or where acknowledgements come in lumps, a round trip
                // delivers less than the path would.
                let is_empty = queue < self.queue_low(self.rate);
                self.rate = if is_empty { raised.max(self.rate) } else { raised };
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
        let packet = rate_of(self.model.packet_bytes, rtt).unwrap_or(self.parameters.step);
        let step = packet.min(self.parameters.step).min(self.rate / 8).max(1);
        step.saturating_mul(1 << self.raises.saturating_sub(RAISES_CALM))
    }

    /// The rate runs ahead of what is delivered at most by a quarter, or it would mean nothing when a queue comes.
    fn rate_max(&self) -> u64 {
        self.delivered.saturating_add(self.delivered / 4).max(self.model.rate_min())
    }

    /// The paper's thresholds are for a flow that must find its share; the collective's word is worth more.
    fn at_least(&self, paper: Duration) -> Duration {
        if self.model.is_shared() {
            Duration::ZERO
        } else {
            paper
        }
    }

    /// T_low without the path itself.
    fn queue_low(&self, rate: u64) -> Duration {
        (self.own_queue(rate) / QUEUE_RATIO).max(self.at_least(self.parameters.queue_low))
    }

    /// T_high without the path itself.
    fn queue_max(&self, rate: u64) -> Duration {
        self.own_queue(rate).max(self.at_least(self.parameters.queue_high))
    }

    /// What the packets that this flow keeps in the queue take.
    fn own_queue(&self, rate: u64) -> Duration {
        let nanos = u128::from(self.model.queue_bytes()) * 1_000_000_000 / u128::from(rate.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn apply(&mut self, acked: u64) {
        self.cwnd = if self.model.path.is_dipping() {
            self.model.cwnd_min()
        } else if self.starting {
            self.model.start_window(self.cwnd, acked, self.delivered, self.rate)
        } else {
            self.model
                .window(self.rate)
                .saturating_add(bytes_in(self.rate, self.at_least(self.parameters.queue_high)))
        };
    }
}

impl RateController for TimelyController {
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

/// T_high over T_low where both are a flow's own packets: a tenth, as between the paper's, would be one packet or none; a third
/// of three to twelve is what a burst of two makes.
const QUEUE_RATIO: u32 = 3;
/// Rounds that raise the rate by one step each before the steps double (TIMELY: five).
const RAISES_CALM: u32 = 5;
/// The largest step is 2^7 of the first.
const RAISES_MAX: u32 = RAISES_CALM + 7;
/// Of what the path delivers a cut leaves so much.
const DRAINING: u64 = 750;

#[cfg(test)]
mod tests {
    use super::*;

    /// Two packets leave, one is dropped, and the acknowledgement of the other waits for a second one until its time is over.
    fn after_a_lost_first_packet(senders: u32) -> TimelyController {
        let mut controller =
            TimelyController::new(&ControllerSettings { flows: senders, ..ControllerSettings::TEST });
        let sample = AckSample {
            now: Timestamp::from_nanos(300_000),
            rtt: Some(Duration::from_micros(24)),
            acked_bytes: 1_408,
            delivery_rate: Some(1_408 * 1_000_000 / 274),
            ..AckSample::default()
        };
        controller.on_ack(&sample);
        let lost = AckSample { rtt: None, acked_bytes: 0, lost_bytes: 1_408, delivery_rate: None, ..sample };
        controller.on_ack(&lost);
        let next = AckSample { now: Timestamp::from_nanos(1_000_000), round_ended: true, ..sample };
        controller.on_ack(&next);
        controller
    }

    /// A flow that has left its start at 1 Gbit/s over a path of 24 us, whose queue is empty again.
    fn at_work() -> (TimelyController, AckSample) {
        let mut controller =
            TimelyController::new(&ControllerSettings { flows: 6, ..ControllerSettings::TEST });
        let first = AckSample {
            now: Timestamp::from_nanos(100_000),
            rtt: Some(Duration::from_micros(24)),
            acked_bytes: 1_408,
            delivery_rate: Some(125_000_000),
            ..AckSample::default()
        };
        controller.on_ack(&first);
        let queued = AckSample { rtt: Some(Duration::from_millis(2)), ..first };
        for at in 2..5 {
            let sample = AckSample { now: Timestamp::from_nanos(at * 100_000), round_ended: true, ..queued };
            controller.on_ack(&sample);
        }
        assert!(!controller.starting);
        (controller, AckSample { now: Timestamp::from_nanos(600_000), round_ended: true, ..first })
    }

    #[test]
    fn a_round_trip_with_little_to_send_lowers_no_rate_while_no_queue_is_seen() {
        for app_limited in [false, true] {
            let (mut controller, sample) = at_work();
            controller.on_ack(&sample);
            let before = controller.pacing_rate();
            for after in 1..4_u32 {
                let now = sample.now + Duration::from_millis(1) * after;
                controller.on_ack(&AckSample { now, delivery_rate: Some(1_000_000), app_limited, ..sample });
                assert!(
                    controller.pacing_rate() >= before,
                    "{app_limited}: {} of {before}",
                    controller.pacing_rate()
                );
            }
        }
    }

    #[test]
    fn what_the_application_did_not_ask_for_says_nothing_of_what_the_path_delivers() {
        let (mut controller, sample) = at_work();
        controller.on_ack(&sample);
        let before = controller.bandwidth();
        for after in 1..4_u32 {
            let now = sample.now + Duration::from_millis(1) * after;
            controller.on_ack(&AckSample {
                now,
                delivery_rate: Some(1_000_000),
                app_limited: true,
                ..sample
            });
        }
        assert_eq!(controller.bandwidth(), before);
    }

    #[test]
    fn one_of_two_first_packets_among_known_senders_tells_nothing_of_the_rate() {
        assert!(after_a_lost_first_packet(108).pacing_rate() >= 125_000_000);
        assert!(
            after_a_lost_first_packet(1).pacing_rate() < 10_000_000,
            "alone it is the end of the path's buffer"
        );
    }
}
