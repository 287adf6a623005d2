//! What must hold at the end of every collective, computed from outside.
//!
//! Exact collectives are compared with closed formulas. Tolerant reductions are compared with the same reduction
//! over a mask of contributions, and the mask itself with what the network delivered. The inputs are integers, so right
//! means equal bits; only where a bucket is rotated, it means equal within the rounding of the arithmetic.

mod exact;
mod portions;
mod pull;
mod rotated;
mod tolerant;

pub use exact::expected_output;

use crate::plan::OpKind;
use crate::rank::Finished;
use crate::world::World;
use crate::Violation;
use gradwire_collectives::{Algorithm, DeliveryReport};

/// Checks a collective that every rank has ended.
pub(crate) fn check_op(world: &World, op: usize) -> Result<(), Violation> {
    if !world.succeeded(op) {
        return Ok(());
    }
    check_nobody_returned_early(world, op)?;
    if world.scenario.ops[op].is_tolerant() {
        tolerant::check(world, op)
    } else {
        exact::check(world, op)
    }
}

/// Looks at what dedicated servers took part in, when all of it is over.
pub(crate) fn check_served(world: &World) -> Result<(), Violation> {
    let over_servers = |op: &usize| {
        let plan = &world.scenario.ops[*op];
        plan.kind == OpKind::AllReduce(Algorithm::ParameterServer) && plan.elems > 0
    };
    let ops = (0..world.scenario.ops.len()).filter(over_servers);
    for (number, op) in ops.enumerate() {
        if world.succeeded(op) && world.scenario.ops[op].is_tolerant() {
            tolerant::check_served(world, op, number as u64)?;
        }
    }
    Ok(())
}

/// Looks at the guard bytes of every tensor.
pub(crate) fn check_memory(world: &World) -> Result<(), Violation> {
    for (index, rank) in world.ranks.iter().enumerate() {
        for (op, run) in rank.runs.iter().enumerate() {
            let Some(run) = run else { continue };
            for (tensor, name) in
                [(&run.input, "input"), (&run.output, "output"), (&run.residual, "residual")]
            {
                if !tensor.guards_are_intact() {
                    return Err(Violation::Overrun { op, rank: index, tensor: name });
                }
            }
        }
    }
    Ok(())
}

/// Ranks that have ended everything know the same about the network.
pub(crate) fn check_agreement(world: &World) -> Result<(), Violation> {
    if !(0..world.scenario.ops.len()).all(|op| world.succeeded(op)) {
        return Ok(());
    }
    let known = |rank: usize| world.ranks[rank].group.agreed();
    match (1..world.scenario.world_size).find(|rank| known(*rank) != known(0)) {
        None => Ok(()),
        Some(rank) => {
            let (ours, theirs) = (format!("{:?}", known(0)), format!("{:?}", known(rank)));
            Err(Violation::Disagreed { rank, ours, theirs })
        }
    }
}

/// Whether each shard of a tolerant reduction may be summed in one place, to which every rank sends its own values (the
/// reports say so in the end): by transpose or over parameter servers. Halving and doubling is always exact, so a
/// tolerant one is a transpose.
pub(crate) fn may_sum_in_one_place(kind: OpKind) -> bool {
    match kind {
        OpKind::AllReduce(algorithm) => algorithm != Algorithm::Ring,
        _ => kind == OpKind::ReduceScatter,
    }
}

/// Whether a reduction went round a ring, as all its reports say.
pub(crate) fn is_ring(reports: &[&DeliveryReport]) -> bool {
    reports.iter().all(|report| report.collective.contains("ring"))
}

/// How a collective ended on a rank that took part.
fn finished(world: &World, op: usize, rank: usize) -> Option<&Finished> {
    world.ranks[rank].runs[op].as_ref()?.finished.as_ref()
}

/// An all-reduce or a barrier depends on every rank: nobody may have its result before everybody has called.
fn check_nobody_returned_early(world: &World, op: usize) -> Result<(), Violation> {
    if !matches!(world.scenario.ops[op].kind, OpKind::AllReduce(_) | OpKind::Barrier | OpKind::ReduceScatter)
    {
        return Ok(());
    }
    // Without elements nothing depends on anybody. A tolerant reduction needs a part of everybody's.
    let needs_everybody = match world.scenario.ops[op].kind {
        OpKind::Barrier => true,
        _ => world.scenario.ops[op].elems > 0,
    };
    let runs = || world.ranks.iter().map(|rank| rank.runs[op].as_ref());
    let last_call = runs().flatten().map(|run| run.submitted_at).max();
    let first_end = runs().flatten().filter_map(|run| Some(run.finished.as_ref()?.at)).min();
    match (last_call, first_end) {
        (Some(last_call), Some(first_end)) if first_end < last_call && needs_everybody => {
            Err(Violation::ReturnedEarly { op, first_end, last_call })
        }
        _ => Ok(()),
    }
}
