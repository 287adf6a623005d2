//! What this build is called, for ranks and people who tell builds apart.

/// A digest of the sources (`build.rs`), eight hexadecimal digits: two builds of one version that differ in the code that
/// ranks talk by have others. Dependencies and what is in Python are not in it.
pub const BUILD: &str = env!("GRADWIRE_BUILD");

/// What must be the same on all ranks: the version alone says little where everybody builds for himself.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (build ", env!("GRADWIRE_BUILD"), ")");
