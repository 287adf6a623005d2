//! The randomised Hadamard transform of a bucket (ULTIMA section 3.4): what a lost packet takes away is spread evenly
//! over the bucket instead of being cut out of it.
//!
//! The bucket of `elems` float32 is padded with zeros to a matrix of `block` rows and `lanes` columns, row after row.
//! Each column is one block of the transform: its elements lie `lanes` apart. A run of lost packets is a run of rows,
//! so it takes the same share of every block, wherever in the bucket it lies: a cut-off tail costs no more than as
//! many packets lost here and there. It also means that a butterfly adds and subtracts whole rows, which is vector
//! code without shuffles.
//!
//! Before the transform each element is multiplied by a random sign; without it a constant gradient would end up in
//! a single row. The signs are a function of the seed and the position, so all ranks that know the seed of the step
//! use the same ones. The transform is linear and, scaled by 1 / sqrt(block), its own inverse.
//!
//! A block is done in two passes of up to six butterfly stages each, both on tiles that fit the first-level cache.

/// The transform of buckets of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hadamard {
    block: usize,
    lanes: usize,
}

impl Hadamard {
    /// For a bucket of `elems` elements; `None` when it is too small to be worth it: it fits a packet or two.
    #[must_use]
    pub fn of(elems: usize) -> Option<Self> {
        let most = elems / LANES_MIN;
        if most < BLOCK_MIN {
            return None;
        }
        let block = BLOCK_MAX.min(1 << most.ilog2());
        Some(Self { block, lanes: elems.div_ceil(block) })
    }

    /// Elements of the matrix: less than one block, and at most an eighth, more than those of the bucket.
    #[must_use]
    pub fn padded(self) -> usize {
        self.block * self.lanes
    }

    /// Transforms `values`, `[padded]` float32, of which those behind the bucket are zero. `seed`: the same on all ranks,
    /// another one in each step.
    ///
    /// # Panics
    /// When `values` has another length.
    pub fn spread(self, seed: u64, values: &mut [f32]) {
        self.transform(values, Signs { seed, when: When::First });
    }

    /// The inverse of [`Hadamard::spread`], up to rounding.
    ///
    /// # Loss
    /// A value that is zero because it did not arrive perturbs each of the `block` values of its column a little.
    ///
    /// # Panics
    /// When `values` has another length.
    pub fn restore(self, seed: u64, values: &mut [f32]) {
        self.transform(values, Signs { seed, when: When::Last });
    }

    /// In two passes, so that the rows of a tile fit the first-level cache: the butterflies between rows that are
    /// less than `NEAR_ROWS` apart, then the others.
    fn transform(self, values: &mut [f32], signs: Signs) {
        assert_eq!(values.len(), self.padded(), "the padded length");
        let near = self.block.min(NEAR_ROWS);
        let far = self.block / near;
        let scale = 1.0 / (self.block as f32).sqrt();
        for first in (0..self.block).step_by(near) {
            let rows = Rows { first, step: 1, count: near, lanes: self.lanes };
            let is_last = far == 1;
            let flip = signs.when == When::First || is_last && signs.when == When::Last;
            let scale = if is_last { scale } else { 1.0 };
            butterflies(values, rows, Finish { scale, signs: flip.then_some(signs) });
        }
        for first in (0..near).take(if far > 1 { near } else { 0 }) {
            let rows = Rows { first, step: near, count: far, lanes: self.lanes };
            let flip = signs.when == When::Last;
            butterflies(values, rows, Finish { scale, signs: flip.then_some(signs) });
        }
    }
}

/// Random signs, before the first butterfly or after the last one.
#[derive(Clone, Copy, Debug)]
struct Signs {
    seed: u64,
    when: When,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum When {
    First,
    Last,
    #[cfg(test)]
    Never,
}

/// Rows `first + i * step` for `i < count`, a power of two, of a matrix with `lanes` columns.
#[derive(Clone, Copy, Debug)]
struct Rows {
    first: usize,
    step: usize,
    count: usize,
    lanes: usize,
}

/// What else is done to the rows while they are in the cache.
#[derive(Clone, Copy, Debug)]
struct Finish {
    scale: f32,
    signs: Option<Signs>,
}

/// The transform over `rows`, compiled a second time for processors with wider vectors.
fn butterflies(values: &mut [f32], rows: Rows, finish: Finish) {
    let last = rows.first + (rows.count - 1) * rows.step;
    assert!((last + 1) * rows.lanes <= values.len(), "the rows are in the matrix");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, the rows are in the matrix.
        return unsafe { tiles_avx2(values, rows, finish) };
    }
    // SAFETY: the rows are in the matrix.
    unsafe { tiles(values, rows, finish) };
}

/// # Safety
/// As [`tiles`], and the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn tiles_avx2(values: &mut [f32], rows: Rows, finish: Finish) {
    // SAFETY: as promised by the caller.
    unsafe { tiles(values, rows, finish) };
}

