//! Ranks know the same about their network at the same collective, and what they know is true.

use gradwire_collectives::{AgreedNetwork, Algorithm, ExchangePlan, Policy};
use gradwire_sim::{run, run_each, NetworkOptions, OpPlan, Scenario, Summary, Violation};
use std::time::Duration;

const RATE: u64 = 12_500_000;
const RTT: Duration = Duration::from_millis(2);

/// As many all-reduces of 400 KB as it takes to agree, among four ranks.
fn training(policy: Policy, loss: f64) -> Scenario {
    let op = OpPlan::all_reduce(Algorithm::Transpose, 100_000, policy);
    let mut network = NetworkOptions::uniform(RATE, 4_000_000, RTT);
    network.impairments.loss = loss;
    let mut scenario = Scenario::quiet(3, 4, network, vec![op; 42]);
    scenario.in_flight_max = 3;
    scenario.faults[0].0 = Duration::from_secs(100);
    scenario
}

fn agreed(result: Result<Summary, Violation>) -> AgreedNetwork {
    let summary = result.unwrap_or_else(|violation| panic!("{violation}"));
    summary.agreed.expect("42 collectives are past the first switch")
}

// test of: auto/agreed-network
#[test]
fn what_ranks_agree_on_is_the_network_that_there_is() {
    let quiet = agreed(run(training(Policy::AUTO, 0.0), false));
    assert!(quiet.rtt >= RTT && quiet.rtt < RTT * 5 / 4, "{quiet:?}");
    assert!(quiet.rate > RATE * 3 / 4 && quiet.rate < RATE * 11 / 10, "{quiet:?}");
    assert!(quiet.loss <= 0.0, "{quiet:?}");
}

#[test]
fn the_loss_that_ranks_agree_on_follows_the_network_under_every_preset() {
    for loss in [0.02, 0.1] {
        let presets = 0..Policy::PRESETS.len() as u64;
        let results = run_each(presets, |index| training(Policy::PRESETS[index as usize].1, loss));
        for ((name, _), (_, result)) in Policy::PRESETS.into_iter().zip(results) {
            let known = agreed(result);
            // `mlt` and `dlcp` stop at a tenth whatever the network does.
            assert!(known.loss >= known.packet_loss, "{name}: {known:?}");
            let ratio = f64::from(known.packet_loss) / loss;
            assert!((0.7..1.4).contains(&ratio), "{name} at {loss}: {known:?}");
        }
    }
}

// test of: auto/shared-cores
#[test]
fn eight_ranks_share_a_tolerant_ring_from_when_they_know_that_one_of_them_shares_its_cores_and_nothing_is_lost(
) {
    let schedules = |shares_cores, loss| {
        let op = OpPlan::all_reduce(Algorithm::Auto, 1 << 20, Policy::AUTO);
        let mut network = NetworkOptions::uniform(1_250_000_000, 4_000_000, Duration::from_micros(200));
        network.impairments.loss = loss;
        let mut scenario = Scenario::quiet(7, 8, network, vec![op; 8]);
        scenario.host.exchange = ExchangePlan { first: 3, every: 64, lag: 2 };
        scenario.host.shares_cores = shares_cores;
        scenario.faults[0].0 = Duration::from_secs(100);
        let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
        assert!(summary.agreed.as_ref().is_some_and(|known| known.shares_cores == shares_cores));
        let is_ring = |name: Option<String>| name.expect("it ended well").contains("ring");
        summary.op_names.into_iter().map(is_ring).collect::<Vec<bool>>()
    };
    let rings = schedules(true, 0.0);
    // The exchange has the place of the fourth, and holds two places later.
    assert_eq!(rings, [false, false, false, false, true, true, true, true]);
    assert!(
        !schedules(true, 0.01).contains(&true),
        "a lost partial sum would take four ranks' values with it"
    );
    assert!(!schedules(false, 0.0).contains(&true));
}

/// How long all-reduces of a megabyte among four ranks take at first, and when they have agreed twice on what they measured; rank 2 has
/// so much of the others' rate.
fn with_a_link_of(share: f64, policy: Policy) -> ([Duration; 2], Summary) {
    let op = OpPlan::all_reduce(Algorithm::Auto, 1 << 18, policy);
    let mut network = NetworkOptions::uniform(RATE, 400_000, RTT);
    network.links = vec![network.links[0]; 4];
    let rate = (RATE as f64 * share) as u64;
    (network.links[2].up_rate, network.links[2].down_rate) = (rate, rate);
    let mut scenario = Scenario::quiet(5, 4, network, vec![op; 64]);
    scenario.host.exchange.every = 24;
    scenario.host.exchange.lag = 12;
    scenario.faults[0].0 = Duration::from_secs(100);
    let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
    let median = |from: usize, to: usize| {
        let mut times: Vec<Duration> = summary.op_times[from..to].iter().flatten().copied().collect();
        times.sort_unstable();
        times[times.len() / 2]
    };
    ([median(4, 18), median(48, 64)], summary)
}

// test of: auto/slow-links, auto/weighted-transpose
#[test]
fn a_rank_whose_link_is_slow_reduces_less_once_all_know_it_and_holds_up_the_others_less() {
    for policy in [Policy::RELIABLE, Policy::AUTO] {
        let ([_, healthy], _) = with_a_link_of(1.0, policy);
        for (share, eighths, most) in [(0.5, 3..=4, 1.5), (0.7, 4..=6, 1.4)] {
            let ([before, after], summary) = with_a_link_of(share, policy);
            let links = summary.agreed.expect("all have measured").links.expect("one is slow");
            let found = links.eighths();
            println!("{share}: {healthy:?}, {before:?}, {after:?}, {found:?}");
            assert!(
                eighths.contains(&found[2]) && [0, 1, 3].iter().all(|rank| found[*rank] == 8),
                "{found:?}"
            );
            assert!(
                before.as_secs_f64() > healthy.as_secs_f64() / share * 0.9,
                "{before:?} after {healthy:?}"
            );
            assert!(after.as_secs_f64() < healthy.as_secs_f64() * most, "{after:?} after {healthy:?}");
        }
    }
}
