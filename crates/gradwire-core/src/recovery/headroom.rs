//! How much of the window above one bandwidth-delay product a flow may use.
//!
//! Asked by [`super::BottleneckController`] at the end of each round trip. A standing queue that costs packets is
//! too long for its buffer, however short it is; what the model itself needs is never touched.

/// What one or more round trips have shown.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LossCount {
    pub(super) acked: u64,
    pub(super) lost: u64,
}

impl LossCount {
    /// Whether more than `percent` of the bytes that were decided about are lost.
    pub(super) fn exceeds(&self, percent: u64) -> bool {
        self.lost * 100 > (self.lost + self.acked) * percent
    }

    /// Bytes that the path carried or would have carried but for random loss.
    pub(super) fn carried(&self) -> u64 {
        self.acked.saturating_add(self.lost.min(self.acked / MADE_UP_OF))
    }
}

/// Loss up to a sixth is made up for; more is not random.
pub(super) const MADE_UP_OF: u64 = 6;

/// Shrinks when an overflowing buffer shows, and grows back over sixteen clean windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headroom {
    per_mille: u64,
    window: LossCount,
    window_bytes: u64,
    /// Round trips that the present window has lasted.
    rounds: u64,
    /// What loss takes of it, and how much of the time gives it back.
    kind: Kind,
}

/// Which packets these are.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A part of the product, which grows with the flow's rate.
    Product,
    /// A share of the queue, which all senders of an incast are told: there is nothing to find out slowly.
    Share,
    /// A few, as many for every flow: more loss than `percent` leaves so many thousandths of them.
    Few { percent: u64, left: u64 },
}

impl Headroom {
    /// All of it.
    pub(super) fn new(packet_bytes: u64) -> Self {
        let window_bytes = WINDOW_PACKETS * packet_bytes;
        Self { per_mille: FULL, window: LossCount::default(), window_bytes, rounds: 0, kind: Kind::Product }
    }

    /// The same of a few packets, as many for every flow. With fewer a flow still fills its path, so it need not wait until loss is surely
    /// no random loss; and flows are equal only while theirs are, so all of them get it back in the same time.
    pub(super) fn of_few(packet_bytes: u64) -> Self {
        Self { kind: Kind::Few { percent: FEW_LOSS_PERCENT, left: FULL / 2 }, ..Self::new(packet_bytes) }
    }

    /// The same of packets whose queue all flows see empty together. Less at a time: flows that lose a little more than others in one window
    /// would have half of what those have until the next.
    pub(super) fn of_few_in_step(packet_bytes: u64) -> Self {
        Self { kind: Kind::Few { percent: STEP_LOSS_PERCENT, left: STEP_LEFT }, ..Self::new(packet_bytes) }
    }

    /// Whether it is that of a share of the queue, in place of a product.
    pub(super) fn set_shared(&mut self, shared: bool) {
        self.kind = if shared { Kind::Share } else { Kind::Product };
    }

    /// The share in thousandths.
    pub(super) fn per_mille(&self) -> u64 {
        self.per_mille
    }

    /// Takes one round trip. Whether a buffer overflows.
    pub(super) fn on_round(&mut self, round: LossCount) -> bool {
        self.window.acked += round.acked;
        self.window.lost += round.lost;
        self.rounds += 1;
        if self.window.acked + self.window.lost < self.window_bytes {
            return false;
        }
        let window = core::mem::take(&mut self.window);
        let rounds = core::mem::take(&mut self.rounds);
        let (percent, left, steps) = match self.kind {
            Kind::Product => (LOSS_PERCENT, FULL / 2, 1),
            Kind::Share => (LOSS_PERCENT, FULL / 2, (rounds / STEP_ROUNDS).clamp(1, SHARE_STEPS_MAX)),
            Kind::Few { percent, left } => (percent, left, (rounds / STEP_ROUNDS).max(1)),
        };
        self.per_mille = if window.exceeds(percent) {
            (self.per_mille * left / FULL).max(STEP)
        } else {
            (self.per_mille + steps * STEP).min(FULL)
        };
        window.exceeds(LOSS_PERCENT)
    }
}

