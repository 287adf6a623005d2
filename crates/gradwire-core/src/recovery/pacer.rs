//! Spreads packets over time: a token bucket whose depth is one burst.
//!
//! Asked by the connection before each packet. Credit is counted in byte-nanoseconds per second (bytes times
//! 10^9), so that any rate gains whole units in any nanosecond and nothing is ever rounded away: the average
//! is the rate, however often the bucket is asked.
//!
//! Where the rate changes, the time since the bucket was last asked counts at the new one, so a connection whose data waits
//! for it is asked after each acknowledgement ([`crate::Connection::wants_polls`]). Time that counts at the rate that held
//! then would need no such care. In the model of the tests it costs what the controllers may not lose: with acknowledgements in
//! lumps of 4 ms a flow used 82 % of 1 Gbit/s, and [`super::TimelyController`] 82 % of 100 Mbit/s at 5 % loss, of the 85 % asked for.

use super::filters::bytes_in;
use crate::{message_packets, Timestamp};
use core::time::Duration;

/// Token bucket.
///
/// ```text
///   OPEN --credit used up, or a full message gone and too little for another--> WAITING --credit for a whole burst--> OPEN
/// ```
///
/// A sender whose thread was not run for a while would lose that time for good, and the rate controller would take what it
/// then sees for the path's rate. So lateness is remembered: a little of it may be made up at once, the rest at up to
/// twice the rate.
#[derive(Clone, Copy, Debug)]
pub struct Pacer {
    /// Bytes times 10^9; below zero after a packet larger than what was left; `None` is a full bucket.
    credit: Option<i64>,
    /// What lateness has cost, in the same unit, until it is made up.
    owed: i64,
    updated_at: Timestamp,
    /// Payload bytes of a full message, which a burst is at most; `u64::MAX` where bursts need not leave whole.
    message: u64,
    /// Bytes of the burst that leaves now.
    sent: u64,
    waiting: bool,
    /// Something else than the pacer held the sender back: the time since then is not lateness.
    excused: bool,
    /// There was nothing to send since the last packet, and this is not made up for at once.
    starved: bool,
}

impl Pacer {
    /// A full bucket.
    #[must_use]
    pub fn new(now: Timestamp) -> Self {
        Self {
            credit: None,
            owed: 0,
            updated_at: now,
            message: u64::MAX,
            sent: 0,
            waiting: false,
            excused: false,
            starved: false,
        }
    }

    /// Of a connection's only path, with packets of so many bytes. A burst of a full message leaves whole, and what is left of the
    /// credit waits until it is enough for the next one: a message of a few packets costs as much as a full one. Of several paths it
    /// is not asked: their packets would overtake each other otherwise than they were seen to.
    #[must_use]
    pub fn in_whole_bursts(self, packet_bytes: u64) -> Self {
        let packets = message_packets(usize::try_from(packet_bytes).unwrap_or(usize::MAX)).max(2);
        Self { message: packets as u64 * packet_bytes, ..self }
    }

    /// Whether a packet may leave now. `rate` in bytes per second, `burst` in bytes.
    pub fn allows(&mut self, now: Timestamp, rate: u64, burst: u64) -> bool {
        let burst = burst.min(self.message);
        let gained = now.since(self.updated_at).as_nanos().saturating_mul(u128::from(rate));
        self.updated_at = self.updated_at.max(now);
        let credit = self.credit.unwrap_or(scaled(burst));
        let gained = i64::try_from(gained).unwrap_or(i64::MAX);
        let made_up = self.owed.min(gained);
        let grown = credit.saturating_add(gained).saturating_add(made_up);
        // Time adds nothing above the depth, but credit for lateness that is there already stays.
        let credit = grown.min(self.depth(rate, burst).max(credit));
        let late = if self.waiting && !self.excused { grown - credit } else { 0 };
        self.owed = (self.owed - made_up).saturating_add(late).min(scaled(bytes_in(rate, OWED_MAX)));
        self.excused = false;
        self.starved = false;
        self.waiting &= credit < scaled(burst);
        self.credit = Some(credit);
        !self.waiting
    }

