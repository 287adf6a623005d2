//! A leaf-spine network: which port leads where.
//!
//! ```text
//! host -> [NIC] -> leaf -> [uplink] -> spine -> [downlink] -> leaf -> [host port] -> host
//!                     \______________ same leaf ______________/
//! ```
//!
//! Every `[..]` is a port with a queue and the link behind it. Ports are numbered so that the way of a packet is
//! arithmetic: no table grows with the square of the hosts.

use std::time::Duration;

/// What a switch port holds and drops.
#[derive(Clone, Debug, PartialEq)]
pub struct QueueOptions {
    /// Bytes that all bands of a port share, on the wire.
    pub buffer_bytes: u64,
    /// For each band, the most urgent first: bytes of its queue from which on a packet is marked if it is ECN-capable
    /// and dropped if it is not; `None`: only the end of the buffer drops. One to [`super::BANDS_MAX`] bands;
    /// packets of later ones share the last.
    pub thresholds: Vec<Option<u64>>,
}

/// How a leaf chooses the spine of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChoice {
    /// By a hash of sender, receiver and the sender's port (the path that the transport names): ECMP.
    PerFlow,
    /// By chance, packet by packet.
    PerPacket,
}

/// A leaf-spine network of any size. Rates are bytes per second, delays one way.
#[derive(Clone, Debug, PartialEq)]
pub struct LeafSpine {
    /// Switches that hosts hang on.
    pub leaves: usize,
    /// Switches that join them.
    pub spines: usize,
    /// Hosts of each leaf.
    pub hosts_per_leaf: usize,
    /// Of each host's link.
    pub host_rate: u64,
    /// Of each link between a leaf and a spine.
    pub core_rate: u64,
    /// Of each link.
    pub link_delay: Duration,
    /// Bytes of headers around each UDP payload on a link.
    pub header_bytes: u64,
    /// Every switch port.
    pub queue: QueueOptions,
    /// How packets are spread over the spines.
    pub choice: PathChoice,
}

impl LeafSpine {
    /// MLT section 6.2.1: 100 Gbit/s to hosts, 24 us, 512 KB at each port, ECN from 65 packets on; as many leaves as
    /// `hosts` need at 16 for each, four spines whose links have as much as the hosts of a leaf.
    #[must_use]
    pub fn mlt(hosts: usize) -> Self {
        let hosts_per_leaf = hosts.div_ceil(hosts.div_ceil(HOSTS_PER_LEAF).max(1)).max(1);
        Self {
            leaves: hosts.div_ceil(hosts_per_leaf).max(1),
            spines: 4,
            hosts_per_leaf,
            host_rate: 12_500_000_000,
            core_rate: 50_000_000_000,
            // Four links there and four back in 24 us, less what serialising takes.
            link_delay: Duration::from_nanos(2_900),
            header_bytes: HEADER_BYTES,
            queue: QueueOptions { buffer_bytes: 512 << 10, thresholds: vec![Some(65 * 1500)] },
            choice: PathChoice::PerFlow,
        }
    }

    /// The same with core links so narrow that a leaf's hosts have `factor` times what its uplinks carry.
    #[must_use]
    pub fn oversubscribed(self, factor: f64) -> Self {
        let hosts = self.host_rate as f64 * self.hosts_per_leaf as f64;
        Self { core_rate: ((hosts / self.spines as f64 / factor.max(f64::EPSILON)) as u64).max(1), ..self }
    }

    /// Hosts.
    #[must_use]
    pub const fn hosts(&self) -> usize {
        self.leaves * self.hosts_per_leaf
    }

    /// Ports.
    #[must_use]
    pub const fn ports(&self) -> usize {
        2 * self.hosts() + 2 * self.leaves * self.spines
    }

    /// The leaf of a host.
    #[must_use]
    pub const fn leaf_of(&self, host: usize) -> usize {
        host / self.hosts_per_leaf
    }

    /// The port of a leaf to a spine.
    #[must_use]
    pub const fn uplink(&self, leaf: usize, spine: usize) -> usize {
        2 * self.hosts() + leaf * self.spines + spine
    }

    /// The port of a spine to a leaf.
    #[must_use]
    pub const fn downlink(&self, spine: usize, leaf: usize) -> usize {
        2 * self.hosts() + self.leaves * self.spines + spine * self.leaves + leaf
    }

    /// The port of a leaf to a host.
    #[must_use]
    pub const fn host_port(&self, host: usize) -> usize {
        self.hosts() + host
    }

    /// Whose link a port is.
    #[must_use]
    pub const fn place(&self, port: usize) -> Place {
        let hosts = self.hosts();
        let core = self.leaves * self.spines;
        if port < hosts {
            Place::Nic(port)
        } else if port < 2 * hosts {
            Place::HostPort(port - hosts)
        } else if port < 2 * hosts + core {
            let number = port - 2 * hosts;
            Place::Uplink { leaf: number / self.spines, spine: number % self.spines }
        } else {
            let number = port - 2 * hosts - core;
            Place::Downlink { spine: number / self.leaves, leaf: number % self.leaves }
        }
    }

    /// Bytes per second of the link behind a port.
    #[must_use]
    pub const fn rate(&self, port: usize) -> u64 {
        if port < 2 * self.hosts() {
            self.host_rate
        } else {
            self.core_rate
        }
    }
}

/// Where a port is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// A host's own.
    Nic(usize),
    /// Of a leaf, to a host.
    HostPort(usize),
    /// Of a leaf, to a spine.
    Uplink {
        /// The leaf.
        leaf: usize,
        /// The spine.
        spine: usize,
    },
    /// Of a spine, to a leaf.
    Downlink {
        /// The spine.
        spine: usize,
        /// The leaf.
        leaf: usize,
    },
}

/// Of MLT's network.
const HOSTS_PER_LEAF: usize = 16;
/// IPv4 20, UDP 8, Ethernet 14.
const HEADER_BYTES: u64 = 42;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_has_one_place_and_every_place_one_port() {
        let topology = LeafSpine { leaves: 3, spines: 2, hosts_per_leaf: 5, ..LeafSpine::mlt(15) };
        for port in 0..topology.ports() {
            let again = match topology.place(port) {
                Place::Nic(host) => host,
                Place::HostPort(host) => topology.host_port(host),
                Place::Uplink { leaf, spine } => topology.uplink(leaf, spine),
                Place::Downlink { spine, leaf } => topology.downlink(spine, leaf),
            };
            assert_eq!(again, port);
        }
    }

    #[test]
    fn the_papers_network_has_nine_leaves_of_sixteen_and_can_be_oversubscribed() {
        let topology = LeafSpine::mlt(144);
        assert_eq!((topology.leaves, topology.hosts_per_leaf, topology.hosts()), (9, 16, 144));
        // 16 x 100 Gbit/s over 4 spines at 4:1.
        assert_eq!(topology.oversubscribed(4.0).core_rate, 12_500_000_000);
        assert_eq!(LeafSpine::mlt(36).hosts(), 36);
    }
}
