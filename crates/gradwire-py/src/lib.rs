//! The Python module `gradwire._native`: converts arguments, releases the GIL, maps errors. It decides nothing.
//!
//! Called by `python/gradwire/torch`. Everything that blocks does so without the GIL and in slices, so that
//! Ctrl-C is answered. The network thread of the engine never takes the GIL.

mod call;
mod constants;
mod engine;
mod errors;
mod fingerprint;
mod hadamard;
mod kept;
mod op;
mod policy;
mod simulate;

use pyo3::prelude::*;

/// See `python/gradwire/_native.pyi`.
#[pymodule(gil_used = true)]
mod _native {
    use super::*;

    #[pymodule_export]
    use crate::engine::histogram_bounds;
    #[pymodule_export]
    use crate::engine::{NativeEngine, NativeGroup, NativePendingGroup};
    #[pymodule_export]
    use crate::fingerprint::fingerprints;
    #[pymodule_export]
    use crate::hadamard::{hadamard, hadamard_in_place, hadamard_shape};
    #[pymodule_export]
    use crate::op::NativeOp;
    #[pymodule_export]
    use crate::policy::{layer_class, policy_problem, preset_defaults, preset_names};
    #[pymodule_export]
    use crate::simulate::simulate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("BUILD", gradwire_engine::BUILD)?;
        module.add("VERSION", gradwire_engine::VERSION)?;
        module.add("PROTOCOL_VERSION", gradwire_engine::core::wire::VERSION)?;
        crate::constants::add_to(module)
    }
}
