//! `Engine`, `PendingGroup` and `Group`: the process's socket and its groups.

use crate::call::Call;
use crate::errors::{config_error, engine_error, invalid_request, join_error, op_error};
use crate::kept::{self, KeptByGroup};
use crate::op::{NativeOp, SIGNAL_INTERVAL};
use gradwire_engine::core::recovery::ControllerKind;
use gradwire_engine::{
    ChaosConfig, Choice, Completions, DedicatedServers, Engine, EngineConfig, GroupHandle, JobSecret,
    JoinError, Offload, OnPeerLoss, PendingGroup, Security, ShareHistogram, Spray, TimeHistogram,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// One UDP port and one network thread.
#[pyclass(name = "Engine", frozen, module = "gradwire._native")]
pub(crate) struct NativeEngine {
    engine: Engine,
    completions: Completions,
}

#[pymethods]
impl NativeEngine {
    /// Binds the port and starts the network thread. `settings`: fields of the Rust `EngineConfig`; times in seconds with
    /// the suffix `_s`.
    #[new]
    fn new(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = engine_config(py, settings)?;
        let engine = py.detach(|| Engine::start(config)).map_err(|e| engine_error(py, &e))?;
        let completions = engine.completions();
        Ok(Self { engine, completions })
    }

    /// Prepares this process's part of a group.
    fn new_group(
        &self,
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        name: &str,
    ) -> PyResult<NativePendingGroup> {
        kept::release(py);
        let pending = self.engine.new_group(rank, world_size, name).map_err(|e| engine_error(py, &e))?;
        Ok(NativePendingGroup(Mutex::new(Some(pending))))
    }

    /// The same with dedicated parameter servers behind the workers; each may hold `buffer_bytes` of sums.
    fn new_served_group(
        &self,
        py: Python<'_>,
        rank: u32,
        world_size: u32,
        servers: (u32, u64),
        name: &str,
    ) -> PyResult<NativePendingGroup> {
        let (count, buffer_bytes) = servers;
        let servers = DedicatedServers { count, buffer_bytes };
        let pending = self.engine.new_served_group(rank, world_size, servers, name);
        pending.map(|pending| NativePendingGroup(Mutex::new(Some(pending)))).map_err(|e| engine_error(py, &e))
    }

    /// The bound port.
    #[getter]
    fn port(&self) -> u16 {
        self.engine.local_port()
    }

    /// The bound port of each network thread, the first one's first.
    #[getter]
    fn thread_ports(&self) -> Vec<u16> {
        self.engine.thread_ports()
    }

    /// Cores that this process may use, and those of its host.
    #[getter]
    fn cores(&self) -> (usize, usize) {
        self.engine.cores()
    }

    /// What the kernel granted.
    fn features<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        dictionary(py, serde_json::to_string(&self.engine.features()))
    }

    /// Counters of the socket and the thread.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        kept::release(py);
        let stats = py.detach(|| self.engine.stats()).map_err(|e| engine_error(py, &e))?;
        dictionary(py, serde_json::to_string(&stats))
    }

    /// Blocks without the GIL until operations that asked for it have ended, and takes them all. `None` when the engine has
    /// stopped and nothing will ever come.
    fn next_completions(&self, py: Python<'_>) -> PyResult<Option<Vec<NativeOp>>> {
        loop {
            let batch = py.detach(|| self.completions.next_batch(Some(SIGNAL_INTERVAL * 5)));
            kept::release(py);
            if !batch.is_empty() {
                return Ok(Some(batch.into_iter().map(NativeOp::new).collect()));
            }
            if self.completions.is_closed() {
                return Ok(None);
            }
            py.check_signals()?;
        }
    }

    /// In a forked child: closes the child's copies of the sockets. Elsewhere nothing.
    fn let_go_in_child(&self) {
        self.engine.let_go_in_child();
    }

    /// Leaves every group, ends what is in flight and joins the network thread.
    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.engine.stop());
        kept::release(py);
    }
}

impl Drop for NativeEngine {
    /// To join the network threads takes up to half a second where goodbyes are not answered; other Python threads run meanwhile.
    fn drop(&mut self) {
        // None while the interpreter ends: then the engine stops with the GIL held, which nobody wants any more.
        _ = Python::try_attach(|py| self.stop(py));
    }
}

