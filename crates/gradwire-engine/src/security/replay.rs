//! Which packet numbers were authenticated already: the largest, and a bitmap of those behind it.

/// Numbers behind the largest that may still come. Paths have numbers of their own, so nothing overtakes by design; the
/// rest is what a network reorders. At 100 Gbit/s it is two milliseconds of full packets.
pub(crate) const WINDOW: u64 = 16_384;

/// What is known about a number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Seen {
    /// It has not been here.
    No,
    /// It has, or it is so old that nobody can tell.
    Yes,
}

/// See the module's documentation. Bit `n % WINDOW` belongs to number `n`.
#[derive(Debug)]
pub(crate) struct ReplayWindow {
    /// One more than the largest number; zero: none has come.
    next: u64,
    bits: Box<[u64]>,
}

impl ReplayWindow {
    /// Nothing has been seen.
    pub(crate) fn new() -> Self {
        Self { next: 0, bits: vec![0; (WINDOW / 64) as usize].into() }
    }

    /// The number that comes next if nothing is lost.
    pub(crate) fn expected(&self) -> u64 {
        self.next
    }

    /// Whether a number was taken.
    pub(crate) fn seen(&self, number: u64) -> Seen {
        let fresh = number >= self.next || (self.next - number <= WINDOW && !self.is_set(number));
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
        let (word, bit) = place(number);
        self.bits[word] |= 1 << bit;
    }

    fn advance(&mut self, number: u64) {
        if number - self.next >= WINDOW {
            self.bits.fill(0);
        } else {
            for entered in self.next..=number {
                let (word, bit) = place(entered);
                self.bits[word] &= !(1 << bit);
            }
        }
        self.next = number.saturating_add(1);
    }

    fn is_set(&self, number: u64) -> bool {
        let (word, bit) = place(number);
        self.bits[word] >> bit & 1 == 1
    }
}

fn place(number: u64) -> (usize, u64) {
    ((number % WINDOW / 64) as usize, number % 64)
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
        fn seen(&self, number: u64) -> Seen {
            let largest = self.0.last().copied();
            let too_old = largest.is_some_and(|largest| number + WINDOW <= largest);
            if too_old || self.0.contains(&number) {
                Seen::Yes
            } else {
                Seen::No
            }
        }
    }

    /// Steps from the largest number so far: mostly close, sometimes at the ends of the window, sometimes far.
    fn step() -> impl Strategy<Value = i64> {
        let window = WINDOW as i64;
        prop_oneof![
            8 => -40_i64..40,
            2 => -window - 2..-window + 3,
            2 => window - 2..window + 3,
            1 => -3 * window..3 * window,
        ]
    }

    proptest! {
        #[test]
        fn it_answers_as_a_list_of_all_numbers_would(
            start in 0_u64..100_000, steps in prop::collection::vec(step(), 1..300)
        ) {
            let (mut window, mut naive) = (ReplayWindow::new(), Naive::default());
            for step in steps {
                let base = naive.0.last().copied().unwrap_or(start);
                let number = base.saturating_add_signed(step);
                prop_assert_eq!(window.seen(number), naive.seen(number), "number {} after {}", number, base);
                if naive.seen(number) == Seen::No {
                    window.take(number);
                    naive.0.insert(number);
                }
                prop_assert_eq!(window.expected(), naive.0.last().map_or(0, |largest| largest + 1));
            }
        }
    }
}
