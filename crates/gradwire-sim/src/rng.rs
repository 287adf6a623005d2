//! The only source of chance in a simulation: a small seeded generator (SplitMix64, Steele et al. 2014).
//!
//! Every part of a run forks its own stream by name, so that one more draw in one part does not shift the
//! draws of all the others, and a failing seed stays close to what it was while a bug is minimised.

use std::ops::Range;
use std::time::Duration;

/// A seeded generator. Equal seeds give equal draws on every machine.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// Starts the stream of `seed`.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A stream of its own for `label`; `self` is left as it was.
    #[must_use]
    pub const fn fork(&self, label: u64) -> Self {
        Self { state: mix(self.state ^ mix(label.wrapping_add(GOLDEN))) }
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GOLDEN);
        mix(self.state)
    }

    /// Uniform in `range`; its start when the range is empty.
    pub fn below(&mut self, range: Range<u64>) -> u64 {
        let span = range.end.saturating_sub(range.start);
        if span == 0 {
            return range.start;
        }
        // The bias of a 64-bit modulo is below 2^-30 for every span used here.
        range.start + self.draw() % span
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// `true` with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() < probability
    }

    /// Uniform on a logarithmic scale: small values are as likely as large ones. Both ends at least 1.
    pub fn log_uniform(&mut self, low: u64, high: u64) -> u64 {
        let (low_ln, high_ln) = ((low.max(1) as f64).ln(), (high.max(1) as f64).ln());
        let value = (low_ln + (high_ln - low_ln) * self.unit()).exp() as u64;
        value.clamp(low, high)
    }

    /// Uniform up to `limit`, nanosecond resolution.
    pub fn duration(&mut self, limit: Duration) -> Duration {
        Duration::from_nanos(self.below(0..limit.as_nanos() as u64 + 1))
    }

    /// One of `choices`, which is not empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(0..choices.len() as u64) as usize]
    }
}

/// Scrambles 64 bits so that every input bit reaches every output bit. Also the hash of the trace.
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// 2^64 divided by the golden ratio: the increment of SplitMix64.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_give_equal_draws_and_forks_differ() {
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        assert!((0..100).all(|_| a.draw() == b.draw()));
        assert_ne!(Rng::new(7).fork(1).draw(), Rng::new(7).fork(2).draw());
        assert_ne!(Rng::new(7).fork(1).draw(), Rng::new(8).fork(1).draw());
    }

    #[test]
    fn chance_meets_its_probability_within_five_standard_deviations() {
        let mut rng = Rng::new(3);
        let (draws, probability) = (100_000.0, 0.05);
        let hits = (0..draws as u64).filter(|_| rng.chance(probability)).count() as f64;
        let deviation = (draws * probability * (1.0 - probability)).sqrt();
        assert!((hits - draws * probability).abs() < 5.0 * deviation, "{hits} hits");
    }

    #[test]
    fn log_uniform_stays_inside_its_range() {
        let mut rng = Rng::new(1);
        assert!((0..10_000).all(|_| (10..=2_000_000).contains(&rng.log_uniform(10, 2_000_000))));
    }
}
