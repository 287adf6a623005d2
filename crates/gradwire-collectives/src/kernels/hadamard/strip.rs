//! The butterflies: a strip of columns at a time, in a buffer that the second-level cache holds.
//!
//! Memory is read once and written once. The first butterflies of a column read its elements from the tensor, signs
//! included, and leave them in the strip; the last ones write to the tensor, scaled. As many stages of butterflies are done
//! at a time as there are registers for: three, four with AVX-512, where a block of 4096 rows then passes through the strip
//! three times instead of four. The strip lies on cache lines, wherever the tensor does.
//!
//! Plain loops over indices throughout: a closure, or an iterator's, is a function of its own, which the compiler does not make for
//! the processor that its caller is made for.
//!
//! All variants add and subtract the same pairs in the same order and none fuses a multiplication with an addition, so every
//! processor gets the same bits.

// See above: iterators would need closures here.
#![allow(clippy::needless_range_loop)]

use super::rest::MIXED_ROWS;
use super::signs::Signs;
use super::vector::{Cell, Vector};
use std::marker::PhantomData;

/// A matrix `[block, lanes]` and what is done to it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    /// Rows: 16, 64, 256, 1024 or 4096.
    pub(super) block: usize,
    /// Columns, a multiple of [`LANES_STEP`].
    pub(super) lanes: usize,
    /// Elements of the tensor behind the matrix, which are mixed with it ([`super::rest`]): at most a sixteenth as many rows.
    pub(super) rest: usize,
    pub(super) signs: Signs,
    /// Signs after the last butterfly, not before the first.
    pub(super) is_inverse: bool,
}

impl Plan {
    /// Where row `row` of the strip ends, in elements of the matrix.
    #[inline(always)]
    fn end(self, row: usize, strip: Strip) -> usize {
        row * self.lanes + strip.lane + strip.width
    }

    /// The first so many rows of the matrix are mixed with the rest.
    #[inline(always)]
    fn mixed_rows(self) -> usize {
        self.rest.div_ceil(self.lanes) * MIXED_ROWS
    }
}

/// Columns are a multiple of this: the widest vector, 64 bytes of float32.
pub(super) const LANES_STEP: usize = 16;

/// The transform of `source`, which stands for a whole matrix with zeros at its end, into `target`, which may be short of
/// the matrix too. Without a source `target` is transformed where it is: columns are read whole before they are written.
/// `strip` is memory to work in.
///
/// # Safety
/// The plan is one of those that [`Plan`] describes, and the processor has the vectors.
#[inline(always)]
pub(super) unsafe fn transform<C: Cell, V: Vector>(
    plan: Plan,
    source: Option<&[u8]>,
    target: &mut [u8],
    strip: &mut Vec<f32>,
) {
    let mut ends = Ends::<C, V> { plan, source, target, _types: PhantomData };
    // SAFETY: the four factors make the block.
    unsafe {
        match (plan.block, V::ROWS) {
            (16, _) => ends.strips::<4, 1, 4, 1>(strip),
            (64, _) => ends.strips::<8, 1, 8, 1>(strip),
            (256, 16) => ends.strips::<16, 1, 16, 1>(strip),
            (256, _) => ends.strips::<4, 4, 4, 4>(strip),
            (1024, 16) => ends.strips::<8, 8, 16, 1>(strip),
            (1024, _) => ends.strips::<8, 8, 4, 4>(strip),
            (_, 16) => ends.strips::<16, 16, 16, 1>(strip),
            _ => ends.strips::<8, 8, 8, 8>(strip),
        }
    }
}

/// Some columns of the matrix, `[rows, STRIP_LANES]` floats in a buffer.
#[derive(Clone, Copy)]
pub(super) struct Strip {
    start: *mut f32,
    /// First column.
    pub(super) lane: usize,
    pub(super) width: usize,
    slots: Slots,
}

/// Where rows are in a strip, in floats from its start.
#[derive(Clone, Copy)]
struct Slots {
    some: usize,
    near: usize,
    some_floats: usize,
    group_floats: usize,
}

