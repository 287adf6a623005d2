//! The transfers of an operation.

/// Transfers by peer and index, found without a search: each datagram looks one up.
///
/// A transpose has a few with every peer, a ring many with two. So what has a small index is found in one place for all peers, and
/// what has a larger one in a row of its peer, which others do not have: a square of the ranks would be the largest thing that a
/// call needs.
#[derive(Debug)]
pub(super) struct Table<T> {
    ranks: usize,
    /// Places in `entries` of indices below [`NEAR`], by peer and index; `ABSENT` where there is none.
    near: Vec<u32>,
    /// Those of the others, by peer; no rows before the first of them.
    far: Vec<Vec<u32>>,
    entries: Vec<T>,
}

impl<T> Table<T> {
    pub(super) fn new(ranks: usize) -> Self {
        Self { ranks, near: vec![ABSENT; ranks * NEAR], far: Vec::new(), entries: Vec::new() }
    }

    pub(super) fn insert(&mut self, rank: u32, index: u32, entry: T) {
        debug_assert!(self.at(rank, index).is_none(), "an index is unique for a pair of ranks");
        let (rank, index, place) = (rank as usize, index as usize, self.entries.len() as u32);
        if index < NEAR {
            self.near[rank * NEAR + index] = place;
        } else {
            self.far.resize_with(self.ranks, Vec::new);
            let (row, index) = (&mut self.far[rank], index - NEAR);
            if row.len() <= index {
                row.resize(index + 1, ABSENT);
            }
            row[index] = place;
        }
        self.entries.push(entry);
    }

    pub(super) fn at(&mut self, rank: u32, index: u32) -> Option<&mut T> {
        let (rank, index) = (rank as usize, index as usize);
        let place = match index.checked_sub(NEAR) {
            None => self.near.get(rank * NEAR + index)?,
            Some(index) => self.far.get(rank)?.get(index)?,
        };
        self.entries.get_mut(*place as usize)
    }

    pub(super) fn of(&self, rank: u32) -> impl Iterator<Item = &T> {
        let rank = rank as usize;
        let far = self.far.get(rank).map_or(&[][..], Vec::as_slice);
        let places = self.near[rank * NEAR..(rank + 1) * NEAR].iter().chain(far);
        places.filter_map(|place| self.entries.get(*place as usize))
    }
}

/// More than entries.
const ABSENT: u32 = u32::MAX;
/// A contribution, a result, settings and one more piece.
const NEAR: usize = 4;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_are_found_by_peer_and_index_and_nothing_else_is() {
        let mut table = Table::new(5);
        let keys = [(0, 0), (4, 1), (2, 3), (2, 4), (2, 90), (3, 1000)];
        keys.iter().for_each(|(rank, index)| table.insert(*rank, *index, (*rank, *index)));
        for rank in 0..7 {
            for index in 0..1100 {
                let expected = keys.contains(&(rank, index)).then_some((rank, index));
                assert_eq!(table.at(rank, index).copied(), expected);
            }
        }
        assert_eq!(table.at(u32::MAX, u32::MAX), None);
        let of = |rank| table.of(rank).copied().collect::<Vec<_>>();
        assert_eq!((of(2), of(1)), (vec![(2, 3), (2, 4), (2, 90)], vec![]));
    }

    #[test]
    fn a_large_group_needs_no_square_of_its_ranks() {
        const RANKS: u32 = 4096;
        let cells = |table: &Table<u8>| table.near.len() + table.far.iter().map(Vec::capacity).sum::<usize>();
        let (mut transpose, mut ring) = (Table::new(RANKS as usize), Table::new(RANKS as usize));
        (0..RANKS).for_each(|rank| (0..2).for_each(|index| transpose.insert(rank, index, 0)));
        (0..2 * RANKS).for_each(|index| ring.insert(1, index, 0));
        assert!(cells(&transpose) <= 4 * RANKS as usize && cells(&ring) <= 10 * RANKS as usize);
    }
}
