//! Loss policies: presets to Python, numbers back to Rust.

use gradwire_engine::collectives::core::Reliability;
use gradwire_engine::collectives::{
    DeadlineRule, DivideBy, EarlyRule, Fill, GatherRule, Policy, Rotation, SoftRule,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::time::Duration;

/// A policy as Python passes it; see `PolicyNumbers` in `python/gradwire/_native.pyi`. Of the deadlines the first one
/// that is not None counts.
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
    deadline_margin_s: Option<f64>,
    #[pyo3(item)]
    warm_up_rounds: Option<u16>,
    #[pyo3(item)]
    warm_up_percentile: f32,
    #[pyo3(item)]
    deadline_max_s: Option<f64>,
    #[pyo3(item)]
    floor: f32,
    #[pyo3(item)]
    data_share: Option<f32>,
    #[pyo3(item)]
    epoch_transfers: u32,
    #[pyo3(item)]
    quiet_share: Option<f32>,
    #[pyo3(item)]
    recovery: String,
    #[pyo3(item)]
    critical_packets: u16,
    #[pyo3(item)]
    gather_loss_bound: f32,
    #[pyo3(item)]
    gather_recovery: String,
    #[pyo3(item)]
    gather_fill: String,
    #[pyo3(item)]
    divide_by: String,
    #[pyo3(item)]
    hadamard: String,
    #[pyo3(item, default)]
    preset: String,
}

impl PolicyNumbers {
    /// The policy; `Err` is the problem with it.
    pub(crate) fn policy(&self) -> Result<Policy, String> {
        let deadline_max = self.deadline_max_s.map(|s| seconds("deadline_max_s", s)).transpose()?;
        Ok(Policy {
            loss_bound: self.loss_bound,
            after_first_pass: self.after_first_pass,
            deadline: self.deadline()?,
            deadline_max,
            floor: self.floor,
            soft: self.data_share.map(|min_fraction| SoftRule { min_fraction, epoch: self.epoch_transfers }),
            early: self.quiet_share.map(|quiet_share| EarlyRule { quiet_share }),
            recovery: named(&RECOVERIES, &self.recovery)?,
            critical_chunks: self.critical_packets,
            gather: GatherRule {
                loss_bound: self.gather_loss_bound,
                recovery: named(&RECOVERIES, &self.gather_recovery)?,
                fill: named(&FILLS, &self.gather_fill)?,
            },
            divide_by: named(&DIVISORS, &self.divide_by)?,
            rotation: named(&ROTATIONS, &self.hadamard)?,
        })
    }

    /// The preset that these numbers began as; `None`: of that name there is none.
    pub(crate) fn preset(&self) -> Option<&'static str> {
        Policy::PRESETS.iter().map(|(name, _)| *name).find(|name| *name == self.preset)
    }

    fn deadline(&self) -> Result<DeadlineRule, String> {
        let percentile = self.warm_up_percentile;
        Ok(match *self {
            Self { deadline_s: Some(s), .. } => DeadlineRule::Fixed(seconds("deadline_s", s)?),
            Self { deadline_factor: Some(factor), .. } => DeadlineRule::Measured { factor },
            Self { deadline_margin_s: Some(s), .. } => {
                DeadlineRule::SlowestLink { margin: seconds("deadline_margin_s", s)? }
            }
            Self { warm_up_rounds: Some(rounds), .. } => DeadlineRule::WarmUp { rounds, percentile },
            _ => DeadlineRule::Never,
        })
    }
}

fn seconds(name: &str, value: f64) -> Result<Duration, String> {
    Duration::try_from_secs_f64(value).map_err(|error| format!("{name} = {value}: {error}"))
}

fn named<T: Copy>(names: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = names.iter().find(|(known, _)| *known == name);
    found.map(|(_, value)| *value).ok_or_else(|| format!("there is no '{name}'"))
}

