//! Whether a path is as good as the others of its connection.
//!
//! ```text
//!   TRUSTED --loses clearly more than the others, or takes much longer--> SUSPENDED
//!      ^                                                                     |
//!      '------- so many copies in a row came through, and no longer late -----'
//! ```
//!
//! A suspended path carries no data that anybody waits for, only a trickle of copies of packets that go over another
//! path too: their fate shows when it has healed, and nothing is lost or late when it has not. A path that must be
//! suspended again soon has to prove itself for longer, so that one that loses a little does not come back all the time.
//!
//! Paths are compared with each other and never with a fixed bound: loss on all of them is the network's, and no path
//! is better. One that nobody can be compared with stays.

use core::time::Duration;

/// What one or more paths have shown lately.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) decided: u32,
    pub(crate) lost: u32,
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        self.decided += other.decided;
        self.lost += other.lost;
    }

    /// Whether this loses more than `others` beyond chance: by three standard deviations of the difference, plus one
    /// so that a lost packet or three say nothing. Without others there is no evidence.
    fn exceeds(self, others: Self) -> bool {
        let (decided, lost) = (f64::from(self.decided), f64::from(self.lost));
        let others_decided = f64::from(others.decided) + 1.0;
        let expected = decided * (f64::from(others.lost) + 0.5) / others_decided;
        let excess = lost - expected;
        let variance = expected * (1.0 + decided / others_decided) + 1.0;
        excess > 0.0 && excess * excess > 9.0 * variance
    }
}

/// Judgement of one path.
#[derive(Debug)]
pub(crate) struct Health {
    recent: Tally,
    /// Packets lost since the last one that arrived.
    lost_in_a_row: u32,
    suspended: bool,
    /// Copies that came through since the last one that was lost, and how many it takes.
    clean: u32,
    needed: u32,
    /// Packets decided since the path was trusted again.
    trusted_for: u32,
    lags: bool,
}

impl Health {
    pub(crate) fn new() -> Self {
        Self {
            recent: Tally::default(),
            lost_in_a_row: 0,
            suspended: false,
            clean: 0,
            needed: CLEAN_MIN,
            trusted_for: TRUSTED_LONG,
            lags: false,
        }
    }

    pub(crate) fn is_trusted(&self) -> bool {
        !self.suspended && !self.lags
    }

    /// Whether the path loses too much, whatever its delay.
    pub(crate) fn is_lossy(&self) -> bool {
        self.suspended || self.seems_dead()
    }

    pub(crate) fn recent(&self) -> Tally {
        self.recent
    }

    /// Share of the packets that were lost lately, in 1/1024.
    pub(crate) fn loss(&self) -> u64 {
        u64::from(self.recent.lost) * 1_024 / u64::from(self.recent.decided.max(1))
    }

    /// Whether nothing comes through at the moment.
    pub(crate) fn seems_dead(&self) -> bool {
        self.lost_in_a_row >= DEAD_AFTER
    }

    /// Data packets whose fate became known: arrived ones first, then lost ones.
    pub(crate) fn on_packets(&mut self, acked: u32, lost: u32) {
        if self.suspended {
            // What was on its way when the path was suspended says nothing about its recovery.
            return;
        }
        self.note_row(acked, lost);
        self.recent.add(Tally { decided: acked + lost, lost });
        self.trusted_for = self.trusted_for.saturating_add(acked + lost);
        while self.recent.decided > MEMORY {
            self.recent = Tally { decided: self.recent.decided / 2, lost: self.recent.lost / 2 };
        }
    }

    /// Copies whose fate became known.
    pub(crate) fn on_copies(&mut self, acked: u32, lost: u32) {
        self.note_row(acked, lost);
        self.clean = if lost > 0 { 0 } else { self.clean + acked };
        if self.suspended && self.clean >= self.needed {
            self.trust();
        }
    }

    fn note_row(&mut self, acked: u32, lost: u32) {
        self.lost_in_a_row = lost + if acked > 0 { 0 } else { self.lost_in_a_row };
    }

    /// Compares with the other trusted paths.
    // claim: mlt/gray-path
    pub(crate) fn judge(&mut self, others: Tally) {
        if self.suspended || !self.recent.exceeds(others) {
            return;
        }
        self.suspended = true;
        self.clean = 0;
        let again = self.trusted_for < TRUSTED_LONG;
        self.needed = if again { (self.needed * 2).min(CLEAN_MAX) } else { CLEAN_MIN };
    }