/// # Safety
/// `rows` are rows of `values`.
#[inline(always)]
unsafe fn tiles(values: &mut [f32], rows: Rows, finish: Finish) {
    for lane in (0..rows.lanes).step_by(TILE_LANES) {
        let width = TILE_LANES.min(rows.lanes - lane);
        if let Some(signs) = finish.signs.filter(|signs| signs.when == When::First) {
            flip_tile(values, rows, (lane, width), signs.seed);
        }
        // SAFETY: the tile lies in rows of `values`.
        unsafe { transform_tile(values.as_mut_ptr().add(lane), rows, width, finish.scale) };
        if let Some(signs) = finish.signs.filter(|signs| signs.when == When::Last) {
            flip_tile(values, rows, (lane, width), signs.seed);
        }
    }
}

/// The butterflies of one tile, three stages at a time while they are in registers; the last ones also scale.
///
/// # Safety
/// `width` floats from `tile` on in each of the `rows` are valid and nobody else's.
#[inline(always)]
unsafe fn transform_tile(tile: *mut f32, rows: Rows, width: usize, scale: f32) {
    let mut half = 1;
    while half < rows.count {
        let radix = (rows.count / half).min(8);
        let scale = if half * radix == rows.count { scale } else { 1.0 };
        for outer in (0..rows.count).step_by(half * radix) {
            for low in outer..outer + half {
                let stride = half * rows.step * rows.lanes;
                // SAFETY: rows `low`, `low + half`, .. below `count`.
                unsafe {
                    let first = tile.add((rows.first + low * rows.step) * rows.lanes);
                    match radix {
                        8 => radix_rows::<8>(first, stride, width, scale),
                        4 => radix_rows::<4>(first, stride, width, scale),
                        _ => radix_rows::<2>(first, stride, width, scale),
                    }
                }
            }
        }
        half *= radix;
    }
}

/// All butterflies among `R` rows that lie `stride` floats apart.
///
/// # Safety
/// `width` floats from `first` on and at each of the `R` strides are valid.
#[inline(always)]
unsafe fn radix_rows<const R: usize>(first: *mut f32, stride: usize, width: usize, scale: f32) {
    let mut lane = 0;
    while lane + VECTOR <= width {
        // SAFETY: `VECTOR` floats from here on are within the width.
        unsafe { radix_lanes::<R, VECTOR>(first.add(lane), stride, scale) };
        lane += VECTOR;
    }
    while lane < width {
        // SAFETY: one float from here on is within the width.
        unsafe { radix_lanes::<R, 1>(first.add(lane), stride, scale) };
        lane += 1;
    }
}

