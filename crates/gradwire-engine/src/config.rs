//! Settings of an engine: what the process decides about its socket, and the transport's starting values.

use crate::{ChaosConfig, EngineError, JobSecret, Security};
use gradwire_collectives::Host;
use gradwire_core::recovery::ControllerKind;
use gradwire_core::{Spray, CLASSES_MAX, PATHS_MAX};
use std::time::Duration;

/// Whether kernel offloads (segmentation, coalescing on receive, batched system calls) are used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Offload {
    /// Where the kernel, and the filter of a sandbox, has them: batched system calls too.
    #[default]
    Auto,
    /// Never: one system call for each datagram.
    Off,
}

/// A setting that may be left to the engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Choice {
    /// As the field says.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl Choice {
    /// As settings write it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// What a lost rank means for the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnPeerLoss {
    /// The group ends, with the same error on all of them.
    #[default]
    Raise,
    /// A majority goes on without it.
    Continue,
}

/// Settings of an [`crate::Engine`]. All have defaults; [`EngineConfig::validate`] says which values are allowed.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// UDP port; 0 lets the kernel choose one.
    pub port: u16,
    /// Which local addresses are used: a comma-separated list of interface names (`eth0`), addresses
    /// (`10.0.0.4`) and networks (`10.0.0.0/8`); with `^` in front everything else. Empty, or with `^`: neither loopback, which
    /// then serves ranks in the same network namespace, nor bridges of containers, nor link-local addresses. Of IPv4 those may be named, or an
    /// interface that has no others; so may a further address of the loopback interface. All addresses are bound, so that ranks of one host meet
    /// over loopback, but where one is left that was named as an address or is on the loopback interface: that one alone.
    pub interface: String,
    /// Largest IP packet in bytes, the interface's MTU. `None`: that of the interface, at most 9000.
    pub mtu: Option<usize>,
    /// Bytes that may be sent to a peer before it has asked for them. Equal on all ranks.
    pub eager_bytes: u64,
    /// Data packets for each acknowledgement; nine times as many that left at one moment. Equal on all ranks.
    pub ack_every: u32,
    /// Longest that an acknowledgement is held back where packets come fast. Equal on all ranks.
    pub ack_delay_max: Duration,
    /// Rate controller of every connection. Equal on all ranks, or flows that meet would not share fairly.
    pub controller: ControllerKind,
    /// Rate at which a fresh connection starts, bytes per second.
    pub initial_rate: u64,
    /// Longest silence after which a peer is lost: less where it was always punctual. Equal on all ranks.
    pub peer_timeout: Duration,
    /// What a lost rank means for the others. Equal on all ranks.
    pub on_peer_loss: OnPeerLoss,
    /// Longest that [`crate::PendingGroup::join`] waits when it is given no timeout.
    pub connect_timeout: Duration,
    /// Differentiated-services code point of everything that is sent, 0 to 63, unless the next three say otherwise.
    pub dscp: u8,
    /// Code point of each class of data, the most urgent first; empty: all have `dscp`.
    pub dscp_classes: Vec<u8>,
    /// So many queues for classes of data the network has, the most urgent first; 0 or 1: they overtake each other nowhere.
    pub class_queues: u8,
    /// Code point of acknowledgements and other control packets; `None`: `dscp`.
    pub dscp_control: Option<u8>,
    /// Packets that a switch should keep are ECN-capable. No rate reacts to congestion marks: only for switches that are
    /// configured to drop what is not ECN-capable first.
    pub ecn: bool,
    /// Kernel offloads.
    pub offload: Offload,
    /// How many steps of niceness the network thread is more urgent than the thread that starts the engine, where the system
    /// allows it (`CAP_SYS_NICE`, `RLIMIT_NICE`).
    pub urgency: u8,
    /// Longest time for which the network thread looks for packets again before it sleeps, where packets have come at shorter
    /// intervals; zero: it always sleeps.
    pub busy_poll: Duration,
    /// Whether the network thread lets other threads of its core go first, and looks for packets again, before it sleeps; such a thread
    /// looks instead of sleeping for less than 20 us. Unasked where a group has more ranks on this host than this process may use cores.
    pub give_way: Choice,
    /// Whether the network thread stays on one core, the n-th of those that it may use for the n-th rank on this host. Unasked where the
    /// ranks of a group on this host are as many as its cores, all of which this process may use.
    pub own_core: Choice,
    /// Whether a second thread hands what is large to the kernel, while the network thread receives. Unasked where this host has two cores
    /// for each rank of a group that is on it. Takes the kernel's offloads.
    pub send_thread: Choice,
    /// Network threads, 1 to 8, each with a port and a socket of its own, between which large calls are divided. A group uses the least of
    /// its ranks. `None`: one for each two cores that this process may use, at most four, used no more than each rank on a host has cores, only
    /// on links faster than 2.5 Gbit/s and in groups of up to 128 ranks. Not in groups that go on without lost ranks or have dedicated servers.
    pub network_threads: Option<u8>,
    /// Paths over which packets to each peer are spread, 1 to 16: each sends from a UDP port of its own, and through
    /// another interface where several lead to the peer. A group uses the least of its ranks.
    pub paths: u8,
    /// How packets are spread.
    pub spray: Spray,
    /// Most ranks that send to one receiver at once in a transpose all-reduce; `None`: all. Equal on all ranks.
    pub incast: Option<u32>,
    /// Faults that are done to what this process receives; `None`: none.
    pub chaos: Option<ChaosConfig>,
    /// Ranks that are parameter servers, where an all-reduce is scheduled over such; `None`: all. Equal on all ranks.
    pub servers: Option<u32>,
    /// Whether datagrams are sealed. Equal on all ranks.
    pub security: Security,
    /// What keys come from, the same on all ranks. `None`: rank 0 of each group makes one and publishes it in its record, so
    /// that whoever reads the store can join.
    pub secret: Option<JobSecret>,
    /// Digest of settings of the layers above that must be equal on all ranks.
    pub fingerprint: u64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            port: 0,
            interface: String::new(),
            mtu: None,
            eager_bytes: 256 << 10,
            ack_every: 10,
            // A quarter of the time that a flow may stand in queues. On slow links more saves processor time
            // (docs/benchmarks-earlier.md); what it does elsewhere was not measured.
            ack_delay_max: Duration::from_micros(250),
            controller: ControllerKind::default(),
            initial_rate: 125_000_000,
            peer_timeout: Duration::from_secs(10),
            on_peer_loss: OnPeerLoss::Raise,
            connect_timeout: Duration::from_secs(60),
            dscp: 0,
            dscp_classes: Vec::new(),
            class_queues: 0,
            dscp_control: None,
            ecn: false,
            offload: Offload::Auto,
            urgency: 0,
            busy_poll: Duration::ZERO,
            give_way: Choice::Auto,
            own_core: Choice::Auto,
            send_thread: Choice::Auto,
            network_threads: None,
            paths: 1,
            spray: Spray::Adaptive,
            incast: None,
            chaos: None,
            servers: None,
            security: Security::Auto,
            secret: None,
            fingerprint: 0,
        }
    }
}