/// A group whose peers are not known yet.
#[pyclass(name = "PendingGroup", frozen, module = "gradwire._native")]
pub(crate) struct NativePendingGroup(Mutex<Option<PendingGroup>>);

#[pymethods]
impl NativePendingGroup {
    /// This rank's record, JSON.
    fn record(&self, py: Python<'_>) -> PyResult<String> {
        let pending = self.0.lock().map_err(|_| used(py))?;
        pending.as_ref().map(PendingGroup::record).ok_or_else(|| used(py))
    }

    /// This rank joins a group that runs, as so late a life of itself; before `record`.
    fn live_again(&self, py: Python<'_>, incarnation: u64) -> PyResult<()> {
        let mut pending = self.0.lock().map_err(|_| used(py))?;
        pending.as_mut().map(|pending| pending.live_again(incarnation)).ok_or_else(|| used(py))
    }

    /// Joins a group that runs. May be called once, instead of `join`.
    fn join_running(
        &self,
        py: Python<'_>,
        formed: Vec<String>,
        running: String,
        timeout_s: f64,
    ) -> PyResult<NativeGroup> {
        self.join_by(py, timeout_s, |pending, timeout, goes_on| {
            pending.join_running_while(&formed, &running, timeout, goes_on)
        })
    }

    /// Connects to all peers. May be called once. A signal whose handler raises gives the group up.
    fn join(&self, py: Python<'_>, records: Vec<String>, timeout_s: f64) -> PyResult<NativeGroup> {
        self.join_by(py, timeout_s, |pending, timeout, goes_on| {
            pending.join_while(&records, Some(timeout), goes_on)
        })
    }
}

impl NativePendingGroup {
    fn join_by<J>(&self, py: Python<'_>, timeout_s: f64, join: J) -> PyResult<NativeGroup>
    where
        J: FnOnce(PendingGroup, Duration, &mut dyn FnMut() -> bool) -> Joined + Send,
    {
        kept::release(py);
        let taken = self.0.lock().ok().and_then(|mut pending| pending.take());
        let pending = taken.ok_or_else(|| used(py))?;
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|e| invalid_request(py, format!("timeout of {timeout_s} s: {e}")))?;
        let mut raised = None;
        let mut goes_on = || {
            raised = Python::attach(|py| py.check_signals()).err();
            raised.is_none()
        };
        let joined = py.detach(|| join(pending, timeout, &mut goes_on));
        match (joined, raised) {
            (_, Some(error)) => Err(error),
            (Ok(Some(group)), None) => Ok(NativeGroup::new(group)),
            (Ok(None), None) => unreachable!("only a signal ends the wait"),
            (Err(error), None) => Err(join_error(py, &error)),
        }
    }
}

/// How joining ended; `None`: it was called off.
type Joined = Result<Option<GroupHandle>, JoinError>;

fn used(py: Python<'_>) -> PyErr {
    invalid_request(py, "this group has been joined already".to_owned())
}

/// One rank of a connected group.
#[pyclass(name = "Group", frozen, weakref, module = "gradwire._native")]
pub(crate) struct NativeGroup {
    group: GroupHandle,
    kept: KeptByGroup,
    /// Process that formed it: in a forked child nothing of it ends.
    owner: u32,
}

impl NativeGroup {
    /// Of this process.
    fn new(group: GroupHandle) -> Self {
        Self { group, kept: KeptByGroup::default(), owner: std::process::id() }
    }
}

impl Drop for NativeGroup {
    fn drop(&mut self) {
        // None while the interpreter ends, and with it what is kept.
        _ = Python::try_attach(|py| self.abort(py));
    }
}

#[pymethods]
impl NativeGroup {
    /// Hands a collective to the network thread. `call`: see `python/gradwire/_native.pyi`.
    fn submit(&self, py: Python<'_>, call: Call) -> PyResult<NativeOp> {
        let preset = call.preset();
        kept::release(py);
        // SAFETY: the adapter passes addresses of tensors together with the tensors, and gives both up until the
        // operation is done.
        let (request, keep) = unsafe { call.into_request() }.map_err(|e| invalid_request(py, e))?;
        let op = match preset {
            Some(preset) => self.group.submit_as(preset, request, self.kept.keep(keep)),
            None => self.group.submit(request, self.kept.keep(keep)),
        };
        op.map(NativeOp::new).map_err(|e| {
            kept::release(py); // nothing keeps what was refused
            engine_error(py, &e)
        })
    }

