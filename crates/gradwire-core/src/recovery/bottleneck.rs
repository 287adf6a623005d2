//! Bottleneck-bandwidth and round-trip based rate control (LTP section III-D, after BBR).
//!
//! Two estimates make the model of the path: the largest delivery rate of the last ten round trips and the
//! least round-trip time of the last ten seconds. Packets leave at the first and about two products of both may
//! be in flight. A lost packet says nothing about either, so loss alone does not slow the flow down, up to a seventh of the
//! packets among senders that the collective has named: what more of them lose is their own doing ([`super::headroom`]).
//!
//! ```text
//!   STARTUP --no more bandwidth found--> DRAIN --queue is gone--> PROBE BANDWIDTH <--> DIP
//!   paces at 2.77 x                      1 / 2.77                 1.25, 0.75, 6 x 0.98   two packets (or half) in flight
//! ```
//!
//! What differs from BBR:
//! - It does not stop for 200 ms to measure the round trip. Gradients come in bursts, and the gap between two steps
//!   shows the empty path for free ([`RateController::on_idle_restart`]); a flow that saw a queue in every sample of some 200 ms
//!   dips for a round trip, together with the others, which see the queue fall.
//! - What may be in flight on top of the model is measured, because acknowledgements come in lumps when the peer's
//!   thread was not running ([`super::filters::AckAggregation`]), and shrinks while a buffer overflows
//!   ([`super::headroom`]).
//! - A probe raises the window along with the rate, is repeated while it finds room, and does not wait for its turn
//!   where there is no queue: what other flows leave is taken over within a few round trips.
//! - Where a short path has a queue, one product of the newest rate and a few packets, as many for every flow, are in flight instead of two
//!   products ([`super::kin`]), and flows that know nothing of each other dip at the same moment ([`super::looks`]): so they share alike.
//! - While a flow dips it sees what others keep in the queue. Where that is more than flows of its own kind keep, it
//!   takes a little more room itself and leaves no more of it ([`super::others`]).
//! - Beyond that the window holds the same few packets for every flow, and while a buffer overflows what is in flight is
//!   halved whatever the model says ([`super::backoff`]): so flows that came one after the other end with equal shares.
//! - Over long paths, where nobody has told who shares them, a start takes 64 packets as soon as it knows the round trip, and a
//!   dip keeps half of the model: what either costs is counted in round trips.
//! - A flow that finds nearly a third of its packets lost while the queue is full believes the newest rate at once.

mod window;

use super::average::AverageRate;
use super::backoff::Backoff;
use super::filters::{rate_of, time_of, AckAggregation, MaxFilter, WindowedMin};
use super::full_pipe::FullPipe;
use super::headroom::Headroom;
use super::kin::KinWindow;
use super::limits::{gain, DIP_MAX, DIP_ROUNDS, FAR, RATE_MIN, REFRESH_MIN, UNIT};
use super::looks::Looks;
use super::others::OthersQueue;
use super::round::Round;
use super::share::{DecidedRate, Share};
use super::way_back::SmoothedWait;
use super::{AckSample, ControllerSettings, RateController};
use crate::Timestamp;
use core::time::Duration;

// claim: ltp/bdp-control
/// Paces at the estimated bottleneck bandwidth and keeps about two bandwidth-delay products in flight.
/// Loss alone does not slow it down, up to a seventh of the packets where others send to the same receiver.
#[derive(Debug)]
pub struct BottleneckController {
    packet_bytes: u64,
    standing_bytes: u64,
    share: Share,
    decided: DecidedRate,
    average: AverageRate,
    mode: Mode,
    bandwidth: MaxFilter,
    rtt: WindowedMin,
    previous: Round,
    looks: Looks,
    kin: KinWindow,
    /// Round trips whose rate a dip still holds down.
    held_down: u32,
    others: OthersQueue,
    aggregation: AckAggregation,
    way_back: SmoothedWait,
    round: Round,
    full_pipe: FullPipe,
    overflow_rounds: u32,
    backoff: Backoff,
    headroom: Headroom,
    cwnd: u64,
    pacing_rate: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Startup,
    Drain {
        rounds: u32,
    },
    /// `before`: the bandwidth when the phase began.
    ProbeBandwidth {
        phase: usize,
        since: Timestamp,
        before: u64,
    },
    /// `reached`: when the flight was down to the least window.
    Dip {
        since: Timestamp,
        reached: Option<Timestamp>,
    },
}

