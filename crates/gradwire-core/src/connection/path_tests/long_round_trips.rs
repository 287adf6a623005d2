//! A path of hundreds of packets a round trip.

use super::*;

/// A gigabit over 20 ms: seven losses in a hundred each are those of four round trips of some 190 packets on this path. When they come is chance: the mean of several.
// test of: mlt/gray-path
#[test]
fn a_path_that_loses_1_percent_loses_most_of_its_share_within_ten_round_trips() {
    let round_trip = MS(20);
    let share = |(seed, spray_run)| {
        let mut network = Network::with(PATHS, (Spray::Adaptive, spray_run), seed);
        network.paths.iter_mut().for_each(|path| (path.rate, path.delay) = (LINK_RATE / 4, round_trip / 2));
        network.flow(round_trip * 50);
        network.paths[0].loss_percent = 1;
        network.flow(round_trip * 10);
        network.share(round_trip * 40)
    };
    let shares: Vec<f64> = (7..19).flat_map(|seed| [(seed, 1), (seed, 4)]).map(share).collect();
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    assert!(mean < SHARE_MAX, "{mean}: {shares:?}");
}
