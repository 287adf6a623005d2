//! What an operation still waits for, peer by peer.

use super::{Op, Receive};
use crate::straggler::PeerWait;
use std::time::Duration;

impl Op {
    /// What is outstanding with `rank`; `None`: nothing. Whether it has called is known as far as its transfers show it.
    pub(crate) fn wait_of(&self, rank: u32) -> Option<PeerWait> {
        let open = || self.receives.of(rank).filter(|receive| receive.is_open);
        let sum = |bytes: fn(&Receive) -> usize| open().map(bytes).sum::<usize>() as u64;
        let (owes, has_to_take) = (self.expects_from(rank), self.sends.of(rank).any(|send| send.is_open));
        (owes || has_to_take).then(|| PeerWait {
            rank,
            has_called: self.has_heard(rank),
            bytes_received: sum(|receive| receive.received),
            bytes_expected: sum(|receive| receive.bytes),
            owes_contribution: open().any(|receive| receive.target.is_contribution()),
            owes,
            has_to_take,
            silent: Duration::ZERO,
            is_stalled: false,
        })
    }

    /// Whether anything of `rank` shows that it has called.
    fn has_heard(&self, rank: u32) -> bool {
        self.receives.of(rank).any(|receive| !receive.is_open || receive.received > 0)
    }
}
