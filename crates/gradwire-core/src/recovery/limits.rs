//! Numbers that several rate controllers share.

use core::time::Duration;

/// Gains and shares are in thousandths.
pub(super) const UNIT: u64 = 1_000;
/// Slowest pacing, bytes per second.
pub(super) const RATE_MIN: u64 = 10_000;
/// A queue of others, which a late flow takes for distance, is shorter: 128 packets at 100 Mbit/s are 15 ms.
pub(super) const FAR: Duration = Duration::from_millis(20);
/// A dip ends even when nothing comes back.
pub(super) const DIP_MAX: Duration = Duration::from_millis(10);
/// The rounds that end in a dip, and the next two, the first of which began in it: what is delivered in them was sent in the dip.
pub(super) const DIP_ROUNDS: u32 = 3;
/// Restarts nearer than this to each other do not shorten the memory of the least round-trip time.
pub(super) const REFRESH_MIN: Duration = Duration::from_secs(1);
/// Longest lump of acknowledgements that is made up for: a few time slices of a busy machine.
pub(super) const LUMP_MAX: Duration = Duration::from_millis(10);
/// Random loss is a few percent at most; doubling into a full buffer loses up to half.
pub(super) const START_LOSS_PERCENT: u64 = 20;

/// `value` at a gain of so many thousandths.
pub(super) fn gain(value: u64, per_mille: u64) -> u64 {
    u64::try_from(u128::from(value) * u128::from(per_mille) / u128::from(UNIT)).unwrap_or(u64::MAX)
}
