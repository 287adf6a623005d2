//! This rank's values of a bucket. Those of a part of a reduce-scatter lie in as many pieces as it has rows.

use crate::View;
use std::ops::Range;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values<'a> {
    Whole(&'a [u8]),
    In(&'a View),
}

impl<'a> Values<'a> {
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Whole(bytes) => bytes.len(),
            Self::In(view) => view.len(),
        }
    }

    /// The values of a packet, which lies in one piece.
    pub(super) fn of(self, range: Range<usize>) -> &'a [u8] {
        match self {
            Self::Whole(bytes) => &bytes[range],
            Self::In(view) => view.get(&range).expect("no packet has values of two rows"),
        }
    }

    /// The pieces in order: one, where they lie behind each other.
    pub(super) fn pieces(self) -> impl Iterator<Item = &'a [u8]> {
        let (whole, rows) = match self {
            Self::Whole(bytes) => (Some(bytes), None),
            Self::In(view) => (None, Some(view.pieces())),
        };
        whole.into_iter().chain(rows.into_iter().flatten())
    }
}
