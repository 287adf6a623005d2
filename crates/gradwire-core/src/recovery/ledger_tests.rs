//! The ledger against single cases and against a naive model that looks at every packet every time.

use super::ledger_ring::State;
use super::reordering::{Overtaken, Reordering};
use super::{
    AckOutcome, AckSample, BottleneckController, ControllerSettings, Ledger, RateController, SentPacket,
};
use crate::Timestamp;
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, PathId, TransferId, ACK_WORDS_MAX};
use proptest::prelude::*;

pub(super) const BYTES: u32 = 1_000;
pub(super) const DELAY: Duration = Duration::from_millis(10);

pub(super) fn at(us: u64) -> Timestamp {
    Timestamp::from_nanos(us * 1_000)
}

pub(super) fn packet(ledger: &Ledger, transfer: u32, bytes: u32, now: Timestamp) -> SentPacket {
    let number = ledger.next_number();
    SentPacket { number, transfer: TransferId(transfer), chunk: number.0 & 0xFF, bytes, sent_at: now }
}

/// Sends `count` packets, one each microsecond from `start_us` on.
fn send(ledger: &mut Ledger, count: u64, start_us: u64) {
    for i in 0..count {
        let packet = packet(ledger, 1, BYTES, at(start_us + i));
        ledger.on_sent(packet, 0, false);
    }
}

/// An acknowledgement of exactly `numbers`.
pub(super) fn ack(numbers: &[u32]) -> AckPath {
    let largest = numbers.iter().copied().reduce(|a, b| if (b.wrapping_sub(a) as i32) > 0 { b } else { a });
    let largest = largest.unwrap_or(0);
    let mut bitmap = [0; ACK_WORDS_MAX];
    for number in numbers {
        let back = largest.wrapping_sub(*number) as usize;
        bitmap[back / 64] |= 1 << (back % 64);
    }
    AckPath { path: PathId(0), largest: PacketNumber(largest), words: ACK_WORDS_MAX as u8, bitmap }
}

pub(super) fn numbers(packets: &[SentPacket]) -> Vec<u32> {
    packets.iter().map(|packet| packet.number.0).collect()
}

// test of: ltp/loss-by-three
#[test]
fn three_later_packets_make_a_loss_and_two_do_not() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 10, 0);
    assert!(ledger.on_ack(at(100), Duration::ZERO, &ack(&[1, 5]), DELAY, &mut outcome));
    assert_eq!((numbers(&outcome.acked), numbers(&outcome.lost)), (Vec::from([1, 5]), Vec::new()));
    assert!(ledger.on_ack(at(101), Duration::ZERO, &ack(&[6]), DELAY, &mut outcome));
    assert_eq!(numbers(&outcome.lost), [0], "5 and 6 alone do not condemn 2, 3 and 4");
    assert_eq!(ledger.in_flight(), 6_000);
}

#[test]
fn a_short_acknowledgement_says_nothing_of_what_is_older_than_its_bitmap() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 200, 0);
    let brief = |numbers: &[u32]| AckPath { words: 1, ..ack(numbers) };
    ledger.on_ack(at(300), Duration::ZERO, &brief(&[197, 198, 199]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0; 0], "the one before it is still on its way");
    let before: Vec<u32> = (0..120).filter(|number| *number != 50).collect();
    ledger.on_ack(at(301), Duration::ZERO, &ack(&before), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [50]);
    let rest: Vec<u32> = (120..200).filter(|number| *number != 160).collect();
    ledger.on_ack(at(302), Duration::ZERO, &ack(&rest), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [160]);
}

#[test]
fn an_overtaken_packet_is_lost_when_its_time_is_over() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 3, 0);
    assert_eq!(ledger.loss_time(DELAY), None, "nothing overtook the first packet");
    ledger.on_ack(at(100), Duration::ZERO, &ack(&[1]), DELAY, &mut outcome);
    assert_eq!(ledger.loss_time(DELAY), Some(at(0) + DELAY));
    ledger.on_timeout(at(9_999), DELAY, &mut outcome);
    assert!(outcome.lost.is_empty());
    ledger.on_timeout(at(10_000), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0]);
    assert_eq!(ledger.loss_time(DELAY), None, "packet 2 was not overtaken");
    assert_eq!(ledger.in_flight(), 1_000);
}

