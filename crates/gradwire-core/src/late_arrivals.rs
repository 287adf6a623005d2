//! Which packets arrived on a path further behind the newest one than its bitmap reaches, as they waited in a less urgent queue of the
//! network (MLT section 5.2).
//!
//! A queue keeps its packets in order, so what comes out of one lies close together: a window of the usual size follows each of them. An
//! acknowledgement has an entry for each window with news, beside that of the newest packets.

use crate::paths::ack_path_bytes;
use crate::CLASSES_MAX;
use gradwire_wire::{AckPath, PacketNumber, PathId, ACK_WORDS_MAX};

/// Packets that a window has room for.
pub(crate) const REACH: usize = 64 * ACK_WORDS_MAX;

/// One for each queue but the most urgent.
const WINDOWS: usize = CLASSES_MAX - 1;

/// Least bitmap of an entry, and of an acknowledgement: 256 packets.
pub(crate) const WORDS_MIN: usize = 4;

/// A window for each queue that is behind.
#[derive(Debug, Default)]
pub(crate) struct LateArrivals {
    windows: [Option<Window>; WINDOWS],
    /// Arrivals.
    turn: u64,
    /// The window that is first in the next acknowledgement, if not all have room.
    first: usize,
}

/// Some of the packets of a path.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) largest: PacketNumber,
    /// Bit `i` is packet `largest - i`.
    pub(crate) bitmap: [u64; ACK_WORDS_MAX],
    /// The oldest of those that came since the last acknowledgement, and in the time before it: what one lost acknowledgement named
    /// comes with the next.
    pub(crate) news: [Option<PacketNumber>; 2],
    /// When its latest packet came.
    turn: u64,
}

impl LateArrivals {
    /// What is so far behind the newest packet is of another time: numbers wrap around.
    pub(crate) const BEHIND_MAX: i32 = 1 << 20;

    /// Whether a packet so far behind the newest belongs here: before the bitmap of the newest ends, so that it is acknowledged before
    /// it leaves that.
    pub(crate) fn is_late(behind: i32) -> bool {
        usize::try_from(behind).is_ok_and(is_far)
    }

    /// Whether this number has arrived, as far as is known.
    pub(crate) fn has(&self, number: PacketNumber) -> bool {
        self.windows.iter().flatten().any(|window| window.has(number))
    }

    /// It has.
    pub(crate) fn record(&mut self, number: PacketNumber) {
        self.turn += 1;
        let near = self.windows.iter_mut().flatten().filter(|window| window.has_place_for(number));
        match near.min_by_key(|window| number.since(window.largest).unsigned_abs()) {
            Some(window) => window.record(number, self.turn),
            None => self.add(Window::at(number)),
        }
    }

    /// The packets before a jump of the newest one, which may be those of a queue that goes on.
    pub(crate) fn add(&mut self, window: Window) {
        // A free place, or else one that has nothing to tell, or nothing new, or the one where nothing has come for longest.
        let worth =
            |place: &&mut Option<Window>| place.map(|held| (held.news.map(|news| news.is_some()), held.turn));
        if let Some(place) = self.windows.iter_mut().min_by_key(worth) {
            *place = Some(Window { turn: self.turn, ..window });
        }
    }

    /// Whether the next window could take the place of one that has something new to tell.
    pub(crate) fn is_full(&self) -> bool {
        self.windows.iter().all(|place| place.is_some_and(|window| window.news[0].is_some()))
    }

    /// The windows with news that fit into so many bytes of an acknowledgement; `all`: those without news too.
    pub(crate) fn to_acknowledge(&self, mut room: usize, all: bool) -> WindowSet {
        let mut chosen = WindowSet::default();
        for at in (0..WINDOWS).map(|place| (self.first + place) % WINDOWS) {
            let window = self.windows[at].filter(|window| all || window.reach() > 0);
            let bytes = window.map(|window| ack_path_bytes(window.words()));
            if let Some(left) = bytes.and_then(|bytes| room.checked_sub(bytes)) {
                room = left;
                chosen.0 |= 1 << at;
            }
        }
        chosen
    }

