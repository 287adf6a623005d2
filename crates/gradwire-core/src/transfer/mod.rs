//! One shard to one peer: the sending half, the receiving half, and what they share.

#[cfg(test)]
mod assembler_tests;
mod bitmap;
mod closed;
mod early;
mod grid;
mod order;
mod receive;
mod reception;
mod runs;
mod send;

pub(crate) use bitmap::Bitmap;
pub(crate) use closed::{Closed, ClosedTransfers};
pub(crate) use early::{called_at, EarlyBuffer, EarlyChunk, Stored};
pub(crate) use grid::{byte_ranges, Grid};
pub(crate) use order::Order;
pub(crate) use receive::ReceiveHalf;
pub(crate) use reception::ReceptionRate;
pub use reception::PACKETS_MEASURED;
pub(crate) use send::{SendHalf, StatusEffect, Waiting, ALL_CHUNKS};
