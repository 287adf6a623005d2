//! What the members of a new epoch tell each other before their calls go on: who has which results, and these.
//!
//! First all gather a table with one entry for each call that may have ended on one and not on another; then each result that somebody has and
//! somebody lacks is broadcast. All of it are collectives of the new group, in an order that follows from the table.
//!
//! A call is known by its number, which each rank counts for itself. So the table says as well where each call was started in the order of an
//! epoch's calls, which is the order on the wire: where two members have started different calls under one number, no result of one is another's.

use super::calls::{Calls, Held, RowsInFlight, Start};
use gradwire_collectives::{Collective, Dtype, OpError, OpId, Request, View};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

/// What a member says first: the epoch in which it has started a call last, and how many it has started in that.
const HEAD_WORDS: usize = 2;
/// What it says of each call, and of the one behind the last: what is known of it, the epoch of its result, the epoch in which it was started last, its
/// place among that epoch's calls (above [`PLACE`]), and how many that are not counted were made between the call before it and this one.
const ENTRY_WORDS: usize = 5;
/// Bytes of each of these, little-endian.
const WORD_BYTES: usize = 8;
const NOT_ENDED: u64 = 0;
const ENDED: u64 = 1;
/// It was made before this rank joined.
const NO_PART: u64 = 2;
/// Above it: bytes of the result that is here.
const HELD: u64 = 3;
/// Of a result that can be sent: no transfer is longer. What claims to be is no member's word, or cannot be given away.
const RESULT_BYTES_MAX: u64 = u32::MAX as u64;
/// It was not started, or it is forgotten where.
const NOWHERE: u64 = 0;
const UNKNOWN: u64 = 1;
/// From here on: its place.
const PLACE: u64 = 2;

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

/// What follows from the table.
#[derive(Debug, Default)]
pub(crate) struct Told {
    /// Calls that ended somewhere without a result that is kept: nobody can end them like that.
    pub(crate) orphans: Vec<u64>,
    /// Calls that are not counted and had been made somewhere.
    pub(crate) rows: RowsInFlight,
}

/// Members have started different calls under one number.
#[derive(Debug)]
pub(crate) struct AtOdds;

/// What a member says of a call.
#[derive(Clone, Copy)]
struct Entry {
    state: u64,
    epoch: u64,
    start: Start,
    rows: u64,
}