const FULL: u64 = 1_000;
/// Sixteen clean windows give all of it back.
const STEP: u64 = FULL / 16;
/// A window of a slow flow lasts many round trips: each four count as one, or the slower one of two flows would stay so.
const STEP_ROUNDS: u64 = 4;
/// Four clean windows at least: windows of an incast of dozens last a hundred round trips, and where the buffer is too small for all of them
/// every other one would overflow it.
const SHARE_STEPS_MAX: u64 = 4;
/// Enough that random loss of a tenth hardly ever looks like more than an eighth.
const WINDOW_PACKETS: u64 = 256;
/// Loss that is unlikely to be random. A queue is no condition: a flow that started into a full buffer takes the
/// full buffer for the path and never sees one.
const LOSS_PERCENT: u64 = 15;
/// Random loss of a twentieth never looks like more.
const FEW_LOSS_PERCENT: u64 = 12;
/// The same, where a mistake costs an eighth: one of 15 windows. Beside the kernel's bbr, which loses as much, in a buffer of one product and
/// 1 ms a flow had 64 % with 8, 56 with 7 and 57 with 6.
const STEP_LOSS_PERCENT: u64 = 7;
const STEP_LEFT: u64 = FULL * 7 / 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn after(rounds: u32, lost: u64) -> u64 {
        let mut headroom = Headroom::new(1);
        (0..rounds).for_each(|_| _ = headroom.on_round(LossCount { acked: 1_000 - lost, lost }));
        headroom.per_mille()
    }

    #[test]
    fn loss_counts_from_fifteen_percent_on() {
        assert_eq!(after(10, 150), FULL);
        assert_eq!(after(10, 151), STEP);
    }

    #[test]
    fn clean_windows_give_the_headroom_back() {
        let mut headroom = Headroom::new(1);
        (0..10).for_each(|_| assert!(headroom.on_round(LossCount { acked: 800, lost: 200 })));
        (0..16).for_each(|_| assert!(!headroom.on_round(LossCount { acked: 1_000, lost: 0 })));
        assert_eq!(headroom.per_mille(), FULL);
    }

    #[test]
    fn of_a_few_packets_less_loss_takes_a_part_and_slow_flows_get_it_back_in_the_same_time_as_fast_ones() {
        let after = |round: u64, rounds: u64| {
            let mut headroom = Headroom::of_few(1);
            headroom.on_round(LossCount { acked: 870, lost: 130 });
            assert_eq!(headroom.per_mille(), FULL / 2);
            (0..rounds).for_each(|_| _ = headroom.on_round(LossCount { acked: round, lost: 0 }));
            headroom.per_mille()
        };
        assert_eq!(after(8, 32), after(64, 32));
        assert!(after(8, 32) > FULL - STEP);
    }

    #[test]
    fn a_share_comes_back_within_a_hundred_short_round_trips_and_never_at_once() {
        let after = |shared, round: u64, rounds: u64| {
            let mut headroom = Headroom::new(1);
            headroom.set_shared(shared);
            (0..10).for_each(|_| assert!(headroom.on_round(LossCount { acked: 800, lost: 200 })));
            (0..rounds).for_each(|_| _ = headroom.on_round(LossCount { acked: round, lost: 0 }));
            headroom.per_mille()
        };
        assert_eq!((after(true, 18, 90), after(false, 18, 90)), (FULL, 7 * STEP));
        assert_eq!(after(true, 2, 128), 5 * STEP, "of one clean window of many round trips");
        assert_eq!(after(true, 1_000, 14), 15 * STEP, "of long round trips as otherwise");
    }

    #[test]
    fn a_single_lost_packet_of_a_short_round_changes_nothing() {
        let mut headroom = Headroom::new(1_000);
        assert!(!headroom.on_round(LossCount { acked: 1_000, lost: 1_000 }));
        assert_eq!(headroom.per_mille(), FULL);
    }
}
