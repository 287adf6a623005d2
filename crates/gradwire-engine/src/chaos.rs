//! Fault injection: datagrams that have arrived are damaged, doubled, lost or held back before the protocol sees them.
//!
//! For tests of what is built on gradwire, and of gradwire itself, over real sockets. Whether a data packet is lost follows from
//! the seed, the ranks and its number on its path, not from when it came, so that a run can be repeated; control packets have
//! no number and are drawn in the order of their arrival. Off, the network thread has no chaos at all and asks nothing.

use crate::socket::{Datagram, RawAddress};
use gradwire_core::wire::{Kind, Opening, Reader};
use gradwire_core::{Flags, Header, Timestamp};
use serde::Serialize;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// What is done to the datagrams that this process receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ChaosConfig {
    /// Share of all datagrams that is lost at random, 0 to 0.9.
    pub loss: f64,
    /// Share of each transfer that may lose something, at its end, whose data packets are lost when they come for the first
    /// time, 0 to 0.9: a burst.
    pub tail: f64,
    /// Share of all datagrams in which a bit is flipped, 0 to 0.9. Sealed ones then do not open; the others are lost, as the
    /// checksum of UDP sees to on a real wire.
    pub corrupt: f64,
    /// Share of all datagrams that come twice, 0 to 0.9.
    pub duplicate: f64,
    /// How long every datagram is held back.
    pub delay: Duration,
    /// Of the chances.
    pub seed: u64,
}

impl ChaosConfig {
    /// Everything in it that is a share.
    pub(crate) fn shares(&self) -> [f64; 4] {
        [self.loss, self.tail, self.corrupt, self.duplicate]
    }
}

impl fmt::Display for ChaosConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { delay, seed, .. } = *self;
        let [loss, tail, corrupt, duplicate] = self.shares().map(|share| share * 100.0);
        let delay = delay.as_secs_f64() * 1e3;
        write!(
            f,
            "loss={loss}%,tail={tail}%,corrupt={corrupt}%,duplicate={duplicate}%,delay={delay}ms,seed={seed}"
        )
    }
}

/// A datagram on its way through this process: which group it is for, who sent it and who gets it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    pub(crate) group: u32,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// What happened to a datagram on the wire.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// A bit was flipped.
    pub(crate) is_damaged: bool,
    /// It comes again, as it was sent.
    pub(crate) copy: Option<Vec<u8>>,
}

/// Keeps the chances of arrivals apart from those of losses.
const ARRIVAL: u64 = 0x4152_5249_5645;

/// The faults at work.
#[derive(Debug)]
pub(crate) struct Chaos {
    config: ChaosConfig,
    /// Control packets so far.
    control: u64,
    /// Datagrams so far.
    arrived: u64,
    /// What is held back, in order.
    held: VecDeque<Held>,
}

/// A datagram that is held back.
#[derive(Debug)]
pub(crate) struct Held {
    due: Timestamp,
    bytes: Vec<u8>,
    from: RawAddress,
    octet: u8,
}

impl Held {
    /// As it arrived.
    pub(crate) fn datagram(&mut self) -> Datagram<'_> {
        Datagram { bytes: &mut self.bytes, from: &self.from, octet: self.octet }
    }
}

impl Chaos {
    pub(crate) fn new(config: ChaosConfig) -> Self {
        Self { config, control: 0, arrived: 0, held: VecDeque::new() }
    }

    /// What happens to a datagram before anybody has looked at it, drawn in the order of arrival.
    pub(crate) fn on_arrival(&mut self, datagram: &mut [u8]) -> Arrival {
        self.arrived += 1;
        let bits = mix(mix(self.config.seed ^ ARRIVAL) ^ self.arrived);
        let copy = (share_of(mix(bits)) < self.config.duplicate).then(|| datagram.to_vec());
        let is_damaged = share_of(bits) < self.config.corrupt && !datagram.is_empty();
        if is_damaged {
            let bit = mix(!bits) as usize % (datagram.len() * 8);
            datagram[bit / 8] ^= 1 << (bit % 8);
        }
        Arrival { is_damaged, copy }
    }

    /// Whether a datagram is lost. `lossy_bytes`: size of the transfer of a data packet, if that may lose something.
    pub(crate) fn loses(
        &mut self,
        way: Way,
        datagram: &[u8],
        lossy_bytes: impl FnOnce(&Header, Option<&Opening>) -> Option<u64>,
    ) -> bool {
        let Ok((header, body)) = Header::decode(datagram) else { return false };
        let is_data = header.kind == Kind::Data;
        let number = if is_data { u64::from(header.packet_number.0) } else { self.control };
        self.control += u64::from(!is_data);
        let stream = u64::from(way.group) << 32 | u64::from(way.from) << 16 | u64::from(way.to);
        let which = u64::from(is_data) << 40 | u64::from(header.path.0) << 32 | number;
        if share_of(mix(mix(self.config.seed ^ mix(stream)) ^ which)) < self.config.loss {
            return true;
        }
        if !is_data || self.config.tail <= 0.0 || header.flags.contains(Flags::RETRANSMITTED) {
            return false;
        }
        let mut reader = Reader::new(body);
        let opens = header.flags.contains(Flags::OPENING);
        let opening = if opens { Opening::decode(&mut reader).ok() } else { None };
        let end = u64::from(header.offset) + reader.rest().len() as u64;
        let total = lossy_bytes(&header, opening.as_ref());
        total.is_some_and(|total| end as f64 > total as f64 * (1.0 - self.config.tail))
    }

