//! Processor cores: those that this process may use, and those of its host.
//!
//! Ranks that are bound to cores of their own, or limited to a part of a large host each, are more than the cores that each of them may
//! use, and share none. Nobody knows from here which cores the others use, so what all ranks are told ([`Cores::are_shared_by`]) takes all cores of
//! the host, which are certainly too few where ranks are more. What a thread does on its own takes its own.

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    /// As affinity and control group of this process allow.
    pub(crate) of_process: usize,
    pub(crate) of_host: usize,
}

impl Cores {
    pub(crate) fn read() -> Self {
        let of_process = std::thread::available_parallelism().map_or(1, usize::from);
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
        let of_host = online.ok().and_then(|list| count(&list)).unwrap_or(usize::MAX);
        Self { of_process, of_host }
    }

    /// A host with so many, all of this process.
    #[cfg(test)]
    pub(crate) const fn of(cores: usize) -> Self {
        Self { of_process: cores, of_host: cores }
    }

    /// A part of a host, as bound or limited processes have it.
    #[cfg(test)]
    pub(crate) const fn of_part(of_process: usize, of_host: usize) -> Self {
        Self { of_process, of_host }
    }

    /// Whether this process may use all cores of the host, and so many are there.
    pub(crate) const fn are_all_and(&self, ranks_here: usize) -> bool {
        self.of_process == self.of_host && self.of_host == ranks_here
    }

    /// Whether each of so many ranks on this host may use two cores. Of ranks that are bound to cores of their own it counts those.
    pub(crate) fn are_two_for_each_of(&self, ranks_here: usize) -> bool {
        self.for_each_of(ranks_here) >= 2
    }

    /// How many cores each of so many ranks on this host may use. Of ranks that are bound to cores of their own it counts those.
    pub(crate) fn for_each_of(&self, ranks_here: usize) -> usize {
        self.of_process.min(self.of_host / ranks_here.max(1))
    }

    /// Whether so many ranks on this host certainly share cores. Of a host whose cores cannot be counted nothing is certain.
    pub(crate) const fn are_shared_by(&self, ranks_here: usize) -> bool {
        ranks_here > self.of_host
    }
}

/// Numbers in a list as the kernel writes it: `0-3,8,10-11`.
fn count(list: &str) -> Option<usize> {
    let of = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<usize>().ok()?, last.parse::<usize>().ok()?);
        last.checked_sub(first)?.checked_add(1)
    };
    list.trim().split(',').map(of).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_the_kernel_is_counted_and_anything_else_is_none() {
        let counts = ["0-3,8,10-11\n", "0", "0-127\n"].map(count);
        assert_eq!(counts, [Some(7), Some(1), Some(128)]);
        assert_eq!(["", "\n", "a", "3-1", "0-", "1,,2"].map(count), [None; 6]);
    }

    #[test]
    fn ranks_with_cores_of_their_own_share_none_though_each_may_use_fewer_than_they_are() {
        let bound = Cores { of_process: 4, of_host: 64 };
        assert!(!bound.are_shared_by(8) && !bound.are_shared_by(64) && bound.are_shared_by(65));
        assert!(!Cores { of_process: 1, of_host: usize::MAX }.are_shared_by(1_000));
    }

    #[test]
    fn two_cores_for_each_rank_are_those_of_the_host_and_those_that_the_process_may_use() {
        let (bound, unbound) = (Cores { of_process: 2, of_host: 64 }, Cores { of_process: 8, of_host: 8 });
        assert!(bound.are_two_for_each_of(1) && bound.are_two_for_each_of(32));
        assert!(!bound.are_two_for_each_of(33), "not all of them can be bound to two");
        assert!(unbound.are_two_for_each_of(4) && !unbound.are_two_for_each_of(5));
        assert!(!Cores { of_process: 1, of_host: 64 }.are_two_for_each_of(1));
        assert!(Cores { of_process: 2, of_host: usize::MAX }.are_two_for_each_of(1_000));
    }

    #[test]
    fn this_host_has_at_least_the_cores_of_this_process() {
        let cores = Cores::read();
        assert!(cores.of_process >= 1 && cores.of_host >= cores.of_process, "{cores:?}");
    }
}
