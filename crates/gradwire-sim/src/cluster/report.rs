//! An outcome for people and programs.

use super::{mean, quantile, Outcome};
use std::fmt::{self, Write as _};
use std::time::Duration;

/// What a run was like, as a table or as one JSON object.
#[derive(Clone, Copy, Debug)]
pub struct Report<'a> {
    /// Its preset.
    pub preset: &'a str,
    /// Hosts.
    pub hosts: usize,
    /// The outcome.
    pub outcome: &'a Outcome,
    /// Processor time that the run took.
    pub core: Duration,
    /// Most memory that the process had, in bytes; 0: unknown.
    pub memory_bytes: u64,
}

impl Report<'_> {
    /// One JSON object on one line. Times in microseconds.
    #[must_use]
    pub fn to_json(&self) -> String {
        let Self { preset, hosts, outcome, core, memory_bytes } = self;
        let mut out = format!("{{\"simulator\": \"fabric\", \"transport\": \"{preset}\", \"hosts\": {hosts}");
        for (name, times) in self.stages() {
            let [avg, p50, p99, p999, max] = figures(times);
            let count = times.len();
            let _ = write!(
                out,
                ", \"{name}\": {{\"count\": {count}, \"mean_us\": {avg:.3}, \"p50_us\": {p50:.3}, \"p99_us\": {p99:.3}, \
                 \"p999_us\": {p999:.3}, \"max_us\": {max:.3}}}"
            );
        }
        let ports = outcome.switches;
        let _ = write!(
            out,
            ", \"step_us\": {:.3}, \"lost_share\": {:.6}, \"bytes_sent\": {}, \"bytes_retransmitted\": {}, \
             \"overflowed\": {}, \"dropped_selectively\": {}, \"marked\": {}, \"lost\": {}, \"events\": {}, \
             \"core_s\": {:.3}, \"memory_bytes\": {memory_bytes}",
            micros(mean(&outcome.step_times)),
            outcome.losses.share(),
            outcome.bytes_sent,
            outcome.bytes_retransmitted,
            ports.overflowed,
            ports.dropped_selectively,
            ports.marked,
            ports.lost,
            outcome.cost.events,
            core.as_secs_f64(),
        );
        if let Some(modelled) = outcome.modelled_step {
            let _ = write!(out, ", \"modelled_step_us\": {:.3}", micros(modelled));
        }
        self.write_losses(&mut out);
        out.push('}');
        out
    }

    /// Elements contributed and not counted, by layer in the order of the plan and by importance.
    fn write_losses(&self, out: &mut String) {
        let losses = &self.outcome.losses;
        for (name, (elems, lost)) in [("important", losses.important), ("unimportant", losses.unimportant)] {
            let _ = write!(out, ", \"{name}\": {{\"elems\": {elems}, \"lost\": {lost}}}");
        }
        out.push_str(", \"layers\": [");
        for (number, layer) in losses.layers.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let _ = write!(out, "{separator}{{\"elems\": {}, \"lost\": {}}}", layer.elems, layer.lost);
        }
        out.push(']');
    }

    fn stages(&self) -> [(&'static str, &[Duration]); 3] {
        let Outcome { flow_times, push_times, pull_times, .. } = self.outcome;
        [("flows", flow_times), ("pushes", push_times), ("pulls", pull_times)]
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { preset, hosts, outcome, core, memory_bytes } = self;
        writeln!(f, "{preset}, {hosts} hosts: completion times in microseconds")?;
        writeln!(
            f,
            "{:8}{:>8}{:>10}{:>10}{:>10}{:>10}{:>10}",
            "", "count", "mean", "p50", "p99", "p99.9", "max"
        )?;
        for (name, times) in self.stages() {
            write!(f, "{name:8}{:>8}", times.len())?;
            figures(times).iter().try_for_each(|figure| write!(f, "{figure:>10.1}"))?;
            writeln!(f)?;
        }
        let ports = outcome.switches;
        writeln!(f, "step     {:.1} on average", micros(mean(&outcome.step_times)))?;
        if let Some(modelled) = outcome.modelled_step {
            writeln!(f, "         {:.1} by the cost model", micros(modelled))?;
        }
        writeln!(f, "not counted {:.3} % of all contributions", outcome.losses.share() * 100.0)?;
        let sent_again = outcome.bytes_retransmitted as f64 / outcome.bytes_sent.max(1) as f64;
        writeln!(f, "sent again {:.3} % of the payload", sent_again * 100.0)?;
        writeln!(
            f,
            "switches: {} packets found a full buffer, {} a long queue, {} were marked, {} were lost on links",
            ports.overflowed, ports.dropped_selectively, ports.marked, ports.lost
        )?;
        let rate = outcome.cost.events as f64 / core.as_secs_f64().max(1e-9);
        let memory = *memory_bytes as f64 / 1e6;
        write!(f, "cost: {} events, {rate:.0} for each core-second, {memory:.0} MB", outcome.cost.events)
    }
}

/// Mean, median, 99 %, 99.9 % and most, in microseconds.
fn figures(times: &[Duration]) -> [f64; 5] {
    let at = |share| micros(quantile(times, share));
    [micros(mean(times)), at(0.5), at(0.99), at(0.999), at(1.0)]
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}
