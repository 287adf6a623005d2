//! How many ranks send to one receiver at once, as connections are told: the most of late.
//!
//! Shares of a queue that change with every bucket waste the link, so where rings alternate with what everybody sends to everybody, the most
//! holds. But a bound that one call of long ago has left behind keeps rings, whose links have one flow each, from messages and windows of their
//! own: after [`PERIOD`] operations without such a call, or twice as many, it is forgotten. What fits into a small buffer as a whole is no
//! incast: barriers and the sums of a few numbers come with every step.

use crate::op::Op;

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

    // claim: auto/schedule-aware-incast
    /// An operation begins; `senders` is the most of all that run now. What is to be told, if that is something else than before.
    pub(super) fn on_begun(&mut self, senders: u32) -> Option<u32> {
        if self.begun == PERIOD {
            (self.before, self.latest, self.begun) = (self.latest, 0, 0);
        }
        self.begun += 1;
        self.latest = self.latest.max(senders);
        let most = self.latest.max(self.before);
        let is_news = most != self.told;
        self.told = most;
        is_news.then_some(most)
    }
}

/// How many ranks send to one receiver while an operation runs; `packet_bytes` of payload are in a packet.
pub(super) fn senders_of(op: &Op, packet_bytes: usize) -> u32 {
    among(op.senders, op.bytes() / packet_bytes)
}

/// No receiver gets more than all bytes, and from each sender one packet that is not full.
fn among(senders: u32, full_packets: usize) -> u32 {
    if full_packets + senders as usize <= BUFFER_PACKETS {
        1
    } else {
        senders
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
    fn the_most_is_told_at_once_and_forgotten_after_a_period_without_it() {
        let mut incast = ToldIncast::default();
        assert_eq!(
            [1, 1, 5, 1, 3].map(|senders| incast.on_begun(senders)),
            [Some(1), None, Some(5), None, None]
        );
        let told: Vec<(u32, u32)> =
            (0..4 * PERIOD).filter_map(|at| Some((at, incast.on_begun(1)?))).collect();
        assert_eq!(told, [(2 * PERIOD - 5, 1)], "a whole period has passed");
        assert_eq!(incast.on_begun(5), Some(5));
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
        let told = (0..10 * PERIOD).filter_map(|at| incast.on_begun(if at % 60 == 0 { 7 } else { 1 }));
        assert_eq!(told.collect::<Vec<_>>(), [7]);
    }
}
