//! What the network is told about a packet, so that it queues urgent ones first and drops unimportant ones first
//! (MLT section 4.2.2, DLCP section 3.2.2).
//!
//! The core says it in terms of gradients: a class and whether the packet may be marked instead of dropped. The engine
//! turns that into the IP header's code point (DSCP) and ECN field, and tells the core what arrived in them.

use alloc::sync::Arc;

/// Most classes of data: a switch has eight queues for each port.
pub const CLASSES_MAX: usize = 8;

/// What a datagram is to the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TrafficClass {
    /// Acknowledgements, statuses, farewells: small, and everybody waits for them. Questions about a transfer are not among them: they go
    /// with its class, since the answer says what was lost of all that left before.
    Control,
    /// Payload of this class, 0 the most urgent.
    Data(u8),
}

/// How the network is asked to treat a datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Which queue.
    pub class: TrafficClass,
    /// A switch whose queue is long marks the datagram instead of dropping it.
    pub ecn_capable: bool,
}

impl Mark {
    /// What everybody waits for is never dropped in favour of data.
    pub const CONTROL: Self = Self { class: TrafficClass::Control, ecn_capable: true };
}

/// The ECN field of a received datagram (RFC 3168).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ecn {
    /// Unknown, or not capable: a full queue would have dropped it.
    #[default]
    NotCapable,
    /// Capable, and no queue was long.
    Capable,
    /// A switch has marked it.
    Congestion,
}

impl Ecn {
    /// From the lowest two bits of the traffic class octet.
    #[must_use]
    pub const fn from_bits(octet: u8) -> Self {
        match octet & 3 {
            0 => Self::NotCapable,
            3 => Self::Congestion,
            _ => Self::Capable,
        }
    }
}

/// What a datagram carried when it arrived. The default is what a receiver knows that is told nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReceivedMark {
    /// Its class, if its code point is that of one; networks may clear it.
    pub class: Option<u8>,
    /// Its ECN field.
    pub ecn: Ecn,
}

/// A part of a bit set that several transfers share: one bit for each chunk of the transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkSet {
    words: Arc<[u64]>,
    first: u32,
}

impl ChunkSet {
    /// Chunk `i` of the transfer is bit `first + i` of `words`. Bits past the end are zero.
    #[must_use]
    pub const fn new(words: Arc<[u64]>, first: u32) -> Self {
        Self { words, first }
    }

    /// Whether the chunk is in the set.
    #[must_use]
    pub fn contains(&self, chunk: u32) -> bool {
        let bit = u64::from(self.first) + u64::from(chunk);
        let word = usize::try_from(bit / 64).ok().and_then(|word| self.words.get(word));
        word.is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }
}

/// What the network is told about the packets of a transfer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferTags {
    /// Class of its data, 0 the most urgent.
    pub class: u8,
    /// The chunks that must be kept longest; `None`: they are not told apart.
    pub important: Option<ChunkSet>,
}

impl TransferTags {
    /// Whether this chunk is one of those that must be kept longest.
    #[must_use]
    pub fn is_important(&self, chunk: u32) -> bool {
        self.important.as_ref().is_some_and(|set| set.contains(chunk))
    }
}

/// Counters of tagged data packets.
// claim: tags/counted
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TagStats {
    /// Sent, by class.
    pub sent: [u64; CLASSES_MAX],
    /// Arrived with the code point of a class, by class.
    pub received: [u64; CLASSES_MAX],
    /// Sent with the flag `important`.
    pub important_sent: u64,
    /// Arrived with the flag `important`.
    pub important_received: u64,
    /// Arrived ECN-capable, marked ones included.
    pub ecn_capable_received: u64,
    /// Arrived with the mark of a congested switch.
    pub congestion_received: u64,
}

impl TagStats {
    /// So many packets alike have left.
    pub(crate) fn on_sent(&mut self, class: u8, is_important: bool, packets: u32) {
        let packets = u64::from(packets);
        if let Some(count) = self.sent.get_mut(usize::from(class)) {
            *count += packets;
        }
        self.important_sent += packets * u64::from(is_important);
    }

    /// So many packets alike have come.
    pub(crate) fn on_received(&mut self, mark: ReceivedMark, is_important: bool, packets: u32) {
        let packets = u64::from(packets);
        if let Some(count) = mark.class.and_then(|class| self.received.get_mut(usize::from(class))) {
            *count += packets;
        }
        self.important_received += packets * u64::from(is_important);
        self.ecn_capable_received += packets * u64::from(mark.ecn != Ecn::NotCapable);
        self.congestion_received += packets * u64::from(mark.ecn == Ecn::Congestion);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;

    #[test]
    fn a_transfer_sees_its_own_part_of_a_shared_set() {
        let words: Arc<[u64]> = vec![1 << 63, 0b101].into();
        let set = ChunkSet::new(words, 62);
        let members: vec::Vec<u32> = (0..200).filter(|chunk| set.contains(*chunk)).collect();
        assert_eq!(members, [1, 2, 4]);
        assert!(!set.contains(u32::MAX), "past the end nothing is set");
    }

    #[test]
    fn the_ecn_field_is_read_whatever_the_code_point_is() {
        for octet in 0..=255_u8 {
            let expected = [Ecn::NotCapable, Ecn::Capable, Ecn::Capable, Ecn::Congestion];
            assert_eq!(Ecn::from_bits(octet), expected[usize::from(octet % 4)]);
        }
    }
}
