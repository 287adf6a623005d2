//! The ranks of a group that are on one host, in whichever network namespaces.

/// See the module's documentation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Here {
    /// How many, this one included.
    pub(crate) ranks: usize,
    /// This one's place among them, from 0.
    pub(crate) place: usize,
}

impl Here {
    /// Nobody else is known.
    pub(crate) const ALONE: Self = Self { ranks: 1, place: 0 };

    /// Of the boot ids of all ranks' hosts, by rank, for the rank `own`.
    pub(crate) fn of<'a>(own: usize, hosts: impl Iterator<Item = &'a str> + Clone) -> Self {
        let here = hosts.clone().nth(own);
        let before = hosts.clone().take(own).filter(|host| Some(*host) == here).count();
        let ranks = hosts.filter(|host| Some(*host) == here).count();
        Self { ranks, place: before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_host_are_counted_and_each_has_a_place() {
        let hosts = ["a", "b", "a", "a"];
        let here = |rank| Here::of(rank, hosts.into_iter());
        let places = [0, 1, 2].map(|place| Here { ranks: 3, place });
        assert_eq!([0, 2, 3].map(here), places);
        assert_eq!(here(1), Here::ALONE);
    }
}
