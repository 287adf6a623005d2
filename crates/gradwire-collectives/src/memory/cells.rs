//! Which parts of an accumulator are whole, where contributions come cut on several grids.
//!
//! In a halving each step's transfer begins at another shard, so that the packets of two steps do not lie on each other. But shards
//! begin at cache lines and packets hold whole ones, so that a line is contributed to as a whole: contributions are counted for
//! each line of what this rank finishes.

use super::Pool;
use std::ops::Range;

// claim: report/streaming
/// See the module. Empty: nothing is counted.
#[derive(Debug, Default)]
pub(super) struct Cells {
    area: Range<usize>,
    /// Contributions that are not in, for each cell of `area`.
    missing: Vec<u16>,
}

impl Cells {
    /// Every byte of `area` gets `contributions` of them.
    pub(super) fn expect(area: &Range<usize>, contributions: u16, pool: &mut Pool) -> Self {
        let mut missing = pool.counts.pop().unwrap_or_default();
        missing.clear();
        missing.resize(area.len().div_ceil(CELL_BYTES), contributions);
        Self { area: area.clone(), missing }
    }

    /// Counts a contribution to `bytes`.
    pub(super) fn count(&mut self, bytes: &Range<usize>) {
        let (start, end) = (bytes.start.max(self.area.start), bytes.end.min(self.area.end));
        if start < end {
            let cells = self.cell_at(start)..=self.cell_at(end - 1);
            self.missing[cells].iter_mut().for_each(|missing| *missing = missing.saturating_sub(1));
        }
    }

    /// Where the run ends that begins at `bytes.start`, and whether all that it holds is whole.
    pub(super) fn run(&self, bytes: &Range<usize>) -> (usize, bool) {
        let is_whole = self.is_whole(bytes.start);
        let mut end = bytes.start;
        while end < bytes.end && self.is_whole(end) == is_whole {
            end = (end / CELL_BYTES + 1) * CELL_BYTES;
        }
        (end.min(bytes.end), is_whole)
    }

    fn is_whole(&self, at: usize) -> bool {
        self.area.contains(&at) && self.missing[self.cell_at(at)] == 0
    }

    fn cell_at(&self, at: usize) -> usize {
        (at - self.area.start) / CELL_BYTES
    }

    /// Gives the scratch back.
    pub(super) fn release(&mut self, pool: &mut Pool) {
        if self.missing.capacity() > 0 {
            pool.counts.push(std::mem::take(&mut self.missing));
        }
    }
}

/// Shards begin at multiples of it, and packets hold a multiple of it.
const CELL_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(cells: &Cells, bytes: Range<usize>) -> Vec<(usize, bool)> {
        let (mut start, mut runs) = (bytes.start, Vec::new());
        while start < bytes.end {
            runs.push(cells.run(&(start..bytes.end)));
            start = runs.last().expect("just pushed").0;
        }
        runs
    }

    #[test]
    fn a_cell_is_whole_when_all_contributions_to_it_are_in_however_they_are_cut() {
        let mut cells = Cells::expect(&(128..420), 2, &mut Pool::default());
        cells.count(&(0..256));
        assert_eq!(runs(&cells, 0..420), [(420, false)]);
        cells.count(&(192..384));
        assert_eq!(runs(&cells, 0..500), [(192, false), (256, true), (500, false)]);
        cells.count(&(384..420));
        cells.count(&(256..420));
        assert_eq!(runs(&cells, 192..420), [(420, true)]);
        assert_eq!(runs(&cells, 100..420), [(192, false), (420, true)]);
    }

    #[test]
    fn nothing_is_whole_where_nothing_is_expected() {
        let mut cells = Cells::default();
        cells.count(&(0..128));
        assert_eq!(cells.run(&(0..128)), (128, false));
    }
}
