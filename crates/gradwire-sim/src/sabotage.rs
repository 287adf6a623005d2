//! Deliberate damage: the proof that the checkers can fail.

use crate::rank::{Finished, OpRun, Packet, Rank, RESIDUAL_FILL};
use gradwire_collectives::{Collective, Dtype, Policy, Request};
use gradwire_core::wire::{
    Flags, Header, Kind, Reader, StatusBody, TransferState, HEADER_BYTES, OPENING_BYTES,
};
use gradwire_core::{Spray, Timestamp};
use std::collections::BTreeMap;
use std::time::Duration;

/// Deliberate damage. The canary tests prove that each kind is found, by the checker that is meant to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sabotage {
    /// None.
    #[default]
    Nothing,
    /// One bit of one payload flips past every check.
    FlipPayloadBit,
    /// One packet's payload is swapped for that of the same transfer's previous packet.
    SwapPayload,
    /// Every rank has the same wrong sum.
    WrongSum,
    /// One rank's residual of uncounted values is wiped.
    ForgetResidual,
    /// One rank is told twice of the same uncounted values.
    ReportTwice,
    /// One rank's result differs from the others' in its last element.
    DivergeReplica,
    /// No timer ever fires.
    StopTimers,
    /// Timers fire when they like.
    LazyTimers,
    /// Nobody hears from rank 0 that a transfer is over.
    SwallowClosing,
    /// A rank goes on talking when all is done.
    Chatter,
    /// Transfers are cut while they flow (promise 1).
    CutEarly,
    /// Transfers wait for everything (promise 2).
    WaitForAll,
    /// Exact collectives are treated as tolerant (promise 6).
    TolerateExact,
    /// Gray paths keep their share.
    KeepGrayPaths,
    /// No copy gets through, so that no path is found to have healed.
    SwallowCopies,
    /// A rank tells a shorter deadline than it keeps (promise 2).
    OutstayDeadline,
    /// What is lost of a result goes out again only after the time that a kernel would take (promise 3).
    RepairLikeKernel,
}

impl Sabotage {
    /// What ranks ask for instead of the plan's policy.
    pub(crate) fn policy(self, policy: Policy) -> Policy {
        match self {
            Self::CutEarly => Policy { after_first_pass: false, ..policy },
            Self::WaitForAll => Policy::RELIABLE,
            Self::TolerateExact => Policy::AUTO,
            _ => policy,
        }
    }
}

impl Sabotage {
    /// How ranks spread their packets instead.
    pub(crate) fn spray(self, spray: Spray) -> Spray {
        if self == Self::KeepGrayPaths {
            Spray::Random
        } else {
            spray
        }
    }
}

/// Does one kind of damage once, at the first opportunity.
#[derive(Debug)]
pub(crate) struct Saboteur {
    kind: Sabotage,
    struck: bool,
    /// The payload that the swap puts in place of the next one.
    previous: Option<(u32, Vec<u8>)>,
    /// When each repair wanted to leave first.
    held_back: BTreeMap<(u32, u32), Timestamp>,
}

impl Saboteur {
    pub(crate) const fn new(kind: Sabotage) -> Self {
        // These strike with every call, see `Sabotage::policy`.
        let struck = matches!(
            kind,
            Sabotage::CutEarly | Sabotage::WaitForAll | Sabotage::TolerateExact | Sabotage::KeepGrayPaths
        );
        Self { kind, struck, previous: None, held_back: BTreeMap::new() }
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
    pub(crate) fn on_finished(&mut self, op: usize, run: Option<&mut OpRun>) {
        let Some(finished) = run.and_then(|run| run.finished.as_mut()) else { return };
        if self.kind == Sabotage::WrongSum && op == 0 {
            // The sign of the first element, on every rank.
            finished.output[3] ^= 0x80;
            self.struck = true;
        }
        if !self.struck || self.kind == Sabotage::OutstayDeadline {
            self.alter(finished);
        }
    }

    fn alter(&mut self, finished: &mut Finished) {
        match (self.kind, &mut finished.outcome) {
            (Sabotage::ForgetResidual, _) => {
                self.struck = finished.residual.iter().any(|byte| *byte != RESIDUAL_FILL);
                finished.residual.fill(RESIDUAL_FILL);
            }
            (Sabotage::ReportTwice, Ok(report)) => {
                let again = report.uncounted.first().cloned();
                self.struck = again.is_some();
                report.uncounted.extend(again);
            }
            (Sabotage::OutstayDeadline, Ok(report)) => {
                for peer in report.peers.iter_mut().filter(|peer| peer.deadline.is_some()) {
                    peer.deadline = Some(Duration::ZERO);
                    self.struck = true;
                }
            }
            (Sabotage::DivergeReplica, _) => {
                if let Some(byte) = finished.output.last_mut() {
                    *byte ^= 1;
                    self.struck = true;
                }
            }
            _ => {}
        }
    }

    /// Whether a datagram is lost by design.
    pub(crate) fn swallows(&mut self, from: usize, bytes: &[u8]) -> bool {
        let swallowing = matches!(self.kind, Sabotage::SwallowClosing | Sabotage::SwallowCopies);
        if !swallowing || from != 0 {
            return false;
        }
        let Ok((header, body)) = Header::decode(bytes) else { return false };
        if self.kind == Sabotage::SwallowCopies {
            let copy = Flags::RETRANSMITTED.with(Flags::ACK_NOW);
            let is_copy = header.kind == Kind::Data && header.flags.contains(copy);
            self.struck |= is_copy;
            return is_copy;
        }
        let is_closing = header.kind == Kind::Status
            && StatusBody::decode(&mut Reader::new(body))
                .is_ok_and(|status| status.state == TransferState::Closed);
        self.struck |= is_closing;
        is_closing
    }

    /// Whether a rank keeps a datagram to itself, for now.
    pub(crate) fn delays(&mut self, now: Timestamp, bytes: &[u8]) -> bool {
        if self.kind != Sabotage::RepairLikeKernel {
            return false;
        }
        let Ok((header, _)) = Header::decode(bytes) else { return false };
        let is_repair = header.kind == Kind::Data && header.flags.contains(Flags::RETRANSMITTED);
        if !is_repair || header.transfer.index() != 1 {
            return false;
        }
        self.struck = true;
        let wanted_at = *self.held_back.entry((header.transfer.0, header.offset)).or_insert(now);
        now.since(wanted_at) < KERNEL_TIMEOUT
    }

    /// By how much timers are late on top of what the scenario allows.
    pub(crate) fn laziness(&mut self) -> Duration {
        if self.kind != Sabotage::LazyTimers {
            return Duration::ZERO;
        }
        self.struck = true;
        Duration::from_millis(20)
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
        // Not `struck |= stops`: rustc 1.95 (x86-64, opt-level 2, not incremental) makes that `struck = true` where this is inlined.
        if self.kind != Sabotage::StopTimers {
            return false;
        }
        self.struck = true;
        true
    }
}

fn barrier() -> Request {
    Request::exact(Collective::Barrier, Dtype::Bytes, Duration::from_secs(3600))
}

/// Bytes at the end of a datagram that must belong to the payload for a flip to be one of data.
const PAYLOAD_TAIL: usize = 8;
/// The least retransmission timeout of Linux.
const KERNEL_TIMEOUT: Duration = Duration::from_millis(200);
/// Enough elements that two packets' ends differ.
const SWAPPED_TAIL: usize = 512;
