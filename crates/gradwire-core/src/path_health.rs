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
    /// Sum of the squares of what was found lost at a time.
    squares: u64,
}

impl Tally {
    pub(crate) fn new(acked: u32, lost: u32) -> Self {
        Self { decided: acked + lost, lost, squares: u64::from(lost).pow(2) }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.decided += other.decided;
        self.lost += other.lost;
        self.squares += other.squares;
    }

    /// As many losses as `lost` at most, one at a time, among as many packets as they had.
    fn scaled_to(self, lost: u32) -> Self {
        let kept = self.lost.min(lost);
        let decided = u64::from(self.decided) * u64::from(kept) / u64::from(self.lost.max(1));
        Self { decided: decided as u32, lost: kept, squares: u64::from(kept) }
    }

    /// So many that counted as lost have come after all, and count among those that arrived.
    fn take_back(&mut self, packets: u32) {
        let lost = self.lost.saturating_sub(packets);
        self.squares = (u128::from(self.squares) * u128::from(lost) / u128::from(self.lost.max(1))) as u64;
        *self = Self { decided: self.decided - (self.lost - lost), lost, ..*self };
    }

    fn halve(&mut self) {
        *self = Self { decided: self.decided / 2, lost: self.lost / 2, squares: self.squares / 2 };
    }

    /// Lost packets that `others` would have had among as many as these.
    fn expected_by(self, others: Self) -> f64 {
        f64::from(self.decided) * (f64::from(others.lost) + 0.5) / (f64::from(others.decided) + 1.0)
    }

    /// Whether this loses more than `others` beyond chance. Packets that overflow a buffer are lost in lumps, so what
    /// varies is the number of lumps: the sum of their squares is the variance of what was lost. Six lumps where the
    /// others have none are beyond chance, however large one is. Without others there is no evidence.
    fn exceeds(self, others: Self) -> bool {
        let lump = others.squares as f64 / f64::from(others.lost.max(1));
        let expected = self.expected_by(others);
        let excess = f64::from(self.lost) - expected;
        let by_others = lump * expected * (1.0 + f64::from(self.decided) / (f64::from(others.decided) + 1.0));
        excess > 0.0 && excess * excess > EVIDENCE * (self.squares as f64).max(by_others)
    }
}

/// Judgement of one path.
#[derive(Debug)]
pub(crate) struct Health {
    recent: Tally,
    /// What is not judged, because the path looks for its rate, but makes it worse than another.
    early: Tally,
    /// Packets lost since the last one that arrived.
    lost_in_a_row: u32,
    suspended: bool,
    /// What became of copies, and how many it takes to judge by them.
    copies: Tally,
    needed: u32,
    /// Packets decided since the path was trusted again.
    trusted_for: u32,
    /// Packets that are still to be decided before the path is judged: while it looks for its rate it overflows buffers.
    grace: u32,
    lags: bool,
}

