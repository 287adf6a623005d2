//! From the connection id of a datagram to its group and peer: one bounds check and one comparison.

use gradwire_core::wire::HEADER_BYTES;
use gradwire_core::ConnectionId;

/// Low bits of a connection id: the place in the table. The rest is random, so that a late packet of an earlier group, or
/// of an earlier process on the same port, finds nobody.
const SLOT_BITS: u32 = 16;
pub(crate) const SLOTS_MAX: usize = 1 << SLOT_BITS;

/// Gives out connection ids.
#[derive(Debug, Default)]
pub(crate) struct ConnectionIds {
    in_use: Vec<bool>,
    /// So many of these are.
    held: usize,
    next: usize,
    random: u64,
}

impl ConnectionIds {
    /// A free id; `None` when all 65,536 places are taken.
    pub(crate) fn draw(&mut self) -> Option<ConnectionId> {
        let slots = self.in_use.len();
        // Places are used in turn, so that a freed one rests for as long as possible. Where none is free nobody looks for one: a large group
        // would look at all before it for each of its ranks.
        let mut turns = (0..slots).map(|i| (self.next + i) % slots);
        let free = if self.held < slots { turns.find(|slot| !self.in_use[*slot]) } else { None };
        let slot = match free {
            Some(slot) => slot,
            None if slots < SLOTS_MAX => {
                self.in_use.push(false);
                slots
            }
            None => return None,
        };
        self.in_use[slot] = true;
        self.held += 1;
        self.next = slot + 1;
        // Never nought: datagrams of zeros are nobody's, and in a record 0 is no id.
        let high = (self.next_random() % 255) as u32 + 1;
        ConnectionId::new(high << SLOT_BITS | slot as u32)
    }

    /// Gives an id back.
    pub(crate) fn release(&mut self, id: ConnectionId) {
        if let Some(in_use) = self.in_use.get_mut(slot_of(id)) {
            self.held -= usize::from(*in_use);
            *in_use = false;
        }
    }

    /// How many are given out.
    pub(crate) fn held(&self) -> usize {
        self.held
    }

    fn next_random(&mut self) -> u64 {
        if self.random == 0 {
            self.random = seed() | 1;
        }
        // xorshift64: ids need to differ between runs, not to be secret.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 24
    }
}

fn seed() -> u64 {
    let mut bytes = [0_u8; 8];
    // SAFETY: eight live bytes; on failure they stay zero and the clock below still differs.
    unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    let time = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_nanos());
    u64::from_ne_bytes(bytes) ^ time as u64 ^ u64::from(std::process::id()) << 32
}

fn slot_of(id: ConnectionId) -> usize {
    (id.value() as usize) & (SLOTS_MAX - 1)
}

/// Where a datagram belongs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    /// The whole id.
    pub(crate) id: ConnectionId,
    /// Place of the group in the driver.
    pub(crate) group: u32,
    /// Rank of the peer.
    pub(crate) peer: u32,
}

/// The table.
#[derive(Debug, Default)]
pub(crate) struct Routes(Vec<Option<Route>>);

impl Routes {
    /// Adds a route, in place of an older one.
    pub(crate) fn insert(&mut self, route: Route) {
        let slot = slot_of(route.id);
        if self.0.len() <= slot {
            self.0.resize(slot + 1, None);
        }
        self.0[slot] = Some(route);
    }

    /// Removes a route.
    pub(crate) fn remove(&mut self, id: ConnectionId) {
        if let Some(entry) = self.0.get_mut(slot_of(id)) {
            *entry = entry.filter(|route| route.id != id);
        }
    }

