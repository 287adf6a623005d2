//! Runs seeds, replays one with every event, or measures completion times.

use clap::{Parser, Subcommand};
use gradwire_sim::{measure, run, run_seeds, Scenario};
use std::ops::Range;
use std::process::ExitCode;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Deterministic simulation of gradwire's protocol.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Seeds to run, `A..B`; without any option a few hundred that nobody has run before.
    #[arg(long, value_parser = parse_range, conflicts_with = "seed")]
    seeds: Option<Range<u64>>,
    /// One seed: prints all its options first.
    #[arg(long)]
    seed: Option<u64>,
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
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match (arguments.command, arguments.seed) {
        (Some(Command::Measure { runs }), _) => measure::print_table(runs),
        (None, Some(seed)) => replay(seed, arguments.verbose),
        (None, None) => sweep(arguments.seeds.unwrap_or_else(fresh_seeds)),
    }
}

fn replay(seed: u64, verbose: bool) -> ExitCode {
    let scenario = Scenario::swarm(seed);
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

fn sweep(seeds: Range<u64>) -> ExitCode {
    let started = Instant::now();
    println!("seeds {}..{}", seeds.start, seeds.end);
    let tally = run_seeds(seeds, Scenario::swarm);
    println!("{tally} in {:.1} s", started.elapsed().as_secs_f64());
    print!("{}", tally.describe_failures());
    if tally.failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn fresh_seeds() -> Range<u64> {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH);
    let start = since_epoch.map_or(1, |elapsed| elapsed.as_secs()) * 1000;
    start..start + 300
}

fn parse_range(text: &str) -> Result<Range<u64>, String> {
    let (start, end) = text.split_once("..").ok_or("expected A..B")?;
    let number = |text: &str| text.parse::<u64>().map_err(|error| format!("{text:?}: {error}"));
    let (start, end) = (number(start)?, number(end)?);
    if start >= end {
        return Err(format!("{start}..{end} holds no seed"));
    }
    Ok(start..end)
}
