//! How many ranks send to one receiver at once, as connections are told: the most of all operations so far, on fast links the most of late.
//!
//! Shares of a queue that change with every bucket waste the link, so where rings alternate with what everybody sends to everybody, the most
//! holds. On slow links for good: whoever is not told of the others takes the queue (steps of `gradwire demo` at 100 Mbit/s took a quarter
//! longer otherwise). On fast ones it is the processor that calls wait for, and a bound that one call of long ago has left behind keeps rings,
//! whose links have one flow each, from messages and windows of their own: after [`PERIOD`] operations without such a call, or twice as many,
//! it is forgotten there, and what fits into a small buffer as a whole is no incast: barriers and the sums of a few numbers come with every step.

use crate::agreement::AgreedNetwork;
use crate::op::Op;

// claim: auto/schedule-aware-incast
/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct ToldIncast {
    told: u32,
    /// Most in the present period, and in the one before.
    latest: u32,
    before: u32,
    /// Operations that began in the present period.
    begun: u32,
}

impl ToldIncast {
    /// What was told last.
    #[cfg(test)]
    pub(super) const fn told(&self) -> u32 {
        self.told
    }

    /// An operation begins; `senders` is the most of all that run now. What is to be told, if that is something else than before.
    pub(super) fn on_begun(&mut self, senders: u32, is_fast: bool) -> Option<u32> {
        if self.begun == PERIOD {
            (self.before, self.latest, self.begun) = (self.latest, 0, 0);
        }
        self.begun += 1;
        self.latest = self.latest.max(senders);
        let most = if is_fast { self.latest.max(self.before) } else { self.told.max(senders) };
        let is_news = most != self.told;
        self.told = most;
        is_news.then_some(most)
    }
}

/// Whether links are so fast that calls wait for processors.
pub(super) fn is_fast(known: Option<&AgreedNetwork>) -> bool {
    known.is_some_and(|known| known.rate > SLOW_RATE_MAX)
}

/// How many ranks send to one receiver while an operation runs; `packet_bytes` of payload are in a packet.
pub(super) fn senders_of(op: &Op, packet_bytes: usize, is_fast: bool) -> u32 {
    if is_fast {
        among(op.senders, op.bytes() / packet_bytes)
    } else {
        op.senders
    }
}

/// No receiver gets more than all bytes, and from each sender one packet that is not full.
fn among(senders: u32, full_packets: usize) -> u32 {
    if full_packets + senders as usize <= BUFFER_PACKETS {
        1
    } else {
        senders
    }
}

/// 2.5 Gbit/s, as where links are compared ([`crate::links`]).
const SLOW_RATE_MAX: u64 = 312_500_000;
/// As many collectives as are between two exchanges of what ranks measure.
const PERIOD: u32 = 64;
/// Of a switch port, as the shares of senders count on it (`core/recovery/share.rs`).
const BUFFER_PACKETS: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;

    // test of: auto/schedule-aware-incast
    #[test]
    fn the_most_is_told_at_once_and_on_fast_links_forgotten_after_a_period_without_it() {
        let mut incast = ToldIncast::default();
        assert_eq!(
            [1, 1, 5, 1, 3].map(|senders| incast.on_begun(senders, true)),
            [Some(1), None, Some(5), None, None]
        );
        let told: Vec<(u32, u32)> =
            (0..4 * PERIOD).filter_map(|at| Some((at, incast.on_begun(1, true)?))).collect();
        assert_eq!(told, [(2 * PERIOD - 5, 1)], "a whole period has passed");
        assert_eq!(incast.on_begun(5, true), Some(5));
    }

    #[test]
    fn on_slow_links_nothing_is_forgotten_until_they_are_known_to_be_fast() {
        let mut incast = ToldIncast::default();
        assert_eq!([5, 1, 3].map(|senders| incast.on_begun(senders, false)), [Some(5), None, None]);
        assert!((0..4 * PERIOD).all(|_| incast.on_begun(1, false).is_none()));
        assert_eq!(incast.on_begun(1, true), Some(1), "the latest periods had no other");
        assert_eq!([1, 5, 1].map(|senders| incast.on_begun(senders, false)), [None, Some(5), None]);
    }

    #[test]
    fn what_a_small_buffer_holds_is_no_incast() {
        let told = [(7, 0), (7, 33), (7, 34), (40, 0), (41, 0), (1, 1_000)]
            .map(|(senders, full)| among(senders, full));
        assert_eq!(told, [1, 1, 7, 1, 41, 1]);
    }

    #[test]
    fn where_both_alternate_the_most_holds() {
        let mut incast = ToldIncast::default();
        let told = (0..10 * PERIOD).filter_map(|at| incast.on_begun(if at % 60 == 0 { 7 } else { 1 }, true));
        assert_eq!(told.collect::<Vec<_>>(), [7]);
    }
}