    /// Compares the round trip with the least of the paths.
    pub(crate) fn judge_delay(&mut self, rtt: Duration, least: Duration) {
        let factor = if self.lags { LAG_OVER } else { LAG_FACTOR };
        self.lags = rtt > least * factor + LAG_MIN;
    }

    /// Gives the share back.
    pub(crate) fn trust(&mut self) {
        self.suspended = false;
        self.lags = false;
        self.recent = Tally::default();
        self.trusted_for = 0;
    }
}

/// Packets that are remembered, half of them for certain: enough to tell 1 % from nothing.
const MEMORY: u32 = 512;
/// Copies in a row that a healed path must carry: a path that loses 30 % does so once in 300 times.
const CLEAN_MIN: u32 = 16;
/// As many for a path that came back too early again and again: one that loses 1 % does so once in 13 times.
const CLEAN_MAX: u32 = 256;
/// A path that was trusted for so many packets starts afresh: what it had was another disturbance.
const TRUSTED_LONG: u32 = 8_192;
/// So many losses in a row are no chance on a path that works at all.
const DEAD_AFTER: u32 = 8;
/// Round trips longer than this multiple of the least one, and by more than a scheduler's jitter, hold up transfers
/// more than their path adds: nearly all of a transfer is through when its first slow packet arrives.
const LAG_FACTOR: u32 = 4;
/// A path that lagged is trusted again below this multiple.
const LAG_OVER: u32 = 2;
const LAG_MIN: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: Tally = Tally { decided: 1_500, lost: 0 };

    #[test]
    fn four_losses_among_clean_paths_are_no_chance_and_three_may_be() {
        assert!(!Tally { decided: 50, lost: 3 }.exceeds(CLEAN));
        assert!(Tally { decided: 50, lost: 4 }.exceeds(CLEAN));
    }

    #[test]
    fn loss_that_all_paths_share_is_nobodys_fault() {
        for lost in [1, 5, 20, 60] {
            let others = Tally { decided: 1_200, lost: lost * 3 };
            assert!(!Tally { decided: 400, lost: lost + lost / 4 }.exceeds(others), "{lost} of 400");
        }
    }

    #[test]
    fn without_others_there_is_nothing_to_compare_with() {
        let mut health = Health::new();
        health.on_packets(0, 500);
        health.judge(Tally::default());
        assert!(health.is_trusted() && health.seems_dead());
    }

    // test of: mlt/gray-path
    #[test]
    fn only_copies_in_a_row_bring_a_path_back_and_each_time_it_takes_more() {
        let mut health = Health::new();
        let mut needed = CLEAN_MIN;
        for _ in 0..6 {
            health.on_packets(90, 10);
            health.judge(CLEAN);
            assert!(!health.is_trusted());
            health.on_packets(500, 0);
            health.on_copies(needed - 1, 0);
            assert!(!health.is_trusted(), "{needed}");
            health.on_copies(0, 1);
            health.on_copies(needed, 0);
            assert!(health.is_trusted());
            needed = (needed * 2).min(CLEAN_MAX);
        }
        health.on_packets(TRUSTED_LONG, 0);
        health.on_packets(0, 200);
        health.judge(CLEAN);
        health.on_copies(CLEAN_MIN, 0);
        assert!(health.is_trusted(), "a new disturbance after a long good time");
    }

    #[test]
    fn a_path_lags_from_four_round_trips_on_and_until_two() {
        let ms = Duration::from_millis;
        let mut health = Health::new();
        for (rtt, trusted) in [(5, true), (6, false), (4, false), (3, true), (5, true)] {
            health.judge_delay(ms(rtt), ms(1));
            assert_eq!(health.is_trusted(), trusted, "{rtt} ms");
        }
    }

    #[test]
    fn equal_loss_everywhere_is_mistaken_for_a_gray_path_at_most_once_in_a_hundred_times() {
        let mut random = 1_u64;
        let mut lost_of = |packets: u32, percent: u64| -> Tally {
            let lost = (0..packets).filter(|_| {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (random >> 33) % 100 < percent
            });
            Tally { decided: packets, lost: lost.count() as u32 }
        };
        for percent in [0, 1, 5, 20] {
            let mistaken = (0..1_000).filter(|_| lost_of(400, percent).exceeds(lost_of(1_200, percent)));
            let mistaken = mistaken.count();
            assert!(mistaken <= 10, "{mistaken} of 1000 at {percent} %");
        }
    }
}
