//! Runs seeds, replays one with every event, or measures completion times, of few ranks or of a cluster.

use clap::{Parser, Subcommand};
use gradwire_sim::cluster::Burst;
use gradwire_sim::topology_error::{self, Setting};
use gradwire_sim::{measure, run, run_seeds, Scenario, Tally};
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Deterministic simulation of gradwire's protocol.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 20_000, conflicts_with = "seed")]
    seeds: u64,
    /// The first of them; without it seeds that nobody has run before, from the clock.
    #[arg(long, conflicts_with = "seed")]
    from: Option<u64>,
    /// Prints the result as one JSON object; progress goes to standard error as always.
    #[arg(long, conflicts_with = "seed")]
    json: bool,
    /// One seed: prints all its options first.
    #[arg(long)]
    seed: Option<u64>,
    /// Runs in which single paths go bad and heal, and little else goes wrong, instead of the whole swarm.
    #[arg(long)]
    bad_paths: bool,
    /// Prints every event of the seed.
    #[arg(long, requires = "seed")]
    verbose: bool,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Completion time of a 4-rank transpose all-reduce at 100 Mbit/s and 1 ms round trip, against the link's limit.
    Measure {
        /// Runs for each size and loss.
        #[arg(long, default_value_t = 40)]
        runs: u64,
    },
    /// A reduction over a leaf-spine network, by parameter servers (MLT section 6.2) or another schedule: completion times, cost, memory.
    Burst(Burst),
    /// What best effort loses by schedule (ULTIMA's table 2): one JSON object for each, of values missing from sums.
    TopologyError {
        /// Ranks that call.
        #[arg(long, default_value_t = 8)]
        ranks: usize,
        /// float32 elements of the bucket.
        #[arg(long, default_value_t = 1 << 16)]
        elems: usize,
        /// Share of packets lost by chance.
        #[arg(long, default_value_t = 0.001)]
        loss: f64,
        /// Bytes that a port of the switch holds.
        #[arg(long, default_value_t = 256 << 10)]
        buffer_bytes: u64,
        /// All-reduces that are counted, of each seed.
        #[arg(long, default_value_t = 40)]
        calls: usize,
        /// Runs of each schedule.
        #[arg(long, default_value_t = 4)]
        runs: u64,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let scenario_of = if arguments.bad_paths { Scenario::bad_paths } else { Scenario::swarm };
    match (arguments.command, arguments.seed) {
        (Some(Command::Measure { runs }), _) => measure::print_table(runs),
        (Some(Command::TopologyError { ranks, elems, loss, buffer_bytes, calls, runs }), _) => {
            topology_error::print(Setting { ranks, elems, loss, buffer_bytes, calls }, runs)
        }
        (Some(Command::Burst(burst)), _) => burst.run(),
        (None, Some(seed)) => replay(scenario_of(seed), arguments.verbose),
        (None, None) => {
            sweep(arguments.from.unwrap_or_else(fresh), arguments.seeds, arguments.json, scenario_of)
        }
    }
}

fn replay(scenario: Scenario, verbose: bool) -> ExitCode {
    let seed = scenario.seed;
    print!("{scenario}");
    match run(scenario, verbose) {
        Ok(summary) => {
            println!("{summary:#?}");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("seed {seed}: {violation}");
            ExitCode::FAILURE
        }
    }
}

fn sweep(first: u64, count: u64, json: bool, scenario_of: fn(u64) -> Scenario) -> ExitCode {
    let started = Instant::now();
    let end = first.saturating_add(count);
    eprintln!("seeds {first}..{end}");
    let mut tally = Tally::default();
    let mut at = first;
    while at < end {
        let next = end.min(at.saturating_add(SLICE));
        tally.merge(run_seeds(at..next, scenario_of));
        at = next;
        let (failed, seconds) = (tally.failures.len(), started.elapsed().as_secs());
        eprintln!("{} of {count} seeds, {failed} failed, {seconds} s", at - first);
    }
    if json {
        println!("{}", tally.to_json(first));
    } else {
        println!("seeds {first}..{end}: {tally} in {:.1} s", started.elapsed().as_secs_f64());
        print!("{}", tally.describe_failures());
    }
    if tally.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn fresh() -> u64 {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    since_epoch.map_or(1, |elapsed| elapsed.as_secs()) * 1000
}

/// Seeds between two lines of progress.
const SLICE: u64 = 1000;
