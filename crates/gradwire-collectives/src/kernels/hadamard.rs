//! The randomised Hadamard transform of a bucket (ULTIMA section 3.4): what a lost packet takes away is spread evenly
//! over the bucket instead of being cut out of it.
//!
//! The bucket of `elems` elements is padded with zeros to a matrix of `block` rows and `lanes` columns, row after row.
//! Each column is one block of the transform: its elements lie `lanes` apart. A run of lost packets is a run of rows,
//! so it takes the same share of every block, wherever in the bucket it lies: a cut-off tail costs no more than as
//! many packets lost here and there. It also means that a butterfly adds and subtracts whole rows, which is vector
//! code without shuffles.
//!
//! Before the transform each element is multiplied by a random sign; without it a constant gradient would end up in
//! a single row. The signs are a function of the seed and the position, so all ranks that know the seed of the step
//! use the same ones. The transform is linear and, scaled by 1 / sqrt(block), its own inverse. Blocks are powers of four,
//! whose roots are powers of two: the scale rounds nothing, and whole numbers of up to 12 bits come back as they were.
//!
//! Sums are float32 whatever the dtype. A transform of one block is off by at most log2(block) * 2^-24 of the block's norm
//! (each butterfly rounds once and keeps the norm otherwise), and float16 and bfloat16 are rounded once more, at the end, by at
//! most 2^-11 and 2^-8 of each value: once on each way, also where a rest is mixed in.

mod rest;
mod signs;
mod strip;
mod vector;
mod whole;

use crate::Dtype;
use signs::Signs;
use strip::{transform, Plan, LANES_STEP};
use vector::{Brain, Cell, Four, Half, Single};

pub use whole::WholeHadamard;

/// The transform of buckets of one size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hadamard {
    elems: usize,
    block: usize,
    lanes: usize,
}

impl Hadamard {
    /// For a bucket of `elems` elements; `None` when it is too small to be worth it: below 2048, a few packets.
    #[must_use]
    pub fn of(elems: usize) -> Option<Self> {
        let most = elems / LANES_MIN;
        let block = BLOCKS.into_iter().find(|block| *block <= most)?;
        Some(Self { elems, block, lanes: elems.div_ceil(block).next_multiple_of(LANES_STEP) })
    }

    /// Elements of the matrix: less than 16 blocks, and at most an eighth, more than those of the bucket.
    #[must_use]
    pub fn padded(self) -> usize {
        self.block * self.lanes
    }

    /// Elements of a block, a power of four.
    #[must_use]
    pub fn block(self) -> usize {
        self.block
    }

    /// Transforms `source`, `[elems]` of `dtype`, into `target`, `[padded]` of it. `dtype`: float32, float16 or bfloat16.
    /// `seed`: the same on all ranks, another one in each step. `scratch` is memory to work in.
    ///
    /// # Panics
    /// When a length is another one.
    pub fn spread(self, dtype: Dtype, seed: u64, source: &[u8], target: &mut [u8], scratch: &mut Vec<f32>) {
        let lengths = (self.elems * dtype.bytes(), self.padded() * dtype.bytes());
        assert_eq!((source.len(), target.len()), lengths, "the bucket and the padded bucket");
        run(Level::best(), (dtype, self.plan(seed, false)), Some(source), target, scratch);
    }

    /// The inverse of [`Hadamard::spread`], up to rounding: `source` is `[padded]`, `target` `[elems]`.
    ///
    /// # Loss
    /// A value that is zero because it did not arrive perturbs each of the `block` values of its column a little. One that is not
    /// a number makes all of them so.
    ///
    /// # Panics
    /// When a length is another one.
    pub fn restore(self, dtype: Dtype, seed: u64, source: &[u8], target: &mut [u8], scratch: &mut Vec<f32>) {
        let lengths = (self.padded() * dtype.bytes(), self.elems * dtype.bytes());
        assert_eq!((source.len(), target.len()), lengths, "the padded bucket and the bucket");
        run(Level::best(), (dtype, self.plan(seed, true)), Some(source), target, scratch);
    }

    fn plan(self, seed: u64, is_inverse: bool) -> Plan {
        let Self { block, lanes, .. } = self;
        Plan { block, lanes, rest: 0, signs: Signs::new(seed, lanes), is_inverse }
    }
}

/// What the processor can do. All give the same bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    /// What every processor of the target has: SSE2 on x86-64, NEON on AArch64.
    Any,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(all(target_arch = "x86_64", has_avx512))]
    Avx512,
}

impl Level {
    /// From the least on.
    fn all() -> impl Iterator<Item = Self> {
        let any = std::iter::once(Self::Any);
        #[cfg(target_arch = "x86_64")]
        let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
        #[cfg(target_arch = "x86_64")]
        let any = any.chain(has_avx2.then_some(Self::Avx2));
        #[cfg(all(target_arch = "x86_64", has_avx512))]
        let any = any.chain(is_x86_feature_detected!("avx512f").then_some(Self::Avx512));
        any
    }

    fn best() -> Self {
        Self::all().last().unwrap_or(Self::Any)
    }
}

fn run(
    level: Level,
    (dtype, plan): (Dtype, Plan),
    source: Option<&[u8]>,
    target: &mut [u8],
    scratch: &mut Vec<f32>,
) {
    match dtype {
        Dtype::F32 => run_cells::<Single>(level, plan, source, target, scratch),
        Dtype::F16 => run_cells::<Half>(level, plan, source, target, scratch),
        Dtype::Bf16 => run_cells::<Brain>(level, plan, source, target, scratch),
        _ => debug_assert!(false, "only floats of up to 32 bits are rotated"),
    }
}

fn run_cells<C: Cell>(
    level: Level,
    plan: Plan,
    source: Option<&[u8]>,
    target: &mut [u8],
    scratch: &mut Vec<f32>,
) {
    // SAFETY: `Hadamard` makes the plans, and a level is one that the processor has.
    unsafe {
        match level {
            Level::Any => transform::<C, Four>(plan, source, target, scratch),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => transform_avx2::<C>(plan, source, target, scratch),
            #[cfg(all(target_arch = "x86_64", has_avx512))]
            Level::Avx512 => transform_avx512::<C>(plan, source, target, scratch),
        }
    }
}

/// # Safety
/// As [`transform`], and the processor has AVX2 and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
unsafe fn transform_avx2<C: Cell>(
    plan: Plan,
    source: Option<&[u8]>,
    target: &mut [u8],
    scratch: &mut Vec<f32>,
) {
    // SAFETY: as promised by the caller.
    unsafe { transform::<C, vector::x86::Eight>(plan, source, target, scratch) };
}

/// # Safety
/// As [`transform`], and the processor has AVX-512.
#[cfg(all(target_arch = "x86_64", has_avx512))]
#[target_feature(enable = "avx512f")]
unsafe fn transform_avx512<C: Cell>(
    plan: Plan,
    source: Option<&[u8]>,
    target: &mut [u8],
    scratch: &mut Vec<f32>,
) {
    // SAFETY: as promised by the caller.
    unsafe { transform::<C, vector::x86::Sixteen>(plan, source, target, scratch) };
}

/// Sizes of a block, the largest first. The sums of 4096 values still fit float32 with three decimal digits to spare; below 16
/// a lost packet takes a large part of a block whatever one does.
const BLOCKS: [usize; 5] = [4096, 1024, 256, 64, 16];
/// So that padding adds at most an eighth.
const LANES_MIN: usize = 8 * LANES_STEP;

#[cfg(test)]
mod tests;
