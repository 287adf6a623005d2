//! What members tell each other. Every message may be lost, doubled and overtaken: none does harm twice, and all are repeated by
//! who needs the answer.

use crate::epoch::{Ballot, Epoch, Member};

/// To whom something is to be sent.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// This life of this rank; another one ignores it.
    pub to: Member,
    /// What.
    pub message: Message,
}

/// What a member promises, and what it has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Promise {
    /// What it has accepted of an older ballot: may have been chosen, so that nothing else may be.
    pub accepted: Option<(Ballot, Epoch)>,
    /// Steps that it has done; `None`: it is still waiting for parameters. Final: who has promised completes nothing more.
    pub progress: Option<u64>,
}

/// `epoch` is always the number of the epoch that is to end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Message {
    /// Complete nothing more in this epoch, listen to no older ballot, and say what you have.
    Prepare {
        /// Number.
        epoch: u64,
        /// Attempt.
        ballot: Ballot,
    },
    /// It is promised.
    Promised {
        /// Number.
        epoch: u64,
        /// Attempt.
        ballot: Ballot,
        /// What the sender has.
        promise: Promise,
    },
    /// This shall be the next epoch.
    Accept {
        /// Number.
        epoch: u64,
        /// Attempt.
        ballot: Ballot,
        /// The next one.
        next: Epoch,
    },
    /// It is accepted.
    Accepted {
        /// Number.
        epoch: u64,
        /// Attempt.
        ballot: Ballot,
    },
    /// A larger ballot was promised to somebody else.
    Refused {
        /// Number.
        epoch: u64,
        /// The larger one.
        ballot: Ballot,
    },
    /// This epoch was chosen.
    Decided(Epoch),
    /// What comes after this epoch?
    Ask {
        /// Number that the sender is in.
        epoch: u64,
    },
    /// The sender wants to be a member.
    Join,
}
