//! How much later than others the packets of a path may come that are not lost.
//!
//! Some networks spread the packets of one flow over several lines: bonds that take them by turns, switches that route each packet for itself,
//! tunnels. There later packets overtake earlier ones all the time. It shows when a packet comes after all that counted as lost because three later
//! ones had come. No number is used twice, so what comes is neither a copy nor what was sent again. From then on as many later ones are waited for
//! as it took (Linux does the same, `tcp_reordering`), and, by quarters, for a longer time (RFC 8985 section 6.2). Where none comes after all,
//! three packets and the usual time remain what they are.

use super::by_queue::PACKET_THRESHOLD;
use super::ledger_ring::State;
use core::time::Duration;

/// Most later packets. The bitmap of an acknowledgement has room for twice as many; what a shorter one does not describe has its time.
const PACKETS_MAX: i32 = 512;
/// Most quarters of the usual time that are added to it: a round trip, as in RFC 8985.
const QUARTERS_MAX: u32 = 4;
/// Round trips after which what none of their packets needed is given up, half of it at a time.
const SPAN: u32 = 16;

/// What is known of the order of a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reordering {
    packets: i32,
    quarters: u32,
    /// Of both, what the packets of this span needed.
    needed: (i32, u32),
    /// Round trips of this span.
    rounds: u32,
    /// The time has grown in this round trip: all that comes too late in one is of one cause.
    has_grown: bool,
}

/// A packet that has come behind later ones.
#[derive(Clone, Copy, Debug)]
pub(super) struct Overtaken {
    /// What it counted as.
    pub(super) state: State,
    /// How far behind the newest one.
    pub(super) by: i32,
    /// Since it was sent, and how long an overtaken one is usually waited for.
    pub(super) age: Duration,
    pub(super) loss_delay: Duration,
}

impl Default for Reordering {
    fn default() -> Self {
        Self { packets: PACKET_THRESHOLD as i32, quarters: 0, needed: (0, 0), rounds: 0, has_grown: false }
    }
}

impl Reordering {
    /// Whether packets of this path are known to overtake others.
    pub(super) fn is_known(&self) -> bool {
        self.packets > PACKET_THRESHOLD as i32
    }

    /// How far behind the newest one a packet is that counts as lost.
    pub(super) fn packets(&self) -> i32 {
        self.packets
    }

    /// How long after it was sent an overtaken packet counts as lost.
    pub(super) fn patience(&self, loss_delay: Duration) -> Duration {
        loss_delay + loss_delay / 4 * self.quarters
    }

    /// A packet has come behind later ones. What counted as lost for its age alone may just have waited in a queue, which is no news but of
    /// paths whose packets overtake others.
    pub(super) fn on_overtaken(&mut self, packet: Overtaken) {
        let packets = packet.by.saturating_add(1).min(PACKETS_MAX);
        if packet.state == State::Overtaken {
            self.packets = self.packets.max(packets);
            self.quarters = self.quarters.max(1);
        }
        if !self.is_known() {
            return;
        }
        if packet.state == State::Late && !self.has_grown {
            self.quarters = (self.quarters + 1).min(QUARTERS_MAX);
            self.has_grown = true;
        }
        let excess = packet.age.saturating_sub(packet.loss_delay).as_nanos();
        let quarters = excess.div_ceil((packet.loss_delay / 4).as_nanos().max(1));
        let quarters = u32::try_from(quarters).unwrap_or(QUARTERS_MAX);
        self.needed = (self.needed.0.max(packets), self.needed.1.max(quarters));
    }

    /// A round trip has ended.
    pub(super) fn on_round(&mut self) {
        self.has_grown = false;
        if !self.is_known() {
            return;
        }
        self.rounds += 1;
        if self.rounds < SPAN {
            return;
        }
        let packets = self.needed.0.clamp(self.packets / 2, self.packets);
        let quarters = self.needed.1.clamp(self.quarters.saturating_sub(1), self.quarters).max(1);
        *self = Self::default();
        if packets > self.packets {
            (self.packets, self.quarters) = (packets, quarters);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_millis(8);

    fn come(reordering: &mut Reordering, state: State, by: i32, age_ms: u64) {
        let age = Duration::from_millis(age_ms);
        reordering.on_overtaken(Overtaken { state, by, age, loss_delay: DELAY });
    }

    fn of(reordering: Reordering) -> (i32, Duration) {
        (reordering.packets(), reordering.patience(DELAY))
    }

    fn known(by: i32) -> Reordering {
        let mut reordering = Reordering::default();
        come(&mut reordering, State::Overtaken, by, 1);
        reordering
    }

    const UNKNOWN: (i32, Duration) = (3, DELAY);
    const QUARTER: Duration = Duration::from_millis(2);

    #[test]
    fn only_what_counted_as_lost_for_what_had_overtaken_it_teaches_order() {
        let mut reordering = Reordering::default();
        for state in [State::Late, State::Lost, State::InFlight, State::Forgotten] {
            come(&mut reordering, state, 30, 100);
            assert_eq!(of(reordering), UNKNOWN, "{state:?}");
        }
        come(&mut reordering, State::Overtaken, 30, 1);
        assert_eq!(of(reordering), (31, DELAY + QUARTER));
        come(&mut reordering, State::Overtaken, 12, 1);
        assert_eq!(of(reordering), (31, DELAY + QUARTER), "what is known is more");
    }

    #[test]
    fn both_bounds_end() {
        let mut reordering = known(i32::MAX);
        for _ in 0..20 {
            come(&mut reordering, State::Late, 30, u64::MAX);
            come(&mut reordering, State::Late, 30, u64::MAX);
            reordering.on_round();
        }
        assert_eq!(of(reordering), (PACKETS_MAX, DELAY * 2));
    }

    #[test]
    fn the_time_grows_by_a_quarter_in_a_round_trip() {
        let mut reordering = known(30);
        (0..9).for_each(|_| come(&mut reordering, State::Late, 30, 40));
        assert_eq!(of(reordering), (31, DELAY + QUARTER * 2));
        reordering.on_round();
        come(&mut reordering, State::Late, 30, 40);
        assert_eq!(of(reordering), (31, DELAY + QUARTER * 3));
    }

    #[test]
    fn what_no_packet_needs_any_more_is_given_up_by_halves_and_in_the_end_all_of_it() {
        let mut reordering = known(29);
        (0..SPAN).for_each(|_| reordering.on_round());
        assert_eq!(of(reordering).0, 30, "needed in these round trips");
        for packets in [15, 7, 3] {
            assert!(reordering.is_known());
            (0..SPAN).for_each(|_| reordering.on_round());
            assert_eq!(of(reordering).0, packets);
        }
        assert_eq!(of(reordering), UNKNOWN);
    }

    #[test]
    fn what_packets_need_that_come_in_time_is_kept() {
        let mut reordering = known(29);
        come(&mut reordering, State::Late, 29, 11);
        for _ in 0..10 * SPAN {
            come(&mut reordering, State::InFlight, 19, 11);
            reordering.on_round();
        }
        assert_eq!(of(reordering), (20, DELAY + QUARTER * 2));
    }
}