impl BottleneckController {
    /// Starts at the initial rate with an initial window of ten packets divided by the incast.
    #[must_use]
    pub fn new(settings: &ControllerSettings) -> Self {
        let packet_bytes = settings.packet_bytes.max(1);
        let share = Share::new(packet_bytes, (settings.flows, settings.paths), settings.turn);
        let initial_cwnd = share.initial_cwnd();
        let mut looks = Looks::default();
        looks.set_seldom(share.is_known());
        let mut headroom = Headroom::new(packet_bytes);
        headroom.set_shared(share.is_known());
        // Fast enough to let the initial window go within a millisecond: the window is what limits it.
        let pacing_rate =
            settings.initial_rate.max(rate_of(initial_cwnd, STANDING).unwrap_or(0)).max(RATE_MIN);
        Self {
            packet_bytes,
            standing_bytes: settings.standing_bytes,
            share,
            decided: DecidedRate::default(),
            average: AverageRate::default(),
            mode: Mode::Startup,
            bandwidth: MaxFilter::default(),
            rtt: WindowedMin::default(),
            previous: Round::default(),
            looks,
            kin: KinWindow::new(packet_bytes),
            held_down: 0,
            others: OthersQueue::default(),
            aggregation: AckAggregation::default(),
            way_back: SmoothedWait::default(),
            round: Round::default(),
            full_pipe: FullPipe::default(),
            overflow_rounds: 0,
            backoff: Backoff::new(packet_bytes),
            headroom,
            cwnd: initial_cwnd,
            pacing_rate,
        }
    }

    fn learn(&mut self, sample: &AckSample) {
        if let Some(rtt) = sample.rtt {
            self.learn_rtt(sample, rtt);
            if matches!(self.mode, Mode::Dip { reached: Some(_), .. }) {
                self.others.on_look(rtt);
            }
            self.round.on_rtt(rtt, sample.waited, self.flight(sample));
        }
        self.round.losses.acked += sample.acked_bytes;
        self.round.losses.lost += sample.lost_bytes;
        self.round.app_limited |= sample.app_limited;
        // Windows hold whole packets: up to one more would not have fitted.
        let whole = (self.cwnd - self.cwnd / 8).saturating_sub(self.packet_bytes).max(self.packet_bytes);
        self.way_back.on_ack(sample);
        self.aggregation.on_ack(
            sample.now.before(sample.waited),
            sample.acked_bytes,
            self.bandwidth.max(),
            whole,
        );
        if let Some(rate) = sample.delivery_rate {
            self.round.rate_max = self.round.rate_max.max(rate);
            // What an idle application delivers is a lower bound of what the path can do.
            let raises = rate > self.bandwidth.max();
            if (raises || !sample.app_limited) && !(raises && self.is_of_dip(sample)) {
                self.bandwidth.insert(rate);
            }
        }
    }

    /// Whether a rate was measured over the few packets that a dip lets go. They pass a token bucket, or a turn of a shared medium, at once,
    /// and would tell of many times the rate of the link. Among known others, where looks are rare, the window is made of the newest rate.
    fn is_of_dip(&self, sample: &AckSample) -> bool {
        let dips = self.held_down > 1 || matches!(self.mode, Mode::Dip { .. });
        let few = sample.rate_bytes < TELLING_PACKETS * self.packet_bytes;
        dips && few && self.bandwidth.max() > 0 && !self.share.is_known()
    }

