//! What bounds every controller's window, pace and burst among known senders: only what the path has shown to hold.
//!
//! A sender alone finds a link's end by overflowing it once. With k senders that start at the same moment that is k
//! times too much at once, and no signal is faster than a round trip. So each of them may have in flight what its own rate
//! made in the empty path, as the last round trips showed it, and its share of one small buffer. The rates of all
//! together are no more than the link's, so what all have in flight is no more than the link and that buffer hold; and
//! until the link is full each round trip adds the share to the window.
//!
//! ```text
//!   window <= rate * least round trip + buffer / k       pace <= window / least round trip       burst <= buffer / k
//! ```
//!
//! Only where acknowledgements come in lumps may a burst be longer, until something is lost: then packets wait for a thread.
//!
//! Over long paths the pace matters as well: a window that was saved up over an idle time and leaves at once fills
//! the buffer before the link has taken any of it. Where one sender is alone nothing is bounded, and it starts at line rate.

use super::filters::{bytes_in, rate_of, AckAggregation, WindowedMin};
use super::headroom::LossCount;
use super::limits::{LUMP_MAX, REFRESH_MIN};
use super::pacer::burst_for;
use super::share::{DecidedRate, Share};
use super::{AckSample, ControllerSettings};
use crate::Timestamp;
use core::time::Duration;

// claim: auto/schedule-aware-start
/// See the module's documentation.
#[derive(Debug)]
pub(super) struct IncastBound {
    packet_bytes: u64,
    standing_bytes: u64,
    share: Share,
    rtt: WindowedMin,
    /// Least round-trip time of the last round.
    previous_rtt: Option<Duration>,
    rate: DecidedRate,
    /// The rate was measured since the last idle time.
    is_measured: bool,
    round: Round,
    lumps: AckAggregation,
    /// Rounds since something was lost or the number of senders changed, up to [`CALM_ROUNDS`].
    calm_rounds: u32,
}

/// What the present round trip has shown.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    since: Timestamp,
    losses: LossCount,
    rate_max: u64,
    rtt: Option<Duration>,
    app_limited: bool,
}

impl IncastBound {
    /// Nothing is known of the path.
    pub(super) fn new(settings: &ControllerSettings) -> Self {
        let packet_bytes = settings.packet_bytes.max(1);
        Self {
            packet_bytes,
            standing_bytes: settings.standing_bytes,
            share: Share::new(packet_bytes, (settings.flows, settings.paths), settings.turn),
            rtt: WindowedMin::default(),
            previous_rtt: None,
            rate: DecidedRate::default(),
            is_measured: false,
            round: Round::default(),
            lumps: AckAggregation::default(),
            calm_rounds: 0,
        }
    }

    /// The collective says how many senders share the receiver.
    pub(super) fn on_incast(&mut self, flows: u32, paths: u32) {
        self.share = self.share.among(flows, paths);
        self.calm_rounds = 0;
    }

    /// Data flows again. The idle time is no part of a round trip, and the rate is that of the last packets before it: some
    /// of the others may have been done by then, so a little less is the share among all. Less than that it does not become by
    /// calls that are too small to measure it again, of which there may be many. The samples that come now are of an empty path: they
    /// show a route that has become longer.
    pub(super) fn on_idle_restart(&mut self, now: Timestamp) {
        self.rtt.refresh(now, REFRESH_MIN);
        self.round = Round { since: now, ..Round::default() };
        if core::mem::take(&mut self.is_measured) {
            self.rate.reset(self.rate.get() - self.rate.get() / RESTART_LESS);
        }
    }

    /// Whether the collective has told that others share the receiver.
    pub(super) fn is_known(&self) -> bool {
        self.share.is_known()
    }

    /// Takes an acknowledgement.
    pub(super) fn on_ack(&mut self, sample: &AckSample) {
        // The acknowledgement that ends a round is the first of the next one.
        if sample.round_ended {
            self.end_round(sample.now);
        }
        if let Some(rtt) = sample.rtt {
            self.rtt.insert(sample.now, rtt);
            self.round.rtt = Some(self.round.rtt.map_or(rtt, |least| least.min(rtt)));
        }
        if sample.lost_bytes > 0 {
            self.calm_rounds = 0;
        }
        self.round.losses.acked += sample.acked_bytes;
        self.round.losses.lost += sample.lost_bytes;
        self.round.app_limited |= sample.app_limited;
        self.round.rate_max = self.round.rate_max.max(sample.delivery_rate.unwrap_or(0));
        self.learn_lumps(sample);
    }

