//! How long an acknowledgement may wait for more packets.
//!
//! Fed by [`crate::arrivals`] with when the packets came that each acknowledgement was about. At high rates packets come in a few microseconds
//! of each other, and the wait is the configured one: what ends it is nearly always their count. On slow links they are further apart
//! than that, and each would have an acknowledgement of its own, which takes a tenth of a packet's room on the way back, where the other
//! direction's data need it, and a wake-up at both ends. There an acknowledgement waits for as long as a few packets take.
//!
//! Hardly anybody waits for it: a sender asks four times in each window, and where it thinks that something is missing; who has everything says
//! so at once. A window that shrinks to less than a quarter waits. Where a path is one of several, what its acknowledgements leave out is compared with the others', after a time in which they
//! must be there, so it is never longer than configured. Nor is it for DLCP's controller, which follows what acknowledgements name in each
//! period: eight flows over 40 ms, strangers to each other, shared by Jain's index 0.85 where each acknowledgement was about three packets, and 0.92
//! where it was about one.

use crate::recovery::ControllerKind;
use crate::{ConnectionConfig, Timestamp};
use core::time::Duration;

/// See the module.
#[derive(Debug)]
pub(crate) struct Hold {
    shortest: Duration,
    most: Duration,
    longest: Duration,
    /// Smoothed time from one packet to the next.
    gap: Duration,
    /// When the newest packet came of those that were acknowledged last.
    acked_newest_at: Option<Timestamp>,
}

impl Hold {
    pub(crate) fn new(config: &ConnectionConfig) -> Self {
        let shortest = config.ack_delay_max;
        let may_wait = config.paths == 1 && config.controller != ControllerKind::ReceivingRate;
        let most = if may_wait { shortest.max(HELD_MAX.min(shortest * HELD_TIMES)) } else { shortest };
        Self { shortest, most, longest: shortest, gap: Duration::ZERO, acked_newest_at: None }
    }

    /// From the first packet that is not acknowledged, if no other reason comes before.
    pub(crate) fn longest(&self) -> Duration {
        self.longest
    }

    /// The same of packets so far from each other.
    pub(crate) fn of(&self, gap: Duration) -> Duration {
        (gap * WORTH_PACKETS).clamp(self.shortest, self.most)
    }

    /// So many packets are acknowledged now, of which the first and the newest came then.
    pub(crate) fn on_acknowledged(
        &mut self,
        packets: u32,
        first_at: Option<Timestamp>,
        newest_at: Timestamp,
    ) {
        let before = self.acked_newest_at.replace(newest_at);
        let (from, gaps) = if packets > 1 { (first_at, packets - 1) } else { (before, packets) };
        let Some(from) = from.filter(|_| gaps > 0) else { return };
        let gap = newest_at.since(from) / gaps;
        // What is longer is a pause of the sender's.
        if gap <= self.most {
            self.gap = (self.gap * (SMOOTHED_OVER - 1) + gap) / SMOOTHED_OVER;
            self.longest = self.of(self.gap);
        }
    }
}

/// Packets that are worth an acknowledgement where they come slowly, a few of those in a window.
const WORTH_PACKETS: u32 = 3;
/// No longer than that, nor than so many times what is configured: so much later may rate control learn what it would have learned.
const HELD_MAX: Duration = Duration::from_millis(2);
const HELD_TIMES: u32 = 8;
const SMOOTHED_OVER: u32 = 4;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    const SHORTEST: Duration = Duration::from_micros(250);

    fn hold(paths: u8) -> Hold {
        Hold::new(&ConnectionConfig { ack_delay_max: SHORTEST, paths, ..config() })
    }

    /// What is held back at last when a packet comes each `gap`, and what is there is acknowledged when it says so.
    fn settled(hold: &mut Hold, from: Timestamp, gap: Duration) -> (Duration, Timestamp) {
        let (mut first, mut packets) = (from, 0);
        for number in 0..1_000 {
            let at = from + gap * number;
            if packets > 0 && at > first + hold.longest() {
                hold.on_acknowledged(packets, Some(first), at.before(gap));
                packets = 0;
            }
            if packets == 0 {
                first = at;
            }
            packets += 1;
        }
        (hold.longest(), from + gap * 1_000)
    }

    #[test]
    fn an_acknowledgement_waits_for_a_few_packets_where_they_come_slowly_and_no_longer_elsewhere() {
        for (gap_us, held_us) in [(1, 250), (60, 250), (100, 300), (240, 720), (700, 2_000), (1_900, 2_000)] {
            let (held, _) = settled(&mut hold(1), Timestamp::ZERO, Duration::from_micros(gap_us));
            assert!(held.as_micros().abs_diff(held_us) <= 4, "{gap_us}: {held:?}");
        }
    }

    #[test]
    fn a_pause_between_calls_is_not_taken_for_a_slow_link_and_a_link_that_is_fast_again_is_found_out() {
        let mut hold = hold(1);
        let mut at = Timestamp::ZERO;
        for _ in 0..20 {
            (_, at) = settled(&mut hold, at, Duration::from_micros(10));
            at = at + Duration::from_millis(50);
        }
        assert_eq!(hold.longest(), SHORTEST);
        let (slow, at) = settled(&mut hold, at, Duration::from_micros(240));
        assert!(slow > SHORTEST * 2, "{slow:?}");
        assert_eq!(settled(&mut hold, at, Duration::from_micros(10)).0, SHORTEST);
    }

    #[test]
    fn single_packets_that_are_far_from_each_other_are_none_of_a_slow_link() {
        let mut hold = hold(1);
        for number in 0..20 {
            let at = Timestamp::ZERO + Duration::from_millis(50) * number;
            hold.on_acknowledged(1, Some(at), at);
        }
        assert_eq!(hold.longest(), SHORTEST);
    }

    #[test]
    fn one_of_several_paths_and_who_counts_by_acknowledgements_hold_back_nothing_for_longer() {
        let counts = ConnectionConfig {
            ack_delay_max: SHORTEST,
            controller: ControllerKind::ReceivingRate,
            ..config()
        };
        for mut hold in [hold(4), Hold::new(&counts)] {
            assert_eq!(settled(&mut hold, Timestamp::ZERO, Duration::from_micros(700)).0, SHORTEST);
        }
    }
}
