//! Everything that one run is made of. `draw` makes one from a seed; tests write theirs down.

mod draw;

use crate::plan::{Fault, OpKind, OpPlan};
use crate::{NetworkOptions, Sabotage, Trunk};
use gradwire_collectives::{Algorithm, ExchangePlan, Servers};
use gradwire_core::recovery::ControllerKind;
use gradwire_core::Spray;
use std::fmt;
use std::time::Duration;

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Seed of every chance in the run.
    pub seed: u64,
    /// Ranks that call collectives.
    pub world_size: usize,
    /// Collectives, in the order of submission.
    pub ops: Vec<OpPlan>,
    /// Collectives of one rank in flight at once.
    pub in_flight_max: usize,
    /// When each rank submits its first collective.
    pub start: Vec<Duration>,
    /// Most time between the end of one collective and the submission of the next.
    pub think_max: Duration,
    /// For each rank what it computes on top of that; the last one stands for all that follow.
    pub compute: Vec<Duration>,
    /// What the clock of each rank shows when the run begins; the last one stands for all that follow.
    pub clocks: Vec<Duration>,
    /// The network.
    pub network: NetworkOptions,
    /// Faults by time. The last one is [`Fault::Heal`].
    pub faults: Vec<(Duration, Fault)>,
    /// Settings of the ranks.
    pub host: HostOptions,
    /// Whether the shares of gray and healed paths are judged.
    pub judges_paths: bool,
    /// Deliberate damage that the checkers must find.
    pub sabotage: Sabotage,
}

/// Settings of the ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct HostOptions {
    /// UDP payload bytes of a full datagram.
    pub datagram_bytes: usize,
    /// Eager window.
    pub eager_bytes: u64,
    /// Data packets for each acknowledgement.
    pub ack_every: u32,
    /// Longest that an acknowledgement is held back.
    pub ack_delay_max: Duration,
    /// Rate controller of every connection.
    pub controller: ControllerKind,
    /// Rate before anything was measured, bytes per second.
    pub initial_rate: u64,
    /// Socket buffer of a rank.
    pub socket_bytes: u64,
    /// Bytes that a rank may hand to its NIC ahead of time; `None`: any number.
    pub nic_bytes: Option<u64>,
    /// Most lateness of a timer.
    pub wake_late_max: Duration,
    /// Silence after which a peer is lost.
    pub peer_timeout: Duration,
    /// Paths between each two ranks.
    pub paths: u8,
    /// How packets are spread over them.
    pub spray: Spray,
    /// Most senders that share a receiver in a transpose.
    pub incast: Option<u32>,
    /// Where ranks exchange what they measured.
    pub exchange: ExchangePlan,
    /// Who reduces in an all-reduce over parameter servers.
    pub servers: Servers,
    /// Whether the last rank that calls says that its host has more ranks than cores.
    pub shares_cores: bool,
}

impl Scenario {
    /// A run in which nothing goes wrong: `world_size` equal links.
    #[must_use]
    pub fn quiet(seed: u64, world_size: usize, network: NetworkOptions, ops: Vec<OpPlan>) -> Self {
        Self {
            seed,
            world_size,
            ops,
            in_flight_max: 1,
            start: vec![Duration::ZERO; world_size],
            think_max: Duration::ZERO,
            compute: vec![Duration::ZERO],
            clocks: vec![Duration::ZERO],
            network,
            faults: vec![(Duration::ZERO, Fault::Heal)],
            host: HostOptions::default(),
            judges_paths: false,
            sabotage: Sabotage::Nothing,
        }
    }

    /// The run of a seed.
    #[must_use]
    pub fn swarm(seed: u64) -> Self {
        draw::swarm(seed)
    }

    /// The run of a seed in which paths go bad and heal, and little else goes wrong.
    #[must_use]
    pub fn bad_paths(seed: u64) -> Self {
        draw::bad_paths(seed)
    }

    /// Whether the network gives no reason to lose anything: then nothing may be lost (overflowing buffers are
    /// counted by the network and looked at afterwards).
    #[must_use]
    pub fn is_undisturbed(&self) -> bool {
        let only_heals = self.faults.iter().all(|(_, fault)| *fault == Fault::Heal);
        let paths_lose = self.network.paths.iter().any(|path| path.loss > 0.0);
        self.network.impairments.are_harmless() && !paths_lose && only_heals
    }

