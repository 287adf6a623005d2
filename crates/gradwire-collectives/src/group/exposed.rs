//! What is exposed to loss: asked for by fault injection, which may cut off only what a contract can do without, and by checkers.

use super::{drive, Group};
use crate::call::Call;
use crate::OpId;
use gradwire_core::wire::{Header, Opening, TransferId};

impl Group {
    /// Bytes of the transfer from `peer` that a data packet belongs to, if that may lose something. A transfer that is not
    /// posted here yet is known by its `opening` alone: then that of a reduce stage whose call has a policy.
    pub fn lossy_bytes(&mut self, peer: u32, header: &Header, opening: Option<&Opening>) -> Option<u64> {
        let transfer = header.transfer;
        if transfer.is_point_to_point() {
            return None;
        }
        let serves = self.slot_of(peer).is_some_and(|slot| self.peers[slot].serves);
        let key = drive::key_of(&self.ops, (&[], serves), transfer);
        let op = key.and_then(|key| self.ops.at(key));
        if let Some(known) = op.and_then(|op| op.lossy_receive(peer, transfer)) {
            return known;
        }
        let opening = opening?;
        let call = Call::decode(&opening.descriptor)?;
        call.may_lose(transfer.index(), self.world_size).then_some(opening.total_bytes)
    }

    /// The call that a transfer to `peer` belongs to, for checkers: it may have ended, and be sent from a copy. `None`: the
    /// group's own.
    #[doc(hidden)]
    pub fn call_of(&mut self, peer: u32, transfer: TransferId) -> Option<OpId> {
        let peer = &self.peers[self.slot_of(peer)?];
        let key = drive::key_of(&self.ops, (&peer.traffic.sending, peer.serves), transfer)?;
        self.ops.at(key).filter(|op| !op.is_internal).map(|op| op.id)
    }
}
