//! Element types and reductions, with the codes that travel in descriptors.

/// Element type of a tensor. The discriminants travel on the wire and are part of the Python ABI.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Dtype {
    /// Uninterpreted bytes: copies only.
    Bytes = 0,
    /// IEEE single.
    F32 = 1,
    /// IEEE double.
    F64 = 2,
    /// IEEE half; reduced in float32.
    F16 = 3,
    /// bfloat16; reduced in float32.
    Bf16 = 4,
    /// Unsigned 8 bit.
    U8 = 5,
    /// Signed 8 bit.
    I8 = 6,
    /// Signed 16 bit.
    I16 = 7,
    /// Signed 32 bit.
    I32 = 8,
    /// Signed 64 bit.
    I64 = 9,
    /// Boolean, one byte 0 or 1: reduced with min, max, and, or; a sum is a logical or.
    Bool = 10,
    /// Unsigned 16 bit.
    U16 = 11,
    /// Unsigned 32 bit.
    U32 = 12,
    /// Unsigned 64 bit.
    U64 = 13,
}

impl Dtype {
    /// Every dtype, at the place of its code.
    pub const ALL: [Self; 14] = [
        Self::Bytes,
        Self::F32,
        Self::F64,
        Self::F16,
        Self::Bf16,
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::Bool,
        Self::U16,
        Self::U32,
        Self::U64,
    ];

    /// Its name in Python.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bytes => "bytes",
            Self::F32 => "float32",
            Self::F64 => "float64",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::U8 => "uint8",
            Self::I8 => "int8",
            Self::I16 => "int16",
            Self::I32 => "int32",
            Self::I64 => "int64",
            Self::Bool => "bool",
            Self::U16 => "uint16",
            Self::U32 => "uint32",
            Self::U64 => "uint64",
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes | Self::U8 | Self::I8 | Self::Bool => 1,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F64 | Self::I64 | Self::U64 => 8,
        }
    }

    /// The dtype with this code.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }

    /// Whether elements are floating-point numbers.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F64 | Self::F16 | Self::Bf16)
    }

    /// Whether elements are summed in float32, because their own type has too few bits.
    #[must_use]
    pub const fn is_half(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16)
    }

    /// Whether `reduce` is defined for this dtype. Bytes are only copied; floats have no bits; a mean of
    /// booleans has no meaning that everybody shares, nor has a sum of integers times a fraction. What a mean of integers of 8 or 16 bits
    /// divides is a sum that often does not fit, already of two ranks.
    #[must_use]
    pub fn supports(self, reduce: ReduceOp) -> bool {
        match self {
            Self::Bytes => false,
            Self::Bool => !matches!(reduce, ReduceOp::Avg | ReduceOp::PremulSum(_)),
            _ => match reduce {
                ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => !self.is_float(),
                ReduceOp::PremulSum(factor) => self.is_float() || is_whole(factor),
                ReduceOp::Avg => self.is_float() || self.bytes() >= 4,
                _ => true,
            },
        }
    }
}

/// Whether integers can be multiplied by `factor`: a whole number that float64 holds exactly.
fn is_whole(factor: f64) -> bool {
    factor.fract().abs() <= 0.0 && factor.abs() <= WHOLE_MAX
}

/// 2^53.
const WHOLE_MAX: f64 = 9_007_199_254_740_992.0;

/// How elements of several ranks become one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ReduceOp {
    /// Sum. Integers wrap around.
    Sum,
    /// Sum divided by the number of ranks that contributed to the element; integers truncate towards zero. The sum of integers wraps
    /// around before it is divided, so only those of 32 and 64 bits have means, which are wrong where their sum does not fit.
    Avg,
    /// Product.
    Product,
    /// Least; NaN if any is NaN.
    Min,
    /// Largest; NaN if any is NaN.
    Max,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Sum of each value times this factor, the same on every rank. The sum is scaled once; integers take whole factors
    /// and wrap around.
    PremulSum(f64),
}

impl ReduceOp {
    /// Names in the order of the codes.
    pub const NAMES: [&'static str; 9] =
        ["sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"];

    /// The code in descriptors.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Sum => 0,
            Self::Avg => 1,
            Self::Product => 2,
            Self::Min => 3,
            Self::Max => 4,
            Self::BitAnd => 5,
            Self::BitOr => 6,
            Self::BitXor => 7,
            Self::PremulSum(_) => 8,
        }
    }

    /// The reduction with this code. The factor of a scaled sum is among the settings of the call, which do not travel where it is 1 and
    /// nothing may be lost: it is 1 here.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::Sum,
            1 => Self::Avg,
            2 => Self::Product,
            3 => Self::Min,
            4 => Self::Max,
            5 => Self::BitAnd,
            6 => Self::BitOr,
            7 => Self::BitXor,
            8 => Self::PremulSum(1.0),
            _ => return None,
        })
    }

    /// Whether contributions are added, so that a missing one can be made up for by the number of those that came.
    #[must_use]
    pub const fn is_additive(self) -> bool {
        matches!(self, Self::Sum | Self::Avg | Self::PremulSum(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_name_their_dtype_and_reduction() {
        for (code, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(dtype as usize, code);
            assert_eq!(Dtype::from_code(code as u8), Some(dtype));
        }
        assert_eq!(Dtype::from_code(14), None);
        for code in 0..9 {
            assert_eq!(ReduceOp::from_code(code).map(ReduceOp::code), Some(code));
        }
        assert_eq!(ReduceOp::from_code(8), Some(ReduceOp::PremulSum(1.0)));
        assert_eq!(ReduceOp::from_code(ReduceOp::NAMES.len() as u8), None);
    }

    #[test]
    fn integers_have_means_where_a_sum_of_them_has_room() {
        for dtype in [Dtype::U8, Dtype::I8, Dtype::U16, Dtype::I16, Dtype::Bool, Dtype::Bytes] {
            assert!(!dtype.supports(ReduceOp::Avg), "{dtype:?}");
        }
        for dtype in [Dtype::I32, Dtype::U32, Dtype::I64, Dtype::U64, Dtype::F16, Dtype::Bf16, Dtype::F64] {
            assert!(dtype.supports(ReduceOp::Avg), "{dtype:?}");
        }
        assert!(Dtype::U8.supports(ReduceOp::Sum) && Dtype::I16.supports(ReduceOp::PremulSum(2.0)));
    }

    #[test]
    fn integers_are_multiplied_by_whole_numbers_only() {
        for dtype in [Dtype::U8, Dtype::I64, Dtype::U64] {
            assert!(dtype.supports(ReduceOp::PremulSum(-3.0)));
            for factor in [0.5, f64::NAN, f64::INFINITY, 1e300] {
                assert!(!dtype.supports(ReduceOp::PremulSum(factor)), "{dtype:?} times {factor}");
            }
        }
        assert!(
            Dtype::Bf16.supports(ReduceOp::PremulSum(0.5)) && !Dtype::Bool.supports(ReduceOp::PremulSum(2.0))
        );
    }
}
