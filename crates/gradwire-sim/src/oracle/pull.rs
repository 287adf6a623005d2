//! Results on their way back: what a rank did not get is within what the policy allows, told, and filled as it says.

use super::tolerant::{subtract, View};
use crate::rank::STALE;
use crate::record::{count, merge};
use crate::values::{contribution, encode, encode_scaled, load, show};
use crate::Violation;
use gradwire_collectives::{DeliveryReport, Fill, Policy, ReduceOp};
use gradwire_core::{Contract, Reliability};
use std::ops::Range;

impl View<'_> {
    /// Only a policy that allows it loses results on their way back, within its bound, and fills what it says.
    pub(super) fn check_filled(&self) -> Result<(), Violation> {
        let op = self.op;
        let gather = self.plan.policy.gather;
        // What no worker brought to a dedicated server.
        let masks = self.masks_by_report().into_iter();
        let nobodys = merge(masks.filter(|(_, mask)| *mask == 0).map(|(span, _)| span).collect());
        for (rank, report) in self.reports.iter().enumerate() {
            let filled = merge(report.filled.clone());
            let lost: Vec<Range<u64>> = filled.iter().flat_map(|range| subtract(range, &nobodys)).collect();
            let told = report.replicas_identical;
            let is_exact = !gather.may_lose() || report.warm_up;
            let are_identical = is_exact && (nobodys.is_empty() || gather.fill == Fill::Zero);
            let is_told_of_all = nobodys.iter().all(|range| subtract(range, &filled).is_empty());
            if (is_exact && !lost.is_empty()) || told != are_identical || !is_told_of_all {
                let reported = format!("{} elements filled, identical replicas: {told}", count(&filled));
                let actual = format!("{gather:?}");
                return Err(Violation::ReportDisagrees { op, rank, reported, actual });
            }
            // A ring and a weighted transpose lose no results, and a ring hands on each of them.
            for (owner, span) in self.shards().into_iter().filter(|_| !self.is_ring() && !self.is_weighted())
            {
                let received = count(&subtract(&span, &filled));
                self.check_pull((owner, rank), (received, span.end - span.start), report)?;
            }
            self.check_fill(rank, &filled)?;
        }
        Ok(())
    }

    /// What a rank has of the results of `owner` is what it reports, and no less than what ended its wait asks for.
    fn check_pull(
        &self,
        (owner, rank): (usize, usize),
        (received, expected): (u64, u64),
        report: &DeliveryReport,
    ) -> Result<(), Violation> {
        let Policy { gather, floor, .. } = self.plan.policy;
        let source = report.sources.iter().find(|source| source.rank as usize == owner);
        let told = source.map_or(expected, |source| source.elems_received);
        let closed_by = source.map_or("all_arrived", |source| source.closed_by);
        let fraction = match closed_by {
            "all_arrived" => 1.0,
            "early_timeout" | "deadline" if gather.recovery == Reliability::BestEffort => floor,
            _ => 1.0 - gather.loss_bound,
        };
        let width = self.plan.dtype.bytes() as u64;
        let bound = Contract::needed(expected * width, fraction).div_ceil(width);
        let op = self.op;
        if received < bound {
            let (from, to) = (owner, rank);
            return Err(Violation::OverBudget { op, from, to, received, expected, bound, closed_by });
        }
        if told != received {
            let reported = format!("{told} of {expected} elements of the result from rank {owner}");
            return Err(Violation::ReportDisagrees { op, rank, reported, actual: received.to_string() });
        }
        Ok(())
    }

    fn check_fill(&self, rank: usize, filled: &[Range<u64>]) -> Result<(), Violation> {
        let (dtype, plan) = (self.plan.dtype, self.plan);
        for elem in filled.iter().cloned().flatten() {
            let own = contribution(dtype, plan.reduce, self.op, rank, elem);
            let expected = match (plan.policy.gather.fill, plan.reduce) {
                (Fill::Zero, _) => 0,
                (Fill::Local, ReduceOp::Sum) => encode_scaled(dtype, own, self.outputs.len(), 1),
                (Fill::Previous, _) if !plan.in_place => load(&[STALE; 8], dtype, 0),
                (Fill::Previous | Fill::Local, _) => encode(dtype, own),
            };
            let got = load(self.outputs[rank], dtype, elem as usize);
            if got != expected {
                let (expected, got) = (show(dtype, expected), show(dtype, got));
                return Err(Violation::WrongElement { op: self.op, rank, elem, expected, got });
            }
        }
        Ok(())
    }
}
