//! Tolerant reductions: who was counted where, three times over.
//!
//! The mask of an element is read from its value (every set of ranks has a mean of its own), from the ranks'
//! reports, and from the network's record of arrivals. All three must agree, replicas must be equal, the bound
//! must be kept, and every contribution must be in the result or in its rank's residual, exactly once.

use super::{finished, rotated};
use crate::plan::{OpKind, OpPlan};
use crate::rank::RESIDUAL_FILL;
use crate::record::{count, first_outside, merge, Arrival};
use crate::values::{
    base_sum, contribution, encode, encode_less, encode_mean, encode_scaled, factor, factors, load,
    means_identify_masks, show, sum_over,
};
use crate::world::World;
use crate::Violation;
use gradwire_collectives::{
    DeadlineRule, DeliveryReport, DivideBy, Dtype, Fill, PeerDelivery, ReduceOp, Rotation,
};
use gradwire_core::{CloseReason, Contract};
use std::ops::Range;

pub(super) fn check(world: &World, op: usize) -> Result<(), Violation> {
    let view = View::new(world, op);
    if view.is_ring() {
        view.check_steps()?;
    }
    if view.is_rotated() {
        // Of what is filled in every element has a part.
        if view.reports.iter().all(|report| report.filled.is_empty()) {
            view.check_replicas()?;
        }
        view.check_reported_once()?;
        view.check_quiet_network()?;
        return rotated::check(&view);
    }
    if !view.is_scattered() {
        view.check_replicas()?;
        view.check_filled()?;
    }
    view.check_reported_once()?;
    view.check_quiet_network()?;
    if view.sums_in_one_place() {
        view.check_values_against_reports()?;
        view.check_arrivals()?;
        view.check_budgets()?;
        view.check_critical()?;
        view.check_residuals()
    } else {
        view.check_conservation()
    }
}

/// A reduction over dedicated servers, number `number` of those, against what the servers say about it.
pub(super) fn check_served(world: &World, op: usize, number: u64) -> Result<(), Violation> {
    let view = View::new(world, op);
    for to in world.scenario.world_size..world.scenario.ranks() {
        let report = world.ranks[to].served.iter().find(|report| report.sequence == number);
        let into = world.record.routes(op).filter(|((_, _, receiver), _)| *receiver == to);
        let start = into.map(|(_, span)| span.start).min();
        let Some((report, start)) = report.zip(start) else { continue };
        for peer in &report.peers {
            view.check_budget(peer, to, start)?;
        }
        let expected = report.peers.first().map_or(0, |peer| peer.elems_expected);
        view.check_contributors(report, to, &(start..start + expected))?;
    }
    Ok(())
}

/// One tolerant reduction that has ended everywhere.
pub(super) struct View<'w> {
    world: &'w World,
    pub(super) plan: &'w OpPlan,
    pub(super) op: usize,
    pub(super) outputs: Vec<&'w [u8]>,
    /// Every element as a rank has it that received it.
    result: Vec<u8>,
    /// What no rank received: dedicated servers have the result and keep no copy of it.
    unknown: Vec<Range<u64>>,
    pub(super) residuals: Vec<&'w [u8]>,
    pub(super) reports: Vec<&'w DeliveryReport>,
    /// For each rank, its elements that did not count; sorted and merged.
    pub(super) uncounted: Vec<Vec<Range<u64>>>,
    means: MeanTable,
}

impl<'w> View<'w> {
    fn new(world: &'w World, op: usize) -> Self {
        let plan = &world.scenario.ops[op];
        let ends: Vec<_> =
            (0..world.scenario.world_size).filter_map(|rank| finished(world, op, rank)).collect();
        let reports: Vec<_> = ends.iter().filter_map(|end| end.outcome.as_ref().ok()).collect();
        let outputs: Vec<&[u8]> = ends.iter().map(|end| &end.output[..]).collect();
        let (result, unknown) = match plan.kind {
            OpKind::ReduceScatter => (outputs.concat(), Vec::new()),
            _ => merged_result(plan, &outputs, &reports),
        };
        Self {
            world,
            plan,
            op,
            result,
            unknown,
            outputs,
            residuals: ends.iter().map(|end| &end.residual[..]).collect(),
            uncounted: reports.iter().map(|report| merge(report.uncounted.clone())).collect(),
            reports,
            means: MeanTable::new(plan, world.scenario.world_size),
        }
    }

