//! What the members of a new epoch tell each other before their calls go on: who has which results, and these.
//!
//! First all gather a table with one entry for each call that may have ended on one and not on another; then each result that somebody has and
//! somebody lacks is broadcast. All of it are collectives of the new group, in an order that follows from the table.

use super::calls::{Calls, Held};
use gradwire_collectives::{Collective, Dtype, OpError, OpId, Request, View};
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
/// Of a result that can be sent: no transfer is longer. What claims to be is no member's word, or cannot be given away.
const RESULT_BYTES_MAX: u64 = u32::MAX as u64;

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

    /// What all members have told, each as many bytes; read by [`Sync::read`].
    pub(crate) fn gathered(&mut self) -> &mut [u8] {
        &mut self.gathered
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
            let can_send = |state: u64| (HELD..=HELD + RESULT_BYTES_MAX).contains(&state);
            let holder = entries.iter().position(|(state, _)| can_send(*state));
            match holder {
                Some(root) if lacks => {
                    let (state, epoch) = entries[root];
                    let bytes = (state - HELD) as usize;
                    self.transfers.push_back(Transfer { number, root: root as u32, bytes, epoch });
                }
                None if lacks && entries.iter().any(|(state, _)| *state == ENDED || *state >= HELD) => {
                    orphans.push(number);
                }
                _ => {}
            }
        }
        orphans
    }

    /// Number, root and bytes of each result that is to be sent.
    pub(crate) fn to_send(&self) -> impl Iterator<Item = (u64, u32, usize)> + '_ {
        self.transfers.iter().map(|transfer| (transfer.number, transfer.root, transfer.bytes))
    }

    /// The next collective; `None`: all have everything.
    ///
    /// # Errors
    /// [`OpError::Invalid`]: there is no memory for the result that another rank says it has.
    pub(crate) fn broadcast(&mut self, calls: &Calls) -> Result<Option<Request>, OpError> {
        let Some(transfer) = self.transfers.front().copied() else { return Ok(None) };
        self.buffer.clear();
        if self.buffer.try_reserve_exact(transfer.bytes).is_err() {
            let Transfer { number, root, bytes, .. } = transfer;
            let problem = format!("no memory for the {bytes} bytes that rank {root} of the new epoch says call {number} gave it");
            return Err(OpError::Invalid(problem));
        }
        match calls.held(transfer.number) {
            // Another rank's may differ where results may be lost on their way back; then all take the root's size.
            Some(held) if held.bytes.len() == transfer.bytes => self.buffer.extend_from_slice(&held.bytes),
            _ => self.buffer.resize(transfer.bytes, 0),
        }
        let output = view(&mut self.buffer);
        Ok(Some(Request { output, ..self.request(Collective::Broadcast { root: transfer.root }) }))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A table of two calls, as three members told it.
    fn table(told: [[(u64, u64); 2]; 3]) -> Sync {
        let mut sync = Sync::new(7..9, 3, &Calls::default(), Duration::from_secs(1));
        let words = told.into_iter().flatten().flat_map(|(state, epoch)| [state, epoch]);
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        sync.gathered().copy_from_slice(&bytes);
        sync
    }

    #[test]
    fn who_lacks_a_result_gets_it_from_the_first_who_has_it() {
        let mut sync = table([
            [(NOT_ENDED, 0), (HELD + 5, 2)],
            [(ENDED, 0), (HELD + 5, 2)],
            [(HELD + 100, 1), (ENDED, 0)],
        ]);
        assert!(sync.read().is_empty());
        assert_eq!(
            sync.transfers,
            [Transfer { number: 7, root: 2, bytes: 100, epoch: 1 }],
            "nobody lacks call 8"
        );
        let asked = sync.broadcast(&Calls::default()).expect("there is memory");
        assert_eq!(asked.map(|request| request.output.len()), Some(100));
        let (number, held) = sync.take().expect("it was sent");
        assert_eq!((number, held.bytes.len(), held.epoch), (7, 100, 1));
        assert!(sync.broadcast(&Calls::default()).is_ok_and(|next| next.is_none()));
    }

    #[test]
    fn a_result_that_no_transfer_could_carry_is_nobodys_to_give_away() {
        let too_long = (HELD + RESULT_BYTES_MAX + 1, 1);
        let mut sync =
            table([[(NOT_ENDED, 0), (NOT_ENDED, 0)], [(u64::MAX, 1), too_long], [too_long, (HELD + 8, 1)]]);
        assert_eq!(sync.read(), [7], "call 8 has another holder");
        assert_eq!(sync.transfers, [Transfer { number: 8, root: 2, bytes: 8, epoch: 1 }]);
    }
}
