//! How many ranks a packet of a transfer may sum, as far as all agree.

use super::Op;
use crate::schedules::Target;

/// Where the ranks in a packet do not count.
const ANY: (u16, u16) = (0, u16::MAX);

impl Op {
    /// The fewest and the most ranks that a packet of the receive `index` from `from` may say that it sums: a count that cannot be would
    /// make a sum look whole, and divide it by ranks that are not in it. Contributions are of one rank, but for a ring, where those of one
    /// rank more may be in each step. A result that nobody has given anything to has none.
    pub(crate) fn weights_of(&mut self, from: u32, index: u32) -> (u16, u16) {
        let up_to = |ranks: u32| u16::try_from(ranks).unwrap_or(u16::MAX);
        match self.receives.at(from, index).map(|receive| receive.target) {
            Some(Target::Add { .. }) if self.call.is_ring() => (1, up_to(index + 1)),
            Some(Target::Add { .. }) => (1, 1),
            Some(Target::Result { .. }) => (0, self.memory.world_size()),
            _ => ANY,
        }
    }
}