    pub(super) fn is_ring(&self) -> bool {
        super::is_ring(&self.reports)
    }

    /// Whether the plan has its bucket rotated: not when it is small, measured first, or alone.
    fn is_rotated(&self) -> bool {
        let wanted = self.plan.policy.rotation == Rotation::On && self.reports.len() > 1;
        let fills = self.plan.policy.gather.fill != Fill::Previous;
        wanted && fills && self.plan.elems >= 2048 && !self.reports.iter().any(|report| report.warm_up)
    }

    /// A rank reduces portions here and there, and no shard in one piece.
    pub(super) fn is_weighted(&self) -> bool {
        self.reports.iter().all(|report| report.collective.contains("weighted"))
    }

    /// Each rank has a row of the result, and nobody else does.
    fn is_scattered(&self) -> bool {
        self.plan.kind == OpKind::ReduceScatter
    }

    /// Elements of the result, of all ranks together.
    fn elems(&self) -> u64 {
        self.plan.given_elems(self.outputs.len()) as u64
    }

    fn sums_in_one_place(&self) -> bool {
        !self.is_ring()
    }

    /// Every rank has the same bits wherever the result reached it.
    fn check_replicas(&self) -> Result<(), Violation> {
        let width = self.plan.dtype.bytes() as u64;
        for (rank, output) in self.outputs.iter().enumerate() {
            let filled = merge(self.reports[rank].filled.clone());
            for got in subtract(&(0..self.plan.elems as u64), &filled) {
                let bytes = (got.start * width) as usize..(got.end * width) as usize;
                let (ours, all) = (&output[bytes.clone()], &self.result[bytes.clone()]);
                if ours != all {
                    let at = ours.iter().zip(all).position(|(a, b)| a != b).unwrap_or(0);
                    return Err(Violation::ReplicasDiffer { op: self.op, rank, byte: bytes.start + at });
                }
            }
        }
        Ok(())
    }

    /// LTP's critical packets hold the first and the last element of a transfer.
    fn check_critical(&self) -> Result<(), Violation> {
        if self.plan.policy.critical_chunks == 0 {
            return Ok(());
        }
        for (to, span) in self.shards() {
            // Where its last portion ends is not known.
            let last = if self.is_weighted() { span.start } else { span.end - 1 };
            let ends = [span.start, last];
            for from in (0..self.reports.len()).filter(|from| *from != to) {
                if let Some(elem) = ends.into_iter().find(|elem| contains(&self.uncounted[from], *elem)) {
                    return Err(Violation::CriticalLost { op: self.op, elem, from, to });
                }
            }
        }
        Ok(())
    }

    /// What did not count is told once: in a ring or a transpose every element is sent by a rank once at most.
    fn check_reported_once(&self) -> Result<(), Violation> {
        for (rank, report) in self.reports.iter().enumerate() {
            let (told, distinct) = (count(&report.uncounted), count(&self.uncounted[rank]));
            if told != distinct {
                let reported = format!("{told} elements uncounted");
                let actual = format!("{distinct} different ones");
                return Err(Violation::ReportDisagrees { op: self.op, rank, reported, actual });
            }
        }
        Ok(())
    }

    /// `auto` promises that nothing is lost where the network loses nothing. A bound that is used at once (`mlt`)
    /// and a deadline in absolute time promise less.
    fn check_quiet_network(&self) -> Result<(), Violation> {
        let promises = self.plan.policy.after_first_pass
            && matches!(self.plan.policy.deadline, DeadlineRule::Measured { .. } | DeadlineRule::Never)
            && self.plan.policy.deadline_max.is_none()
            && self.world.scenario.is_undisturbed()
            && self.world.network.stats().overflowed == 0;
        for (rank, uncounted) in self.uncounted.iter().enumerate() {
            if promises && !uncounted.is_empty() {
                return Err(Violation::LostOnQuietNetwork { op: self.op, rank, elems: count(uncounted) });
            }
        }
        Ok(())
    }

