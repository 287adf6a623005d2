//! One UDP port and one network thread for each process, with a thread beside it that sends where cores abound.

use crate::config::MTU_MIN;
use crate::cores::Cores;
use crate::driver::Driver;
use crate::group::ANSWER_MAX;
use crate::handle::Closing;
use crate::interfaces::Selection;
use crate::place::Place;
use crate::rendezvous::Local;
use crate::shared::{Command, Shared};
use crate::socket::{BindOptions, BoundPaths, Descriptor, PathSockets, DATAGRAM_BYTES_MAX};
use crate::{
    interfaces, news, Choice, Completions, DedicatedServers, EngineConfig, EngineError, EngineStats,
    Features, OnPeerLoss, OsError, PendingGroup,
};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// IP packet between ranks of one network namespace, unless the user asks for another: two fill what offload carries through
/// loopback at once. Measured: a tenth less processor time than with 9000 bytes; larger ones cost no less, and a receive
/// buffer holds so few that some are lost.
const MTU_LOCAL: usize = 32_768;
/// The same where faults are injected: what one loss takes is about what it takes on a network.
const MTU_LOCAL_CHAOS: usize = 9_000;
/// Network threads where nobody says how many. Sealed traffic needs three to keep up with TCP in clear, where each has a core of its own (docs/performance.md).
pub const THREADS_UNASKED_MAX: usize = 4;
/// As many ports are looked at by the processes of a host that nobody has told which one they are.
pub const LANE_PORTS_APART: usize = 64;
/// Where ranks have their ports unless they are told (`PORT_BASE` of the Python package).
pub const PORT_UNASKED: u16 = 47_400;
/// Names of network threads: the first, and those beside it.
const THREAD: &str = "gradwire-net";
const LANE_THREAD: &str = "gradwire-lane";

/// Near which port the other ranks of the host have theirs. Who has any port, such as a server beside them, knows no better than the default.
fn port_of_ranks(config: &EngineConfig) -> u16 {
    if config.port == 0 {
        PORT_UNASKED
    } else {
        config.port
    }
}

/// One process's part of all its groups. Clones refer to the same engine; it stops when [`Engine::stop`] is called or
/// the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Engine(Arc<Running>);

struct Running {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// With the network threads beside the first.
    further: Vec<Engine>,
}

/// What all network threads of an engine have in common.
struct Common {
    /// Of their clocks.
    origin: Instant,
    completions: Completions,
    closing: Arc<Closing>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("features", &self.shared.features).finish_non_exhaustive()
    }
}

impl Engine {
    /// Binds the port, probes the kernel's features and starts the network thread.
    ///
    /// # Errors
    /// [`EngineError`]: invalid settings, port in use, no usable interface.
    pub fn start(config: EngineConfig) -> Result<Self, EngineError> {
        config.validate()?;
        let completions = Completions::default();
        let closing = Arc::new(Closing(completions.clone()));
        let common = Common { origin: Instant::now(), completions, closing };
        let threads = config.network_threads.map_or_else(threads_unasked, usize::from);
        // Who goes on without lost ranks divides nothing.
        let threads = if config.on_peer_loss == OnPeerLoss::Continue { 1 } else { threads };
        let is_asked = config.network_threads.is_some();
        let mut first = Self::start_one(config.clone(), (THREAD, &common), port_of_ranks(&config))?;
        for number in 1..threads {
            match Self::start_lane(&config, &common, number) {
                Ok(lane) => first.further.push(Self(Arc::new(lane))),
                Err(error) if is_asked => return Err(error),
                // Nobody asked for what the system does not have.
                Err(_) => break,
            }
        }
        let started = Self(Arc::new(first));
        let features = &started.0.shared.features;
        news::started(started.local_port(), &features.addresses, features.chaos.as_deref());
        Ok(started)
    }

