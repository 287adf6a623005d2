//! Loss policies: presets to Python, numbers back to Rust.

use gradwire_engine::collectives::{DeadlineRule, Policy};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// A policy as Python passes it: `{"loss_bound": float, "after_first_pass": bool, "deadline_s": float | None,
/// "deadline_factor": float | None, "floor": float}`. A fixed deadline beats a measured one.
#[derive(FromPyObject)]
pub(crate) struct PolicyNumbers {
    #[pyo3(item)]
    loss_bound: f32,
    #[pyo3(item)]
    after_first_pass: bool,
    #[pyo3(item)]
    deadline_s: Option<f64>,
    #[pyo3(item)]
    deadline_factor: Option<f32>,
    #[pyo3(item)]
    floor: f32,
}

impl PolicyNumbers {
    /// The policy; `Err` is the problem with it.
    pub(crate) fn policy(&self) -> Result<Policy, String> {
        let deadline = match (self.deadline_s, self.deadline_factor) {
            (Some(seconds), _) => DeadlineRule::Fixed(
                Duration::try_from_secs_f64(seconds).map_err(|e| format!("deadline_s = {seconds}: {e}"))?,
            ),
            (None, Some(factor)) => DeadlineRule::Measured { factor },
            (None, None) => DeadlineRule::Never,
        };
        // The rest of a preset is still to be passed.
        let recovery = Policy::AUTO.recovery;
        Ok(Policy {
            loss_bound: self.loss_bound,
            after_first_pass: self.after_first_pass,
            deadline,
            floor: self.floor,
            recovery,
            ..Policy::RELIABLE
        })
    }
}

/// The numbers of a preset (`auto`, `mlt`, `reliable`), in the form of [`PolicyNumbers`]. `None`: no such preset.
#[pyfunction]
pub(crate) fn preset_defaults<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
    let policy = match name {
        "auto" => Policy::AUTO,
        "mlt" => Policy::MLT,
        "reliable" => Policy::RELIABLE,
        _ => return Ok(None),
    };
    let (fixed, factor) = match policy.deadline {
        DeadlineRule::Fixed(deadline) => (Some(deadline.as_secs_f64()), None),
        DeadlineRule::Measured { factor } => (None, Some(factor)),
        _ => (None, None),
    };
    let numbers = PyDict::new(py);
    numbers.set_item("loss_bound", policy.loss_bound)?;
    numbers.set_item("after_first_pass", policy.after_first_pass)?;
    numbers.set_item("deadline_s", fixed)?;
    numbers.set_item("deadline_factor", factor)?;
    numbers.set_item("floor", policy.floor)?;
    Ok(Some(numbers))
}