    fn check_values_against_reports(&self) -> Result<(), Violation> {
        for (span, reported) in self.masks_by_report() {
            for elem in span.filter(|elem| !contains(&self.unknown, *elem)) {
                let bits = load(&self.result, self.plan.dtype, elem as usize);
                let which = factor(self.plan.dtype, self.op, elem);
                // What no worker brought to a dedicated server is zero.
                if self.means.holds(which, reported, bits) || (reported == 0 && bits == 0) {
                    continue;
                }
                return Err(match self.means.find(which, bits) {
                    Some(mask) => Violation::ReportDisagrees {
                        op: self.op,
                        rank: (mask ^ reported).trailing_zeros() as usize,
                        reported: format!("element {elem} counts ranks {reported:#b}"),
                        actual: format!("its value is the mean of ranks {mask:#b}"),
                    },
                    None => self.not_a_mean(elem, bits, reported),
                });
            }
        }
        Ok(())
    }

    fn not_a_mean(&self, elem: u64, bits: u64, reported: u32) -> Violation {
        Violation::NotAMean { op: self.op, elem, got: show(self.plan.dtype, bits), reported }
    }

    /// Spans of elements with the mask that the reports imply, in order.
    pub(super) fn masks_by_report(&self) -> Vec<(Range<u64>, u32)> {
        let elems = self.elems();
        let mut borders: Vec<u64> = self.uncounted.iter().flatten().flat_map(|r| [r.start, r.end]).collect();
        borders.extend([0, elems]);
        borders.sort_unstable();
        borders.dedup();
        let mask_at = |elem: u64| {
            let ranks = self.uncounted.iter().enumerate();
            ranks
                .filter(|(_, uncounted)| !contains(uncounted, elem))
                .fold(0, |mask, (rank, _)| mask | 1 << rank)
        };
        borders.windows(2).map(|pair| (pair[0]..pair[1], mask_at(pair[0]))).collect()
    }

    /// Counted implies arrived. Arrived while the receiver waited implies counted, wherever the closing status
    /// cannot have been delayed behind a full NIC. The reducing rank always counts itself.
    fn check_arrivals(&self) -> Result<(), Violation> {
        let op = self.op;
        for (route, span) in self.world.record.routes(op) {
            let (_, from, to) = route;
            let spans = if self.is_weighted() { self.world.record.sent(route) } else { vec![span] };
            let counted = subtract_all(&spans, &self.uncounted[from]);
            if let Some(elem) = first_outside(&counted, &self.world.record.arrived(route, Arrival::Early)) {
                return Err(Violation::CountedWithoutArrival { op, elem, from, to });
            }
            let open = self.world.record.arrived(route, Arrival::Open);
            match first_outside(&open, &counted) {
                Some(elem) if self.world.scenario.host.nic_bytes.is_none() => {
                    return Err(Violation::ArrivedButNotCounted { op, elem, from, to });
                }
                _ => {}
            }
            // A dedicated server has no values of its own.
            let Some(owners) = self.uncounted.get(to) else { continue };
            if let Some(elem) = first_outside(&spans, &subtract_all(&spans, owners)) {
                let mask =
                    self.masks_by_report().iter().find(|(span, _)| span.contains(&elem)).map_or(0, |m| m.1);
                return Err(Violation::OwnerNotCounted { op, elem, owner: to, mask });
            }
        }
        Ok(())
    }

    /// For each rank that reduces something, its shard: where the packets to it begin, and as much as it says it expected.
    /// Their end tells nothing: a transfer that is stopped is never sent whole.
    pub(super) fn shards(&self) -> Vec<(usize, Range<u64>)> {
        let ranks = self.reports.iter().enumerate();
        let shards = ranks.filter_map(|(to, report)| {
            let into = self.world.record.routes(self.op).filter(|((_, _, receiver), _)| *receiver == to);
            let start = into.map(|(_, span)| span.start).min()?;
            let expected = report.peers.first()?.elems_expected;
            (expected > 0).then(|| (to, start..start + expected))
        });
        shards.collect()
    }

    fn check_budgets(&self) -> Result<(), Violation> {
        if self.is_weighted() {
            return self.check_portions();
        }
        for (to, shard) in self.shards() {
            for peer in &self.reports[to].peers {
                self.check_budget(peer, to, shard.start)?;
            }
            self.check_contributors(self.reports[to], to, &shard)?;
        }
        Ok(())
    }

