//! Which rank sends what to whom, and how what arrived is reduced. Sans-IO, like the core below it.
//!
//! A [`Group`] is one rank of one process group: a connection to each peer and the collectives in flight. The
//! engine drives it with real datagrams and the simulator with virtual ones; neither sees a transfer.

// Kernels read a caller's tensors as they read a peer's packets: elsewhere sums would be wrong, and nothing would say so.
#[cfg(not(target_endian = "little"))]
compile_error!("gradwire runs on little-endian processors only (README, \"Limits\")");

mod adaptive;
mod agreement;
mod call;
mod division;
mod dtype;
mod error;
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod halves;
mod host;
mod kernels;
mod layout;
mod links;
mod memory;
mod op;
mod ops;
mod peer;
mod policy;
mod position;
mod preset;
mod report;
mod request;
mod rotation;
mod schedules;
mod servers;
mod settings;
mod straggler;
mod tags;
mod validate;
mod verdict;
mod view;

pub use agreement::{AgreedNetwork, ExchangePlan};
pub use dtype::{Dtype, ReduceOp};
pub use error::{first_named, Mismatch, OpError, Position};
pub use gradwire_core as core;
pub use group::{Group, GroupConfig, GroupEvent, PeerConfig, TransmitSink};
pub use host::Host;
pub use kernels::{Hadamard, WholeHadamard};
pub use links::{LinkShares, MEASURED_RATE_MAX};
pub use policy::{DeadlineRule, DivideBy, EarlyRule, Fill, GatherRule, Policy, Rotation, SoftRule};
pub use preset::Preset;
pub use report::{Contributions, DeliveryReport, PeerDelivery, PeerTaking};
pub use request::{Algorithm, Collective, OpId, PartOf, Request};
pub use servers::Servers;
pub use straggler::{stragglers_of, PeerWait, Straggler, StragglerCause, Waiting};
pub use tags::{layer_class, Bucket, Given, ImportanceRule, Magnitude, Marks, PartOfBucket, Tags};
pub use verdict::Verdict;
pub use view::View;
