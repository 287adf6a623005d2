//! When is a transfer complete? One type answers for every preset.
//!
//! A [`Contract`] is plain data and [`Contract::verdict`] a pure function of [`Progress`], called by the
//! receiver after each packet and when its timer fires. A preset is one value of it; no code
//! asks which preset is in use.

use core::time::Duration;

/// The conditions under which a receiver stops waiting.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Contract {
    /// Share of the bytes that may be missing when the transfer closes: 0 is exact.
    pub loss_bound: f32,
    /// `true`: the bound is used only after the sender has sent everything once, so that nothing which still
    /// flows is cut. `false`: the transfer is stopped as soon as the bound is met (MLT section 4.2.3).
    pub after_first_pass: bool,
    /// After this time at least `soft.min_fraction` is enough (LTP section III-B).
    pub soft: Option<Soft>,
    /// After this time since the first packet, `floor` is enough.
    pub deadline: Option<Duration>,
    /// Least fraction that a deadline or early timeout may accept.
    pub floor: f32,
    /// Close when nothing arrives any more (ULTIMA section 3.3.2).
    pub early: Option<Early>,
    /// How long packets may be overtaken by later ones, at least, before they count as missing: a connection allows more
    /// where the round trip that it measures is longer or its paths differ.
    pub reorder_slack: Duration,
    /// Chunks at each end of the transfer that must arrive whatever the other rules say (LTP section III-E).
    pub critical_chunks: u16,
    /// Whether what is missing is asked for again. Without it a deadline must end the wait.
    pub repairs: bool,
}

/// LTP's loss-tolerant threshold.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Soft {
    /// Time since the first packet.
    pub after: Duration,
    /// Fraction of the bytes that must be in.
    pub min_fraction: f32,
}

/// ULTIMA's early timeout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Early {
    /// How long nothing may have arrived, once last-percentile packets were seen.
    pub quiet: Duration,
}

/// What the receiver knows about one transfer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Progress {
    /// Time since its first packet arrived, or the sender's first word that it has sent everything: what is lost as a
    /// whole must end too.
    pub elapsed: Duration,
    /// Time since its latest new packet, or the sender's first word that everything has been sent. In the first pass
    /// also since the latest packet of another transfer of the same sender: it sends the more urgent one first.
    pub quiet: Duration,
    /// Bytes that are in.
    pub received_bytes: u64,
    /// Bytes of the whole transfer.
    pub total_bytes: u64,
    /// Critical packets that are known to be missing.
    pub critical_missing: u32,
    /// A packet of the last percent was seen.
    pub last_percentile_seen: bool,
    /// The sender has sent everything at least once, and said so or shown it.
    pub first_pass_over: bool,
    /// Time since this was known: what was overtaken in the first pass comes soon after, and all else is a repair.
    pub since_first_pass: Duration,
}

impl Progress {
    /// The last percent has been seen, or the sender's word that it has sent everything: the whole last percent may be
    /// lost, and that word is repeated until it is answered.
    fn is_near_its_end(&self) -> bool {
        self.last_percentile_seen || self.first_pass_over
    }
}

/// How long packets may be overtaken, as the paths show it now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Overtaken {
    /// By packets of any path.
    pub(crate) most: Duration,
    /// Because the slowest path takes so much longer than the fastest; zero on a single one.
    pub(crate) by_path: Duration,
}

/// Why a transfer closed, in the order in which the reasons accept less.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum CloseReason {
    /// Every byte arrived.
    AllArrived,
    /// The loss bound was met.
    BoundMet,
    /// LTP's soft threshold.
    SoftThreshold,
    /// ULTIMA's early timeout.
    EarlyTimeout,
    /// The deadline.
    Deadline,
}

impl CloseReason {
    /// Every reason, in order.
    pub const ALL: [Self; 5] =
        [Self::AllArrived, Self::BoundMet, Self::SoftThreshold, Self::EarlyTimeout, Self::Deadline];

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllArrived => "all_arrived",
            Self::BoundMet => "bound_met",
            Self::SoftThreshold => "soft_threshold",
            Self::EarlyTimeout => "early_timeout",
            Self::Deadline => "deadline",
        }
    }
}

/// The decision, with its reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Not yet; ask again after this much more time even if nothing arrives (`None`: only a packet can help).
    Wait(Option<Duration>),
    /// Over.
    Close(CloseReason),
}

