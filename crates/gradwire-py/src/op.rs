//! `Op`: one collective in flight.

use crate::errors::{engine_error, op_error};
use crate::kept;
use gradwire_engine::collectives::{stragglers_of, Contributions, DeliveryReport, PeerDelivery, Straggler};
use gradwire_engine::{EngineError, OpHandle};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict, PyTuple};
use std::time::{Duration, Instant};

/// One submitted collective. Dropping it cancels nothing.
#[pyclass(name = "Op", frozen, module = "gradwire._native")]
pub(crate) struct NativeOp {
    op: OpHandle,
    /// Process that submitted it: in a forked child it never ends.
    owner: u32,
}

/// Longest stay in Rust without a look at Python's signals.
pub(crate) const SIGNAL_INTERVAL: Duration = Duration::from_millis(200);

impl NativeOp {
    /// Of this process.
    pub(crate) fn new(op: OpHandle) -> Self {
        Self { op, owner: std::process::id() }
    }

    /// Refuses a forked child what would never come there. Must come before any lock: the fork may have copied a held one.
    fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        let child = std::process::id();
        if child == self.owner {
            return Ok(());
        }
        Err(engine_error(py, &EngineError::Forked { parent: self.owner, child }))
    }
}

#[pymethods]
impl NativeOp {
    /// A number that no other operation of the engine has.
    #[getter]
    fn id(&self) -> u64 {
        self.op.id()
    }

    /// Blocks without the GIL until the operation ends. `False` when `timeout_s` passed first; a negative one has passed at once.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        if self.op.is_done() {
            kept::release(py);
            return Ok(true);
        }
        self.check_process(py)?;
        let end = timeout_s.and_then(|seconds| Instant::now().checked_add(timeout(seconds)?));
        loop {
            let slice = end.map_or(SIGNAL_INTERVAL, |end| {
                end.saturating_duration_since(Instant::now()).min(SIGNAL_INTERVAL)
            });
            if py.detach(|| self.op.wait(Some(slice)).is_some()) {
                kept::release(py);
                return Ok(true);
            }
            py.check_signals()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                return Ok(false);
            }
        }
    }

    /// Whether it has ended.
    fn is_done(&self) -> bool {
        self.op.is_done()
    }

    /// Puts it into the engine's completions when it ends.
    fn notify(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process(py)?;
        self.op.notify();
        Ok(())
    }

    /// The exception that it ended with; `None` while it runs and after success.
    fn error(&self, py: Python<'_>) -> Option<PyErr> {
        match self.op.outcome() {
            Some(Err(error)) => Some(op_error(py, error)),
            _ => None,
        }
    }

    /// Why `auto` scheduled it in another way than the one before of its size; `None` in all other cases.
    fn choice(&self) -> Option<&str> {
        match self.op.outcome() {
            Some(Ok(report)) => report.choice.as_deref(),
            _ => None,
        }
    }

    /// The sums of `report` that are kept for each step, as the fields of `gradwire.report.DeliveryTotals`, without an object for each
    /// peer: with 512 ranks those take longer to make than a bucket does on the wire. `None` as in `report`.
    fn totals<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        match self.op.outcome() {
            Some(Ok(report)) => total_fields(py, report).map(Some),
            _ => Ok(None),
        }
    }

    /// What it delivered, as the fields of `gradwire.DeliveryReport`; `None` while it runs and after a failure.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        match self.op.outcome() {
            Some(Ok(report)) => {
                let fields = report_fields(py, report)?;
                let (epoch, members) = self.op.epoch().unwrap_or_default();
                fields.set_item("epoch", epoch)?;
                fields.set_item("members", PyTuple::new(py, members)?)?;
                Ok(Some(fields))
            }
            _ => Ok(None),
        }
    }
}

/// `None`: one so long never passes.
fn timeout(seconds: f64) -> Option<Duration> {
    // Not a number is no time to wait either.
    let seconds = if seconds > 0.0 { seconds } else { 0.0 };
    Duration::try_from_secs_f64(seconds).ok()
}

