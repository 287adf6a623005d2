//! The other driver of the protocol: real groups in virtual time over a modelled network, from one seed.
//!
//! ```text
//! Scenario (seed) -> World { N x Group, Network, EventQueue } -> Summary | Violation
//! ```
//!
//! Nothing here knows how the protocol works; it hands in datagrams and time like `gradwire-engine`, and checks
//! from outside what came out ([`Violation`]). Equal seeds give equal runs, event by event, so a seed and a
//! commit are a complete bug report.

pub mod cluster;
mod conformance;
pub mod fabric;
pub mod measure;
mod memory;
mod network;
mod oracle;
mod pair;
mod path_watch;
mod plan;
mod queue;
mod rank;
mod record;
mod repair_watch;
mod rng;
mod runner;
mod sabotage;
mod scenario;
mod stray;
pub mod topology_error;
mod trace;
mod values;
mod violation;
mod watch;
mod world;

pub use conformance::{parse_list, ListError};
pub use memory::Tensor;
pub use network::{
    Burst, Flight, Impairments, LinkOptions, Network, NetworkOptions, NetworkStats, PathTrouble, Port, Trunk,
};
pub use oracle::expected_output;
pub use pair::run_pair;
pub use plan::{Fault, OpKind, OpPlan, OutputPlan};
pub use queue::EventQueue;
pub use rng::{mix, Rng};
pub use runner::{run, run_each, run_seeds, Failure, Tally};
pub use sabotage::Sabotage;
pub use scenario::{HostOptions, Scenario};
pub use violation::Violation;
pub use world::{Summary, World};
