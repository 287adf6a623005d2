//! Settings of the network: plain values, drawn by [`crate::Scenario`] or written down by a test.

use super::PathTrouble;
use std::time::Duration;

/// The link of one rank to its switch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkOptions {
    /// From the rank to the switch, bytes per second.
    pub up_rate: u64,
    /// From the switch to the rank, bytes per second.
    pub down_rate: u64,
    /// One-way delay of this link, on top of that of the network.
    pub delay: Duration,
    /// What the switch's port holds for this receiver; a datagram that finds it full is dropped.
    pub buffer_bytes: u64,
    /// What either direction lets go at once after it was idle, as a shaper's token bucket does; 0: the link is a wire.
    pub bucket_bytes: u64,
}

/// Two racks, each a switch of its own, joined by one link that is narrower than what it joins.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trunk {
    /// Ranks below this one are in the first rack, the others in the second.
    pub first_rack: usize,
    /// Bytes per second, each direction.
    pub rate: u64,
    /// One-way delay, on top of that of the network.
    pub delay: Duration,
    /// What the port to the other rack holds.
    pub buffer_bytes: u64,
}

/// A two-state burst-loss process (Gilbert-Elliott).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Burst {
    /// Probability for each datagram that a burst begins.
    pub enter: f64,
    /// Probability for each datagram that it ends.
    pub leave: f64,
    /// Probability of loss inside it.
    pub loss: f64,
    /// Longest burst: counted in datagrams alone, one would last for seconds where little is sent.
    pub lasts_max: Duration,
}

/// What goes wrong between two ranks. The default is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Impairments {
    /// Probability that a datagram is lost.
    pub loss: f64,
    /// Burst losses on top.
    pub burst: Option<Burst>,
    /// Most additional delay of each datagram; order within a pair of ranks is kept.
    pub jitter: Duration,
    /// Probability that a datagram is held back while later ones overtake it.
    pub reorder: f64,
    /// For how long at most.
    pub reorder_delay: Duration,
    /// Probability that a datagram arrives twice.
    pub duplicate: f64,
    /// Probability that some bits of a datagram flip. The receiver's UDP checksum turns that into a loss.
    pub corrupt: f64,
    /// Probability that some bits flip and no checksum notices, as if an attacker on the way altered the datagram. Only
    /// tests of robustness use it: without authentication a flipped payload bit is a wrong value.
    pub forge: f64,
    /// Probability that a datagram of somebody else follows on the receiver's port: of another job, truncated, or noise.
    pub stray: f64,
}

impl Impairments {
    /// Whether every datagram that finds room arrives, once, in order and intact.
    #[must_use]
    pub fn are_harmless(&self) -> bool {
        let probabilities = self.loss + self.reorder + self.duplicate + self.corrupt + self.forge;
        probabilities == 0.0 && self.burst.is_none()
    }
}

/// The whole network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkOptions {
    /// For each rank its link; the last one stands for all that follow.
    pub links: Vec<LinkOptions>,
    /// One-way propagation delay between any two ranks.
    pub delay: Duration,
    /// Two racks instead of one switch.
    pub trunk: Option<Trunk>,
    /// What goes wrong.
    pub impairments: Impairments,
    /// Things go wrong only on the way from and to this rank; `None`: everywhere.
    pub impaired_rank: Option<usize>,
    /// What is wrong with each path between any two ranks, from the start; paths beyond the end have nothing.
    pub paths: Vec<PathTrouble>,
}

impl NetworkOptions {
    /// Equal links, nothing goes wrong. `rate` in bytes per second.
    #[must_use]
    pub fn uniform(rate: u64, buffer_bytes: u64, rtt: Duration) -> Self {
        let link = LinkOptions {
            up_rate: rate,
            down_rate: rate,
            delay: Duration::ZERO,
            buffer_bytes,
            bucket_bytes: 0,
        };
        Self {
            links: vec![link],
            delay: rtt / 2,
            trunk: None,
            impairments: Impairments::default(),
            impaired_rank: None,
            paths: Vec::new(),
        }
    }

    /// The link of a rank.
    ///
    /// # Panics
    /// When no link was given.
    #[must_use]
    pub fn link(&self, rank: usize) -> LinkOptions {
        self.links[rank.min(self.links.len() - 1)]
    }

    /// One-way propagation delay from one rank to another.
    #[must_use]
    pub fn delay_between(&self, from: usize, to: usize) -> Duration {
        self.delay + self.link(from).delay + self.link(to).delay
    }

    /// The rate of the narrowest link, trunk included.
    #[must_use]
    pub fn narrowest_rate(&self, world_size: usize) -> u64 {
        let hosts = (0..world_size).map(|rank| self.link(rank).up_rate.min(self.link(rank).down_rate));
        hosts.chain(self.trunk.map(|trunk| trunk.rate)).min().unwrap_or(1)
    }

    /// The longest round trip between two ranks without queues, on the slowest path.
    #[must_use]
    pub fn longest_rtt(&self, world_size: usize) -> Duration {
        let link_delay = (0..world_size).map(|rank| self.link(rank).delay).max().unwrap_or_default();
        let trunk_delay = self.trunk.map_or(Duration::ZERO, |trunk| trunk.delay);
        let path_delay = self.paths.iter().map(|path| path.delay).max().unwrap_or_default();
        (self.delay + link_delay * 2 + trunk_delay + path_delay) * 2
    }

    /// What goes wrong on the way from one rank to another.
    pub(crate) fn impairments_between(&self, from: usize, to: usize) -> Impairments {
        let is_spared = self.impaired_rank.is_some_and(|rank| from != rank && to != rank);
        if is_spared {
            Impairments::default()
        } else {
            self.impairments
        }
    }
}
