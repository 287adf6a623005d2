//! Who of many senders to one receiver is served first.
//!
//! Senders with equal shares of a receiver's link all end at its last moment. With rates of two to one the faster half is done
//! after three quarters of that time, and the others, who then have the whole link, when they would have been anyway: up to an eighth
//! less on average, the last one as before (`queue_bytes_in_turn` says where). Nobody has to be asked: both ranks of a connection know each other's numbers.

/// A flow's place among those to the same receiver.
// claim: auto/turns-of-halves
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Turn {
    /// All are alike.
    #[default]
    Any,
    /// In the half that is served first.
    Before,
    /// In the other half.
    Behind,
}

impl Turn {
    /// Of what rank `from` sends to rank `to`. Of consecutive ranks half go before the others, at each receiver; and each sender
    /// goes before others at every second receiver.
    #[must_use]
    pub const fn between(from: u32, to: u32) -> Self {
        if (from ^ to) & 1 == 0 {
            Self::Before
        } else {
            Self::Behind
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // test of: auto/turns-of-halves
    #[test]
    fn halves_of_the_senders_go_before_the_others_and_each_at_half_of_the_receivers() {
        for ranks in 2..40 {
            for rank in 0..ranks {
                let others = || (0..ranks).filter(move |other| *other != rank);
                let before = |turn: Turn| turn == Turn::Before;
                let to = others().filter(|from| before(Turn::between(*from, rank))).count();
                let from = others().filter(|to| before(Turn::between(rank, *to))).count();
                let half = others().count() / 2;
                assert!(
                    half.abs_diff(to) <= 1 && half.abs_diff(from) <= 1,
                    "rank {rank} of {ranks}: {to}, {from}"
                );
            }
        }
    }
}
