//! Identifiers that travel in the header.

use core::fmt;

/// Names one direction of the association of two ranks in one process group; chosen by the receiver of the
/// packets that carry it. 24 bits on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(u32);

impl ConnectionId {
    /// Largest value that fits its 24 bits.
    pub const MAX: u32 = (1 << 24) - 1;

    /// `None` when `value` does not fit in 24 bits.
    #[must_use]
    pub const fn new(value: u32) -> Option<Self> {
        if value <= Self::MAX {
            Some(Self(value))
        } else {
            None
        }
    }

    pub(crate) const fn from_masked(value: u32) -> Self {
        Self(value & Self::MAX)
    }

    /// The number.
    #[must_use]
    pub const fn value(self) -> u32 {
        self.0
    }
}

/// One of the paths (source port, local address) between two ranks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PathId(pub u8);

/// Number of a data packet on its path; 32 bits on the wire, compared in serial arithmetic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PacketNumber(pub u32);

impl PacketNumber {
    /// The next number.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// Signed distance `self - earlier` in serial arithmetic: positive when `self` was sent later. Meaningful
    /// while the two are less than 2^31 packets apart.
    #[must_use]
    pub const fn since(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }
}

/// Names one transfer in one direction of a connection. The top bit separates two spaces (collective and
/// point-to-point); inside a space numbers grow and are compared in serial arithmetic over 31 bits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TransferId(pub u32);

impl TransferId {
    /// Bit that marks the point-to-point space.
    pub const POINT_TO_POINT: u32 = 1 << 31;
    /// Bits of the index inside a collective.
    pub const INDEX_BITS: u32 = 15;

    /// Transfer `index` of collective number `op` (both taken modulo their 16 and 15 bits).
    #[must_use]
    pub const fn collective(op: u32, index: u32) -> Self {
        Self((op & 0xFFFF) << Self::INDEX_BITS | index & ((1 << Self::INDEX_BITS) - 1))
    }

    /// The `count`-th point-to-point transfer of its connection and direction.
    #[must_use]
    pub const fn point_to_point(count: u32) -> Self {
        Self(Self::POINT_TO_POINT | count & (Self::POINT_TO_POINT - 1))
    }

    /// Whether this is a point-to-point transfer.
    #[must_use]
    pub const fn is_point_to_point(self) -> bool {
        self.0 & Self::POINT_TO_POINT != 0
    }

    /// Index inside its collective.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 & ((1 << Self::INDEX_BITS) - 1)
    }

    /// Number of its collective, modulo 65536.
    #[must_use]
    pub const fn op(self) -> u32 {
        (self.0 & !Self::POINT_TO_POINT) >> Self::INDEX_BITS
    }

    /// Whether `self` comes before `other` in the same space (serial arithmetic over 31 bits).
    #[must_use]
    pub const fn is_before(self, other: Self) -> bool {
        let distance = other.0.wrapping_sub(self.0) & (Self::POINT_TO_POINT - 1);
        (self.0 ^ other.0) & Self::POINT_TO_POINT == 0 && distance != 0 && distance < 1 << 30
    }
}

impl fmt::Debug for TransferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_point_to_point() {
            write!(f, "p2p:{}", self.0 & !Self::POINT_TO_POINT)
        } else {
            write!(f, "{}.{}", self.op(), self.index())
        }
    }
}
