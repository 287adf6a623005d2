//! `gradwire-sim burst`: one reduction of a cluster, measured.

use super::{Cluster, ClusterPlan, Hierarchy, Report};
use clap::Args;
use gradwire_collectives::Algorithm;
use gradwire_core::recovery::ControllerKind;
use std::process::ExitCode;
use std::time::Duration;

/// What the command takes.
#[derive(Args, Clone, Debug)]
pub struct Burst {
    /// Preset of the transport.
    #[arg(long, default_value = "auto")]
    preset: String,
    /// Schedule: parameter_server, or one in which every host calls: transpose, ring, halving_doubling, or hierarchical: a reduce-scatter
    /// within each set of ranks, an all-reduce across the sets, an all-gather within.
    #[arg(long, default_value = "parameter_server")]
    algorithm: String,
    /// hierarchical: ranks of a set; 0: about as many as there are sets.
    #[arg(long, default_value_t = 0)]
    set: usize,
    /// hierarchical: the schedule across sets: transpose, ring or halving_doubling.
    #[arg(long, default_value = "transpose")]
    across: String,
    /// Carries the payload and compares every rank's result with the exact mean; for presets that lose nothing.
    #[arg(long)]
    check: bool,
    /// Hosts at 100 Gbit/s, 16 for each leaf at most.
    #[arg(long, default_value_t = 144)]
    hosts: usize,
    /// Of the hosts; 0: a quarter, at least one.
    #[arg(long, default_value_t = 0)]
    servers: usize,
    /// Bytes that each worker pushes and pulls.
    #[arg(long, default_value_t = 2_700_000)]
    bytes: u64,
    /// Steps before the one that is measured.
    #[arg(long, default_value_t = 0)]
    warm_up: usize,
    /// Workers start so many microseconds late at most.
    #[arg(long, default_value_t = 0)]
    jitter_us: u64,
    /// A leaf's hosts have so many times what its uplinks carry.
    #[arg(long, default_value_t = 1.0)]
    oversubscription: f64,
    /// Share of every host's link that packets of others take.
    #[arg(long, default_value_t = 0.0)]
    background: f64,
    /// Paths between two hosts.
    #[arg(long, default_value_t = 1)]
    paths: u8,
    /// Rate controller: bottleneck, timely or receiving_rate. The preset's, unless it is named.
    #[arg(long)]
    controller: Option<String>,
    /// Bytes of headers around each datagram on a link: Ethernet's 42, or another network's.
    #[arg(long, default_value_t = 42)]
    header_bytes: u64,
    /// Of every chance.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// One JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

impl Burst {
    /// Runs it and prints what it was like. 2: it could not be run.
    #[must_use]
    pub fn run(self) -> ExitCode {
        let plan = match self.plan() {
            Ok(plan) => plan,
            Err(problem) => {
                eprintln!("{problem}");
                return ExitCode::from(2);
            }
        };
        let began = core_time();
        let outcome = match Cluster::run(plan) {
            Ok(outcome) => outcome,
            Err(error) => {
                eprintln!("{error}");
                return ExitCode::from(2);
            }
        };
        let core = core_time().saturating_sub(began);
        let (preset, hosts, memory_bytes) = (self.preset.as_str(), self.hosts, memory_most());
        let report = Report { preset, hosts, outcome: &outcome, core, memory_bytes };
        if self.json {
            println!("{}", report.to_json());
        } else {
            println!("{report}");
        }
        ExitCode::SUCCESS
    }

    fn plan(&self) -> Result<ClusterPlan, String> {
        if self.hosts < 2 || self.servers >= self.hosts {
            return Err(format!(
                "{} hosts, {} servers: at least one of each is needed",
                self.hosts, self.servers
            ));
        }
        let plan = ClusterPlan::burst(&self.preset, self.hosts, self.bytes);
        let mut plan = plan.ok_or_else(|| format!("there is no preset {}", self.preset))?;
        if self.servers > 0 {
            plan = plan.with_servers(self.servers);
        }
        plan = match self.algorithm.as_str() {
            "parameter_server" => plan,
            "hierarchical" => {
                let hierarchy = match self.set {
                    0 => Hierarchy::balanced(self.hosts),
                    set => Some(Hierarchy { set }),
                };
                let hierarchy =
                    hierarchy.ok_or_else(|| format!("{} hosts cannot be divided into sets", self.hosts))?;
                ClusterPlan { algorithm: schedule(&self.across)?, ..plan.with_hierarchy(hierarchy) }
            }
            name => plan.with_algorithm(schedule(name)?),
        };
        plan.is_checked = self.check;
        plan.topology.header_bytes = self.header_bytes;
        if let Some(name) = &self.controller {
            let kind = ControllerKind::ALL.into_iter().find(|kind| kind.name() == name);
            plan.host.controller = kind.ok_or_else(|| format!("there is no rate controller {name}"))?;
        }
        if self.oversubscription > 1.0 {
            plan.topology = plan.topology.oversubscribed(self.oversubscription);
        }
        (plan.warm_up, plan.jitter) = (self.warm_up, Duration::from_micros(self.jitter_us));
        (plan.background, plan.host.paths, plan.seed) = (self.background, self.paths.max(1), self.seed);
        Ok(plan)
    }
}

/// A schedule in which every rank of a group calls.
fn schedule(name: &str) -> Result<Algorithm, String> {
    match name {
        "transpose" => Ok(Algorithm::Transpose),
        "ring" => Ok(Algorithm::Ring),
        "halving_doubling" => Ok(Algorithm::HalvingDoubling),
        "weighted_transpose" => Ok(Algorithm::WeightedTranspose),
        "one_shot" => Ok(Algorithm::OneShot),
        other => Err(format!("there is no schedule {other}")),
    }
}

/// Processor time of this process, from Linux: the machine may be busy with other things.
fn core_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let nanos = stat.split_whitespace().next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or(0))
}

/// Most memory that this process has had, from Linux; 0 elsewhere.
fn memory_most() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kilobytes.unwrap_or(0) * 1024
}
