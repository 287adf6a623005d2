//! Who waits for an operation in flight: its caller, or beside other network threads that have parts of it, all of them.

use crate::handle::{lock, OpHandle};
use crate::Outcome;
use gradwire_collectives::{DeliveryReport, OpError};
use std::sync::{Arc, Mutex};

/// An operation in flight.
pub(crate) struct InFlight {
    ending: Ending,
    /// Preset of its policy, for statistics.
    pub(crate) preset: &'static str,
    /// Epoch of the group under which it ends.
    pub(crate) epoch: u64,
}

enum Ending {
    Whole(Call),
    Part(Part),
}

/// A call. However it is dropped, it ends.
struct Call {
    op: OpHandle,
    /// Owns the memory behind the views; must be dropped after the group is done with it.
    keep_alive: Option<Box<dyn Send>>,
}

impl Call {
    /// The caller has its memory again, and then hears how it ended.
    fn end(mut self, outcome: Outcome) {
        self.keep_alive = None;
        self.op.complete(outcome);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.keep_alive = None;
        // Of one that has ended only the first outcome counts.
        self.op.complete(Err(shut_down()));
    }
}

/// A call of which several network threads have a part. It ends with the last of them, whatever ends that one, so that none writes to memory that
/// is the caller's again.
struct Divided {
    /// `None`: it has ended.
    call: Mutex<Option<Call>>,
    /// By part; `None`: it has not ended.
    outcomes: Mutex<Vec<Option<Outcome>>>,
}

impl Drop for Divided {
    fn drop(&mut self) {
        let outcomes = std::mem::take(&mut *lock(&self.outcomes));
        // A part that nobody ended was in the way of a thread that ended.
        let ended = outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(|| Err(shut_down())));
        let reports: Result<Vec<DeliveryReport>, OpError> = ended.collect();
        if let Some(call) = lock(&self.call).take() {
            call.end(reports.map(DeliveryReport::joined));
        }
    }
}

/// One thread's part.
struct Part {
    whole: Arc<Divided>,
    number: usize,
}

/// Why an operation ends where there is nobody to go on with it.
pub(crate) fn shut_down() -> OpError {
    OpError::ShutDown("the operation".to_owned())
}

impl InFlight {
    pub(crate) fn new(op: OpHandle, keep_alive: Box<dyn Send>, preset: &'static str) -> Self {
        Self { ending: Ending::Whole(Call { op, keep_alive: Some(keep_alive) }), preset, epoch: 0 }
    }

    /// It ends here. Of a call with other parts, that is when they have too.
    pub(crate) fn end(self, outcome: Outcome) {
        match self.ending {
            Ending::Whole(call) => call.end(outcome),
            Ending::Part(Part { whole, number }) => {
                lock(&whole.outcomes)[number] = Some(outcome);
            }
        }
    }

    /// Divides it into so many parts, at least one. A part is not divided again.
    pub(crate) fn divided(self, parts: usize) -> Vec<Self> {
        let Self { ending, preset, epoch } = self;
        let call = match ending {
            Ending::Whole(call) if parts > 1 => call,
            ending => return vec![Self { ending, preset, epoch }],
        };
        let outcomes = Mutex::new(vec![None; parts]);
        let whole = Arc::new(Divided { call: Mutex::new(Some(call)), outcomes });
        let part = |number| Ending::Part(Part { whole: Arc::clone(&whole), number });
        (0..parts).map(|number| Self { ending: part(number), preset, epoch }).collect()
    }

    /// Says under which epoch it ends.
    pub(crate) fn set_epoch(&mut self, number: u64, members: Arc<[u32]>) {
        self.epoch = number;
        if let Ending::Whole(call) = &self.ending {
            call.op.set_epoch(number, members);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Completions;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Says that it was dropped.
    struct Memory(Arc<AtomicBool>);

    impl Drop for Memory {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn call() -> (InFlight, OpHandle, Arc<AtomicBool>) {
        let (op, is_given_back) =
            (OpHandle::new(1, Completions::default()), Arc::new(AtomicBool::new(false)));
        let memory = Box::new(Memory(Arc::clone(&is_given_back)));
        (InFlight::new(op.clone(), memory, "exact"), op, is_given_back)
    }

    fn report(elems: u64) -> Outcome {
        Ok(DeliveryReport { elems, ..DeliveryReport::default() })
    }

    #[test]
    fn a_divided_call_ends_with_its_last_part_and_has_its_memory_until_then() {
        let (in_flight, op, is_given_back) = call();
        let mut parts = in_flight.divided(3);
        let last = parts.remove(1);
        for (part, elems) in parts.into_iter().zip([1, 4]) {
            part.end(report(elems));
            assert!(!op.is_done() && !is_given_back.load(Ordering::SeqCst));
        }
        last.end(report(2));
        let elems = op.outcome().map(|outcome| outcome.as_ref().unwrap().elems);
        assert!(elems == Some(7) && is_given_back.load(Ordering::SeqCst));
    }

    #[test]
    fn the_first_part_that_failed_says_why_and_a_part_that_is_lost_has_failed() {
        let failed = || Err(OpError::Invalid("why".to_owned()));
        let (in_flight, op, _) = call();
        let mut parts = in_flight.divided(3).into_iter();
        parts.next().unwrap().end(report(1));
        parts.next().unwrap().end(failed());
        parts.next().unwrap().end(Err(OpError::Invalid("later".to_owned())));
        assert_eq!(op.outcome(), Some(&failed()));
        let (in_flight, op, is_given_back) = call();
        let mut parts = in_flight.divided(2);
        drop(parts.pop());
        assert!(!is_given_back.load(Ordering::SeqCst));
        parts.pop().unwrap().end(report(1));
        assert_eq!(op.outcome(), Some(&Err(shut_down())));
    }

    #[test]
    fn a_call_that_nobody_ends_ends_when_it_is_dropped() {
        let (in_flight, op, is_given_back) = call();
        drop(in_flight);
        assert!(op.outcome() == Some(&Err(shut_down())) && is_given_back.load(Ordering::SeqCst));
        let (in_flight, op, _) = call();
        drop(in_flight.divided(2));
        assert_eq!(op.outcome(), Some(&Err(shut_down())));
    }

    #[test]
    fn what_is_not_divided_ends_at_once() {
        let (in_flight, op, _) = call();
        let mut one = in_flight.divided(1);
        one.pop().unwrap().end(report(1));
        assert!(one.is_empty() && op.is_done());
    }
}