    /// Whether another may leave at the moment at which [`Pacer::allows`] has said so: no time has passed that adds credit.
    #[must_use]
    pub const fn allows_on(&self) -> bool {
        !self.waiting
    }

    /// The window is full or there is nothing to send: until [`Pacer::allows`] is asked again nobody is late, and what
    /// lateness has cost before is no longer worth making up.
    pub fn on_held_back(&mut self) {
        self.excused = true;
        self.owed = 0;
        self.sent = 0;
    }

    /// There is nothing to send. Unless the pause may be made up for, what comes next begins with one burst.
    pub fn on_starved(&mut self, makes_up: bool) {
        self.on_held_back();
        self.starved = !makes_up;
    }

    /// Charges a packet, of bursts of `burst` bytes.
    pub fn on_sent(&mut self, bytes: u64, burst: u64) {
        let burst = burst.min(self.message);
        let credit = self.credit.unwrap_or(0).saturating_sub(scaled(bytes));
        self.credit = Some(credit);
        self.sent += bytes;
        let is_whole = burst >= self.message && self.sent >= burst;
        self.waiting |= credit <= 0 || is_whole && credit < scaled(burst);
        if is_whole || self.waiting {
            self.sent = 0;
        }
    }

    /// When the next burst may leave. The bucket lets a burst of `burst` bytes go at a time, so that the
    /// driver wakes up once for each burst and not once for each packet.
    #[must_use]
    pub fn next_send(&self, rate: u64, burst: u64) -> Timestamp {
        if !self.waiting {
            return self.updated_at;
        }
        let missing = scaled(burst.min(self.message))
            .saturating_sub(self.credit.unwrap_or(i64::MAX))
            .max(0)
            .unsigned_abs();
        // What is owed comes along at the same rate.
        let missing = missing - (missing / 2).min(self.owed.unsigned_abs());
        self.updated_at + Duration::from_nanos(missing.div_ceil(rate.max(1)))
    }

    /// Most credit that time can add. A sender that waits for its turn and wakes up late may catch up; one
    /// that had nothing to send may not, since a late burst would be larger than the path was promised.
    fn depth(&self, rate: u64, burst: u64) -> i64 {
        let late = if self.waiting && !self.starved { bytes_in(rate, CATCH_UP) } else { 0 };
        scaled(burst.saturating_add(late))
    }
}

/// Bytes that may leave at once at this rate.
pub(super) fn burst_for(rate: u64, packet_bytes: u64) -> u64 {
    bytes_in(rate, BURST_TIME).clamp(2 * packet_bytes, BURST_MAX.max(2 * packet_bytes))
}

/// A burst is what the rate allows in this time: long enough for offload to pay, short enough not to fill a switch buffer.
const BURST_TIME: Duration = Duration::from_micros(250);
/// Largest burst: about what one segmentation-offload call takes.
const BURST_MAX: u64 = 64 << 10;
/// Lateness that is made up at once.
const CATCH_UP: Duration = Duration::from_millis(1);
/// Most lateness that is made up at all: a few time slices of a busy machine. The window bounds it on short paths.
const OWED_MAX: Duration = Duration::from_millis(20);

