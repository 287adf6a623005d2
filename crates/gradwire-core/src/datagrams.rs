//! Datagrams that came as one piece.

use crate::Payload;
use gradwire_wire::{TransferId, HEADER_BYTES};

/// Datagrams of one size behind each other, as receive offload brings them; the last may be shorter. Each ends with `tail` bytes that are
/// no part of it: the tag of one that was opened in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Datagrams<'d> {
    bytes: &'d [u8],
    stride: usize,
    tail: usize,
}

impl<'d> Datagrams<'d> {
    /// Cuts `bytes` every `stride` bytes (at least one), and `tail` bytes off each part.
    #[must_use]
    pub const fn new(bytes: &'d [u8], stride: usize, tail: usize) -> Self {
        Self { bytes, stride: if stride == 0 { 1 } else { stride }, tail }
    }

    /// Whether there is more than one.
    #[must_use]
    pub const fn are_several(self) -> bool {
        self.bytes.len() > self.stride
    }

    /// Each of them.
    pub fn iter(self) -> impl Iterator<Item = &'d [u8]> {
        self.bytes.chunks(self.stride).map(move |part| &part[..part.len().saturating_sub(self.tail)])
    }

    /// Those behind the first `count`.
    #[must_use]
    pub fn behind(self, count: usize) -> Self {
        let bytes = &self.bytes[self.bytes.len().min(count * self.stride)..];
        Self { bytes, ..self }
    }

    /// The first `count`.
    pub(crate) fn first(self, count: usize) -> Self {
        let bytes = &self.bytes[..self.bytes.len().min(count * self.stride)];
        Self { bytes, ..self }
    }
}

/// New payload of a run: chunks of one transfer and one size behind each other, each counted exactly once however often it arrives.
/// The caller places or adds them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Payloads<'d> {
    /// The transfer.
    pub transfer: TransferId,
    /// Byte offset of the first in the transfer.
    pub offset: u64,
    /// Number of ranks whose contributions are summed in each.
    pub weight: u16,
    /// Number of datagrams.
    pub count: usize,
    pub(crate) datagrams: Datagrams<'d>,
}

impl<'d> Payloads<'d> {
    /// Each of them, in the order of their offsets.
    pub fn iter(self) -> impl Iterator<Item = Payload<'d>> {
        let Self { transfer, weight, .. } = self;
        let mut offset = self.offset;
        self.datagrams.iter().map(move |datagram| {
            let bytes = &datagram[HEADER_BYTES..];
            let payload = Payload { transfer, offset, weight, bytes };
            offset += bytes.len() as u64;
            payload
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    fn parts(datagrams: Datagrams<'_>) -> Vec<&[u8]> {
        datagrams.iter().collect()
    }

    #[test]
    fn a_piece_is_cut_at_its_stride_and_each_part_loses_its_tail() {
        let all = Datagrams::new(&[1, 2, 3, 4, 5, 6, 7, 8], 3, 1);
        assert_eq!(parts(all), [&[1, 2][..], &[4, 5], &[7]]);
        assert_eq!(parts(all.behind(1)), [&[4, 5][..], &[7]]);
        assert_eq!(parts(all.first(2)), [&[1, 2][..], &[4, 5]]);
        assert!(all.are_several() && !all.behind(2).are_several());
    }

    #[test]
    fn what_lies_outside_of_a_piece_is_nothing() {
        let all = Datagrams::new(&[1, 2, 3], 2, 0);
        assert_eq!((parts(all.behind(2)).len(), parts(all.behind(9)).len()), (0, 0));
        assert_eq!(parts(all.first(9)), parts(all));
        assert_eq!(parts(Datagrams::new(&[1, 2, 3], 2, 5)), [&[] as &[u8], &[]], "a tail longer than a part");
        assert_eq!(parts(Datagrams::new(&[1, 2], 0, 0)).len(), 2, "no stride is one");
        assert!(parts(Datagrams::new(&[], 4, 0)).is_empty());
    }
}