    fn learn_rtt(&mut self, sample: &AckSample, rtt: Duration) {
        let before = self.rtt.min();
        self.rtt.insert(sample.now, rtt);
        // The window is spread over both ways: what waits on the way back is missing on the way out. Only what the whole round trip has become
        // shorter by, and more than with the flow's own window, can be the look of another.
        let shorter = self.previous.shorter_by(rtt + sample.waited, self.flight(sample));
        let round = self.previous.rtt_min.map(|round| round.min(rtt + shorter));
        self.looks.on_rtt(sample.now, rtt, before, round);
    }

    /// What was in flight when the newest acknowledged packet left: it was delivered meanwhile. `None`: it says nothing about the queue, because the
    /// flow's part changes with its other paths, or with what known others do.
    fn flight(&self, sample: &AckSample) -> Option<u64> {
        let is_alone = !self.share.has_other_paths() && !self.share.is_known();
        is_alone.then_some(sample.rate_bytes)
    }

    fn end_round(&mut self, now: Timestamp) {
        let round = core::mem::replace(&mut self.round, Round::begin(now));
        let queued = round.rtt_min.is_some_and(|rtt| self.shows_queue(rtt));
        self.previous = round;
        let dips = matches!(self.mode, Mode::Dip { .. });
        self.held_down = if dips { DIP_ROUNDS } else { self.held_down.saturating_sub(1) };
        let is_idle = round.app_limited && round.rate_max < self.decided.get();
        if round.rate_max > 0 && !is_idle && (self.held_down == 0 || self.share.is_known()) {
            if !round.app_limited && round.losses.acked > 0 {
                self.average.on_round(round.losses, round.time(now), self.round_trip());
            }
            // Among known others the round's average is the newest rate: the largest sample is that of a burst, and what all of them add to
            // their windows because of it overflows a buffer that is smaller than the path.
            let average = round.rate_max.min(round.average(now));
            let newest = if self.share.is_known() { average } else { round.rate_max };
            self.decided.on_round(newest, round.losses);
        }
        self.cut_on_overflow(&round, queued);
        self.others.forget_old(now);
        let overflows = self.headroom.on_round(round.losses);
        self.kin.on_round(round.losses);
        let probes = matches!(self.mode, Mode::ProbeBandwidth { .. });
        self.backoff.on_round(overflows && probes, self.cwnd);
        if overflows {
            self.looks.look_with_others(now);
        }
        if self.is_far() && queued && self.others.must_look(self.bandwidth.max()) {
            self.looks.look_by(now);
        }
        match &mut self.mode {
            Mode::Startup
                if self.full_pipe.on_round(self.bandwidth.max(), round.losses, round.app_limited, queued) =>
            {
                self.mode = Mode::Drain { rounds: 0 };
                // What was judged against an estimate that still grew seemed to run ahead.
                if self.share.is_known() {
                    self.aggregation = AckAggregation::default();
                }
            }
            Mode::Drain { rounds } => *rounds += 1,
            _ => {}
        }
        // Among known others the few packets of a dip count, but must not push out what the link was seen to carry, however many rounds it has.
        if self.held_down == 0 || !self.share.is_known() {
            self.bandwidth.next_round();
        }
        self.aggregation.next_round();
    }

    /// Loss of this size together with a long queue means that the bottleneck overflows because the estimate is
    /// stale (other flows came), not that the path is lossy: believe the newest rate instead of waiting until
    /// the old one leaves the filter.
    fn cut_on_overflow(&mut self, round: &Round, queued: bool) {
        let overflows = queued && round.losses.exceeds(OVERFLOW_LOSS_PERCENT);
        self.overflow_rounds = if overflows { self.overflow_rounds + 1 } else { 0 };
        if self.overflow_rounds >= 2 && round.rate_max > 0 {
            self.bandwidth.reset(round.rate_max.min(self.bandwidth.max()));
            self.overflow_rounds = 0;
        }
    }