/// # Safety
/// `W` floats from `first` on and at each of the `R` strides are valid.
#[inline(always)]
unsafe fn radix_lanes<const R: usize, const W: usize>(first: *mut f32, stride: usize, scale: f32) {
    let mut rows = [[0.0_f32; W]; R];
    for (index, row) in rows.iter_mut().enumerate() {
        // SAFETY: as promised by the caller; any alignment.
        *row = unsafe { first.add(index * stride).cast::<[f32; W]>().read_unaligned() };
    }
    let mut half = 1;
    while half < R {
        for low in (0..R).filter(|row| row & half == 0) {
            let (head, tail) = rows.split_at_mut(low + half);
            for (a, b) in head[low].iter_mut().zip(&mut tail[0]) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
    for (index, row) in rows.iter_mut().enumerate() {
        row.iter_mut().for_each(|value| *value *= scale);
        // SAFETY: as promised by the caller; any alignment.
        unsafe { first.add(index * stride).cast::<[f32; W]>().write_unaligned(*row) };
    }
}

/// Flips the signs of about half of the elements of a tile.
#[inline(always)]
fn flip_tile(values: &mut [f32], rows: Rows, (lane, width): (usize, usize), seed: u64) {
    for row in (0..rows.count).map(|index| rows.first + index * rows.step) {
        let line = &mut values[row * rows.lanes + lane..][..width];
        for (group, part) in line.chunks_mut(32).enumerate() {
            let place = (row as u64) << 32 | (lane / 32 + group) as u64;
            let bits = mix(seed ^ mix(place)) as u32;
            for (lane, value) in part.iter_mut().enumerate() {
                *value = f32::from_bits(value.to_bits() ^ ((bits >> lane) << 31));
            }
        }
    }
}

/// The finalising mixer of SplitMix64: every bit of the result depends on every bit of the argument.
#[inline(always)]
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ (value >> 31)
}

/// Longest block: its sums of 4096 values still fit float32 with three decimal digits to spare.
const BLOCK_MAX: usize = 4096;
/// Below this a lost packet takes a large part of a block whatever one does.
const BLOCK_MIN: usize = 16;
/// So that padding adds at most an eighth.
const LANES_MIN: usize = 8;
/// Rows of a tile: 64 rows of 64 floats are half of a first-level cache.
const NEAR_ROWS: usize = 64;
/// Columns of a tile, a multiple of 32 so that a group of signs is never split.
const TILE_LANES: usize = 64;
/// Floats of a vector register with AVX2; narrower ones take two or more.
const VECTOR: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NO_SIGNS: Signs = Signs { seed: 0, when: When::Never };

    fn hadamard(elems: usize) -> Hadamard {
        Hadamard::of(elems).expect("large enough")
    }

    fn ramp(hadamard: Hadamard, elems: usize) -> Vec<f32> {
        (0..hadamard.padded())
            .map(|index| if index < elems { (index % 97) as f32 - 48.0 } else { 0.0 })
            .collect()
    }

    /// The transform by its definition: the sign of row r in output row s is the parity of r & s.
    fn naive(hadamard: Hadamard, values: &[f32]) -> Vec<f32> {
        let Hadamard { block, lanes } = hadamard;
        let element = |row: usize, lane: usize| {
            let signed = |other: usize| {
                let sign = if (row & other).count_ones() % 2 == 0 { 1.0 } else { -1.0 };
                sign * f64::from(values[other * lanes + lane])
            };
            ((0..block).map(signed).sum::<f64>() / (block as f64).sqrt()) as f32
        };
        (0..block * lanes).map(|index| element(index / lanes, index % lanes)).collect()
    }

    fn square_error(left: &[f32], right: &[f32]) -> f64 {
        left.iter().zip(right).map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    #[test]
    fn the_transform_is_the_one_of_the_definition_and_its_own_inverse() {
        for elems in [128, 1_000, 5_000, 70_000] {
            let hadamard = hadamard(elems);
            let values = ramp(hadamard, elems);
            let mut fast = values.clone();
            hadamard.transform(&mut fast, NO_SIGNS);
            let energy = square_error(&values, &vec![0.0; values.len()]);
            assert!(square_error(&fast, &naive(hadamard, &values)) < 1e-9 * energy, "{elems}");
            hadamard.transform(&mut fast, NO_SIGNS);
            assert!(square_error(&fast, &values) < 1e-9 * energy, "{elems}");
        }
    }

    #[test]
    fn padding_is_at_most_an_eighth_and_small_buckets_are_left_alone() {
        assert_eq!(Hadamard::of(127), None);
        assert_eq!(hadamard(128), Hadamard { block: 16, lanes: 8 });
        assert_eq!(hadamard(25 << 18).block, BLOCK_MAX);
        for elems in 128..5_000 {
            let padded = hadamard(elems).padded();
            assert!(padded >= elems && padded - elems <= elems / 8, "{elems} become {padded}");
        }
    }

    #[test]
    fn another_seed_is_another_rotation() {
        let hadamard = hadamard(4_096);
        let spread = |seed| {
            let mut values = ramp(hadamard, 4_096);
            hadamard.spread(seed, &mut values);
            values
        };
        assert_eq!(spread(1), spread(1));
        assert_ne!(spread(1), spread(2));
    }

    /// The squared error after the share `lost` of the rows, in a run from `first` on or scattered, was set to zero.
    fn error_without(lost: &[bool]) -> f64 {
        let elems = 64 * 1_024;
        let hadamard = hadamard(elems);
        // A gradient whose large values lie together: what a run of losses would hit hardest.
        let value = |index: usize| if index > elems * 9 / 10 { 3.0 } else { 0.1 };
        let values: Vec<f32> = (0..hadamard.padded()).map(value).collect();
        let mut error = 0.0;
        for seed in 0..16 {
            let mut received = values.clone();
            hadamard.spread(seed, &mut received);
            for (row, line) in received.chunks_exact_mut(hadamard.lanes).enumerate() {
                if lost[row % lost.len()] {
                    line.fill(0.0);
                }
            }
            hadamard.restore(seed, &mut received);
            error += square_error(&received, &values) / 16.0;
        }
        error
    }

    #[test]
    fn a_cut_off_tail_costs_no_more_than_scattered_losses() {
        let rows = BLOCK_MAX;
        let tail: Vec<bool> = (0..rows).map(|row| row >= rows * 9 / 10).collect();
        let scattered: Vec<bool> = (0..rows).map(|row| row % 10 == 3).collect();
        let ratio = error_without(&tail) / error_without(&scattered);
        assert!(ratio < 1.1, "a burst costs {ratio} times as much");
    }

    proptest! {
        #[test]
        fn what_was_spread_is_restored(elems in 128_usize..20_000, seed in any::<u64>()) {
            let hadamard = hadamard(elems);
            let values = ramp(hadamard, elems);
            let mut other = values.clone();
            hadamard.spread(seed, &mut other);
            hadamard.restore(seed, &mut other);
            let energy = square_error(&values, &vec![0.0; values.len()]);
            prop_assert!(square_error(&other, &values) <= 1e-9 * energy);
        }
    }
}
