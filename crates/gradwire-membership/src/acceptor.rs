//! A member's part in choosing the next epoch: what it promised and accepted.
//!
//! It forgets when the next epoch begins, and with its process: a rank that starts again is another member, which has no vote.

use crate::epoch::{Ballot, Epoch};

/// One epoch's acceptor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Acceptor {
    promised: Option<Ballot>,
    accepted: Option<(Ballot, Epoch)>,
}

impl Acceptor {
    /// Promises to listen to nothing older; `Err` names what was promised already.
    pub(crate) fn promise(&mut self, ballot: Ballot) -> Result<Option<(Ballot, Epoch)>, Ballot> {
        self.check(ballot)?;
        Ok(self.accepted.clone())
    }

    /// Accepts, unless something newer was promised.
    pub(crate) fn accept(&mut self, ballot: Ballot, next: Epoch) -> Result<(), Ballot> {
        self.check(ballot)?;
        self.accepted = Some((ballot, next));
        Ok(())
    }

    /// Whether it has promised anything: then nothing may be completed in this epoch any more.
    pub(crate) fn is_bound(&self) -> bool {
        self.promised.is_some()
    }

    /// Whether a next epoch was accepted, which may be chosen by now.
    pub(crate) fn has_accepted(&self) -> bool {
        self.accepted.is_some()
    }

    fn check(&mut self, ballot: Ballot) -> Result<(), Ballot> {
        match self.promised {
            Some(promised) if promised > ballot => Err(promised),
            _ => {
                self.promised = Some(ballot);
                Ok(())
            }
        }
    }
}