    /// Whether a round trip is longer than the least one by more than a scheduler's jitter.
    fn shows_queue(&self, rtt: Duration) -> bool {
        self.rtt.min().is_some_and(|least| rtt > least + (least / 4).max(QUEUE_MIN))
    }

    fn advance(&mut self, now: Timestamp, in_flight: u64) {
        let rtt = self.round_trip();
        let drained = in_flight <= self.bdp().saturating_add(self.floor());
        match self.mode {
            Mode::Startup => {}
            Mode::Drain { rounds } => {
                if drained || rounds >= DRAIN_ROUNDS_MAX {
                    // A flow that started into the queues of others has never seen the path: look soon.
                    self.looks.look_by(now + rtt * CYCLE_ROUNDS as u32);
                    self.cruise(now);
                }
            }
            Mode::ProbeBandwidth { .. } if self.looks.is_due(now) => {
                self.looks.begin();
                self.others.begin_look(self.previous.rtt_min.unwrap_or_default());
                self.mode = Mode::Dip { since: now, reached: None };
            }
            Mode::ProbeBandwidth { phase, since, before } => {
                let elapsed = now.since(since);
                let over = match phase {
                    // The queue that others keep does not drain.
                    DRAIN_PHASE if !self.others.stands() => {
                        in_flight <= self.drained_window() || elapsed >= rtt * DRAIN_ROUNDS_MAX
                    }
                    _ => elapsed >= rtt,
                };
                if over {
                    self.enter_phase(now, self.next_phase(phase, before));
                }
            }
            Mode::Dip { since, reached } => self.advance_dip(now, in_flight, since, reached),
        }
    }

    /// Holds the flight at two packets for one round trip ([`Looks`]), so that what this flow queued drains and the next
    /// samples show the path. The queue keeps the link busy meanwhile. Without it a flow that came into a queue
    /// would take the queue for distance, hold a larger window than the others, and make the queue longer.
    fn advance_dip(&mut self, now: Timestamp, in_flight: u64, since: Timestamp, reached: Option<Timestamp>) {
        let rtt = self.rtt.min().unwrap_or_default();
        let reached = reached.or((in_flight <= self.dip_window()).then_some(now));
        self.mode = Mode::Dip { since, reached };
        let hold = self.dip_hold();
        let held = reached.is_some_and(|at| now.since(at) >= hold) && self.others.has_looked();
        if held || now.since(since) >= self.dip_limit() {
            let rate = self.bandwidth.max();
            let again = self.others.end_look(now, rtt, rate, time_of(KEPT_PACKETS * self.packet_bytes, rate));
            self.looks.end(now, again);
            self.cruise(now);
        }
    }

    /// Whether others keep a queue, as far as this flow remembers.
    #[cfg(test)]
    pub(super) fn is_beside_others(&self) -> bool {
        self.others.stands()
    }

    /// Whether the path itself is long.
    fn is_far(&self) -> bool {
        self.rtt.min().is_some_and(|rtt| rtt >= FAR)
    }

    /// What a dip keeps in flight: half of the model over long paths, where an empty window costs two round trips of sending;
    /// a queue as long as the path still drains, and what it leaves of a longer one goes with the next dip.
    fn dip_window(&self) -> u64 {
        let half = if self.is_far() && !self.share.is_known() { self.bdp() / 2 } else { 0 };
        half.max(2 * self.packet_bytes)
    }

    /// The least window of a start over a long path, where each round trip that the first packets take is long; paced.
    fn far_start(&self) -> u64 {
        if self.is_far() && !self.share.is_known() {
            FAR_START_PACKETS * self.packet_bytes
        } else {
            0
        }
    }

    /// How long a dip stays at its least window: of the round trips as they were, so that flows that dip a little later
    /// are met.
    fn dip_hold(&self) -> Duration {
        let rtt = self.rtt.min().unwrap_or_default();
        self.previous.rtt_min.unwrap_or(rtt).min(DIP_MAX).max(rtt) + self.way_back.get()
    }

