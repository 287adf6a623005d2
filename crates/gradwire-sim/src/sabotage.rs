//! Deliberate damage: the proof that the checkers can fail.

use crate::rank::{OpRun, Packet, RESIDUAL_FILL};
use crate::scenario::Sabotage;
use gradwire_core::wire::HEADER_BYTES;

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
        let Some(provenance) = packet.provenance.as_ref().filter(|_| !self.struck) else { return };
        let payload_start = packet.bytes.len().saturating_sub(PAYLOAD_TAIL);
        match self.kind {
            Sabotage::FlipPayloadBit if payload_start >= HEADER_BYTES => {
                // A high bit of the last element's mantissa or exponent: it survives every rounding.
                let high = packet.bytes.len() - 2;
                packet.bytes[high] ^= 0x40;
                self.struck = true;
            }
            Sabotage::SwapPayload => {
                let transfer = provenance.transfer;
                let body = packet.bytes.split_off(HEADER_BYTES);
                let swapped = match self.previous.take() {
                    Some((same, other)) if same == transfer && other.len() == body.len() && other != body => {
                        self.struck = true;
                        other
                    }
                    _ => {
                        self.previous = Some((transfer, body.clone()));
                        body
                    }
                };
                packet.bytes.extend_from_slice(&swapped);
            }
            _ => {}
        }
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

    pub(crate) fn stops_timers(&mut self, rank: usize) -> bool {
        let stops = self.kind == Sabotage::StopTimers && rank == 0;
        self.struck |= stops;
        stops
    }
}

/// Bytes at the end of a datagram that must belong to the payload for a flip to be one of data.
const PAYLOAD_TAIL: usize = 8;
