//! Settings of the network: plain values, drawn by [`crate::Scenario`] or written down by a test.

use std::time::Duration;

/// The link of one rank to the switch; both directions alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkOptions {
    /// Bytes per second.
    pub rate: u64,
    /// What the switch's port holds for this receiver; a datagram that finds it full is dropped.
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
    /// Probability that some bits of a datagram flip. UDP's checksum turns that into a loss, so only tests of
    /// robustness against forged datagrams use it.
    pub corrupt: f64,
}

impl Impairments {
    /// Whether every datagram that finds room arrives, once, in order and intact.
    #[must_use]
    pub fn are_harmless(&self) -> bool {
        let probabilities = self.loss + self.reorder + self.duplicate + self.corrupt;
        probabilities == 0.0 && self.burst.is_none()
    }
}

/// The whole network.
#[derive(Clone, Debug, PartialEq)]
pub struct NetworkOptions {
    /// For each rank its link; the last one stands for all that follow.
    pub links: Vec<LinkOptions>,
    /// One-way propagation delay.
    pub delay: Duration,
    /// What goes wrong.
    pub impairments: Impairments,
}

impl NetworkOptions {
    /// Equal links, nothing goes wrong. `rate` in bytes per second.
    #[must_use]
    pub fn uniform(rate: u64, buffer_bytes: u64, rtt: Duration) -> Self {
        let impairments = Impairments::default();
        Self { links: vec![LinkOptions { rate, buffer_bytes }], delay: rtt / 2, impairments }
    }

    /// The link of a rank.
    ///
    /// # Panics
    /// When no link was given.
    #[must_use]
    pub fn link(&self, rank: usize) -> LinkOptions {
        self.links[rank.min(self.links.len() - 1)]
    }
}