    /// The link may carry one sender's burst alone for a moment. Only what comes faster than all senders together send must
    /// have waited for a thread of the receiver, and needs a larger window.
    fn learn_lumps(&mut self, sample: &AckSample) {
        let window = self.window_of_share();
        // Windows hold whole packets: up to one more would not have fitted.
        let whole = (window - window / 8).saturating_sub(self.packet_bytes).max(self.packet_bytes);
        let all = self.rate.get().saturating_mul(self.share.flows()).saturating_mul(LINK_SLACK);
        self.lumps.on_ack(sample.now, sample.acked_bytes, all, whole);
    }

    fn end_round(&mut self, now: Timestamp) {
        let round = core::mem::replace(&mut self.round, Round { since: now, ..Round::default() });
        self.lumps.next_round();
        // A round of a packet or two says nothing of what a buffer holds.
        if round.losses.acked > self.share.burst_bytes() {
            self.calm_rounds = (self.calm_rounds + 1).min(CALM_ROUNDS);
        }
        self.previous_rtt = round.rtt;
        // The average: the largest sample is that of a burst.
        let average = rate_of(round.losses.acked, now.since(round.since)).unwrap_or(u64::MAX);
        let rate = round.rate_max.min(average);
        let before = self.rate.get();
        if rate == 0 || round.app_limited && rate < before {
            return;
        }
        self.is_measured = true;
        self.rate.on_round(rate, round.losses);
        if rate > before && self.is_free() {
            self.rate.reset(rate);
        }
    }

    /// Whether the last round trip showed no queue.
    fn is_free(&self) -> bool {
        self.previous_rtt.zip(self.rtt.min()).is_some_and(|(rtt, least)| rtt <= least + least / 8)
    }

    /// At most this of a window.
    pub(super) fn window(&self, cwnd: u64) -> u64 {
        if !self.share.is_known() {
            return cwnd;
        }
        let window = self.window_of_share().saturating_add(self.lumps());
        cwnd.min(window).max(2 * self.packet_bytes)
    }

    /// What the rate makes in the empty path, and the share of one buffer.
    fn window_of_share(&self) -> u64 {
        if self.rate.get() == 0 {
            return self.share.initial_cwnd();
        }
        let least = self.rtt.min().unwrap_or_default();
        let path = bytes_in(self.rate.get(), least);
        let more = if least >= FAR_INCAST && self.is_free() { path / 4 } else { 0 };
        path.saturating_add(more).saturating_add(self.share.queue_bytes_in_turn(path))
    }

    /// What acknowledgements that wait for the peer's thread need. They come four times in a window: that much is no lump.
    fn lumps(&self) -> u64 {
        let lumps = self.lumps.bytes().saturating_sub(self.window_of_share() / 4);
        lumps.min(bytes_in(self.rate.get(), LUMP_MAX)).min(self.standing_bytes)
    }

    /// At most this of a pacing rate, bytes per second.
    pub(super) fn pace(&self, rate: u64) -> u64 {
        let Some(least) = self.rtt.min().filter(|_| self.share.is_known()) else { return rate };
        let most = rate_of(self.window_of_share(), least).unwrap_or(u64::MAX);
        rate.min(most.saturating_add(most / PACE_MORE))
    }

    /// This flow's part of a bandwidth that was estimated, bytes per second: the largest sample may be
    /// of a moment without the others. Zero before the first round trip.
    pub(super) fn share_of(&self, bandwidth: u64) -> u64 {
        if self.share.is_known() {
            bandwidth.min(self.rate.get())
        } else {
            bandwidth
        }
    }

    /// At most this of a burst, bytes.
    pub(super) fn burst(&self, burst: u64) -> u64 {
        if self.share.is_known() {
            burst.min(self.share.burst_bytes().max(self.burst_of_lumps()))
        } else {
            burst
        }
    }

    /// What acknowledgements in lumps allow: what is under way then waits for a thread of the receiver and not at a port, and
    /// messages of a few packets would only keep that thread the busier. Not where anything was lost lately: a buffer may be small.
    fn burst_of_lumps(&self) -> u64 {
        if self.calm_rounds < CALM_ROUNDS {
            return 0;
        }
        burst_for(self.rate.get(), self.packet_bytes).min(self.lumps() / LUMP_BURSTS)
    }
}

/// An idle time takes this part of the rate away. With nothing less, three senders that learnt a tenth too much from each
/// other's last packets lost 1 to 5 % of each start over a path that holds three times the buffer.
const RESTART_LESS: u64 = 8;
/// Senders that know the same number do not send alike at every moment: twice their average is not the link yet.
const LINK_SLACK: u64 = 2;
/// From here on paths leave the building, and their routers hold more than a port of a switch: a quarter more in each round
/// trip that shows no queue, or a path of thousands of packets would be found in minutes.
const FAR_INCAST: Duration = Duration::from_millis(5);
/// A little more than the window in a round trip, so that a late timer does not cost any of it.
const PACE_MORE: u64 = 32;
/// Rounds without loss after which bursts may be as large as lumps allow.
const CALM_ROUNDS: u32 = 16;
/// A burst is at most this part of a lump.
const LUMP_BURSTS: u64 = 4;