impl Strip {
    /// Where row `row` of the strip begins.
    #[inline(always)]
    pub(super) fn row(self, row: usize) -> *mut f32 {
        let Slots { some, near, some_floats, group_floats } = self.slots;
        let (group, within) = (row / near, row % near);
        let floats = group * group_floats + within / some * some_floats + within % some * STRIP_LANES;
        self.start.wrapping_add(floats)
    }
}

/// Where elements come from and go to.
pub(super) struct Ends<'a, C, V> {
    pub(super) plan: Plan,
    /// `None`: from the target.
    source: Option<&'a [u8]>,
    pub(super) target: &'a mut [u8],
    _types: PhantomData<(C, V)>,
}

impl<C: Cell, V: Vector> Ends<'_, C, V> {
    /// All strips: `A * B` near rows, `D * E` groups of them. `memory` is theirs.
    ///
    /// # Safety
    /// The block is `A * B * D * E`, and the processor has the vectors.
    #[inline(always)]
    unsafe fn strips<const A: usize, const B: usize, const D: usize, const E: usize>(
        &mut self,
        memory: &mut Vec<f32>,
    ) {
        let rows = group_rows(A, B) * D * E;
        memory.resize(rows * STRIP_LANES + LANES_STEP, 0.0);
        let aligned = memory.as_ptr().align_offset(VECTOR_BYTES_MAX);
        let start = memory[aligned..].as_mut_ptr();
        let (some_floats, group_floats) = ((A + 1) * STRIP_LANES, group_rows(A, B) * STRIP_LANES);
        let slots = Slots { some: A, near: A * B, some_floats, group_floats };
        for lane in (0..self.plan.lanes).step_by(STRIP_LANES) {
            let width = STRIP_LANES.min(self.plan.lanes - lane);
            // SAFETY: the memory holds the rows of a strip, and its columns are in the matrix.
            unsafe { self.columns::<A, B, D, E>(Strip { start, lane, width, slots }) };
        }
    }

    /// All butterflies of the strip's columns.
    ///
    /// # Safety
    /// As [`Ends::strips`], and the strip has room.
    #[inline(always)]
    unsafe fn columns<const A: usize, const B: usize, const D: usize, const E: usize>(
        &mut self,
        strip: Strip,
    ) {
        let (near, far) = (A * B, D * E);
        debug_assert_eq!(near * far, self.plan.block);
        let Slots { some_floats, group_floats, .. } = strip.slots;
        // SAFETY: row `b * A + a` of group `g` begins at `g * group_floats + b * some_floats + a * STRIP_LANES`, in the strip.
        unsafe {
            if !self.plan.is_inverse {
                self.mix_rest(strip);
            }
            for group in 0..far {
                let start = strip.start.add(group * group_floats);
                for some in 0..B {
                    self.first::<A>(start.add(some * some_floats), group * near + some * A, strip);
                }
                if B > 1 {
                    for low in 0..A {
                        between::<B, V>(start.add(low * STRIP_LANES), some_floats, strip.width);
                    }
                }
            }
            for row in 0..near {
                let start = strip.start.add(row / A * some_floats + row % A * STRIP_LANES);
                if E > 1 {
                    for low in (0..far).step_by(D) {
                        between::<D, V>(start.add(low * group_floats), group_floats, strip.width);
                    }
                    for low in 0..D {
                        let start = start.add(low * group_floats);
                        self.last::<E>(start, D * group_floats, (row + low * near, D * near), strip);
                    }
                } else {
                    self.last::<D>(start, group_floats, (row, near), strip);
                }
            }
            if self.plan.is_inverse {
                self.mix_rest(strip);
            }
        }
    }

    /// The first butterflies, among `R` rows from `row` on, which go to the strip at `to`.
    ///
    /// # Safety
    /// `R` rows of the strip are valid from `to` on.
    #[inline(always)]
    unsafe fn first<const R: usize>(&self, to: *mut f32, row: usize, strip: Strip) {
        let Strip { lane, width, .. } = strip;
        let source = self.source.unwrap_or(self.target);
        // They are in the strip already, with their signs.
        let is_mixed = !self.plan.is_inverse && row < self.plan.mixed_rows();
        let mut signs = [0; R];
        if !self.plan.is_inverse && !is_mixed {
            for index in 0..R {
                signs[index] = self.plan.signs.bits(row + index, lane);
            }
        }
        let is_whole = self.plan.end(row + R - 1, strip) * C::BYTES <= source.len();
        for at in (0..width).step_by(V::WIDTH) {
            let elem = row * self.plan.lanes + lane + at;
            // SAFETY: as promised by the caller; the last of the rows ends last.
            unsafe {
                let mut rows = [V::zero(); R];
                if is_mixed {
                    for index in 0..R {
                        rows[index] = V::load(to.add(index * STRIP_LANES + at));
                    }
                } else if is_whole {
                    let start = source.as_ptr().add(elem * C::BYTES);
                    for index in 0..R {
                        let start = start.add(index * self.plan.lanes * C::BYTES);
                        fetch(start.wrapping_add(AHEAD_ROWS * self.plan.lanes * C::BYTES));
                        rows[index] = C::load(start);
                    }
                } else {
                    for index in 0..R {
                        rows[index] = read::<C, V>(source, elem + index * self.plan.lanes);
                    }
                }
                for index in 0..R {
                    rows[index] = rows[index].flip((signs[index] >> at) as u32);
                }
                butterflies(&mut rows);
                for index in 0..R {
                    rows[index].store(to.add(index * STRIP_LANES + at));
                }
            }
        }
    }

    /// The last butterflies, among `R` rows of the strip, `stride` floats apart, which are rows `row`, `row + step`, ... of
    /// the matrix.
    ///
    /// # Safety
    /// Those rows of the strip are valid.
    #[inline(always)]
    unsafe fn last<const R: usize>(
        &mut self,
        from: *mut f32,
        stride: usize,
        (row, step): (usize, usize),
        strip: Strip,
    ) {
        let Strip { lane, width, .. } = strip;
        let mut signs = [0; R];
        if self.plan.is_inverse {
            for index in 0..R {
                signs[index] = self.plan.signs.bits(row + index * step, lane);
            }
        }
        // A power of two, like the block's root: scaling rounds nothing.
        let scale = 1.0 / (self.plan.block as f32).sqrt();
        let is_whole = self.plan.end(row + (R - 1) * step, strip) * C::BYTES <= self.target.len();
        let mixed_rows = if self.plan.is_inverse { self.plan.mixed_rows() } else { 0 };
        let mixed = mixed_rows.saturating_sub(row).div_ceil(step).min(R);
        for at in (0..width).step_by(V::WIDTH) {
            let elem = row * self.plan.lanes + lane + at;
            // SAFETY: as promised by the caller; the last of the rows ends last.
            unsafe {
                let mut rows = [V::zero(); R];
                for index in 0..R {
                    rows[index] = V::load(from.add(index * stride + at));
                }
                butterflies(&mut rows);
                for index in 0..mixed {
                    // They wait in the strip for the rest.
                    rows[index].scale(scale).store(from.add(index * stride + at));
                }
                for index in mixed..R {
                    rows[index] = rows[index].scale(scale).flip((signs[index] >> at) as u32);
                }
                if is_whole {
                    let start = self.target.as_mut_ptr().add(elem * C::BYTES);
                    for index in mixed..R {
                        let start = start.add(index * step * self.plan.lanes * C::BYTES);
                        fetch(start.wrapping_add(self.plan.lanes * C::BYTES));
                        C::store(rows[index], start);
                    }
                } else {
                    for index in 0..R {
                        self.write(elem + index * step * self.plan.lanes, rows[index]);
                    }
                }
            }
        }
    }

    /// Writes the elements from `elem` on, those behind the end excepted.
    ///
    /// # Safety
    /// The processor has the vectors.
    #[inline(always)]
    pub(super) unsafe fn write(&mut self, elem: usize, values: V) {
        let start = elem * C::BYTES;
        let is_whole = start + V::WIDTH * C::BYTES <= self.target.len();
        let mut block = [0; VECTOR_BYTES_MAX];
        // SAFETY: the elements are in `target`, or in `block`.
        unsafe {
            let to = if is_whole { self.target.as_mut_ptr().add(start) } else { block.as_mut_ptr() };
            C::store(values, to);
        }
        if !is_whole {
            write_edge(self.target, start, &block);
        }
    }
}

