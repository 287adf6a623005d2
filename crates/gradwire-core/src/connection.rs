//! The state that two ranks share, as one machine without IO.

use crate::{
    ConnectionConfig, ConnectionStats, DropReason, Event, Payload, ReceiveTransfer, SendTransfer, Timeout,
    Timestamp, TransferError, Transmit,
};
use gradwire_wire::{TransferId, ABORT_RECORD_BYTES, POSITION_RECORD_BYTES};

/// All state that two ranks of a process group share. See the crate's documentation for the drain contract.
#[derive(Debug)]
pub struct Connection;

impl Connection {
    /// Starts to connect: the first [`Connection::poll_transmit`] gives a hello. Transfers may be posted at once.
    #[must_use]
    pub fn new(_config: ConnectionConfig, _now: Timestamp) -> Self {
        todo!()
    }

    /// Posts a sending half. The bytes are asked for by [`crate::Body::Payload`] until [`Event::Sent`].
    ///
    /// # Errors
    /// [`TransferError`]; nothing was changed.
    pub fn send(&mut self, _now: Timestamp, _request: SendTransfer) -> Result<(), TransferError> {
        todo!()
    }

    /// Posts a receiving half. Data that came early is handed out by [`Connection::poll_payload`].
    ///
    /// # Errors
    /// [`TransferError`]; nothing was changed.
    pub fn receive(&mut self, _now: Timestamp, _request: ReceiveTransfer) -> Result<(), TransferError> {
        todo!()
    }

    /// Early data of the transfers posted since the last call; call until `None` after each `receive`.
    pub fn poll_payload(&mut self, _now: Timestamp) -> Option<Payload<'_>> {
        todo!()
    }

    /// Everything in the space of `below` that is before it is over for this rank: late packets are dropped,
    /// probes are answered with "closed", buffered early data is freed.
    pub fn retire(&mut self, _below: TransferId) {
        todo!()
    }

    /// What the heartbeats say about where this rank is.
    pub fn set_position(&mut self, _now: Timestamp, _record: [u8; POSITION_RECORD_BYTES]) {
        todo!()
    }

    /// Tells the peer that the group failed, until it confirms or the peer timeout ends; every transfer is dropped.
    pub fn abort(&mut self, _now: Timestamp, _record: [u8; ABORT_RECORD_BYTES]) {
        todo!()
    }

    /// Says goodbye, until the peer confirms or half a second is over. See [`Connection::is_drained`].
    pub fn leave(&mut self, _now: Timestamp) {
        todo!()
    }

    /// Whether nothing more has to be said to the peer (after `leave` or `abort`).
    #[must_use]
    pub fn is_drained(&self) -> bool {
        todo!()
    }

    /// Whether the peer has answered.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        todo!()
    }

    /// Takes one datagram. Returns new payload, if it holds any, for the caller to place.
    ///
    /// # Errors
    /// [`DropReason`]: the datagram changed nothing but a counter.
    pub fn handle_datagram<'d>(
        &mut self,
        _now: Timestamp,
        _datagram: &'d [u8],
    ) -> Result<Option<Payload<'d>>, DropReason> {
        todo!()
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, _now: Timestamp) {
        todo!()
    }

    /// When `handle_timeout` (or, for [`crate::TimeoutReason::Pacing`], `poll_transmit`) is due.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timeout> {
        todo!()
    }

    /// The next datagram that may leave now; `scratch` has at least the configured datagram size.
    pub fn poll_transmit(&mut self, _now: Timestamp, _scratch: &mut [u8]) -> Option<Transmit> {
        todo!()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Event> {
        todo!()
    }

    /// Counters and estimates.
    #[must_use]
    pub fn stats(&self) -> ConnectionStats {
        todo!()
    }
}