    /// When a dip ends though it has not seen the path.
    fn dip_limit(&self) -> Duration {
        let rtt = self.rtt.min().unwrap_or_default();
        (DIP_MAX + self.dip_hold()).max(self.previous.rtt_min.unwrap_or(rtt).max(rtt) * DRAIN_ROUNDS_MAX)
    }

    /// Where a whole round trip showed no queue there is room: a probe that found some is followed by another
    /// one, and the next cycle begins at once. So a flow takes over what others leave within a few round trips.
    fn next_phase(&self, phase: usize, before: u64) -> usize {
        let free = self.is_free();
        match phase {
            PROBE_PHASE if free && self.bandwidth.max() > before.saturating_add(before / 8) => PROBE_PHASE,
            PROBE_PHASE => DRAIN_PHASE,
            DRAIN_PHASE => DRAIN_PHASE + 1,
            _ if free => PROBE_PHASE,
            _ => (phase + 1) % CYCLE_ROUNDS,
        }
    }

    fn enter_phase(&mut self, now: Timestamp, phase: usize) {
        self.mode = Mode::ProbeBandwidth { phase, since: now, before: self.bandwidth.max() };
    }

    /// Enters the probing cycle at one of its six even phases, chosen by the clock so that flows that start
    /// together do not probe together.
    fn cruise(&mut self, now: Timestamp) {
        self.enter_phase(now, 2 + (now.as_nanos() / 1_000 % (CYCLE_ROUNDS as u64 - 2)) as usize);
    }

    fn apply(&mut self) {
        let bandwidth = self.bandwidth.max();
        if bandwidth == 0 {
            return;
        }
        let (pacing_gain, window_gain) = match self.mode {
            // What is in flight by now is a long path and its buffer: more would only overflow.
            Mode::Startup if self.is_far() && self.round.rtt_min.is_some_and(|rtt| self.shows_queue(rtt)) => {
                (STARTUP_GAIN, 2 * UNIT)
            }
            Mode::Startup => (STARTUP_GAIN, STARTUP_GAIN),
            Mode::Drain { .. } => (UNIT * UNIT / STARTUP_GAIN, STARTUP_GAIN),
            Mode::ProbeBandwidth { phase, .. } => {
                (PROBE_GAINS.get(phase).copied().unwrap_or(self.others.cruise()), 2 * UNIT)
            }
            Mode::Dip { .. } => (UNIT, 0),
        };
        let cwnd = match self.mode {
            Mode::Dip { .. } => self.dip_window(),
            Mode::Startup if self.share.is_known() => {
                self.shared_window(gain(bandwidth, SHARED_START_GAIN)).max(self.share.initial_cwnd())
            }
            _ if self.share.is_known() => self.shared_window(self.decided.get()),
            Mode::Startup => self.window(window_gain).max(self.share.initial_cwnd()).max(self.far_start()),
            // A probe that stays inside the window that everyone fills finds nothing.
            Mode::ProbeBandwidth { .. } => gain(self.steady_window(window_gain), pacing_gain.max(UNIT)),
            Mode::Drain { .. } => self.window(window_gain),
        };
        // Among known others the window alone decides: it leaves no queue that a slower phase would have to drain.
        let probes = matches!(self.mode, Mode::ProbeBandwidth { .. }) && self.share.is_known();
        let pacing_gain = if probes { pacing_gain.max(UNIT) } else { pacing_gain };
        // Among known others the share is fair by itself, and where others keep the queue they would take what this flow left.
        let is_bounded = !self.share.is_known() && !self.others.stands();
        self.cwnd = if is_bounded { self.backoff.bound(cwnd) } else { cwnd };
        self.pacing_rate = gain(bandwidth, pacing_gain).max(self.rate_floor());
        if matches!(self.mode, Mode::Startup) {
            let far = rate_of(self.far_start(), self.rtt.min().unwrap_or_default()).unwrap_or(0);
            self.pacing_rate = self.pacing_rate.max(far);
        }
    }

