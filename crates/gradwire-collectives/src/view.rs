//! Memory of the caller's tensor. All unsafe access to it is in this file.

use std::ops::Range;

/// A flat piece of memory that the caller lends for the duration of one collective; contiguous, but for a part of a call
/// ([`crate::GroupEvent::Divided`]) that has the same columns of each row. Those are counted as if they lay behind each other.
///
/// The memory must stay valid, and must not be read or written by anybody else, until the collective's
/// [`crate::GroupEvent::Done`] has been polled. The engine ties it to the handle that keeps the tensor alive.
#[derive(Clone, Copy, Debug)]
pub struct View {
    pointer: *mut u8,
    bytes: usize,
    /// `None`: it is contiguous.
    rows: Option<Rows>,
}

/// Where the bytes of a view lie that has columns of rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rows {
    /// Bytes of each row that are in the view, at least one.
    bytes: usize,
    /// From the start of one to that of the next.
    pitch: usize,
}

impl Rows {
    /// How far behind the first byte of the view its byte `at` lies.
    const fn place_of(self, at: usize) -> usize {
        at / self.bytes * self.pitch + at % self.bytes
    }
}

// SAFETY: a view is an address and a length; `View::new` obliges the caller to exclusive, thread-independent
// access for as long as any method is used.
unsafe impl Send for View {}

impl View {
    /// No memory.
    pub const EMPTY: Self = Self::contiguous(std::ptr::NonNull::dangling().as_ptr(), 0);

    const fn contiguous(pointer: *mut u8, bytes: usize) -> Self {
        Self { pointer, bytes, rows: None }
    }

    /// A view of `bytes` bytes at `pointer`.
    ///
    /// # Safety
    /// `pointer` is valid for reads and writes of `bytes` bytes, and nobody else touches them, until the
    /// collective that the view is given to is done.
    #[must_use]
    pub const unsafe fn new(pointer: *mut u8, bytes: usize) -> Self {
        Self::contiguous(pointer, bytes)
    }

    /// Length in bytes, of what belongs to it alone.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.bytes
    }

    /// Whether it is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes, to read.
    ///
    /// # Panics
    /// When it is not contiguous, which no view of a caller is; then see [`View::get`].
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        assert!(self.rows.is_none(), "a slice of columns");
        // SAFETY: `View::new` promises validity and exclusive use.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// The bytes, to write.
    ///
    /// # Panics
    /// As [`View::as_slice`].
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        assert!(self.rows.is_none(), "a slice of columns");
        // SAFETY: `View::new` promises validity and exclusive use.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }

    /// The part `range` of it, which lies in one row: contiguous.
    ///
    /// # Panics
    /// When `range` is not inside: the caller has checked sizes at submission.
    pub(crate) fn part(&self, range: &Range<usize>) -> Self {
        assert!(self.has(range), "{range:?} of {} bytes{}", self.bytes, self.in_rows());
        Self::contiguous(self.pointer.wrapping_add(self.place_of(range.start)), range.len())
    }

    /// The bytes `range`, to read; `None` where they are not inside, or not in one row.
    pub(crate) fn get(&self, range: &Range<usize>) -> Option<&[u8]> {
        let start = self.has(range).then(|| self.place_of(range.start))?;
        // SAFETY: `View::new` promises validity and exclusive use of what is in it, and that is.
        Some(unsafe { std::slice::from_raw_parts(self.pointer.wrapping_add(start), range.len()) })
    }

    /// Whether `range` is inside, and in one row.
    fn has(&self, range: &Range<usize>) -> bool {
        let is_inside = range.start <= range.end && range.end <= self.bytes;
        is_inside && self.rows.is_none_or(|rows| range.start % rows.bytes + range.len() <= rows.bytes)
    }

    /// How far behind its first byte its byte `at` lies.
    fn place_of(&self, at: usize) -> usize {
        self.rows.map_or(at, |rows| rows.place_of(at))
    }

    fn in_rows(&self) -> String {
        self.rows.map_or_else(String::new, |rows| format!(" in rows of {}", rows.bytes))
    }

    /// Of each of its rows of `row` bytes the bytes `columns`. Nothing between them is touched through it, so that others may.
    ///
    /// # Panics
    /// When it is not made of such rows.
    pub(crate) fn columns(&self, row: usize, columns: &Range<usize>) -> Self {
        let fits = self.rows.is_none() && row > 0 && self.bytes % row == 0;
        assert!(
            fits && columns.start < columns.end && columns.end <= row,
            "{columns:?} of rows of {row} bytes"
        );
        let rows = Rows { bytes: columns.len(), pitch: row };
        let pointer = self.pointer.wrapping_add(columns.start);
        Self { pointer, bytes: self.bytes / row * rows.bytes, rows: Some(rows) }
    }

    /// Its contiguous pieces, in order.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let piece = self.rows.map_or(self.bytes, |rows| rows.bytes).max(1);
        (0..self.bytes).step_by(piece).filter_map(move |start| self.get(&(start..start + piece)))
    }

    /// Asks the processor for what of `range` is in the view, which will be used soon, and does not wait for it.
    pub(crate) fn fetch(&self, range: Range<usize>) {
        let length = range.end.min(self.bytes).saturating_sub(range.start);
        let start = self.pointer.wrapping_add(if length > 0 { self.place_of(range.start) } else { 0 });
        for at in (0..length).step_by(LINE_BYTES) {
            fetch_line(start.wrapping_add(at));
        }
    }

    /// Whether both are the same memory.
    pub(crate) fn is(&self, other: &Self) -> bool {
        self.pointer == other.pointer && self.bytes == other.bytes && self.rows == other.rows
    }

    /// Whether they share at least one byte. Of columns what lies between them counts: whose call is divided has been asked before.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (a, b) = (self.pointer as usize, other.pointer as usize);
        !self.is_empty() && !other.is_empty() && a < b + other.span() && b < a + self.span()
    }

    /// Bytes from its first to its last, of one that is not empty.
    fn span(&self) -> usize {
        self.place_of(self.bytes - 1) + 1
    }

    /// Copies `source`, which has the same length and may be the same memory: then nothing happens.
    ///
    /// # Panics
    /// When lengths differ: the caller has checked sizes at submission.
    pub(crate) fn copy_from(&mut self, source: &Self) {
        assert_eq!(self.bytes, source.bytes, "copy between views of different sizes");
        assert!(self.rows.is_none() && source.rows.is_none(), "a copy of columns");
        if !self.is(source) {
            // SAFETY: `View::new` promises validity of both; `copy` allows them to overlap, and no reference to
            // either exists here.
            unsafe { std::ptr::copy(source.pointer, self.pointer, self.bytes) };
        }
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

/// Brings a cache line near the processor, into the second level: of what is fetched ahead, the first one holds too little.
#[inline]
fn fetch_line(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads nothing and changes nothing, whatever the address; every x86-64 has it.
    unsafe {
        use std::arch::x86_64::{_mm_prefetch, _MM_HINT_T1};
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
    // Miri has no assembly.
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a hint that reads nothing and changes nothing, whatever the address.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri)))))]
    let _ = at;
}

