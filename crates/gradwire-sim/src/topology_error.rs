//! What best effort loses by schedule (ULTIMA section 5.3, table 2): how many ranks' values are missing from each element of an
//! all-reduce by ring, over one parameter server and by transpose.
//!
//! The real groups run over the modelled network. What the reports say did not count is checked against what the network
//! delivered, as in every run, and counted here for each element. From that follows the mean squared error of any gradients,
//! without drawing them: of `N` independent ones of variance 1 whose sum, divided by `N`, lacks `k`, it is `k / N^2`.

use crate::oracle::is_ring;
use crate::record::merge;
use crate::{NetworkOptions, OpPlan, Scenario, Violation, World};
use gradwire_collectives::{Algorithm, DivideBy, GatherRule, Policy, Servers};
use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

/// What is missing, over all elements of all counted collectives of one schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Missing {
    /// Ranks in the group.
    pub ranks: usize,
    /// Elements that were looked at.
    pub elems: u64,
    /// Values missing in the sum of an element, summed over the elements.
    pub values: u64,
    /// The same squared: what counts where all ranks have the same gradient.
    pub values_squared: u64,
    /// Packets that the network was given.
    pub packets: u64,
    /// Packets that it lost by chance.
    pub lost: u64,
    /// Packets that found a port full.
    pub overflowed: u64,
}

impl Missing {
    /// Of one run; [`Algorithm::ParameterServer`] is one that is no rank.
    ///
    /// # Errors
    /// The first promise that the run broke.
    pub fn of(algorithm: Algorithm, setting: Setting, seed: u64) -> Result<Self, Violation> {
        let mut world = World::new(setting.scenario(algorithm, seed), false);
        world.run_to_end()?;
        let stats = world.network_stats();
        let mut missing = Self {
            ranks: setting.ranks,
            packets: stats.sent,
            lost: stats.lost,
            overflowed: stats.overflowed,
            ..Self::default()
        };
        (WARM_UP..WARM_UP + setting.calls).for_each(|op| missing.count(&world, op, setting));
        Ok(missing)
    }

    fn to_json(self, schedule: &str) -> String {
        let Self { ranks, elems, values, values_squared, packets, lost, overflowed } = self;
        format!(
            "{{\"schedule\": \"{schedule}\", \"ranks\": {ranks}, \"elems\": {elems}, \"values\": {values}, \
             \"values_squared\": {values_squared}, \"packets\": {packets}, \"lost\": {lost}, \
             \"overflowed\": {overflowed}}}"
        )
    }

    /// Adds what another run lacks.
    pub fn add(&mut self, other: Self) {
        self.ranks = other.ranks;
        self.elems += other.elems;
        self.values += other.values;
        self.values_squared += other.values_squared;
        self.packets += other.packets;
        self.lost += other.lost;
        self.overflowed += other.overflowed;
    }

    fn count(&mut self, world: &World, op: usize, setting: Setting) {
        let reports = world.reports(op);
        let uncounted: Vec<Vec<Range<u64>>> =
            reports.iter().map(|report| merge(report.uncounted.clone())).collect();
        let shard = (setting.elems * 4).div_ceil(setting.ranks).next_multiple_of(64) as u64 / 4;
        let mut borders: Vec<u64> = uncounted.iter().flatten().flat_map(|r| [r.start, r.end]).collect();
        borders.extend((0..setting.ranks as u64).map(|index| (index * shard).min(setting.elems as u64)));
        borders.push(setting.elems as u64);
        borders.sort_unstable();
        let first = is_ring(&reports).then_some(shard);
        for pair in borders.windows(2) {
            let sent: Vec<bool> = uncounted.iter().map(|ranges| !holds(ranges, pair[0])).collect();
            let values = missing_values(&sent, first.map(|shard| (pair[0] / shard) as usize));
            self.values += values * (pair[1] - pair[0]);
            self.values_squared += values * values * (pair[1] - pair[0]);
        }
        self.elems += setting.elems as u64;
    }
}

// claim: ultima/topology-error
/// Prints one JSON object for each schedule, over the seeds from 0 on.
#[must_use]
pub fn print(setting: Setting, runs: u64) -> ExitCode {
    let measure = |algorithm| {
        (0..runs).try_fold(Missing::default(), |mut all, seed| {
            all.add(Missing::of(algorithm, setting, seed)?);
            Ok::<_, Violation>(all)
        })
    };
    for (name, algorithm) in SCHEDULES {
        match measure(algorithm) {
            Ok(missing) => println!("{}", missing.to_json(name)),
            Err(violation) => {
                eprintln!("{name}: {violation}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}

/// In the paper's order.
const SCHEDULES: [(&str, Algorithm); 3] = [
    ("ring", Algorithm::Ring),
    ("parameter server", Algorithm::ParameterServer),
    ("transpose", Algorithm::Transpose),
];

/// Values that an element lacks, if `sent` says whose transfer of it counted. `ring_start`: the rank that sends it first where
/// the sum goes round; then a transfer is a partial sum, and a lost one takes all that is in it.
fn missing_values(sent: &[bool], ring_start: Option<usize>) -> u64 {
    let ranks = sent.len();
    let Some(start) = ring_start else { return sent.iter().filter(|sent| !**sent).count() as u64 };
    let order = (0..ranks).map(|step| sent[(start + step) % ranks]);
    let present = order.fold(0, |present, counts| if counts { present + 1 } else { 0 });
    (ranks - present) as u64
}

fn holds(ranges: &[Range<u64>], elem: u64) -> bool {
    ranges.iter().any(|range| range.contains(&elem))
}

/// What is the same for all schedules.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// Ranks that call. The parameter server is one more.
    pub ranks: usize,
    /// Elements of the bucket, float32.
    pub elems: usize,
    /// Share of packets that are lost by chance.
    pub loss: f64,
    /// Collectives that are counted.
    pub calls: usize,
    /// What a switch's port holds.
    pub buffer_bytes: u64,
}

impl Setting {
    /// Preset `ultima` at incast factor 1, as the paper has it, and what is missing counts as zero. Results are sent back
    /// exactly: a ring that lost them would hand them on.
    fn scenario(self, algorithm: Algorithm, seed: u64) -> Scenario {
        let mut network = NetworkOptions::uniform(RATE, self.buffer_bytes, RTT);
        network.impairments.loss = self.loss;
        let policy = Policy { divide_by: DivideBy::World, gather: GatherRule::EXACT, ..Policy::ULTIMA };
        let op = OpPlan::all_reduce(algorithm, self.elems, policy);
        let mut scenario = Scenario::quiet(seed, self.ranks, network, vec![op; WARM_UP + self.calls]);
        scenario.faults[0].0 = Duration::from_secs(20);
        scenario.host.incast = Some(1);
        scenario.host.servers = Servers::Dedicated { count: 1, buffer_bytes: u64::MAX };
        scenario
    }
}

/// 1 Gbit/s in bytes per second.
const RATE: u64 = 125_000_000;
const RTT: Duration = Duration::from_micros(200);
/// Rounds in which the preset is exact and measures its deadlines.
const WARM_UP: usize = 20;

#[cfg(test)]
mod tests {
    use super::*;

    // test of: ultima/topology-error
    #[test]
    fn a_partial_sum_that_is_lost_takes_all_that_is_in_it() {
        let sent = [true, true, false, true];
        assert_eq!(missing_values(&sent, None), 1);
        assert_eq!(missing_values(&sent, Some(0)), 3);
        assert_eq!(missing_values(&sent, Some(2)), 1);
        assert_eq!(missing_values(&[true; 4], Some(3)), 0);
    }
}