    /// The rank that crashes, if one does.
    #[must_use]
    pub fn crashes(&self) -> Option<usize> {
        self.faults.iter().find_map(|(_, fault)| match fault {
            Fault::Crash(rank) => Some(*rank),
            _ => None,
        })
    }

    /// Parameter servers.
    #[must_use]
    pub fn server_count(&self) -> usize {
        match self.host.servers {
            Servers::Colocated(count) => (count as usize).clamp(1, self.world_size),
            Servers::Dedicated { count, .. } => count as usize,
            _ => 1,
        }
    }

    /// Ranks of the network: dedicated servers are numbered behind those that call.
    #[must_use]
    pub fn ranks(&self) -> usize {
        match self.host.servers {
            Servers::Dedicated { count, .. } => self.world_size + count as usize,
            _ => self.world_size,
        }
    }

    /// What `rank` computes after each collective.
    #[must_use]
    pub fn compute_of(&self, rank: usize) -> Duration {
        nth(&self.compute, rank)
    }

    /// What the slowest rank computes after each collective.
    #[must_use]
    pub fn longest_compute(&self) -> Duration {
        self.compute.iter().max().copied().unwrap_or_default()
    }

    /// What the clock of `rank` shows when the run begins.
    #[must_use]
    pub fn clock_of(&self, rank: usize) -> Duration {
        nth(&self.clocks, rank)
    }

    /// Whether a rank is silent for so long, or two ranks cannot hear each other for so long, that one may be taken for
    /// lost. Heartbeats may be lost too, so half of the peer timeout is enough. One bad path is no reason.
    #[must_use]
    pub fn may_fail(&self) -> bool {
        let silences = self.faults.iter().map(|(_, fault)| fault);
        let silences = silences.filter(|fault| !matches!(fault, Fault::GrayPath(..)));
        let silent: Duration = silences.map(Fault::length).sum();
        self.crashes().is_some() || silent >= self.host.peer_timeout / 2
    }

    /// Whether `rank` may say that `lost` is lost: it crashed, it stood still or was cut off for too long, or `rank`
    /// itself was, and cannot know what the others did meanwhile.
    #[must_use]
    pub fn may_accuse(&self, rank: usize, lost: usize) -> bool {
        let concerns = |fault: &Fault| match *fault {
            Fault::Pause(who, _) | Fault::Suspend(who, _) => who == lost || who == rank,
            Fault::Partition(a, b, _) => a == lost || b == lost,
            Fault::Crash(who) => who == lost,
            Fault::ClockJump(..) | Fault::GrayPath(..) | Fault::Heal => false,
        };
        self.may_fail() && self.faults.iter().any(|(_, fault)| concerns(fault))
    }

    /// When every survivor must know of a crash. What the dead rank had sent may still be in queues.
    #[must_use]
    pub fn verdict_bound(&self) -> Option<Duration> {
        let crash = self.faults.iter().find(|(_, fault)| matches!(fault, Fault::Crash(_)))?;
        let queues: f64 = (0..self.ranks())
            .map(|rank| self.network.link(rank))
            .map(|link| link.buffer_bytes as f64 / link.down_rate as f64)
            .fold(0.0, f64::max);
        let trunk = self.network.trunk.map_or(0.0, |trunk| trunk.buffer_bytes as f64 / trunk.rate as f64);
        let under_way = Duration::from_secs_f64(queues + trunk) + self.network.longest_rtt(self.ranks());
        Some(crash.0 + self.host.peer_timeout + under_way + self.host.wake_late_max * 2 + VERDICT_SLACK)
    }

    /// When the faults are over.
    #[must_use]
    pub fn healed_at(&self) -> Duration {
        self.faults.iter().map(|(at, fault)| *at + fault.length()).max().unwrap_or_default()
    }

