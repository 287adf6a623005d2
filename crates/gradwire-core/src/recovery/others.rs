//! The queue that others keep at the bottleneck: what a flow still finds there while it has next to nothing in it itself.
//!
//! Asked by [`super::BottleneckController`]. Flows of one kind look for the empty path at the same time and find it
//! empty, so this stays zero among them. Another transport (Linux's bbr keeps two bandwidth-delay products and three
//! milliseconds in flight, a loss-based one fills the buffer) leaves its queue standing, and a flow that made room for
//! it again and again would end with next to nothing.

use super::filters::bytes_in;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OthersQueue {
    /// Looks that must find little before it counts as gone; zero: there is none.
    patience: u32,
    /// The last look found a queue; one more and it counts.
    suspected: bool,
    /// The flow's rate at the last look, bytes per second.
    rate: u64,
    /// Whether the path was short at the last look.
    is_near: bool,
    /// Least round trip of the present look.
    looked: Option<Duration>,
    /// The round trip before it.
    before: Duration,
    /// What others had of the link at the last look, in thousandths.
    theirs: u64,
    /// When the last look that saw anything ended.
    looked_at: Timestamp,
}

impl OthersQueue {
    /// A look begins: until now a round trip took so long.
    pub(super) fn begin_look(&mut self, before: Duration) {
        self.before = before;
        self.looked = None;
    }

    /// A round-trip time that was seen while this flow held back.
    pub(super) fn on_look(&mut self, rtt: Duration) {
        self.looked = Some(self.looked.map_or(rtt, |least| least.min(rtt)));
    }

    /// Whether the present look has seen anything yet.
    pub(super) fn has_looked(&self) -> bool {
        self.looked.is_some()
    }

    /// The flow goes on at `rate`. `least`: the least round-trip time of the path. `own`: the time that a few packets
    /// take at that rate. So long is the queue of all flows of this kind together when each has so many and they
    /// share alike, however many they are, and where they do not all look at the same moment a look finds it. Whether to
    /// look again soon: flows of one kind that have just met may not have looked at the same moment yet.
    pub(super) fn end_look(&mut self, now: Timestamp, least: Duration, rate: u64, own: Duration) -> bool {
        self.rate = rate;
        let Some(looked) = self.looked.take() else { return false };
        self.looked_at = now;
        self.is_near = least < NEAR;
        let theirs = looked.as_nanos() * 1_000 / self.before.as_nanos().max(1);
        self.theirs = u64::try_from(theirs).unwrap_or(u64::MAX).min(1_000);
        let (queue, noticed) =
            (looked.saturating_sub(least), (least / 4).max(NOTICED) + own.min(OWN_KIND_MAX));
        let found = queue > noticed;
        if found && (self.suspected || self.stands()) {
            self.patience = PATIENCE;
        } else if queue < noticed / NOTHING {
            // Flows of one kind that took each other for others and come to look together find the path empty.
            self.patience = self.patience.saturating_sub(PATIENCE.div_ceil(2));
        } else if queue < noticed / 2 {
            self.patience = self.patience.saturating_sub(1);
        }
        self.suspected = found;
        found && !self.stands()
    }

    /// A flow whose bursts are shorter than the pause between two looks does not look: what the last look saw is then forgotten in the end.
    pub(super) fn forget_old(&mut self, now: Timestamp) {
        if self.stands() && now.since(self.looked_at) > REMEMBERED {
            (self.patience, self.suspected) = (0, false);
        }
    }

    /// Whether the flow's `rate` has fallen by a quarter since the last look: something has changed.
    pub(super) fn must_look(&self, rate: u64) -> bool {
        rate < self.rate - self.rate / 4
    }

    /// Whether others keep a queue.
    pub(super) fn stands(&self) -> bool {
        self.patience > 0
    }

    /// Pacing gain, in thousandths, while the flow neither probes nor drains.
    pub(super) fn cruise(&self) -> u64 {
        if self.stands() && self.is_near {
            CRUISE_AMONG_OTHERS
        } else {
            CRUISE
        }
    }

    /// The part of what is above one product that a flow may use, in thousandths: all of it up to half of the link.
    pub(super) fn room(&self) -> u64 {
        (2 * self.theirs).min(1_000)
    }

    /// Bytes that a flow of `rate` bytes per second and with this bandwidth-delay product may keep in the queue on top of
    /// what every flow may, so that its part is no smaller than theirs. A little more than theirs: with less it would
    /// never grow, and as soon as their part is the smaller one, no look finds their queue.
    pub(super) fn allowance(&self, rate: u64, bdp: u64) -> u64 {
        if self.stands() {
            bytes_in(rate, ALLOWED).min(ALLOWED_BYTES) + bdp / 8
        } else {
            0
        }
    }
}

