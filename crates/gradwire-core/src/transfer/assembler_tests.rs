//! The assembler against a naive model: what comes early, in any order and again, is in the end each byte exactly once.
//!
//! The assembler is [`EarlyBuffer`] before a receive is posted and [`ReceiveHalf`] after; the model is one
//! `Option<u8>` for each byte of the transfer.

use super::{Bitmap, EarlyBuffer, Grid, ReceiveHalf, Stored};
use crate::{CloseReason, Contract, ReceiveTransfer, Timestamp};
use core::time::Duration;
use gradwire_wire::{Opening, TransferId};
use proptest::prelude::*;
use std::vec;
use std::vec::Vec;

const CHUNK: u32 = 64;
const SLOTS: u32 = 6;
const TRANSFER: TransferId = TransferId(7);
const OTHER: TransferId = TransferId(8);

/// The byte that belongs at `offset`.
fn byte(offset: usize) -> u8 {
    (offset * 7 + offset / 251) as u8 | 1
}

fn payload(grid: Grid, chunk: u32) -> Vec<u8> {
    let start = grid.offset(chunk) as usize;
    (start..start + grid.len(chunk) as usize).map(byte).collect()
}

/// Places `bytes` in the model; panics where something is already.
fn place(model: &mut [Option<u8>], offset: u64, bytes: &[u8]) {
    for (slot, byte) in model[offset as usize..].iter_mut().zip(bytes) {
        assert!(slot.replace(*byte).is_none(), "a byte at {offset} was handed out twice");
    }
}

fn receive(bytes: u64, loss_bound: f32) -> ReceiveTransfer {
    let contract = Contract { loss_bound, after_first_pass: false, ..Contract::EXACT };
    ReceiveTransfer::new(TRANSFER, bytes, [3; 16], contract)
}

proptest! {
    #[test]
    fn every_byte_is_handed_out_once_whatever_comes_early_twice_or_in_disorder(
        total in 0_u64..2_000,
        early in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 0..20),
        late in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
    ) {
        let grid = Grid::new(total, CHUNK);
        let opening = Opening { total_bytes: total, descriptor: [3; 16], called_us: 0 };
        let mut buffer = EarlyBuffer::new(CHUNK as usize, SLOTS);
        let mut held = Bitmap::zeros(grid.chunks());
        let mut others = 0;
        for (index, ours) in early {
            let chunk = index.index(grid.chunks() as usize) as u32;
            let bytes = payload(grid, chunk);
            let stored = EarlyBuffer::chunk(grid.offset(chunk), 1, bytes.len());
            // Another transfer takes slots too, one for each of its chunks.
            let transfer = if ours { TRANSFER } else { OTHER };
            let full = held.count() + others == SLOTS;
            match buffer.store(Timestamp::ZERO, (transfer, opening), stored, &bytes) {
                Stored::Full => prop_assert!(full),
                Stored::Duplicate => prop_assert!(!ours || held.contains(chunk)),
                Stored::First | Stored::Kept => {
                    prop_assert!(!full);
                    if ours {
                        prop_assert!(held.insert(chunk));
                    } else {
                        others += 1;
                    }
                }
            }
        }
        // Posted: what was early is ready, and nothing else.
        let mut model = vec![None; total as usize];
        let mut half = ReceiveHalf::new(receive(total, 0.0), CHUNK, Timestamp::ZERO);
        prop_assert_eq!(buffer.post(TRANSFER).is_some(), !held.is_empty());
        while let Some((transfer, chunk, bytes)) = buffer.pop_ready() {
            prop_assert_eq!(transfer, TRANSFER);
            let index = grid.chunk_at(chunk.offset, bytes.len()).expect("on the grid");
            prop_assert!(held.remove(index), "chunk {} was never stored", index);
            prop_assert!(half.accept(Timestamp::ZERO, index));
            place(&mut model, chunk.offset, bytes);
        }
        prop_assert!(held.is_empty());
        for index in late {
            let chunk = index.index(grid.chunks() as usize) as u32;
            let missing = half.missing.contains(chunk);
            prop_assert_eq!(half.accept(Timestamp::ZERO, chunk), missing);
            if missing {
                place(&mut model, grid.offset(chunk), &payload(grid, chunk));
            }
            check(&half, grid, &model)?;
        }
        let correct = model.iter().enumerate().all(|(at, slot)| slot.is_none_or(|got| got == byte(at)));
        prop_assert!(correct);
    }

    #[test]
    fn a_transfer_closes_with_the_chunk_that_satisfies_its_contract(
        total in 1_u64..5_000,
        loss_percent in 0_u32..50,
        order in any::<u64>(),
    ) {
        let grid = Grid::new(total, CHUNK);
        let bound = loss_percent as f32 / 100.0;
        let mut half = ReceiveHalf::new(receive(total, bound), CHUNK, Timestamp::ZERO);
        let mut received = 0;
        // A permutation of the chunks: multiples of a number that has no divisor in common with their count.
        let chunks = u64::from(grid.chunks());
        let step = (order % 10_000..).find(|step| gcd(*step, chunks) == 1).expect("a prime is near");
        for index in 0..chunks {
            let chunk = (index * step % chunks) as u32;
            let now = Timestamp::ZERO + Duration::from_micros(index);
            prop_assert!(half.accept(now, chunk));
            received += u64::from(grid.len(chunk));
            let naive = (received as f64) >= total as f64 * (1.0 - f64::from(bound)) - 1e-6 * total as f64;
            let in_order = || crate::contract::Overtaken { most: Duration::ZERO, by_path: Duration::ZERO };
            let verdict = half.verdict(now, now, in_order);
            match verdict {
                Some(CloseReason::AllArrived) => prop_assert_eq!(received, total),
                Some(reason) => prop_assert_eq!((reason, naive), (CloseReason::BoundMet, true)),
                None => prop_assert!(!naive, "{} of {} bytes with a bound of {}", received, total, bound),
            }
            let receipt = half.receipt(now, CloseReason::BoundMet);
            prop_assert_eq!((receipt.received_bytes, receipt.total_bytes), (received, total));
        }
    }
}

/// The receiving half says about each chunk what the model says about its bytes.
fn check(half: &ReceiveHalf, grid: Grid, model: &[Option<u8>]) -> Result<(), TestCaseError> {
    for chunk in 0..grid.chunks() {
        let start = grid.offset(chunk) as usize;
        let bytes = &model[start..start + grid.len(chunk) as usize];
        let is_in = !half.missing.contains(chunk);
        prop_assert!(bytes.iter().all(|slot| slot.is_some() == is_in));
    }
    let received = half.receipt(Timestamp::ZERO, CloseReason::AllArrived).received_bytes;
    prop_assert_eq!(received, model.iter().flatten().count() as u64);
    Ok(())
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 {
        a
    } else {
        gcd(b, a % b)
    }
}