    /// What came lately in these windows.
    pub(crate) fn describe(&self, path: PathId, chosen: WindowSet) -> impl Iterator<Item = AckPath> + '_ {
        let windows = self.windows.iter().enumerate().filter(move |(at, _)| chosen.has(*at));
        windows.filter_map(move |(_, window)| Some(window.as_ref()?.describe(path)))
    }

    /// An acknowledgement with these windows leaves; `newest` is the newest packet.
    pub(crate) fn on_acknowledged(&mut self, chosen: WindowSet, newest: PacketNumber) {
        self.first = (self.first + 1) % WINDOWS;
        for (at, place) in self.windows.iter_mut().enumerate() {
            *place = place.filter(|window| (0..Self::BEHIND_MAX).contains(&newest.since(window.largest)));
            if let Some(window) = place.as_mut().filter(|_| chosen.has(at)) {
                window.news = [None, window.news[0]];
            }
        }
    }
}

/// Some of the windows: bit `i` is window `i`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct WindowSet(u8);

impl WindowSet {
    pub(crate) fn len(self) -> u8 {
        self.0.count_ones() as u8
    }

    fn has(self, window: usize) -> bool {
        self.0 >> window & 1 == 1
    }
}

impl Window {
    pub(crate) fn new(
        largest: PacketNumber,
        bitmap: [u64; ACK_WORDS_MAX],
        news: [Option<PacketNumber>; 2],
    ) -> Self {
        Self { largest, bitmap, news, turn: 0 }
    }

    fn at(number: PacketNumber) -> Self {
        let mut bitmap = [0; ACK_WORDS_MAX];
        bitmap[0] = 1;
        Self::new(number, bitmap, [Some(number), None])
    }

    fn has(&self, number: PacketNumber) -> bool {
        let Ok(back) = usize::try_from(self.largest.since(number)) else { return false };
        self.bitmap.get(back / 64).is_some_and(|word| word >> (back % 64) & 1 == 1)
    }

    /// Whether it can record this number and lose none of its news by that.
    fn has_place_for(&self, number: PacketNumber) -> bool {
        match usize::try_from(number.since(self.largest)) {
            Ok(ahead) => !is_far(ahead) && ahead + self.reach() <= REACH,
            Err(_) => !is_far(self.largest.since(number).unsigned_abs() as usize),
        }
    }

    fn record(&mut self, number: PacketNumber, turn: u64) {
        if let Ok(ahead) = usize::try_from(number.since(self.largest)) {
            self.bitmap = moved(&self.bitmap, ahead);
            self.largest = number;
        }
        let back = self.largest.since(number).unsigned_abs() as usize;
        self.bitmap[back / 64] |= 1 << (back % 64);
        if self.news[0].is_none_or(|oldest| number.since(oldest) < 0) {
            self.news[0] = Some(number);
        }
        self.turn = turn;
    }

    /// So many packets back something came lately; 0: nothing did.
    fn reach(&self) -> usize {
        let back = |number: &PacketNumber| self.largest.since(*number).unsigned_abs() as usize + 1;
        self.news.iter().flatten().map(back).max().unwrap_or(0)
    }

    /// Words of the bitmap in which something came lately.
    fn words(&self) -> u8 {
        self.reach().div_ceil(64).clamp(WORDS_MIN, ACK_WORDS_MAX) as u8
    }

    fn describe(&self, path: PathId) -> AckPath {
        AckPath { path, largest: self.largest, words: self.words(), bitmap: self.bitmap }
    }
}

/// What is so many packets apart is of two queues, or of two times.
fn is_far(apart: usize) -> bool {
    apart >= REACH / 2
}

