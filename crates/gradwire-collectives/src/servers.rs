//! Who the parameter servers of a group are.

/// Who reduces in an all-reduce over parameter servers. Every rank of a group says the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Servers {
    /// So many of the ranks themselves, at least one and at most all: server `j` of `k` is rank `j * N / k`, so that the
    /// servers are spread over the hosts of a job whose ranks are numbered host by host.
    Colocated(u32),
    /// So many ranks of their own, at least one, numbered behind the `N` ranks that call collectives: server `j` is rank
    /// `N + j` of the connections. They have no tensors and take part in nothing else: LTP's set-up (section V-A).
    Dedicated {
        /// Servers.
        count: u32,
        /// Bytes that the sums in flight on one server may take. What needs more at once waits; a collective that needs
        /// more alone fails with [`crate::OpError::ServerMemory`]. Only a server reads it.
        buffer_bytes: u64,
    },
}

impl Servers {
    /// Every rank is a server: MLT's set-up (section 6.1.1).
    pub const EVERY_RANK: Self = Self::Colocated(u32::MAX);

    /// Servers of a group of `world_size` ranks.
    pub(crate) fn count(self, world_size: u32) -> u32 {
        match self {
            Self::Colocated(count) => count.clamp(1, world_size.max(1)),
            Self::Dedicated { count, .. } => count.max(1),
        }
    }

    /// The rank of server `index`.
    pub(crate) fn rank_of(self, index: u32, world_size: u32) -> u32 {
        match self {
            Self::Colocated(_) => {
                let count = u64::from(self.count(world_size));
                (u64::from(index) * u64::from(world_size) / count) as u32
            }
            Self::Dedicated { .. } => world_size + index,
        }
    }

    /// Which server `rank` is, if it is one.
    pub(crate) fn index_of(self, rank: u32, world_size: u32) -> Option<u32> {
        (0..self.count(world_size)).find(|index| self.rank_of(*index, world_size) == rank)
    }

    /// Ranks that send to one server at once.
    pub(crate) fn senders(self, world_size: u32) -> u32 {
        match self {
            Self::Colocated(_) => world_size.max(2) - 1,
            Self::Dedicated { .. } => world_size,
        }
    }

    /// Ranks of the connections: those that call collectives, and behind them dedicated servers.
    pub(crate) fn ranks(self, world_size: u32) -> u32 {
        match self {
            Self::Colocated(_) => world_size,
            Self::Dedicated { .. } => world_size + self.count(world_size),
        }
    }

    pub(crate) fn are_dedicated(self) -> bool {
        matches!(self, Self::Dedicated { .. })
    }
}

impl Default for Servers {
    fn default() -> Self {
        Self::EVERY_RANK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dedicated_servers_are_numbered_behind_the_ranks_that_call() {
        let servers = Servers::Dedicated { count: 2, buffer_bytes: 1 };
        assert_eq!((servers.rank_of(0, 3), servers.rank_of(1, 3), servers.ranks(3)), (3, 4, 5));
        assert_eq!((servers.index_of(4, 3), servers.index_of(2, 3)), (Some(1), None));
    }

    #[test]
    fn colocated_servers_are_different_ranks_spread_evenly() {
        for world_size in 1..=16 {
            for asked in [1, 2, 3, 7, 16, u32::MAX] {
                let servers = Servers::Colocated(asked);
                let count = servers.count(world_size);
                assert_eq!(count, asked.min(world_size));
                let ranks: Vec<u32> = (0..count).map(|index| servers.rank_of(index, world_size)).collect();
                assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]) && ranks[0] == 0, "{ranks:?}");
                let last = ranks[ranks.len() - 1];
                assert!(last < world_size && world_size - last <= world_size.div_ceil(count), "{ranks:?}");
                for rank in 0..world_size {
                    let index = ranks.iter().position(|server| *server == rank);
                    assert_eq!(servers.index_of(rank, world_size), index.map(|index| index as u32));
                }
            }
        }
    }
}