#[test]
fn a_late_acknowledgement_of_a_lost_packet_counts_as_delivered_once() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 5, 0);
    ledger.on_ack(at(100), Duration::ZERO, &ack(&[1, 2, 3]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0]);
    ledger.on_ack(at(110), Duration::ZERO, &ack(&[0, 1, 2, 3]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.acked), [0]);
    assert_eq!(ledger.in_flight(), 1_000);
    ledger.on_ack(at(120), Duration::ZERO, &ack(&[0, 1, 2, 3]), DELAY, &mut outcome);
    assert!(outcome.acked.is_empty());
}

/// What goes again has a number of its own.
#[test]
fn only_a_packet_that_comes_after_all_shows_that_its_path_reorders() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 20, 0);
    ledger.on_ack(at(100), Duration::ZERO, &ack(&[1, 2, 3]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0]);
    let again = SentPacket { chunk: 0, ..packet(&ledger, 1, BYTES, at(100)) };
    ledger.on_sent(again, 0, false);
    let all: Vec<u32> = (1..=20).filter(|number| *number != 7).collect();
    ledger.on_ack(at(200), Duration::ZERO, &ack(&all), DELAY, &mut outcome);
    assert_eq!((numbers(&outcome.lost), outcome.unlost), (Vec::from([7]), (0, 0)), "still three");
    send(&mut ledger, 40, 300);
    ledger.on_ack(at(400), Duration::ZERO, &ack(&[7]), DELAY, &mut outcome);
    assert_eq!((numbers(&outcome.acked), outcome.unlost), (Vec::from([7]), (1, u64::from(BYTES))));
    ledger.on_ack(at(500), Duration::ZERO, &ack(&[31, 32, 33]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0; 0], "21 is 12 behind the newest, and 7 was 13");
    ledger.on_ack(at(501), Duration::ZERO, &ack(&[35]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.lost), [21], "14 behind");
}

#[test]
fn on_a_path_that_reorders_a_question_settles_what_is_far_behind_it_and_the_rest_has_its_time() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 10, 0);
    ledger.on_ack(at(20), Duration::ZERO, &ack(&[5, 6, 7, 8, 9]), DELAY, &mut outcome);
    ledger.on_ack(at(21), Duration::ZERO, &ack(&[0, 1, 2, 3, 4]), DELAY, &mut outcome);
    assert_eq!(outcome.unlost.0, 5);
    send(&mut ledger, 30, 1_000);
    ledger.lose_older(PacketNumber(36), (at(1_030), 0), &mut outcome);
    assert_eq!(numbers(&outcome.lost), (10..=26).collect::<Vec<u32>>(), "ten and more before the question");
    assert_eq!(ledger.loss_time(DELAY), Some(at(1_017) + DELAY * 5 / 4));
    ledger.on_timeout(at(20_000), DELAY, &mut outcome);
    assert_eq!(
        numbers(&outcome.lost),
        (27..=35).collect::<Vec<u32>>(),
        "what left behind it is not overtaken"
    );
}

#[test]
fn an_acknowledgement_of_a_packet_never_sent_changes_nothing() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    assert!(!ledger.on_ack(at(1), Duration::ZERO, &ack(&[0]), DELAY, &mut outcome));
    send(&mut ledger, 3, 0);
    for forged in [3, 1_000, u32::MAX, 1 << 31] {
        assert!(!ledger.on_ack(at(1), Duration::ZERO, &ack(&[forged]), DELAY, &mut outcome), "{forged}");
    }
    assert_eq!((ledger.in_flight(), outcome.acked.len()), (3_000, 0));
}

