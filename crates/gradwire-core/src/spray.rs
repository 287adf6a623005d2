//! Which path the next data packet takes (MLT section 4.2.1: the end host decides, packet by packet).
//!
//! Asked by [`crate::paths::Paths`] with the paths that may send now; the paths that are worse than the others are
//! not among them ([`crate::path_health`]).

use gradwire_wire::ConnectionId;

/// Most paths of one connection.
pub const PATHS_MAX: u8 = 16;

/// How packets are spread over the paths between two ranks. A choice of the sender alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Spray {
    /// One after the other.
    RoundRobin,
    /// Evenly by chance.
    Random,
    /// Of two random ones the one with the lower delay and loss. Only this policy takes its share from a path that
    /// loses more than the others, or lags behind them, and gives it back when the path has healed.
    #[default]
    Adaptive,
}

/// A set of paths: bit `i` is path `i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct PathSet(u16);

impl PathSet {
    pub(crate) fn insert(&mut self, path: usize) {
        self.0 |= 1 << path;
    }

    pub(crate) fn len(self) -> u8 {
        self.0.count_ones() as u8
    }

    pub(crate) fn contains(self, path: usize) -> bool {
        self.0 >> path & 1 == 1
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// What is in both sets.
    pub(crate) fn within(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// This set without `path`.
    pub(crate) fn without(self, path: Option<usize>) -> Self {
        Self(self.0 & !path.map_or(0, |path| 1 << path))
    }

    /// Number `index` modulo the size, counted from the lowest path. The set is not empty.
    fn nth(self, index: u32) -> usize {
        let mut rest = self.0;
        for _ in 0..index % self.0.count_ones().max(1) {
            rest &= rest - 1;
        }
        rest.trailing_zeros() as usize
    }

    /// The first path at or after `from`, else the lowest. The set is not empty.
    fn next_from(self, from: usize) -> usize {
        let after = self.0 >> from << from;
        let among = if after == 0 { self.0 } else { after };
        among.trailing_zeros() as usize
    }
}

/// State of the choice.
#[derive(Debug)]
pub(crate) struct Sprayer {
    spray: Spray,
    random: u64,
    /// Path after the last one, for round robin.
    turn: usize,
    /// Packets that go over one path before the next choice.
    run: u32,
    current: usize,
    left: u32,
}

impl Sprayer {
    /// Chance comes from the connection's ids, so that a run in virtual time repeats exactly.
    pub(crate) fn new(spray: Spray, run: u32, local: ConnectionId, remote: ConnectionId) -> Self {
        let seed = u64::from(local.value()) << 32 | u64::from(remote.value());
        // Spreads the ids over all bits; an even number times an odd one plus one is never zero.
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Self { spray, random, turn: 0, run: run.max(1), current: 0, left: 0 }
    }

    /// The path of the run that is going on.
    pub(crate) fn current(&self) -> Option<usize> {
        (self.left > 0).then_some(self.current)
    }

    /// One more packet of the run goes out.
    pub(crate) fn continue_run(&mut self) {
        self.left -= 1;
    }

    /// Chooses among `open`, which is not empty; of two paths the one with the lower `score` is better.
    // claim: mlt/spray
    pub(crate) fn choose(&mut self, open: PathSet, score: impl Fn(usize) -> u64) -> usize {
        let path = match self.spray {
            Spray::RoundRobin => open.next_from(self.turn),
            Spray::Random => open.nth(self.draw()),
            Spray::Adaptive => {
                let (one, other) = (open.nth(self.draw()), open.nth(self.draw()));
                if score(other) < score(one) {
                    other
                } else {
                    one
                }
            }
        };
        self.turn = (path + 1) % usize::from(PATHS_MAX);
        self.current = path;
        self.left = self.run - 1;
        path
    }

    /// Whether paths that are worse than the others lose their share.
    pub(crate) fn adapts(&self) -> bool {
        self.spray == Spray::Adaptive
    }

    /// xorshift64*: chance here needs to be even, not secret.
    fn draw(&mut self) -> u32 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn sprayer(spray: Spray, run: u32) -> Sprayer {
        let id = |value| ConnectionId::new(value).expect("fits");
        Sprayer::new(spray, run, id(3), id(5))
    }

    fn set(paths: &[usize]) -> PathSet {
        let mut set = PathSet::default();
        paths.iter().for_each(|path| set.insert(*path));
        set
    }

    fn shares(mut sprayer: Sprayer, open: PathSet, score: impl Fn(usize) -> u64) -> [u32; 4] {
        let mut shares = [0; 4];
        (0..4_000).for_each(|_| shares[sprayer.choose(open, &score)] += 1);
        shares
    }

    // test of: mlt/spray
    #[test]
    fn round_robin_takes_the_open_paths_in_turn() {
        let mut sprayer = sprayer(Spray::RoundRobin, 1);
        let taken: Vec<usize> = (0..6).map(|_| sprayer.choose(set(&[0, 2, 3]), |_| 0)).collect();
        assert_eq!(taken, [0, 2, 3, 0, 2, 3]);
    }

    // test of: mlt/spray
    #[test]
    fn chance_spreads_evenly() {
        for spray in [Spray::Random, Spray::Adaptive] {
            let shares = shares(sprayer(spray, 1), set(&[0, 1, 2, 3]), |_| 7);
            // Six standard deviations of a binomial with n = 4000 and p = 1/4.
            assert!(shares.iter().all(|share| share.abs_diff(1_000) < 165), "{shares:?}");
        }
    }

    // test of: mlt/spray
    #[test]
    fn of_two_paths_adaptive_takes_the_better_one() {
        let shares = shares(sprayer(Spray::Adaptive, 1), set(&[0, 1, 2, 3]), |path| path as u64);
        // Path i wins unless the other draw is lower: (7 - 2i) / 16.
        for (path, share) in shares.iter().enumerate() {
            let expected = 250 * (7 - 2 * path as u32);
            assert!(share.abs_diff(expected) < 200, "{shares:?}");
        }
    }

    #[test]
    fn a_run_stays_on_its_path() {
        let mut sprayer = sprayer(Spray::Random, 3);
        let path = sprayer.choose(set(&[0, 1, 2, 3]), |_| 0);
        for _ in 0..2 {
            assert_eq!(sprayer.current(), Some(path));
            sprayer.continue_run();
        }
        assert_eq!(sprayer.current(), None);
    }

    proptest! {
        #[test]
        fn only_open_paths_are_taken(open in 1u16.., seed in 1u32..1 << 20, round_robin: bool) {
            let spray = if round_robin { Spray::RoundRobin } else { Spray::Adaptive };
            let id = |value| ConnectionId::new(value).expect("fits");
            let mut sprayer = Sprayer::new(spray, 1, id(seed), id(1));
            for _ in 0..40 {
                prop_assert!(PathSet(open).contains(sprayer.choose(PathSet(open), |path| path as u64)));
            }
        }
    }
}