    /// Whatever a mean divides by, `owner` says how many ranks are in the elements that it reduced: at least and at most.
    fn check_contributors(
        &self,
        report: &DeliveryReport,
        owner: usize,
        shard: &Range<u64>,
    ) -> Result<(), Violation> {
        let masks = self.masks_by_report().into_iter();
        let within = masks.filter(|(span, _)| span.start < shard.end && span.end > shard.start);
        let counts: Vec<u16> = within.map(|(_, mask)| mask.count_ones() as u16).collect();
        let actual = counts.iter().min().copied().zip(counts.iter().max().copied());
        let told = (report.contributors_least, report.contributors);
        match actual {
            Some(actual) if actual != told => Err(Violation::ReportDisagrees {
                op: self.op,
                rank: owner,
                reported: format!("{} to {} contributors", told.0, told.1),
                actual: format!("{} to {}", actual.0, actual.1),
            }),
            _ => Ok(()),
        }
    }

    fn check_budget(&self, peer: &PeerDelivery, to: usize, start: u64) -> Result<(), Violation> {
        let (from, expected) = (peer.rank as usize, peer.elems_expected);
        let received = count(&subtract(&(start..start + expected), &self.uncounted[from]));
        if received != peer.elems_received {
            return Err(Violation::ReportDisagrees {
                op: self.op,
                rank: to,
                reported: format!("{} of {expected} elements from rank {from}", peer.elems_received),
                actual: format!("{received} by the sender's report"),
            });
        }
        let width = self.plan.dtype.bytes() as u64;
        let fraction = match peer.closed_by {
            "all_arrived" => 1.0,
            "bound_met" => 1.0 - self.plan.policy.loss_bound,
            "soft_threshold" => self.plan.policy.soft.map_or(1.0, |soft| soft.min_fraction),
            _ => self.plan.policy.floor,
        };
        let bound = Contract::needed(expected * width, fraction).div_ceil(width);
        let known = CloseReason::ALL.iter().any(|reason| reason.name() == peer.closed_by);
        if received < bound || !known {
            let closed_by = peer.closed_by;
            return Err(Violation::OverBudget {
                op: self.op,
                from,
                to,
                received,
                expected,
                bound,
                closed_by,
            });
        }
        Ok(())
    }

    /// What rank `rank` owes for an element that did not count: its value less what its result holds in place of it, in the
    /// arithmetic of the dtype. Divided by all ranks, that is nothing wherever there is a result.
    fn owed(&self, rank: usize, elem: u64, value: i64) -> u64 {
        if self.is_scattered() {
            return encode(self.plan.dtype, value); // its mean is the owner's, who owes the rest
        }
        let (dtype, result) = (self.plan.dtype, load(self.outputs[rank], self.plan.dtype, elem as usize));
        let has_result = !contains(&merge(self.reports[rank].filled.clone()), elem);
        let factor = match (self.plan.policy.divide_by, self.plan.reduce) {
            (DivideBy::World, _) if has_result => return encode(dtype, value),
            (_, ReduceOp::Sum) => 1.0 / self.outputs.len() as f64,
            _ => 1.0,
        };
        encode_less(dtype, value, result, factor)
    }

    /// What the owner of a row owes for the ranks that are missing from an element of it: their means, if these stood in for them.
    fn owed_by_owner(&self, rank: usize, elem: u64) -> Option<u64> {
        let ranks = self.outputs.len();
        let counted = self.uncounted.iter().filter(|uncounted| !contains(uncounted, elem)).count();
        let owns = self.is_scattered() && elem as usize / self.plan.elems == rank;
        let stood_in = self.plan.policy.divide_by == DivideBy::Contributions && 2 * counted > ranks;
        let factor = if self.plan.reduce == ReduceOp::Sum { 1.0 / ranks as f64 } else { 1.0 };
        let result = load(&self.result, self.plan.dtype, elem as usize);
        let owed = encode_less(self.plan.dtype, 0, result, (ranks - counted) as f64 * factor);
        (owns && stood_in && counted < ranks).then_some(owed)
    }

