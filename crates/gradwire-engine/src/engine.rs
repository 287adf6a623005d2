//! One UDP port and one network thread for each process.

use crate::{Completions, EngineConfig, EngineError, EngineStats, Features, PendingGroup};

/// One process's part of all its groups. Clones refer to the same engine; it stops when [`Engine::stop`] is called or
/// the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Engine {}

impl Engine {
    /// Binds the port, probes the kernel's features and starts the network thread.
    ///
    /// # Errors
    /// [`EngineError`]: invalid settings, port in use, no usable interface.
    pub fn start(_config: EngineConfig) -> Result<Self, EngineError> {
        todo!()
    }

    /// Prepares this process's part of a group: connection ids and the record that its peers need.
    ///
    /// # Errors
    /// [`EngineError::RankInvalid`], [`EngineError::Stopped`], [`EngineError::Forked`].
    pub fn new_group(&self, _rank: u32, _world_size: u32, _name: &str) -> Result<PendingGroup, EngineError> {
        todo!()
    }

    /// The queue of ended operations.
    #[must_use]
    pub fn completions(&self) -> Completions {
        todo!()
    }

    /// The bound port.
    #[must_use]
    pub fn local_port(&self) -> u16 {
        todo!()
    }

    /// What the kernel granted.
    #[must_use]
    pub fn features(&self) -> Features {
        todo!()
    }

    /// Counters of the socket and the network thread.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`].
    pub fn stats(&self) -> Result<EngineStats, EngineError> {
        todo!()
    }

    /// Leaves every group (at most about half a second), ends what is in flight with
    /// [`gradwire_collectives::OpError::ShutDown`] and joins the network thread. Later calls do nothing; in a forked child
    /// it does nothing.
    pub fn stop(&self) {
        todo!()
    }
}