impl Contract {
    /// Everything must arrive: preset `reliable`, and every collective that nobody opted in.
    pub const EXACT: Self = Self {
        loss_bound: 0.0,
        after_first_pass: true,
        soft: None,
        deadline: None,
        floor: 1.0,
        early: None,
        reorder_slack: Duration::ZERO,
        critical_chunks: 0,
        repairs: true,
    };

    /// Whether this contract can close a transfer with bytes missing.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.loss_bound <= 0.0 && self.soft.is_none() && self.deadline.is_none() && self.early.is_none()
    }

    /// Least number of the `total` chunks (or bytes) that satisfies `fraction`, rounded up.
    #[must_use]
    pub fn needed(total: u64, fraction: f32) -> u64 {
        let exact = total as f64 * f64::from(fraction.clamp(0.0, 1.0));
        let floor = exact as u64;
        // A bound of 0.9 must not demand one chunk more because 0.9 has no exact binary form.
        if exact - (floor as f64) > 1e-6 * (total as f64).max(1.0) {
            floor + 1
        } else {
            floor
        }
    }

    /// Decides about a transfer.
    #[must_use]
    pub fn verdict(&self, progress: &Progress) -> Verdict {
        if progress.received_bytes >= progress.total_bytes {
            return Verdict::Close(CloseReason::AllArrived);
        }
        if self.is_exact() || progress.critical_missing > 0 {
            return Verdict::Wait(None);
        }
        let mut wait = None;
        for decision in
            [self.bound(progress), self.soft(progress), self.early(progress), self.deadline(progress)]
        {
            match decision {
                Verdict::Close(reason) => return Verdict::Close(reason),
                Verdict::Wait(Some(left)) => wait = Some(wait.map_or(left, |w: Duration| w.min(left))),
                Verdict::Wait(None) => {}
            }
        }
        Verdict::Wait(wait)
    }

    /// Whether the verdict may depend on how long packets may be overtaken: most packets come before it does, and it is measured.
    pub(crate) fn minds_order(&self, progress: &Progress) -> bool {
        let is_late = self.deadline.is_some_and(|deadline| progress.elapsed >= deadline);
        progress.first_pass_over || is_late || self.early.is_some() && progress.last_percentile_seen
    }

    /// The same where packets may be overtaken for so long. Silence on the fast paths is none while the slow ones still carry what left before.
    pub(crate) fn minding(&self, overtaken: Overtaken) -> Self {
        let early = self.early.map(|early| Early { quiet: early.quiet.max(overtaken.by_path) });
        Self { reorder_slack: self.reorder_slack.max(overtaken.most), early, ..*self }
    }

    fn has(progress: &Progress, fraction: f32) -> bool {
        progress.received_bytes >= Self::needed(progress.total_bytes, fraction)
    }

    // claim: mlt/bounded-loss, auto/nothing-lost-without-loss
    fn bound(&self, progress: &Progress) -> Verdict {
        if self.loss_bound <= 0.0 || !Self::has(progress, 1.0 - self.loss_bound) {
            return Verdict::Wait(None);
        }
        if !self.after_first_pass {
            return Verdict::Close(CloseReason::BoundMet);
        }
        if !progress.first_pass_over {
            return Verdict::Wait(None);
        }
        Self::after(progress.quiet, self.reorder_slack, CloseReason::BoundMet)
    }

    fn soft(&self, progress: &Progress) -> Verdict {
        match self.soft {
            Some(soft) if Self::has(progress, soft.min_fraction) => {
                Self::after(progress.elapsed, soft.after, CloseReason::SoftThreshold)
            }
            _ => Verdict::Wait(None),
        }
    }

    // claim: ultima/early-timeout
    fn early(&self, progress: &Progress) -> Verdict {
        match self.early {
            Some(early) if progress.is_near_its_end() && Self::has(progress, self.floor) => {
                Self::after(progress.quiet, early.quiet, CloseReason::EarlyTimeout)
            }
            _ => Verdict::Wait(None),
        }
    }

    /// A deadline ends the wait for retransmissions and for a sender that fell silent, never a first pass that still
    /// flows, or its overtaken packets, if the contract promises so (`after_first_pass`).
    // claim: auto/no-needless-wait
    fn deadline(&self, progress: &Progress) -> Verdict {
        let Some(deadline) = self.deadline else { return Verdict::Wait(None) };
        if !Self::has(progress, self.floor) {
            return Verdict::Wait(None);
        }
        if progress.elapsed < deadline {
            return Verdict::Wait(Some(deadline - progress.elapsed));
        }
        if self.after_first_pass && !progress.first_pass_over {
            let silent = self.reorder_slack.max(deadline / 4);
            return Self::after(progress.quiet, silent, CloseReason::Deadline);
        }
        let overtaken = if self.after_first_pass { self.reorder_slack } else { Duration::ZERO };
        // Not since the latest packet: repairs that keep coming would put the end off again and again.
        Self::after(progress.since_first_pass, overtaken, CloseReason::Deadline)
    }

    fn after(elapsed: Duration, limit: Duration, reason: CloseReason) -> Verdict {
        if elapsed >= limit {
            Verdict::Close(reason)
        } else {
            Verdict::Wait(Some(limit - elapsed))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MLT: Contract = Contract { loss_bound: 0.1, after_first_pass: false, ..Contract::EXACT };
    const AUTO: Contract = Contract {
        loss_bound: 0.05,
        deadline: Some(Duration::from_millis(100)),
        floor: 0.5,
        reorder_slack: Duration::from_millis(1),
        ..Contract::EXACT
    };

    #[test]
    fn reasons_are_named_in_the_order_in_which_they_accept_less() {
        assert!(CloseReason::ALL.is_sorted_by(|before, after| before < after));
        assert_eq!(CloseReason::ALL.map(|reason| reason as usize), [0, 1, 2, 3, 4], "none is left out");
    }

    proptest! {
        /// Who measures how long packets may be overtaken does so for these verdicts only.
        #[test]
        fn a_verdict_that_does_not_mind_the_order_is_the_same_whatever_may_be_overtaken(
            (ms, quiet_ms, since_ms, slack_ms) in (0_u64..250, 0_u64..250, 0_u64..250, 0_u64..250),
            (received, first_pass_over, last_percentile_seen) in (0_u64..1_001, any::<bool>(), any::<bool>()),
            after_first_pass in any::<bool>(),
        ) {
            let progress = Progress {
                quiet: Duration::from_millis(quiet_ms),
                since_first_pass: Duration::from_millis(since_ms),
                first_pass_over,
                last_percentile_seen,
                ..progress(received, ms)
            };
            let early = Some(Early { quiet: Duration::from_millis(20) });
            let contract = Contract { after_first_pass, early, ..AUTO };
            let by_path = Duration::from_millis(slack_ms);
            let slack = contract.minding(Overtaken { most: by_path * 2, by_path });
            let is_alike = contract.verdict(&progress) == slack.verdict(&progress);
            prop_assert!(is_alike || contract.minds_order(&progress));
        }
    }

    /// A transfer of 1000 bytes of which `received_bytes` are in and which has been going on for `ms`.
    fn progress(received_bytes: u64, ms: u64) -> Progress {
        Progress {
            elapsed: Duration::from_millis(ms),
            quiet: Duration::ZERO,
            received_bytes,
            total_bytes: 1000,
            critical_missing: 0,
            last_percentile_seen: false,
            first_pass_over: false,
            since_first_pass: Duration::ZERO,
        }
    }

    #[test]
    fn needed_rounds_up_but_not_because_of_binary_fractions() {
        for (total, fraction, needed) in
            [(10, 0.9, 9), (1000, 0.95, 950), (3, 0.9, 3), (7, 0.5, 4), (0, 0.9, 0), (5, 0.0, 0), (5, 1.0, 5)]
        {
            assert_eq!(Contract::needed(total, fraction), needed, "{fraction} of {total}");
        }
    }

    #[test]
    fn an_exact_transfer_waits_for_its_last_byte_however_long_it_takes() {
        let mut late = progress(999, 1_000_000);
        (late.quiet, late.first_pass_over, late.last_percentile_seen) = (late.elapsed, true, true);
        assert_eq!(Contract::EXACT.verdict(&late), Verdict::Wait(None));
        assert_eq!(Contract::EXACT.verdict(&progress(1000, 0)), Verdict::Close(CloseReason::AllArrived));
    }

    // test of: mlt/bounded-loss
    #[test]
    fn mlt_closes_with_the_byte_that_meets_its_bound_though_data_still_flows() {
        assert_eq!(MLT.verdict(&progress(899, 50)), Verdict::Wait(None));
        assert_eq!(MLT.verdict(&progress(900, 0)), Verdict::Close(CloseReason::BoundMet));
    }

    #[test]
    fn auto_waits_for_packets_that_were_overtaken_before_it_counts_them_as_missing() {
        let mut over = progress(960, 10);
        over.first_pass_over = true;
        assert_eq!(AUTO.verdict(&over), Verdict::Wait(Some(AUTO.reorder_slack)));
        over.quiet = AUTO.reorder_slack;
        assert_eq!(AUTO.verdict(&over), Verdict::Close(CloseReason::BoundMet));
    }

    #[test]
    fn a_deadline_ends_the_wait_for_retransmissions_once_the_floor_is_in() {
        let mut over = progress(499, 100);
        over.first_pass_over = true;
        assert_eq!(AUTO.verdict(&over), Verdict::Wait(None), "less than the floor");
        over.received_bytes = 500;
        assert_eq!(AUTO.verdict(&over), Verdict::Wait(Some(AUTO.reorder_slack)), "packets may be overtaken");
        over.since_first_pass = AUTO.reorder_slack;
        assert_eq!(over.quiet, Duration::ZERO, "a repair that has just come puts the end off no further");
        assert_eq!(AUTO.verdict(&over), Verdict::Close(CloseReason::Deadline));
        over.elapsed = Duration::from_millis(30);
        assert_eq!(AUTO.verdict(&over), Verdict::Wait(Some(Duration::from_millis(70))));
    }

    #[test]
    fn a_sender_that_falls_silent_in_its_first_pass_is_not_waited_for_beyond_the_deadline() {
        let mut silent = progress(600, 200);
        silent.quiet = Duration::from_millis(24);
        assert_eq!(AUTO.verdict(&silent), Verdict::Wait(Some(Duration::from_millis(1))));
        silent.quiet = Duration::from_millis(25);
        assert_eq!(AUTO.verdict(&silent), Verdict::Close(CloseReason::Deadline));
    }

    // test of: ltp/early-close
    #[test]
    fn the_soft_threshold_takes_its_fraction_only_after_its_time() {
        let soft = Soft { after: Duration::from_millis(40), min_fraction: 0.8 };
        let ltp = Contract { soft: Some(soft), ..Contract::EXACT };
        assert_eq!(ltp.verdict(&progress(900, 39)), Verdict::Wait(Some(Duration::from_millis(1))));
        assert_eq!(ltp.verdict(&progress(900, 40)), Verdict::Close(CloseReason::SoftThreshold));
        assert_eq!(ltp.verdict(&progress(799, 90)), Verdict::Wait(None));
    }

    // test of: ultima/early-timeout
    #[test]
    fn the_early_timeout_needs_the_last_percentile_and_silence() {
        let early = Early { quiet: Duration::from_millis(2) };
        let ultima = Contract { early: Some(early), floor: 0.0, ..Contract::EXACT };
        let mut seen = progress(100, 50);
        seen.quiet = early.quiet;
        assert_eq!(ultima.verdict(&seen), Verdict::Wait(None));
        seen.last_percentile_seen = true;
        assert_eq!(ultima.verdict(&seen), Verdict::Close(CloseReason::EarlyTimeout));
        seen.quiet = Duration::ZERO;
        assert_eq!(ultima.verdict(&seen), Verdict::Wait(Some(early.quiet)));
    }

    #[test]
    fn a_critical_packet_that_is_missing_holds_up_every_rule() {
        let mut critical = progress(999, 1000);
        (critical.quiet, critical.first_pass_over, critical.critical_missing) = (critical.elapsed, true, 1);
        assert_eq!(AUTO.verdict(&critical), Verdict::Wait(None));
        assert_eq!(MLT.verdict(&critical), Verdict::Wait(None));
    }

    proptest! {
        // test of: auto/nothing-lost-without-loss
        #[test]
        fn auto_never_cuts_a_first_pass_that_still_flows(received in 0u64..1000, ms in 0u64..10_000, quiet_us in 0u64..1000) {
            let mut flowing = progress(received, ms);
            flowing.quiet = Duration::from_micros(quiet_us);
            prop_assert!(matches!(AUTO.verdict(&flowing), Verdict::Wait(_)));
        }

        #[test]
        fn no_deadline_however_short_cuts_a_first_pass_that_still_flows(
            received in 0u64..1000, ms in 0u64..10_000, deadline_ms in 1u64..1000, quiet_us in 0u64..1000, bound in 0f32..0.5,
        ) {
            let deadline = Some(Duration::from_millis(deadline_ms));
            let mut flowing = progress(received, ms);
            flowing.quiet = Duration::from_micros(quiet_us);
            let verdict = Contract { loss_bound: bound, deadline, ..AUTO }.verdict(&flowing);
            prop_assert!(matches!(verdict, Verdict::Wait(_)));
        }

        #[test]
        fn auto_waits_for_no_repair_that_its_bound_does_not_need_and_for_none_past_its_deadline(
            received in 0u64..1000, ms in 0u64..300, quiet_ms in 1u64..300,
        ) {
            let mut over = progress(received, ms);
            (over.quiet, over.first_pass_over) = (Duration::from_millis(quiet_ms), true);
            over.since_first_pass = over.quiet;
            let closes = matches!(AUTO.verdict(&over), Verdict::Close(_));
            prop_assert_eq!(closes, received >= 950 || ms >= 100 && received >= 500);
        }

        #[test]
        fn what_is_over_stays_over_as_time_goes_on(
            received in 0u64..=1000, ms in 0u64..200, quiet_ms in 0u64..200, later_ms in 0u64..1000, over: bool, seen: bool,
            after_first_pass: bool, bound in 0f32..0.5, floor in 0f32..1.0, min_fraction in 0f32..1.0,
        ) {
            let soft = Some(Soft { after: Duration::from_millis(50), min_fraction });
            let early = Some(Early { quiet: Duration::from_millis(20) });
            let contract = Contract { loss_bound: bound, after_first_pass, soft, early, floor, ..AUTO };
            let mut at = progress(received, ms);
            (at.quiet, at.first_pass_over, at.last_percentile_seen) = (Duration::from_millis(quiet_ms), over, seen);
            at.since_first_pass = if over { at.quiet } else { Duration::ZERO };
            let mut later = at;
            later.elapsed += Duration::from_millis(later_ms);
            later.quiet += Duration::from_millis(later_ms);
            later.since_first_pass += Duration::from_millis(if over { later_ms } else { 0 });
            match contract.verdict(&at) {
                Verdict::Close(_) => prop_assert!(matches!(contract.verdict(&later), Verdict::Close(_))),
                // It closes at the time that it asked to be looked at again, or has another time then: never sooner.
                Verdict::Wait(Some(left)) if later.elapsed - at.elapsed < left => {
                    prop_assert!(matches!(contract.verdict(&later), Verdict::Wait(_)));
                }
                Verdict::Wait(_) => {}
            }
        }

        #[test]
        fn no_rule_closes_with_less_than_it_promises(
            received in 0u64..=1000, ms in 0u64..200, quiet_ms in 0u64..200, over: bool, seen: bool,
            after_first_pass: bool, bound in 0f32..0.5, floor in 0f32..1.0, min_fraction in 0f32..1.0,
        ) {
            let soft = Some(Soft { after: Duration::from_millis(50), min_fraction });
            let early = Some(Early { quiet: Duration::from_millis(20) });
            let contract = Contract { loss_bound: bound, after_first_pass, soft, early, floor, ..AUTO };
            let mut at = progress(received, ms);
            (at.quiet, at.first_pass_over, at.last_percentile_seen) = (Duration::from_millis(quiet_ms), over, seen);
            at.since_first_pass = if over { at.quiet } else { Duration::ZERO };
            let least = match contract.verdict(&at) {
                Verdict::Wait(left) => {
                    prop_assert!(left.is_none_or(|left| left > Duration::ZERO));
                    return Ok(());
                }
                Verdict::Close(CloseReason::AllArrived) => 1.0,
                Verdict::Close(CloseReason::BoundMet) => 1.0 - bound,
                Verdict::Close(CloseReason::SoftThreshold) => min_fraction,
                Verdict::Close(CloseReason::EarlyTimeout | CloseReason::Deadline) => floor,
            };
            prop_assert!(received as f32 >= 1000.0 * least - 0.01, "{received} of 1000, {least} promised");
        }
    }
}
