//! Each Rust error becomes one class of `gradwire.errors`, with the numbers in it as attributes.

use gradwire_engine::collectives::{OpError, Position};
use gradwire_engine::{EngineError, JoinError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyModule};

/// Makes the exception of an [`EngineError`].
pub(crate) fn engine_error(py: Python<'_>, error: &EngineError) -> PyErr {
    build(py, |fields| {
        Ok(match error {
            EngineError::PortInUse { port } => {
                fields.set_item("port", port)?;
                "PortInUseError"
            }
            EngineError::AddressUnavailable { address } => {
                fields.set_item("asked", address)?;
                "AddressError"
            }
            EngineError::NoUsableInterface { asked, found } => {
                fields.set_item("asked", asked)?;
                fields.set_item("found", found)?;
                "AddressError"
            }
            EngineError::ConfigInvalid { field, value, allowed } => {
                fields.set_item("field", field)?;
                fields.set_item("value", value)?;
                fields.set_item("allowed", allowed)?;
                "ConfigError"
            }
            EngineError::RankInvalid { rank, world_size } => {
                fields.set_item("rank", rank)?;
                fields.set_item("world_size", world_size)?;
                "InvalidRequestError"
            }
            EngineError::ConnectionIdsUsedUp { needed, held, ids } => {
                fields.set_item("needed", needed)?;
                fields.set_item("held", held)?;
                fields.set_item("ids", ids)?;
                "InvalidRequestError"
            }
            EngineError::Forked { parent, child } => {
                fields.set_item("owner_pid", parent)?;
                fields.set_item("child_pid", child)?;
                "ForkedError"
            }
            EngineError::Permission { what } => {
                fields.set_item("what", what)?;
                "EngineError"
            }
            EngineError::Io { what, source } => {
                fields.set_item("what", what)?;
                fields.set_item("errno", source.0)?;
                "EngineError"
            }
            _ => "EngineError",
        })
        .map(|class| (class, error.to_string()))
    })
}

/// Makes the exception of a [`JoinError`].
pub(crate) fn join_error(py: Python<'_>, error: &JoinError) -> PyErr {
    match error {
        JoinError::Engine(error) => return engine_error(py, error),
        JoinError::Failed(error) => return op_error(py, error),
        _ => {}
    }
    build(py, |fields| {
        Ok(match error {
            JoinError::WorldSizeMismatch { rank, theirs, ours } => {
                fields.set_item("rank", rank)?;
                fields.set_item("theirs", theirs)?;
                fields.set_item("ours", ours)?;
                "WorldSizeError"
            }
            JoinError::SettingsMismatch { rank, field, theirs, ours } => {
                fields.set_item("rank", rank)?;
                fields.set_item("field", field)?;
                fields.set_item("theirs", theirs)?;
                fields.set_item("ours", ours)?;
                "SettingsMismatchError"
            }
            JoinError::SecretMismatch { rank, problem } => {
                fields.set_item("rank", rank)?;
                fields.set_item("problem", problem)?;
                "SecretMismatchError"
            }
            JoinError::MissingRanks { ranks, .. } => {
                fields.set_item("ranks", ranks)?;
                fields.set_item("waited_s", None::<f64>)?; // records were passed, nobody waited
                "MissingRankError"
            }
            JoinError::DuplicateRank { rank, .. } => {
                fields.set_item("rank", rank)?;
                "RendezvousError"
            }
            JoinError::OtherFamily { ranks, .. } => {
                fields.set_item("ranks", ranks)?;
                fields.set_item("waited_s", 0.0)?;
                "UnreachableError"
            }
            JoinError::Unreachable { peers, waited, .. } => {
                let ranks: Vec<u32> = peers.iter().map(|peer| peer.rank).collect();
                fields.set_item("ranks", ranks)?;
                fields.set_item("waited_s", waited.as_secs_f64())?;
                "UnreachableError"
            }
            _ => "RendezvousError",
        })
        .map(|class| (class, error.to_string()))
    })
}

