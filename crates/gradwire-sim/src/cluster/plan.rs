//! What a cluster run is made of: hosts, their settings, and what they reduce.

use super::{ClusterError, Hierarchy};
use crate::fabric::{Damage, LeafSpine, QueueOptions};
use crate::{HostOptions, PathTrouble};
use gradwire_collectives::{AgreedNetwork, Algorithm, Preset, Servers};
use gradwire_core::wire::chunk_bytes_for;
use std::time::Duration;

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterPlan {
    /// Seed of every chance in the run.
    pub seed: u64,
    /// The network.
    pub topology: LeafSpine,
    /// Ranks that call. With dedicated servers behind them they are spread evenly over the hosts.
    pub workers: usize,
    /// What the ranks' settings come from.
    pub preset: Preset,
    /// Settings of every host.
    pub host: HostOptions,
    /// How the buckets are reduced.
    pub algorithm: Algorithm,
    /// Sets of ranks that reduce within first, then with `algorithm` across, then gather within; `None`: all ranks are one group.
    pub hierarchy: Option<Hierarchy>,
    /// Packets carry their payload, and every rank's result must be the exact mean. It takes memory for each rank's tensors, and a preset
    /// that loses nothing.
    pub is_checked: bool,
    /// The buckets of a step, in the order of their calls.
    pub buckets: Vec<BucketPlan>,
    /// Steps before those that are measured: connections learn their rates in them.
    pub warm_up: usize,
    /// Steps that are measured.
    pub steps: usize,
    /// Each rank begins each step so much late at most.
    pub jitter: Duration,
    /// Share of every host's link that packets of others take, which yield to nobody and heed nothing.
    pub background: f64,
    /// Links that go bad, and when; the time counts from the first call.
    pub troubles: Vec<(Duration, LinkTrouble)>,
    /// Deliberate damage that the checkers must find.
    pub damage: Damage,
}

/// A link that is broken, gray, or well again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkTrouble {
    /// Its leaf.
    pub leaf: usize,
    /// Its spine.
    pub spine: usize,
    /// What is wrong; the default: nothing.
    pub trouble: PathTrouble,
}

/// One bucket of a step: float32.
#[derive(Clone, Debug, PartialEq)]
pub struct BucketPlan {
    /// Its layers, in the order in which they lie in it.
    pub layers: Vec<Layer>,
    /// Traffic class, 0 the most urgent.
    pub class: u8,
    /// Lower goes first at the sender.
    pub priority: u8,
    /// When it is called for, from the beginning of the step.
    pub ready: Duration,
}

/// A tensor of a bucket.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name, for people.
    pub name: String,
    /// Its elements.
    pub elems: u64,
}

impl BucketPlan {
    /// One bucket of one layer, called for at once.
    #[must_use]
    pub fn of_bytes(bytes: u64) -> Self {
        let layer = Layer { name: "all".to_owned(), elems: bytes / 4 };
        Self { layers: vec![layer], class: 0, priority: 0, ready: Duration::ZERO }
    }

    /// Elements.
    #[must_use]
    pub fn elems(&self) -> u64 {
        self.layers.iter().map(|layer| layer.elems).sum()
    }

    /// Bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.elems() as usize * 4
    }
}

impl ClusterPlan {
    /// MLT's burst (section 6.2.1): of every four hosts one is a server, every worker pushes `bytes`, split evenly over the servers, and
    /// pulls them. `None`: no such preset.
    #[must_use]
    pub fn burst(preset: &str, hosts: usize, bytes: u64) -> Option<Self> {
        let preset = Preset::named(preset)?;
        let servers = (hosts / 4).max(1);
        let topology = LeafSpine { queue: queues(1), ..LeafSpine::mlt(hosts) };
        let servers_are = Servers::Dedicated { count: servers as u32, buffer_bytes: u64::MAX };
        let host = HostOptions {
            controller: preset.controller,
            servers: servers_are,
            nic_bytes: Some(NIC_BYTES),
            ..HostOptions::default()
        };
        Some(Self {
            seed: 1,
            topology,
            workers: hosts - servers,
            preset,
            host,
            algorithm: Algorithm::ParameterServer,
            hierarchy: None,
            is_checked: false,
            buckets: vec![BucketPlan::of_bytes(bytes)],
            warm_up: 0,
            steps: 1,
            jitter: Duration::ZERO,
            background: 0.0,
            troubles: Vec::new(),
            damage: Damage::Nothing,
        })
    }

    /// The same hosts, of which so many are dedicated servers.
    #[must_use]
    pub fn with_servers(mut self, servers: usize) -> Self {
        self.workers = self.ranks() - servers;
        self.host.servers = Servers::Dedicated { count: servers as u32, buffer_bytes: u64::MAX };
        self
    }

    /// The same hosts, each of which has a rank that calls for another schedule.
    #[must_use]
    pub fn with_algorithm(mut self, algorithm: Algorithm) -> Self {
        (self.workers, self.host.servers) = (self.ranks(), Servers::EVERY_RANK);
        Self { algorithm, ..self }
    }

