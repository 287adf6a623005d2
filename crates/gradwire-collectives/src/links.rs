//! How fast the links of a group's ranks are, where some are slower than most.

use std::sync::Arc;

// claim: auto/slow-links
/// The rate of each rank's link, in eighths of the typical one; 8 for all that are about as fast as most, or faster.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LinkShares(Arc<[u8]>);

impl LinkShares {
    /// A rate of a link as shares say it.
    pub const WHOLE: u8 = 8;

    /// Of the rates that the ranks measured, bytes per second, 0 for nothing; `typical` is the middle one, `before` what was known until now.
    /// `None`: none is much slower, or the network is too fast for rates to be those of links.
    pub(crate) fn of(rates: impl Iterator<Item = u64>, typical: u64, before: Option<&Self>) -> Option<Self> {
        if typical == 0 || typical > MEASURED_RATE_MAX {
            return None;
        }
        let was_slow = |rank: usize| before.is_some_and(|before| !before.is_whole(rank));
        let share = |(rank, rate): (usize, u64)| {
            let least = if was_slow(rank) { WHOLE_AGAIN_SIXTEENTHS } else { SLOW_SIXTEENTHS };
            let is_slow = rate > 0 && rate.saturating_mul(16) < typical * least;
            if is_slow {
                ((rate * 8 + typical / 2) / typical).clamp(1, 7) as u8
            } else {
                Self::WHOLE
            }
        };
        let shares: Arc<[u8]> = rates.enumerate().map(share).collect();
        shares.iter().any(|eighths| *eighths < Self::WHOLE).then_some(Self(shares))
    }

    /// Eighths of the typical rate, of each rank.
    #[must_use]
    pub fn eighths(&self) -> &[u8] {
        &self.0
    }

    /// Whether the link of `rank` is about as fast as most.
    pub(crate) fn is_whole(&self, rank: usize) -> bool {
        self.0.get(rank).is_none_or(|eighths| *eighths == Self::WHOLE)
    }

    /// The slowest link's part of the typical rate.
    pub(crate) fn slowest(&self) -> f64 {
        let eighths = self.0.iter().min().copied().unwrap_or(Self::WHOLE);
        f64::from(eighths) / f64::from(Self::WHOLE)
    }

    /// The ranks that are slower than most, with their share of the typical rate.
    pub fn slow(&self) -> impl Iterator<Item = (usize, f32)> + '_ {
        let slow = self.0.iter().enumerate().filter(|(_, eighths)| **eighths < Self::WHOLE);
        slow.map(|(rank, eighths)| (rank, f32::from(*eighths) / f32::from(Self::WHOLE)))
    }

    /// The same for messages: `rank 3 at 50 %`.
    pub(crate) fn describe(&self) -> String {
        let named: Vec<String> =
            self.slow().map(|(rank, share)| format!("rank {rank} at {:.0} %", share * 100.0)).collect();
        named.join(", ")
    }
}

/// Equal links are measured up to a tenth apart.
const SLOW_SIXTEENTHS: u64 = 13;
/// A link in between stays what it was, and the schedule with it.
const WHOLE_AGAIN_SIXTEENTHS: u64 = 15;
/// 2.5 Gbit/s. Where links are faster, what a rank measures is how its threads are let run, which differs twofold between equal ranks.
pub const MEASURED_RATE_MAX: u64 = 312_500_000;

#[cfg(test)]
mod tests {
    use super::*;

    fn eighths(rates: &[u64], typical: u64) -> Option<Vec<u8>> {
        LinkShares::of(rates.iter().copied(), typical, None).map(|shares| shares.eighths().to_vec())
    }

    // test of: auto/slow-links
    #[test]
    fn ranks_that_are_much_slower_than_most_are_told_apart() {
        assert_eq!(eighths(&[95, 100, 107, 104], 100), None);
        assert_eq!(eighths(&[95, 100, 52, 190], 100), Some(vec![8, 8, 4, 8]));
        assert_eq!(eighths(&[1, 100, 100], 100), Some(vec![1, 8, 8]));
        assert_eq!(eighths(&[0, 100, 100], 100), None, "it has measured nothing");
        assert_eq!(eighths(&[40_000_000_000, 90_000_000_000, 90_000_000_000], 90_000_000_000), None);
    }

    #[test]
    fn a_slow_link_is_whole_again_only_when_it_is_clearly_faster() {
        let slow = LinkShares::of([100, 75, 100].into_iter(), 100, None);
        assert_eq!(slow.as_ref().map(LinkShares::eighths), Some(&[8, 6, 8][..]));
        for (rates, eighths) in
            [([100, 90, 100], Some([8, 7, 8])), ([100, 95, 100], None), ([90, 100, 100], None)]
        {
            let found = LinkShares::of(rates.into_iter(), 100, slow.as_ref());
            assert_eq!(found.as_ref().map(LinkShares::eighths), eighths.as_ref().map(|eighths| &eighths[..]));
        }
    }

    #[test]
    fn the_slow_ones_are_named() {
        let shares = LinkShares::of([100, 52, 100, 26].into_iter(), 100, None).expect("two are slow");
        assert_eq!(shares.describe(), "rank 1 at 50 %, rank 3 at 25 %");
        assert_eq!(shares.slow().collect::<Vec<_>>(), [(1, 0.5), (3, 0.25)]);
        assert!((shares.slowest() - 0.25).abs() < 1e-9);
    }
}
