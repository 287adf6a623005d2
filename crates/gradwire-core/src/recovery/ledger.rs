//! What is in flight: one entry for each packet sent, until it is acknowledged or lost.

use crate::Timestamp;
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, TransferId};

/// One data packet in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SentPacket {
    /// Its number on its path.
    pub number: PacketNumber,
    /// The transfer it belongs to.
    pub transfer: TransferId,
    /// The chunk of that transfer.
    pub chunk: u32,
    /// Payload bytes.
    pub bytes: u32,
    /// When it was sent.
    pub sent_at: Timestamp,
}

/// What an acknowledgement or a timer changed. Reused between calls: no allocation per acknowledgement.
#[derive(Debug, Default)]
pub struct AckOutcome {
    /// Packets that arrived.
    pub acked: Vec<SentPacket>,
    /// Packets that count as lost.
    pub lost: Vec<SentPacket>,
    /// Delivery rate over the newest acknowledged packet's lifetime, bytes per second.
    pub delivery_rate: Option<u64>,
    /// Whether that sample was limited by the application.
    pub app_limited: bool,
    /// Whether a round trip has ended: a packet sent after the last round's end was acknowledged.
    pub round_ended: bool,
}

/// Packets in flight on one path.
#[derive(Debug, Default)]
pub struct Ledger;

impl Ledger {
    /// An empty ledger.
    #[must_use]
    pub fn new() -> Self {
        Self
    }

    /// Number that the next packet must carry.
    #[must_use]
    pub fn next_number(&self) -> PacketNumber {
        todo!()
    }

    /// Records a packet; `packet.number` is [`Ledger::next_number`]. `app_limited`: the sender had nothing
    /// more to send than its window allowed.
    pub fn on_sent(&mut self, _packet: SentPacket, _app_limited: bool) {
        todo!()
    }

    /// Applies an acknowledgement. A packet counts as lost when three packets sent later on this path were
    /// acknowledged (LTP section III-D), or one was and `loss_delay` has passed since it was sent.
    ///
    /// Returns `false` and changes nothing when `ack.largest` was never sent (forged or corrupt).
    pub fn on_ack(
        &mut self,
        _now: Timestamp,
        _ack: &AckPath,
        _loss_delay: Duration,
        _outcome: &mut AckOutcome,
    ) -> bool {
        todo!()
    }

    /// Declares by time what counts as lost now; fills `outcome.lost`.
    pub fn on_timeout(&mut self, _now: Timestamp, _loss_delay: Duration, _outcome: &mut AckOutcome) {
        todo!()
    }

    /// When [`Ledger::on_timeout`] should be called, if a gap is waiting for its time.
    #[must_use]
    pub fn loss_time(&self, _loss_delay: Duration) -> Option<Timestamp> {
        todo!()
    }

    /// Forgets the packets of a transfer that is over (they leave the flight without counting as lost).
    pub fn forget(&mut self, _transfer: TransferId) {
        todo!()
    }

    /// Takes everything sent at or before `sent_before` out of the flight as lost (after a probe's answer).
    pub fn lose_before(&mut self, _sent_before: Timestamp, _outcome: &mut AckOutcome) {
        todo!()
    }

    /// Payload bytes in flight.
    #[must_use]
    pub fn in_flight(&self) -> u64 {
        todo!()
    }

    /// When the oldest packet in flight was sent.
    #[must_use]
    pub fn oldest_sent_at(&self) -> Option<Timestamp> {
        todo!()
    }
}
