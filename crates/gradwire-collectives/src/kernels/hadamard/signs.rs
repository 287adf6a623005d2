//! The random signs of a rotation: one bit for each element of the matrix, a function of seed and position alone.

/// The signs of one operation. Every rank that knows the seed has the same ones, whatever its processor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signs {
    key: u64,
    words_per_row: u64,
}

impl Signs {
    /// For a matrix with `lanes` columns.
    pub(super) fn new(seed: u64, lanes: usize) -> Self {
        Self { key: mix(seed), words_per_row: lanes.div_ceil(WORD_LANES) as u64 }
    }

    /// The signs of the columns from `lane` on, at most to the end of its word, lowest bit first: set is minus.
    #[inline(always)]
    pub(super) fn bits(self, row: usize, lane: usize) -> u64 {
        let word = (row as u64).wrapping_mul(self.words_per_row).wrapping_add((lane / WORD_LANES) as u64);
        mix(self.key.wrapping_add(word.wrapping_mul(STEP))) >> (lane % WORD_LANES)
    }
}

/// Word `n` of the generator SplitMix64 is `mix(key + n * STEP)`: any word is found without those before it.
#[inline(always)]
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(STEP);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// The odd number nearest to 2^64 over the golden ratio.
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// Columns whose signs are one word.
const WORD_LANES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_the_signs_are_minus_and_neighbours_share_none() {
        let signs = Signs::new(7, 192);
        let minus: u32 =
            (0..4096).flat_map(|row| [0, 64, 128].map(|lane| signs.bits(row, lane).count_ones())).sum();
        let share = f64::from(minus) / (4096.0 * 192.0);
        assert!((share - 0.5).abs() < 0.005, "{share} of the signs are minus");
        assert_eq!(signs.bits(3, 70), signs.bits(3, 64) >> 6);
        assert_ne!(signs.bits(3, 64), signs.bits(4, 64));
        assert_ne!(signs.bits(3, 64), Signs::new(8, 192).bits(3, 64));
    }
}
