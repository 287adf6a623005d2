//! The tests of whole groups over simulated networks as one program: what they have in common is compiled once. `allocation` counts what
//! its process allocates, and is a program of its own.

mod collectives;
mod common;
mod contributions;
mod corpus;
mod exact;
mod failures;
mod gathered;
mod learned;
mod pieces;
mod presets;
#[path = "../../../fuzz/replay.rs"]
mod replay;
mod reports;
mod rotated;
mod scattered;
mod servers;
mod tolerant;
