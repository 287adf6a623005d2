//! Ranks know the same about their network at the same collective, and what they know is true.

use gradwire_collectives::{AgreedNetwork, Algorithm, Dtype, Policy, ReduceOp};
use gradwire_sim::{run, NetworkOptions, OpKind, OpPlan, Scenario, Summary};
use std::time::Duration;

const RATE: u64 = 12_500_000;
const RTT: Duration = Duration::from_millis(2);

/// As many all-reduces of 400 KB as it takes to agree, among four ranks.
fn trained(policy: Policy, loss: f64) -> Summary {
    let op = OpPlan {
        kind: OpKind::AllReduce(Algorithm::Transpose),
        dtype: Dtype::F32,
        elems: 100_000,
        reduce: ReduceOp::Avg,
        policy,
        in_place: true,
        priority: 0,
    };
    let mut network = NetworkOptions::uniform(RATE, 4_000_000, RTT);
    network.impairments.loss = loss;
    let mut scenario = Scenario::quiet(3, 4, network, vec![op; 42]);
    scenario.in_flight_max = 3;
    scenario.faults[0].0 = Duration::from_secs(100);
    run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"))
}

fn agreed(policy: Policy, loss: f64) -> AgreedNetwork {
    trained(policy, loss).agreed.expect("42 collectives are past the first switch")
}

// test of: auto/agreed-network
#[test]
fn what_ranks_agree_on_is_the_network_that_there_is() {
    let quiet = agreed(Policy::AUTO, 0.0);
    assert!(quiet.rtt >= RTT && quiet.rtt < RTT * 5 / 4, "{quiet:?}");
    assert!(quiet.rate > RATE * 3 / 4 && quiet.rate < RATE * 11 / 10, "{quiet:?}");
    assert!(quiet.loss <= 0.0, "{quiet:?}");
}

#[test]
fn the_loss_that_ranks_agree_on_follows_the_network_under_every_preset() {
    for (name, policy) in Policy::PRESETS {
        for loss in [0.02, 0.1] {
            let known = agreed(policy, loss);
            // `mlt` and `dlcp` stop at a tenth whatever the network does.
            assert!(known.loss >= known.packet_loss, "{name}: {known:?}");
            let ratio = f64::from(known.packet_loss) / loss;
            assert!((0.7..1.4).contains(&ratio), "{name} at {loss}: {known:?}");
        }
    }
}
