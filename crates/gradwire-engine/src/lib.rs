//! Sockets, time and the network thread: the only crate of gradwire that touches the operating system.
//!
//! An [`Engine`] is one process's UDP port and one thread, with one beside it that sends where cores abound. The thread drives every process group of the process
//! ([`gradwire_collectives::Group`]) with the datagrams that arrive and with the clock, and hands what they want
//! to send to the kernel in batches. It decides nothing about the protocol and never takes Python's lock.
//!
//! The way in: [`Engine::start`], [`Engine::new_group`], exchange of [`PendingGroup::record`]s through any store,
//! [`PendingGroup::join`], [`GroupHandle::submit`], [`OpHandle::wait`].

// Said before the hundreds of errors about system calls that are missing elsewhere.
#[cfg(not(target_os = "linux"))]
compile_error!("gradwire runs on Linux only (README, \"Limits\")");
#[cfg(all(target_os = "linux", not(target_env = "gnu")))]
compile_error!("gradwire runs with glibc only, not with musl, as on Alpine (README, \"Limits\")");
// Control messages are laid out in words of eight bytes.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("gradwire runs on 64-bit processors only (README, \"Limits\")");

mod active;
mod busy_poll;
mod chaos;
mod code_points;
mod config;
mod cores;
mod digest;
mod driver;
mod engine;
mod error;
mod flood;
#[doc(hidden)]
pub mod fuzzing;
mod giving_way;
mod group;
mod groups;
mod handle;
mod here;
mod in_flight;
mod inlet;
mod interfaces;
mod lanes;
mod lineage;
mod news;
mod own_core;
mod pending;
mod place;
mod rendezvous;
mod rounding;
mod routes;
mod security;
mod sending_apart;
mod shared;
mod socket;
mod stats;
mod succession;
mod tally;
mod timeline;
mod version;
mod ways;

/// Numbers and names that the Python package has, too: its tests hold them against these.
pub mod limits {
    pub use crate::engine::{LANE_PORTS_APART, PORT_UNASKED, THREADS_UNASKED_MAX};
    pub use crate::interfaces::BRIDGES;
    pub use crate::pending::{LANE_RANKS_MAX, WORLD_SIZE_MAX};
    pub use crate::place::UNKNOWN_BOOT;
    pub use crate::security::SECRET_BYTES_MIN;
    pub use crate::socket::{RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES};
    pub use gradwire_collectives::MEASURED_RATE_MAX;
}

pub use chaos::ChaosConfig;
pub use config::{Choice, EngineConfig, Offload, OnPeerLoss};
pub use engine::Engine;
pub use error::{EngineError, JoinError, OsError, UnreachablePeer};
pub use gradwire_collectives as collectives;
pub use gradwire_core as core;
pub use gradwire_core::Spray;
pub use group::GroupHandle;
pub use handle::{Completions, OpHandle, Outcome};
pub use pending::{DedicatedServers, PendingGroup};
pub use security::{JobSecret, Security, SECRET_BYTES_MIN};
pub use stats::{
    AgreedStats, CallStats, EndedBy, EngineStats, EpochStats, Features, GroupStats, Histogram, JoinedStats,
    LostStats, PathStats, PeerStats, SecurityStats, ServedStats, ShareHistogram, StageStats, StragglerStats,
    TagCounts, TimeHistogram, WaitingStats, WatchStats,
};
pub use timeline::{CallTimes, Clock, PeerTimes, Timeline};
pub use version::{BUILD, VERSION};
