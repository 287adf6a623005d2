//! The other driver of the protocol: real groups in virtual time over a modelled network, from one seed.
mod network;
mod queue;
mod rng;
pub use network::*;
pub use queue::EventQueue;
pub use rng::{mix, Rng};