    /// Summed in one place: the residual holds exactly what the own values that did not count owe, and nothing else was touched.
    fn check_residuals(&self) -> Result<(), Violation> {
        let dtype = self.plan.dtype;
        for (rank, residual) in self.residuals.iter().enumerate() {
            let untouched = untouched(dtype);
            for elem in 0..self.elems() {
                let got = load(residual, dtype, elem as usize);
                if got == untouched && self.uncounted[rank].is_empty() && !self.is_scattered() {
                    continue;
                }
                let value = contribution(dtype, self.plan.reduce, self.op, rank, elem);
                let counts = !contains(&self.uncounted[rank], elem);
                let by_owner = self.owed_by_owner(rank, elem);
                let own = if counts { untouched } else { self.owed(rank, elem, value) };
                let expected = by_owner.unwrap_or(own);
                if got != expected {
                    let (expected, got) = (show(dtype, expected), show(dtype, got));
                    return Err(Violation::Residual { op: self.op, rank, elem, expected, got });
                }
            }
        }
        Ok(())
    }

    /// Nothing was written to the residual of `rank`.
    pub(super) fn check_untouched(&self, rank: usize) -> Result<(), Violation> {
        let (dtype, residual) = (self.plan.dtype, self.residuals[rank]);
        let elems = 0..self.plan.elems;
        match elems.into_iter().find(|elem| load(residual, dtype, *elem) != untouched(dtype)) {
            None => Ok(()),
            Some(elem) => {
                let (expected, got) = ("as it was".to_owned(), show(dtype, load(residual, dtype, elem)));
                Err(Violation::Residual { op: self.op, rank, elem: elem as u64, expected, got })
            }
        }
    }

    /// Ring: a partial sum that was lost is in the residual of the rank that sent it, less the means that stood in for it.
    /// Whoever it was, the result, for all ranks, and the residuals must hold every contribution once.
    fn check_conservation(&self) -> Result<(), Violation> {
        let mut mask = everybody(self.world.scenario.world_size);
        debug_assert!(self.reports.iter().all(|report| report.filled.is_empty()), "no ring fills");
        for elem in 0..self.plan.elems as u64 {
            let bits = load(&self.result, self.plan.dtype, elem as usize);
            let which = factor(self.plan.dtype, self.op, elem);
            if !self.means.holds(which, mask, bits) {
                let found = self.means.find(which, bits);
                mask = found.ok_or_else(|| self.not_a_mean(elem, bits, mask))?;
            }
            if means_identify_masks(self.plan.dtype, self.outputs.len()) {
                self.check_element_is_conserved(elem, mask)?;
            }
        }
        Ok(())
    }

    fn check_element_is_conserved(&self, elem: u64, mask: u32) -> Result<(), Violation> {
        let dtype = self.plan.dtype;
        let held = self.residuals.iter().map(|residual| load(residual, dtype, elem as usize));
        let late: f64 = held.filter(|bits| *bits != untouched(dtype)).map(|bits| decode(dtype, bits)).sum();
        let all = everybody(self.world.scenario.world_size);
        let expected = sum_over(dtype, self.op, elem, all) as f64;
        let counted = sum_over(dtype, self.op, elem, mask) as f64;
        let (ranks, contributions) = (self.outputs.len() as f64, f64::from(mask.count_ones()));
        let stood_in = match self.plan.policy.divide_by {
            DivideBy::Contributions => counted / contributions * (ranks - contributions),
            DivideBy::World => 0.0,
        };
        let got = counted + stood_in + late;
        // Means of these values are whole numbers; of a scaled sum the factor was rounded.
        let rounding =
            if self.plan.reduce == ReduceOp::Sum { expected * ranks * f64::from(f32::EPSILON) } else { 0.0 };
        if (got - expected).abs() <= rounding {
            return Ok(());
        }
        Err(Violation::NotConserved { op: self.op, elem, expected, got })
    }
}