impl Health {
    pub(crate) fn new() -> Self {
        Self {
            recent: Tally::default(),
            early: Tally::default(),
            lost_in_a_row: 0,
            suspended: false,
            copies: Tally::default(),
            needed: 0,
            trusted_for: TRUSTED_LONG,
            grace: GRACE,
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
        let (lost, decided) = (self.recent.lost + self.early.lost, self.recent.decided + self.early.decided);
        u64::from(lost) * 1_024 / u64::from(decided.max(1))
    }

    /// Packets lost since the last one that arrived.
    pub(crate) fn lost_in_a_row(&self) -> u32 {
        self.lost_in_a_row
    }

    /// Whether the latest packet that was decided arrived.
    pub(crate) fn works(&self) -> bool {
        self.lost_in_a_row == 0
    }

    /// Whether nothing comes through at the moment.
    pub(crate) fn seems_dead(&self) -> bool {
        self.lost_in_a_row >= DEAD_AFTER
    }

    /// Data packets whose fate became known: arrived ones first, then lost ones.
    pub(crate) fn on_packets(&mut self, acked: u32, lost: u32) {
        if self.suspended {
            self.note_row(acked, lost);
            // What was on its way when the path was suspended says little about its recovery.
            return;
        }
        self.note_row(acked, lost);
        if self.grace > 0 {
            self.grace = self.grace.saturating_sub(acked + lost);
            self.early.add(Tally::new(acked, lost));
            if self.grace == 0 {
                self.early = Tally::default();
            }
            return;
        }
        self.recent.add(Tally::new(acked, lost));
        self.trusted_for = self.trusted_for.saturating_add(acked + lost);
        while self.recent.decided > MEMORY {
            self.recent.halve();
        }
    }

    /// Of the data packets that arrived so many had counted as lost.
    pub(crate) fn on_unlost(&mut self, packets: u32) {
        match (self.suspended, self.grace) {
            (true, _) => {}
            (false, 0) => self.recent.take_back(packets),
            (false, _) => self.early.take_back(packets),
        }
    }

    /// Copies whose fate became known. Enough of them, of which no more are lost than on the `others`, bring a
    /// suspended path back: then `true`.
    pub(crate) fn on_copies(&mut self, acked: u32, lost: u32, others: Tally) -> bool {
        self.note_row(acked, lost);
        self.copies.add(Tally::new(acked, lost));
        let expected = self.copies.expected_by(others);
        if f64::from(self.copies.lost) > expected + expected / 4.0 {
            // One too many: from the beginning.
            self.copies = Tally::default();
        } else if self.suspended && self.copies.decided >= self.needed {
            self.trust();
            return true;
        }
        false
    }

    fn note_row(&mut self, acked: u32, lost: u32) {
        // What was found lost together with an arrival is older than that.
        self.lost_in_a_row = if acked > 0 { 0 } else { self.lost_in_a_row.saturating_add(lost) };
    }

    /// Compares with the other trusted paths.
    // claim: mlt/gray-path
    pub(crate) fn judge(&mut self, others: Tally) {
        let dead = self.seems_dead() && others.decided >= MEMORY / 4;
        if self.suspended || !dead && !self.recent.exceeds(others) {
            return;
        }
        self.suspended = true;
        self.copies = Tally::default();
        let again = if self.trusted_for < TRUSTED_LONG { self.needed * 2 } else { 0 };
        // So many that a path which has not healed would lose three of them.
        let telling = 3 * self.recent.decided / self.recent.lost.max(1);
        self.needed = again.max(telling).clamp(COPIES_MIN, COPIES_MAX);
    }

    /// Compares the round trip with the least of the paths.
    pub(crate) fn judge_delay(&mut self, rtt: Duration, least: Duration) {
        let factor = if self.lags { LAG_OVER } else { LAG_FACTOR };
        self.lags = rtt > least * factor + LAG_MIN;
    }

    /// Gives the share back. What made the path bad is forgotten but for a rest: if it has not healed after all, a few
    /// more losses show that, and if it has, they never come.
    pub(crate) fn trust(&mut self) {
        self.suspended = false;
        self.lags = false;
        self.recent = self.recent.scaled_to(PRIOR_LOST);
        self.early = Tally::default();
        self.trusted_for = 0;
        self.grace = GRACE_AGAIN;
    }
}

/// Packets that are remembered, half of them for certain: enough to tell 1 % from nothing.
const MEMORY: u32 = 1_024;
/// Variances by which a path must lose more than the others: two and a half standard deviations.
const EVIDENCE: f64 = 6.0;
/// Fewest copies that a healed path must carry: one that still loses 30 % does so once in 300 times.
const COPIES_MIN: u32 = 16;
/// Most copies, for a path that came back too early again and again: one that still loses 2 % does so once in 170
/// times.
const COPIES_MAX: u32 = 256;
/// A path that was trusted for so many packets starts afresh: what it had was another disturbance.
const TRUSTED_LONG: u32 = 8_192;
/// Packets in which a path finds its rate from the beginning: five round trips of growth from two packets.
const GRACE: u32 = 256;
/// The same for a path that comes back: if it has not healed after all, that should cost little.
const GRACE_AGAIN: u32 = 64;
/// Losses that a path which comes back is still charged with: a little less than it takes to suspend it.
const PRIOR_LOST: u32 = 4;
/// So many losses in a row are no chance on a path that works at all.
const DEAD_AFTER: u32 = 24;
/// Round trips longer than this multiple of the least one, and by more than a scheduler's jitter, hold up transfers
/// more than their path adds: nearly all of a transfer is through when its first slow packet arrives.
const LAG_FACTOR: u32 = 4;
/// A path that lagged is trusted again below this multiple.
const LAG_OVER: u32 = 2;
const LAG_MIN: Duration = Duration::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    const CLEAN: Tally = Tally { decided: 1_500, lost: 0, squares: 0 };