    /// Holds a datagram back.
    pub(crate) fn hold(&mut self, now: Timestamp, datagram: &Datagram<'_>) {
        let due = now + self.config.delay;
        let (bytes, from) = (datagram.bytes.to_vec(), *datagram.from);
        self.held.push_back(Held { due, bytes, from, octet: datagram.octet });
    }

    /// The next one that has been held back long enough.
    pub(crate) fn release(&mut self, now: Timestamp) -> Option<Held> {
        let is_due = self.held.front().is_some_and(|held| held.due <= now);
        is_due.then(|| self.held.pop_front()).flatten()
    }

    /// When the next one is to be released.
    pub(crate) fn due(&self) -> Option<Timestamp> {
        self.held.front().map(|held| held.due)
    }
}

/// Spreads the bits of a number over all of it (the finalizer of splitmix64): neighbours become unrelated.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// A number of 64 random bits as a share of all of them, below 1.
fn share_of(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::wire::{PacketNumber, HEADER_BYTES};
    use gradwire_core::ConnectionId;

    const WAY: Way = Way { group: 0, from: 1, to: 2 };

    fn data(number: u32, offset: u32, flags: Flags) -> Vec<u8> {
        let header = Header::control(Kind::Data, ConnectionId::new(7).expect("not zero"));
        let header = Header { flags, offset, packet_number: PacketNumber(number), ..header };
        [&header.encode()[..], &[0; 100]].concat()
    }

    fn lost(config: ChaosConfig, way: Way, numbers: impl Iterator<Item = u32>) -> Vec<u32> {
        let mut chaos = Chaos::new(config);
        numbers.filter(|number| chaos.loses(way, &data(*number, 0, Flags::NONE), |_, _| None)).collect()
    }

    #[test]
    fn the_seed_decides_which_packets_are_lost_whenever_they_come() {
        let config = ChaosConfig { loss: 0.1, seed: 7, ..ChaosConfig::default() };
        let first = lost(config, WAY, 0..20_000);
        assert!((1_850..2_150).contains(&first.len()), "{} of 20000", first.len());
        let mut reversed = lost(config, WAY, (0..20_000).rev());
        reversed.reverse();
        assert_eq!(first, reversed);
        for other in [
            lost(ChaosConfig { seed: 8, ..config }, WAY, 0..20_000),
            lost(config, Way { from: 2, to: 1, ..WAY }, 0..20_000),
            lost(config, Way { group: 1, ..WAY }, 0..20_000),
        ] {
            let both = other.iter().filter(|number| first.binary_search(number).is_ok()).count();
            assert!((100..300).contains(&both), "{both} of 2000 in common, a tenth by chance");
        }
    }

    #[test]
    fn the_tail_of_what_may_lose_something_is_lost_once() {
        let config = ChaosConfig { tail: 0.1, ..ChaosConfig::default() };
        let mut chaos = Chaos::new(config);
        let mut loses = |offset, flags, bytes| chaos.loses(WAY, &data(0, offset, flags), |_, _| bytes);
        assert!(!loses(800, Flags::NONE, Some(1000)), "bytes 800 to 900");
        assert!(loses(801, Flags::NONE, Some(1000)) && loses(900, Flags::NONE, Some(1000)));
        assert!(!loses(900, Flags::RETRANSMITTED, Some(1000)), "lost once");
        assert!(!loses(900, Flags::NONE, None), "exact");
    }

    #[test]
    fn what_is_held_back_comes_in_order_when_it_is_due() {
        let delay = Duration::from_millis(2);
        let mut chaos = Chaos::new(ChaosConfig { delay, ..ChaosConfig::default() });
        let at = |ms: u64| Timestamp::from_nanos(ms * 1_000_000);
        let from = RawAddress::EMPTY;
        for byte in 0..2 {
            let datagram = Datagram { bytes: &mut [byte; HEADER_BYTES], from: &from, octet: 3 };
            chaos.hold(at(u64::from(byte)), &datagram);
        }
        assert!(chaos.release(at(1)).is_none());
        assert_eq!(chaos.due(), Some(at(2)));
        let mut held = chaos.release(at(2)).unwrap();
        let datagram = held.datagram();
        assert_eq!((datagram.bytes[0], datagram.octet), (0, 3));
        assert!(chaos.release(at(2)).is_none());
        assert!(chaos.release(at(3)).is_some() && chaos.due().is_none());
    }

    #[test]
    fn a_damaged_datagram_differs_in_one_bit_and_its_copy_in_none() {
        let config = ChaosConfig { corrupt: 0.5, duplicate: 0.5, seed: 1, ..ChaosConfig::default() };
        let mut chaos = Chaos::new(config);
        let (mut damaged, mut doubled) = (0, 0);
        for _ in 0..1_000 {
            let mut bytes = [0x5A; 100];
            let arrival = chaos.on_arrival(&mut bytes);
            let flipped: u32 = bytes.iter().map(|byte| (byte ^ 0x5A).count_ones()).sum();
            assert_eq!(flipped, u32::from(arrival.is_damaged));
            assert!(arrival.copy.as_ref().is_none_or(|copy| copy == &[0x5A; 100]));
            damaged += flipped;
            doubled += u32::from(arrival.copy.is_some());
        }
        assert!((400..600).contains(&damaged) && (400..600).contains(&doubled), "{damaged} {doubled}");
    }

    #[test]
    fn it_says_what_it_does() {
        let delay = Duration::from_millis(2);
        let config =
            ChaosConfig { loss: 0.01, tail: 0.1, corrupt: 0.02, delay, seed: 7, ..ChaosConfig::default() };
        assert_eq!(config.to_string(), "loss=1%,tail=10%,corrupt=2%,duplicate=0%,delay=2ms,seed=7");
    }
}
