//! The presets on links of a known rate, where packets queue and are lost: every sum equals that over the mask of what the
//! network lost (each run is checked), and the time is what the preset promises.

use gradwire_collectives::{DeadlineRule, Policy};
use gradwire_sim::{measure, run, Summary};
use std::time::Duration;

const BYTES: usize = 1 << 20;
const LOSS: f64 = 0.05;
const WARM_UP: usize = 3;
/// Half of the round trip of 1 ms, and 128 datagrams of 1514 bytes at 100 Mbit/s.
const FIRST_WORD: Duration = Duration::from_nanos(500_000 + 128 * 1_514 * 80);

fn runs(policy: Policy, loss: f64) -> Vec<Summary> {
    let seeds = 0..6;
    let ended = seeds.map(|seed| run(measure::scenario(seed, BYTES, loss, policy), false));
    ended.map(|ended| ended.unwrap_or_else(|violation| panic!("{violation}"))).collect()
}

/// Times of the collectives from number `first` on, in order of length.
fn times(runs: &[Summary], first: usize) -> Vec<Duration> {
    let mut times: Vec<Duration> =
        runs.iter().flat_map(|run| run.op_times.iter().skip(first).flatten()).copied().collect();
    times.sort_unstable();
    times
}

fn median(times: &[Duration]) -> Duration {
    times[times.len() / 2]
}

/// `mlt` stops a transfer as soon as enough is in. `ltp` and `auto` let what still flows arrive, and at this size a repair
/// costs little beside the transfer: they gain nothing at the median (measured: 0.99 and 1.01 of `reliable`).
#[test]
fn where_packets_are_lost_mlt_is_faster_than_waiting_for_everything_and_no_preset_is_slower() {
    let reliable = median(&times(&runs(Policy::RELIABLE, LOSS), 1));
    for (name, policy, percent_max) in
        [("mlt", Policy::MLT, 98), ("ltp", Policy::LTP, 105), ("auto", Policy::AUTO, 105)]
    {
        let tolerant = runs(policy, LOSS);
        assert!(
            tolerant.iter().any(|run| run.elems_uncounted > 0),
            "{name} lost nothing: the test proves nothing"
        );
        let median = median(&times(&tolerant, 1));
        assert!(median * 100 <= reliable * percent_max, "{name}: {median:?}, reliable {reliable:?}");
    }
}

/// A stage ends at most one limit after its last sender's first word, and a collective has two. The limit is the time of one
/// stage of an exact round, which took no longer than its round. A word takes half a round trip, behind a full buffer at most.
#[test]
fn ultima_loses_nothing_while_it_warms_up_and_keeps_the_time_of_its_warm_up_after_that() {
    let rounds = WARM_UP as u16;
    let policy = Policy { deadline: DeadlineRule::WarmUp { rounds, percentile: 0.95 }, ..Policy::ULTIMA };
    for run in runs(policy, LOSS) {
        let all: Vec<Vec<Duration>> = run.op_times.iter().map(|op| op.iter().copied().collect()).collect();
        let longest = |ops: &[Vec<Duration>]| ops.iter().flatten().max().copied().unwrap_or_default();
        let (exact, timed) = all.split_at(WARM_UP);
        assert!(
            longest(timed) <= 2 * (longest(exact) + FIRST_WORD),
            "{:?} after {:?}",
            longest(timed),
            longest(exact)
        );
        assert!(run.elems_uncounted > 0, "best effort lost nothing: the test proves nothing");
    }
}

#[test]
fn a_quiet_network_costs_auto_nothing_and_ltp_no_more_than_its_data_percentage_allows() {
    for (name, policy) in [("ltp", Policy::LTP), ("auto", Policy::AUTO)] {
        for run in runs(policy, 0.0) {
            let share = run.elems_uncounted as f64 / (6 * 4 * BYTES / 4) as f64;
            assert!(share <= if name == "auto" { 0.0 } else { 0.2 }, "{name}: {share}");
        }
    }
}
