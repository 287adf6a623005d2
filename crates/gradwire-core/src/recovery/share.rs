//! What the collective knows: how many senders share the receiver, and so how much of its queue one of them may take.
//!
//! Transport alone must find out by overflowing something. A collective says it before the first packet leaves
//! ([`crate::Connection::set_incast`]), and from then on all flows of a stage have about the same window:
//! what their rate makes in the empty path, and an equal share of one queue. Where paths are short, that share is
//! most of the window, so the flows are equal from the first packet on, without any probing. Of many senders one half is given more than
//! the other ([`Turn`]).

use super::headroom::{LossCount, MADE_UP_OF};
use super::Turn;

/// One sender's part of what all senders of an incast may have in flight.
// claim: auto/schedule-aware-start
#[derive(Clone, Copy, Debug)]
pub(super) struct Share {
    packet_bytes: u64,
    flows: u64,
    known: bool,
    has_other_paths: bool,
    turn: Turn,
}

impl Share {
    /// So many flows share the receiver, `paths` of them of this rank; if that is all, nothing is known of others.
    pub(super) fn new(packet_bytes: u64, (flows, paths): (u32, u32), turn: Turn) -> Self {
        Self {
            packet_bytes: packet_bytes.max(1),
            flows: u64::from(flows.max(1)),
            known: flows > paths.max(1),
            has_other_paths: paths > 1,
            turn,
        }
    }

    /// The same of so many flows.
    pub(super) fn among(&self, flows: u32, paths: u32) -> Self {
        Self::new(self.packet_bytes, (flows, paths), self.turn)
    }

    /// Whether the collective has told that others share the receiver.
    pub(super) fn is_known(&self) -> bool {
        self.known
    }

    /// Whether more paths lead to the peer: what one of them carries then changes with the others.
    pub(super) fn has_other_paths(&self) -> bool {
        self.has_other_paths
    }

    /// The first window: ten packets, as TCP takes them (RFC 6928), divided by the senders; at least two.
    pub(super) fn initial_cwnd(&self) -> u64 {
        self.packet_bytes * (INITIAL_PACKETS / self.flows).max(2)
    }

    /// How many senders there are.
    pub(super) fn flows(&self) -> u64 {
        self.flows
    }

    /// What may leave at once where packets wait at a port: in the worst case all senders do at the same moment.
    pub(super) fn burst_bytes(&self) -> u64 {
        self.packet_bytes * (QUEUE_PACKETS / self.flows).max(2)
    }

    /// What the flow may keep in queues.
    pub(super) fn queue_bytes(&self) -> u64 {
        self.packet_bytes * (QUEUE_PACKETS / self.flows).clamp(QUEUE_SHARE_MIN, QUEUE_SHARE_MAX)
    }

    /// The same where halves of many senders take turns, of a flow whose rate makes `path` bytes in the empty path. No turns where that
    /// is more than the share: once the first half is done, the other would take many round trips to fill the link.
    pub(super) fn queue_bytes_in_turn(&self, path: u64) -> u64 {
        let each = self.queue_bytes();
        let takes_turns = self.flows >= TURNS_FROM && path <= each;
        match self.turn {
            Turn::Before if takes_turns => each + TURN_PACKETS * self.packet_bytes,
            Turn::Behind if takes_turns => each - TURN_PACKETS * self.packet_bytes,
            _ => each,
        }
    }
}

/// The rate at which a flow's packets were decided about, acknowledged or lost. Random loss says nothing about the path,
/// so it must not shrink the window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DecidedRate(u64);

impl DecidedRate {
    /// Takes a round trip: its largest delivery rate and its losses.
    pub(super) fn on_round(&mut self, delivered: u64, losses: LossCount) {
        let all = u128::from(delivered) * u128::from(losses.acked + losses.lost);
        let decided = u64::try_from(all / u128::from(losses.acked.max(1))).unwrap_or(u64::MAX);
        let decided = decided.min(delivered.saturating_add(delivered / MADE_UP_OF));
        self.0 = if self.0 == 0 { decided } else { self.0 / 2 + decided / 2 };
    }

    /// Forgets everything but `rate`.
    pub(super) fn reset(&mut self, rate: u64) {
        self.0 = rate;
    }

    /// Bytes per second; zero before the first round.
    pub(super) fn get(self) -> u64 {
        self.0
    }
}

const INITIAL_PACKETS: u64 = 10;
/// Packets that all senders of an incast together keep in queues: two thirds of a switch buffer of 64 packets.
const QUEUE_PACKETS: u64 = 40;
/// With fewer a flow is lost in the noise of bursts of two packets.
const QUEUE_SHARE_MIN: u64 = 3;
/// From so many senders on the shares are the least ones, and halves of the senders take turns.
const TURNS_FROM: u64 = QUEUE_PACKETS / QUEUE_SHARE_MIN + 1;
/// One packet more and one less make rates of two to one. With two more and one less, or two and two, 108 senders overflowed a
/// port of 512 KB.
const TURN_PACKETS: u64 = 1;
/// Enough for the four queues that a flow of an all-to-all crosses: both hosts', and those of the way back.
const QUEUE_SHARE_MAX: u64 = 12;

#[cfg(test)]
mod tests {
    use super::*;

    // test of: auto/schedule-aware-start
    #[test]
    fn all_senders_together_fit_a_buffer_of_64_packets() {
        for senders in 2..=16 {
            let share = Share::new(1, (senders, 1), Turn::Any);
            assert!(u64::from(senders) * share.queue_bytes() <= 48, "{senders} senders");
        }
    }

    // test of: auto/turns-of-halves
    #[test]
    fn of_many_slow_senders_one_half_queues_twice_what_the_other_does_and_all_together_no_more() {
        let of = |senders, turn| {
            let share = Share::new(1, (senders, 1), turn);
            (share.queue_bytes_in_turn(3), share.queue_bytes_in_turn(60))
        };
        for senders in 2..=200 {
            let [before, any, behind] = [Turn::Before, Turn::Any, Turn::Behind].map(|turn| of(senders, turn));
            let ratio = if senders < 14 { 1 } else { 2 };
            assert_eq!((before.0 + behind.0, before.0), (2 * any.0, ratio * behind.0), "{senders} senders");
            assert_eq!((before.1, behind.1), (any.1, any.1), "{senders} senders, each with most of a path");
        }
    }

    #[test]
    fn a_turn_is_kept_when_the_number_of_senders_changes() {
        let share = Share::new(1, (2, 1), Turn::Before).among(108, 1);
        assert_eq!(share.queue_bytes_in_turn(1), 4);
    }

    #[test]
    fn random_loss_does_not_lower_the_decided_rate() {
        let mut rate = DecidedRate::default();
        (0..50).for_each(|_| rate.on_round(950, LossCount { acked: 950, lost: 50 }));
        assert!(rate.get() >= 990, "{}", rate.get());
    }

    #[test]
    fn an_overflow_is_made_up_for_by_a_sixth_only() {
        let mut rate = DecidedRate::default();
        rate.on_round(600, LossCount { acked: 500, lost: 500 });
        assert_eq!(rate.get(), 700);
    }
}
