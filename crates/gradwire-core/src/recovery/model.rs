//! What the controllers that work with a receiving or a target rate share: one round trip's facts and their window.
//!
//! The window is `rate * least round-trip time + a few packets + lumps`. The packets on top are a constant, not a share of
//! the rate: with window = rate * rtt everywhere, a flow at `rate` then keeps the same number of packets in the queue
//! as any other, so a flow above the fair share finds its round trips longer than its window was made for and falls,
//! by a factor of `least rtt / rtt` in each round trip, and one below it rises.

use super::backoff::Backoff;
use super::empty_path::EmptyPath;
use super::filters::{bytes_in, rate_of, AckAggregation, MaxFilter};
use super::headroom::{Headroom, LossCount};
use super::limits::{LUMP_MAX, RATE_MIN};
use super::share::Share;
use super::way_back::SmoothedWait;
use super::{AckSample, ControllerSettings};
use crate::Timestamp;
use core::time::Duration;

/// What a round trip has shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    pub(super) losses: LossCount,
    /// Largest delivery rate, bytes per second; zero without a sample.
    pub(super) rate_max: u64,
    /// Least round-trip time.
    pub(super) rtt: Option<Duration>,
    /// How long it took.
    pub(super) elapsed: Duration,
    /// Whether the application had nothing to send.
    pub(super) app_limited: bool,
}

/// The path as one flow sees it.
#[derive(Debug)]
pub(super) struct PathModel {
    pub(super) path: EmptyPath,
    pub(super) packet_bytes: u64,
    standing_bytes: u64,
    share: Share,
    round: Round,
    round_since: Timestamp,
    aggregation: AckAggregation,
    fastest: MaxFilter,
    headroom: Headroom,
    backoff: Backoff,
    lumps: u64,
    way_back: SmoothedWait,
}

impl PathModel {
    /// `headroom`: of the few packets that it keeps in the queue.
    pub(super) fn new(settings: &ControllerSettings, headroom: fn(u64) -> Headroom) -> Self {
        let packet_bytes = settings.packet_bytes.max(1);
        let mut path = EmptyPath::default();
        path.set_seldom(settings.flows > settings.paths);
        Self {
            path,
            packet_bytes,
            standing_bytes: settings.standing_bytes,
            share: Share::new(packet_bytes, (settings.flows, settings.paths), settings.turn),
            round: Round::default(),
            round_since: Timestamp::ZERO,
            aggregation: AckAggregation::default(),
            fastest: MaxFilter::default(),
            headroom: headroom(packet_bytes),
            backoff: Backoff::new(packet_bytes),
            lumps: 0,
            way_back: SmoothedWait::default(),
        }
    }

    /// Takes an acknowledgement, of a flow at `rate`. Returns the round that it ended, if it ended one; the
    /// acknowledgement itself is the first of the next.
    pub(super) fn on_ack(&mut self, sample: &AckSample, rate: u64, cwnd: u64) -> Option<Round> {
        let ended = sample.round_ended.then(|| self.end_round(sample.now, cwnd));
        if let Some(rtt) = sample.rtt {
            self.path.on_rtt(sample.now, rtt);
        }
        self.round.losses.acked += sample.acked_bytes;
        self.round.losses.lost += sample.lost_bytes;
        self.round.app_limited |= sample.app_limited;
        self.round.rate_max = self.round.rate_max.max(sample.delivery_rate.unwrap_or(0));
        // Windows hold whole packets: up to one more would not have fitted.
        let whole = (cwnd - cwnd / 8).saturating_sub(self.packet_bytes).max(self.packet_bytes);
        self.way_back.on_ack(sample);
        self.path.on_wait(self.way_back.get());
        // Against the fastest of the last round trips: what is delivered faster than a rate that has just been cut is no lump, and a window
        // that grew by it would keep a large flow large.
        self.fastest.insert(sample.delivery_rate.unwrap_or(0));
        let rate = self.fastest.max().max(rate);
        self.aggregation.on_ack(sample.now.before(sample.waited), sample.acked_bytes, rate, whole);
        self.lumps = self.aggregation.bytes().min(bytes_in(rate, LUMP_MAX)).min(self.standing_bytes);
        self.path.advance(sample.now, sample.in_flight, self.cwnd_min());
        ended
    }