/// A single look may meet the moment when the others drain, and a flow that then leaves a second product has lost its place before
/// it finds them again: with two looks it had 33 % beside the kernel's bbr at four products, with five 39.
const PATIENCE: u32 = 5;
/// As long as the least round trip is.
const REMEMBERED: Duration = Duration::from_secs(10);
/// So small a part of what counts as a queue is none at all.
const NOTHING: u32 = 8;
/// Less may be the flows of one kind, which do not all look at the very same moment: what each of them may have.
const NOTICED: Duration = Duration::from_millis(1);
/// Flows of this kind that keep more than so long a queue share a slow link among many. Another transport that has nearly
/// taken over would look the same, so beyond this it is taken for one.
const OWN_KIND_MAX: Duration = Duration::from_millis(2);
/// A little less than the estimate, so that what a probe queued drains.
const CRUISE: u64 = 980;
/// A queue of others does not drain: whoever sends less than its share of what leaves the port hands over the rest, and the
/// estimate follows. More than the share (1050 took 41 to 44 % from bbr where 980 took 30 to 37) only overflows a receiver that
/// waits for its turn on a processor, which looks the same.
const CRUISE_AMONG_OTHERS: u64 = 1_000;
/// Over longer paths bbr leaves its share to a flow anyway, and late flows of one kind, which take each other for others at first, become
/// equal by what the larger ones hand over.
const NEAR: Duration = Duration::from_millis(20);
/// bbr's three bursts of a millisecond, less the one that every flow may have.
const ALLOWED: Duration = Duration::from_millis(3);
/// A burst of bbr is no larger than 64 KB.
const ALLOWED_BYTES: u64 = 2 * (64 << 10);

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Duration = Duration::from_millis(1);
    const RATE: u64 = 1_000_000;
    const OWN: Duration = Duration::from_micros(500);

    /// After looks that saw these round trips, in microseconds.
    fn after(looks: &[u64]) -> OthersQueue {
        let mut others = OthersQueue::default();
        for look in looks {
            others.on_look(Duration::from_micros(*look));
            others.end_look(Timestamp::ZERO, LEAST, RATE, OWN);
        }
        others
    }

    #[test]
    fn a_queue_must_be_seen_twice() {
        assert!(!after(&[4_000]).stands());
        assert!(after(&[4_000, 4_000]).stands());
    }

    #[test]
    fn what_flows_of_one_kind_keep_is_no_queue_of_others() {
        assert!(!after(&[2_400, 2_400, 2_400]).stands());
        assert!(after(&[2_600, 2_600]).stands());
    }

    #[test]
    fn a_queue_is_gone_when_two_looks_find_nothing_or_five_find_little() {
        for (looked, looks) in [(1_000, 2), (1_700, 5)] {
            let seen = |count| after(&[&[4_000, 4_000], &std::vec![looked; count][..]].concat());
            assert!(seen(looks - 1).stands() && !seen(looks).stands(), "{looked} us");
        }
        assert!(after(&[&[4_000, 4_000], &[1_800; 20][..]].concat()).stands());
    }

    #[test]
    fn a_queue_that_nobody_has_looked_at_for_long_is_forgotten() {
        let mut others = after(&[4_000, 4_000]);
        others.forget_old(Timestamp::ZERO + REMEMBERED);
        assert!(others.stands());
        others.forget_old(Timestamp::ZERO + REMEMBERED + Duration::from_nanos(1));
        assert!(!others.stands());
    }

    #[test]
    fn who_has_more_of_the_link_than_others_has_less_room_beside_them() {
        for (before, room) in [(4_000, 1_000), (8_000, 1_000), (16_000, 500), (40_000, 200)] {
            let mut others = after(&[4_000]);
            others.begin_look(Duration::from_micros(before));
            others.on_look(Duration::from_micros(4_000));
            others.end_look(Timestamp::ZERO, LEAST, RATE, OWN);
            assert_eq!(others.room(), room, "{before} us before the look");
        }
    }

    #[test]
    fn only_where_others_keep_a_queue_is_there_an_allowance_and_it_is_bounded() {
        assert_eq!(after(&[1_000]).allowance(RATE, 1_000), 0);
        let others = after(&[4_000, 4_000]);
        assert_eq!(others.allowance(RATE, 1_000), 3_000 + 125);
        assert_eq!(others.allowance(1 << 40, 0), ALLOWED_BYTES);
    }

    #[test]
    fn only_where_others_keep_a_queue_over_a_short_path_does_a_flow_send_all_of_its_estimate() {
        assert_eq!(after(&[1_000]).cruise(), CRUISE);
        let mut others = after(&[4_000, 4_000]);
        assert_eq!(others.cruise(), CRUISE_AMONG_OTHERS);
        others.on_look(4 * NEAR);
        others.end_look(Timestamp::ZERO, NEAR, RATE, OWN);
        assert!(others.stands() && others.cruise() == CRUISE);
    }

    #[test]
    fn a_flow_that_has_lost_a_quarter_of_its_rate_looks_again() {
        let others = after(&[1_000]);
        assert!(others.must_look(RATE * 3 / 4 - 1) && !others.must_look(RATE * 3 / 4));
    }
}
