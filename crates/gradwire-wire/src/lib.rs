//! Bytes to typed packets and back.
//!
//! The lowest layer of gradwire: every datagram is a fixed little-endian [`Header`] of 24 bytes and a
//! body whose layout depends on [`Kind`]. Nothing here allocates, panics, or knows what a transfer is.
//! Layouts are specified in `docs/protocol.md`; a parser either returns a checked value or a
//! [`DecodeError`], and never trusts a length or count that it read from the wire.
#![no_std]
#![forbid(unsafe_code)]

#[cfg(test)]
extern crate std;

mod codec;
mod control;
#[doc(hidden)]
pub mod fuzzing;
mod header;
mod ids;

pub use codec::{DecodeError, Reader, Writer};
pub use control::{
    AckBody, AckPath, Descriptor, HelloBody, Opening, StatusBody, TransferState, ABORT_RECORD_BYTES,
    ACK_WORDS_MAX, POSITION_RECORD_BYTES, STATUS_FIXED_BYTES, STATUS_WORDS_MAX,
};
pub use header::{Flags, Header, Kind, HEADER_BYTES, VERSION};
pub use ids::{ConnectionId, PacketNumber, PathId, TransferId};

/// Bytes of the descriptor prefix that opening data packets and probes carry.
pub const OPENING_BYTES: usize = 24;

/// Bytes kept free in every datagram for an authentication tag, so that switching security on does not
/// change the packet grid.
pub const TAG_BYTES: usize = 16;

/// Payload bytes of one data packet for a UDP payload of `datagram_bytes`.
///
/// A multiple of 64, so that no element of any dtype is ever split between packets (LTP section III-C) and
/// kernels see whole cache lines. Both ranks compute the grid from the agreed datagram size. Zero when the
/// datagram is too small for any payload.
// claim: ltp/padding-bubble
#[must_use]
pub const fn chunk_bytes_for(datagram_bytes: usize) -> usize {
    let room = datagram_bytes.saturating_sub(HEADER_BYTES + OPENING_BYTES + TAG_BYTES);
    room / 64 * 64
}