fn name_of<T: PartialEq>(names: &[(&'static str, T)], value: &T) -> &'static str {
    names.iter().find(|(_, known)| known == value).map_or("", |(name, _)| name)
}

/// The numbers of a preset, in the form of [`PolicyNumbers`]. `None`: no such preset.
#[pyfunction]
pub(crate) fn preset_defaults<'py>(py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
    let Some(policy) = Policy::preset(name) else { return Ok(None) };
    let numbers = numbers_of(py, &policy)?;
    numbers.set_item("preset", name)?;
    Ok(Some(numbers))
}

/// Names of the presets, `auto` first.
#[pyfunction]
pub(crate) fn preset_names() -> Vec<&'static str> {
    Policy::PRESETS.iter().map(|(name, _)| *name).collect()
}

/// What is wrong with a policy; `None`: nothing.
#[pyfunction]
pub(crate) fn policy_problem(numbers: PolicyNumbers) -> Option<String> {
    numbers.policy().and_then(|policy| policy.validate()).err()
}

fn numbers_of<'py>(py: Python<'py>, policy: &Policy) -> PyResult<Bound<'py, PyDict>> {
    let seconds = |time: Duration| time.as_secs_f64();
    let (mut fixed, mut factor, mut margin, mut rounds) = (None, None, None, None);
    let mut percentile = PERCENTILE_UNUSED;
    match policy.deadline {
        DeadlineRule::Fixed(deadline) => fixed = Some(seconds(deadline)),
        DeadlineRule::Measured { factor: times } => factor = Some(times),
        DeadlineRule::SlowestLink { margin: time } => margin = Some(seconds(time)),
        DeadlineRule::WarmUp { rounds: count, percentile: share } => {
            (rounds, percentile) = (Some(count), share);
        }
        DeadlineRule::Never => {}
    }
    let numbers = PyDict::new(py);
    numbers.set_item("loss_bound", policy.loss_bound)?;
    numbers.set_item("after_first_pass", policy.after_first_pass)?;
    numbers.set_item("deadline_s", fixed)?;
    numbers.set_item("deadline_factor", factor)?;
    numbers.set_item("deadline_margin_s", margin)?;
    numbers.set_item("warm_up_rounds", rounds)?;
    numbers.set_item("warm_up_percentile", percentile)?;
    numbers.set_item("deadline_max_s", policy.deadline_max.map(seconds))?;
    numbers.set_item("floor", policy.floor)?;
    numbers.set_item("data_share", policy.soft.map(|soft| soft.min_fraction))?;
    numbers.set_item("epoch_transfers", policy.soft.map_or(1, |soft| soft.epoch))?;
    numbers.set_item("quiet_share", policy.early.map(|early| early.quiet_share))?;
    numbers.set_item("recovery", name_of(&RECOVERIES, &policy.recovery))?;
    numbers.set_item("critical_packets", policy.critical_chunks)?;
    numbers.set_item("gather_loss_bound", policy.gather.loss_bound)?;
    numbers.set_item("gather_recovery", name_of(&RECOVERIES, &policy.gather.recovery))?;
    numbers.set_item("gather_fill", name_of(&FILLS, &policy.gather.fill))?;
    numbers.set_item("divide_by", name_of(&DIVISORS, &policy.divide_by))?;
    numbers.set_item("hadamard", name_of(&ROTATIONS, &policy.rotation))?;
    Ok(numbers)
}

/// Traffic class of a layer; see `gradwire_collectives::layer_class`.
#[pyfunction]
pub(crate) fn layer_class(layer: u32, layers: u32, classes: u8) -> u8 {
    gradwire_engine::collectives::layer_class(layer, layers, classes)
}

const RECOVERIES: [(&str, Reliability); 4] = [
    ("at_once", Reliability::Exact),
    ("when_asked", Reliability::Tolerant),
    ("after_all_else", Reliability::Deferred),
    ("never", Reliability::BestEffort),
];
pub(crate) const FILLS: [(&str, Fill); 3] =
    [("zero", Fill::Zero), ("previous", Fill::Previous), ("local", Fill::Local)];
pub(crate) const DIVISORS: [(&str, DivideBy); 2] =
    [("contributions", DivideBy::Contributions), ("world", DivideBy::World)];
pub(crate) const ROTATIONS: [(&str, Rotation); 3] =
    [("auto", Rotation::Auto), ("on", Rotation::On), ("off", Rotation::Off)];
/// The percentile where no rule uses it.
const PERCENTILE_UNUSED: f32 = 0.95;