/// Smallest MTU: what every IPv4 link must carry.
pub(crate) const MTU_MIN: usize = 576;
/// Smallest datagram: what is left of that beside the headers of IPv6 and UDP.
pub(crate) const DATAGRAM_BYTES_MIN: usize = MTU_MIN - 48;
/// Largest MTU: an IPv4 packet.
const MTU_MAX: usize = 65_535;
/// As long as a time slice: a thread that looks for longer takes a core from those that compute.
const BUSY_POLL_MAX: Duration = Duration::from_millis(1);

impl EngineConfig {
    /// Checks every field.
    ///
    /// # Errors
    /// [`EngineError::ConfigInvalid`] with the first field that is out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        if let Some(mtu) = self.mtu {
            require("mtu", mtu, "576 to 65535 bytes", (MTU_MIN..=MTU_MAX).contains(&mtu))?;
        }
        require("eager_bytes", self.eager_bytes, "at most 1 GiB", self.eager_bytes <= 1 << 30)?;
        require("ack_every", self.ack_every, "1 to 1000 packets", (1..=1_000).contains(&self.ack_every))?;
        let second = Duration::from_secs(1);
        require_time("ack_delay_max", self.ack_delay_max, "at most 1 s", self.ack_delay_max <= second)?;
        let rate = self.initial_rate;
        require("initial_rate", rate, "at least 10000 bytes per second", rate >= 10_000)?;
        let hour = Duration::from_secs(3_600);
        let silence = self.peer_timeout;
        let range = Duration::from_millis(100)..=hour;
        require_time("peer_timeout", silence, "100 ms to 1 hour", range.contains(&silence))?;
        let connect = self.connect_timeout;
        require_time("connect_timeout", connect, "10 ms to 1 day", range_of_connect().contains(&connect))?;
        require_time("busy_poll", self.busy_poll, "at most 1 ms", self.busy_poll <= BUSY_POLL_MAX)?;
        let threads = self.network_threads;
        let valid = threads.is_none_or(|threads| (1..=Host::THREADS_MAX).contains(&threads));
        require("network_threads", format!("{threads:?}"), "1 to 8 threads", valid)?;
        require("paths", self.paths, "1 to 16", (1..=PATHS_MAX).contains(&self.paths))?;
        require("incast", format!("{:?}", self.incast), "at least 1 rank", self.incast != Some(0))?;
        require("servers", format!("{:?}", self.servers), "at least 1 rank", self.servers != Some(0))?;
        require("dscp", self.dscp, "0 to 63", self.dscp < 64)?;
        let classes = &self.dscp_classes;
        let valid = classes.len() <= CLASSES_MAX && classes.iter().all(|code_point| *code_point < 64);
        require("dscp_classes", format!("{classes:?}"), "up to 8 values of 0 to 63", valid)?;
        let queues = self.class_queues;
        require(
            "class_queues",
            queues,
            "one for each of dscp_classes at most",
            usize::from(queues) <= classes.len(),
        )?;
        let control = self.dscp_control.unwrap_or(0);
        require("dscp_control", control, "0 to 63", control < 64)?;
        let Some(chaos) = self.chaos else { return Ok(()) };
        let valid = chaos.shares().iter().all(|share| (0.0..=0.9).contains(share));
        let valid = valid && chaos.delay <= Duration::from_secs(10);
        require(
            "chaos",
            chaos,
            "loss, tail, corrupt and duplicate of 0 to 90 %, a delay of at most 10 s",
            valid,
        )
    }
}

