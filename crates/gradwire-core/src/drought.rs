//! A way that loses all data while questions and answers pass: the MTU has become smaller, or somebody drops what is large or marked.
//!
//! Each answer shows a whole window to be lost, and so makes room for the next one: without a bound such a flow sends more than the path ever
//! carried, for as long as its call may take (RFC 8085 section 3.1).

use crate::recovery::SentPacket;
use crate::Timestamp;
use core::time::Duration;

/// So many packets lost, none of them sent before a loss was known, and no such one arrived since: in congestion, where a full buffer takes the
/// end of a window, some of the next one come through.
const LOST_MIN: u32 = 256;
/// What is tried at once from then on.
const PACKETS: u64 = 4;
/// The longest pause between two tries. A way that has healed is found out so much later, or as much as it was broken where that was less.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// What is known of the time in which nothing has come through.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drought {
    /// When the first of these losses was known, and the bytes of the smallest packet that was lost; `None`: the latest has arrived.
    begun: Option<(Timestamp, u32)>,
    lost: u32,
    pause: Duration,
    until: Timestamp,
}

impl Drought {
    /// These packets are known to be lost, at `now`.
    pub(crate) fn on_lost(&mut self, now: Timestamp, packets: &[SentPacket], round_trip: Duration) {
        let Some(smallest) = packets.iter().map(|packet| packet.bytes).min() else { return };
        let (at, before) = self.begun.unwrap_or((now, smallest));
        self.begun = Some((at, before.min(smallest)));
        let count = packets.iter().filter(|packet| packet.sent_at >= at).count();
        self.lost = self.lost.saturating_add(u32::try_from(count).unwrap_or(u32::MAX));
        if self.lasts() {
            self.pause = (self.pause * 2).max(round_trip).min(PAUSE_MAX);
            self.until = now + self.pause;
        }
    }

    /// A packet of so many bytes has arrived. A smaller one than all that were lost shows nothing of the way of those.
    pub(crate) fn on_arrived(&mut self, bytes: u32) {
        if self.begun.is_some_and(|(_, smallest)| bytes >= smallest) {
            *self = Self::default();
        }
    }

    /// Whether nothing of many packets has arrived.
    pub(crate) fn lasts(&self) -> bool {
        self.lost >= LOST_MIN
    }

    /// The bytes of the smallest packet that was lost, while it lasts.
    pub(crate) fn smallest(&self) -> Option<u32> {
        self.begun.filter(|_| self.lasts()).map(|(_, smallest)| smallest)
    }

    /// No data leaves before.
    pub(crate) fn until(&self) -> Timestamp {
        self.until
    }

    /// The most bytes under way, of packets of so many each.
    pub(crate) fn window(&self, packet_bytes: u64) -> u64 {
        if self.lasts() {
            PACKETS * packet_bytes
        } else {
            u64::MAX
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_wire::{PacketNumber, TransferId};

    #[test]
    fn only_a_packet_as_large_as_what_was_lost_ends_it() {
        let mut drought = Drought::default();
        let at = |ms| Timestamp::ZERO + Duration::from_millis(ms);
        let packet = |sent_at, bytes| SentPacket {
            number: PacketNumber(0),
            transfer: TransferId(1),
            chunk: 0,
            bytes,
            sent_at,
        };
        for ms in 1..=u64::from(LOST_MIN) {
            assert!(!drought.lasts(), "{ms}");
            drought.on_lost(at(ms), &[packet(at(ms), 1408)], Duration::from_millis(1));
            drought.on_arrived(1407);
        }
        assert!(drought.lasts() && drought.until() > at(u64::from(LOST_MIN)));
        drought.on_arrived(1408);
        assert!(!drought.lasts() && drought.window(1408) == u64::MAX);
    }
}
