//! Tolerant reductions in which a rank reduces portions here and there: whether each keeps its bound, and says what it lost.

use super::tolerant::View;
use crate::record::count;
use crate::Violation;
use gradwire_collectives::PeerDelivery;
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

    fn check_least(&self, peer: &PeerDelivery, (from, to): (usize, usize)) -> Result<(), Violation> {
        let policy = &self.plan.policy;
        let soft = policy.soft.map_or(1.0, |soft| soft.min_fraction);
        let least = (1.0 - policy.loss_bound).min(soft).min(policy.floor);
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
