//! How fast data arrives: the rate of first passes, as their receiver sees it.
//!
//! Fed by the receiving half of each transfer and asked by whoever sets a deadline for one ([`crate::ConnectionStats`]). The
//! rate that this rank sends at to the same peer says nothing about the other direction, which another card, another queue
//! or a slower host may serve. Repairs are not counted: they come at the pace of questions, not of the path.

use crate::recovery::rate_of;
use crate::Timestamp;
use core::time::Duration;

/// The first pass of one transfer.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FirstPass {
    first: Option<Timestamp>,
    took: Duration,
    /// Without the first packet, which marks where the time begins.
    bytes: u64,
    packets: u32,
    /// Bytes of the largest packet.
    largest: u64,
}

impl FirstPass {
    /// New packets of the first pass, of so many bytes each.
    pub(crate) fn on_arrival(&mut self, now: Timestamp, bytes: u64, packets: u32) {
        let is_first = self.first.is_none();
        let first = *self.first.get_or_insert(now);
        let counted = packets - u32::from(is_first);
        self.took = now.since(first);
        self.largest = self.largest.max(bytes);
        self.bytes += bytes * u64::from(counted);
        self.packets += counted;
    }

    /// Bytes per second; `None` of a single packet, or of one and a short last one. As if it had taken a millisecond at least: what a thread finds in a
    /// socket when it comes late is read as fast as memory is copied, and no deadline is so short that what takes less would make a difference.
    fn rate(&self) -> Option<u64> {
        (self.packets > 0 && self.bytes >= self.largest)
            .then(|| rate_of(self.bytes, self.took.max(TOOK_MIN)))
            .flatten()
    }

    /// Whether a few bursts decide its rate.
    fn is_short(&self) -> bool {
        self.packets + 1 < PACKETS_MEASURED
    }
}

/// How fast the first passes of a connection came. Those of a few packets have a rate of their own, which is that of the link at most: they say
/// nothing of longer ones, and all that is known where no longer ones come.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReceptionRate {
    measured: Best,
    short: Best,
}

impl ReceptionRate {
    /// A transfer is over.
    pub(crate) fn learn(&mut self, pass: &FirstPass) {
        let best = if pass.is_short() { &mut self.short } else { &mut self.measured };
        best.learn(pass);
    }

    /// Bytes per second; zero before the first that was not short.
    pub(crate) fn get(&self) -> u64 {
        self.measured.get()
    }

    /// The same of short ones.
    pub(crate) fn short(&self) -> u64 {
        self.short.get()
    }
}

/// The best of the last few: one that waited for its sender's other transfers is no slow path.
#[derive(Clone, Copy, Debug, Default)]
struct Best {
    latest: [u64; PASSES],
    next: usize,
}

impl Best {
    /// What took less than a millisecond is as fast at least, and pushes out nothing that was measured: of a large transfer
    /// on a fast link a small one says little.
    fn learn(&mut self, pass: &FirstPass) {
        if let Some(rate) = pass.rate().filter(|rate| pass.took >= TOOK_MIN || *rate > self.get()) {
            self.insert(rate);
        }
    }

    fn insert(&mut self, rate: u64) {
        if let Some(slot) = self.latest.get_mut(self.next) {
            *slot = rate;
        }
        self.next = (self.next + 1) % PASSES;
    }

    /// Bytes per second; zero before the first.
    fn get(&self) -> u64 {
        self.latest.iter().copied().max().unwrap_or(0)
    }
}

/// Packets of a first pass that says at what rate data comes: several bursts of a paced sender; with fewer it is that of the link alone.
pub const PACKETS_MEASURED: u32 = 33;
/// A socket's usual 200 KB are read in less.
const TOOK_MIN: Duration = Duration::from_millis(1);
/// A stage of eight buckets.
const PASSES: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn after(packets: u64, us_between: u64) -> FirstPass {
        let mut pass = FirstPass::default();
        for packet in 0..=packets {
            pass.on_arrival(Timestamp::from_nanos((packet * us_between + 7) * 1_000), 1_000, 1);
        }
        pass
    }

    #[test]
    fn the_rate_is_bytes_by_the_time_between_first_and_last_packet() {
        assert_eq!(after(100, 100).rate(), Some(10_000_000));
    }

    #[test]
    fn a_few_packets_say_nothing_of_longer_passes_and_one_says_nothing_at_all() {
        let first = 1;
        let mut rate = ReceptionRate::default();
        rate.learn(&after(0, 100));
        let mut and_a_tail = after(0, 100);
        and_a_tail.on_arrival(Timestamp::from_nanos(100_000), 4, 1);
        rate.learn(&and_a_tail);
        assert_eq!((rate.get(), rate.short()), (0, 0));
        rate.learn(&after(u64::from(PACKETS_MEASURED - first) - 1, 100));
        assert_eq!((rate.get(), rate.short()), (0, 10_000_000));
        rate.learn(&after(u64::from(PACKETS_MEASURED - first), 200));
        assert_eq!((rate.get(), rate.short()), (5_000_000, 10_000_000));
    }

    #[test]
    fn what_was_read_from_a_socket_at_once_is_no_faster_than_in_a_millisecond() {
        for us_between in [0, 3, 10] {
            assert_eq!(after(100, us_between).rate(), Some(100_000_000));
        }
        assert_eq!(after(100, 20).rate(), Some(50_000_000));
    }

    #[test]
    fn passes_too_short_to_be_measured_push_out_none_that_was() {
        let mut rate = ReceptionRate::default();
        rate.learn(&after(46, 0));
        assert_eq!(rate.get(), 46_000_000, "it is as fast at least");
        rate.learn(&after(10_000, 1));
        (0..PASSES).for_each(|_| rate.learn(&after(46, 0)));
        assert_eq!(rate.get(), 1_000_000_000);
        (0..PASSES).for_each(|_| rate.learn(&after(100, 100)));
        assert_eq!(rate.get(), 10_000_000, "eight that were measured do");
    }

    #[test]
    fn one_pass_that_waited_is_no_slow_path_and_eight_are() {
        let mut rate = Best::default();
        assert_eq!(rate.get(), 0);
        rate.insert(1_000);
        (0..PASSES - 1).for_each(|_| rate.insert(100));
        assert_eq!(rate.get(), 1_000);
        rate.insert(100);
        assert_eq!(rate.get(), 100);
    }
}
