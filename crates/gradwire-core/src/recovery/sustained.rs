//! The rate that a path has carried for a while: what is said of a link to others, who compare it with theirs.
//!
//! A rate controller wants the best of many samples, each over a round trip, so that it finds what is free. Of a slow link whose
//! acknowledgements come in lumps, a few packets long, the best of many is two or four times its rate. Here acknowledged bytes are
//! counted over windows that are longer than lumps. Their clock runs while something is in flight, and not over a pause of the sender.
//!
//! ```text
//!   STOPPED --a packet leaves--> RUNNING --an acknowledgement, and long enough: the window's rate, and a new window--.
//!      ^                          |   ^--------------------------------------------------------------------------'
//!      '---nothing in flight------'
//! ```

use super::filters::rate_of;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SustainedRate {
    /// Up to when the window's time is counted; `None`: the clock stands.
    counted_to: Option<Timestamp>,
    time: Duration,
    bytes: u64,
    latest: [u64; WINDOWS],
    next: usize,
}

impl SustainedRate {
    /// A packet leaves, beside others that are in flight or not.
    pub(crate) fn on_sent(&mut self, now: Timestamp, in_flight: u64) {
        if in_flight == 0 {
            self.counted_to = Some(now);
        }
    }

    /// So many bytes were acknowledged, and so many are in flight.
    pub(crate) fn on_ack(&mut self, now: Timestamp, acked: u64, in_flight: u64) {
        let Some(from) = self.counted_to else { return };
        self.time += now.since(from);
        self.bytes += acked;
        self.counted_to = (in_flight > 0).then_some(now);
        if self.time >= WINDOW && self.bytes >= BYTES_MIN {
            self.latest[self.next] = rate_of(self.bytes, self.time).unwrap_or(0);
            self.next = (self.next + 1) % WINDOWS;
            (self.time, self.bytes) = (Duration::ZERO, 0);
        }
    }

    /// The best of the last few windows, bytes per second; zero before the first.
    pub(crate) fn get(&self) -> u64 {
        self.latest.iter().copied().max().unwrap_or(0)
    }
}

/// Many time slices of a busy machine: for one or two of them acknowledgements wait.
const WINDOW: Duration = Duration::from_millis(40);
/// Of fewer packets a burst or two would decide.
const BYTES_MIN: u64 = 32 * 1_408;
/// Beside senders that are done a window may be one flow's alone: the best of some are the link.
const WINDOWS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1_000)
    }

    /// A sender of flights of so many bytes, 30 ms apart, over a link of so many bytes in a second: each tenth packet is acknowledged, and so many
    /// acknowledgements come at once.
    fn after(flight: u64, lump: u64, rate: u64, flights: u64) -> (SustainedRate, Timestamp) {
        const ACKED: u64 = 14_080;
        let (mut sustained, mut start) = (SustainedRate::default(), 1_000);
        for _ in 0..flights {
            sustained.on_sent(at(start), 0);
            let mut left = flight;
            while left > 0 {
                let arrived = (flight - left + lump * ACKED).min(flight);
                let micros = start + arrived * 1_000_000 / rate;
                while left > flight - arrived {
                    let acked = ACKED.min(left);
                    left -= acked;
                    sustained.on_ack(at(micros), acked, left);
                }
            }
            start += flight * 1_000_000 / rate + 30_000;
        }
        (sustained, at(start))
    }

    #[test]
    fn neither_lumps_of_acknowledgements_nor_pauses_of_the_sender_change_it_much() {
        let link = 6_250_000;
        for flight in [50_000, 100_000, 250_000, 5_000_000] {
            for lump in [1, 2, 4] {
                let rate = after(flight, lump, link, 40).0.get();
                // Else it would be taken for another link's.
                let (least, most) = (link * 13 / 16, link * 16 / 13);
                assert!(rate > least && rate < most, "{flight} bytes, {lump} at once: {rate}");
            }
        }
    }

    #[test]
    fn a_few_packets_tell_nothing() {
        let (sustained, _) = after(1_408, 1, 1_000_000, 31);
        assert_eq!(sustained.get(), 0);
        assert!(after(1_408, 1, 1_000_000, 40).0.get() > 0);
    }

    #[test]
    fn what_leaves_the_flight_unheard_stops_the_clock_at_the_next_packet() {
        let mut sustained = SustainedRate::default();
        for flight in 0..60 {
            // A pause of 100 ms, and a packet that the flight loses sight of before its last acknowledgement.
            let start = flight * 101_000;
            sustained.on_sent(at(start), 0);
            sustained.on_ack(at(start + 1_000), 14_080, 1_408);
        }
        let rate = sustained.get();
        assert!(rate > 14_000_000, "{rate}");
    }

    #[test]
    fn it_is_of_the_last_windows() {
        let (mut sustained, now) = after(5_000_000, 1, 50_000_000, 10);
        let fast = sustained.get();
        let start = now.since(Timestamp::ZERO).as_micros() as u64;
        sustained.on_sent(at(start), 0);
        (1..1_000).for_each(|ack| sustained.on_ack(at(start + ack * 2_816), 14_080, 14_080));
        assert!(sustained.get() < fast / 8, "{} after {fast}", sustained.get());
    }
}
