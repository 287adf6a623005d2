//! How long a packet stood in queues on its way here: its time stamp beside those of the packets that were fastest lately.
//!
//! The clocks of two ranks show different times and drift apart (50 us in a second is much), so only differences mean something, and
//! what was fastest is forgotten after a while. Called for every packet of a connection; what it says serves reports,
//! and tells what the network has held for seconds. No timer follows it.

use crate::Timestamp;
use core::time::Duration;

/// The packets of one peer.
#[derive(Debug, Default)]
pub(crate) struct Transit {
    /// Least time from stamp to arrival, microseconds of two clocks modulo 2^32: in this window, and in the one before.
    least_us: [Option<u32>; 2],
    window_began: Timestamp,
    /// Of the latest packet.
    queued_us: u32,
}

impl Transit {
    /// A packet has come that was stamped so when it left.
    pub(crate) fn on_packet(&mut self, now: Timestamp, sent_at_us: u32) {
        if now.since(self.window_began) > WINDOW {
            (self.least_us, self.window_began) = ([None, self.least_us[0]], now);
        }
        let took = now.as_wire_us().wrapping_sub(sent_at_us);
        let least = self.least_us[0].map_or(took, |least| earlier(least, took));
        self.least_us[0] = Some(least);
        let least = self.least_us[1].map_or(least, |before| earlier(before, least));
        self.queued_us = took.wrapping_sub(least);
    }

    /// How much longer the latest packet took than the fastest of late.
    pub(crate) const fn queued(&self) -> Duration {
        Duration::from_micros(self.queued_us as u64)
    }
}

/// Of two numbers modulo 2^32 that are near each other, the one that comes first.
const fn earlier(a: u32, b: u32) -> u32 {
    if (a.wrapping_sub(b) as i32) < 0 {
        a
    } else {
        b
    }
}

/// Over two windows clocks drift by a millisecond, and idle connections have sent pings.
const WINDOW: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_was_queued_for_what_it_took_beyond_the_fastest_of_late() {
        let mut transit = Transit::default();
        // The other clock is ahead: stamps lie after the arrival.
        let mut queued = |at_ms: u64, took_ms: i64| {
            let stamp = (at_ms as i64 - took_ms + 5_000) * 1_000;
            transit.on_packet(Timestamp::from_nanos(at_ms * 1_000_000), stamp as u32);
            transit.queued().as_millis()
        };
        assert_eq!((queued(100, 4), queued(110, 7), queued(120, 2), queued(130, 7)), (0, 3, 0, 5));
        assert_eq!(
            (queued(10_500, 9), queued(21_000, 9)),
            (7, 0),
            "the fastest of two windows ago is forgotten"
        );
    }
}
