//! Packets of several queues of the network: single cases, and a naive model that looks at every packet every time.

use super::by_queue::STARVED_MAX;
use super::ledger_tests::{ack, at, numbers, packet, Fate, BYTES, DELAY};
use super::{AckOutcome, Ledger, SentPacket};
use crate::Timestamp;
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, TransferId};
use proptest::prelude::*;

/// Packets that take these queues, one each microsecond.
fn in_queues(queues: &[u8]) -> (Ledger, AckOutcome) {
    let mut ledger = Ledger::by_queue();
    for (queue, us) in queues.iter().zip(0..) {
        let packet = packet(&ledger, 1, BYTES, at(us));
        ledger.on_sent(packet, *queue, false);
    }
    (ledger, AckOutcome::default())
}

// test of: mlt/switch-queues
#[test]
fn packets_of_more_urgent_queues_condemn_nothing_and_those_of_less_urgent_ones_do() {
    let (mut ledger, mut outcome) = in_queues(&[1, 0, 1, 0, 0, 0, 2, 2, 2, 1]);
    let mut lost_after = |ledger: &mut Ledger, us: u64, acked: &[u32]| {
        assert!(ledger.on_ack(at(us), Duration::ZERO, &ack(acked), DELAY, &mut outcome));
        assert_eq!(
            numbers(&outcome.lost),
            [],
            "a less urgent queue's packets may be named before those that they do not overtake"
        );
        ledger.on_timeout(at(us), DELAY, &mut outcome);
        numbers(&outcome.lost)
    };
    assert_eq!(lost_after(&mut ledger, 100, &[3, 4, 5]), [1], "three of its own queue came");
    let starved = Duration::from_millis(100);
    assert_eq!(
        ledger.loss_time(DELAY),
        Some(at(0) + starved + DELAY),
        "nothing else that it does not let past has come"
    );
    assert_eq!(lost_after(&mut ledger, 101, &[6]), []);
    assert_eq!(ledger.loss_time(DELAY), Some(at(0) + DELAY), "one of a less urgent queue came");
    assert_eq!(lost_after(&mut ledger, 102, &[7, 8]), [0, 2]);
    assert_eq!((ledger.loss_time(DELAY), ledger.in_flight()), (None, 1_000));
}

#[test]
fn a_packet_that_one_of_its_queue_has_overtaken_is_lost_in_time_though_more_urgent_ones_wait_before_it() {
    let (mut ledger, mut outcome) = in_queues(&[2, 1, 1]);
    assert!(ledger.on_ack(at(100), Duration::ZERO, &ack(&[2]), DELAY, &mut outcome));
    ledger.on_timeout(at(100), DELAY, &mut outcome);
    assert_eq!(ledger.loss_time(DELAY), Some(at(1) + DELAY));
    ledger.on_timeout(at(1) + DELAY, DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [1]);
    let due = at(0) + Duration::from_millis(100) + DELAY;
    assert_eq!((ledger.loss_time(DELAY), ledger.in_flight()), (Some(due), 1_000));
    ledger.on_timeout(due, DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0], "no queue is starved for longer");
    assert_eq!((ledger.loss_time(DELAY), ledger.in_flight()), (None, 0));
}

#[test]
fn three_later_packets_say_nothing_of_what_no_entry_of_the_acknowledgement_has_room_for() {
    let (mut ledger, mut outcome) = in_queues(&[1; 200]);
    let brief = |numbers: &[u32]| AckPath { words: 1, ..ack(numbers) };
    assert!(ledger.on_ack(at(300), Duration::ZERO, &brief(&[197, 198, 199]), DELAY, &mut outcome));
    ledger.on_timeout(at(300), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0; 0], "an entry that names the first may be on its way");
    let (first, rest): (Vec<u32>, Vec<u32>) =
        (0..197).filter(|number| *number != 50).partition(|number| *number < 60);
    for entry in [brief(&rest), brief(&first)] {
        assert!(ledger.on_ack(at(301), Duration::ZERO, &entry, DELAY, &mut outcome));
    }
    ledger.on_timeout(at(301), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [50], "of the second entry");
}

#[test]
fn a_question_settles_what_it_has_not_overtaken() {
    let (mut ledger, mut outcome) = in_queues(&[2, 0, 1, 0, 1]);
    ledger.lose_older(PacketNumber(4), (at(4), 1), &mut outcome);
    assert_eq!(numbers(&outcome.lost), [1, 2, 3]);
    ledger.lose_asked_before(at(4), 1, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [4]);
    ledger.lose_asked_before(at(99_999), 1, &mut outcome);
    assert_eq!(ledger.in_flight(), 1_000);
    ledger.lose_asked_before(at(100_000), 1, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0], "no queue is starved for longer");
}

/// What the ledger must agree with.
#[derive(Default)]
struct Model {
    packets: Vec<(SentPacket, u8, Fate)>,
}

impl Model {
    fn in_flight(&self) -> u64 {
        self.packets
            .iter()
            .filter(|(.., fate)| *fate == Fate::InFlight)
            .map(|(p, ..)| u64::from(p.bytes))
            .sum()
    }

    fn lose(&mut self, is_lost: impl Fn(&[(SentPacket, u8, Fate)], &SentPacket, u8) -> bool) -> Vec<u32> {
        let mut lost = Vec::new();
        for index in 0..self.packets.len() {
            let (packet, queue, fate) = self.packets[index];
            if fate == Fate::InFlight && is_lost(&self.packets[index + 1..], &packet, queue) {
                self.packets[index].2 = Fate::Lost;
                lost.push(packet.number.0);
            }
        }
        lost
    }

