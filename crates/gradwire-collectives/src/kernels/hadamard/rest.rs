//! What is left of a bucket behind the whole columns of its matrix, mixed with the columns in the same pass.
//!
//! The rest lies behind the matrix as further rows, the last of them cut off. Element `b` of its row i belongs to 16 elements of
//! its column, rows 16 i to 16 i + 15, signs included. Let n be their sum over four, their share of the unit vector d =
//! (1/4, ..., 1/4). A reflection swaps `b` and n: the place of the rest then holds n, and each of the 16 has (b - n) / 4 more and goes
//! through the butterflies with it. It is orthogonal and its own inverse, so the other way round it is the same step
//! after the butterflies. So nothing of the rest stands in its own packets: of each of 16 others they hold a sixteenth of the
//! square. And every value is rounded once, as those of the matrix are: what is mixed stays in float32 between here and there.

// As in `strip`: iterators would need closures here.
#![allow(clippy::needless_range_loop)]

use super::strip::{read, Ends, Strip};
use super::vector::{Cell, Vector};

impl<C: Cell, V: Vector> Ends<'_, C, V> {
    /// Mixes the rest with its rows of a strip: from the tensor to the strip, or back when the butterflies are done.
    ///
    /// # Safety
    /// The strip has room, what is mixed is in the target, and the processor has the vectors.
    #[inline(always)]
    pub(super) unsafe fn mix_rest(&mut self, strip: Strip) {
        let rows = self.plan.rest.div_ceil(self.plan.lanes);
        for row in 0..rows {
            let left = self.plan.rest - row * self.plan.lanes;
            let signs = self.signs_of(row, strip.lane);
            for at in (0..strip.width).step_by(V::WIDTH) {
                // SAFETY: as promised by the caller.
                unsafe { self.mix(row, (at, left.saturating_sub(strip.lane + at)), &signs, strip) };
            }
        }
    }

    #[inline(always)]
    fn signs_of(&self, row: usize, lane: usize) -> [u64; MIXED_ROWS] {
        let mut signs = [0; MIXED_ROWS];
        for index in 0..MIXED_ROWS {
            signs[index] = self.plan.signs.bits(row * MIXED_ROWS + index, lane);
        }
        signs
    }

    /// A vector of row `row` of the rest, of which `left` elements are there, at column `at` of the strip.
    ///
    /// # Safety
    /// As [`Ends::mix_rest`].
    #[inline(always)]
    unsafe fn mix(
        &mut self,
        row: usize,
        (at, left): (usize, usize),
        signs: &[u64; MIXED_ROWS],
        strip: Strip,
    ) {
        let lanes = self.plan.lanes;
        let place = |row: usize| row * lanes + strip.lane + at;
        let (first, rest) = (row * MIXED_ROWS, place(self.plan.block + row));
        // SAFETY: as promised by the caller.
        unsafe {
            let mut rows = [V::zero(); MIXED_ROWS];
            for index in 0..MIXED_ROWS {
                rows[index] = if self.plan.is_inverse {
                    V::load(strip.row(first + index).add(at))
                } else {
                    read::<C, V>(self.target, place(first + index)).flip((signs[index] >> at) as u32)
                };
            }
            if left > 0 {
                let share = sum(&rows).scale(DIRECTION);
                let more = only(read::<C, V>(self.target, rest).subtract(share).scale(DIRECTION), left);
                self.write(rest, share);
                for index in 0..MIXED_ROWS {
                    rows[index] = rows[index].add(more);
                }
            }
            for index in 0..MIXED_ROWS {
                if self.plan.is_inverse {
                    self.write(place(first + index), rows[index].flip((signs[index] >> at) as u32));
                } else {
                    rows[index].store(strip.row(first + index).add(at));
                }
            }
        }
    }
}

/// # Safety
/// The processor has the vectors.
#[inline(always)]
unsafe fn sum<V: Vector>(rows: &[V; MIXED_ROWS]) -> V {
    let mut sums = *rows;
    let mut half = MIXED_ROWS / 2;
    while half > 0 {
        for index in 0..half {
            // SAFETY: as promised by the caller.
            sums[index] = unsafe { sums[index].add(sums[index + half]) };
        }
        half /= 2;
    }
    sums[0]
}

/// The first `left` values, then zeros: where the rest has ended nothing is mixed.
///
/// # Safety
/// The processor has the vectors.
#[inline(always)]
unsafe fn only<V: Vector>(vector: V, left: usize) -> V {
    if left >= V::WIDTH {
        return vector;
    }
    let mut values = [0.0; 16];
    // SAFETY: no vector is wider, and as promised by the caller.
    unsafe {
        vector.store(values.as_mut_ptr());
        values[left..].fill(0.0);
        V::load(values.as_ptr())
    }
}

/// Rows of the matrix that share an element of the rest; its root is a power of two, so that scaling rounds nothing.
pub(super) const MIXED_ROWS: usize = 16;
/// Each component of the direction that the rest takes among them: 1 / sqrt(MIXED_ROWS).
const DIRECTION: f32 = 0.25;