#[test]
fn forgotten_packets_leave_the_flight_without_being_lost() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 3, 0);
    let other = packet(&ledger, 2, BYTES, at(3));
    ledger.on_sent(other, 0, false);
    ledger.forget(TransferId(1), Duration::ZERO);
    assert_eq!((ledger.in_flight(), ledger.oldest_sent_at()), (1_000, Some(at(3))));
    ledger.on_ack(at(100), Duration::ZERO, &ack(&[0, 1, 2, 3]), DELAY, &mut outcome);
    assert_eq!((numbers(&outcome.acked), outcome.lost.len(), ledger.in_flight()), (Vec::from([3]), 0, 0));
}

#[test]
fn while_acknowledgements_of_what_is_over_may_be_held_back_the_clock_of_a_rate_goes_on() {
    let rate = |held: u64| {
        let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
        send(&mut ledger, 3, 0);
        ledger.forget(TransferId(1), Duration::from_micros(held));
        let next = packet(&ledger, 2, BYTES, at(1_000));
        ledger.on_sent(next, 0, false);
        ledger.on_ack(at(1_500), Duration::ZERO, &ack(&[0, 1, 2, 3]), DELAY, &mut outcome);
        outcome.delivery_rate.unwrap_or(0)
    };
    // All in 1.5 ms; taken for half a millisecond of the last one where the others' had to be there before.
    assert!(rate(2_000) <= 4_000 * 1_000_000 / 1_500, "{}", rate(2_000));
    assert!(rate(500) > rate(2_000));
}

#[test]
fn a_probe_answer_clears_what_was_sent_before_the_probe() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 5, 0);
    ledger.lose_before(at(2), &mut outcome);
    assert_eq!(numbers(&outcome.lost), [0, 1, 2]);
    assert_eq!(ledger.in_flight(), 2_000);
}

#[test]
fn numbers_may_wrap_around() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    ledger.start_at(PacketNumber(u32::MAX - 99));
    send(&mut ledger, 200, 0);
    let all: Vec<u32> = (0..200).map(|i| (u32::MAX - 99).wrapping_add(i)).collect();
    ledger.on_ack(at(300), Duration::ZERO, &ack(&all[..150]), DELAY, &mut outcome);
    assert_eq!(numbers(&outcome.acked), all[..150]);
    ledger.on_ack(at(301), Duration::ZERO, &ack(&all[40..]), DELAY, &mut outcome);
    assert_eq!((numbers(&outcome.acked), ledger.in_flight()), (Vec::from(&all[150..]), 0));
}

#[test]
fn the_delivery_rate_is_what_arrived_over_one_round_trip() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    // 1000 bytes each 100 us, acknowledged 1 ms later: 10 MB/s.
    for round in 0..50_u64 {
        let packet = packet(&ledger, 1, BYTES, at(round * 100));
        ledger.on_sent(packet, 0, false);
        if let Some(acked) = round.checked_sub(10) {
            ledger.on_ack(at(round * 100 + 1), Duration::ZERO, &ack(&[acked as u32]), DELAY, &mut outcome);
        }
    }
    let rate = outcome.delivery_rate.unwrap_or(0);
    assert!((9_900_000..=11_100_000).contains(&rate), "{rate}");
    assert!(!outcome.app_limited);
}

#[test]
fn samples_are_marked_until_the_last_packet_before_the_gap_is_acknowledged() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 2, 0);
    let last = packet(&ledger, 1, BYTES, at(2));
    ledger.on_sent(last, 0, true);
    send(&mut ledger, 1, 50);
    ledger.on_ack(at(100), Duration::ZERO, &ack(&[1]), DELAY, &mut outcome);
    assert!(!outcome.app_limited);
    ledger.on_ack(at(101), Duration::ZERO, &ack(&[1, 2, 3]), DELAY, &mut outcome);
    assert!(outcome.app_limited, "3 was sent while 2 was on its way");
    send(&mut ledger, 1, 102);
    ledger.on_ack(at(200), Duration::ZERO, &ack(&[4]), DELAY, &mut outcome);
    assert!(!outcome.app_limited);
}

