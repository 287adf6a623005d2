//! How many ranks send to one receiver at once, as connections are told: the most of all operations so far, on fast links the most of late.
//!
//! Shares of a queue that change with every bucket waste the link, so where rings alternate with what everybody sends to everybody, the most
//! holds. On slow links for good: whoever is not told of the others takes the queue (steps of `gradwire demo` at 100 Mbit/s took a quarter
//! longer otherwise). On fast ones it is the processor that calls wait for, and a bound that one call of long ago has left behind keeps rings,
//! whose links have one flow each, from messages and windows of their own: after [`PERIOD`] collectives without such a call, or twice as many,
//! it is forgotten there, and what fits into a small buffer with all that runs beside it is no incast: barriers and the sums of a few numbers come
//! with every step.

use crate::op::Op;

// claim: auto/schedule-aware-incast
/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct ToldIncast {
    told: u32,
    /// Most in the present period, and in the one before.
    latest: u32,
    before: u32,
    /// Collectives that began in the present period.
    begun: u32,
}

impl ToldIncast {
    /// What was told last.
    #[cfg(test)]
    pub(super) const fn told(&self) -> u32 {
        self.told
    }

    /// A collective begins; `senders` is the most of all that run now. What is to be told, if that is something else than before.
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

/// How many ranks send to one receiver while these run; `packet_bytes` of payload are in a packet.
pub(super) fn senders<'a>(ops: impl Iterator<Item = &'a Op>, packet_bytes: usize, is_fast: bool) -> u32 {
    let bucket = |op: &Op| op.call.bytes_at_once(op.bytes(), op.senders).map(|bytes| bytes / packet_bytes);
    most(ops.map(|op| (op.senders, bucket(op).filter(|_| is_fast))))
}

/// Of so many senders each, with the full packets of the bucket, which are the most that comes to a receiver; `None`: not known, or it does
/// not matter. From each sender there is one packet besides that is not full.
fn most(ops: impl Iterator<Item = (u32, Option<usize>)>) -> u32 {
    let (mut most, mut packets) = (0, Some(0));
    for (senders, full) in ops {
        most = most.max(senders);
        let more = if senders > 1 { full.map(|full| full + senders as usize) } else { Some(0) };
        packets = packets.zip(more).map(|(packets, more)| packets + more);
    }
    if packets.is_some_and(|packets| packets <= BUFFER_PACKETS) {
        most.min(1)
    } else {
        most
    }
}

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
    fn what_a_small_buffer_holds_is_no_incast_unless_it_comes_together_at_one_rank() {
        let told = |ops: &[(u32, Option<usize>)]| most(ops.iter().copied());
        let alone = [(7, 0), (7, 33), (7, 34), (40, 0), (41, 0), (1, 1_000)];
        assert_eq!(alone.map(|(senders, full)| told(&[(senders, Some(full))])), [1, 1, 7, 1, 41, 1]);
        assert_eq!(told(&[]), 0);
        assert_eq!(told(&[(7, None)]), 7, "a gather, of which a sender knows its own part alone");
        assert_eq!(
            [2, 3].map(|calls| told(
                &[(7, Some(10)), (1, Some(500)), (7, Some(10)), (7, Some(10))][..calls + 1]
            )),
            [1, 7]
        );
    }

    #[test]
    fn where_both_alternate_the_most_holds() {
        let mut incast = ToldIncast::default();
        let told = (0..10 * PERIOD).filter_map(|at| incast.on_begun(if at % 60 == 0 { 7 } else { 1 }, true));
        assert_eq!(told.collect::<Vec<_>>(), [7]);
    }
}
