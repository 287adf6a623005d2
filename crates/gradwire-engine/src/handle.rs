//! What a caller holds of an operation in flight, and the queue that tells one thread of many completions.

use gradwire_collectives::{DeliveryReport, OpError};
use std::sync::Arc;
use std::time::Duration;

/// How an operation ended.
pub type Outcome = Result<DeliveryReport, OpError>;

/// One submitted collective. Clones refer to the same one. Dropping it does not cancel anything.
#[derive(Clone, Debug)]
pub struct OpHandle(pub(crate) Arc<()>);

impl OpHandle {
    /// A number that no other operation of this engine has.
    #[must_use]
    pub fn id(&self) -> u64 {
        todo!()
    }

    /// Blocks until the operation ends; `None` when `timeout` passed first (`None`: waits as long as it takes, which
    /// is bounded by [`gradwire_collectives::Request::timeout`]).
    pub fn wait(&self, _timeout: Option<Duration>) -> Option<&Outcome> {
        todo!()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        todo!()
    }

    /// How it ended, when it has.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        todo!()
    }

    /// Puts the operation into the engine's [`Completions`] when it ends, or now when it has ended. Without this call it
    /// never appears there; called twice, it appears once.
    pub fn notify(&self) {
        todo!()
    }
}

/// The engine's queue of ended operations that asked for it ([`OpHandle::notify`]). Clones share one queue.
#[derive(Clone, Debug)]
pub struct Completions(pub(crate) Arc<()>);

impl Completions {
    /// Blocks until operations have ended and takes them all, in the order in which they ended. Empty when `timeout`
    /// passed first, when [`Completions::interrupt`] was called, or when the engine has stopped and nothing is left
    /// (see [`Completions::is_closed`]).
    #[must_use]
    pub fn next_batch(&self, _timeout: Option<Duration>) -> Vec<OpHandle> {
        todo!()
    }

    /// Lets one present or future [`Completions::next_batch`] return at once.
    pub fn interrupt(&self) {
        todo!()
    }

    /// Whether the engine has stopped and the queue is empty: nothing will ever come.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        todo!()
    }
}
