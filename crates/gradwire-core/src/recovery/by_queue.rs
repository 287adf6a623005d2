//! Which acknowledgements tell that a packet is lost, where the network has a queue for each traffic class.
//!
//! The switches serve the more urgent queue first (MLT section 5.2), so a packet overtakes those of less urgent ones, and is overtaken
//! by those of more urgent ones: what of these arrives says nothing about it. Packets of its own queue, or of a less urgent one, that were
//! sent later and have arrived do. Whatever anything has overtaken is lost after [`STARVED_MAX`], so that nothing waits for ever for a
//! packet behind it that does not come.

use crate::{Timestamp, CLASSES_MAX};
use core::time::Duration;
use gradwire_wire::PacketNumber;

/// So long more urgent packets may hold one up.
pub(super) const STARVED_MAX: Duration = Duration::from_millis(100);

/// Later packets that must be acknowledged before a packet is lost (LTP section IV-B; RFC 9002 section 6.1.1).
pub(super) const PACKET_THRESHOLD: usize = 3;

/// The largest acknowledged numbers, largest first.
pub(super) type Newest = [Option<PacketNumber>; PACKET_THRESHOLD];

/// What a [`super::Ledger`] knows of each queue.
#[derive(Debug, Default)]
pub(super) struct ByQueue {
    /// Of packets of this queue, or of a less urgent one.
    newest_acked: [Newest; CLASSES_MAX],
    /// Since when a packet is late that a later one has overtaken, as far as the last search saw.
    pub(super) late_since: Option<Timestamp>,
}

impl ByQueue {
    /// A packet of this queue is acknowledged.
    pub(super) fn note_acked(&mut self, queue: u8, number: PacketNumber) {
        let queue = usize::from(queue).min(CLASSES_MAX - 1);
        self.newest_acked[..=queue].iter_mut().for_each(|newest| insert(newest, number));
    }

    /// The largest acknowledged numbers of packets that a packet of this queue does not let past.
    pub(super) fn newest_behind(&self, queue: u8) -> Newest {
        self.newest_acked[usize::from(queue).min(CLASSES_MAX - 1)]
    }
}

/// Inserts into the three largest numbers.
pub(super) fn insert(newest: &mut Newest, mut number: PacketNumber) {
    for slot in newest {
        match *slot {
            Some(held) if number.since(held) < 0 => {}
            Some(held) => number = slot.replace(number).unwrap_or(held),
            None => {
                *slot = Some(number);
                return;
            }
        }
    }
}
