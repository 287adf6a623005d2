//! Exact collectives against closed formulas.

use super::finished;
use crate::plan::{OpKind, OpPlan};
use crate::values::{by_factor, contribution_by, encode, encode_mean, load, show};
use crate::world::World;
use crate::Violation;
use gradwire_collectives::ReduceOp;

pub(super) fn check(world: &World, op: usize) -> Result<(), Violation> {
    let world_size = world.scenario.world_size;
    let plan = &world.scenario.ops[op];
    let everywhere =
        matches!(plan.kind, OpKind::AllReduce(_)).then(|| expected_output(plan, op, 0, world_size));
    for rank in 0..world_size {
        let Some(finished) = finished(world, op, rank) else { continue };
        let own = everywhere.is_none().then(|| expected_output(plan, op, rank, world_size));
        let expected = everywhere.as_ref().or(own.as_ref()).map_or(&[][..], Vec::as_slice);
        compare(plan, op, rank, expected, &finished.output)?;
        if let Ok(report) = &finished.outcome {
            if !report.uncounted.is_empty() {
                let reported = format!("{} ranges uncounted", report.uncounted.len());
                return Err(Violation::ReportDisagrees {
                    op,
                    rank,
                    reported,
                    actual: "an exact collective".into(),
                });
            }
        }
    }
    Ok(())
}

fn compare(plan: &OpPlan, op: usize, rank: usize, expected: &[u8], got: &[u8]) -> Result<(), Violation> {
    if expected == got {
        return Ok(());
    }
    let width = plan.dtype.bytes();
    let elem = expected.iter().zip(got).position(|(a, b)| a != b).unwrap_or(0) / width;
    let text = |bytes: &[u8]| {
        if bytes.len() < (elem + 1) * width {
            return format!("only {} bytes", bytes.len());
        }
        show(plan.dtype, load(bytes, plan.dtype, elem))
    };
    Err(Violation::WrongElement { op, rank, elem: elem as u64, expected: text(expected), got: text(got) })
}

/// What `rank` must hold in its output after an exact collective that is number `op` of its list.
#[must_use]
pub fn expected_output(plan: &OpPlan, op: usize, rank: usize, world_size: usize) -> Vec<u8> {
    let reduced = |first: usize| {
        let elems = first as u64..(first + plan.elems) as u64;
        by_factor(plan.dtype, op, elems, |factor| reduced_element(plan, world_size, factor))
    };
    match plan.kind {
        OpKind::AllReduce(_) => reduced(0),
        OpKind::ReduceScatter => reduced(rank * plan.elems),
        OpKind::Reduce(root) if rank == root => reduced(0),
        OpKind::Broadcast(root) => plan.copied(op, root, 0),
        OpKind::AllGather => (0..world_size).flat_map(|from| plan.copied(op, from, 0)).collect(),
        OpKind::Gather(root) if rank == root => {
            (0..world_size).flat_map(|from| plan.copied(op, from, 0)).collect()
        }
        OpKind::Scatter(root) => plan.copied(op, root, rank),
        OpKind::AllToAll => (0..world_size).flat_map(|from| plan.part(op, from, rank)).collect(),
        OpKind::SendReceive { from, to, .. } if rank == to => plan.copied(op, from, to),
        _ => Vec::new(),
    }
}

fn reduced_element(plan: &OpPlan, world_size: usize, factor: i64) -> u64 {
    let values = (0..world_size).map(|rank| contribution_by(plan.dtype, plan.reduce, rank, factor));
    let fold = |f: fn(i64, i64) -> i64| values.clone().reduce(f).unwrap_or_default();
    let value = match plan.reduce {
        ReduceOp::Avg => {
            return encode_mean(plan.dtype, fold(|a, b| a + b), world_size as u32);
        }
        ReduceOp::Min => fold(i64::min),
        ReduceOp::Max => fold(i64::max),
        ReduceOp::Product => fold(|a, b| a * b),
        ReduceOp::BitAnd => fold(|a, b| a & b),
        ReduceOp::BitOr => fold(|a, b| a | b),
        ReduceOp::BitXor => fold(|a, b| a ^ b),
        ReduceOp::PremulSum(factor) => fold(|a, b| a + b) * factor as i64,
        ReduceOp::Sum => fold(|a, b| a + b),
    };
    encode(plan.dtype, value)
}
