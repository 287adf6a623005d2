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

/// An element that a mean divides and a scaled sum multiplies in its own precision.
pub(super) trait Scalable: Element {
    /// Divided, not multiplied by a reciprocal, so that a mean of equal values is that value; integers truncate towards zero.
    fn divided(self, count: u16) -> Self;
    /// Integers times a whole factor wrap.
    fn scaled(self, factor: f64) -> Self;
}

/// An element with bits.
pub(super) trait Bits: Element {
    /// Bitwise and.
    fn and(self, other: Self) -> Self;
    /// Bitwise or.
    fn or(self, other: Self) -> Self;
    /// Bitwise exclusive or.
    fn xor(self, other: Self) -> Self;
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

        impl Scalable for $type {
            #[inline(always)]
            fn divided(self, count: u16) -> Self {
                self / <$type>::from(count)
            }

            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                self * factor as $type
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
        }

        impl Scalable for $type {
            /// Through `i128`, which holds every integer dtype and every count: a mean happens once for each element.
            #[inline(always)]
            fn divided(self, count: u16) -> Self {
                Self::try_from(i128::from(self) / i128::from(count.max(1))).unwrap_or(self)
            }

            #[inline(always)]
            fn scaled(self, factor: f64) -> Self {
                self.wrapping_mul(factor as i64 as $type)
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
