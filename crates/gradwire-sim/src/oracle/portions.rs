//! Tolerant reductions in which a rank reduces portions here and there: whether each keeps its bound, and says what it lost.

use super::tolerant::View;
use crate::record::count;
use crate::Violation;
use gradwire_collectives::PeerDelivery;
use gradwire_core::Contract;

impl View<'_> {
    /// Where portions end is not seen on the wire if they are never sent whole. But every element of a rank is expected by one other rank,
    /// or by itself, so that what all others miss of it is what it says did not count; and each portion keeps its bound.
    pub(super) fn check_portions(&self) -> Result<(), Violation> {
        for (from, uncounted) in self.uncounted.iter().enumerate() {
            let told = self.reports.iter().flat_map(|report| &report.peers);
            let of_it: Vec<&PeerDelivery> = told.filter(|peer| peer.rank as usize == from).collect();
            let missing: u64 = of_it.iter().map(|peer| peer.elems_expected - peer.elems_received).sum();
            if missing != count(uncounted) {
                return Err(Violation::ReportDisagrees {
                    op: self.op,
                    rank: from,
                    reported: format!("{missing} elements missing at all others"),
                    actual: format!("{} uncounted by its own report", count(uncounted)),
                });
            }
            let policy = &self.plan.policy;
            let soft = policy.soft.map_or(1.0, |soft| soft.min_fraction);
            let least = (1.0 - policy.loss_bound).min(soft).min(policy.floor);
            for (to, peer) in of_it.iter().enumerate() {
                let width = self.plan.dtype.bytes() as u64;
                let (expected, received) = (peer.elems_expected, peer.elems_received);
                let bound = Contract::needed(expected * width, least) / width;
                if received < bound {
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
            }
        }
        Ok(())
    }
}