    /// `lost` of `decided`, found one at a time.
    fn single(decided: u32, lost: u32) -> Tally {
        Tally { decided, lost, squares: u64::from(lost) }
    }

    #[test]
    fn seven_losses_among_clean_paths_are_no_chance_and_one_lump_may_be() {
        assert!(!single(50, 6).exceeds(CLEAN));
        assert!(single(50, 7).exceeds(CLEAN));
        assert!(!Tally::new(0, 30).exceeds(CLEAN));
    }

    #[test]
    fn where_packets_are_lost_in_lumps_it_takes_more() {
        let others = single(1_200, 60);
        assert!(single(400, 46).exceeds(others));
        let lumpy = Tally { squares: 60 * 10, ..others };
        assert!(!single(400, 46).exceeds(lumpy));
        assert!(single(400, 120).exceeds(lumpy), "30 %");
    }

    #[test]
    fn a_window_of_any_size_may_be_lost_at_once() {
        let mut health = Health::new();
        health.on_packets(GRACE, 0);
        health.on_packets(0, 70_000);
        health.judge(CLEAN);
        assert!(!health.is_trusted());
        assert_eq!(Tally::new(0, u32::MAX).squares, u64::from(u32::MAX).pow(2));
    }

    #[test]
    fn without_others_there_is_nothing_to_compare_with() {
        let mut health = Health::new();
        health.on_packets(GRACE, 0);
        health.on_packets(0, 500);
        health.judge(Tally::default());
        assert!(health.is_trusted() && health.seems_dead());
    }

    fn suspend(health: &mut Health, acked: u32, others: Tally) {
        health.on_packets(GRACE, 0);
        (0..20).for_each(|_| health.on_packets(acked, 1));
        health.judge(others);
        assert!(!health.is_trusted());
    }

    // test of: mlt/gray-path
    #[test]
    fn only_copies_bring_a_path_back_and_each_time_it_takes_more() {
        let mut health = Health::new();
        let mut needed = COPIES_MIN;
        for _ in 0..7 {
            suspend(&mut health, 4, CLEAN);
            health.on_packets(500, 0);
            assert!(!health.on_copies(needed - 1, 0, CLEAN), "{needed}");
            health.on_copies(0, 1, CLEAN);
            assert!(!health.on_copies(needed - 1, 0, CLEAN), "a lost copy starts the count again");
            assert!(health.on_copies(1, 0, CLEAN));
            assert!(health.is_trusted());
            needed = (needed * 2).min(COPIES_MAX);
        }
        (0..2).for_each(|_| health.on_packets(TRUSTED_LONG, 0));
        suspend(&mut health, 4, CLEAN);
        assert!(health.on_copies(COPIES_MAX * 3 / 4, 0, CLEAN), "a new disturbance after a long good time");
    }

    #[test]
    fn a_path_may_be_dead_for_as_long_as_it_takes() {
        let mut health = Health::new();
        suspend(&mut health, 4, CLEAN);
        (0..2).for_each(|_| health.on_packets(0, u32::MAX));
        assert!(health.seems_dead() && !health.works());
    }

    #[test]
    fn the_less_a_path_lost_the_more_copies_it_takes_to_see_that_it_has_healed() {
        let mut health = Health::new();
        suspend(&mut health, 49, CLEAN);
        assert!(!health.on_copies(149, 0, CLEAN));
        assert!(health.on_copies(1, 0, CLEAN));
    }

    #[test]
    fn a_path_comes_back_though_it_loses_as_much_as_the_others() {
        let others = single(1_500, 150);
        let mut health = Health::new();
        suspend(&mut health, 1, others);
        health.on_copies(14, 1, others);
        assert!(health.on_copies(1, 0, others));
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
            single(packets, lost.count() as u32)
        };
        for percent in [0, 1, 5, 20] {
            let mistaken = (0..1_000).filter(|_| lost_of(400, percent).exceeds(lost_of(1_200, percent)));
            let mistaken = mistaken.count();
            assert!(mistaken <= 10, "{mistaken} of 1000 at {percent} %");
        }
    }
}
