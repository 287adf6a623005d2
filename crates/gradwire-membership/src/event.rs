//! What a member tells the layer above.

use crate::epoch::{Epoch, Member};
#[cfg(doc)]
use crate::Membership;

/// What changed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Collectives of this epoch end without a result here; what they were to reduce is kept for the next epoch.
    Frozen {
        /// Number.
        epoch: u64,
    },
    /// Collectives go on under this epoch, with these members, from its frontier. A rank that has other parameters than those
    /// after the frontier calls nothing before it has got them from `fetch`, and then says [`Membership::fetched`].
    Entered {
        /// The epoch.
        epoch: Epoch,
        /// From whom to get the parameters; `None`: they are here.
        fetch: Option<Member>,
    },
    /// The others went on without this rank. It may join again as another incarnation.
    Excluded {
        /// Theirs.
        epoch: Epoch,
    },
    /// No majority of this epoch could be reached within the patience, or nobody reachable has the parameters: the job ends.
    Halted {
        /// Number.
        epoch: u64,
    },
}