#[cfg(test)]
mod tests {
    use super::*;

    const PACKET: u64 = 1_000;
    const RTT: Duration = Duration::from_millis(1);

    fn bound(flows: u32) -> IncastBound {
        IncastBound::new(&ControllerSettings { flows, packet_bytes: PACKET, ..ControllerSettings::TEST })
    }

    /// After `rounds` round trips, each of which delivered `packets` in even steps.
    fn after(flows: u32, rounds: u64, packets: u64) -> IncastBound {
        let mut bound = bound(flows);
        for round in 0..rounds {
            for packet in 0..packets {
                let now = Timestamp::from_nanos((round * packets + packet) * 1_000_000 / packets + 1);
                bound.on_ack(&AckSample {
                    now,
                    rtt: Some(RTT),
                    acked_bytes: PACKET,
                    delivery_rate: Some(packets * PACKET * 1_000),
                    round_ended: packet == 0,
                    ..AckSample::default()
                });
            }
        }
        bound
    }

    #[test]
    fn a_route_that_has_become_longer_is_known_after_two_idle_times() {
        let mut bound = after(4, 30, 100);
        let rate = bound.rate.get();
        for second in [2, 4, 6] {
            let now = Timestamp::from_nanos(second * 1_000_000_000);
            bound.on_idle_restart(now);
            bound.on_ack(&AckSample {
                now,
                rtt: Some(80 * RTT),
                acked_bytes: PACKET,
                ..AckSample::default()
            });
        }
        bound.rate.reset(rate);
        assert!(bound.window(u64::MAX) >= bytes_in(rate, 80 * RTT), "{bound:?}");
    }

    #[test]
    fn one_sender_alone_is_not_bounded() {
        let alone = after(1, 5, 100);
        assert_eq!(
            (alone.window(1 << 30), alone.pace(1 << 40), alone.burst(1 << 16)),
            (1 << 30, 1 << 40, 1 << 16)
        );
    }

    // test of: auto/schedule-aware-start
    #[test]
    fn a_window_is_what_the_path_has_shown_and_a_share_of_one_buffer() {
        assert_eq!(bound(8).window(u64::MAX), 2 * PACKET, "nothing is known yet");
        let window = after(8, 20, 100).window(u64::MAX);
        assert_eq!(window, 105 * PACKET, "100 packets in a round trip, and an eighth of 40");
    }

    #[test]
    fn a_window_leaves_in_no_less_than_a_round_trip_and_in_small_bursts() {
        let bound = after(8, 20, 100);
        let in_a_round_trip = bytes_in(bound.pace(u64::MAX), RTT);
        assert!((105 * PACKET..110 * PACKET).contains(&in_a_round_trip), "{in_a_round_trip} bytes");
        assert_eq!(bound.burst(u64::MAX), 5 * PACKET);
    }

    #[test]
    fn an_idle_time_takes_an_eighth_of_the_rate_away_and_the_next_ones_nothing_more() {
        let mut bound = after(8, 20, 800);
        for second in 1..20 {
            bound.on_idle_restart(Timestamp::from_nanos(second * 1_000_000_000));
            assert_eq!(bound.window(u64::MAX), 705 * PACKET);
        }
    }

    #[test]
    fn acknowledgements_that_waited_for_a_thread_widen_the_window() {
        let mut bound = after(8, 20, 100);
        let before = bound.window(u64::MAX);
        let acked_bytes = 100 * PACKET;
        bound.on_ack(&AckSample {
            now: Timestamp::from_nanos(24_000_000),
            acked_bytes,
            ..AckSample::default()
        });
        assert!(bound.window(u64::MAX) > before + 50 * PACKET, "{}", bound.window(u64::MAX));
    }

    // test of: auto/schedule-aware-start
    #[test]
    fn bursts_are_as_large_as_lumps_allow_until_something_is_lost() {
        let mut bound = after(8, 20, 100);
        let mut round = |lost_bytes| {
            let now = Timestamp::from_nanos(24_000_000);
            bound.on_ack(&AckSample {
                now,
                acked_bytes: 100 * PACKET,
                lost_bytes,
                round_ended: true,
                ..AckSample::default()
            });
            bound.burst(u64::MAX)
        };
        let lumpy = round(0);
        assert!(
            (12 * PACKET..=25 * PACKET).contains(&lumpy),
            "{lumpy}: a quarter of 100 packets, or of a round trip"
        );
        assert_eq!(round(PACKET), 5 * PACKET, "a buffer has shown its end");
        for calm in 1..16 {
            assert_eq!(round(0), 5 * PACKET, "{calm} rounds");
        }
        assert!(round(0) > 5 * PACKET, "and nothing more was lost");
    }
}
