//! Runs many seeds on all cores and collects what they found.

use crate::{Scenario, Summary, Violation, World};
use std::fmt;
use std::ops::Range;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Mutex;

/// A seed that broke a promise.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The whole run.
    pub scenario: Scenario,
    /// What it broke.
    pub violation: Violation,
}

/// What many seeds did, in all.
#[derive(Debug, Default)]
pub struct Tally {
    /// Seeds run.
    pub seeds: u64,
    /// Datagrams sent.
    pub datagrams: u64,
    /// Datagrams lost or dropped by a full port.
    pub datagrams_lost: u64,
    /// Collectives that ended well.
    pub ops: u64,
    /// Contributions that tolerant reductions left out, in elements.
    pub elems_uncounted: u64,
    /// Shares of gray and healed paths that were judged.
    pub path_shares_judged: u64,
    /// Seeds that broke a promise, by seed.
    pub failures: Vec<Failure>,
}

/// Runs one scenario. A panic of the code under test is a violation like any other.
///
/// # Errors
/// The first promise that was broken.
pub fn run(scenario: Scenario, verbose: bool) -> Result<Summary, Violation> {
    let attempt = AssertUnwindSafe(|| World::new(scenario, verbose).run());
    catch_unwind(attempt).unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_string()));
        Err(Violation::Panicked(text.unwrap_or_default()))
    })
}

/// Runs the scenario of every seed in `seeds`, on every core.
pub fn run_seeds(seeds: Range<u64>, scenario_of: impl Fn(u64) -> Scenario + Sync) -> Tally {
    let mut tally = Tally::default();
    for (seed, result) in run_each(seeds, &scenario_of) {
        tally.add(result, || scenario_of(seed));
    }
    tally
}

/// The same, with the result of each seed, in their order. What has no seed of its own may number its scenarios with them.
pub fn run_each(
    seeds: Range<u64>,
    scenario_of: impl Fn(u64) -> Scenario + Sync,
) -> Vec<(u64, Result<Summary, Violation>)> {
    let next = AtomicU64::new(seeds.start);
    let results = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= seeds.end {
                    break;
                }
                let result = run(scenario_of(seed), false);
                results.lock().expect("no thread panics while it holds the results").push((seed, result));
            });
        }
    });
    let mut results = results.into_inner().expect("every thread has ended");
    results.sort_by_key(|(seed, _)| *seed);
    results
}

impl Tally {
    fn add(&mut self, result: Result<Summary, Violation>, scenario: impl Fn() -> Scenario) {
        self.seeds += 1;
        match result {
            Ok(summary) => {
                self.datagrams += summary.network.sent;
                self.datagrams_lost += summary.network.lost + summary.network.overflowed;
                self.ops += summary.op_times.iter().flatten().count() as u64;
                self.elems_uncounted += summary.elems_uncounted;
                self.path_shares_judged += summary.path_shares_judged;
            }
            Err(violation) => self.failures.push(Failure { scenario: scenario(), violation }),
        }
    }

    /// Adds what other seeds did.
    pub fn merge(&mut self, other: Self) {
        self.seeds += other.seeds;
        self.datagrams += other.datagrams;
        self.datagrams_lost += other.datagrams_lost;
        self.ops += other.ops;
        self.elems_uncounted += other.elems_uncounted;
        self.path_shares_judged += other.path_shares_judged;
        self.failures.extend(other.failures);
    }

    /// One JSON object: the numbers, and every failing seed with what it broke. `first`: the first seed.
    #[must_use]
    pub fn to_json(&self, first: u64) -> String {
        let failure = |failure: &Failure| {
            let what = json_string(&failure.violation.to_string());
            format!("{{\"seed\": {}, \"violation\": {what}}}", failure.scenario.seed)
        };
        let failures: Vec<String> = self.failures.iter().map(failure).collect();
        format!(
            "{{\"first\": {first}, \"seeds\": {}, \"collectives\": {}, \"datagrams\": {}, \"datagrams_lost\": {}, \
             \"elems_uncounted\": {}, \"failures\": [{}]}}",
            self.seeds,
            self.ops,
            self.datagrams,
            self.datagrams_lost,
            self.elems_uncounted,
            failures.join(", ")
        )
    }

    /// The first failures, with the command that replays each; empty when there are none.
    #[must_use]
    pub fn describe_failures(&self) -> String {
        let shown = self.failures.iter().take(FAILURES_SHOWN).map(|failure| {
            let seed = failure.scenario.seed;
            format!(
                "seed {seed}: {}\n  replay: cargo run --profile test -p gradwire-sim -- --seed {seed} --verbose\n{}",
                failure.violation, failure.scenario
            )
        });
        let text: String = shown.collect();
        let rest = self.failures.iter().skip(FAILURES_SHOWN);
        let rest: String =
            rest.map(|failure| format!("seed {}: {}\n", failure.scenario.seed, failure.violation)).collect();
        match self.failures.len() {
            0 => text,
            count => format!("{count} of {} seeds failed\n{text}{rest}", self.seeds),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} seeds, {} failed; {} collectives, {} datagrams of which {} lost, {} elements left out",
            self.seeds,
            self.failures.len(),
            self.ops,
            self.datagrams,
            self.datagrams_lost,
            self.elems_uncounted
        )
    }
}

fn json_string(text: &str) -> String {
    let mut out = String::from('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            letter if letter.is_control() => out.push_str(&format!("\\u{:04x}", letter as u32)),
            letter => out.push(letter),
        }
    }
    out.push('"');
    out
}

/// More would bury the first.
const FAILURES_SHOWN: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_survives_json() {
        assert_eq!(json_string("a \"b\" \\ \n"), r#""a \"b\" \\ \u000a""#);
    }

    #[test]
    fn tallies_add_up_and_name_what_failed() {
        let mut tally = run_seeds(0..3, Scenario::swarm);
        let failure = Failure { scenario: Scenario::swarm(7), violation: Violation::Panicked("no".into()) };
        tally.merge(Tally { seeds: 1, failures: vec![failure], ..Tally::default() });
        let json = tally.to_json(0);
        assert!(
            json.contains("\"seeds\": 4") && json.contains("{\"seed\": 7, \"violation\": \"panic: no\"}"),
            "{json}"
        );
    }
}