    /// A further network thread. Its port is as many behind the first's as there may be ranks on a host, so that it is none of theirs and a firewall
    /// can be told, or, if that is taken, any.
    fn start_lane(config: &EngineConfig, common: &Common, number: usize) -> Result<Running, EngineError> {
        let offset = u16::try_from(number * LANE_PORTS_APART).unwrap_or(u16::MAX);
        let port = if config.port == 0 { None } else { config.port.checked_add(offset) };
        let lane = EngineConfig {
            port: port.unwrap_or(0),
            own_core: Choice::Off,
            send_thread: Choice::Off,
            network_threads: Some(1),
            ..config.clone()
        };
        let any_port = EngineConfig { port: 0, ..lane.clone() };
        let (name, near) = ((LANE_THREAD, common), port_of_ranks(config));
        Self::start_one(lane, name, near).or_else(|error| match error {
            EngineError::PortInUse { .. } => Self::start_one(any_port, name, near),
            error => Err(error),
        })
    }

    /// One network thread. For what the kernel chooses see [`BindOptions::not_near`].
    fn start_one(
        config: EngineConfig,
        (thread, common): (&str, &Common),
        not_near: u16,
    ) -> Result<Running, EngineError> {
        let selection = interfaces::select(&config.interface, &interfaces::list()?)?;
        let mtu = mtu_of(&config, &selection)?;
        let (port, dscp, offload) = (config.port, config.dscp, config.offload);
        let sources = selection.sources.clone();
        let options = BindOptions {
            address: selection.bind,
            home: selection.home,
            port,
            not_near,
            sources,
            dscp,
            offload,
        };
        let BoundPaths { first: bound, further, ports } = PathSockets::bind(&options, config.paths)?;
        if let (true, None, Some(wider)) = (thread == THREAD, config.mtu, &selection.much_wider) {
            news::narrow((&selection.narrowest, selection.mtu), (&wider.0, wider.1));
        }
        let overhead = if selection.bind.is_ipv6() { 40 + 8 } else { 20 + 8 };
        let mtu_local = if config.chaos.is_some() { MTU_LOCAL_CHAOS } else { MTU_LOCAL };
        let payload = |mtu: usize| mtu.saturating_sub(overhead).min(DATAGRAM_BYTES_MAX);
        let local = Local {
            place: Place::here(),
            port: bound.port,
            source_ports: ports.clone(),
            bind: selection.bind,
            addresses: selection.addresses.clone(),
            sources: if bound.batched_calls { selection.sources.clone() } else { Vec::new() },
            loopback: selection.loopback,
            datagram_bytes: payload(mtu),
            datagram_bytes_local: payload(config.mtu.unwrap_or(mtu_local)),
            receive_buffer_bytes: bound.receive_buffer_bytes as u64,
            cores: Cores::read(),
            config,
        };
        let features = Features {
            chaos: local.config.chaos.map(|chaos| chaos.to_string()),
            gso: bound.gso,
            gro: bound.gro,
            traffic_class: bound.traffic_class,
            batched_calls: bound.batched_calls,
            receive_buffer_bytes: bound.receive_buffer_bytes,
            send_buffer_bytes: bound.send_buffer_bytes,
            datagram_bytes: local.datagram_bytes,
            datagram_bytes_local: local.datagram_bytes_local,
            addresses: selection.addresses.iter().map(ToString::to_string).collect(),
            source_ports: ports,
        };
        let descriptors = std::iter::once(&bound.socket).chain(&further);
        let descriptors = descriptors.filter_map(|socket| Descriptor::of(socket.fd())).collect();
        let features = (features, descriptors);
        let shared = Arc::new(Shared::new(local, features, (common.origin, common.completions.clone()))?);
        let (for_thread, closing) = (Arc::clone(&shared), Arc::clone(&common.closing));
        let thread = std::thread::Builder::new()
            .name(thread.to_owned())
            .spawn(move || {
                Driver::run_thread(for_thread, bound.socket, further);
                drop(closing);
            })
            .map_err(|error| EngineError::Io {
                what: "starting the network thread (the limit of processes and threads, `ulimit -u` or pids.max, may be reached: raise it)",
                source: OsError(error.raw_os_error().unwrap_or(0)),
            })?;
        Ok(Running { shared, thread: Mutex::new(Some(thread)), further: Vec::new() })
    }

