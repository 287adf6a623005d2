//! What a rank says of its host beside what it has measured: whether cores are shared, and between how many network threads it can divide
//! what is large.

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// More ranks than cores are on it.
    pub shares_cores: bool,
    /// Network threads of this rank that are connected to those of all other ranks and have cores of their own, 1 to [`Host::THREADS_MAX`].
    pub threads: u8,
    /// They are to be used on slow links too, where one is enough.
    pub insists: bool,
}

impl Default for Host {
    fn default() -> Self {
        Self { shares_cores: false, threads: 1, insists: false }
    }
}

impl Host {
    /// More network threads than that a rank cannot have.
    pub const THREADS_MAX: u8 = 8;

    /// Bits that are not of a host.
    const OTHER: u32 = 0b10;
    const SHARES_CORES: u32 = 0b1;
    const INSISTS: u32 = 0b100;
    const THREADS_AT: u32 = 4;

    /// As flags of 32 bits, of which bit 1 is free: bit 0, cores are shared; bit 2, it insists; bits 4 to 6, threads beside the first.
    pub(crate) fn flags(self) -> u32 {
        let further = u32::from(self.threads.clamp(1, Self::THREADS_MAX) - 1);
        let flag = |is_set: bool, flag: u32| if is_set { flag } else { 0 };
        flag(self.shares_cores, Self::SHARES_CORES)
            | flag(self.insists, Self::INSISTS)
            | further << Self::THREADS_AT
    }

    /// Any number is one: flags of a later version are left out.
    pub(crate) const fn of_flags(flags: u32) -> Self {
        let further = (flags & !Self::OTHER) >> Self::THREADS_AT & (Self::THREADS_MAX as u32 - 1);
        Self {
            shares_cores: flags & Self::SHARES_CORES != 0,
            threads: further as u8 + 1,
            insists: flags & Self::INSISTS != 0,
        }
    }

    /// Between how many threads all of these ranks divide what is large; one: none does.
    pub(crate) fn threads_of_all(hosts: impl Iterator<Item = Self> + Clone, is_fast: bool) -> u8 {
        if is_fast || hosts.clone().all(|host| host.insists) {
            hosts.map(|host| host.threads).min().unwrap_or(1)
        } else {
            1
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_survive_the_wire_beside_other_flags() {
        for threads in 1..=Host::THREADS_MAX {
            for (shares_cores, insists) in [(false, false), (true, false), (false, true), (true, true)] {
                let host = Host { shares_cores, threads, insists };
                assert_eq!(Host::of_flags(host.flags()), host);
                assert_eq!((host.flags() & 0b10, Host::of_flags(host.flags() | 0b10)), (0, host));
            }
        }
        assert_eq!(Host::of_flags(0), Host::default());
        assert_eq!(Host::of_flags(0xffff_ff88), Host::default(), "flags of a later version");
        assert_eq!(Host { threads: 0, ..Host::default() }.flags(), 0);
    }

    #[test]
    fn the_rank_with_the_fewest_threads_decides_and_on_slow_links_all_have_to_insist() {
        let host = |threads, insists| Host { threads, insists, ..Host::default() };
        let threads = |hosts: &[Host], is_fast| Host::threads_of_all(hosts.iter().copied(), is_fast);
        assert_eq!(threads(&[host(4, false), host(2, false), host(3, true)], true), 2);
        assert_eq!(threads(&[host(4, true), host(2, false)], false), 1);
        assert_eq!(threads(&[host(4, true), host(2, true)], false), 2);
        assert_eq!(threads(&[host(4, false), host(1, false)], true), 1);
        assert_eq!(threads(&[], true), 1);
    }
}
