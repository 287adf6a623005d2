//! The gate: thousands of seeded runs of whole groups, every one checked from outside.

use gradwire_sim::{run, run_seeds, Scenario, Tally};
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

/// Fixed seeds: a change that breaks one of them is seen by everybody.
const FIXED: u64 = 2_000;
/// Seeds that nobody has run before.
const FRESH: u64 = 300;
/// Runs in which single paths go bad: longer than the others, because a share means nothing in a short one.
const BAD_PATHS: u64 = 30;
/// Of these too some that nobody has run before.
const BAD_PATHS_FRESH: u64 = 10;

fn judge(tally: &Tally) {
    println!("{tally}");
    assert!(tally.failures.is_empty(), "{}", tally.describe_failures());
}

#[test]
fn every_promise_holds_on_all_fixed_seeds() {
    let tally = run_seeds(0..FIXED, Scenario::swarm);
    judge(&tally);
    assert_eq!(tally.seeds, FIXED);
    // A swarm in which nothing is ever lost or left out would prove nothing.
    assert!(tally.datagrams_lost > 1_000 && tally.elems_uncounted > 1_000, "{tally}");
}

#[test]
fn every_promise_holds_on_seeds_that_nobody_has_run_before() {
    judge(&run_seeds(fresh(FRESH), Scenario::swarm));
}

/// Seeds that begin with the time of day, and are printed.
fn fresh(seeds: u64) -> Range<u64> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    let start = since_epoch.as_secs() * 1_000;
    println!("fresh seeds {start}..{}", start + seeds);
    start..start + seeds
}

/// A rank began collectives whose data had come early, and took that for a sign of life.
#[test]
fn early_data_that_is_handed_out_puts_no_deadline_off() {
    judge(&run_seeds(95_003_430..95_003_431, Scenario::swarm));
}

/// A larger bucket warmed up anew while a result of a timed reduction was on its way: that had no limit any more.
#[test]
fn a_larger_bucket_takes_no_limit_from_results_that_nothing_repairs() {
    judge(&run_seeds(14_550_538..14_550_539, Scenario::swarm));
}

/// Repairs left three at a time, and three answers in a row were lost before the last of them could.
#[test]
fn a_repair_behind_others_is_excused_by_answers_that_were_lost_after_them() {
    judge(&run_seeds(78_001_504..78_001_505, Scenario::swarm));
}

/// Shards of 28 large packets came over a slow trunk, and their deadline was that of the faster link to the next rank of the ring: their
/// sender waited for acknowledgements behind other data, and seemed to be silent.
#[test]
fn a_ring_over_a_slow_trunk_takes_no_deadline_from_a_faster_link() {
    judge(&run_seeds(1_810_000_000_399..1_810_000_000_400, Scenario::swarm));
}

#[test]
fn equal_seeds_give_equal_traces_and_different_seeds_do_not() {
    let trace = |seed| run(Scenario::swarm(seed), false).map(|summary| summary.trace_hash);
    for seed in 0..60 {
        assert_eq!(trace(seed), trace(seed), "seed {seed} is not deterministic");
    }
    assert_ne!(trace(1), trace(2));
}

#[test]
fn gray_paths_lose_their_share_and_healed_ones_get_it_back_on_all_fixed_seeds() {
    let tally = run_seeds(0..BAD_PATHS, Scenario::bad_paths);
    judge(&tally);
    assert!(tally.path_shares_judged >= BAD_PATHS / 6, "{} of {tally}", tally.path_shares_judged);
}

#[test]
fn gray_paths_lose_their_share_on_seeds_that_nobody_has_run_before() {
    judge(&run_seeds(fresh(BAD_PATHS_FRESH), Scenario::bad_paths));
}
