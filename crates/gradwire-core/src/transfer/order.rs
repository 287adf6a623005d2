//! In what order the chunks of a transfer leave for the first time: critical ones first (LTP section IV-B), the rest from wherever
//! [`SendTransfer::begin`](crate::SendTransfer::begin) says, and round.

use super::Grid;

/// See the module.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Order {
    chunks: u32,
    /// Critical chunks at each end.
    ends: u32,
    /// So many chunks behind the first of the others they begin.
    begin: u32,
}

impl Order {
    /// Of a transfer that is cut by `grid`, with so many critical chunks at each end.
    pub(crate) fn new(grid: Grid, ends: u16, begin: u32) -> Self {
        let in_order = Self { chunks: grid.chunks(), ends: u32::from(ends), begin: 0 };
        Self { begin: begin % in_order.others().max(1), ..in_order }
    }

    /// Chunks that are not critical.
    fn others(self) -> u32 {
        self.chunks.saturating_sub(2 * self.ends)
    }

    /// Whether each chunk leaves when all before it have left.
    pub(crate) fn is_in_memory_order(self) -> bool {
        self.ends == 0 && self.begin == 0
    }

    /// The chunk that is sent at `place`.
    pub(crate) fn chunk_at(self, place: u32) -> u32 {
        let (ends, others) = (self.ends, self.others());
        if others == 0 || place < ends {
            place
        } else if place < 2 * ends {
            self.chunks - 2 * ends + place
        } else {
            ends + once_round(place - 2 * ends + self.begin, others)
        }
    }

    /// The inverse of [`Order::chunk_at`].
    pub(crate) fn place_of(self, chunk: u32) -> u32 {
        let (ends, others) = (self.ends, self.others());
        if others == 0 || chunk < ends {
            chunk
        } else if chunk + ends >= self.chunks {
            chunk + 2 * ends - self.chunks
        } else {
            2 * ends + once_round(chunk - ends + others - self.begin, others)
        }
    }

    /// How many chunks from `chunk` on, which is not critical, leave one after the other and are of full length: the very last one may be
    /// shorter.
    pub(crate) fn run_from(self, chunk: u32) -> u32 {
        let end = self.chunks - self.ends.max(1);
        let before_begin = (self.ends + self.begin).checked_sub(chunk).filter(|left| *left > 0);
        before_begin.unwrap_or(u32::MAX).min(end.saturating_sub(chunk))
    }
}

/// `number` modulo `others`, of less than twice as many: without a division, which takes as long as much of the rest of a packet.
fn once_round(number: u32, others: u32) -> u32 {
    number.checked_sub(others).unwrap_or(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transfer::Bitmap;
    use proptest::prelude::*;

    proptest! {
        // test of: ltp/critical-packets
        #[test]
        fn critical_chunks_go_first_and_each_chunk_has_one_place(
            total in 0u64..100_000, chunk in 1u32..2_000, ends in 0u16..5, begin: u32,
        ) {
            let grid = Grid::new(total, chunk);
            let order = Order::new(grid, ends, begin);
            let mut seen = Bitmap::ones(grid.chunks());
            for place in 0..grid.chunks() {
                let chunk = order.chunk_at(place);
                prop_assert!(seen.remove(chunk), "chunk {} twice", chunk);
                prop_assert_eq!(order.place_of(chunk), place);
                prop_assert_eq!(grid.is_critical(chunk, ends), place < grid.critical(ends));
            }
        }

        #[test]
        fn a_run_leaves_one_after_the_other_and_is_of_full_length(
            total in 1u64..100_000, chunk in 1u32..2_000, ends in 0u16..5, begin: u32,
        ) {
            let grid = Grid::new(total, chunk);
            let order = Order::new(grid, ends, begin);
            for place in grid.critical(ends)..grid.chunks() {
                let first = order.chunk_at(place);
                let run = order.run_from(first);
                for behind in 0..run {
                    prop_assert_eq!(order.chunk_at(place + behind), first + behind);
                    prop_assert_eq!(grid.len(first + behind), chunk);
                }
                prop_assert_eq!(run == 0, first == grid.chunks() - 1);
            }
        }

        #[test]
        fn it_begins_where_it_is_told_to(total in 0u64..100_000, chunk in 1u32..2_000, begin: u32) {
            let grid = Grid::new(total, chunk);
            let order = Order::new(grid, 0, begin);
            prop_assert_eq!(order.chunk_at(0), begin % grid.chunks());
            prop_assert_eq!(order.is_in_memory_order(), begin % grid.chunks() == 0);
        }
    }
}