#[test]
fn a_round_ends_when_a_packet_sent_after_the_last_end_is_acknowledged() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 4, 0);
    let mut ended = |ledger: &mut Ledger, number: u32| {
        ledger.on_ack(at(1_000), Duration::ZERO, &ack(&[number]), DELAY, &mut outcome);
        outcome.round_ended
    };
    assert!(ended(&mut ledger, 0));
    assert!(!ended(&mut ledger, 1));
    send(&mut ledger, 1, 10);
    assert!(!ended(&mut ledger, 3));
    assert!(ended(&mut ledger, 4));
}

#[test]
fn a_lost_packet_at_the_front_does_not_make_the_ledger_grow_without_bound() {
    let (mut ledger, mut outcome) = (Ledger::new(), AckOutcome::default());
    send(&mut ledger, 1, 0);
    for number in 1..100_000_u32 {
        send(&mut ledger, 1, u64::from(number));
        ledger.on_ack(at(u64::from(number) + 1), Duration::ZERO, &ack(&[number]), DELAY, &mut outcome);
    }
    assert!(ledger.remembered() <= 1_100, "{} entries", ledger.remembered());
}

/// What the ledger must agree with.
#[derive(Default)]
struct Model {
    packets: Vec<(SentPacket, Fate)>,
    reordering: Reordering,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    InFlight,
    Acked,
    Overtaken,
    Late,
    Lost,
    Forgotten,
}

impl Fate {
    fn state(self) -> State {
        match self {
            Self::InFlight => State::InFlight,
            Self::Acked => State::Acked,
            Self::Overtaken => State::Overtaken,
            Self::Late => State::Late,
            Self::Lost => State::Lost,
            Self::Forgotten => State::Forgotten,
        }
    }
}

impl Model {
    fn in_flight(&self) -> u64 {
        self.packets.iter().filter(|(_, fate)| *fate == Fate::InFlight).map(|(p, _)| u64::from(p.bytes)).sum()
    }

    fn newest(&self) -> Option<usize> {
        self.packets.iter().rposition(|(_, fate)| *fate == Fate::Acked)
    }

    /// The flags of `acked` say which packets an acknowledgement names, which has room for those from `from` on.
    fn on_ack(
        &mut self,
        (acked, from): (&[bool], usize),
        now: Timestamp,
        round_ended: bool,
    ) -> (Vec<u32>, Vec<u32>) {
        let (mut fresh, newest) = (Vec::new(), self.newest());
        for (index, (packet, fate)) in self.packets.iter_mut().enumerate() {
            if acked.get(index) == Some(&true) && *fate != Fate::Acked {
                if *fate != Fate::Forgotten {
                    fresh.push(packet.number.0);
                }
                if let Some(by) = newest.and_then(|newest| newest.checked_sub(index)) {
                    let (state, age) = (fate.state(), now.since(packet.sent_at));
                    self.reordering.on_overtaken(Overtaken { state, by: by as i32, age, loss_delay: DELAY });
                }
                *fate = Fate::Acked;
            }
        }
        if round_ended {
            self.reordering.on_round();
        }
        (fresh, self.detect(now, from))
    }

    /// From the oldest packet to the first that is not lost.
    fn detect(&mut self, now: Timestamp, described_from: usize) -> Vec<u32> {
        let (mut lost, newest) = (Vec::new(), self.newest().unwrap_or(0));
        let (packets, patience) = (self.reordering.packets() as usize, self.reordering.patience(DELAY));
        for index in 0..self.packets.len() {
            let later = self.packets[index + 1..].iter().filter(|(_, fate)| *fate == Fate::Acked).count();
            let (packet, fate) = &mut self.packets[index];
            if *fate != Fate::InFlight {
                continue;
            }
            if later >= 3 && index + packets <= newest && index >= described_from {
                *fate = Fate::Overtaken;
            } else if later >= 1 && now.since(packet.sent_at) >= patience {
                *fate = Fate::Late;
            } else {
                break;
            }
            lost.push(packet.number.0);
        }
        lost
    }
}