    /// Lets the rank join that has published `record`; what it needs to know.
    fn admit(&self, py: Python<'_>, record: String) -> PyResult<String> {
        py.detach(|| self.group.admit(record)).map_err(|e| join_error(py, &e))
    }

    /// Ends everything in flight at once, and gives up what it needs.
    fn abort(&self, py: Python<'_>) {
        self.group.abort();
        if self.owner == std::process::id() {
            self.kept.release_all(py);
        }
    }

    /// Says goodbye; `True` when every peer confirmed within the timeout.
    fn leave(&self, py: Python<'_>, timeout_s: f64) -> bool {
        let timeout = Duration::try_from_secs_f64(timeout_s).unwrap_or_default();
        let confirmed = py.detach(|| self.group.leave(timeout));
        kept::release(py);
        confirmed
    }

    /// Blocks without the GIL until every worker has left a dedicated server's group; raises why the group failed before.
    fn wait_for_workers(&self, py: Python<'_>) -> PyResult<()> {
        loop {
            let ended = py.detach(|| self.group.wait_for_workers(SIGNAL_INTERVAL * 5));
            match ended.map_err(|e| engine_error(py, &e))? {
                Some(outcome) => return outcome.map_err(|e| op_error(py, &e)),
                None => py.check_signals()?,
            }
        }
    }

    /// Counters of the connection to each peer, and of the collectives.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let stats = py.detach(|| self.group.stats()).map_err(|e| engine_error(py, &e))?;
        dictionary(py, serde_json::to_string(&stats))
    }

    /// Who is waited for.
    fn watch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let watch = py.detach(|| self.group.watch()).map_err(|e| engine_error(py, &e))?;
        dictionary(py, serde_json::to_string(&watch))
    }

    /// The same without those stragglers who have not been waited for since this was asked last.
    fn watch_news<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        kept::release(py);
        let watch = py.detach(|| self.group.watch_news()).map_err(|e| engine_error(py, &e))?;
        dictionary(py, serde_json::to_string(&watch))
    }

    /// The latest collectives with their times, as JSON: it may be megabytes, and Python's lock is held for none of it. `calls`: no more
    /// of the group's sequence, and no more others.
    #[pyo3(signature = (calls=None))]
    fn timeline(&self, py: Python<'_>, calls: Option<usize>) -> PyResult<String> {
        let told = py.detach(|| {
            self.group.timeline(calls.unwrap_or(usize::MAX)).map(|timeline| serde_json::to_string(&timeline))
        });
        let text = told.map_err(|e| engine_error(py, &e))?;
        text.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
    }
}

/// Upper bounds of the histograms in the statistics, by what they count: `seconds` and `shares`.
#[pyfunction]
pub(crate) fn histogram_bounds() -> HashMap<&'static str, &'static [f64]> {
    HashMap::from([("seconds", TimeHistogram::bounds()), ("shares", ShareHistogram::bounds())])
}

fn engine_config(py: Python<'_>, settings: &Bound<'_, PyDict>) -> PyResult<EngineConfig> {
    let mut config = EngineConfig::default();
    for (name, value) in settings {
        let name: String = name.extract()?;
        set(&mut config, &name, &value).map_err(|error| config_error(py, &name, &error.to_string()))?;
    }
    Ok(config)
}

