//! What the members of a new epoch tell each other before their calls go on: who has which results, and these.
//!
//! First all gather a table with one entry for each call that may have ended on one and not on another; then each result that somebody has and
//! somebody lacks is broadcast. All of it are collectives of the new group, in an order that follows from the table.

use super::calls::{Calls, Held};
use gradwire_collectives::{Collective, Dtype, OpId, Request, View};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Bytes of an entry: what is known of a call, and the epoch of its result.
const ENTRY_BYTES: usize = 16;
const NOT_ENDED: u64 = 0;
const ENDED: u64 = 1;
/// It was made before this rank joined.
const NO_PART: u64 = 2;
/// Above it: bytes of the result that is here.
const HELD: u64 = 3;

/// See the module's documentation.
pub(crate) struct Sync {
    /// Calls that the table is about.
    pub(crate) unsure: Range<u64>,
    /// The collective in flight.
    pub(crate) op: Option<OpId>,
    members: usize,
    table: Vec<u8>,
    gathered: Vec<u8>,
    /// What is to be sent; the first of them is in flight once the table is there.
    transfers: VecDeque<Transfer>,
    /// Memory of the first.
    buffer: Vec<u8>,
    timeout: Duration,
}

/// A result that is sent to all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transfer {
    pub(crate) number: u64,
    root: u32,
    bytes: usize,
    epoch: u64,
}

impl Sync {
    /// Of `members` ranks.
    pub(crate) fn new(unsure: Range<u64>, members: usize, calls: &Calls, timeout: Duration) -> Self {
        let mut table = Vec::new();
        for number in unsure.clone() {
            let held = calls.held(number);
            let state = match held {
                _ if calls.has_no_part_in(number) => NO_PART,
                Some(held) => HELD + held.bytes.len() as u64,
                None if calls.has_ended(number) => ENDED,
                None => NOT_ENDED,
            };
            table.extend_from_slice(&state.to_le_bytes());
            table.extend_from_slice(&held.map_or(0, |held| held.epoch).to_le_bytes());
        }
        let gathered = vec![0; table.len() * members];
        let (transfers, buffer) = (VecDeque::new(), Vec::new());
        Self { unsure, op: None, members, table, gathered, transfers, buffer, timeout }
    }

    /// The first collective.
    pub(crate) fn gather(&mut self) -> Request {
        let (input, output) = (view(&mut self.table), view(&mut self.gathered));
        Request { input, output, ..self.request(Collective::AllGather) }
    }

    /// The table is there. Returns the calls that ended somewhere without a result that is kept: nobody can end them like that.
    pub(crate) fn read(&mut self) -> Vec<u64> {
        let mut orphans = Vec::new();
        for (index, number) in self.unsure.clone().enumerate() {
            let entries: Vec<(u64, u64)> = (0..self.members).map(|rank| self.entry(rank, index)).collect();
            let lacks = entries.iter().any(|(state, _)| *state == NOT_ENDED);
            let holder = entries.iter().position(|(state, _)| *state >= HELD);
            match holder {
                Some(root) if lacks => {
                    let (state, epoch) = entries[root];
                    let bytes = usize::try_from(state - HELD).unwrap_or(0);
                    self.transfers.push_back(Transfer { number, root: root as u32, bytes, epoch });
                }
                None if lacks && entries.iter().any(|(state, _)| *state == ENDED) => orphans.push(number),
                _ => {}
            }
        }
        orphans
    }

    /// The next collective; `None`: all have everything.
    pub(crate) fn broadcast(&mut self, calls: &Calls) -> Option<Request> {
        let transfer = *self.transfers.front()?;
        self.buffer.clear();
        match calls.held(transfer.number) {
            // Another rank's may differ where results may be lost on their way back; then all take the root's size.
            Some(held) if held.bytes.len() == transfer.bytes => self.buffer.extend_from_slice(&held.bytes),
            _ => self.buffer.resize(transfer.bytes, 0),
        }
        let output = view(&mut self.buffer);
        Some(Request { output, ..self.request(Collective::Broadcast { root: transfer.root }) })
    }

    /// A result is here.
    pub(crate) fn take(&mut self) -> Option<(u64, Held)> {
        let transfer = self.transfers.pop_front()?;
        let bytes = std::mem::take(&mut self.buffer);
        Some((transfer.number, Held { bytes, epoch: transfer.epoch }))
    }

    fn entry(&self, rank: usize, index: usize) -> (u64, u64) {
        let at = rank * self.table.len() + index * ENTRY_BYTES;
        let number = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&self.gathered[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        (number(at), number(at + 8))
    }

    fn request(&self, collective: Collective) -> Request {
        Request::exact(collective, Dtype::Bytes, self.timeout)
    }
}

/// Memory that stays where it is: the vector is not touched, and its owner not dropped, before the collective or its group is gone.
fn view(memory: &mut [u8]) -> View {
    // SAFETY: `Sync` owns the vector and is kept until its collective has ended; where a group is replaced before that, the group goes
    // first.
    unsafe { View::new(memory.as_mut_ptr(), memory.len()) }
}
