//! One call of a collective, as Python describes it, turned into a [`Request`].

use crate::policy::PolicyNumbers;
use gradwire_engine::collectives::{
    Algorithm, Collective, Dtype, Given, ImportanceRule, Magnitude, Policy, ReduceOp, Request, Tags, View,
};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::Duration;

/// Address and length in bytes.
type Memory = (usize, usize);

/// The dictionary that `python/gradwire/torch/_group.py` builds. Codes of dtype, reduction and algorithm are the
/// discriminants of the Rust enums; reductions count from 0 in the order of [`ReduceOp`].
#[derive(FromPyObject)]
pub(crate) struct Call {
    #[pyo3(item)]
    kind: String,
    #[pyo3(item)]
    input: Memory,
    #[pyo3(item)]
    output: Memory,
    #[pyo3(item)]
    timeout_s: f64,
    #[pyo3(item)]
    keep: Vec<Py<PyAny>>,
    #[pyo3(item, default)]
    dtype: u8,
    #[pyo3(item, default)]
    reduce: u8,
    #[pyo3(item, default)]
    factor: f64,
    #[pyo3(item, default)]
    peer: Option<u32>,
    #[pyo3(item, default)]
    tag: u32,
    #[pyo3(item, default)]
    splits: Option<(Vec<usize>, Vec<usize>)>,
    #[pyo3(item, default)]
    algorithm: u8,
    #[pyo3(item, default)]
    policy: Option<PolicyNumbers>,
    #[pyo3(item, default)]
    residual: Option<Memory>,
    #[pyo3(item, default)]
    priority: Option<u8>,
    #[pyo3(item, default)]
    traffic_class: u8,
    #[pyo3(item, default)]
    sample_rate: Option<f64>,
    #[pyo3(item, default)]
    important: Option<Vec<bool>>,
    #[pyo3(item, default)]
    contributions: bool,
}

/// Priority of a call that names none: hooks may go before and after it.
const PRIORITY_DEFAULT: u8 = 128;

impl Call {
    /// The preset that its policy began as, if it has one.
    pub(crate) fn preset(&self) -> Option<&'static str> {
        self.policy.as_ref().and_then(PolicyNumbers::preset)
    }

    /// The request, and what keeps its memory alive; `Err` is the problem with the call.
    ///
    /// # Safety
    /// The addresses are valid for their lengths for as long as the returned objects live, and nobody else uses
    /// that memory until the operation is done.
    pub(crate) unsafe fn into_request(self) -> Result<(Request, Vec<Py<PyAny>>), String> {
        let collective = self.collective()?;
        let timeout = Duration::try_from_secs_f64(self.timeout_s)
            .map_err(|error| format!("timeout of {} s: {error}", self.timeout_s))?;
        let importance: Option<Arc<dyn ImportanceRule>> = match (self.important, self.sample_rate) {
            (Some(parts), _) => Some(Arc::new(Given::new(parts))),
            (None, Some(sample_rate)) => Some(Arc::new(Magnitude { sample_rate })),
            (None, None) => None,
        };
        let tags = Tags { class: self.traffic_class, importance };
        let request = Request {
            collective,
            dtype: dtype(self.dtype)?,
            reduce: reduction(self.reduce, self.factor)?,
            // SAFETY: the caller's promise, for all three.
            input: unsafe { view(self.input) },
            // SAFETY: as above.
            output: unsafe { view(self.output) },
            policy: self.policy.as_ref().map_or(Ok(Policy::RELIABLE), PolicyNumbers::policy)?,
            // SAFETY: as above.
            residual: unsafe { view(self.residual.unwrap_or_default()) },
            timeout,
            priority: self.priority.unwrap_or(PRIORITY_DEFAULT),
            tags,
            wants_contributions: self.contributions,
            part_of: None,
        };
        Ok((request, self.keep))
    }

    fn collective(&self) -> Result<Collective, String> {
        let peer = || self.peer.ok_or_else(|| format!("{} needs a peer", self.kind));
        Ok(match self.kind.as_str() {
            "all_reduce" => Collective::AllReduce { algorithm: algorithm(self.algorithm)? },
            "broadcast" => Collective::Broadcast { root: peer()? },
            "all_gather" => Collective::AllGather,
            "reduce_scatter" => Collective::ReduceScatter,
            "reduce" => Collective::Reduce { root: peer()? },
            "gather" => Collective::Gather { root: peer()? },
            "scatter" => Collective::Scatter { root: peer()? },
            "all_to_all" => {
                let (input, output) = self.splits.clone().ok_or("all_to_all needs splits")?;
                Collective::AllToAll { input_split_bytes: input, output_split_bytes: output }
            }
            "barrier" => Collective::Barrier,
            "send" => Collective::Send { to: peer()?, tag: self.tag },
            "receive" => Collective::Receive { from: self.peer, tag: self.tag },
            other => return Err(format!("there is no collective '{other}'")),
        })
    }
}

/// # Safety
/// See [`View::new`].
unsafe fn view((address, bytes): Memory) -> View {
    if bytes == 0 {
        return View::EMPTY;
    }
    // SAFETY: the caller's promise.
    unsafe { View::new(address as *mut u8, bytes) }
}

fn algorithm(code: u8) -> Result<Algorithm, String> {
    Algorithm::ALL
        .into_iter()
        .find(|algorithm| *algorithm as u8 == code)
        .ok_or_else(|| format!("there is no algorithm {code}"))
}

fn dtype(code: u8) -> Result<Dtype, String> {
    Dtype::from_code(code).ok_or_else(|| format!("there is no dtype {code}"))
}

fn reduction(code: u8, factor: f64) -> Result<ReduceOp, String> {
    Ok(match code {
        0 => ReduceOp::Sum,
        1 => ReduceOp::Avg,
        2 => ReduceOp::Product,
        3 => ReduceOp::Min,
        4 => ReduceOp::Max,
        5 => ReduceOp::BitAnd,
        6 => ReduceOp::BitOr,
        7 => ReduceOp::BitXor,
        8 => ReduceOp::PremulSum(factor),
        _ => return Err(format!("there is no reduction {code}")),
    })
}