    /// Prepares this process's part of a group: connection ids and the record that its peers need.
    ///
    /// # Errors
    /// [`EngineError::RankInvalid`], [`EngineError::ConnectionIdsUsedUp`], [`EngineError::Forked`].
    pub fn new_group(&self, rank: u32, world_size: u32, name: &str) -> Result<PendingGroup, EngineError> {
        let pending = PendingGroup::new(&self.0.shared, rank, (world_size, None), name)?;
        pending.with_lanes(self.0.further.iter().map(|engine| &engine.0.shared))
    }

    /// As [`Engine::new_group`], of `world_size` workers and dedicated parameter servers behind them: server `j` is rank
    /// `world_size + j`. It only waits ([`crate::GroupHandle::wait_for_workers`]).
    ///
    /// # Errors
    /// [`EngineError::RankInvalid`], [`EngineError::ConnectionIdsUsedUp`], [`EngineError::Forked`].
    pub fn new_served_group(
        &self,
        rank: u32,
        world_size: u32,
        servers: DedicatedServers,
        name: &str,
    ) -> Result<PendingGroup, EngineError> {
        PendingGroup::new(&self.0.shared, rank, (world_size, Some(servers)), name)
    }

    /// The queue of ended operations.
    #[must_use]
    pub fn completions(&self) -> Completions {
        self.0.shared.completions.clone()
    }

    /// The bound port.
    #[must_use]
    pub fn local_port(&self) -> u16 {
        self.0.shared.local.port
    }

    /// The bound port of each network thread, the first one's first.
    #[must_use]
    pub fn thread_ports(&self) -> Vec<u16> {
        let further = self.0.further.iter().map(Self::local_port);
        std::iter::once(self.local_port()).chain(further).collect()
    }

    /// Cores that this process may use, and those of its host; where nobody can count those, `usize::MAX`.
    #[must_use]
    pub fn cores(&self) -> (usize, usize) {
        let cores = &self.0.shared.local.cores;
        (cores.of_process, cores.of_host)
    }

    /// What the kernel granted.
    #[must_use]
    pub fn features(&self) -> Features {
        self.0.shared.features.clone()
    }

    /// Counters of the socket and the network thread.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`].
    pub fn stats(&self) -> Result<EngineStats, EngineError> {
        let (stats, wait) = channel();
        self.0.shared.send(Command::EngineStats { stats })?;
        let mut stats = wait.recv_timeout(ANSWER_MAX).map_err(|_| self.0.shared.stopped_error())?;
        for engine in &self.0.further {
            // One that has ended by a bug has told the groups that it had parts of.
            if let Ok(more) = engine.stats() {
                stats.add(&more);
            }
        }
        Ok(stats)
    }

    /// For a forked child of the process that started it, which cannot use it: closes the child's copies of its sockets, so that the ports are
    /// free as soon as the parent has ended. Elsewhere it does nothing; again it does nothing.
    pub fn let_go_in_child(&self) {
        self.0.shared.let_go_in_child();
        self.0.further.iter().for_each(Self::let_go_in_child);
    }

    /// Leaves every group (at most about half a second), ends what is in flight with
    /// [`gradwire_collectives::OpError::ShutDown`] and joins the network thread. Later calls do nothing; in a forked child
    /// it does nothing.
    pub fn stop(&self) {
        self.0.end(|| Command::Stop);
    }

    /// Ends the network thread without a word to the peers, as a killed process would. For tests of failure handling.
    #[doc(hidden)]
    pub fn crash(&self) {
        self.0.end(|| Command::Crash);
    }
}

