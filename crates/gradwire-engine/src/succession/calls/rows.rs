//! Calls whose result no other rank can take over: what has a row for each rank, and reduce.
//!
//! They are not counted. While a rank is missing one of these may have ended on some and is refused on others, who then go another way: they make
//! it again, or leave out what comes behind it. So they take no number that other calls go by, and are known by the gap in which they were made:
//! that before the next counted call, whose number it has. What was made in a gap when an epoch began is refused under it, on
//! the ranks that make it later too.

use super::Pending;
use std::collections::BTreeMap;

struct Row {
    pending: Box<Pending>,
    gap: u64,
    /// Place in its gap, from 0.
    nth: u64,
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Rows {
    /// Those that have not ended, by the order in which they were made here.
    kept: BTreeMap<u64, Row>,
    /// Made here so far.
    made: u64,
    /// The next one to start in the present epoch.
    next_start: u64,
    /// The latest gap in which one was made, and how many.
    latest: (u64, u64),
    in_flight: InFlight,
}

/// Which of them somebody had made when the present epoch began.
#[derive(Default, Debug)]
pub(crate) struct InFlight {
    /// All in gaps before this one.
    pub(crate) below: u64,
    /// So many in each of these.
    pub(crate) gaps: BTreeMap<u64, u64>,
}

impl InFlight {
    fn has(&self, gap: u64, nth: u64) -> bool {
        gap < self.below || self.gaps.get(&gap).is_some_and(|made| nth < *made)
    }
}

impl Rows {
    /// Takes one that is made before counted call `gap`; what it is known by here.
    pub(super) fn add(&mut self, gap: u64, pending: Pending) -> u64 {
        let nth = self.made_in(gap);
        self.latest = (gap, nth + 1);
        self.kept.insert(self.made, Row { pending: Box::new(pending), gap, nth });
        self.made += 1;
        self.made - 1
    }

    /// How many were made in a gap that is the latest one, or a later one.
    pub(super) fn made_in(&self, gap: u64) -> u64 {
        let (latest, made) = self.latest;
        if gap == latest {
            made
        } else {
            0
        }
    }

    /// The next one to start where counted call `before` is the next, and whether it was in flight somewhere when the epoch began.
    pub(super) fn next_to_start(&mut self, before: u64) -> Option<(u64, bool, &mut Pending)> {
        let (id, row) = self.kept.range_mut(self.next_start..).next().filter(|(_, row)| row.gap <= before)?;
        self.next_start = id + 1;
        Some((*id, self.in_flight.has(row.gap, row.nth), &mut row.pending))
    }

    /// An epoch begins, with these in flight.
    pub(super) fn restart(&mut self, in_flight: InFlight) {
        (self.next_start, self.in_flight) = (0, in_flight);
    }

    pub(super) fn get(&self, id: u64) -> Option<&Pending> {
        self.kept.get(&id).map(|row| &*row.pending)
    }

    /// It has ended, well or not; what is left of it.
    pub(super) fn end(&mut self, id: u64) -> Option<Pending> {
        self.kept.remove(&id).map(|row| *row.pending)
    }

    /// Those that have not ended, and have not been started in the present epoch where it runs; each with the number of its gap.
    pub(super) fn waiting(&self, is_running: bool) -> impl Iterator<Item = (u64, &Pending)> {
        let from = if is_running { self.next_start } else { 0 };
        self.kept.range(from..).map(|(_, row)| (row.gap, &*row.pending))
    }

    /// Ends everything.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Pending> {
        std::mem::take(&mut self.kept).into_values().map(|row| *row.pending)
    }
}
