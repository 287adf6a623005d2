//! The rate that a path has carried for a while: what is said of a link to others, who compare it with theirs.
//!
//! A rate controller wants the best of many samples, each over a round trip, so that it finds what is free. Of a slow link whose
//! acknowledgements come in lumps, a few packets long, the best of many is two or four times its rate. Here acknowledged bytes are
//! counted over windows that are longer than lumps, and never over a pause of the sender.
//!
//! ```text
//!   NOTHING IS COUNTED --an acknowledgement, and more in flight--> COUNTING --long enough: the window's rate, and on--.
//!            ^                                                    |    ^-----------------------------------------'
//!            '--nothing in flight: the window's rate, if it tells-'
//! ```

use super::filters::rate_of;
use crate::Timestamp;
use core::time::Duration;

/// See the module's documentation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SustainedRate {
    /// Since when acknowledged bytes are counted, and how many.
    window: Option<(Timestamp, u64)>,
    latest: [u64; WINDOWS],
    next: usize,
}

impl SustainedRate {
    /// So many bytes were acknowledged, and so many are in flight.
    pub(crate) fn on_ack(&mut self, now: Timestamp, acked: u64, in_flight: u64) {
        let Some((since, bytes)) = self.window else {
            self.window = (in_flight > 0).then_some((now, 0));
            return;
        };
        let (bytes, time) = (bytes + acked, now.since(since));
        let is_over = in_flight == 0 || time >= WINDOW && bytes >= BYTES_MIN;
        if !is_over {
            self.window = Some((since, bytes));
            return;
        }
        if time >= MEASURABLE && bytes >= BYTES_MIN {
            self.latest[self.next] = rate_of(bytes, time).unwrap_or(0);
            self.next = (self.next + 1) % WINDOWS;
        }
        self.window = (in_flight > 0).then_some((now, 0));
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
/// A shorter time is that of timers.
const MEASURABLE: Duration = Duration::from_millis(1);
/// Beside senders that are done a window may be one flow's alone: the best of some are the link.
const WINDOWS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Timestamp {
        Timestamp::from_nanos(micros * 1_000)
    }

    /// Acknowledgements of ten packets, a lump of so many of them at once, over a link of so many bytes in a second.
    fn after(lump: u64, rate: u64, lumps: u64) -> SustainedRate {
        let mut sustained = SustainedRate::default();
        for number in 1..=lumps {
            for _ in 0..lump {
                let micros = number * lump * 14_080 * 1_000_000 / rate;
                sustained.on_ack(at(micros), 14_080, 14_080);
            }
        }
        sustained
    }

    #[test]
    fn lumps_of_acknowledgements_hardly_change_it() {
        let link = 6_250_000;
        for lump in [1, 2, 4] {
            let rate = after(lump, link, 100).get();
            assert!(rate > link * 9 / 10 && rate < link * 3 / 2, "{lump}: {rate}");
        }
    }

    #[test]
    fn a_pause_of_the_sender_counts_for_nothing() {
        let mut sustained = SustainedRate::default();
        for burst in 0..20 {
            // 4 ms of packets, 14 to the millisecond, and a pause of 100.
            for packet in 0..=56 {
                let in_flight = if packet < 56 { 1_408 } else { 0 };
                sustained.on_ack(at(burst * 104_000 + packet * 71), 1_408, in_flight);
            }
        }
        let rate = sustained.get();
        assert!((19_000_000..20_500_000).contains(&rate), "{rate}");
    }

    #[test]
    fn a_few_packets_and_a_moment_tell_nothing() {
        let mut sustained = SustainedRate::default();
        (0..31).for_each(|packet| sustained.on_ack(at(packet * 1_000), 1_408, (30 - packet) * 1_408));
        (0..100).for_each(|packet| sustained.on_ack(at(50_000 + packet), 1_408, (99 - packet) * 1_408));
        assert_eq!(sustained.get(), 0);
    }

    #[test]
    fn it_is_of_the_last_windows() {
        let mut sustained = after(1, 50_000_000, 1_000);
        let fast = sustained.get();
        let start = 1_000 * 14_080 / 50 + 1_000;
        (0..1_000).for_each(|ack| sustained.on_ack(at(start + ack * 2_816), 14_080, 14_080));
        assert!(sustained.get() < fast / 8, "{} after {fast}", sustained.get());
    }
}