fn range_of_connect() -> std::ops::RangeInclusive<Duration> {
    Duration::from_millis(10)..=Duration::from_secs(86_400)
}

fn require(
    field: &'static str,
    value: impl std::fmt::Display,
    allowed: &'static str,
    holds: bool,
) -> Result<(), EngineError> {
    if holds {
        return Ok(());
    }
    Err(EngineError::ConfigInvalid { field, value: value.to_string(), allowed })
}

fn require_time(
    field: &'static str,
    value: Duration,
    allowed: &'static str,
    holds: bool,
) -> Result<(), EngineError> {
    require(field, format!("{value:?}"), allowed, holds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_valid() {
        assert_eq!(EngineConfig::default().validate(), Ok(()));
    }

    #[test]
    fn an_invalid_field_is_named_with_its_value_and_range() {
        let config = EngineConfig { dscp: 64, ..EngineConfig::default() };
        let error = config.validate().unwrap_err();
        assert_eq!(error.to_string(), "dscp = 64 is not allowed: 0 to 63");
        let (chaos, hour) = (ChaosConfig::default(), Duration::from_secs(3_600));
        for config in [
            EngineConfig { mtu: Some(100), ..EngineConfig::default() },
            EngineConfig { ack_every: 0, ..EngineConfig::default() },
            EngineConfig { busy_poll: Duration::from_millis(2), ..EngineConfig::default() },
            EngineConfig { initial_rate: 0, ..EngineConfig::default() },
            EngineConfig { dscp_classes: vec![64], ..EngineConfig::default() },
            EngineConfig { dscp_classes: vec![0; 9], ..EngineConfig::default() },
            EngineConfig { dscp_control: Some(64), ..EngineConfig::default() },
            EngineConfig { network_threads: Some(0), ..EngineConfig::default() },
            EngineConfig { network_threads: Some(9), ..EngineConfig::default() },
            EngineConfig { paths: 0, ..EngineConfig::default() },
            EngineConfig { incast: Some(0), ..EngineConfig::default() },
            EngineConfig { servers: Some(0), ..EngineConfig::default() },
            EngineConfig { paths: 17, ..EngineConfig::default() },
            EngineConfig { chaos: Some(ChaosConfig { loss: 0.91, ..chaos }), ..EngineConfig::default() },
            EngineConfig { chaos: Some(ChaosConfig { corrupt: 1.0, ..chaos }), ..EngineConfig::default() },
            EngineConfig { chaos: Some(ChaosConfig { duplicate: -0.1, ..chaos }), ..EngineConfig::default() },
            EngineConfig { chaos: Some(ChaosConfig { tail: f64::NAN, ..chaos }), ..EngineConfig::default() },
            EngineConfig { chaos: Some(ChaosConfig { delay: hour, ..chaos }), ..EngineConfig::default() },
            EngineConfig { peer_timeout: Duration::ZERO, ..EngineConfig::default() },
            EngineConfig { connect_timeout: Duration::ZERO, ..EngineConfig::default() },
        ] {
            assert!(matches!(config.validate(), Err(EngineError::ConfigInvalid { .. })), "{config:?}");
        }
    }
}