impl Sync {
    /// Of `members` ranks.
    ///
    /// # Errors
    /// [`OpError::Invalid`]: there is no memory for the table of all, whose length another rank may have said.
    pub(crate) fn new(
        unsure: Range<u64>,
        members: usize,
        calls: &Calls,
        timeout: Duration,
    ) -> Result<Self, OpError> {
        let (epoch, started) = calls.latest();
        let mut words = vec![epoch, started];
        for number in unsure.start..=unsure.end {
            let held = calls.held(number);
            let state = match held {
                _ if calls.has_no_part_in(number) => NO_PART,
                Some(held) => HELD + held.bytes.len() as u64,
                None if calls.has_ended(number) => ENDED,
                None => NOT_ENDED,
            };
            let (start_epoch, place) = match calls.start_of(number) {
                Start::Never => (0, NOWHERE),
                Start::Unknown => (0, UNKNOWN),
                Start::At { epoch, place } => (epoch, PLACE + place),
            };
            let epoch = held.map_or(0, |held| held.epoch);
            words.extend([state, epoch, start_epoch, place, calls.rows_before(number)]);
        }
        let table: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        let bytes = table.len() * members;
        let mut gathered = Vec::new();
        if gathered.try_reserve_exact(bytes).is_err() {
            let problem =
                format!("no memory for the {bytes} bytes of what {members} members tell of calls {unsure:?}");
            return Err(OpError::Invalid(problem));
        }
        gathered.resize(bytes, 0);
        let (transfers, buffer) = (VecDeque::new(), Vec::new());
        Ok(Self { unsure, op: None, members, table, gathered, transfers, buffer, timeout })
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

    /// The table is there. All members find the same in it.
    ///
    /// # Errors
    /// [`AtOdds`]: what one has under a number is not what another has.
    pub(crate) fn read(&mut self) -> Result<Told, AtOdds> {
        let mut told = Told { rows: self.rows_in_flight(), ..Told::default() };
        for (index, number) in self.unsure.clone().enumerate() {
            let entries: Vec<Entry> = (0..self.members).map(|rank| self.entry(rank, index)).collect();
            if self.are_at_odds(&entries) {
                return Err(AtOdds);
            }
            let lacks = entries.iter().any(|entry| entry.state == NOT_ENDED);
            let can_send = |state: u64| (HELD..=HELD + RESULT_BYTES_MAX).contains(&state);
            let holder = entries.iter().position(|entry| can_send(entry.state));
            match holder {
                Some(root) if lacks => {
                    let Entry { state, epoch, .. } = entries[root];
                    let bytes = (state - HELD) as usize;
                    self.transfers.push_back(Transfer { number, root: root as u32, bytes, epoch });
                }
                None if lacks && entries.iter().any(|entry| entry.state == ENDED || entry.state >= HELD) => {
                    told.orphans.push(number);
                }
                _ => {}
            }
        }
        Ok(told)
    }

    /// Whether two members have started one call at different places of an epoch's order, or one of them another call at its place.
    fn are_at_odds(&self, entries: &[Entry]) -> bool {
        let placed = entries.iter().filter_map(|entry| match entry.start {
            Start::At { epoch, place } => Some((epoch, place)),
            _ => None,
        });
        placed.clone().any(|(epoch, place)| {
            let has_other = |(rank, entry): (usize, &Entry)| match entry.start {
                Start::At { epoch: other, place: there } if other == epoch => there != place,
                Start::Unknown => false,
                _ if entry.state == NO_PART => false,
                _ => {
                    let (latest, started) = self.head(rank);
                    latest == epoch && place < started
                }
            };
            entries.iter().enumerate().any(has_other)
        })
    }

    fn rows_in_flight(&self) -> RowsInFlight {
        let numbers = (self.unsure.start..=self.unsure.end).enumerate();
        let most = |index| (0..self.members).map(|rank| self.entry(rank, index).rows).max();
        let gaps: BTreeMap<u64, u64> =
            numbers.map(|(index, number)| (number, most(index).unwrap_or_default())).collect();
        RowsInFlight { below: self.unsure.start, gaps }
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

    fn head(&self, rank: usize) -> (u64, u64) {
        (self.word(rank, 0), self.word(rank, 1))
    }

    fn entry(&self, rank: usize, index: usize) -> Entry {
        let word = |nth| self.word(rank, HEAD_WORDS + index * ENTRY_WORDS + nth);
        let start = match word(3) {
            NOWHERE => Start::Never,
            UNKNOWN => Start::Unknown,
            place => Start::At { epoch: word(2), place: place - PLACE },
        };
        Entry { state: word(0), epoch: word(1), start, rows: word(4) }
    }

    fn word(&self, rank: usize, nth: usize) -> u64 {
        let at = rank * self.table.len() + nth * WORD_BYTES;
        let mut raw = [0; WORD_BYTES];
        raw.copy_from_slice(&self.gathered[at..at + WORD_BYTES]);
        u64::from_le_bytes(raw)
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

    /// A table of two calls, as three members told it, of which all have started the same ones.
    fn table(told: [[(u64, u64); 2]; 3]) -> Sync {
        let start = |index| (2, PLACE + index as u64);
        let told = told.map(|calls| {
            let entry = |index: usize| [calls[index].0, calls[index].1, start(index).0, start(index).1, 0];
            ([2, 2], [entry(0), entry(1), [0; ENTRY_WORDS]])
        });
        table_of(told)
    }

    fn table_of(told: [([u64; HEAD_WORDS], [[u64; ENTRY_WORDS]; 3]); 3]) -> Sync {
        let mut sync = Sync::new(7..9, 3, &Calls::default(), Duration::from_secs(1)).unwrap();
        let words = told
            .into_iter()
            .flat_map(|(head, entries)| head.into_iter().chain(entries.into_iter().flatten()));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        sync.gathered().copy_from_slice(&bytes);
        sync
    }

    #[test]
    fn members_that_have_started_different_calls_under_one_number_are_at_odds() {
        const NONE: [u64; ENTRY_WORDS] = [0; ENTRY_WORDS];
        let at = |epoch, place| [HELD + 8, epoch, epoch, PLACE + place, 0];
        let forgotten = [ENDED, 0, 0, UNKNOWN, 0];
        let no_part = [NO_PART, 0, 0, NOWHERE, 0];
        let agree = ([4, 6], [at(4, 4), at(4, 5), NONE]);
        for (other, is_at_odds) in [
            (agree, false),
            // One call ahead in its count: its number 8 is the others' number 7.
            (([4, 6], [at(4, 3), at(4, 4), NONE]), true),
            // It has made the call before last, and then none.
            (([4, 5], [at(4, 4), NONE, NONE]), false),
            // As many calls as the others under other numbers, the last of them number 7.
            (([4, 6], [at(4, 5), NONE, NONE]), true),
            (([4, 6], [NONE, NONE, NONE]), true),
            (([4, 4], [NONE, NONE, NONE]), false),
            // Under another epoch: broken off, and made again there, which the others have not.
            (([3, 9], [at(3, 7), at(3, 8), NONE]), false),
            (([4, 6], [forgotten, at(4, 5), NONE]), false),
            // It has just joined, and counts from where it did.
            (([4, 6], [no_part, at(4, 5), NONE]), false),
        ] {
            for others in [[agree, agree, other], [other, agree, agree]] {
                assert_eq!(table_of(others).read().is_err(), is_at_odds, "{other:?}");
            }
        }
    }

    #[test]
    fn what_is_not_counted_was_in_flight_where_anybody_had_made_it() {
        let entry = |rows| [NOT_ENDED, 0, 0, NOWHERE, rows];
        let told = [[0, 0, 0], [1, 0, 3], [0, 2, 1]].map(|rows| ([0, 0], rows.map(entry)));
        let told = table_of(told).read().expect("nobody has started anything");
        assert_eq!((told.rows.below, told.rows.gaps), (7, BTreeMap::from([(7, 1), (8, 2), (9, 3)])));
    }

    #[test]
    fn who_lacks_a_result_gets_it_from_the_first_who_has_it() {
        let mut sync = table([
            [(NOT_ENDED, 0), (HELD + 5, 2)],
            [(ENDED, 0), (HELD + 5, 2)],
            [(HELD + 100, 1), (ENDED, 0)],
        ]);
        assert!(sync.read().expect("they agree").orphans.is_empty());
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
        let told = sync.read().expect("they agree");
        assert_eq!(told.orphans, [7], "call 8 has another holder");
        assert_eq!(sync.transfers, [Transfer { number: 8, root: 2, bytes: 8, epoch: 1 }]);
    }
}
