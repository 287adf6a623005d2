//! Memory that is used soon, fetched ahead: docs/performance.md says what it saves.

use super::Op;
use crate::schedules::Target;
use std::ops::Range;

/// How far ahead of a payload memory is fetched. A line takes as long to come from main memory as two or three small packets take in all.
const FETCHED_AHEAD: usize = 4096;
/// Of larger payloads nothing is fetched: inside of them the processor's own prefetcher has found the stream, and for those of 9000 bytes it did not pay.
const FETCHED_MAX: usize = 4 << 10;

/// What is used soon after `bytes` at `start`, in packets of `packet_bytes`, where a transfer is sent or comes in order. A tensor that is larger than the caches is in none of
/// them, and a processor guesses neither what the next system call reads nor what is written next.
pub(super) fn soon(start: usize, bytes: usize, packet_bytes: usize) -> Range<usize> {
    let start = start + packet_bytes.max(FETCHED_AHEAD);
    start..if packet_bytes <= FETCHED_MAX { start + bytes } else { start }
}

impl Op {
    /// Fetches where the payload goes that comes soon after `bytes` at `offset`.
    pub(super) fn fetch_behind(&self, target: Target, offset: usize, bytes: usize) {
        match target {
            Target::Place(at) | Target::Result { at, .. } | Target::Sum { at } => {
                self.memory.fetch(soon(at + offset, bytes, bytes));
            }
            Target::Add { at, .. } => self.memory.fetch_sum(soon(at + offset, bytes, bytes)),
            // So small that it is in the caches.
            Target::Row { .. } | Target::Settings => {}
        }
    }
}