/// The bitmap when so many newer packets are known of.
pub(crate) fn moved(bitmap: &[u64; ACK_WORDS_MAX], by: usize) -> [u64; ACK_WORDS_MAX] {
    let (words, bits) = (by / 64, by % 64);
    let mut moved = [0; ACK_WORDS_MAX];
    for (index, word) in moved.iter_mut().enumerate().skip(words) {
        let low = bitmap[index - words];
        let high = (index - words).checked_sub(1).map_or(0, |from| bitmap[from]);
        *word = if bits == 0 { low } else { low << bits | high >> (64 - bits) };
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;
    use std::vec::Vec;

    /// Of a datagram.
    const ROOM: usize = 1_400;
    const NEWEST: PacketNumber = PacketNumber(100_000);

    fn acknowledged(late: &mut LateArrivals, room: usize, newest: PacketNumber) -> BTreeSet<u32> {
        let chosen = late.to_acknowledge(room, false);
        let mut named = BTreeSet::new();
        for entry in late.describe(PathId(0), chosen) {
            let bits = 0..64 * u32::from(entry.words);
            let is_set = |back: &u32| entry.bitmap[(back / 64) as usize] >> (back % 64) & 1 == 1;
            named.extend(bits.filter(is_set).map(|back| entry.largest.0.wrapping_sub(back)));
        }
        late.on_acknowledged(chosen, newest);
        named
    }

    proptest! {
        // Queues have holes, lie close together or thousands of packets apart, and drift.
        #[test]
        fn two_acknowledgements_name_all_that_came_between_them_whichever_queues_it_came_from(
            newest: u32,
            apart in prop_oneof![300_u32..900, Just(10_000)],
            steps in prop::collection::vec((0_usize..4, 1_u32..20), 1..400),
        ) {
            let mut late = LateArrivals::default();
            let mut queues: Vec<u32> = (0..4).map(|queue| newest.wrapping_sub(50_000 + apart * queue)).collect();
            let (mut came, mut before) = (BTreeSet::new(), BTreeSet::new());
            let mut all = BTreeSet::new();
            for (at, (queue, step)) in steps.into_iter().enumerate() {
                queues[queue] = queues[queue].wrapping_add(step);
                let number = queues[queue];
                if !all.insert(number) {
                    continue;
                }
                prop_assert!(!late.has(PacketNumber(number)));
                late.record(PacketNumber(number));
                prop_assert!(late.has(PacketNumber(number)));
                came.insert(number);
                if at % 30 == 29 {
                    let named = acknowledged(&mut late, ROOM, PacketNumber(newest));
                    prop_assert_eq!(came.difference(&named).collect::<Vec<_>>(), Vec::<&u32>::new(), "came {:?}", &late);
                    prop_assert_eq!(before.difference(&named).collect::<Vec<_>>(), Vec::<&u32>::new(), "before {:?}", &late);
                    prop_assert_eq!(named.difference(&all).collect::<Vec<_>>(), Vec::<&u32>::new(), "all {:?}", &late);
                    before = core::mem::take(&mut came);
                }
            }
        }
    }

    #[test]
    fn what_had_no_room_is_news_of_the_next_acknowledgement_which_begins_with_it() {
        let mut late = LateArrivals::default();
        late.record(PacketNumber(7));
        late.record(PacketNumber(5_000));
        let one = ack_path_bytes(WORDS_MIN as u8);
        assert_eq!(acknowledged(&mut late, one, NEWEST), BTreeSet::from([7]));
        assert_eq!(acknowledged(&mut late, one, NEWEST), BTreeSet::from([5_000]));
        assert_eq!(acknowledged(&mut late, 0, NEWEST), BTreeSet::new());
        let both = BTreeSet::from([7, 5_000]);
        assert_eq!(acknowledged(&mut late, ROOM, NEWEST), both, "once more, as one may be lost");
        assert_eq!(acknowledged(&mut late, ROOM, NEWEST), BTreeSet::new());
        assert_eq!(late.to_acknowledge(ROOM, true).len(), 2, "who asks is told everything");
    }

    #[test]
    fn more_places_than_there_are_windows_take_those_that_have_nothing_to_tell() {
        let mut late = LateArrivals::default();
        let places = |from: u32| (0..WINDOWS as u32).map(move |place| from + place * 10_000);
        places(0).for_each(|number| late.record(PacketNumber(number)));
        acknowledged(&mut late, ROOM, NEWEST);
        acknowledged(&mut late, ROOM, NEWEST);
        late.record(PacketNumber(1));
        late.record(PacketNumber(5_000));
        assert!(late.has(PacketNumber(1)) && late.has(PacketNumber(5_000)));
        assert!(!late.has(PacketNumber(10_000)), "nothing had come there for longest");
    }

    #[test]
    fn what_came_before_the_numbers_wrapped_around_is_forgotten() {
        let mut late = LateArrivals::default();
        late.record(PacketNumber(7));
        acknowledged(&mut late, ROOM, NEWEST);
        assert!(late.has(PacketNumber(7)));
        acknowledged(&mut late, ROOM, PacketNumber(8 + LateArrivals::BEHIND_MAX as u32));
        assert!(!late.has(PacketNumber(7)));
    }
}
