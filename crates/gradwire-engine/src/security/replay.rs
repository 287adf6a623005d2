//! Which packet numbers were authenticated already: the largest, and a bitmap of those behind it.

/// Numbers behind the largest that may still come, where nothing overtakes by design: paths have numbers of their own, so it is only what
/// a network reorders. At 100 Gbit/s it is two milliseconds of full packets.
pub(crate) const WINDOW: u64 = 16_384;

/// What is known about a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// It has not been here.
    No,
    /// It has, or it is so old that nobody can tell.
    Yes,
}

/// See the module's documentation. Bit `n` modulo the number of bits, a power of two, belongs to number `n`.
#[derive(Debug)]
pub(crate) struct ReplayWindow {
    /// One more than the largest number; zero: none has come.
    next: u64,
    bits: Box<[u64]>,
}

impl ReplayWindow {
    /// Nothing has been seen. A number may come when so many have overtaken it, or a few ([`WINDOW`]).
    pub(crate) fn new(overtaken: u32) -> Self {
        let window = u64::from(overtaken).next_power_of_two().max(WINDOW);
        Self { next: 0, bits: vec![0; (window / 64) as usize].into() }
    }

    /// Numbers behind the largest that may still come, with that one.
    fn window(&self) -> u64 {
        self.bits.len() as u64 * 64
    }

    /// The number that comes next if nothing is lost.
    pub(crate) fn expected(&self) -> u64 {
        self.next
    }

    /// Whether a number was taken.
    pub(crate) fn seen(&self, number: u64) -> Seen {
        let fresh = number >= self.next || (self.next - number <= self.window() && !self.is_set(number));
        if fresh {
            Seen::No
        } else {
            Seen::Yes
        }
    }

    /// Takes a number. Only for a packet that was authenticated: anybody else could push the window past the packets that
    /// are on their way.
    pub(crate) fn take(&mut self, number: u64) {
        if number >= self.next {
            self.advance(number);
        }
        let (word, bit) = self.place(number);
        self.bits[word] |= 1 << bit;
    }

    fn advance(&mut self, number: u64) {
        if number - self.next >= self.window() {
            self.bits.fill(0);
        } else {
            for entered in self.next..=number {
                let (word, bit) = self.place(entered);
                self.bits[word] &= !(1 << bit);
            }
        }
        self.next = number.saturating_add(1);
    }

    fn is_set(&self, number: u64) -> bool {
        let (word, bit) = self.place(number);
        self.bits[word] >> bit & 1 == 1
    }

    fn place(&self, number: u64) -> (usize, u64) {
        ((number & (self.window() - 1)) as usize / 64, number % 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// The obvious way: all numbers that were ever taken.
    #[derive(Default)]
    struct Naive(BTreeSet<u64>);

    impl Naive {
        fn seen(&self, window: u64, number: u64) -> Seen {
            let largest = self.0.last().copied();
            let too_old = largest.is_some_and(|largest| number + window <= largest);
            if too_old || self.0.contains(&number) {
                Seen::Yes
            } else {
                Seen::No
            }
        }
    }

    /// Steps from the largest number so far: mostly close, sometimes at the ends of the window, sometimes far.
    fn step(window: i64) -> impl Strategy<Value = i64> {
        prop_oneof![
            8 => -40_i64..40,
            2 => -window - 2..-window + 3,
            2 => window - 2..window + 3,
            1 => -3 * window..3 * window,
        ]
    }

    /// How many may overtake a number, how far back numbers may then come, and steps.
    fn steps() -> impl Strategy<Value = (u32, u64, Vec<i64>)> {
        let windows = prop_oneof![Just((0, WINDOW)), Just((40_000, 65_536))];
        windows.prop_flat_map(|(overtaken, window)| {
            (Just(overtaken), Just(window), prop::collection::vec(step(window as i64), 1..300))
        })
    }

    proptest! {
        #[test]
        fn it_answers_as_a_list_of_all_numbers_would(
            start in 0_u64..100_000, (overtaken, bits, steps) in steps()
        ) {
            let (mut window, mut naive) = (ReplayWindow::new(overtaken), Naive::default());
            for step in steps {
                let base = naive.0.last().copied().unwrap_or(start);
                let number = base.saturating_add_signed(step);
                prop_assert_eq!(window.seen(number), naive.seen(bits, number), "number {} after {}", number, base);
                if naive.seen(bits, number) == Seen::No {
                    window.take(number);
                    naive.0.insert(number);
                }
                prop_assert_eq!(window.expected(), naive.0.last().map_or(0, |largest| largest + 1));
            }
        }
    }
}
