//! The transport between two ranks, without sockets, clocks, threads or allocation per packet.
//!
//! A [`Connection`] is all state that two ranks of a process group share. It is driven by datagrams and
//! `now`, and gives back datagrams, the time of its next wake-up, and [`Event`]s. The same code runs over
//! UDP sockets (`gradwire-engine`) and in virtual time (`gradwire-sim`).
//!
//! The drain contract: after every call that hands something in (`send`, `receive`, `handle_*`), place what
//! [`Connection::poll_payload`], `handle_datagram` or `handle_run` returned, then drain [`Connection::poll_event`] and
//! [`Connection::poll_transmit`], then sleep until [`Connection::poll_timeout`].
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod arrivals;
mod astray;
mod config;
mod connection;
mod contract;
mod copies;
mod datagrams;
mod drought;
mod error;
mod event;
#[doc(hidden)]
pub mod fuzzing;
mod hold;
mod late_arrivals;
mod mark;
mod message;
mod path;
mod path_health;
mod paths;
pub mod recovery;
mod spray;
mod stats;
mod time;
mod transfer;
mod transit;

pub use config::{ConnectionConfig, HelloWords, CHUNKS_MAX};
pub use connection::{Attempt, Connection, TransmitRun};
pub use contract::{CloseReason, Contract, Early, Progress, Soft, Verdict};
pub use datagrams::{Datagrams, Payloads};
pub use error::{DropReason, TransferError};
pub use event::{
    Body, Event, Payload, Receipt, ReceiveTransfer, Reliability, SendReceipt, SendTransfer, Transmit,
};
pub use gradwire_wire as wire;
pub use gradwire_wire::{ConnectionId, Descriptor, Flags, Header, Kind, PathId, TransferId};
pub use mark::{ChunkSet, Ecn, Mark, ReceivedMark, TagStats, TrafficClass, TransferTags, CLASSES_MAX};
pub use message::{message_packets, MESSAGE_BYTES_MAX, MESSAGE_DATAGRAMS_MAX};
pub use spray::{Spray, PATHS_MAX};
pub use stats::{ConnectionStats, PathStats, RoundTrips};
pub use time::{Timeout, TimeoutReason, Timestamp};
pub use transfer::PACKETS_MEASURED;