/// The elements of `source` from `elem` on; zeros behind the end.
///
/// # Safety
/// The processor has the vectors.
#[inline(always)]
pub(super) unsafe fn read<C: Cell, V: Vector>(source: &[u8], elem: usize) -> V {
    let start = elem * C::BYTES;
    let mut block = [0; VECTOR_BYTES_MAX];
    // SAFETY: the elements are in `source`, or in `block`.
    unsafe {
        let from = if start + V::WIDTH * C::BYTES <= source.len() {
            source.as_ptr().add(start)
        } else {
            read_edge(source, start, &mut block);
            block.as_ptr()
        };
        C::load(from)
    }
}

/// Fills `block` with the bytes of `source` from `start` on, and leaves it as it is behind the end. A function of its own, as
/// is [`write_edge`]: within each of the rows that the compiler unrolls it would be half of what is compiled, and it runs at the end only.
#[inline(never)]
fn read_edge(source: &[u8], start: usize, block: &mut [u8; VECTOR_BYTES_MAX]) {
    let rest = source.get(start..).unwrap_or_default();
    let bytes = rest.len().min(block.len());
    block[..bytes].copy_from_slice(&rest[..bytes]);
}

/// Writes what of `block` is not behind the end of `target`, from `start` on.
#[inline(never)]
fn write_edge(target: &mut [u8], start: usize, block: &[u8; VECTOR_BYTES_MAX]) {
    let rest = target.get_mut(start..).unwrap_or_default();
    rest.copy_from_slice(&block[..rest.len()]);
}

