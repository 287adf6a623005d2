//! What a caller holds of an operation in flight, and the queue that tells one thread of many completions.

use gradwire_collectives::{DeliveryReport, OpError};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How an operation ended.
pub type Outcome = Result<DeliveryReport, OpError>;

/// One submitted collective. Clones refer to the same one. Dropping it does not cancel anything.
#[derive(Clone, Debug)]
pub struct OpHandle(Arc<Op>);

#[derive(Debug)]
struct Op {
    id: u64,
    outcome: OnceLock<Outcome>,
    /// Under which epoch, and among whom.
    epoch: OnceLock<(u64, Arc<[u32]>)>,
    notify: Mutex<Notify>,
    ended: Condvar,
    completions: Completions,
}

/// Whether the operation goes into the queue of completions when it ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Notify {
    No,
    Wanted,
    Queued,
}

impl OpHandle {
    pub(crate) fn new(id: u64, completions: Completions) -> Self {
        let notify = Mutex::new(Notify::No);
        Self(Arc::new(Op {
            id,
            outcome: OnceLock::new(),
            epoch: OnceLock::new(),
            notify,
            ended: Condvar::new(),
            completions,
        }))
    }

    /// A number that no other operation of this engine has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Blocks until the operation ends; `None` when `timeout` passed first (`None`: waits as long as it takes, which
    /// is bounded by [`gradwire_collectives::Request::timeout`]).
    pub fn wait(&self, timeout: Option<Duration>) -> Option<&Outcome> {
        if let Some(outcome) = self.outcome() {
            return Some(outcome);
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut guard = lock(&self.0.notify);
        // The outcome is set before the lock is taken to announce it, so it cannot slip by unseen.
        while self.outcome().is_none() {
            guard = wait_until(&self.0.ended, guard, deadline)?;
        }
        drop(guard);
        self.outcome()
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.outcome().is_some()
    }

    /// How it ended, when it has.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        self.0.outcome.get()
    }

    /// In a group that goes on without lost ranks: the epoch under which it ended, and the ranks of the first epoch that
    /// took part.
    #[must_use]
    pub fn epoch(&self) -> Option<(u64, &[u32])> {
        self.0.epoch.get().map(|(number, members)| (*number, &**members))
    }

    /// Says so, before the operation ends.
    pub(crate) fn set_epoch(&self, number: u64, members: Arc<[u32]>) {
        _ = self.0.epoch.set((number, members));
    }

    /// Puts the operation into the engine's [`Completions`] when it ends, or now when it has ended. Without this call it
    /// never appears there; called twice before the end, it appears once; each call after the end queues it again.
    pub fn notify(&self) {
        let mut notify = lock(&self.0.notify);
        *notify = Notify::Wanted;
        self.queue_if_ended(notify);
    }

    /// Ends the operation. Only the first call counts.
    pub(crate) fn complete(&self, outcome: Outcome) {
        if self.0.outcome.set(outcome).is_err() {
            return;
        }
        let notify = lock(&self.0.notify);
        self.0.ended.notify_all();
        self.queue_if_ended(notify);
    }

    fn queue_if_ended(&self, mut notify: MutexGuard<'_, Notify>) {
        if *notify == Notify::Wanted && self.is_done() {
            *notify = Notify::Queued;
            drop(notify);
            self.0.completions.push(self.clone());
        }
    }
}

/// The engine's queue of ended operations that asked for it ([`OpHandle::notify`]). Clones share one queue.
#[derive(Clone, Debug, Default)]
pub struct Completions(Arc<Queue>);

#[derive(Debug, Default)]
struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    ended: Vec<OpHandle>,
    closed: bool,
}

impl Completions {
    /// Blocks until operations have ended and takes them all, in the order in which they ended. Empty when `timeout`
    /// passed first, or when the engine has stopped and nothing is left (see [`Completions::is_closed`]).
    #[must_use]
    pub fn next_batch(&self, timeout: Option<Duration>) -> Vec<OpHandle> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut state = lock(&self.0.state);
        while state.ended.is_empty() && !state.closed {
            match wait_until(&self.0.changed, state, deadline) {
                Some(guard) => state = guard,
                None => return Vec::new(),
            }
        }
        std::mem::take(&mut state.ended)
    }

    /// Whether the engine has stopped and the queue is empty: nothing will ever come.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        let state = lock(&self.0.state);
        state.closed && state.ended.is_empty()
    }

    fn push(&self, op: OpHandle) {
        lock(&self.0.state).ended.push(op);
        self.0.changed.notify_one();
    }

    fn close(&self) {
        lock(&self.0.state).closed = true;
        self.0.changed.notify_all();
    }
}

/// Closes the queue when it is dropped: held by every network thread that may have a part of what comes into it.
pub(crate) struct Closing(pub(crate) Completions);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Locks; a panic of another holder cannot have left these small states half-written.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a signal; `None` once `deadline` has passed.
fn wait_until<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> Option<MutexGuard<'a, T>> {
    let Some(deadline) = deadline else {
        return Some(condvar.wait(guard).unwrap_or_else(PoisonError::into_inner));
    };
    let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
    Some(condvar.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended() -> Outcome {
        Ok(DeliveryReport::default())
    }

    #[test]
    fn waiting_ends_with_the_outcome_or_with_the_timeout() {
        let op = OpHandle::new(1, Completions::default());
        assert_eq!(op.wait(Some(Duration::from_millis(1))), None);
        let waiter = std::thread::spawn({
            let op = op.clone();
            move || op.wait(None).cloned()
        });
        op.complete(ended());
        op.complete(Err(OpError::Invalid("second".into())));
        assert_eq!(waiter.join().unwrap(), Some(ended()));
        assert!(op.is_done());
    }

    #[test]
    fn an_operation_is_queued_once_for_calls_before_its_end_and_once_for_each_after_it() {
        let completions = Completions::default();
        let ops: Vec<OpHandle> = (0..3).map(|id| OpHandle::new(id, completions.clone())).collect();
        ops[0].notify();
        ops[0].notify();
        for op in &ops {
            op.complete(ended());
        }
        ops[2].notify();
        ops[2].notify();
        let batch: Vec<u64> = completions.next_batch(None).iter().map(OpHandle::id).collect();
        assert_eq!(batch, [0, 2, 2]);
        assert!(completions.next_batch(Some(Duration::ZERO)).is_empty());
    }

    #[test]
    fn closing_lets_the_completer_go() {
        let completions = Completions::default();
        completions.close();
        assert!(completions.next_batch(None).is_empty() && completions.is_closed());
    }
}
