//! Time as the core sees it: nanoseconds since the driver's own start, handed in with every call.

use core::ops::{Add, Sub};
use core::time::Duration;

/// A point in time, in nanoseconds since an origin that the driver chooses. Never goes backwards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The origin.
    pub const ZERO: Self = Self(0);

    /// `nanos` after the origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Microseconds since the origin modulo 2^32: the form that travels in headers.
    #[must_use]
    pub const fn as_wire_us(self) -> u32 {
        (self.0 / 1_000) as u32
    }

    /// The beginning of the microsecond in which this clock wrote the stamp `us`; `None` when that is so long ago that it never did.
    #[must_use]
    pub(crate) const fn of_wire_us(self, us: u32) -> Option<Self> {
        let elapsed_us = self.as_wire_us().wrapping_sub(us);
        if elapsed_us > ROUND_TRIP_MAX_US {
            return None;
        }
        Some(Self((self.0 / 1_000).saturating_sub(elapsed_us as u64) * 1_000))
    }

    /// `time` earlier; the origin when that is before it.
    #[must_use]
    pub(crate) fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Time since `earlier`; zero when `earlier` is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Timestamp {
    type Output = Duration;

    fn sub(self, rhs: Self) -> Duration {
        self.since(rhs)
    }
}

/// No answer takes longer than a minute: an echo that says so is garbage.
pub(crate) const ROUND_TRIP_MAX_US: u32 = 60_000_000;
/// No network that people train over has longer round trips: one that says so was held on its way, or is of a time when a rank stood still.
pub(crate) const ROUND_TRIP_BELIEVED: Duration = Duration::from_secs(1);

/// When the driver must call `handle_timeout` next, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timeout {
    /// The time to wake up.
    pub at: Timestamp,
    /// What is due then.
    pub reason: TimeoutReason,
}

/// Why a wake-up is due.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[non_exhaustive]
pub enum TimeoutReason {
    /// The pacer allows the next packets.
    Pacing,
    /// An acknowledgement has been held back long enough.
    AckDelay,
    /// Nothing was heard of what is in flight: ask the receiver.
    Probe,
    /// A packet counts as lost by time.
    Loss,
    /// A contract may close a transfer.
    Contract,
    /// A grant or closing status is repeated.
    Status,
    /// Keep an idle connection alive.
    Heartbeat,
    /// The peer has been silent for too long.
    PeerSilent,
    /// A collective ran out of time.
    Operation,
}
