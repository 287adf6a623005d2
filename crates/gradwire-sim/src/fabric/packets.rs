//! The packets under way, in places that are used again: after the start nothing is allocated for a packet.

use gradwire_core::Ecn;

/// A packet in the fabric. Payload bytes are counted, not carried.
#[derive(Clone, Debug)]
pub struct Packet {
    /// Host that sent it.
    pub from: u32,
    /// Host that it is for.
    pub to: u32,
    /// Bytes on a link, headers included.
    pub wire_bytes: u32,
    /// Payload bytes that follow `head`.
    pub payload_bytes: u32,
    /// Which band it waits in, 0 the most urgent.
    pub band: u8,
    /// What a hash that spreads flows over paths sees of it, besides sender and receiver.
    pub flow: u8,
    /// Which of its receiver's process groups it is for, as its connection id says.
    pub group: u8,
    /// Its ECN field.
    pub ecn: Ecn,
    /// Nobody's: it only takes room.
    pub is_background: bool,
    /// What comes before the payload.
    pub head: Vec<u8>,
    /// The next one in the same queue, or in the list of free places.
    pub(super) next: u32,
    /// How many packets had come to the band of the port before it.
    pub(super) turn: u64,
}

/// Where a packet is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketId(pub(super) u32);

/// Every packet under way.
#[derive(Debug, Default)]
pub struct Packets {
    places: Vec<Packet>,
    free: List,
}

impl Packets {
    /// A place for a packet, with what its last user left in it; `head` is empty.
    pub fn take(&mut self) -> PacketId {
        let mut free = self.free;
        let id = free.pop(self);
        self.free = free;
        let Some(id) = id else { return self.grow() };
        self.places[id.0 as usize].head.clear();
        id
    }

    /// Its place is free again.
    pub fn give_back(&mut self, id: PacketId) {
        let mut free = self.free;
        free.push(id, self);
        self.free = free;
    }

    /// Places that there are: the most packets that were under way at once.
    #[must_use]
    pub fn most(&self) -> usize {
        self.places.len()
    }

    /// The packet.
    #[must_use]
    pub fn get(&self, id: PacketId) -> &Packet {
        &self.places[id.0 as usize]
    }

    /// The packet, to change.
    pub fn get_mut(&mut self, id: PacketId) -> &mut Packet {
        &mut self.places[id.0 as usize]
    }

    fn grow(&mut self) -> PacketId {
        let id = PacketId(self.places.len() as u32);
        self.places.push(Packet {
            from: 0,
            to: 0,
            wire_bytes: 0,
            payload_bytes: 0,
            band: 0,
            flow: 0,
            group: 0,
            ecn: Ecn::NotCapable,
            is_background: false,
            head: Vec::new(),
            next: NONE,
            turn: 0,
        });
        id
    }
}

/// Packets one behind the other, joined through their places: first in, first out.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    first: u32,
    last: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { first: NONE, last: NONE }
    }
}

impl List {
    pub(super) fn push(&mut self, id: PacketId, packets: &mut Packets) {
        packets.places[id.0 as usize].next = NONE;
        match self.last {
            NONE => self.first = id.0,
            last => packets.places[last as usize].next = id.0,
        }
        self.last = id.0;
    }

    pub(super) fn pop(&mut self, packets: &Packets) -> Option<PacketId> {
        if self.first == NONE {
            return None;
        }
        let id = self.first;
        self.first = packets.places[id as usize].next;
        if self.first == NONE {
            self.last = NONE;
        }
        Some(PacketId(id))
    }

    /// The packets in it, first to last.
    pub(super) fn iter<'a>(&self, packets: &'a Packets) -> impl Iterator<Item = &'a Packet> {
        let mut at = self.first;
        std::iter::from_fn(move || {
            let packet = packets.places.get(at as usize)?;
            at = packet.next;
            Some(packet)
        })
    }
}

/// No packet.
const NONE: u32 = u32::MAX;