    /// The route of a datagram, by the id at bytes 4 to 6 of its header.
    pub(crate) fn find(&self, datagram: &[u8]) -> Option<Route> {
        if datagram.len() < HEADER_BYTES {
            return None;
        }
        let id = u32::from_le_bytes([datagram[4], datagram[5], datagram[6], 0]);
        let route = (*self.0.get(id as usize & (SLOTS_MAX - 1))?)?;
        (route.id.value() == id).then_some(route)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::{Header, Kind};
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    #[test]
    fn a_datagram_finds_its_group_by_its_header_and_nobody_elses() {
        let mut ids = ConnectionIds::default();
        let mut routes = Routes::default();
        let drawn: Vec<ConnectionId> = (0..5).map(|_| ids.draw().unwrap()).collect();
        for (peer, id) in drawn.iter().enumerate() {
            routes.insert(Route { id: *id, group: 3, peer: peer as u32 });
        }
        let datagram = Header::control(Kind::Ping, drawn[4]).encode();
        assert_eq!(routes.find(&datagram), Some(Route { id: drawn[4], group: 3, peer: 4 }));
        assert_eq!(routes.find(&datagram[..23]), None);
        let other = ConnectionId::new(drawn[4].value() ^ 1 << SLOT_BITS).unwrap();
        assert_eq!(routes.find(&Header::control(Kind::Ping, other).encode()), None);
        routes.remove(drawn[4]);
        assert_eq!(routes.find(&datagram), None);
    }

    proptest! {
        #[test]
        fn whatever_comes_finds_only_a_route_that_was_added_under_the_id_it_names(
            ids in prop::collection::vec(0..=ConnectionId::MAX, 0..20),
            mut datagram in prop::collection::vec(any::<u8>(), 0..40),
            (names, flip) in (any::<prop::sample::Index>(), 0..48_u32),
        ) {
            let mut routes = Routes::default();
            let mut added = BTreeMap::new();
            for (peer, id) in (0..).zip(&ids) {
                let route = Route { id: ConnectionId::new(*id).unwrap(), group: 1, peer };
                routes.insert(route);
                // Two ids that share a place: the later one has it.
                added.retain(|other, _| slot_of(*other) != slot_of(route.id));
                added.insert(route.id, route);
            }
            // Bytes by chance hardly ever name an id that exists, or one that differs in a bit.
            if let (false, Some(place)) = (ids.is_empty(), datagram.get_mut(4..7)) {
                let id = ids[names.index(ids.len())] ^ 1_u32.checked_shl(flip).unwrap_or(0) & ConnectionId::MAX;
                place.copy_from_slice(&id.to_le_bytes()[..3]);
            }
            let named = datagram.get(4..7).map(|id| u32::from_le_bytes([id[0], id[1], id[2], 0]));
            let named = named.filter(|_| datagram.len() >= HEADER_BYTES).and_then(ConnectionId::new);
            prop_assert_eq!(routes.find(&datagram), named.and_then(|id| added.get(&id).copied()));
        }
    }

    #[test]
    fn a_freed_place_is_used_again_with_another_id() {
        let mut ids = ConnectionIds::default();
        let first = ids.draw().unwrap();
        ids.release(first);
        let again: Vec<ConnectionId> = (0..4)
            .map(|_| {
                let id = ids.draw().unwrap();
                ids.release(id);
                id
            })
            .collect();
        assert!(again.iter().all(|id| slot_of(*id) == slot_of(first)));
        assert!(again.iter().any(|id| *id != first), "the random part never changes");
    }

    #[test]
    fn no_id_is_nought() {
        for _ in 0..10_000 {
            let id = ConnectionIds::default().draw().expect("all are free");
            assert!(id.value() > 0 && slot_of(id) == 0, "{id:?}");
        }
    }

    #[test]
    fn ids_run_out_without_a_panic() {
        let mut ids = ConnectionIds::default();
        let drawn: Vec<ConnectionId> = std::iter::from_fn(|| ids.draw()).collect();
        assert_eq!((drawn.len(), ids.held()), (SLOTS_MAX, SLOTS_MAX));
        ids.release(drawn[7]);
        ids.release(drawn[7]);
        assert_eq!(ids.held(), SLOTS_MAX - 1, "given back once");
        assert_eq!(ids.draw().map(slot_of), Some(7));
        assert_eq!(ids.draw(), None);
    }
}