fn set(config: &mut EngineConfig, name: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    match name {
        "port" => config.port = value.extract()?,
        "interface" => config.interface = value.extract()?,
        "mtu" => config.mtu = value.extract()?,
        "eager_bytes" => config.eager_bytes = value.extract()?,
        "ack_every" => config.ack_every = value.extract()?,
        "ack_delay_us" => config.ack_delay_max = Duration::from_micros(value.extract()?),
        "controller" => config.controller = controller(value)?,
        "initial_rate" => config.initial_rate = value.extract()?,
        "peer_timeout_s" => config.peer_timeout = seconds(value)?,
        "on_peer_loss" => config.on_peer_loss = on_peer_loss(value)?,
        "connect_timeout_s" => config.connect_timeout = seconds(value)?,
        "dscp" => config.dscp = value.extract()?,
        "dscp_classes" => {
            config.dscp_classes = value.extract::<Vec<u16>>()?.into_iter().map(code_point).collect()
        }
        "class_queues" => config.class_queues = value.extract()?,
        "dscp_control" => config.dscp_control = Some(value.extract()?),
        "ecn" => config.ecn = value.extract()?,
        "offload" => {
            config.offload = if value.extract::<bool>()? { Offload::Auto } else { Offload::Off };
        }
        "urgency" => config.urgency = value.extract()?,
        "busy_poll_us" => config.busy_poll = Duration::from_micros(value.extract()?),
        "give_way" => config.give_way = choice(value)?,
        "own_core" => config.own_core = choice(value)?,
        "send_thread" => config.send_thread = choice(value)?,
        "network_threads" => config.network_threads = value.extract()?,
        "paths" => config.paths = value.extract()?,
        "servers" => config.servers = value.extract()?,
        "incast" => config.incast = value.extract()?,
        "spray" => config.spray = spray(value)?,
        "chaos" => config.chaos = chaos(value)?,
        "security" => config.security = security(value)?,
        "secret" => config.secret = secret(value)?,
        "fingerprint" => config.fingerprint = value.extract()?,
        _ => return Err(pyo3::exceptions::PyKeyError::new_err("there is no such setting")),
    }
    Ok(())
}

fn spray(value: &Bound<'_, PyAny>) -> PyResult<Spray> {
    match value.extract::<String>()?.as_str() {
        "adaptive" => Ok(Spray::Adaptive),
        "random" => Ok(Spray::Random),
        "round_robin" => Ok(Spray::RoundRobin),
        _ => Err(pyo3::exceptions::PyValueError::new_err("adaptive, random or round_robin")),
    }
}

fn on_peer_loss(value: &Bound<'_, PyAny>) -> PyResult<OnPeerLoss> {
    match value.extract::<String>()?.as_str() {
        "raise" => Ok(OnPeerLoss::Raise),
        "continue" => Ok(OnPeerLoss::Continue),
        _ => Err(pyo3::exceptions::PyValueError::new_err("raise or continue")),
    }
}

fn choice(value: &Bound<'_, PyAny>) -> PyResult<Choice> {
    let name: String = value.extract()?;
    [Choice::Auto, Choice::On, Choice::Off]
        .into_iter()
        .find(|choice| choice.as_str() == name)
        .ok_or_else(|| pyo3::exceptions::PyValueError::new_err("auto, on or off"))
}

fn security(value: &Bound<'_, PyAny>) -> PyResult<Security> {
    let name: String = value.extract()?;
    [Security::Auto, Security::On, Security::Off]
        .into_iter()
        .find(|mode| mode.as_str() == name)
        .ok_or_else(|| pyo3::exceptions::PyValueError::new_err("auto, on or off"))
}

fn secret(value: &Bound<'_, PyAny>) -> PyResult<Option<JobSecret>> {
    let Some(bytes) = value.extract::<Option<Vec<u8>>>()? else { return Ok(None) };
    let secret = JobSecret::new(bytes);
    secret.map(Some).map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
}

/// `None`, or loss, tail, corrupt and duplicate as shares, the delay in seconds, and the seed.
fn chaos(value: &Bound<'_, PyAny>) -> PyResult<Option<ChaosConfig>> {
    type Numbers = (f64, f64, f64, f64, f64, u64);
    let Some((loss, tail, corrupt, duplicate, delay, seed)) = value.extract::<Option<Numbers>>()? else {
        return Ok(None);
    };
    let delay = Duration::try_from_secs_f64(delay)
        .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
    Ok(Some(ChaosConfig { loss, tail, corrupt, duplicate, delay, seed }))
}

fn controller(value: &Bound<'_, PyAny>) -> PyResult<ControllerKind> {
    let name: String = value.extract()?;
    ControllerKind::ALL
        .into_iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| pyo3::exceptions::PyValueError::new_err("bottleneck, timely or receiving_rate"))
}

/// Beyond a byte is as wrong as beyond 63, which the engine refuses.
fn code_point(value: u16) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

fn seconds(value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value.extract()?)
        .map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))
}

fn dictionary<'py>(py: Python<'py>, json: serde_json::Result<String>) -> PyResult<Bound<'py, PyAny>> {
    let text = json.map_err(|error| pyo3::exceptions::PyValueError::new_err(error.to_string()))?;
    py.import("json")?.call_method1("loads", (text,))
}
