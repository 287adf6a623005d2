//! Vectors of float32 on the processors that there are, and how elements of a tensor become them and go back.
//!
//! Every implementation rounds alike: to the nearest, ties to even.

use crate::kernels::half::{bf16_bits, f16_from, f16_to};

/// A vector of float32.
pub(super) trait Vector: Copy {
    /// Floats in it.
    const WIDTH: usize;
    /// Rows of them that butterflies can have in registers at a time: 8 or 16.
    const ROWS: usize;
    /// Zeros.
    ///
    /// # Safety
    /// The processor has these vectors; so for every method.
    unsafe fn zero() -> Self;
    /// Reads `WIDTH` float32.
    ///
    /// # Safety
    /// They are valid for reading, at any alignment; so for every method that has an address.
    unsafe fn load(at: *const f32) -> Self;
    /// Writes `WIDTH` float32.
    unsafe fn store(self, at: *mut f32);
    /// Reads `WIDTH` float16.
    unsafe fn load_f16(at: *const u16) -> Self;
    /// Rounds and writes `WIDTH` float16.
    unsafe fn store_f16(self, at: *mut u16);
    /// Reads `WIDTH` bfloat16.
    unsafe fn load_bf16(at: *const u16) -> Self;
    /// Rounds and writes `WIDTH` bfloat16.
    unsafe fn store_bf16(self, at: *mut u16);
    /// Sum.
    unsafe fn add(self, other: Self) -> Self;
    /// Difference.
    unsafe fn subtract(self, other: Self) -> Self;
    /// Each times `factor`.
    unsafe fn scale(self, factor: f32) -> Self;
    /// Minus each whose bit is set, the lowest bit for the first.
    unsafe fn flip(self, bits: u32) -> Self;
}

/// Elements of one dtype.
pub(super) trait Cell {
    /// Bytes of one.
    const BYTES: usize;
    /// Reads a vector of them.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(at: *const u8) -> V;
    /// Writes a vector of them.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn store<V: Vector>(vector: V, at: *mut u8);
}

/// float32.
pub(super) struct Single;
/// float16.
pub(super) struct Half;
/// bfloat16.
pub(super) struct Brain;

macro_rules! cell {
    ($name:ty, $bytes:literal, $load:ident, $store:ident) => {
        impl Cell for $name {
            const BYTES: usize = $bytes;

            #[inline(always)]
            unsafe fn load<V: Vector>(at: *const u8) -> V {
                // SAFETY: as promised by the caller.
                unsafe { V::$load(at.cast()) }
            }

            #[inline(always)]
            unsafe fn store<V: Vector>(vector: V, at: *mut u8) {
                // SAFETY: as promised by the caller.
                unsafe { vector.$store(at.cast()) }
            }
        }
    };
}

cell!(Single, 4, load, store);
cell!(Half, 2, load_f16, store_f16);
cell!(Brain, 2, load_bf16, store_bf16);

/// What every processor has, in loops of four that become SSE2 or NEON.
#[derive(Clone, Copy)]
pub(super) struct Four([f32; 4]);