    fn detect(&mut self, now: Timestamp) -> Vec<u32> {
        self.lose(|later, packet, queue| {
            late_since(later, packet, queue)
                .is_some_and(|(since, behind)| behind >= 3 || now >= since + DELAY)
        })
    }

    fn loss_time(&self) -> Option<Timestamp> {
        let late = self.packets.iter().enumerate().filter(|(_, (.., fate))| *fate == Fate::InFlight);
        let since = late
            .filter_map(|(index, (packet, queue, _))| late_since(&self.packets[index + 1..], packet, *queue));
        since.map(|(since, _)| since + DELAY).min()
    }
}

/// Since when a packet is late, if any later one has arrived, and how many have that it does not let past.
fn late_since(
    later: &[(SentPacket, u8, Fate)],
    packet: &SentPacket,
    queue: u8,
) -> Option<(Timestamp, usize)> {
    let acked = || later.iter().filter(|(.., fate)| *fate == Fate::Acked);
    let behind = acked().filter(|(_, other, _)| *other >= queue).count();
    let since = if behind > 0 { packet.sent_at } else { packet.sent_at + STARVED_MAX };
    acked().next().map(|_| (since, behind))
}

#[derive(Clone, Debug)]
enum Op {
    Send {
        queue: u8,
        transfer: u32,
    },
    /// All entries of one, or none: the time for a loss has come.
    Ack {
        entries: Vec<Vec<prop::sample::Index>>,
    },
    Forget {
        transfer: u32,
    },
    Asked {
        queue: u8,
        age_us: u64,
        by_number: bool,
    },
    LoseBefore {
        age_us: u64,
    },
    Wait {
        us: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..4_u8, 1..4_u32).prop_map(|(queue, transfer)| Op::Send { queue, transfer }),
        8 => prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 1..5), 0..5)
            .prop_map(|entries| Op::Ack { entries }),
        1 => (1..4_u32).prop_map(|transfer| Op::Forget { transfer }),
        1 => (0..4_u8, 0..60_000_u64, any::<bool>())
            .prop_map(|(queue, age_us, by_number)| Op::Asked { queue, age_us, by_number }),
        1 => (0..60_000_u64).prop_map(|age_us| Op::LoseBefore { age_us }),
        4 => (0..30_000_u64).prop_map(|us| Op::Wait { us }),
    ]
}

proptest! {
    #[test]
    fn the_ledger_of_queues_agrees_with_the_naive_model(
        start in prop_oneof![Just(0), u32::MAX - 100..u32::MAX],
        ops in prop::collection::vec(op(), 1..200),
    ) {
        let (mut ledger, mut outcome) = in_queues(&[]);
        ledger.start_at(PacketNumber(start));
        let (mut model, mut now) = (Model::default(), at(1_000_000));
        for op in ops {
            match op {
                Op::Send { queue, transfer } => {
                    let packet = packet(&ledger, transfer, BYTES, now);
                    ledger.on_sent(packet, queue, false);
                    model.packets.push((packet, queue, Fate::InFlight));
                }
                Op::Ack { entries } => {
                    let entries = if model.packets.is_empty() { Vec::new() } else { entries };
                    for entry in entries {
                        let places: Vec<usize> = entry.iter().map(|index| index.index(model.packets.len())).collect();
                        let named: Vec<u32> = places.iter().map(|place| start.wrapping_add(*place as u32)).collect();
                        prop_assert!(ledger.on_ack(now, Duration::ZERO, &ack(&named), DELAY, &mut outcome));
                        places.iter().for_each(|place| model.packets[*place].2 = Fate::Acked);
                    }
                    ledger.on_timeout(now, DELAY, &mut outcome);
                    prop_assert_eq!(numbers(&outcome.lost), model.detect(now));
                    prop_assert_eq!(ledger.loss_time(DELAY), model.loss_time());
                }
                Op::Forget { transfer } => {
                    ledger.forget(TransferId(transfer), Duration::ZERO);
                    let own = model.packets.iter_mut().filter(|(packet, _, fate)| {
                        packet.transfer == TransferId(transfer) && *fate == Fate::InFlight
                    });
                    own.for_each(|(.., fate)| *fate = Fate::Forgotten);
                }
                Op::Asked { queue, age_us, by_number } => {
                    let asked_at = Timestamp::from_nanos(now.as_nanos() - age_us * 1_000);
                    let half = model.packets.len() as u32 / 2;
                    let next = start.wrapping_add(half);
                    let is_older = |packet: &SentPacket| {
                        if by_number { packet.number.0.wrapping_sub(start) < half } else { packet.sent_at <= asked_at }
                    };
                    if by_number {
                        ledger.lose_older(PacketNumber(next), (asked_at, queue), &mut outcome);
                    } else {
                        ledger.lose_asked_before(asked_at, queue, &mut outcome);
                    }
                    let lost = model.lose(|_, packet, of| {
                        of <= queue && is_older(packet) || packet.sent_at + STARVED_MAX <= asked_at
                    });
                    prop_assert_eq!(numbers(&outcome.lost), lost);
                }
                Op::LoseBefore { age_us } => {
                    let before = Timestamp::from_nanos(now.as_nanos() - age_us * 1_000);
                    ledger.lose_before(before, &mut outcome);
                    prop_assert_eq!(numbers(&outcome.lost), model.lose(|_, packet, _| packet.sent_at <= before));
                }
                Op::Wait { us } => now = now + Duration::from_micros(us),
            }
            prop_assert_eq!(ledger.in_flight(), model.in_flight());
        }
    }
}