    /// The same hosts, each of which has a rank that calls three collectives of two groups in place of one all-reduce; a transpose across
    /// sets, unless [`ClusterPlan::algorithm`] is set to another schedule.
    #[must_use]
    pub fn with_hierarchy(self, hierarchy: Hierarchy) -> Self {
        Self { hierarchy: Some(hierarchy), ..self.with_algorithm(Algorithm::Transpose) }
    }

    /// # Errors
    /// Why it cannot be run.
    pub(super) fn validate(&self) -> Result<(), ClusterError> {
        let (ranks, hosts, buckets) = (self.ranks(), self.topology.hosts(), self.buckets.len());
        if ranks > hosts {
            return Err(ClusterError::TooManyRanks { ranks, hosts });
        }
        if buckets > 1 && (self.is_checked || self.hierarchy.is_some()) {
            return Err(ClusterError::OneBucket { buckets });
        }
        match self.hierarchy {
            Some(hierarchy) if !hierarchy.fits(self.workers) || ranks > self.workers => {
                Err(ClusterError::Sets { set: hierarchy.set, ranks: self.workers })
            }
            Some(_) if self.preset.importance.is_some() => Err(ClusterError::Importance),
            _ => Ok(()),
        }
    }

    /// How long a step takes by the cost model; see [`super::Outcome::modelled_step`].
    pub(super) fn modelled_step(&self) -> Option<Duration> {
        let all = self.workers;
        let time = |bucket: usize| {
            let (bytes, shard) = self.bytes_of(bucket);
            let Some(Hierarchy { set }) = self.hierarchy else {
                return self.network(all).time_of(self.algorithm, bytes, all as u32);
            };
            // A reduce-scatter and an all-gather are the two stages of a transpose.
            let within = self.network(set).time_of(Algorithm::Transpose, bytes, set as u32)?;
            Some(within + self.network(all).time_of(self.algorithm, shard, (all / set) as u32)?)
        };
        (0..self.buckets.len()).map(time).sum()
    }

    /// What the cost model needs to know of the network between ranks that stand side by side, so many of them.
    fn network(&self, ranks: usize) -> AgreedNetwork {
        let LeafSpine { link_delay, host_rate, header_bytes, hosts_per_leaf, .. } = self.topology;
        let datagram = self.host.datagram_bytes as u64;
        let rate = host_rate * chunk_bytes_for(self.host.datagram_bytes) as u64 / (datagram + header_bytes);
        let is_in_leaf = self.hierarchy.is_some() && hosts_per_leaf % ranks == 0;
        let links = if is_in_leaf { LINKS_IN_LEAF } else { LINKS_THERE_AND_BACK };
        AgreedNetwork::lossless(link_delay * links, rate)
    }

    /// Ranks of the connections.
    #[must_use]
    pub fn ranks(&self) -> usize {
        match self.host.servers {
            Servers::Dedicated { count, .. } => self.workers + count as usize,
            _ => self.workers,
        }
    }

    /// Parts that a bucket is cut into.
    #[must_use]
    pub fn shards(&self) -> usize {
        match (self.algorithm, self.host.servers) {
            (Algorithm::ParameterServer, Servers::Dedicated { count, .. }) => count as usize,
            (Algorithm::ParameterServer, Servers::Colocated(count)) => (count as usize).min(self.workers),
            _ => self.workers,
        }
    }

    /// The host of each rank: dedicated servers are spread evenly among the workers.
    #[must_use]
    pub fn hosts(&self) -> Vec<usize> {
        let (ranks, servers) = (self.ranks(), self.ranks() - self.workers);
        let is_server = |host: &usize| (host + 1) * servers / ranks > host * servers / ranks;
        let workers = (0..ranks).filter(|host| !is_server(host));
        workers.chain((0..ranks).filter(is_server)).collect()
    }
}

/// Queues of a port for `classes` classes, as `gradwire switch` makes them: control, the classes with thresholds that rise by
/// half from front to back (MLT section 5.2), others.
#[must_use]
pub fn queues(classes: u64) -> QueueOptions {
    let of_class = |class: u64| Some(THRESHOLD_BYTES * (2 + class) / 2);
    let thresholds = [None].into_iter().chain((0..classes).map(of_class)).chain([None]);
    QueueOptions { buffer_bytes: 512 << 10, thresholds: thresholds.collect() }
}

/// Host, leaf, host.
const LINKS_IN_LEAF: u32 = 4;
/// Host, leaf, spine, leaf, host.
const LINKS_THERE_AND_BACK: u32 = 8;
/// MLT section 6.2.1: 65 packets.
const THRESHOLD_BYTES: u64 = 65 * 1500;
/// What a host hands to its NIC ahead of time: a segmentation-offload call, as the engine does.
const NIC_BYTES: u64 = 64 << 10;
