//! The collectives in flight, found by the number in a transfer's id.

use crate::op::Op;

/// Collectives in flight at once; later ones wait in a queue. A DDP step has a few buckets in flight, an optimizer
/// that reduces each parameter has more; each costs the peers a little eager memory.
pub(crate) const IN_FLIGHT_MAX: usize = 64;

/// Where an operation is kept until it ends.
pub(crate) type Key = usize;

/// Collectives by sequence number, and point-to-point transfers behind them.
#[derive(Debug)]
pub(crate) struct Ops {
    slots: Vec<Option<Box<Op>>>,
    /// Where a call of dedicated servers is kept, by its number there modulo the length.
    served: Vec<Key>,
}

impl Ops {
    pub(crate) fn new() -> Self {
        Self { slots: (0..IN_FLIGHT_MAX).map(|_| None).collect(), served: vec![0; IN_FLIGHT_MAX] }
    }

    /// Whether the place of collective `sequence` is free.
    pub(crate) fn has_room(&self, sequence: u64) -> bool {
        self.slots[(sequence % IN_FLIGHT_MAX as u64) as usize].is_none()
    }

    pub(crate) fn insert_collective(&mut self, op: Box<Op>) -> Key {
        let key = (op.sequence() % IN_FLIGHT_MAX as u64) as usize;
        debug_assert!(self.slots[key].is_none(), "the caller has asked for room");
        if let Some(number) = op.served {
            self.served[(number % IN_FLIGHT_MAX as u64) as usize] = key;
        }
        self.slots[key] = Some(op);
        key
    }

    pub(crate) fn insert_point_to_point(&mut self, op: Box<Op>) -> Key {
        let free = self.slots[IN_FLIGHT_MAX..].iter().position(Option::is_none);
        let key = free.map_or(self.slots.len(), |index| IN_FLIGHT_MAX + index);
        if key == self.slots.len() {
            self.slots.push(None);
        }
        self.slots[key] = Some(op);
        key
    }

    /// Where the collective is kept whose number ends in the 16 bits `op`.
    pub(crate) fn key_of(&self, op: u32) -> Option<Key> {
        let key = op as usize % IN_FLIGHT_MAX;
        let found = self.slots[key].as_ref()?;
        (found.sequence() & 0xFFFF == u64::from(op)).then_some(key)
    }

    /// Where the collective is kept whose number at the dedicated servers ends in the 16 bits `number`.
    pub(crate) fn key_of_served(&self, number: u32) -> Option<Key> {
        let key = self.served[number as usize % IN_FLIGHT_MAX];
        let found = self.slots[key].as_ref()?.served?;
        (found & 0xFFFF == u64::from(number)).then_some(key)
    }

    pub(crate) fn at(&mut self, key: Key) -> Option<&mut Op> {
        self.slots.get_mut(key)?.as_deref_mut()
    }

    pub(crate) fn take(&mut self, key: Key) -> Option<Box<Op>> {
        self.slots.get_mut(key)?.take()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Op> {
        self.slots.iter().filter_map(Option::as_deref)
    }

    /// Empties it.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Box<Op>> + '_ {
        self.slots.iter_mut().filter_map(Option::take)
    }
}
