//! Numbers too far ahead to be plausible, on a path over which nothing came for long.
//!
//! A path that is dead for hours while data or copies are tried on it uses up millions of numbers. When it works again its next
//! number is as far ahead as one that somebody made up, and would be so for ever if nothing of it were taken. One such number
//! proves nothing; several that follow each other closely, while nothing plausible comes, are where the sender is.

use gradwire_wire::{PacketNumber, ACK_WORDS_MAX};

/// So many agree. What is sent in clear anybody can make up anyway, and what is sealed was opened before.
const AGREEING: u32 = 8;
/// Numbers that belong together are no further apart than what one acknowledgement names.
const CLOSE: i32 = 64 * ACK_WORDS_MAX as i32;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Astray {
    /// How many agree, and the latest of them.
    count: u32,
    latest: PacketNumber,
    /// The largest plausible number when they came.
    largest: PacketNumber,
}

impl Astray {
    /// Another one came, `largest` still being the largest plausible number. Whether that many agree by now.
    pub(crate) fn agrees(&mut self, number: PacketNumber, largest: PacketNumber) -> bool {
        let follows =
            self.count > 0 && self.largest == largest && (0..=CLOSE).contains(&number.since(self.latest));
        if !follows {
            self.count = 0;
        }
        // A duplicate says nothing new.
        if self.count == 0 || number != self.latest {
            self.count = self.count.saturating_add(1);
        }
        (self.latest, self.largest) = (number, largest);
        self.count >= AGREEING
    }
}

#[cfg(test)]
mod tests {
    use crate::arrivals::{Arrival, Arrivals, AHEAD_MAX};
    use crate::{ConnectionConfig, Timestamp};
    use gradwire_wire::{PacketNumber, PathId};
    use std::vec::Vec;

    fn arrivals(class_queues: u8) -> Arrivals {
        let config = ConnectionConfig { class_queues, ..crate::config::tests::config() };
        Arrivals::new(PathId(0), &config)
    }

    /// Takes numbers as a connection does, and says which of them were new.
    fn taken(arrivals: &mut Arrivals, numbers: impl IntoIterator<Item = u32>) -> Vec<bool> {
        let mut take = |number| {
            let is_new = match arrivals.check(number) {
                Arrival::New => true,
                Arrival::Duplicate => false,
                Arrival::Implausible => arrivals.has_come_so_far(number),
            };
            if is_new {
                arrivals.count(number);
                arrivals.record(Timestamp::ZERO, number, 0);
            }
            is_new
        };
        numbers.into_iter().map(|number| take(PacketNumber(number))).collect()
    }

    #[test]
    fn numbers_that_follow_each_other_are_believed_however_far_ahead() {
        for (queues, ahead) in [(1, AHEAD_MAX + 1), (1, i32::MAX - 20), (4, 1 << 24)] {
            let mut arrivals = arrivals(queues);
            taken(&mut arrivals, 0..=5);
            let first = 5 + ahead as u32;
            // Every other one was lost again.
            let new = taken(&mut arrivals, (first..first + 20).step_by(2));
            assert_eq!(new, [&[false; 7][..], &[true; 3]].concat(), "{ahead}");
            let ack = arrivals.acknowledge(Timestamp::ZERO).expect("something arrived").2;
            assert_eq!((ack.largest.0, ack.bitmap[0], ack.bitmap[1]), (first + 18, 0b10101, 0), "{ahead}");
            // What was lost while it was dead is not what the network loses now.
            let tally = arrivals.tally();
            assert_eq!((tally.numbered, tally.arrived), (6 + 5, 6 + 3), "{ahead}");
        }
    }

    #[test]
    fn a_few_numbers_from_nowhere_change_nothing() {
        let far = 5 + (1 << 21);
        let duplicates: Vec<u32> = std::vec![far; 30];
        let apart = (0..30).map(|place| far + place * 10_000).collect();
        let back = (0..30).map(|place| far - place).collect();
        // Something plausible comes among them.
        let among = (0..30).map(|place| if place % 4 == 0 { 6 + place } else { far + place }).collect();
        for numbers in [duplicates, apart, back, among] {
            let mut arrivals = arrivals(1);
            taken(&mut arrivals, [5]);
            let new = taken(&mut arrivals, numbers.iter().copied());
            assert!(numbers.iter().zip(new).all(|(number, new)| new == (*number < far - 100)), "{numbers:?}");
        }
    }
}
