//! Tolerant reductions in which a rank reduces portions here and there: whether each keeps its bound, and says what it lost.

use super::tolerant::View;
use crate::record::count;
use crate::watch::ring_bound;
use crate::Violation;
use gradwire_collectives::{DeadlineRule, PeerDelivery};
use gradwire_core::Contract;

impl View<'_> {
    /// Where portions end is not seen on the wire if they are never sent whole. But every element of a rank is expected by one other rank,
    /// or by itself, so that what all others miss of it is what it says did not count. A sum over portions that ended for different
    /// reasons keeps what the weakest of them asks for; that each keeps its own is judged on the wire.
    pub(super) fn check_portions(&self) -> Result<(), Violation> {
        for (from, uncounted) in self.uncounted.iter().enumerate() {
            let told = self.reports.iter().enumerate();
            let of_it = told.flat_map(|(to, report)| report.peers.iter().map(move |peer| (to, peer)));
            let of_it: Vec<_> = of_it.filter(|(_, peer)| peer.rank as usize == from).collect();
            let missing: u64 = of_it.iter().map(|(_, peer)| peer.elems_expected - peer.elems_received).sum();
            if missing != count(uncounted) {
                return Err(Violation::ReportDisagrees {
                    op: self.op,
                    rank: from,
                    reported: format!("{missing} elements missing at all others"),
                    actual: format!("{} uncounted by its own report", count(uncounted)),
                });
            }
            of_it.iter().try_for_each(|(to, peer)| self.check_least(peer, (from, *to)))?;
        }
        self.check_contributors_of_all()
    }

    /// Of the partial sums that come from its neighbour in a ring a rank misses no more than the bound for so many ranks allows, or what
    /// ends the wait whatever is there.
    pub(super) fn check_steps(&self) -> Result<(), Violation> {
        let least = self.least_of_a_transfer(ring_bound(self.plan.policy.loss_bound, self.reports.len()));
        for (to, report) in self.reports.iter().enumerate() {
            report
                .peers
                .iter()
                .try_for_each(|peer| self.check_received(peer, (peer.rank as usize, to), least))?;
        }
        Ok(())
    }

    /// What a transfer ends with at least that may lose so much.
    fn least_of_a_transfer(&self, loss_bound: f32) -> f32 {
        let policy = self.plan.policy.bounded_by(loss_bound);
        let soft = policy.soft.map_or(1.0, |soft| soft.min_fraction);
        let has_deadline = policy.deadline != DeadlineRule::Never || policy.deadline_max.is_some();
        let floor = if has_deadline || policy.early.is_some() { policy.floor } else { 1.0 };
        (1.0 - loss_bound).min(soft).min(floor)
    }

    fn check_least(&self, peer: &PeerDelivery, pair: (usize, usize)) -> Result<(), Violation> {
        self.check_received(peer, pair, self.least_of_a_transfer(self.plan.policy.loss_bound))
    }

    fn check_received(
        &self,
        peer: &PeerDelivery,
        (from, to): (usize, usize),
        least: f32,
    ) -> Result<(), Violation> {
        let width = self.plan.dtype.bytes() as u64;
        let PeerDelivery { elems_expected: expected, elems_received: received, closed_by, .. } = *peer;
        let bound = Contract::needed(expected * width, least) / width;
        if received >= bound {
            return Ok(());
        }
        Err(Violation::OverBudget { op: self.op, from, to, received, expected, bound, closed_by })
    }

    /// The fewest and the most ranks in an element are those that some owner tells.
    fn check_contributors_of_all(&self) -> Result<(), Violation> {
        let counts = self.masks_by_report().into_iter().filter(|(span, _)| !span.is_empty());
        let counts: Vec<u16> = counts.map(|(_, mask)| mask.count_ones() as u16).collect();
        let owners = || self.reports.iter().filter(|report| report.contributors > 0);
        let told = (
            owners().map(|report| report.contributors_least).min(),
            owners().map(|report| report.contributors).max(),
        );
        let actual = (counts.iter().min().copied(), counts.iter().max().copied());
        if told == actual {
            return Ok(());
        }
        let (reported, actual) = (format!("{told:?} contributors"), format!("{actual:?}"));
        Err(Violation::ReportDisagrees { op: self.op, rank: 0, reported, actual })
    }
}