fn scaled(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX).saturating_mul(1_000_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the rate makes in a millisecond, within the bounds that a driver would set.
    fn burst_in_tests(rate: u64, packet: u64) -> u64 {
        bytes_in(rate, Duration::from_millis(1)).clamp(2 * packet, 64 << 10)
    }

    /// Sends packets of `packet` bytes as fast as the pacer lets them go for `time`, waking up exactly when it
    /// says plus `late`; returns bytes sent and wake-ups.
    fn sent_in(rate: u64, packet: u64, time: Duration, late: Duration) -> (u64, u64) {
        let (sent, wakes) = sent_by(Pacer::new, (rate, packet), time, late);
        let whole = |now| Pacer::new(now).in_whole_bursts(packet);
        let (in_whole_bursts, _) = sent_by(whole, (rate, packet), time, late);
        let slack = 2 * burst_in_tests(rate, packet).max(bytes_in(rate, late));
        assert!(sent.abs_diff(in_whole_bursts) <= slack, "{sent} and {in_whole_bursts} bytes");
        (sent, wakes)
    }

    fn sent_by(
        pacer: impl Fn(Timestamp) -> Pacer,
        (rate, packet): (u64, u64),
        time: Duration,
        late: Duration,
    ) -> (u64, u64) {
        let burst = burst_in_tests(rate, packet);
        let (mut now, mut sent, mut wakes) = (Timestamp::from_nanos(12_345), 0, 0);
        let end = now + time;
        let mut pacer = pacer(now);
        while now < end {
            wakes += 1;
            while pacer.allows(now, rate, burst) {
                pacer.on_sent(packet, burst);
                sent += packet;
            }
            let next = pacer.next_send(rate, burst);
            assert!(next > now, "waiting takes time");
            now = next + late;
        }
        (sent, wakes)
    }

    #[test]
    fn the_average_is_the_rate_from_ten_kilobytes_to_twenty_gigabytes_per_second() {
        for rate in [10_000, 12_500_000, 125_000_000, 1_234_567_891, 20_000_000_000] {
            let (sent, _) = sent_in(rate, 1_408, Duration::from_secs(2), Duration::ZERO);
            let slack = 2 * burst_in_tests(rate, 1_408) + 1_408;
            assert!(sent.abs_diff(2 * rate) <= slack, "rate {rate}: sent {sent}");
        }
    }

    #[test]
    fn late_wake_ups_do_not_slow_the_flow_down() {
        let late = Duration::from_micros(300);
        let (sent, _) = sent_in(1_000_000_000, 1_408, Duration::from_secs(1), late);
        assert!(sent >= 999_000_000, "sent {sent}");
    }

    /// A busy machine runs the sender's thread every ten milliseconds for two.
    #[test]
    fn time_slices_of_others_do_not_slow_the_flow_down() {
        let (rate, packet) = (25_000_000, 1_408);
        let burst = burst_in_tests(rate, packet);
        let mut pacer = Pacer::new(Timestamp::ZERO);
        let (mut sent, mut now) = (0, 0);
        while now < 2_000_000_000 {
            let at = Timestamp::from_nanos(now);
            while pacer.allows(at, rate, burst) {
                pacer.on_sent(packet, burst);
                sent += packet;
            }
            let next = pacer.next_send(rate, burst).as_nanos();
            now = if next % 10_000_000 < 5_500_000 { next } else { next.next_multiple_of(10_000_000) };
        }
        assert!(sent >= 2 * rate * 97 / 100 && sent <= 2 * rate + 2 * burst, "sent {sent}");
    }

    #[test]
    fn lateness_is_made_up_at_twice_the_rate_at_most() {
        let (rate, packet) = (25_000_000, 1_408);
        let burst = burst_in_tests(rate, packet);
        let mut pacer = Pacer::new(Timestamp::ZERO);
        let send = |pacer: &mut Pacer, at: u64| {
            let mut sent = 0;
            while pacer.allows(Timestamp::from_nanos(at), rate, burst) {
                pacer.on_sent(packet, burst);
                sent += packet;
            }
            sent
        };
        send(&mut pacer, 0);
        let at_once = send(&mut pacer, 10_000_000);
        assert!(at_once <= burst + bytes_in(rate, CATCH_UP) + packet, "{at_once} at once");
        let later: u64 = (1..=50).map(|step| send(&mut pacer, 10_000_000 + step * 100_000)).sum();
        assert!(later >= bytes_in(rate, Duration::from_millis(9)), "{later} in 5 ms");
        assert!(later <= 2 * bytes_in(rate, Duration::from_millis(5)) + burst, "{later} in 5 ms");
    }

    #[test]
    fn a_full_window_is_no_lateness() {
        let (rate, burst) = (25_000_000, 12_500);
        let mut pacer = Pacer::new(Timestamp::ZERO);
        while pacer.allows(Timestamp::ZERO, rate, burst) {
            pacer.on_sent(1_000, burst);
        }
        pacer.on_held_back();
        let sent_at = |pacer: &mut Pacer, at: u64| {
            let mut sent = 0;
            while pacer.allows(Timestamp::from_nanos(at), rate, burst) {
                pacer.on_sent(1_000, burst);
                sent += 1_000;
            }
            sent
        };
        sent_at(&mut pacer, 10_000_000);
        let later: u64 = (1..=50).map(|step| sent_at(&mut pacer, 10_000_000 + step * 100_000)).sum();
        assert!(later <= bytes_in(rate, Duration::from_millis(5)) + burst, "{later} in 5 ms");
    }

    #[test]
    fn one_wake_up_lets_a_whole_burst_go() {
        let (sent, wakes) = sent_in(12_500_000, 1_408, Duration::from_secs(1), Duration::ZERO);
        assert!(wakes <= 1_002, "{wakes} wake-ups for {sent} bytes");
    }

    #[test]
    fn an_idle_time_saves_no_more_than_one_burst() {
        let (rate, burst) = (12_500_000, 12_500);
        let mut pacer = Pacer::new(Timestamp::ZERO);
        assert!(pacer.allows(Timestamp::ZERO, rate, burst));
        pacer.on_sent(1_000, burst);
        let later = Timestamp::from_nanos(60_000_000_000);
        let mut sent = 0;
        while pacer.allows(later, rate, burst) {
            pacer.on_sent(1_000, burst);
            sent += 1_000;
        }
        assert_eq!(sent, 13_000);
    }

    #[test]
    fn a_sender_that_ran_dry_begins_with_one_burst_unless_it_may_make_up_for_the_pause() {
        let (rate, burst) = (12_500_000, 5_000);
        for (makes_up, expected) in [(false, 5_000), (true, 5_000 + 12_500)] {
            let mut pacer = Pacer::new(Timestamp::ZERO);
            while pacer.allows(Timestamp::ZERO, rate, burst) {
                pacer.on_sent(1_000, burst);
            }
            pacer.on_starved(makes_up);
            let later = Timestamp::from_nanos(20_000_000);
            let mut sent = 0;
            while pacer.allows(later, rate, burst) {
                pacer.on_sent(1_000, burst);
                sent += 1_000;
            }
            assert!((expected..=expected + 1_000).contains(&sent), "{makes_up}: {sent}");
        }
    }

    #[test]
    fn full_messages_leave_whole_and_what_is_left_of_the_credit_is_kept() {
        let (rate, burst) = (1_000_000_000, 62_000);
        let mut pacer = Pacer::new(Timestamp::ZERO).in_whole_bursts(1_000);
        let mut at_once = |micros: u64| {
            let mut sent = 0;
            while pacer.allows(Timestamp::from_nanos(micros * 1_000), rate, burst) {
                pacer.on_sent(1_000, burst);
                sent += 1_000;
            }
            sent
        };
        assert_eq!(at_once(0), burst);
        assert_eq!(at_once(93), burst, "credit for half of another is no message");
        assert_eq!(at_once(123), 0);
        assert_eq!(at_once(124), burst, "and is not lost");
    }

    #[test]
    fn a_clock_that_stands_still_gives_no_credit() {
        let (now, burst) = (Timestamp::from_nanos(5), 3_000);
        let mut pacer = Pacer::new(now);
        let mut sent = 0;
        for _ in 0..100 {
            if pacer.allows(now, u64::MAX, burst) {
                pacer.on_sent(1_000, burst);
                sent += 1_000;
            }
        }
        assert_eq!(sent, 3_000);
    }
}
