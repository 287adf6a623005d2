//! One rank of a group, with its connections to all others, as a machine without IO behind a C interface.
//!
//! What a simulator in another language needs to run the product's own protocol: `bench/ns3` links it. The header is
//! `include/gradwire.h`, with the codes and what a caller has to know of calls and events; what each function promises and asks for
//! is said here, at its source. `tests/header.rs` compares the two. Time is the caller's, in nanoseconds, and never goes back. No
//! function may be called while another one works with the same rank, also not from the functions that a caller hands in.
//!
//! Every pointer is checked for null and every number for its range; that a pointer which is not null points to what it should is
//! the caller's promise, and all unsafe code of this crate rests on it. A broken assertion ends the process: nothing unwinds into C.

mod config;
mod datagram;
mod rank;

pub use config::{gradwire_config_default, GradwireConfig};
pub use datagram::{gradwire_describe, GradwireDatagram};
pub use rank::{
    gradwire_all_reduce, gradwire_handle_datagram, gradwire_handle_timeout, gradwire_poll_event,
    gradwire_poll_timeout, gradwire_poll_transmit, gradwire_rank_free, gradwire_rank_new, GradwireEvent,
    GradwireRank, GradwireSink,
};

/// It was done.
pub const GRADWIRE_OK: i32 = 0;
/// There was none.
pub const GRADWIRE_NONE: i32 = 1;
/// A pointer is null.
pub const GRADWIRE_NULL: i32 = -1;
/// A value is out of its range. Nothing was changed.
pub const GRADWIRE_INVALID: i32 = -2;

/// Of an event: connected to all others.
pub const GRADWIRE_CONNECTED: u32 = 1;
/// Of an event: a call is done.
pub const GRADWIRE_DONE: u32 = 2;
/// Of an event: a call failed.
pub const GRADWIRE_FAILED: u32 = 3;
/// Of an event: the group failed, and with it every call.
pub const GRADWIRE_GROUP_FAILED: u32 = 4;
/// Of an event: a server has ended its part of a call.
pub const GRADWIRE_SERVED: u32 = 5;

/// Number of this interface: a larger one where a structure, a function or a code is another.
pub const GRADWIRE_INTERFACE: u32 = 1;

/// The number of the interface that this library was built with: to be compared with the header's.
#[no_mangle]
pub extern "C" fn gradwire_interface() -> u32 {
    GRADWIRE_INTERFACE
}
