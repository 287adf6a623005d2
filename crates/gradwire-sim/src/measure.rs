//! How long an all-reduce takes against what the link allows, over many seeds.

use crate::{run_each, HostOptions, NetworkOptions, OpPlan, Scenario};
use gradwire_collectives::{Algorithm, Policy};
use std::process::ExitCode;
use std::time::Duration;

/// One row of the table: many runs of one setting.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Bytes of the bucket.
    pub bytes: usize,
    /// Share of datagrams that are lost.
    pub loss: f64,
    /// Preset, for people.
    pub preset: &'static str,
    /// What the payload alone takes on the link.
    pub ideal: Duration,
    /// Times of all runs that kept every promise, sorted.
    pub times: Vec<Duration>,
    /// Runs that broke one.
    pub failed: usize,
    /// Share of the contributed elements that was left out.
    pub uncounted: f64,
    /// Payload bytes sent again, as a share of all sent.
    pub retransmitted: f64,
}

impl Measurement {
    /// Measures `runs` seeds. Four hosts at 100 Mbit/s, round trip 1 ms, 128 full datagrams of buffer at each
    /// port. The first collective, which also finds the rate, is left out: a training job does it once.
    #[must_use]
    pub fn of(bytes: usize, loss: f64, preset: &'static str, policy: Policy, runs: u64) -> Self {
        let mut row = Self {
            bytes,
            loss,
            preset,
            ideal: ideal_time(bytes),
            times: Vec::new(),
            failed: 0,
            uncounted: 0.0,
            retransmitted: 0.0,
        };
        let contributed = (OPS * WORLD_SIZE * bytes / 4) as f64;
        for (seed, result) in run_each(0..runs, |seed| scenario(seed, bytes, loss, policy)) {
            match result {
                Ok(summary) => {
                    row.times.extend(summary.op_times.iter().skip(1).flatten());
                    row.uncounted += summary.elems_uncounted as f64 / contributed / runs as f64;
                    row.retransmitted +=
                        summary.bytes_retransmitted as f64 / summary.bytes_sent as f64 / runs as f64;
                }
                Err(violation) => {
                    println!("seed {seed}, {bytes} bytes, {preset} at {loss}: {violation}");
                    row.failed += 1;
                }
            }
        }
        row.times.sort_unstable();
        row
    }

    /// The time that this share of the runs did not exceed; zero without runs.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        let last = self.times.len().saturating_sub(1);
        self.times.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
    }
}

/// Measures 1 MB and 25 MB at 0, 1 and 5 % loss and prints the table.
#[must_use]
pub fn print_table(runs: u64) -> ExitCode {
    println!("4 ranks, transpose, float32, 100 Mbit/s, 1 ms round trip; ms");
    println!(
        "bytes     preset    loss   ideal     p50     p99     max   p50/ideal  left out  sent again  failed"
    );
    let mut failed = 0;
    for (bytes, runs) in [(1 << 20, runs), (25 << 20, runs.div_ceil(20))] {
        for (preset, policy) in [("auto", Policy::AUTO), ("reliable", Policy::RELIABLE)] {
            for loss in [0.0, 0.01, 0.05] {
                let row = Measurement::of(bytes, loss, preset, policy, runs);
                print_row(&row);
                failed += row.failed;
            }
        }
    }
    if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn print_row(row: &Measurement) {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    println!(
        "{:<9} {:<9} {:>4.0}% {:>7.1} {:>7.1} {:>7.1} {:>7.1} {:>11.3} {:>8.2}% {:>10.2}% {:>7}",
        row.bytes,
        row.preset,
        row.loss * 100.0,
        ms(row.ideal),
        ms(row.quantile(0.5)),
        ms(row.quantile(0.99)),
        ms(row.quantile(1.0)),
        ms(row.quantile(0.5)) / ms(row.ideal),
        row.uncounted * 100.0,
        row.retransmitted * 100.0,
        row.failed
    );
}

/// Equal hosts, nothing but loss goes wrong.
#[must_use]
pub fn scenario(seed: u64, bytes: usize, loss: f64, policy: Policy) -> Scenario {
    let mut network = NetworkOptions::uniform(RATE, 128 * 1514, Duration::from_millis(1));
    network.impairments.loss = loss;
    let op = OpPlan::all_reduce(Algorithm::Transpose, bytes / 4, policy);
    let mut scenario = Scenario::quiet(seed, WORLD_SIZE, network, vec![op; OPS]);
    scenario.faults[0].0 = Duration::from_secs(1000);
    scenario.host = HostOptions { wake_late_max: Duration::from_micros(60), ..HostOptions::default() };
    scenario
}

/// Each rank sends and receives `2 (N - 1) / N` of the bucket.
fn ideal_time(bytes: usize) -> Duration {
    let crossing = bytes as f64 * 2.0 * (WORLD_SIZE - 1) as f64 / WORLD_SIZE as f64;
    Duration::from_secs_f64(crossing / RATE as f64)
}

/// 100 Mbit/s in bytes per second.
const RATE: u64 = 12_500_000;
const WORLD_SIZE: usize = 4;
/// The first finds the rate and is not counted.
const OPS: usize = 6;
