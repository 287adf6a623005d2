//! Element types and reductions.

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
}

impl Dtype {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bytes | Self::U8 | Self::I8 | Self::Bool => 1,
            Self::F16 | Self::Bf16 | Self::I16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }
}

/// How elements of several ranks become one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ReduceOp {
    /// Sum.
    Sum,
    /// Sum divided by the number of ranks that contributed to the element.
    Avg,
    /// Product.
    Product,
    /// Least.
    Min,
    /// Largest.
    Max,
    /// Bitwise and.
    BitAnd,
    /// Bitwise or.
    BitOr,
    /// Bitwise exclusive or.
    BitXor,
    /// Sum of each value times this factor.
    PremulSum(f64),
}