#[derive(Clone, Debug)]
enum Op {
    Send { transfer: u32, bytes: u32, app_limited: bool },
    Ack { back: usize, words: u8, mask: u64, again: u64 },
    Timeout,
    Forget { transfer: u32 },
    LoseBefore { age_us: u64 },
    Wait { us: u64 },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (1..4_u32, 0..1_500_u32, any::<bool>())
            .prop_map(|(transfer, bytes, app_limited)| Op::Send { transfer, bytes, app_limited }),
        4 => (0..80_usize, 0..4_u8, any::<u64>(), any::<u64>())
            .prop_map(|(back, words, mask, again)| Op::Ack { back, words, mask, again }),
        1 => Just(Op::Timeout),
        1 => (1..4_u32).prop_map(|transfer| Op::Forget { transfer }),
        1 => (0..20_000_u64).prop_map(|age_us| Op::LoseBefore { age_us }),
        4 => (0..3_000_u64).prop_map(|us| Op::Wait { us }),
    ]
}

/// An acknowledgement with arbitrary bits; the flags say which of the packets it names.
fn arbitrary_ack(first: u32, sent: usize, op: (usize, u8, u64, u64)) -> Option<(AckPath, Vec<bool>)> {
    let (back, words, mask, again) = op;
    let largest = sent.checked_sub(1 + back)?;
    let mut bitmap = [0; ACK_WORDS_MAX];
    for (at, word) in bitmap.iter_mut().enumerate() {
        *word = if at % 2 == 0 { mask } else { again };
    }
    let named = |index: usize| {
        let back = largest.wrapping_sub(index);
        index <= largest && back < usize::from(words) * 64 && bitmap[back / 64] >> (back % 64) & 1 == 1
    };
    let flags = (0..sent).map(named).collect();
    let largest = PacketNumber(first.wrapping_add(largest as u32));
    Some((AckPath { path: PathId(0), largest, words, bitmap }, flags))
}

