//! A cluster in virtual time, for `gradwire simulate`: the plan comes as JSON from `python/gradwire/simulation`.

use gradwire_engine::collectives::{Algorithm, Policy, Servers};
use gradwire_engine::core::recovery::ControllerKind;
use gradwire_sim::cluster::{queues, BucketPlan, Cluster, ClusterError, ClusterPlan, Layer, Report};
use gradwire_sim::fabric::{LeafSpine, PathChoice};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Runs the plan and returns what it was like, both as JSON (`python/gradwire/simulation/plan.py`, docs/simulation.md). Ctrl-C
/// ends it. ValueError: the plan cannot be run; RuntimeError: a call failed.
#[pyfunction]
pub(crate) fn simulate(py: Python<'_>, plan: &str) -> PyResult<String> {
    let json: Value = serde_json::from_str(plan).map_err(|error| PyValueError::new_err(error.to_string()))?;
    let plan = read(&json).map_err(PyValueError::new_err)?;
    let (preset, hosts) = (plan.preset.name, plan.topology.hosts());
    let stop = Arc::new(AtomicBool::new(false));
    let (began, stopped, waiter) = (Instant::now(), Arc::clone(&stop), std::thread::current());
    let worker = std::thread::spawn(move || {
        let outcome = Cluster::run_until_told(plan, stopped);
        waiter.unpark();
        outcome
    });
    while !worker.is_finished() {
        py.detach(|| std::thread::park_timeout(SLICE));
        if let Err(interrupt) = py.check_signals() {
            stop.store(true, Ordering::Relaxed);
            return Err(interrupt);
        }
    }
    let outcome = worker.join().map_err(|_| PyRuntimeError::new_err("the simulation failed: a bug"))?;
    let outcome = outcome.map_err(|error| match error {
        ClusterError::TooManyRanks { .. } => PyValueError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    })?;
    Ok(Report { preset, hosts, outcome: &outcome, core: began.elapsed(), memory_bytes: 0 }.to_json())
}

fn read(json: &Value) -> Result<ClusterPlan, String> {
    let (workers, servers) = (count(json, "workers")?, count(json, "servers")?);
    let name = json["preset"].as_str().unwrap_or_default();
    let buckets = json["buckets"].as_array().ok_or("buckets: a list")?;
    let plan = ClusterPlan::burst(name, (workers + servers).max(4), 4);
    let mut plan = plan.ok_or_else(|| format!("there is no preset {name}"))?;
    plan.workers = workers;
    plan.buckets = buckets.iter().map(bucket).collect::<Result<_, _>>()?;
    plan.host.servers = match servers {
        0 => Servers::EVERY_RANK,
        _ => Servers::Dedicated { count: servers as u32, buffer_bytes: u64::MAX },
    };
    plan.algorithm = match json["algorithm"].as_str() {
        Some("parameter_server") => Algorithm::ParameterServer,
        Some("transpose") => Algorithm::Transpose,
        Some("ring") => Algorithm::Ring,
        _ => return Err("algorithm: parameter_server, transpose or ring".to_owned()),
    };
    if let Some(name) = json["controller"].as_str() {
        let kind = ControllerKind::ALL.into_iter().find(|kind| kind.name() == name);
        plan.host.controller = kind.ok_or_else(|| format!("there is no rate controller {name}"))?;
    }
    if !flag(json, "tolerates")? {
        plan.preset.policy = Policy::RELIABLE;
    }
    if !flag(json, "tells")? {
        plan.preset.importance = None;
    }
    plan.topology = topology(json, workers + servers)?;
    (plan.warm_up, plan.steps) = (count(json, "warm_up")?, count(json, "steps")?);
    plan.jitter = Duration::from_nanos((number(json, "jitter_us")? * 1e3) as u64);
    (plan.background, plan.seed) = (number(json, "background")?, count(json, "seed")? as u64);
    plan.host.paths = count(json, "paths")? as u8;
    Ok(plan)
}

fn topology(json: &Value, hosts: usize) -> Result<LeafSpine, String> {
    let mut queue = queues(count(json, "classes")? as u64);
    queue.buffer_bytes = count(json, "buffer_bytes")? as u64;
    let hosts_per_leaf = count(json, "hosts_per_leaf")?.clamp(1, hosts.max(1));
    let network = LeafSpine {
        leaves: hosts.div_ceil(hosts_per_leaf).max(1),
        hosts_per_leaf,
        spines: count(json, "spines")?,
        host_rate: (number(json, "host_gbit")? * 125e6) as u64,
        link_delay: Duration::from_nanos((number(json, "link_delay_us")? * 1e3) as u64),
        queue,
        choice: match json["spread"].as_str() {
            Some("flow") => PathChoice::PerFlow,
            Some("packet") => PathChoice::PerPacket,
            _ => return Err("spread: flow or packet".to_owned()),
        },
        ..LeafSpine::mlt(hosts)
    };
    Ok(network.oversubscribed(number(json, "oversubscription")?))
}

fn bucket(json: &Value) -> Result<BucketPlan, String> {
    let elems = json["layers"].as_array().ok_or("layers: a list of numbers of elements")?;
    let layer = |elems: &Value| elems.as_u64().map(|elems| Layer { name: String::new(), elems });
    let layers: Option<Vec<Layer>> = elems.iter().map(layer).collect();
    let class = count(json, "class")? as u8;
    Ok(BucketPlan {
        layers: layers.ok_or("layers: a list of numbers of elements")?,
        class,
        priority: class,
        ready: Duration::from_nanos((number(json, "ready_us")? * 1e3) as u64),
    })
}

fn count(json: &Value, field: &str) -> Result<usize, String> {
    json[field].as_u64().map(|value| value as usize).ok_or_else(|| format!("{field}: a whole number"))
}

fn flag(json: &Value, field: &str) -> Result<bool, String> {
    json[field].as_bool().ok_or_else(|| format!("{field}: true or false"))
}

fn number(json: &Value, field: &str) -> Result<f64, String> {
    json[field].as_f64().filter(|value| *value >= 0.0).ok_or_else(|| format!("{field}: a number"))
}

/// How often Ctrl-C is looked for.
const SLICE: Duration = Duration::from_millis(50);