/// Every element from the first rank that received it, and those that none did.
fn merged_result(
    plan: &OpPlan,
    outputs: &[&[u8]],
    reports: &[&DeliveryReport],
) -> (Vec<u8>, Vec<Range<u64>>) {
    let width = plan.dtype.bytes() as u64;
    let mut result = outputs.first().map(|output| output.to_vec()).unwrap_or_default();
    if reports.iter().any(|report| report.rotated_elems > 0) {
        // What is filled there are places in the rotated bucket.
        return (result, Vec::new());
    }
    let mut holes = reports.first().map(|report| merge(report.filled.clone())).unwrap_or_default();
    for (output, report) in outputs.iter().zip(reports).skip(1) {
        let filled = merge(report.filled.clone());
        let found: Vec<Range<u64>> = holes.iter().flat_map(|hole| subtract(hole, &filled)).collect();
        for range in &found {
            let bytes = (range.start * width) as usize..(range.end * width) as usize;
            result[bytes.clone()].copy_from_slice(&output[bytes]);
        }
        holes = holes.iter().flat_map(|hole| subtract(hole, &found)).collect();
    }
    (result, holes)
}

/// The result that each set of ranks would give, by factor.
struct MeanTable {
    results: Vec<Vec<u64>>,
}

impl MeanTable {
    fn new(plan: &OpPlan, world_size: usize) -> Self {
        let result = |factor: i64, mask: u32| {
            let sum = base_sum(plan.dtype, mask) * factor;
            let count = match plan.policy.divide_by {
                DivideBy::Contributions if halves_at_most(plan, mask, world_size) => world_size as u32,
                DivideBy::Contributions => mask.count_ones(),
                DivideBy::World => world_size as u32,
            };
            match plan.reduce {
                ReduceOp::Sum => encode_scaled(plan.dtype, sum, world_size, count),
                _ => encode_mean(plan.dtype, sum, count),
            }
        };
        let row = |factor| (1..=everybody(world_size)).map(|mask| result(factor, mask)).collect();
        Self { results: (1..=factors(plan.dtype)).map(row).collect() }
    }

    fn holds(&self, factor: i64, mask: u32, bits: u64) -> bool {
        mask != 0 && self.results[factor as usize - 1][mask as usize - 1] == bits
    }

    fn find(&self, factor: i64, bits: u64) -> Option<u32> {
        let row = &self.results[factor as usize - 1];
        row.iter().position(|result| *result == bits).map(|index| index as u32 + 1)
    }
}

/// Whether a reduce-scatter divides by all ranks, because at most half of them are in an element.
fn halves_at_most(plan: &OpPlan, mask: u32, world_size: usize) -> bool {
    plan.kind == OpKind::ReduceScatter && 2 * mask.count_ones() as usize <= world_size
}

fn everybody(world_size: usize) -> u32 {
    (1 << world_size) - 1
}

fn untouched(dtype: Dtype) -> u64 {
    load(&[RESIDUAL_FILL; 8], dtype, 0)
}

fn decode(dtype: Dtype, bits: u64) -> f64 {
    match dtype {
        Dtype::F32 => f64::from(f32::from_bits(bits as u32)),
        _ => f64::from_bits(bits),
    }
}

pub(super) fn contains(ranges: &[Range<u64>], elem: u64) -> bool {
    let after = ranges.partition_point(|range| range.start <= elem);
    after > 0 && ranges[after - 1].end > elem
}

/// The parts of `span` outside `holes` (sorted and merged).
pub(super) fn subtract(span: &Range<u64>, holes: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut rest = Vec::new();
    let mut at = span.start;
    for hole in holes.iter().filter(|hole| hole.end > span.start && hole.start < span.end) {
        if hole.start > at {
            rest.push(at..hole.start);
        }
        at = at.max(hole.end);
    }
    if at < span.end {
        rest.push(at..span.end);
    }
    rest
}

/// The same for several spans, sorted and merged.
fn subtract_all(spans: &[Range<u64>], holes: &[Range<u64>]) -> Vec<Range<u64>> {
    spans.iter().flat_map(|span| subtract(span, holes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_cut_out_of_a_span() {
        assert_eq!(subtract(&(10..20), &[0..12, 15..16, 19..30]), [12..15, 16..19]);
        assert!(subtract(&(10..20), std::slice::from_ref(&(0..30))).is_empty());
        assert!(contains(&[1..3, 5..6], 5) && !contains(&[1..3, 5..6], 3));
    }
}