/// Asks for the cache line at `at`, which may be beyond the end. Rows lie pages apart, where no processor looks ahead by
/// itself. On a busy machine 25 MB took 10 to 13 ms with it, 11 to 20 without. Stores past the caches took a fifth less time
/// than stores into them, but what was rotated is sent next, or read by the optimizer.
#[inline(always)]
fn fetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which may name any address.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T0};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Butterflies among `R` rows of a strip that are `stride` floats apart.
///
/// # Safety
/// `width` floats of each of the rows are valid, and the processor has the vectors.
#[inline(always)]
unsafe fn between<const R: usize, V: Vector>(first: *mut f32, stride: usize, width: usize) {
    for at in (0..width).step_by(V::WIDTH) {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut rows = [V::zero(); R];
            for index in 0..R {
                rows[index] = V::load(first.add(index * stride + at));
            }
            butterflies(&mut rows);
            for index in 0..R {
                rows[index].store(first.add(index * stride + at));
            }
        }
    }
}

/// # Safety
/// The processor has the vectors.
#[inline(always)]
unsafe fn butterflies<const R: usize, V: Vector>(rows: &mut [V; R]) {
    let mut half = 1;
    while half < R {
        for low in 0..R {
            if low & half == 0 {
                let (a, b) = (rows[low], rows[low + half]);
                // SAFETY: as promised by the caller.
                unsafe { (rows[low], rows[low + half]) = (a.add(b), a.subtract(b)) };
            }
        }
        half *= 2;
    }
}

/// Rows of memory for a group of `a * b` near rows: one is left out after each `a` of them, and the whole is odd, or rows
/// that meet in a butterfly would share few sets of the first-level cache.
const fn group_rows(a: usize, b: usize) -> usize {
    ((a + 1) * b) | 1
}

/// Columns of a strip: four cache lines of each row, and a strip of 4096 rows is a megabyte. No more than a word of signs.
const STRIP_LANES: usize = 64;
/// How many rows before they are read their cache lines are asked for: 8 KB of a strip, a sixth of the first-level cache.
const AHEAD_ROWS: usize = 32;
/// Of the widest vector.
const VECTOR_BYTES_MAX: usize = 64;