/// Memory of the group itself, for collectives that it calls on its own. Only views of it are ever used.
#[derive(Debug)]
pub(crate) struct OwnMemory(*mut [u8]);

// SAFETY: as for `View`; the allocation belongs to this value alone.
unsafe impl Send for OwnMemory {}

impl OwnMemory {
    /// `bytes` bytes of zero.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        Self(Box::into_raw(vec![0; bytes].into_boxed_slice()))
    }

    /// A view of all of it, good as long as `self` lives. Whoever takes it keeps to [`View::new`]: no other view is
    /// used while a collective has one.
    pub(crate) fn view(&self) -> View {
        View::contiguous(self.0.cast(), self.0.len())
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` and given back nowhere else.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

/// Memory of the group's own that views can lend: what is sent in place of a tensor.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    lines: Vec<Line>,
}

/// A cache line: vectors of the widest kind then never straddle two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line([u8; 64]);

impl Buffer {
    /// A view of its first `bytes` bytes, which are whatever they were.
    ///
    /// # Safety
    /// The buffer is neither dropped nor lent again while any copy of the view is used.
    pub(crate) unsafe fn lend(&mut self, bytes: usize) -> View {
        self.lines.resize(bytes.div_ceil(size_of::<Line>()), Line([0; 64]));
        View::contiguous(self.lines.as_mut_ptr().cast(), bytes)
    }

    /// Bytes that it has memory for.
    pub(crate) fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_lends_as_much_as_is_asked_for_at_a_cache_line() {
        let mut buffer = Buffer::default();
        for bytes in [1, 64, 1_000, 3] {
            // SAFETY: each view is used before the next one is lent.
            let mut view = unsafe { buffer.lend(bytes) };
            view.as_mut_slice().fill(7);
            assert!(view.len() == bytes && view.pointer as usize % 64 == 0);
        }
    }

    #[test]
    fn what_is_fetched_may_lie_behind_the_end() {
        let mut memory = vec![0_u8; 100];
        // SAFETY: `memory` outlives the view.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        for range in [0..100, 64..usize::MAX, 100..200, 500..600] {
            view.fetch(range);
        }
        View::EMPTY.fetch(0..64);
    }

    #[test]
    fn columns_are_counted_as_if_they_lay_behind_each_other() {
        let mut memory: Vec<u8> = (0..30).collect();
        // SAFETY: `memory` outlives every view of it here.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        let columns = view.columns(10, &(2..6));
        assert_eq!(columns.len(), 12);
        assert_eq!(columns.pieces().collect::<Vec<_>>(), [[2, 3, 4, 5], [12, 13, 14, 15], [22, 23, 24, 25]]);
        assert_eq!(columns.get(&(5..8)), Some(&[13, 14, 15][..]));
        assert_eq!(
            [columns.get(&(3..5)), columns.get(&(8..13))],
            [None; 2],
            "of two rows, and beyond the end"
        );
        assert_eq!(columns.get(&(12..12)), Some(&[][..]));
        columns.part(&(4..8)).as_mut_slice().fill(0);
        assert_eq!(view.as_slice()[10..18], [10, 11, 0, 0, 0, 0, 16, 17]);
        for range in [0..12, 5..usize::MAX, 12..20] {
            columns.fetch(range);
        }
        assert!(view.part(&(25..26)).overlaps(&columns) && !view.part(&(26..30)).overlaps(&columns));
        assert!(columns.is(&view.columns(10, &(2..6))) && !columns.is(&view.part(&(2..14))));
    }

    #[test]
    #[should_panic(expected = "a slice of columns")]
    fn columns_are_no_slice() {
        let mut memory = vec![0_u8; 30];
        // SAFETY: `memory` outlives the view.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        _ = view.columns(10, &(2..6)).as_slice();
    }

    #[test]
    fn parts_know_whether_they_share_memory() {
        let mut memory = vec![0_u8; 10];
        // SAFETY: `memory` outlives every view of it here.
        let view = unsafe { View::new(memory.as_mut_ptr(), memory.len()) };
        let (front, back) = (view.part(&(0..5)), view.part(&(5..10)));
        assert!(!front.overlaps(&back) && view.overlaps(&front) && front.is(&view.part(&(0..5))));
        assert!(!view.part(&(3..3)).overlaps(&view));
        assert!(!View::EMPTY.overlaps(&view));
    }
}
