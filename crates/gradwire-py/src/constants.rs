//! Numbers and names that the Python package has, too. Those in tables stand at the place of their code.

use crate::policy::{DIVISORS, FILLS, ROTATIONS};
use gradwire_engine::collectives::{Algorithm, Dtype, ReduceOp};
use gradwire_engine::core::recovery::ControllerKind;
use gradwire_engine::limits;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Adds them to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("PORT_BASE", limits::PORT_UNASKED)?;
    module.add("PORTS_APART", limits::LANE_PORTS_APART)?;
    module.add("THREADS_UNASKED_MAX", limits::THREADS_UNASKED_MAX)?;
    module.add("RANKS_MAX", limits::WORLD_SIZE_MAX)?;
    module.add("LANE_RANKS_MAX", limits::LANE_RANKS_MAX)?;
    module.add("MEASURED_RATE_MAX", limits::MEASURED_RATE_MAX)?;
    module.add("RECEIVE_BUFFER_BYTES", limits::RECEIVE_BUFFER_BYTES)?;
    module.add("SEND_BUFFER_BYTES", limits::SEND_BUFFER_BYTES)?;
    module.add("SECRET_BYTES_MIN", limits::SECRET_BYTES_MIN)?;
    module.add("UNKNOWN_BOOT", limits::UNKNOWN_BOOT)?;
    let add_names = |name: &str, names: &[&str]| module.add(name, PyTuple::new(module.py(), names)?);
    add_names("BRIDGES", &limits::BRIDGES)?;
    add_names("ALGORITHMS", &Algorithm::ALL.map(Algorithm::name))?;
    add_names("REDUCTIONS", &ReduceOp::NAMES)?;
    add_names("DTYPES", &Dtype::ALL.map(Dtype::name))?;
    add_names("CONTROLLERS", &ControllerKind::ALL.map(ControllerKind::name))?;
    add_names("FILLS", &FILLS.map(|(name, _)| name))?;
    add_names("DIVISORS", &DIVISORS.map(|(name, _)| name))?;
    add_names("ROTATIONS", &ROTATIONS.map(|(name, _)| name))
}
