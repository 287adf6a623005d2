//! Tensors of the simulated ranks, with guard bytes on both sides. All unsafe code of this crate is here.

use gradwire_collectives::View;

/// Memory that is lent to a group. It stays at its place until it is dropped, after the run.
#[derive(Debug)]
pub struct Tensor {
    words: *mut [u64],
    bytes: usize,
}

impl Tensor {
    /// `bytes` bytes filled with `fill`, aligned to 8, between two guards.
    #[must_use]
    pub fn new(bytes: usize, fill: u8) -> Self {
        let words = vec![u64::from_ne_bytes([GUARD; 8]); bytes.div_ceil(8) + 2 * GUARD_BYTES / 8];
        let mut tensor = Self { words: Box::into_raw(words.into_boxed_slice()), bytes };
        tensor.fill(fill);
        tensor
    }

    /// A tensor that holds `content`.
    #[must_use]
    pub fn from_bytes(content: &[u8]) -> Self {
        let mut tensor = Self::new(content.len(), 0);
        tensor.as_mut_slice().copy_from_slice(content);
        tensor
    }

    /// Lends the memory.
    #[must_use]
    pub fn view(&self) -> View {
        if self.bytes == 0 {
            return View::EMPTY;
        }
        // SAFETY: the allocation lives as long as `self`, which the world keeps until the group is dropped;
        // between submission and `Done` the world touches it through no other way.
        unsafe { View::new(self.start(), self.bytes) }
    }

    /// Lends the first `bytes` bytes. Several groups of one thread may have them at once where nobody looks at what they
    /// hold: each touches them only while it is called.
    #[must_use]
    pub fn view_of(&self, bytes: usize) -> View {
        assert!(bytes <= self.bytes, "{bytes} of {} bytes", self.bytes);
        if bytes == 0 {
            return View::EMPTY;
        }
        // SAFETY: as in `view`; groups that share it are called one after the other, so no two references exist at once.
        unsafe { View::new(self.start(), bytes) }
    }

    /// Where `pointer` lies in this tensor, in bytes; `None` when it lies elsewhere.
    #[must_use]
    pub fn offset_of(&self, pointer: *const u8) -> Option<u64> {
        let offset = (pointer as usize).wrapping_sub(self.start() as usize);
        (offset < self.bytes).then_some(offset as u64)
    }

    /// The content. Only before submission and after `Done`.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: valid for `bytes` bytes while `self` lives; the group gave the memory back.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }

    /// The content, to write. Only before submission and after `Done`.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    /// Overwrites everything: whoever still reads this memory will be noticed.
    pub fn fill(&mut self, byte: u8) {
        self.as_mut_slice().fill(byte);
    }

    /// Whether nobody wrote outside the tensor.
    #[must_use]
    pub fn guards_are_intact(&self) -> bool {
        // SAFETY: the whole allocation is initialised and lives as long as `self`.
        let all = unsafe { std::slice::from_raw_parts(self.words.cast::<u8>(), self.allocated_bytes()) };
        let (before, rest) = all.split_at(GUARD_BYTES);
        before.iter().chain(&rest[self.bytes..]).all(|byte| *byte == GUARD)
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: the allocation begins with GUARD_BYTES guard bytes.
        unsafe { self.words.cast::<u8>().add(GUARD_BYTES) }
    }

    const fn allocated_bytes(&self) -> usize {
        self.words.len() * 8
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        // SAFETY: `words` came from `Box::into_raw` in `new` and is freed once.
        drop(unsafe { Box::from_raw(self.words) });
    }
}

/// One cache line on each side finds writes that run over by an element or by a vector register.
const GUARD_BYTES: usize = 64;
const GUARD: u8 = 0xA5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_outside_the_tensor_is_noticed() {
        let tensor = Tensor::new(100, 1);
        assert!(tensor.guards_are_intact());
        // SAFETY: one byte past the tensor, inside the allocation's guard.
        unsafe { *tensor.start().add(100) = 1 };
        assert!(!tensor.guards_are_intact());
    }

    #[test]
    fn a_pointer_is_located_only_inside_the_tensor() {
        let tensor = Tensor::from_bytes(&[7; 10]);
        assert_eq!(tensor.as_slice(), [7; 10]);
        assert_eq!(tensor.offset_of(tensor.view().as_slice()[3..].as_ptr()), Some(3));
        assert_eq!(tensor.offset_of([0u8; 4].as_ptr()), None);
    }
}
