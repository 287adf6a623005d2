//! One element of a tensor as little-endian bytes, and the loop over them.

/// A number that can be read from and written to unaligned little-endian bytes.
pub(super) trait Element: Copy {
    /// Bytes of one element.
    const BYTES: usize;
    /// Reads the first element of `bytes`.
    fn read(bytes: &[u8]) -> Self;
    /// Writes the first element of `bytes`.
    fn write(self, bytes: &mut [u8]);
    /// Sum; integers wrap.
    fn add(self, other: Self) -> Self;
    /// Product; integers wrap.
    fn multiply(self, other: Self) -> Self;
    /// The lesser; NaN if either is.
    fn least(self, other: Self) -> Self;
    /// The larger; NaN if either is.
    fn largest(self, other: Self) -> Self;
}

/// An element with bits.
pub(super) trait Bits: Element {
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Bitwise exclusive or.
    fn xor(self, other: Self) -> Self;
    /// A whole number, wrapped around.
    fn wrapped(whole: i64) -> Self;
}

/// `accumulator[i] = combine(accumulator[i], source[i])`.
#[inline(always)]
pub(super) fn fold<T: Element>(accumulator: &mut [u8], source: &[u8], combine: impl Fn(T, T) -> T) {
    for (a, s) in accumulator.chunks_exact_mut(T::BYTES).zip(source.chunks_exact(T::BYTES)) {
        combine(T::read(a), T::read(s)).write(a);
    }
}

/// `values[i] = change(values[i])`.
#[inline(always)]
pub(super) fn map<T: Element>(values: &mut [u8], change: impl Fn(T) -> T) {
    for value in values.chunks_exact_mut(T::BYTES) {
        change(T::read(value)).write(value);
    }
}

macro_rules! bytes_of {
    ($type:ty) => {
        const BYTES: usize = size_of::<$type>();

        #[inline(always)]
        fn read(bytes: &[u8]) -> Self {
            let mut raw = [0; size_of::<$type>()];
            raw.copy_from_slice(&bytes[..size_of::<$type>()]);
            <$type>::from_le_bytes(raw)
        }

        #[inline(always)]
        fn write(self, bytes: &mut [u8]) {
            bytes[..size_of::<$type>()].copy_from_slice(&self.to_le_bytes());
        }
    };
}

macro_rules! float {
    ($type:ty) => {
        impl Element for $type {
            bytes_of!($type);

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                if self < other || self.is_nan() {
                    self
                } else {
                    other
                }
            }

            #[inline(always)]
            fn largest(self, other: Self) -> Self {
                if self > other || self.is_nan() {
                    self
                } else {
                    other
                }
            }
        }
    };
}

macro_rules! integer {
    ($type:ty) => {
        impl Element for $type {
            bytes_of!($type);

            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn multiply(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn least(self, other: Self) -> Self {
                self.min(other)
            }

            #[inline(always)]
            fn largest(self, other: Self) -> Self {
                self.max(other)
            }
        }

        impl Bits for $type {
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }

            #[inline(always)]
            fn wrapped(whole: i64) -> Self {
                whole as $type
            }
        }
    };
}

float!(f32);
float!(f64);
integer!(u8);
integer!(i8);
integer!(i16);
integer!(i32);
integer!(i64);
integer!(u16);
integer!(u32);
integer!(u64);
