//! A tolerant reduce-scatter in the surroundings of the swarm: every checker of the oracle on it, with what it owes.

use gradwire_collectives::{DeadlineRule, DivideBy, Dtype, GatherRule, Policy, ReduceOp};
use gradwire_sim::{run, Fault, Impairments, OpKind, OpPlan, Scenario};
use std::time::Duration;

fn scattering(seed: u64) -> OpPlan {
    const MLT: Policy = Policy { gather: GatherRule::EXACT, ..Policy::MLT };
    const ULTIMA: Policy = Policy { gather: GatherRule::EXACT, ..Policy::ULTIMA };
    let deadline = DeadlineRule::Fixed(Duration::from_millis(2));
    let policy = match seed % 5 {
        0 | 1 => Policy::AUTO,
        2 => MLT,
        3 => Policy { deadline, floor: 0.2, loss_bound: 0.3, ..Policy::AUTO },
        _ => ULTIMA,
    };
    let divide_by = if seed % 3 == 0 { DivideBy::World } else { DivideBy::Contributions };
    OpPlan {
        kind: OpKind::ReduceScatter,
        dtype: [Dtype::F32, Dtype::F64, Dtype::Bf16, Dtype::F16][seed as usize % 4],
        elems: 5_000 + 37 * seed as usize,
        reduce: if seed % 2 == 0 { ReduceOp::Avg } else { ReduceOp::Sum },
        policy: Policy { divide_by, ..policy },
        in_place: false,
        priority: 0,
    }
}

// test of: auto/error-feedback
#[test]
fn whatever_is_lost_the_mean_is_over_what_counted_and_somebody_owes_the_rest() {
    let mut uncounted = 0;
    for seed in 0..60 {
        let mut scenario = Scenario::swarm(seed);
        scenario.network.impairments = Impairments::default();
        scenario.network.impairments.loss = [0.0, 0.02, 0.1][seed as usize % 3];
        scenario.faults = vec![(Duration::from_secs(2), Fault::Heal)];
        // Beside the collectives of the seed, three in a row.
        (0..3).for_each(|more| scenario.ops.insert(more, scattering(seed)));
        let text = scenario.to_string();
        let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}\n{text}"));
        uncounted += summary.elems_uncounted;
    }
    assert!(uncounted > 10_000, "only {uncounted} elements were left out: the test proves nothing");
}
