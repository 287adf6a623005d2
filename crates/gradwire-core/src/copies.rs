//! How often a path that carries no data is tried with copies ([`crate::path_health`]).

use crate::path::Path;
use crate::path_health::Health;
use crate::Timestamp;
use core::time::Duration;

/// Copies for each round trip of a path that is not trusted: sixteen take four round trips.
const COPIES_PER_RTT: u32 = 4;
/// Copies cost at most one packet in so many.
pub(crate) const PACKETS_PER_COPY: u32 = 16;
/// Where nothing at all comes through, the pause before a copy grows with the time since something did: by so small a part of it that a
/// path which has healed is found out little later, and that the numbers of one that is dead for days do not run away from its receiver.
const SILENCE_PER_PAUSE: u32 = 16;
/// The longest pause, and the longest that it grows by.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// When a copy may leave behind one that leaves now.
pub(crate) fn next(now: Timestamp, path: &Path) -> Timestamp {
    now + (path.rtt.smoothed() / COPIES_PER_RTT).min(PAUSE_MAX)
}

/// The same of a copy that was due at `at`, with what is known by now.
pub(crate) fn due(now: Timestamp, at: Timestamp, path: &Path, health: &Health) -> Timestamp {
    if !health.seems_dead() {
        return at;
    }
    at + (now.since(path.news_at) / SILENCE_PER_PAUSE).min(PAUSE_MAX)
}
