//! The transfers of an operation.

/// Transfers by peer and index, found without a search: each datagram looks one up.
#[derive(Debug)]
pub(super) struct Table<T> {
    indices: usize,
    /// Place in `entries`, by peer and index; `ABSENT` where there is none.
    places: Vec<u16>,
    entries: Vec<T>,
}

impl<T> Table<T> {
    pub(super) fn new(ranks: usize, indices: usize) -> Self {
        Self { indices, places: vec![Self::ABSENT; ranks * indices], entries: Vec::new() }
    }

    pub(super) fn insert(&mut self, rank: u32, index: u32, entry: T) {
        let place = rank as usize * self.indices + index as usize;
        debug_assert_eq!(self.places[place], Self::ABSENT, "an index is unique for a pair of ranks");
        self.places[place] = self.entries.len() as u16;
        self.entries.push(entry);
    }

    pub(super) fn at(&mut self, rank: u32, index: u32) -> Option<&mut T> {
        if index as usize >= self.indices {
            return None;
        }
        let place = *self.places.get(rank as usize * self.indices + index as usize)?;
        self.entries.get_mut(usize::from(place))
    }

    pub(super) fn of(&self, rank: u32) -> impl Iterator<Item = &T> {
        let row = rank as usize * self.indices..(rank as usize + 1) * self.indices;
        self.places[row].iter().filter_map(|place| self.entries.get(usize::from(*place)))
    }

    /// Larger than any table: ranks times indices stay below it.
    const ABSENT: u16 = u16::MAX;
}