impl Running {
    fn end(&self, command: fn() -> Command) {
        if self.shared.check_process().is_err() {
            return;
        }
        // All say goodbye at the same time.
        self.further.iter().for_each(|engine| _ = engine.0.shared.send(command()));
        self.join(command());
        self.further.iter().for_each(|engine| engine.0.join(command()));
    }

    fn join(&self, command: Command) {
        let thread = crate::handle::lock(&self.thread).take();
        // It may have ended by itself; joining is right then too. One that sleeps and cannot be woken is left alone.
        let is_left = matches!(self.shared.send(command), Err(EngineError::Io { .. }));
        // The last handle may be dropped by the network thread itself, with the memory of an operation.
        let is_other = |thread: &JoinHandle<()>| thread.thread().id() != std::thread::current().id();
        if let Some(thread) = thread.filter(|thread| !is_left && is_other(thread)) {
            // The thread catches its own panics and reports them as the cause of `Stopped`.
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end(|| Command::Stop);
        if self.shared.check_process().is_err() {
            // The thread is the parent's: what would be detached here is a stack of which the system's library may have made another thread's,
            // or which is not there any more. No lock is taken, which the fork may have copied held.
            let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
            std::mem::forget(thread);
        }
    }
}

/// Largest IP packet towards other hosts.
///
/// # Errors
/// [`EngineError::ConfigInvalid`]: the interface's is too small, and nobody has asked for another.
fn mtu_of(config: &EngineConfig, selection: &Selection) -> Result<usize, EngineError> {
    let mtu = config.mtu.unwrap_or(selection.mtu);
    if mtu >= MTU_MIN {
        return Ok(mtu);
    }
    let value = format!("{mtu} (of {})", selection.narrowest);
    Err(EngineError::ConfigInvalid {
        field: "mtu",
        value,
        allowed: "576 to 65535 bytes; leave that interface out, or make its MTU larger",
    })
}

/// One for each two cores that the process may use; each group looks at how many ranks share them.
fn threads_unasked() -> usize {
    (Cores::read().of_process / 2).clamp(1, THREADS_UNASKED_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_one_host_meet_over_loopback_though_an_interface_is_named() {
        let found = interfaces::list().expect("there are interfaces");
        let Some(card) = found.iter().find(|i| !i.loopback && i.address.is_ipv4()) else { return };
        let are_local = |interface: &str| {
            let interface = interface.to_owned();
            let config = EngineConfig { interface, network_threads: Some(1), ..EngineConfig::default() };
            let engines = [0, 1].map(|_| Engine::start(config.clone()).expect("it starts"));
            let pending = [0, 1].map(|rank| engines[rank as usize].new_group(rank, 2, "g").expect("valid"));
            let records: Vec<crate::rendezvous::Record> = pending
                .iter()
                .map(|group| serde_json::from_str(&group.record()).expect("a record"))
                .collect();
            assert!(records.iter().all(|record| record.addresses.contains(&card.address)));
            crate::rendezvous::are_local(&records)
        };
        assert!(are_local(&card.name) && are_local(""));
        assert!(!are_local(&card.address.to_string()), "who names the address has it alone");
    }

    #[test]
    fn an_interface_with_too_small_an_mtu_is_named_unless_another_was_asked_for() {
        let selection = Selection {
            bind: std::net::Ipv4Addr::UNSPECIFIED.into(),
            home: None,
            addresses: Vec::new(),
            sources: Vec::new(),
            loopback: true,
            mtu: 296,
            narrowest: "sl0".to_owned(),
            much_wider: None,
        };
        let error = mtu_of(&EngineConfig::default(), &selection).unwrap_err().to_string();
        assert!(error.starts_with("mtu = 296 (of sl0) is not allowed: 576 to 65535 bytes"), "{error}");
        let asked = EngineConfig { mtu: Some(1_400), ..EngineConfig::default() };
        assert_eq!(mtu_of(&asked, &selection), Ok(1_400));
        assert_eq!(mtu_of(&EngineConfig::default(), &Selection { mtu: 576, ..selection }), Ok(576));
    }
}