    fn end_round(&mut self, now: Timestamp, cwnd: u64) -> Round {
        let mut round = core::mem::take(&mut self.round);
        round.rtt = self.path.end_round();
        round.elapsed = now.since(core::mem::replace(&mut self.round_since, now));
        self.aggregation.next_round();
        self.fastest.next_round();
        let overflows = self.headroom.on_round(round.losses);
        self.backoff.on_round(overflows, cwnd);
        if overflows {
            // All flows lose at the same time, so all look for the empty path at the same time.
            self.path.look_at(now, now);
        }
        round
    }

    /// A flow that started into the queues of others has never seen the path: look soon.
    pub(super) fn look_soon(&mut self, now: Timestamp) {
        self.path.look_at(now, now + self.path.min() * LOOK_ROUNDS);
    }

    /// Whether the collective has told how many share the receiver.
    pub(super) fn is_shared(&self) -> bool {
        self.share.is_known()
    }

    /// What is in flight at `rate` where this flow queues nothing. What the way back takes in addition is not its queue, but
    /// its packets are in flight meanwhile; a thread that was not run looks the same, so no more than the receiver's socket
    /// holds.
    fn product(&self, rate: u64) -> u64 {
        let waiting = bytes_in(rate, self.way_back.get()).min(self.standing_bytes);
        bytes_in(rate, self.path.min()).saturating_add(waiting)
    }

    /// The window for a flow at `rate`.
    pub(super) fn window(&self, rate: u64) -> u64 {
        if self.path.is_dipping() {
            return self.cwnd_min();
        }
        let cwnd = self.filled(self.product(rate)).max(self.cwnd_min());
        if self.share.is_known() {
            cwnd
        } else {
            self.backoff.bound(cwnd)
        }
    }

    /// The window of a flow that still looks for its rate: one more packet for each that arrives. Among known others it
    /// looks only as far as a quarter more than it has found, and its part of the queue: more than that, from all at once,
    /// overflows a buffer that is smaller than the path.
    pub(super) fn start_window(&self, cwnd: u64, acked: u64, found: u64, line_rate: u64) -> u64 {
        let most = if self.share.is_known() && found > 0 {
            self.filled(self.product(found.saturating_add(found / 4)))
        } else {
            bytes_in(line_rate, START_WINDOW_TIME)
        };
        cwnd.saturating_add(acked).min(most).max(self.share.initial_cwnd())
    }

    /// What the flow may keep in queues: a few packets, and what acknowledgements that come in lumps need.
    pub(super) fn queue_bytes(&self) -> u64 {
        self.kept(self.share.queue_bytes())
    }

    fn kept(&self, share: u64) -> u64 {
        let share = if self.share.is_known() { share } else { share.min(KEPT_PACKETS * self.packet_bytes) };
        let kept = share * self.headroom.per_mille() / 1_000;
        kept.max(self.packet_bytes).max(self.lumps)
    }

    /// `path` bytes in flight and what the flow keeps in queues besides.
    fn filled(&self, path: u64) -> u64 {
        path.saturating_add(self.kept(self.share.queue_bytes_in_turn(path)))
    }

    /// First window, and the least while a flow still looks for its rate.
    pub(super) fn initial_cwnd(&self) -> u64 {
        self.share.initial_cwnd()
    }

    /// Two packets: with one, its loss would only be seen by a timer.
    pub(super) fn cwnd_min(&self) -> u64 {
        2 * self.packet_bytes
    }

    /// A packet in each least round trip: an estimate that collapsed recovers within a few of them.
    pub(super) fn rate_min(&self) -> u64 {
        let rtt = self.path.min().max(Duration::from_millis(1));
        rate_of(self.packet_bytes, rtt).unwrap_or(RATE_MIN).max(RATE_MIN)
    }

    /// The collective says how many senders share the receiver.
    pub(super) fn on_incast(&mut self, flows: u32, paths: u32) {
        self.share = self.share.among(flows, paths);
        self.path.set_seldom(self.share.is_known());
    }
}

/// What a flow keeps in the queue that knows of no others: six of them fit a buffer of 64 packets. With eight `timely` used 82 % of a path
/// of two packets that loses a twentieth.
const KEPT_PACKETS: u64 = 10;
/// A first window never holds more than this time at line rate.
const START_WINDOW_TIME: Duration = Duration::from_millis(250);
/// Round trips that the queues of a start have to drain.
const LOOK_ROUNDS: u32 = 8;
