//! A port: queues in strict priority over one buffer, and the link behind them.

use super::ledger::Ledger;
use super::packets::{List, Packet, PacketId, Packets};
use super::{Damage, QueueOptions, BANDS_MAX};
use crate::PathTrouble;
use gradwire_core::Ecn;
use std::time::Duration;

/// What a port did, packets and bytes on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortStats {
    /// Packets that came.
    pub arrived: u64,
    /// Packets whose last bit has left.
    pub departed: u64,
    /// Dropped because the buffer was full.
    pub overflowed: u64,
    /// Dropped because their band was long and they were not ECN-capable.
    pub dropped_selectively: u64,
    /// Marked because their band was long.
    pub marked: u64,
    /// Lost on the link behind the port, which is broken or gray.
    pub lost: u64,
    /// Most bytes that ever waited.
    pub bytes_most: u64,
}

/// What became of a packet that came to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Waits,
    Dropped,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Port {
    rate: u64,
    /// Nanoseconds are too coarse for a packet at 400 Gbit/s: what was cut off is carried to the next one, so that the
    /// rate is exact in the long run. In units of 1 / rate nanoseconds.
    carried: u64,
    queued_bytes: u64,
    bands: [Band; BANDS_MAX],
    /// The packet on the link.
    leaving: Option<PacketId>,
    pub(super) trouble: PathTrouble,
    pub(super) stats: PortStats,
    ledger: Ledger,
}

#[derive(Clone, Copy, Debug, Default)]
struct Band {
    list: List,
    bytes: u64,
}

impl Port {
    pub(super) fn new(rate: u64) -> Self {
        Self {
            rate,
            carried: 0,
            queued_bytes: 0,
            bands: [Band::default(); BANDS_MAX],
            leaving: None,
            trouble: PathTrouble::default(),
            stats: PortStats::default(),
            ledger: Ledger::default(),
        }
    }

    /// Bytes that wait, without the packet on the link.
    pub(super) const fn queued_bytes(&self) -> u64 {
        self.queued_bytes
    }

    pub(super) const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// A packet comes. A dropped one stays the caller's.
    pub(super) fn enqueue(
        &mut self,
        id: PacketId,
        packets: &mut Packets,
        queue: Option<&QueueOptions>,
        damage: Damage,
    ) -> Fate {
        let packet = packets.get_mut(id);
        let bytes = u64::from(packet.wire_bytes);
        let bands = queue.map_or(BANDS_MAX, |queue| queue.thresholds.len().min(BANDS_MAX));
        let number = usize::from(packet.band).min(bands - 1);
        self.stats.arrived += 1;
        packet.turn = self.ledger.on_arrived(number, bytes);
        if queue.is_some_and(|queue| self.drops(packet, number, queue, damage)) {
            if damage != Damage::ForgetsDrops {
                self.ledger.on_dropped(bytes);
            }
            return Fate::Dropped;
        }
        self.queued_bytes += bytes;
        self.bands[number].bytes += bytes;
        self.bands[number].list.push(id, packets);
        self.stats.bytes_most = self.stats.bytes_most.max(self.queued_bytes);
        self.ledger.on_waiting(self.queued_bytes, queue.map(|queue| queue.buffer_bytes));
        Fate::Waits
    }

    /// Whether the queue has no room for a packet; marks it where it is long.
    fn drops(&mut self, packet: &mut Packet, number: usize, queue: &QueueOptions, damage: Damage) -> bool {
        let bytes = u64::from(packet.wire_bytes);
        if self.queued_bytes + bytes > queue.buffer_bytes && damage != Damage::OverfillsBuffers {
            self.stats.overflowed += 1;
            return true;
        }
        if queue.thresholds[number].is_none_or(|most| self.bands[number].bytes + bytes <= most) {
            return false;
        }
        if packet.ecn == Ecn::NotCapable {
            self.stats.dropped_selectively += 1;
            return true;
        }
        packet.ecn = Ecn::Congestion;
        self.stats.marked += 1;
        false
    }

    /// The next packet goes on the link, if that is free. Returns for how long it takes the link.
    pub(super) fn start(&mut self, packets: &mut Packets, damage: Damage) -> Option<Duration> {
        if self.leaving.is_some() {
            return None;
        }
        let number = self.bands.iter().position(|band| band.bytes > 0)?;
        let band = &mut self.bands[number];
        let mut id = band.list.pop(packets)?;
        if damage == Damage::LetsOvertake {
            // The first one goes to the end, the second one leaves.
            band.list.push(id, packets);
            id = band.list.pop(packets)?;
        }
        let packet = packets.get(id);
        let bytes = u64::from(packet.wire_bytes);
        band.bytes -= bytes;
        self.queued_bytes -= bytes;
        self.ledger.on_left(number, packet.turn, bytes);
        self.leaving = Some(id);
        Some(self.time_of(bytes))
    }

    /// The last bit has left.
    pub(super) fn finish(&mut self) -> Option<PacketId> {
        self.stats.departed += 1;
        self.leaving.take()
    }

    /// Bytes that its queues hold, counted anew.
    pub(super) fn count_waiting(&self, packets: &Packets) -> u64 {
        let of =
            |band: &Band| band.list.iter(packets).map(|packet| u64::from(packet.wire_bytes)).sum::<u64>();
        self.bands.iter().map(of).sum()
    }

    fn time_of(&mut self, bytes: u64) -> Duration {
        let total = bytes * 1_000_000_000 + self.carried;
        self.carried = total % self.rate;
        Duration::from_nanos(total / self.rate)
    }
}