    /// Time that the padded hellos of all pairs, there and back, take on the narrowest link.
    #[must_use]
    pub fn hello_time(&self) -> Duration {
        let time = |pairs: usize, rate: u64| (pairs * 2 * self.host.datagram_bytes) as f64 / rate as f64;
        let hosts = time(self.ranks() - 1, self.network.narrowest_rate(self.ranks()));
        let joined = |trunk: &Trunk| trunk.first_rack * (self.ranks() - trunk.first_rack);
        let trunk = self.network.trunk.map_or(0.0, |trunk| time(joined(&trunk), trunk.rate));
        Duration::from_secs_f64(hosts.max(trunk))
    }

    /// Round trips that the steps of all collectives wait for each other, when nothing is lost.
    #[must_use]
    pub fn rounds_time(&self) -> Duration {
        let others = (self.world_size as u32).max(2) - 1;
        let rounds = |op: &OpPlan| match op.kind {
            OpKind::AllReduce(Algorithm::Transpose) => {
                2 * others.div_ceil(self.host.incast.unwrap_or(others))
            }
            OpKind::AllReduce(Algorithm::ParameterServer) => 2,
            OpKind::AllReduce(_) => 2 * others,
            _ => 1,
        };
        self.network.longest_rtt(self.ranks()) * self.ops.iter().map(rounds).sum::<u32>()
    }

    /// Time that the payload of all collectives takes on the narrowest link when each rank sends all of it twice:
    /// the yardstick of the liveness bound.
    #[must_use]
    pub fn ideal_time(&self) -> Duration {
        let rows = |op: &OpPlan| match op.kind {
            // A server receives from everybody, and sends to everybody, what each rank has of its shard.
            OpKind::AllReduce(Algorithm::ParameterServer) => {
                2 * self.world_size.div_ceil(self.server_count())
            }
            OpKind::AllReduce(_) | OpKind::SendReceive { .. } => 2,
            _ => 2 * self.world_size,
        };
        let bytes = self.ops.iter().map(|op| op.sent_bytes() * rows(op)).sum::<usize>() as f64;
        let hosts = bytes / self.network.narrowest_rate(self.ranks()) as f64;
        // Half of the ranks send to the other rack at once.
        let sharing = self.ranks().div_ceil(2) as f64;
        let trunk = self.network.trunk.map_or(0.0, |trunk| bytes * sharing / trunk.rate as f64);
        let rtt = self.network.longest_rtt(self.ranks());
        Duration::from_secs_f64(hosts.max(trunk)) + rtt * self.ops.len() as u32
    }
}

fn nth(of_each: &[Duration], rank: usize) -> Duration {
    let last = of_each.len().saturating_sub(1);
    of_each.get(rank.min(last)).copied().unwrap_or_default()
}

/// For pings that were lost and timers that come late.
const VERDICT_SLACK: Duration = Duration::from_millis(100);

impl Default for HostOptions {
    /// The engine's defaults.
    fn default() -> Self {
        Self {
            datagram_bytes: 1472,
            eager_bytes: 256 << 10,
            ack_every: 10,
            ack_delay_max: Duration::from_micros(250),
            controller: ControllerKind::default(),
            paths: 1,
            initial_rate: 125_000_000,
            socket_bytes: 4 << 20,
            nic_bytes: None,
            wake_late_max: Duration::ZERO,
            peer_timeout: Duration::from_secs(5),
            spray: Spray::Adaptive,
            incast: None,
            exchange: ExchangePlan::DEFAULT,
            servers: Servers::EVERY_RANK,
            shares_cores: false,
        }
    }
}

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {} · {} ranks · {} in flight", self.seed, self.world_size, self.in_flight_max)?;
        writeln!(f, "  start {:?} · think up to {:?}", self.start, self.think_max)?;
        writeln!(f, "  compute {:?} · clocks {:?}", self.compute, self.clocks)?;
        writeln!(f, "  network {:?}", self.network)?;
        writeln!(f, "  host {:?}", self.host)?;
        for (at, fault) in &self.faults {
            writeln!(f, "  at {at:?}: {fault:?}")?;
        }
        for (index, op) in self.ops.iter().enumerate() {
            writeln!(f, "  op {index}: {op:?}")?;
        }
        if self.sabotage != Sabotage::Nothing {
            writeln!(f, "  SABOTAGE {:?}", self.sabotage)?;
        }
        Ok(())
    }
}
