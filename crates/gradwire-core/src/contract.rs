//! When is a transfer complete? One type answers for every preset.
//!
//! A [`Contract`] is plain data and [`Contract::verdict`] a pure function of [`Progress`], called by the
//! receiver after each packet and when its timer fires. A preset of `DESIGN.md` is one value of it; no code
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
    /// Close when nothing arrives any more (ULTIMA section 3.2).
    pub early: Option<Early>,
    /// How long packets may be overtaken by later ones before they count as missing.
    pub reorder_slack: Duration,
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
    /// Time since its first packet arrived.
    pub elapsed: Duration,
    /// Time since its latest new packet, or the sender's first word that everything has been sent.
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
}

/// Why a transfer closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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

    fn has(progress: &Progress, fraction: f32) -> bool {
        progress.received_bytes >= Self::needed(progress.total_bytes, fraction)
    }

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

    fn early(&self, progress: &Progress) -> Verdict {
        match self.early {
            Some(early) if progress.last_percentile_seen && Self::has(progress, self.floor) => {
                Self::after(progress.quiet, early.quiet, CloseReason::EarlyTimeout)
            }
            _ => Verdict::Wait(None),
        }
    }

    /// A deadline ends the wait for retransmissions and for a sender that fell silent, never a first pass
    /// that still flows if the contract promises so (`after_first_pass`).
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
        Verdict::Close(CloseReason::Deadline)
    }

    fn after(elapsed: Duration, limit: Duration, reason: CloseReason) -> Verdict {
        if elapsed >= limit {
            Verdict::Close(reason)
        } else {
            Verdict::Wait(Some(limit - elapsed))
        }
    }
}
