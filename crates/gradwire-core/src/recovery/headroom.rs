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
}

/// Halves when an overflowing buffer shows, and grows back over sixteen clean windows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Headroom {
    per_mille: u64,
    window: LossCount,
    window_bytes: u64,
    /// Round trips that the present window has lasted.
    rounds: u64,
    /// Of a flow whose queue is a few packets whatever its rate.
    few: bool,
}

impl Headroom {
    /// All of it.
    pub(super) fn new(packet_bytes: u64) -> Self {
        let window_bytes = WINDOW_PACKETS * packet_bytes;
        Self { per_mille: FULL, window: LossCount::default(), window_bytes, rounds: 0, few: false }
    }

    /// The same of a few packets, as many for every flow. With fewer a flow still fills its path, so it need not wait until loss is surely
    /// no random loss; and flows are equal only while theirs are, so all of them get it back in the same time.
    pub(super) fn of_few(packet_bytes: u64) -> Self {
        Self { few: true, ..Self::new(packet_bytes) }
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
        let (halves, steps) = if self.few {
            (window.exceeds(FEW_LOSS_PERCENT), (rounds / STEP_ROUNDS).max(1))
        } else {
            (window.exceeds(LOSS_PERCENT), 1)
        };
        self.per_mille =
            if halves { (self.per_mille / 2).max(STEP) } else { (self.per_mille + steps * STEP).min(FULL) };
        window.exceeds(LOSS_PERCENT)
    }
}

const FULL: u64 = 1_000;
/// Sixteen clean windows give all of it back.
const STEP: u64 = FULL / 16;
/// A window of a slow flow lasts many round trips: each four count as one, or the slower one of two flows would stay so.
const STEP_ROUNDS: u64 = 4;
/// Enough that random loss of a tenth hardly ever looks like more than an eighth.
const WINDOW_PACKETS: u64 = 256;
/// Loss that is unlikely to be random. A queue is no condition: a flow that started into a full buffer takes the
/// full buffer for the path and never sees one.
const LOSS_PERCENT: u64 = 15;
/// Random loss of a twentieth hardly ever looks like more.
const FEW_LOSS_PERCENT: u64 = 10;

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
            headroom.on_round(LossCount { acked: 890, lost: 110 });
            assert_eq!(headroom.per_mille(), FULL / 2);
            (0..rounds).for_each(|_| _ = headroom.on_round(LossCount { acked: round, lost: 0 }));
            headroom.per_mille()
        };
        assert_eq!(after(8, 32), after(64, 32));
        assert!(after(8, 32) > FULL - STEP);
    }

    #[test]
    fn a_single_lost_packet_of_a_short_round_changes_nothing() {
        let mut headroom = Headroom::new(1_000);
        assert!(!headroom.on_round(LossCount { acked: 1_000, lost: 1_000 }));
        assert_eq!(headroom.per_mille(), FULL);
    }
}