proptest! {
    /// Any order of calls: the ledger agrees with the model about every packet, and the controller that hears
    /// about all of it keeps its bounds.
    #[test]
    fn the_ledger_agrees_with_the_naive_model(
        first in prop_oneof![Just(0), Just(u32::MAX - 70), any::<u32>()],
        flows in 0..100_u32,
        ops in prop::collection::vec(op(), 0..400),
    ) {
        let (mut ledger, mut model, mut outcome) = (Ledger::new(), Model::default(), AckOutcome::default());
        let settings = ControllerSettings {
            initial_rate: 0,
            flows,
            packet_bytes: u64::from(BYTES),
            standing_bytes: 100_000,
            ..ControllerSettings::TEST
        };
        let mut controller = BottleneckController::new(&settings);
        ledger.start_at(PacketNumber(first));
        let mut now = at(1);
        for op in ops {
            let mut expected = None;
            match op {
                Op::Send { transfer, bytes, app_limited } => {
                    let packet = packet(&ledger, transfer, bytes, now);
                    ledger.on_sent(packet, 0, app_limited);
                    model.packets.push((packet, Fate::InFlight));
                }
                Op::Ack { back, words, mask, again } => {
                    let Some((ack, flags)) = arbitrary_ack(first, model.packets.len(), (back, words, mask, again))
                    else { continue };
                    prop_assert!(ledger.on_ack(now, Duration::ZERO, &ack, DELAY, &mut outcome));
                    // The ledger looks for losses when something new arrived, the model always.
                    expected = Some(if flags.iter().zip(&model.packets).any(|(f, (_, fate))| *f && *fate != Fate::Acked) {
                        let from = (model.packets.len() - back).saturating_sub(usize::from(words) * 64);
                        model.on_ack((&flags, from), now, outcome.round_ended)
                    } else {
                        (Vec::new(), Vec::new())
                    });
                }
                Op::Timeout => {
                    ledger.on_timeout(now, DELAY, &mut outcome);
                    expected = Some((Vec::new(), model.detect(now, usize::MAX)));
                }
                Op::Forget { transfer } => {
                    ledger.forget(TransferId(transfer), Duration::ZERO);
                    for (packet, fate) in &mut model.packets {
                        if packet.transfer.0 == transfer && *fate == Fate::InFlight {
                            *fate = Fate::Forgotten;
                        }
                    }
                }
                Op::LoseBefore { age_us } => {
                    let before = Timestamp::from_nanos(now.as_nanos().saturating_sub(age_us * 1_000));
                    ledger.lose_before(before, &mut outcome);
                    let mut lost = Vec::new();
                    for (packet, fate) in &mut model.packets {
                        if packet.sent_at <= before && *fate == Fate::InFlight {
                            *fate = Fate::Lost;
                            lost.push(packet.number.0);
                        }
                    }
                    expected = Some((Vec::new(), lost));
                }
                Op::Wait { us } => now = now + Duration::from_micros(us),
            }
            if let Some((acked, lost)) = expected {
                prop_assert_eq!(numbers(&outcome.acked), acked);
                prop_assert_eq!(numbers(&outcome.lost), lost);
                controller.on_ack(&sample(now, &outcome, ledger.in_flight()));
            }
            prop_assert_eq!(ledger.in_flight(), model.in_flight());
            let oldest = model.packets.iter().find(|(_, fate)| *fate == Fate::InFlight).map(|(p, _)| p.sent_at);
            prop_assert_eq!(ledger.oldest_sent_at(), oldest);
            prop_assert!(controller.cwnd() >= 2 * u64::from(BYTES));
            prop_assert!(controller.pacing_rate() > 0);
        }
    }

    /// Whatever a driver reports, however absurd, the controller keeps its bounds.
    #[test]
    fn the_controller_keeps_its_bounds(
        samples in prop::collection::vec(
            (any::<u32>(), any::<Option<u32>>(), any::<u32>(), any::<u32>(), any::<Option<u64>>(), any::<(bool, bool, bool)>()),
            0..200,
        ),
        standing in any::<u64>(),
    ) {
        let settings = ControllerSettings { initial_rate: u64::MAX, standing_bytes: standing, ..ControllerSettings::TEST };
        let mut controller = BottleneckController::new(&settings);
        let mut now = Timestamp::ZERO;
        for (wait, rtt, acked, lost, delivery_rate, (app_limited, round_ended, idle)) in samples {
            now = now + Duration::from_nanos(u64::from(wait));
            if idle {
                controller.on_idle_restart(now);
            }
            controller.on_ack(&AckSample {
                now,
                rtt: rtt.map(|ns| Duration::from_nanos(u64::from(ns))),
                waited: Duration::from_nanos(u64::from(wait)),
                acked_bytes: u64::from(acked),
                lost_bytes: u64::from(lost),
                in_flight: u64::from(acked),
                delivery_rate,
                rate_bytes: u64::from(acked),
                app_limited,
                round_ended,
            });
            prop_assert!(controller.cwnd() >= 2 * 1_408);
            prop_assert!(controller.pacing_rate() > 0);
        }
    }
}

fn sample(now: Timestamp, outcome: &AckOutcome, in_flight: u64) -> AckSample {
    let bytes = |packets: &[SentPacket]| packets.iter().map(|packet| u64::from(packet.bytes)).sum();
    AckSample {
        now,
        rtt: outcome.acked.last().map(|packet| now.since(packet.sent_at)),
        waited: Duration::ZERO,
        acked_bytes: bytes(&outcome.acked),
        lost_bytes: bytes(&outcome.lost),
        in_flight,
        delivery_rate: outcome.delivery_rate,
        rate_bytes: outcome.rate_bytes,
        app_limited: outcome.app_limited,
        round_ended: outcome.round_ended,
    }
}
