//! Traffic in both directions at once, as in every all-reduce: what it costs against what the links allow, in virtual time.
//!
//! Acknowledgements wait in the queue of the data that goes their way. A rate controller that took their waiting for a queue
//! of its own would give way to nobody: before they were told apart, these took 1.2 to 1.9 of what the links allow.

use gradwire_collectives::{Algorithm, Policy};
use gradwire_core::recovery::ControllerKind;
use gradwire_sim::{run_each, NetworkOptions, OpPlan, Scenario, Summary, Violation};
use std::time::Duration;

/// The median time of an all-reduce of 4 MB, at 100 Mbit/s unless told otherwise, over what its packets take on the link, without the first two,
/// which also find the rate: the mean of several seeds. No two clocks show the same.
fn time_over_ideal(kind: ControllerKind, algorithm: Algorithm, ranks: usize, rtt: Duration) -> f64 {
    time_over_ideal_on(NetworkOptions::uniform(RATE, 256 * 1514, rtt), kind, algorithm, ranks)
}

fn time_over_ideal_on(
    network: NetworkOptions,
    kind: ControllerKind,
    algorithm: Algorithm,
    ranks: usize,
) -> f64 {
    let op = OpPlan::all_reduce(algorithm, BYTES / 4, Policy::RELIABLE);
    let crossing = BYTES as f64 * 2.0 * (ranks - 1) as f64 / ranks as f64;
    let ideal = crossing * WIRE_BYTES / PAYLOAD_BYTES / network.links[0].up_rate as f64;
    let scenario_of = |seed| {
        let mut scenario = Scenario::quiet(seed, ranks, network.clone(), vec![op.clone(); 2 + COUNTED]);
        scenario.faults[0].0 = Duration::from_secs(1000);
        scenario.host.wake_late_max = Duration::from_micros(60);
        scenario.host.controller = kind;
        scenario.clocks = (0..ranks as u64).map(|rank| Duration::from_millis(rank * 1_234_567)).collect();
        scenario
    };
    let of_seed = |(_, result): (u64, Result<Summary, Violation>)| {
        let summary = result.unwrap_or_else(|violation| panic!("{violation}"));
        let mut times: Vec<Duration> = summary.op_times.iter().skip(2).flatten().copied().collect();
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() / ideal
    };
    run_each(1..1 + SEEDS, scenario_of).into_iter().map(of_seed).sum::<f64>() / SEEDS as f64
}

// test of: ltp/bdp-control
#[test]
fn data_that_goes_the_other_way_hardly_slows_a_flow_down() {
    let bottleneck = ControllerKind::Bottleneck;
    for (algorithm, ranks, most) in
        [(Algorithm::Transpose, 2, 1.1), (Algorithm::Ring, 4, 1.25), (Algorithm::Transpose, 4, 1.25)]
    {
        for ms in [1, 10] {
            let ratio = time_over_ideal(bottleneck, algorithm, ranks, Duration::from_millis(ms));
            println!("{algorithm:?} of {ranks}, {ms} ms: {ratio:.3}");
            assert!(ratio <= most, "{algorithm:?} of {ranks}, {ms} ms: {ratio:.3} of the ideal");
        }
    }
    for kind in [ControllerKind::Timely, ControllerKind::ReceivingRate] {
        let ratio = time_over_ideal(kind, Algorithm::Ring, 4, Duration::from_millis(1));
        println!("{kind:?}: {ratio:.3}");
        assert!(ratio <= 1.25, "{kind:?}: {ratio:.3} of the ideal");
    }
}

/// On a short path each probe that found nothing was followed by four round trips at three quarters of the rate, to drain what acknowledgements held
/// together: 1.12 of the ideal.
// test of: ltp/bdp-control
#[test]
fn where_the_path_is_free_a_probe_is_not_drained_of_what_acknowledgements_hold() {
    for (algorithm, ranks) in [(Algorithm::Transpose, 2), (Algorithm::Ring, 4)] {
        let network = NetworkOptions::uniform(10 * RATE, 256 * 1514, Duration::from_micros(50));
        let ratio = time_over_ideal_on(network, ControllerKind::Bottleneck, algorithm, ranks);
        assert!(ratio <= 1.09, "{algorithm:?} of {ranks}: {ratio:.3} of the ideal");
    }
}

/// A shaper lets a few packets go at once after an idle time. What a dip delivers then was taken for eight times the rate of the link, and each
/// direction's window was made of the other's waits at that rate, or in a ring at what a round trip had at best: 3 MB in flight where 20 KB do, and
/// calls took 1.3 of the ideal time, rings behind buckets of 16 packets 1.5. Behind larger ones not only dips let bursts go: until these were told
/// from what lasts, rings took 1.43.
// test of: ltp/bdp-control
#[test]
fn ranks_behind_shapers_do_not_feed_each_others_windows() {
    for us in [50, 200] {
        let shapers = [
            (Algorithm::Transpose, 2, 4, 1.1),
            (Algorithm::Transpose, 2, 64, 1.1),
            (Algorithm::Ring, 4, 16, 1.15),
            (Algorithm::Ring, 4, 64, 1.15),
        ];
        for (algorithm, ranks, packets, most) in shapers {
            let mut network = NetworkOptions::uniform(RATE, 256 * 1514, Duration::from_micros(us));
            network.links[0].bucket_bytes = packets * 1514;
            let ratio = time_over_ideal_on(network, ControllerKind::Bottleneck, algorithm, ranks);
            println!("{algorithm:?} of {ranks}, {us} us, buckets of {packets}: {ratio:.3}");
            assert!(
                ratio <= most,
                "{algorithm:?} of {ranks}, {us} us, buckets of {packets}: {ratio:.3} of the ideal"
            );
        }
    }
}

/// 100 Mbit/s in bytes per second.
const RATE: u64 = 12_500_000;
const BYTES: usize = 4 << 20;
const COUNTED: usize = 3;
/// They differ by 3 % for a pair and by 10 % for four under the TIMELY-like controller, which has no more to spare.
const SEEDS: u64 = 4;
const PAYLOAD_BYTES: f64 = 1_408.0;
/// With the headers of gradwire, UDP, IP and Ethernet.
const WIRE_BYTES: f64 = 1_474.0;
