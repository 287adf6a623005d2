//! All-reduces over parameter servers, colocated and dedicated.

use crate::plan::{Fault, OpKind};
use crate::{Rng, Scenario};
use gradwire_collectives::{Algorithm, Fill, Rotation, Servers};
use std::time::Duration;

/// In one run of three most all-reduces go over parameter servers: one to as many as there are ranks, or up to three of
/// their own.
pub(in crate::scenario) fn draw_servers(rng: &mut Rng, scenario: &mut Scenario) {
    if scenario.judges_paths || !rng.chance(0.33) {
        return;
    }
    let most = scenario.world_size as u64;
    scenario.host.servers = Servers::Colocated(rng.pick(&[1, 1, 2, 3, most]) as u32);
    if rng.chance(0.5) {
        draw_dedicated(rng, scenario);
    }
    for op in &mut scenario.ops {
        if matches!(op.kind, OpKind::AllReduce(_)) && rng.chance(0.8) {
            op.kind = OpKind::AllReduce(Algorithm::ParameterServer);
        }
    }
}

/// Memory for everything, or for little more than the largest call alone. What would happen to a rank may happen to a
/// server instead.
fn draw_dedicated(rng: &mut Rng, scenario: &mut Scenario) {
    let count = rng.pick(&[1, 1, 2, 3]);
    let largest = scenario.ops.iter().map(|op| op.sent_bytes() as u64).max().unwrap_or_default();
    // Halves are summed in float32 beside the buffer.
    let buffer_bytes = rng.pick(&[1 << 30, 3 * largest + 1024]);
    scenario.host.servers = Servers::Dedicated { count, buffer_bytes };
    // Blocks that no worker delivers are filled as well.
    for op in scenario.ops.iter_mut().filter(|op| op.is_tolerant()) {
        let may_keep = !op.in_place && op.policy.rotation == Rotation::Off;
        if rng.chance(0.4) {
            op.policy.gather.fill =
                if may_keep { rng.pick(&[Fill::Local, Fill::Previous]) } else { Fill::Local };
        }
    }
    // A server alone has a peer, so that faults which need two ranks have them.
    if rng.chance(0.5) {
        let server = scenario.world_size + rng.below(0..u64::from(count)) as usize;
        for (_, fault) in &mut scenario.faults {
            strike(fault, server);
        }
    }
    let longest = scenario.host.peer_timeout * 3;
    if scenario.faults.len() == 1 && rng.chance(0.1) {
        let server = scenario.world_size + rng.below(0..u64::from(count)) as usize;
        let at = Duration::from_micros(rng.log_uniform(100, 300_000));
        scenario.faults.push((at, Fault::Pause(server, rng.duration(longest))));
        scenario.faults.sort_by_key(|(at, _)| *at);
    }
}

fn strike(fault: &mut Fault, server: usize) {
    match fault {
        Fault::Pause(rank, _)
        | Fault::Suspend(rank, _)
        | Fault::ClockJump(rank, _)
        | Fault::Partition(rank, _, _)
        | Fault::Crash(rank) => *rank = server,
        Fault::GrayPath(..) | Fault::Heal => {}
    }
}
