//! One rank of one process group, as its caller sees it: before and after its peers are known.

use crate::{EngineError, GroupStats, JoinError, OpHandle};
use gradwire_collectives::Request;
use std::time::Duration;

/// A group whose peers are not known yet.
#[derive(Debug)]
pub struct PendingGroup {}

impl PendingGroup {
    /// This rank's record, JSON of a few hundred bytes: format, version, rank, world size, host, addresses, settings.
    /// Publish it in the store that all ranks can read.
    #[must_use]
    pub fn record(&self) -> String {
        todo!()
    }

    /// Compares every rank's record with our own (which may be among them), connects to all peers and returns when all
    /// have answered. `timeout` `None`: the engine's `connect_timeout`.
    ///
    /// # Errors
    /// [`JoinError`]: what disagreed on which rank, or who did not answer at which addresses.
    pub fn join(self, _records: &[String], _timeout: Option<Duration>) -> Result<GroupHandle, JoinError> {
        todo!()
    }
}

/// One rank of a connected process group. Dropping it leaves the group in the background.
#[derive(Debug)]
pub struct GroupHandle {}

impl GroupHandle {
    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        todo!()
    }

    /// Ranks in the group.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        todo!()
    }

    /// Hands a collective to the network thread; the same calls in the same order on every rank. `keep_alive` owns the
    /// memory behind the request's views; it is dropped on the network thread when the operation has ended, so its
    /// `Drop` must not block.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`]. What is wrong with the request itself, or with the group, comes
    /// out of the handle.
    pub fn submit(&self, _request: Request, _keep_alive: Box<dyn Send>) -> Result<OpHandle, EngineError> {
        todo!()
    }

    /// Ends everything in flight with [`gradwire_collectives::OpError::ShutDown`], at once; peers are told in the
    /// background. Safe to call at any time and twice.
    pub fn abort(&self) {
        todo!()
    }

    /// Says goodbye to the peers and waits until they have confirmed, or `timeout`. Operations that are still in flight
    /// end with [`gradwire_collectives::OpError::ShutDown`]. `true` when every peer confirmed.
    pub fn leave(&self, _timeout: Duration) -> bool {
        todo!()
    }

    /// Counters of the connection to each peer.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`].
    pub fn stats(&self) -> Result<GroupStats, EngineError> {
        todo!()
    }
}
