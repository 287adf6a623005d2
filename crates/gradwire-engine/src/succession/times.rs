//! Times by which members agree, as parts of the peer timeout.

use gradwire_membership::Settings;
use std::time::Duration;

/// See the module's documentation.
pub(super) fn of(peer_timeout: Duration) -> Settings {
    let repeat = (peer_timeout / REPEATS).max(REPEAT_MIN);
    // Who promises at once is not waited for; only a second loss in the middle of it costs an attempt.
    let attempt = peer_timeout / 2;
    let patience = attempt * ATTEMPTS_MAX;
    Settings { repeat, attempt, patience, unheard: UNHEARD, silent: repeat * SILENT }
}

/// What was not answered is said again so often in the peer timeout.
const REPEATS: u32 = 100;
/// A fifth of the peer timeout. Where half of the questions or their answers are lost, so many in a row are once in a million times.
const UNHEARD: u32 = 20;
/// A tenth of the peer timeout. Where a third of the questions and as many answers are lost, so many in a
/// row are once in a thousand times, and two ranks attempt together then.
const SILENT: u32 = 10;
/// Less would be a burst while a host is busy.
const REPEAT_MIN: Duration = Duration::from_millis(20);
/// Attempts of half the peer timeout until a rank without a majority gives up: the first may be in the way of others' attempts, and
/// every further one waits longer.
const ATTEMPTS_MAX: u32 = 6;
