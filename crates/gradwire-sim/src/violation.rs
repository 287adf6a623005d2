//! What the checkers can find. Every variant names the collective and the ranks, so that a printed seed is a report.

use gradwire_collectives::OpError;
use gradwire_core::Timestamp;
use std::time::Duration;
use thiserror::Error;

/// A promise that a run broke.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum Violation {
    /// A tolerant transfer went on past the deadline that its receiver says it had, or that was longer than asked for.
    #[error("op {op}: the transfer from rank {from} to rank {to} closed at {at:?}, past its deadline of {deadline:?}")]
    PastDeadline {
        /// The collective.
        op: usize,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// When it closed.
        at: Timestamp,
        /// From the receiver's report.
        deadline: Duration,
    },
    /// What was lost of an exact transfer went out again only after many round trips.
    #[error("rank {from} repaired offset {offset} of transfer {transfer:#x} to rank {to} at {at:?}, {waited:?} after the loss: at most {bound:?}")]
    RepairedLate {
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// The transfer's id.
        transfer: u32,
        /// Where in it.
        offset: u32,
        /// When it went out again.
        at: Timestamp,
        /// Since it was lost, or the sender repaired something else for this receiver.
        waited: Duration,
        /// The most that this may take.
        bound: Duration,
    },
    /// A dedicated server did not notice that every worker has left.
    #[error("every worker has left, and the server on rank {rank} has not noticed")]
    ServerStays {
        /// Which.
        rank: usize,
    },
    /// An exact collective gave the wrong value.
    #[error("op {op}, rank {rank}, element {elem}: expected {expected}, got {got}")]
    WrongElement {
        /// The collective.
        op: usize,
        /// The rank that holds it.
        rank: usize,
        /// Its place.
        elem: u64,
        /// What the oracle computed.
        expected: String,
        /// What the rank has.
        got: String,
    },
    /// A tolerant result is not the mean over any nonempty set of ranks.
    #[error("op {op}, element {elem}: {got} is not the mean of any set of contributions (reports say {reported:#b})")]
    NotAMean {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// The value.
        got: String,
        /// The set that the reports imply.
        reported: u32,
    },
    /// Two ranks have different results of an all-reduce.
    #[error("op {op}: ranks 0 and {rank} differ first at byte {byte}")]
    ReplicasDiffer {
        /// The collective.
        op: usize,
        /// The rank that differs from rank 0.
        rank: usize,
        /// Where.
        byte: usize,
    },
    /// Ranks that have ended the same collectives know different things about the network.
    #[error("ranks 0 and {rank} do not agree about the network: {ours} against {theirs}")]
    Disagreed {
        /// The rank that differs from rank 0.
        rank: usize,
        /// What rank 0 knows.
        ours: String,
        /// What the other one knows.
        theirs: String,
    },
    /// The rank that reduces an element is not among its contributors.
    #[error(
        "op {op}, element {elem}: rank {owner} reduces it but did not count its own value (mask {mask:#b})"
    )]
    OwnerNotCounted {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// The rank that reduces it.
        owner: usize,
        /// Who was counted.
        mask: u32,
    },
    /// A contribution was counted although the network never delivered it.
    #[error(
        "op {op}, element {elem}: rank {from} was counted by rank {to} but its packet never arrived in time"
    )]
    CountedWithoutArrival {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
    },
    /// A contribution arrived in time and was not counted.
    #[error("op {op}, element {elem}: rank {from}'s packet reached rank {to} in time and was not counted")]
    ArrivedButNotCounted {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
    },
    /// Something was left out although the network lost nothing.
    #[error("op {op}: rank {rank} lost {elems} elements on a network that lost nothing")]
    LostOnQuietNetwork {
        /// The collective.
        op: usize,
        /// The contributor.
        rank: usize,
        /// How many elements.
        elems: u64,
    },
    /// More is missing than the policy allows.
    #[error("op {op}: of {expected} elements from rank {from}, rank {to} counted {received}: {bound} were needed ({closed_by})")]
    OverBudget {
        /// The collective.
        op: usize,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// Elements counted.
        received: u64,
        /// Elements of the transfer.
        expected: u64,
        /// Elements that had to be counted.
        bound: u64,
        /// Why the transfer closed.
        closed_by: &'static str,
    },
    /// A report says something else than what happened.
    #[error("op {op}, rank {rank}: the report says {reported}, but it was {actual}")]
    ReportDisagrees {
        /// The collective.
        op: usize,
        /// The reporting rank.
        rank: usize,
        /// From the report.
        reported: String,
        /// From outside.
        actual: String,
    },
    /// A contribution is neither in the result nor in its rank's residual, or in both, or altered.
    #[error("op {op}, rank {rank}, element {elem}: residual is {got}, expected {expected}")]
    Residual {
        /// The collective.
        op: usize,
        /// The contributor.
        rank: usize,
        /// Its place.
        elem: u64,
        /// What it had to be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// Result and residuals together do not hold every contribution once.
    #[error("op {op}, element {elem}: result and residuals add up to {got}, contributions to {expected}")]
    NotConserved {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// Sum of all contributions.
        expected: f64,
        /// Sum of what counted and all residuals.
        got: f64,
    },
    /// A rank had the result of a collective before every rank had called it.
    #[error("op {op} ended at {first_end:?} on one rank, before the last rank called it at {last_call:?}")]
    ReturnedEarly {
        /// The collective.
        op: usize,
        /// First end on any rank.
        first_end: Timestamp,
        /// Last call on any rank.
        last_call: Timestamp,
    },
    /// Memory outside a tensor was written.
    #[error("op {op}, rank {rank}: memory outside the {tensor} was written")]
    Overrun {
        /// The collective.
        op: usize,
        /// The rank.
        rank: usize,
        /// Which tensor.
        tensor: &'static str,
    },
    /// A collective failed without reason.
    #[error("op {op}, rank {rank} failed at {at:?}: {error}")]
    Failed {
        /// The collective.
        op: usize,
        /// The rank.
        rank: usize,
        /// When.
        at: Timestamp,
        /// How.
        error: OpError,
    },
    /// A group reported the end of a collective that is not in flight.
    #[error("rank {rank} reported the end of a collective that was not in flight")]
    UnknownDone {
        /// The rank.
        rank: usize,
    },
    /// Collectives did not end although all faults were over.
    #[error("not over {waited:?} after the last fault: {pending}")]
    Stuck {
        /// How long after the end of the faults.
        waited: Duration,
        /// Which ranks wait in which collective.
        pending: String,
    },
    /// A rank woke up again and again while no time passed.
    #[error("rank {rank} wakes up without end at {at:?} for {reason}")]
    TimeStandsStill {
        /// The rank.
        rank: usize,
        /// When.
        at: Timestamp,
        /// What it claims to be due.
        reason: String,
    },
    /// The groups still had something to say long after everybody left.
    #[error("ranks {ranks:?} were not drained {waited:?} after leaving")]
    NotDrained {
        /// Which.
        ranks: Vec<usize>,
        /// How long after.
        waited: Duration,
    },
    /// Somebody sent what nobody needs any more.
    #[error("rank {rank} sent {what} at {at:?}, when all was done")]
    NotQuiet {
        /// The rank.
        rank: usize,
        /// When.
        at: Timestamp,
        /// Kind of the datagram.
        what: String,
    },
    /// A packet that always has to arrive was left out.
    #[error(
        "op {op}, element {elem}: it was in a critical packet from rank {from} to {to} and did not count"
    )]
    CriticalLost {
        /// The collective.
        op: usize,
        /// Its place.
        elem: u64,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
    },
    /// A tolerant transfer sent something again although its receiver had not asked.
    #[error("op {op}: rank {from} repaired at {at:?} what rank {to} had not asked for")]
    RepairedUnasked {
        /// The collective.
        op: usize,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// When.
        at: Timestamp,
    },
    /// A receiver asked for repairs although its bound was met.
    #[error("op {op}: rank {to} asked rank {from} at {at:?} for more than its bound needs")]
    AskedForTooMuch {
        /// The collective.
        op: usize,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// When.
        at: Timestamp,
    },
    /// A tolerant transfer stayed open although nothing was left to wait for.
    #[error("op {op}: rank {to} closed its transfer from rank {from} at {at:?}, but had to by {limit:?}")]
    WaitedTooLong {
        /// The collective.
        op: usize,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// When.
        at: Timestamp,
        /// The limit.
        limit: Timestamp,
    },
    /// A gray path kept its share of new data, or a healed one did not get it back.
    #[error("path {path} from rank {from} to {to} had {packets} of {of} new packets until {at:?}: {least} to {most} were right")]
    PathShare {
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// The path.
        path: usize,
        /// When its state changed, or the run was over.
        at: Timestamp,
        /// New data packets that it carried.
        packets: u64,
        /// Of so many in the same time.
        of: u64,
        /// The least that it should have carried.
        least: u64,
        /// The most.
        most: u64,
    },
    /// A survivor was told too late that a rank is gone.
    #[error("op {op}, rank {rank} learnt at {at:?} that a rank is gone: {bound:?} was the limit")]
    LateVerdict {
        /// The collective.
        op: usize,
        /// The rank that was told late.
        rank: usize,
        /// When.
        at: Timestamp,
        /// When it had to know.
        bound: Duration,
    },
    /// The code under test panicked.
    #[error("panic: {0}")]
    Panicked(String),
}
