//! Presets: what an opted-in gradient reduction may leave behind.

use std::time::Duration;

/// How the deadline of a transfer comes about.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum DeadlineRule {
    /// None.
    Never,
    /// Fixed time since the first packet.
    Fixed(Duration),
    /// A multiple of the time that the transfer's bytes take at the measured bandwidth, plus round trips.
    Measured {
        /// The multiple.
        factor: f32,
    },
}

/// What a tolerant reduction may leave behind. Group-wide: every rank passes the same values.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Policy {
    /// Share of a transfer that may be missing.
    pub loss_bound: f32,
    /// See [`gradwire_core::Contract::after_first_pass`].
    pub after_first_pass: bool,
    /// The deadline.
    pub deadline: DeadlineRule,
    /// Least fraction that a deadline may accept.
    pub floor: f32,
}

impl Policy {
    /// Preset `reliable`: everything arrives.
    pub const RELIABLE: Self =
        Self { loss_bound: 0.0, after_first_pass: true, deadline: DeadlineRule::Never, floor: 1.0 };
    /// Preset `mlt` (MLT section 4.2.3): stop as soon as 90 % are in, the paper's conservative bound (6.1.1).
    pub const MLT: Self =
        Self { loss_bound: 0.1, after_first_pass: false, deadline: DeadlineRule::Never, floor: 0.9 };
    /// Preset `auto` (DESIGN.md).
    pub const AUTO: Self = Self {
        loss_bound: 0.05,
        after_first_pass: true,
        deadline: DeadlineRule::Measured { factor: 4.0 },
        floor: 0.5,
    };

    /// Whether nothing may be missing.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.loss_bound <= 0.0 && self.deadline == DeadlineRule::Never
    }
}
