//! Why a datagram was dropped, and why a transfer was refused.

use gradwire_wire::{DecodeError, TransferId};
use thiserror::Error;

/// Why no payload was taken from a datagram; that its sender lives, what it says of its path, and that it wants an answer may
/// count all the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum DropReason {
    /// Not a packet of this protocol.
    #[error("malformed: {0}")]
    Malformed(#[from] DecodeError),
    /// Carries another connection's id.
    #[error("for another connection")]
    WrongConnection,
    /// These bytes were counted before.
    #[error("duplicate")]
    Duplicate,
    /// Belongs to a transfer that is over.
    #[error("late")]
    Late,
    /// Offset or length off the agreed packet grid.
    #[error("off the packet grid")]
    Grid,
    /// The early-data buffer is full.
    #[error("early data buffer full")]
    EarlyFull,
    /// A time stamp, packet number or count that cannot be.
    #[error("implausible field")]
    Implausible,
    /// The connection has failed or the peer has left.
    #[error("connection closed")]
    Closed,
}

/// Why `send` or `receive` was refused. A bug of the caller: nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The id is in use in this direction.
    #[error("transfer {0:?} exists already")]
    Exists(TransferId),
    /// More bytes than a transfer can have.
    #[error("transfer of {0} bytes is larger than one transfer may be")]
    TooLarge(u64),
    /// The connection has failed or the peer has left.
    #[error("connection closed")]
    Closed,
}
