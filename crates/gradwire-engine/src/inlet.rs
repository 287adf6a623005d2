//! From what the kernel brought to the group that it is for.

use crate::active::ActiveGroup;
use crate::chaos::{Chaos, Way};
use crate::code_points::CodePoints;
use crate::flood::Traffic;
use crate::groups::Groups;
use crate::routes::{Route, Routes};
use crate::security::Refusal;
use crate::socket::{Datagram, Message, RawAddress};
use gradwire_core::{Datagrams, Timestamp};

/// Datagrams that were opened and not handed over.
#[derive(Clone, Copy)]
struct Opened {
    route: Route,
    /// Bytes at the end of each that are not theirs.
    tail: usize,
    /// Where they begin in the message.
    start: usize,
}

impl Opened {
    /// Whether these can be handed over together with those `before`.
    fn continues(&self, before: &Self) -> bool {
        (self.route, self.tail) == (before.route, before.tail)
    }
}

/// See the module's documentation.
pub(crate) struct Inlet<'a> {
    groups: &'a mut Groups<ActiveGroup>,
    routes: &'a Routes,
    codes: &'a CodePoints,
    /// Datagrams that were taken in runs.
    pub(crate) in_runs: u64,
    /// Datagrams that were nobody's.
    pub(crate) unknown: u64,
    /// That nobody with the keys has made.
    pub(crate) not_authentic: u64,
    /// That had come before.
    pub(crate) replayed: u64,
    /// All of these, since the driver began.
    pub(crate) refused: Traffic,
}

impl<'a> Inlet<'a> {
    /// With nothing counted but what was refused before.
    pub(crate) fn new(
        groups: &'a mut Groups<ActiveGroup>,
        routes: &'a Routes,
        codes: &'a CodePoints,
        refused: Traffic,
    ) -> Self {
        Self { groups, routes, codes, in_runs: 0, unknown: 0, not_authentic: 0, replayed: 0, refused }
    }

    /// Everything that a message brought. Neighbours of one peer are handed over together.
    pub(crate) fn take(&mut self, now: Timestamp, message: Message<'_>) {
        let Message { bytes, stride, from, octet, .. } = message;
        let mut opened: Option<Opened> = None;
        let mut at = 0;
        loop {
            let end = bytes.len().min(at + stride);
            let admitted = self.admit(now, (&mut bytes[at..end], from));
            let next = admitted.map(|(route, own)| Opened { route, tail: end - at - own.len(), start: at });
            let continues = matches!((opened, next), (Some(before), Some(next)) if next.continues(&before));
            if !continues {
                self.hand_over(now, opened, &bytes[..at], stride, (from, octet));
                opened = next;
            }
            at = end;
            // Not before: an empty datagram is one too.
            if at == bytes.len() {
                break;
            }
        }
        self.hand_over(now, opened, bytes, stride, (from, octet));
    }

    /// Hands over what was opened, up to the end of `bytes`.
    fn hand_over(
        &mut self,
        now: Timestamp,
        opened: Option<Opened>,
        bytes: &[u8],
        stride: usize,
        origin: (&RawAddress, u8),
    ) {
        let (codes, Some(Opened { route, tail, start })) = (self.codes, opened) else { return };
        let datagrams = Datagrams::new(&bytes[start..], stride, tail);
        if let Some(group) = self.groups.touch(route.group as usize) {
            let in_runs = group.handle_datagrams(now, route.peer, datagrams, origin, codes);
            self.in_runs += in_runs as u64;
        }
    }

    /// Finds whom a datagram is for, and opens it. Before that nothing depends on what it says: no address, no answer, no
    /// fault that is injected.
    fn admit<'d>(
        &mut self,
        now: Timestamp,
        (datagram, from): (&'d mut [u8], &RawAddress),
    ) -> Option<(Route, &'d mut [u8])> {
        let size = datagram.len();
        let Some((route, group)) = self.find(datagram) else {
            self.unknown += 1;
            self.refused.add(size);
            return None;
        };
        match group.open(now, route.peer, (datagram, from)) {
            Ok(bytes) => return Some((route, bytes)),
            Err(Refusal::NotAuthentic) => self.not_authentic += 1,
            Err(Refusal::Replayed) => self.replayed += 1,
        }
        self.refused.add(size);
        None
    }

    fn deliver(&mut self, now: Timestamp, route: Route, datagram: &Datagram<'_>) {
        let codes = self.codes;
        if let Some(group) = self.groups.touch(route.group as usize) {
            group.handle_datagram(now, route.peer, datagram.bytes, (datagram.from, datagram.octet), codes);
        }
    }

    /// What was admitted, a while ago: its group may be gone.
    pub(crate) fn deliver_held(&mut self, now: Timestamp, datagram: &Datagram<'_>) {
        match self.find(datagram.bytes).map(|(route, _)| route) {
            Some(route) => self.deliver(now, route, datagram),
            None => {
                self.unknown += 1;
                self.refused.add(datagram.bytes.len());
            }
        }
    }

    /// Takes a datagram in and loses it or holds it back; whether it was lost.
    pub(crate) fn endanger(
        &mut self,
        chaos: &mut Chaos,
        now: Timestamp,
        datagram: Datagram<'_>,
        is_damaged: bool,
    ) -> bool {
        let Datagram { bytes, from, octet } = datagram;
        let Some((route, bytes)) = self.admit(now, (bytes, from)) else { return false };
        let is_lost = is_damaged || self.is_lost(chaos, route, bytes);
        if !is_lost {
            chaos.hold(now, &Datagram { bytes, from, octet });
        }
        is_lost
    }

    fn is_lost(&mut self, chaos: &mut Chaos, route: Route, bytes: &[u8]) -> bool {
        let Some(group) = self.group(route) else { return false };
        let way = Way { group: route.group, from: route.peer, to: group.rank() };
        chaos.loses(way, bytes, |header, opening| group.lossy_bytes(route.peer, header, opening))
    }

    fn find(&mut self, bytes: &[u8]) -> Option<(Route, &mut ActiveGroup)> {
        let route = self.routes.find(bytes)?;
        Some((route, self.group(route)?))
    }

    /// What is not for it yet does not touch it: a stranger's datagram has no turn.
    fn group(&mut self, route: Route) -> Option<&mut ActiveGroup> {
        self.groups.at_mut(route.group as usize)
    }
}
