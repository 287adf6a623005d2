//! Deliberate damage: the proof that the checkers can fail.

use crate::rank::{OpRun, Packet, Rank, RESIDUAL_FILL};
use crate::scenario::Sabotage;
use gradwire_collectives::{Collective, Dtype, Policy, ReduceOp, Request, View};
use gradwire_core::wire::{HEADER_BYTES, OPENING_BYTES};
use gradwire_core::Timestamp;
use std::time::Duration;

/// Does one kind of damage once, at the first opportunity.
#[derive(Debug)]
pub(crate) struct Saboteur {
    kind: Sabotage,
    struck: bool,
    /// The payload that the swap puts in place of the next one.
    previous: Option<(u32, Vec<u8>)>,
}

impl Saboteur {
    pub(crate) const fn new(kind: Sabotage) -> Self {
        Self { kind, struck: false, previous: None }
    }

    pub(crate) const fn has_struck(&self) -> bool {
        self.struck
    }

    /// Alters a datagram between the network and the rank.
    pub(crate) fn on_delivery(&mut self, packet: &mut Packet) {
        let Some(provenance) = packet.provenance.clone().filter(|_| !self.struck) else { return };
        let payload_start = packet.bytes.len().saturating_sub(PAYLOAD_TAIL);
        match self.kind {
            Sabotage::FlipPayloadBit if payload_start >= HEADER_BYTES => {
                // A high bit of the last element's mantissa or exponent: it survives every rounding.
                let high = packet.bytes.len() - 2;
                packet.bytes[high] ^= 0x40;
                self.struck = true;
            }
            Sabotage::SwapPayload => self.swap(packet, provenance.transfer),
            _ => {}
        }
    }

    /// Puts the end of the same transfer's previous packet in place of this one's; headers and openings stay.
    fn swap(&mut self, packet: &mut Packet, transfer: u32) {
        let at = packet.bytes.len().saturating_sub(SWAPPED_TAIL).max(HEADER_BYTES + OPENING_BYTES);
        let Some(tail) = packet.bytes.get_mut(at..) else { return };
        let own = tail.to_vec();
        if let Some((same, other)) = &self.previous {
            if *same == transfer && other.len() == own.len() && *other != own {
                tail.copy_from_slice(other);
                self.struck = true;
            }
        }
        self.previous = Some((transfer, own));
    }

    /// Alters what a rank got back.
    pub(crate) fn on_finished(&mut self, run: Option<&mut OpRun>) {
        let Some(finished) = run.and_then(|run| run.finished.as_mut()).filter(|_| !self.struck) else {
            return;
        };
        match self.kind {
            Sabotage::ForgetResidual => {
                self.struck = finished.residual.iter().any(|byte| *byte != RESIDUAL_FILL);
                finished.residual.fill(RESIDUAL_FILL);
            }
            Sabotage::DivergeReplica => {
                if let Some(byte) = finished.output.last_mut() {
                    *byte ^= 1;
                    self.struck = true;
                }
            }
            _ => {}
        }
    }

    /// Everything is done, and nobody has a reason to send anything.
    pub(crate) fn on_silence(&mut self, ranks: &mut [Rank], now: Timestamp) {
        if self.kind != Sabotage::Chatter {
            return;
        }
        // A barrier that only one rank calls: it is offered again and again.
        for rank in ranks.iter_mut().filter(|rank| rank.is_running()).take(1) {
            let local = rank.clock.local(now);
            rank.group.submit(local, barrier());
            self.struck = true;
        }
    }

    /// On every rank: the others' probes would carry one along.
    pub(crate) fn stops_timers(&mut self) -> bool {
        let stops = self.kind == Sabotage::StopTimers;
        self.struck |= stops;
        stops
    }
}

fn barrier() -> Request {
    Request {
        collective: Collective::Barrier,
        dtype: Dtype::Bytes,
        reduce: ReduceOp::Sum,
        input: View::EMPTY,
        output: View::EMPTY,
        policy: Policy::RELIABLE,
        residual: View::EMPTY,
        timeout: Duration::from_secs(3600),
        priority: 0,
    }
}

/// Bytes at the end of a datagram that must belong to the payload for a flip to be one of data.
const PAYLOAD_TAIL: usize = 8;
/// Enough elements that two packets' ends differ.
const SWAPPED_TAIL: usize = 512;
