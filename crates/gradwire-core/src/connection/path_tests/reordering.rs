//! A path that brings packets out of order loses none, and is as good as the others.

use super::*;

#[test]
fn a_path_that_reorders_keeps_its_share() {
    for (seed, spray_run) in SEEDS_AND_RUNS {
        let mut network = Network::with(PATHS, (Spray::Adaptive, spray_run), seed);
        network.paths.iter_mut().for_each(|path| path.rate = LINK_RATE / 4);
        network.buffer = Duration::from_secs(1);
        // Eight packets behind it come before each second one.
        network.paths[0].late_us = 400;
        network.flow(MS(100));
        let before = network.ends[0].path_stats()[0];
        let share = network.share(MS(200));
        let after = network.ends[0].path_stats()[0];
        let (sent, lost) =
            (after.packets_sent - before.packets_sent, after.packets_lost - before.packets_lost);
        assert!(after.trusted && share > 15.0, "{seed}, {spray_run}: a share of {share} %");
        assert!(lost * 1_000 <= sent * 3, "{seed}, {spray_run}: {lost} of {sent} packets count as lost");
        assert_eq!(after.copies_sent, before.copies_sent, "{seed}, {spray_run}");
    }
}
