//! Which acknowledgements tell that a packet is lost, where the network has a queue for each traffic class.
//!
//! The switches serve the more urgent class first (MLT section 5.2), so a packet overtakes those of less urgent classes, and is overtaken
//! by those of more urgent ones: what of these arrives says nothing about it. Packets of its own class, or of a less urgent one, that were
//! sent later and have arrived do.

use crate::{Timestamp, CLASSES_MAX};
use gradwire_wire::PacketNumber;

/// Later packets that must be acknowledged before a packet is lost (LTP section IV-B; RFC 9002 section 6.1.1).
pub(super) const PACKET_THRESHOLD: usize = 3;

/// The largest acknowledged numbers, largest first.
pub(super) type Newest = [Option<PacketNumber>; PACKET_THRESHOLD];

/// What a [`super::Ledger`] knows of each class.
#[derive(Debug, Default)]
pub(super) struct ByClass {
    /// Of packets of this class, or of a less urgent one.
    newest_acked: [Newest; CLASSES_MAX],
    /// When the oldest packet was sent of those that a later one has overtaken, as far as the last search saw.
    pub(super) overtaken_since: Option<Timestamp>,
}

impl ByClass {
    /// A packet of this class is acknowledged.
    pub(super) fn note_acked(&mut self, class: u8, number: PacketNumber) {
        let classes = usize::from(class).min(CLASSES_MAX - 1);
        self.newest_acked[..=classes].iter_mut().for_each(|newest| insert(newest, number));
    }

    /// The largest acknowledged numbers of packets that a packet of this class does not let past.
    pub(super) fn newest_behind(&self, class: u8) -> Newest {
        self.newest_acked[usize::from(class).min(CLASSES_MAX - 1)]
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