    /// Whether the last round trip showed no queue.
    fn is_free(&self) -> bool {
        self.previous.rtt_min.is_some_and(|rtt| !self.shows_queue(rtt))
    }

    /// The least window in the least round trip: an estimate that collapsed recovers within a few of them.
    fn rate_floor(&self) -> u64 {
        let rtt = self.rtt.min().unwrap_or_default().max(Duration::from_millis(1));
        rate_of(2 * self.packet_bytes, rtt).unwrap_or(RATE_MIN).max(RATE_MIN)
    }
}

impl RateController for BottleneckController {
    fn on_ack(&mut self, sample: &AckSample) {
        // The acknowledgement that ends a round is the first of the next one.
        if sample.round_ended {
            self.end_round(sample.now);
        }
        self.learn(sample);
        self.advance(sample.now, sample.in_flight);
        self.apply();
    }

    fn on_idle_restart(&mut self, now: Timestamp) {
        // Two packets in flight leave gaps between round trips, which are no idle time: the dip goes on.
        if matches!(self.mode, Mode::Dip { since, .. } if now.since(since) < self.dip_limit()) {
            return;
        }
        // The queue was empty a moment ago, so the samples that come now are good ones.
        self.rtt.refresh(now, REFRESH_MIN);
        // The idle time is no part of a round trip.
        self.round = Round::begin(now);
        self.looks.on_idle_restart(now);
        if matches!(self.mode, Mode::ProbeBandwidth { .. } | Mode::Dip { .. }) {
            self.cruise(now);
        }
        self.apply();
    }

    fn on_incast(&mut self, flows: u32, paths: u32) {
        self.share = self.share.among(flows, paths);
        self.looks.set_seldom(self.share.is_known());
        self.headroom.set_shared(self.share.is_known());
        self.apply();
    }

    fn cwnd(&self) -> u64 {
        self.cwnd
    }

    fn pacing_rate(&self) -> u64 {
        self.pacing_rate
    }

    fn bandwidth(&self) -> u64 {
        self.bandwidth.max()
    }
}

/// 4 ln 2: the least gain at which the delivery rate doubles in each round trip.
const STARTUP_GAIN: u64 = 2_773;
/// Among known others a quarter more in each round trip, and the share of the queue on top: more than that, from all at
/// once, overflows a buffer that is smaller than the path.
const SHARED_START_GAIN: u64 = 1_250;
/// One round trip each: a quarter more to find new bandwidth, a quarter less to drain what that queued; the others cruise.
const PROBE_GAINS: [u64; 2] = [1_250, 750];
const CYCLE_ROUNDS: usize = 8;
/// What one port of a small switch holds: 18 Mbit/s at 40 ms.
const FAR_START_PACKETS: u64 = 64;
/// What a flow keeps in the queue beside its second product, and what counts as its kind's in a look out of step with theirs.
const KEPT_PACKETS: u64 = 4;
/// A dip's rates of fewer packets tell nothing of the link.
const TELLING_PACKETS: u64 = 8;
/// The phase that looks for more.
const PROBE_PHASE: usize = 0;
/// The phase after the probe.
const DRAIN_PHASE: usize = 1;
/// A drain ends after so many round trips even when acknowledgements are too lumpy to see an empty queue.
const DRAIN_ROUNDS_MAX: u32 = 4;
/// More than probing at 1.25 can outgrow (20 %), with some room for bursts of random loss.
const OVERFLOW_LOSS_PERCENT: u64 = 30;
/// So far above the least one a round trip may be by a scheduler's jitter: half of what a window lets stand.
const QUEUE_MIN: Duration = Duration::from_micros(500);
/// Time that the window lets a flow stand in queues beyond its model, where others leave theirs standing.
const STANDING: Duration = Duration::from_millis(1);
