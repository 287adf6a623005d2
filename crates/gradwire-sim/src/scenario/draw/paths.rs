//! Trouble on single paths: unlike delays, a path that turns gray for a time, one that dies, one that is gray at once.

use crate::plan::{Fault, OpPlan};
use crate::{Impairments, PathTrouble, Rng, Scenario};
use gradwire_collectives::{Algorithm, Policy, Servers};
use gradwire_core::Spray;
use std::time::Duration;

/// Two in five runs with several paths have trouble on some of them, and a part of those go on for so long that shares
/// can be judged. At least one path is always well.
pub(in crate::scenario) fn draw_paths(rng: &mut Rng, scenario: &mut Scenario) {
    if scenario.host.paths < 2 || !rng.chance(0.4) {
        return;
    }
    scenario.host.spray = rng.pick(&SPRAYS);
    if rng.chance(0.3) {
        let farthest = scenario.network.delay * rng.pick(&[1, 1, 5]);
        let trouble = |rng: &mut Rng| PathTrouble { loss: 0.0, delay: rng.duration(farthest) };
        scenario.network.paths = (0..scenario.host.paths).map(|_| trouble(rng)).collect();
    } else if matches!(scenario.world_size, 2 | 3) && rng.chance(0.5) {
        prolong(rng, scenario);
    }
    draw_troubles(rng, scenario);
}

/// A run in which shares of bad and healed paths can be judged: two or three ranks, several paths, little else.
pub(in crate::scenario) fn bad_paths(seed: u64) -> Scenario {
    let mut rng = Rng::new(seed).fork(8);
    let mut scenario = super::swarm(seed);
    scenario.world_size = rng.pick(&[2, 2, 2, 3]);
    scenario.start.resize(scenario.world_size, Duration::ZERO);
    (scenario.network.trunk, scenario.network.impaired_rank) = (None, None);
    scenario.network.paths.clear();
    scenario.host.servers = Servers::EVERY_RANK;
    scenario.judges_paths = true;
    (scenario.host.paths, scenario.host.spray) = (rng.pick(&[2, 2, 3, 4]), Spray::Adaptive);
    prolong(&mut rng, &mut scenario);
    draw_troubles(&mut rng, &mut scenario);
    scenario
}

fn draw_troubles(rng: &mut Rng, scenario: &mut Scenario) {
    let paths = usize::from(scenario.host.paths);
    let span = scenario.ideal_time().max(Duration::from_millis(1));
    let well = rng.below(0..paths as u64) as usize;
    for path in (0..paths).filter(|path| *path != well) {
        if rng.chance(1.0 / (paths - 1) as f64) {
            draw_trouble(rng, scenario, path, span);
        }
    }
    scenario.faults.sort_by_key(|(at, _)| *at);
}

/// One path loses 1 to 30 % for a time, or everything; in one of three cases from the first packet on.
fn draw_trouble(rng: &mut Rng, scenario: &mut Scenario, path: usize, span: Duration) {
    let loss_per_mille = if rng.chance(0.3) { 1_000 } else { rng.log_uniform(10, 300) as u16 };
    let at = if rng.chance(0.35) { Duration::ZERO } else { rng.duration(span) };
    let longest = span * rng.pick(&[1, 1, 4]) / 2;
    let length = span / 8 + rng.duration(longest);
    scenario.faults.push((at, Fault::GrayPath(path, loss_per_mille, length)));
}

/// Enough new data for each pair of ranks that a share of it means something, and little else that goes wrong.
fn prolong(rng: &mut Rng, scenario: &mut Scenario) {
    let policy = if rng.chance(0.5) { Policy::RELIABLE } else { Policy::AUTO };
    let elems = (1 << 18) * 2 + rng.below(0..1_000) as usize;
    let in_place = rng.chance(0.5);
    let plan = OpPlan { in_place, ..OpPlan::all_reduce(Algorithm::Transpose, elems, policy) };
    scenario.ops = vec![plan; rng.below(4..11) as usize];
    scenario.network.impairments =
        Impairments { loss: rng.pick(&[0.0, 0.0, 0.001]), ..Impairments::default() };
    scenario.faults.retain(|(_, fault)| *fault == Fault::Heal);
}

/// The default in most runs.
const SPRAYS: [Spray; 4] = [Spray::Adaptive, Spray::Adaptive, Spray::RoundRobin, Spray::Random];