/// Makes the exception of an [`OpError`].
pub(crate) fn op_error(py: Python<'_>, error: &OpError) -> PyErr {
    build(py, |fields| {
        Ok(match error {
            OpError::Invalid(_) => "InvalidRequestError",
            OpError::Mismatch(mismatch) => {
                fields.set_item("rank_a", mismatch.rank_a)?;
                fields.set_item("a", position(py, &mismatch.a)?)?;
                fields.set_item("rank_b", mismatch.rank_b)?;
                fields.set_item("b", position(py, &mismatch.b)?)?;
                "MismatchError"
            }
            OpError::PeerLost { rank, host, silent, during, detail, reported_by } => {
                peer_lost(fields, (Some(*rank), host, silent.as_secs_f64()), (during, detail), *reported_by)?
            }
            OpError::Regrouped { epoch } => {
                // To its caller the same: the group goes on, and the call can be made again.
                let during = format!("a change of the members behind epoch {epoch}");
                peer_lost(fields, (None, "", 0.0), (&during, &error.to_string()), None)?
            }
            OpError::PeerLeft { rank, host, during, waited, detail } => {
                fields.set_item("rank", rank)?;
                fields.set_item("host", host)?;
                fields.set_item("during", during)?;
                fields.set_item("waited_s", waited.as_secs_f64())?;
                fields.set_item("detail", detail.as_ref())?;
                "PeerLeftError"
            }
            OpError::TimedOut { during, waited, detail } => {
                fields.set_item("during", during)?;
                fields.set_item("waited_s", waited.as_secs_f64())?;
                fields.set_item("detail", detail)?;
                "DeadlineError"
            }
            OpError::Aborted { rank, host, cause, during, waited, detail } => {
                fields.set_item("rank", rank)?;
                fields.set_item("host", host.as_ref())?;
                fields.set_item("cause", cause.as_ref())?;
                fields.set_item("during", during)?;
                fields.set_item("waited_s", waited.as_secs_f64())?;
                fields.set_item("detail", detail.as_ref())?;
                "AbortedError"
            }
            OpError::ServerMemory { rank, host, during, needed, bytes_max } => {
                fields.set_item("rank", rank)?;
                fields.set_item("host", host)?;
                fields.set_item("during", during)?;
                fields.set_item("needed_bytes", needed)?;
                fields.set_item("allowed_bytes", bytes_max)?;
                "ServerMemoryError"
            }
            OpError::NotMember { epoch, outcome, cause } => {
                fields.set_item("epoch", epoch)?;
                fields.set_item("outcome", outcome)?;
                fields.set_item("cause", cause)?;
                "NotMemberError"
            }
            OpError::ShutDown(during) => {
                fields.set_item("during", during)?;
                "ShutDownError"
            }
            _ => "GroupError",
        })
        .map(|class| (class, error.to_string()))
    })
}

/// The fields of a `PeerLostError`, and its name; without a rank where nobody can be named.
fn peer_lost(
    fields: &Bound<'_, PyDict>,
    (rank, host, silent_s): (Option<u32>, &str, f64),
    (during, detail): (&str, &str),
    reported_by: Option<u32>,
) -> PyResult<&'static str> {
    fields.set_item("rank", rank)?;
    fields.set_item("host", host)?;
    fields.set_item("silent_s", silent_s)?;
    fields.set_item("during", during)?;
    fields.set_item("detail", detail)?;
    fields.set_item("reported_by", reported_by)?;
    Ok("PeerLostError")
}

/// `ConfigError` for a field of the dictionary that Python passed.
pub(crate) fn config_error(py: Python<'_>, field: &str, problem: &str) -> PyErr {
    build(py, |fields| {
        fields.set_item("field", field)?;
        Ok(("ConfigError", format!("{field}: {problem}")))
    })
}

/// `InvalidRequestError` for a call that cannot be expressed.
pub(crate) fn invalid_request(py: Python<'_>, problem: String) -> PyErr {
    build(py, |_| Ok(("InvalidRequestError", problem)))
}

fn position<'py>(py: Python<'py>, position: &Position) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("sequence", position.sequence)?;
    fields.set_item("collective", &position.collective)?;
    fields.set_item("dtype", format!("{:?}", position.dtype))?;
    fields.set_item("reduce", position.reduction())?;
    fields.set_item("elems", position.elems)?;
    fields.set_item("root", position.root)?;
    fields.set_item("tag", position.tag)?;
    Ok(fields)
}

fn build<'a>(
    py: Python<'_>,
    describe: impl FnOnce(&Bound<'_, PyDict>) -> PyResult<(&'a str, String)>,
) -> PyErr {
    let fields = PyDict::new(py);
    let exception = describe(&fields)
        .and_then(|(class, message)| module(py)?.getattr(class)?.call((message,), Some(&fields)));
    match exception {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static ERRORS: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    ERRORS
        .get_or_try_init(py, || PyModule::import(py, "gradwire.errors").map(Bound::unbind))
        .map(|module| module.bind(py))
}