// SAFETY of all: as promised by the caller of each method, the elements are valid.
impl Vector for Four {
    const WIDTH: usize = 4;
    const ROWS: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        Self([0.0; 4])
    }

    #[inline(always)]
    unsafe fn load(at: *const f32) -> Self {
        // SAFETY: see the implementation.
        Self(unsafe { at.cast::<[f32; 4]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, at: *mut f32) {
        // SAFETY: see the implementation.
        unsafe { at.cast::<[f32; 4]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn load_f16(at: *const u16) -> Self {
        // SAFETY: see the implementation.
        Self(f16_from(unsafe { at.cast::<[u16; 4]>().read_unaligned() }))
    }

    #[inline(always)]
    unsafe fn store_f16(self, at: *mut u16) {
        // SAFETY: see the implementation.
        unsafe { at.cast::<[u16; 4]>().write_unaligned(f16_to(self.0)) }
    }

    #[inline(always)]
    unsafe fn load_bf16(at: *const u16) -> Self {
        // SAFETY: see the implementation.
        let halves = unsafe { at.cast::<[u16; 4]>().read_unaligned() };
        Self(halves.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }

    #[inline(always)]
    unsafe fn store_bf16(self, at: *mut u16) {
        // SAFETY: see the implementation.
        unsafe { at.cast::<[u16; 4]>().write_unaligned(self.0.map(bf16_bits)) }
    }

    #[inline(always)]
    unsafe fn add(self, Self(b): Self) -> Self {
        let Self(a) = self;
        Self([a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]])
    }

    #[inline(always)]
    unsafe fn subtract(self, Self(b): Self) -> Self {
        let Self(a) = self;
        Self([a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]])
    }

    #[inline(always)]
    unsafe fn scale(self, factor: f32) -> Self {
        Self(self.0.map(|value| value * factor))
    }

    #[inline(always)]
    unsafe fn flip(self, bits: u32) -> Self {
        let Self(a) = self;
        let minus = |lane: u32, value: f32| f32::from_bits(value.to_bits() ^ (bits >> lane << 31));
        Self([minus(0, a[0]), minus(1, a[1]), minus(2, a[2]), minus(3, a[3])])
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use super::Vector;
    use std::arch::x86_64::*;

    /// AVX2 and F16C.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Eight(__m256);

    // SAFETY of all: as promised by the caller of each method, the processor has AVX2 and F16C and the elements are valid.
    #[allow(clippy::undocumented_unsafe_blocks)]
    impl Vector for Eight {
        const WIDTH: usize = 8;
        const ROWS: usize = 8;

        #[inline(always)]
        unsafe fn zero() -> Self {
            Self(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            Self(unsafe { _mm256_loadu_ps(at) })
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            unsafe { _mm256_storeu_ps(at, self.0) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const u16) -> Self {
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) })
        }

        #[inline(always)]
        unsafe fn store_f16(self, at: *mut u16) {
            unsafe { _mm_storeu_si128(at.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(at: *const u16) -> Self {
            unsafe {
                let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves)))
            }
        }

        #[inline(always)]
        unsafe fn store_bf16(self, at: *mut u16) {
            unsafe {
                let bits = _mm256_castps_si256(self.0);
                let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
                let rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
                let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
                let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(self.0, self.0));
                let halves = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan));
                // Packing works in each half of the register; the order is put right behind it.
                let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(halves, halves));
                _mm_storeu_si128(at.cast(), _mm256_castsi256_si128(packed));
            }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Self(unsafe { _mm256_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn subtract(self, other: Self) -> Self {
            Self(unsafe { _mm256_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn scale(self, factor: f32) -> Self {
            Self(unsafe { _mm256_mul_ps(self.0, _mm256_set1_ps(factor)) })
        }

        #[inline(always)]
        unsafe fn flip(self, bits: u32) -> Self {
            unsafe {
                let places = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
                let moved = _mm256_castsi256_ps(_mm256_sllv_epi32(_mm256_set1_epi32(bits as i32), places));
                Self(_mm256_xor_ps(self.0, _mm256_and_ps(moved, _mm256_set1_ps(-0.0))))
            }
        }
    }

    /// AVX-512.
    #[cfg(has_avx512)]
    #[derive(Clone, Copy)]
    pub(in super::super) struct Sixteen(__m512);

    // SAFETY of all: as promised by the caller of each method, the processor has AVX-512 and the elements are valid.
    #[cfg(has_avx512)]
    // Older compilers do not see it.
    #[allow(clippy::undocumented_unsafe_blocks, clippy::incompatible_msrv)]
    impl Vector for Sixteen {
        const WIDTH: usize = 16;
        const ROWS: usize = 16;

        #[inline(always)]
        unsafe fn zero() -> Self {
            Self(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        unsafe fn load(at: *const f32) -> Self {
            Self(unsafe { _mm512_loadu_ps(at) })
        }

        #[inline(always)]
        unsafe fn store(self, at: *mut f32) {
            unsafe { _mm512_storeu_ps(at, self.0) }
        }

        #[inline(always)]
        unsafe fn load_f16(at: *const u16) -> Self {
            Self(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) })
        }

        #[inline(always)]
        unsafe fn store_f16(self, at: *mut u16) {
            unsafe { _mm256_storeu_si256(at.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }

        #[inline(always)]
        unsafe fn load_bf16(at: *const u16) -> Self {
            unsafe {
                let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves)))
            }
        }

        #[inline(always)]
        unsafe fn store_bf16(self, at: *mut u16) {
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
                let rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
                let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(self.0, self.0);
                let chosen = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x40_0000));
                let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(chosen));
                _mm256_storeu_si256(at.cast(), halves);
            }
        }

        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            Self(unsafe { _mm512_add_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn subtract(self, other: Self) -> Self {
            Self(unsafe { _mm512_sub_ps(self.0, other.0) })
        }

        #[inline(always)]
        unsafe fn scale(self, factor: f32) -> Self {
            Self(unsafe { _mm512_mul_ps(self.0, _mm512_set1_ps(factor)) })
        }

        #[inline(always)]
        unsafe fn flip(self, bits: u32) -> Self {
            unsafe {
                let (values, minus) = (_mm512_castps_si512(self.0), _mm512_set1_epi32(i32::MIN));
                Self(_mm512_castsi512_ps(_mm512_mask_xor_epi32(values, bits as u16, values, minus)))
            }
        }
    }
}
