//! One bit for each chunk of a transfer, with the number of set bits kept.

use alloc::vec;
use alloc::vec::Vec;

/// A fixed number of bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bitmap {
    words: Vec<u64>,
    bits: u32,
    ones: u32,
}

impl Bitmap {
    /// `bits` bits, all zero.
    pub(crate) fn zeros(bits: u32) -> Self {
        Self { words: vec![0; bits.div_ceil(64) as usize], bits, ones: 0 }
    }

    /// `bits` bits, all one.
    pub(crate) fn ones(bits: u32) -> Self {
        let mut words = vec![u64::MAX; bits.div_ceil(64) as usize];
        if let (Some(last), 1..) = (words.last_mut(), bits % 64) {
            *last = (1 << (bits % 64)) - 1;
        }
        Self { words, bits, ones: bits }
    }

    /// Number of bits.
    pub(crate) fn len(&self) -> u32 {
        self.bits
    }

    /// Number of set bits.
    pub(crate) fn count(&self) -> u32 {
        self.ones
    }

    /// Whether no bit is set.
    pub(crate) fn is_empty(&self) -> bool {
        self.ones == 0
    }

    /// Whether `bit` is set; bits past the end are not.
    pub(crate) fn contains(&self, bit: u32) -> bool {
        self.words.get((bit / 64) as usize).is_some_and(|word| word >> (bit % 64) & 1 == 1)
    }

    /// Sets `bit`; `true` when it was not set. Bits past the end are ignored.
    pub(crate) fn insert(&mut self, bit: u32) -> bool {
        if bit >= self.bits || self.contains(bit) {
            return false;
        }
        self.words[(bit / 64) as usize] |= 1 << (bit % 64);
        self.ones += 1;
        true
    }

    /// Clears `bit`; `true` when it was set.
    pub(crate) fn remove(&mut self, bit: u32) -> bool {
        if !self.contains(bit) {
            return false;
        }
        self.words[(bit / 64) as usize] &= !(1 << (bit % 64));
        self.ones -= 1;
        true
    }

    /// How many bits from `bit` on are set one after the other, `most` at most.
    pub(crate) fn run_from(&self, bit: u32, most: u32) -> u32 {
        let mut run = 0;
        while run < most {
            let at = bit + run;
            let ones = (self.word(at / 64) >> (at % 64)).trailing_ones();
            run += ones;
            // Fewer than are left in this word: the run ends here.
            if ones < 64 - at % 64 {
                break;
            }
        }
        run.min(most)
    }

    /// Sets or clears `count` bits from `bit` on. Bits past the end are ignored.
    pub(crate) fn assign(&mut self, bit: u32, count: u32, value: bool) {
        let (mut at, end) = (bit, bit.saturating_add(count).min(self.bits));
        while at < end {
            let in_word = (64 - at % 64).min(end - at);
            let mask = u64::MAX >> (64 - in_word) << (at % 64);
            let word = &mut self.words[(at / 64) as usize];
            let before = word.count_ones();
            *word = if value { *word | mask } else { *word & !mask };
            self.ones = self.ones + word.count_ones() - before;
            at += in_word;
        }
    }

    /// The 64 bits from `64 * index` on; zero past the end.
    pub(crate) fn word(&self, index: u32) -> u64 {
        self.words.get(index as usize).copied().unwrap_or(0)
    }

    /// Number of words.
    pub(crate) fn words(&self) -> u32 {
        self.words.len() as u32
    }

    /// First set bit at or after `from`.
    pub(crate) fn first_from(&self, from: u32) -> Option<u32> {
        let mut index = (from / 64) as usize;
        let mut word = *self.words.get(index)? & (u64::MAX << (from % 64));
        while word == 0 {
            index += 1;
            word = *self.words.get(index)?;
        }
        Some(index as u32 * 64 + word.trailing_zeros())
    }

    /// The set bits, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        core::iter::successors(self.first_from(0), |bit| self.first_from(bit + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn all_ones_has_no_bit_past_its_end() {
        for bits in [1, 63, 64, 65, 1000] {
            let map = Bitmap::ones(bits);
            assert_eq!(map.iter().count() as u32, bits);
            assert!(!map.contains(bits));
        }
    }

    proptest! {
        #[test]
        fn a_run_is_set_and_cleared_as_its_bits_would_be(
            set in prop::collection::vec(any::<bool>(), 1..300), bit in 0u32..320, count in 0u32..320, value: bool
        ) {
            let mut at_once = Bitmap::zeros(set.len() as u32);
            (0..).zip(set).filter(|(_, is_set)| *is_set).for_each(|(bit, _)| _ = at_once.insert(bit));
            let mut one_by_one = at_once.clone();
            at_once.assign(bit, count, value);
            for bit in bit..bit + count {
                _ = if value { one_by_one.insert(bit) } else { one_by_one.remove(bit) };
            }
            prop_assert_eq!(at_once, one_by_one);
        }

        #[test]
        fn behaves_like_a_set(bits in 1u32..300, ops in prop::collection::vec((any::<bool>(), 0u32..320), 0..200)) {
            let mut map = Bitmap::zeros(bits);
            let mut model = BTreeSet::new();
            for (insert, bit) in ops {
                if insert {
                    prop_assert_eq!(map.insert(bit), bit < bits && model.insert(bit));
                } else {
                    prop_assert_eq!(map.remove(bit), model.remove(&bit));
                }
                prop_assert_eq!(map.count() as usize, model.len());
            }
            prop_assert!(map.iter().eq(model.iter().copied()));
            prop_assert_eq!(map.is_empty(), model.is_empty());
            for bit in 0..400 {
                prop_assert_eq!(map.contains(bit), model.contains(&bit));
                prop_assert_eq!(map.first_from(bit), model.range(bit..).next().copied());
            }
            for (from, most) in (0..330).flat_map(|from| [(from, 3), (from, 400)]) {
                let run = (from..from + most).take_while(|bit| model.contains(bit)).count();
                prop_assert_eq!(map.run_from(from, most) as usize, run);
            }
            for index in 0..map.words() + 2 {
                let bits = model.range(64 * index..64 * (index + 1)).fold(0, |word, bit| word | 1 << (bit % 64));
                prop_assert_eq!(map.word(index), bits);
            }
        }
    }
}
