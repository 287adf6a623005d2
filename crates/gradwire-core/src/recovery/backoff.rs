//! An upper bound of the window: halved while a buffer overflows, lifted again by each round trip in which it does not.
//!
//! A window that is made from a model of the path is as wrong as the model. Flows that started into a full buffer take it
//! for the path, keep it full, and never see anything else; each holds what it took, however unfair that is. Halving what
//! is really in flight, and adding the same packet to each in each round trip, empties the buffer and makes
//! them equal, whatever they believe (Chiu and Jain 1989). It rests at loss that is no random loss
//! ([`super::headroom::Headroom`]) and then bounds nothing.

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backoff {
    packet_bytes: u64,
    limit: u64,
}

impl Backoff {
    /// Bounds nothing.
    pub(super) fn new(packet_bytes: u64) -> Self {
        Self { packet_bytes, limit: u64::MAX }
    }

    /// Takes a round trip: whether a buffer overflows, and the window that it had.
    pub(super) fn on_round(&mut self, overflows: bool, cwnd: u64) {
        self.limit = if overflows {
            (cwnd.min(self.limit) / 2).max(LIMIT_MIN_PACKETS * self.packet_bytes)
        } else {
            self.limit.saturating_add(self.limit / GROWTH).saturating_add(self.packet_bytes)
        };
    }

    /// What is left of a window.
    pub(super) fn bound(&self, cwnd: u64) -> u64 {
        cwnd.min(self.limit)
    }
}

/// Four packets: three that overtake and one overtaken, so that a loss can be seen without a timer.
const LIMIT_MIN_PACKETS: u64 = 4;
/// A long path would take minutes to fill by single packets: this part of the limit more, in each round trip. Small
/// enough that the same packet for everyone still outweighs it where many flows share little.
const GROWTH: u64 = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_bounds_nothing_until_a_buffer_overflows() {
        let mut backoff = Backoff::new(1_000);
        (0..100).for_each(|_| backoff.on_round(false, 50_000));
        assert_eq!(backoff.bound(u64::MAX - 1), u64::MAX - 1);
    }

    #[test]
    fn an_overflow_halves_what_is_in_flight_and_clean_rounds_lift_the_bound() {
        let mut backoff = Backoff::new(1_000);
        backoff.on_round(true, 64_000);
        assert_eq!(backoff.bound(64_000), 32_000);
        backoff.on_round(false, 32_000);
        assert_eq!(backoff.bound(64_000), 34_000);
        (0..20).for_each(|_| backoff.on_round(false, 32_000));
        assert_eq!(backoff.bound(64_000), 64_000);
    }

    #[test]
    fn unequal_flows_become_equal() {
        let (mut large, mut small) = (Backoff::new(1), Backoff::new(1));
        let (mut a, mut b) = (60, 4);
        for _ in 0..200 {
            let overflows = a + b > 64;
            large.on_round(overflows, a);
            small.on_round(overflows, b);
            (a, b) = (large.bound(64), small.bound(64));
        }
        assert!(a <= 2 * b, "{a} and {b}");
    }
}