fn report_fields<'py>(py: Python<'py>, report: &DeliveryReport) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("collective", &report.collective)?;
    fields.set_item("sequence", report.sequence)?;
    fields.set_item("elems", report.elems)?;
    fields.set_item("elapsed_s", report.elapsed.as_secs_f64())?;
    fields.set_item("bytes_received", report.bytes_received)?;
    fields.set_item("bytes_expected", report.bytes_expected)?;
    fields.set_item("bytes_sent", report.bytes_sent)?;
    fields.set_item("bytes_retransmitted", report.bytes_retransmitted)?;
    let uncounted: Vec<(u64, u64)> = report.uncounted.iter().map(|r| (r.start, r.end)).collect();
    fields.set_item("uncounted", PyTuple::new(py, uncounted)?)?;
    fields.set_item("reduce_ended_by", report.reduce_ended_by)?;
    fields.set_item("gather_ended_by", report.gather_ended_by)?;
    let filled: Vec<(u64, u64)> = report.filled.iter().map(|r| (r.start, r.end)).collect();
    fields.set_item("filled", PyTuple::new(py, filled)?)?;
    fields.set_item("replicas_identical", report.replicas_identical)?;
    fields.set_item("rotated_elems", report.rotated_elems)?;
    fields.set_item("warm_up", report.warm_up)?;
    let peers = report.peers.iter().map(|peer| peer_fields(py, peer)).collect::<PyResult<Vec<_>>>()?;
    fields.set_item("peers", peers)?;
    let sources = report.sources.iter().map(|peer| peer_fields(py, peer)).collect::<PyResult<Vec<_>>>()?;
    fields.set_item("sources", sources)?;
    let stragglers =
        stragglers_of(report).map(|late| straggler_fields(py, &late)).collect::<PyResult<Vec<_>>>()?;
    fields.set_item("stragglers", stragglers)?;
    fields.set_item("contributors", report.contributors)?;
    fields.set_item("contributors_least", report.contributors_least)?;
    let contributions = report.contributions.as_ref().map(|counts| contribution_fields(py, counts));
    fields.set_item("contributions", contributions.transpose()?)?;
    fields.set_item("compute_wait_s", report.compute_wait.as_secs_f64())?;
    fields.set_item("network_wait_s", report.network_wait.as_secs_f64())?;
    Ok(fields)
}

fn total_fields<'py>(py: Python<'py>, report: &DeliveryReport) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    let (expected, received) = report.contributions_delivered();
    fields.set_item("elems_expected", expected)?;
    fields.set_item("elems_received", received)?;
    fields.set_item("elems_uncounted", report.elems_uncounted())?;
    let (filled, of) = report.results_filled();
    fields.set_item("elems_filled", filled)?;
    fields.set_item("elems", of)?;
    fields.set_item("bytes_sent", report.bytes_sent)?;
    fields.set_item("bytes_retransmitted", report.bytes_retransmitted)?;
    fields.set_item("ended_by_time", report.ended_by_time())?;
    fields.set_item("elapsed_s", report.elapsed.as_secs_f64())?;
    Ok(fields)
}

/// The counts are bytes of native `uint16`.
fn contribution_fields<'py>(py: Python<'py>, found: &Contributions) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    let counts: Vec<u8> = found.counts.iter().flat_map(|count| count.to_ne_bytes()).collect();
    fields.set_item("counts", PyByteArray::new(py, &counts))?;
    fields.set_item("blocks", found.blocks())?;
    fields.set_item("shard_elems", found.shard_elems)?;
    fields.set_item("block_elems", found.block_elems)?;
    Ok(fields)
}

fn straggler_fields<'py>(py: Python<'py>, late: &Straggler) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("rank", late.rank)?;
    fields.set_item("cause", late.cause.as_str())?;
    fields.set_item("waited_s", late.waited().as_secs_f64())?;
    Ok(fields)
}

fn peer_fields<'py>(py: Python<'py>, peer: &PeerDelivery) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("rank", peer.rank)?;
    fields.set_item("elems_received", peer.elems_received)?;
    fields.set_item("elems_expected", peer.elems_expected)?;
    fields.set_item("closed_by", peer.closed_by)?;
    fields.set_item("waited_for_peer_s", peer.waited_for_peer.as_secs_f64())?;
    fields.set_item("network_time_s", peer.network_time.as_secs_f64())?;
    Ok(fields)
}
