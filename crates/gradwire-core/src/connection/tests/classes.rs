//! A network with a queue for each traffic class, the most urgent served first (MLT section 5.2).

use super::*;
use crate::{TrafficClass, TransferTags};
use std::cell::Cell;

const CHUNK: usize = 1408;
const CHUNKS: usize = 200;
/// How long the less urgent class waits while there is anything more urgent.
const BEHIND: Duration = Duration::from_millis(5);

fn pair(class_queues: u8, lose: Lose) -> Pair {
    let mut pair = Pair { packet_time: Duration::from_micros(2), ..Pair::new(lose) };
    for end in &mut pair.ends {
        let config = ConnectionConfig { class_queues, ..end.connection.config.clone() };
        end.connection = Connection::new(config, Timestamp::ZERO);
    }
    pair.run_until(Duration::from_secs(5), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    pair.late = behind;
    pair
}

/// How much later it arrives than what is most urgent.
fn behind(transmit: &Transmit) -> Duration {
    match transmit.mark.class {
        TrafficClass::Data(class) => BEHIND * u32::from(class.min(2)),
        TrafficClass::Control => Duration::ZERO,
    }
}

fn post(pair: &mut Pair, transfer: u32, class: u8) {
    post_so_many(pair, transfer, class, CHUNKS);
}

fn post_so_many(pair: &mut Pair, transfer: u32, class: u8, chunks: usize) {
    pair.receive(1, transfer, CHUNK * chunks, Contract::EXACT);
    let transfer = TransferId(transfer);
    pair.ends[0].outgoing.insert(transfer, pattern(CHUNK * chunks));
    let tags = TransferTags { class, important: None };
    let request = SendTransfer { tags, ..SendTransfer::exact(transfer, (CHUNK * chunks) as u64, [1; 16]) };
    pair.ends[0].connection.send(pair.now, request).expect("a fresh transfer");
}

/// Back layers leave first, and front layers arrive first: packets lost, and sent again.
fn back_layers_then_front_layers(class_queues: u8, lose: Lose) -> (u64, u64) {
    let mut pair = pair(class_queues, lose);
    for transfer in [1, 2, 3] {
        post(&mut pair, transfer, 1);
        post(&mut pair, 10 + transfer, 0);
    }
    pair.run_until(Duration::from_secs(10), |pair| {
        [1, 2, 3, 11, 12, 13].iter().all(|transfer| pair.missing(0, *transfer).is_some())
    });
    for transfer in [1, 2, 3, 11, 12, 13] {
        assert_eq!(pair.ends[1].incoming[&TransferId(transfer)], pattern(CHUNK * CHUNKS));
    }
    let stats = pair.ends[0].connection.stats();
    (stats.packets_lost, stats.packets_retransmitted)
}

// test of: mlt/switch-queues
#[test]
fn what_urgent_packets_overtake_is_not_lost() {
    let (lost, again) = back_layers_then_front_layers(0, never);
    assert!(lost > 100 && again > 100, "{lost} and {again}: nothing was overtaken");
    assert_eq!(back_layers_then_front_layers(2, never), (0, 0));
}

/// A back layer of so many packets waits 20 ms behind the front layers of a fast link: packets lost, and sent again.
fn far_behind(lose: Lose) -> (u64, u64) {
    let mut pair = pair(2, lose);
    pair.late = |transmit| behind(transmit) * 4;
    let long = 15_000;
    post_so_many(&mut pair, 1, 0, long);
    pair.run_until(Duration::from_secs(10), |pair| pair.missing(0, 1).is_some());
    // Both at once, so that nothing pauses between them.
    post_so_many(&mut pair, 2, 1, 2 * CHUNKS);
    pair.run_until(Duration::from_secs(1), |pair| {
        pair.ends[0]
            .connection
            .sends
            .iter()
            .all(|send| send.request.transfer != TransferId(2) || send.is_all_sent())
    });
    post_so_many(&mut pair, 3, 0, long);
    pair.run_until(Duration::from_secs(10), |pair| {
        [2, 3].iter().all(|transfer| pair.missing(0, *transfer).is_some())
    });
    let stats = pair.ends[0].connection.stats();
    (stats.packets_lost, stats.packets_retransmitted)
}

/// A back layer that is coming in, with thousands of its packets under way, when front layers overtake these.
fn in_the_middle(lose: Lose) -> (u64, u64) {
    let mut pair = pair(2, lose);
    let long = 60_000;
    post_so_many(&mut pair, 2, 1, long);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[1].connection.stats().packets_received > 40_000);
    let under_way =
        pair.ends[0].connection.stats().packets_sent - pair.ends[1].connection.stats().packets_received;
    assert!(under_way > 2_000, "{under_way} packets");
    post_so_many(&mut pair, 3, 0, long);
    pair.run_until(Duration::from_secs(10), |pair| {
        [2, 3].iter().all(|transfer| pair.missing(0, *transfer).is_some())
    });
    let stats = pair.ends[0].connection.stats();
    (stats.packets_lost, stats.packets_retransmitted)
}

// test of: mlt/switch-queues
#[test]
fn what_comes_in_when_thousands_of_urgent_packets_overtake_the_rest_is_not_lost() {
    assert_eq!(in_the_middle(never), (0, 0));
    assert_eq!(in_the_middle(two_of_both), (4, 4));
}

/// Of the back layer and of the front layers that overtake it.
fn two_of_both(header: &Header, _: u64) -> bool {
    let is_lost = [50, 120].contains(&(header.offset as usize / CHUNK)) && header.transfer != TransferId(1);
    is_lost && header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED)
}

// test of: mlt/switch-queues
#[test]
fn what_is_lost_behind_thousands_of_urgent_packets_is_sent_again_once() {
    assert_eq!(far_behind(two_of_both), (4, 4));
}

fn two_of_each_class(header: &Header, _: u64) -> bool {
    let is_lost = [50, 120].contains(&(header.offset as usize / CHUNK));
    let in_both = [1, 11].contains(&header.transfer.0);
    in_both && is_lost && header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED)
}

/// The last packets, and the question behind them.
fn tails(header: &Header, dice: u64) -> bool {
    let is_tail = header.kind == Kind::Data && header.offset as usize >= CHUNK * (CHUNKS - 3);
    is_tail && !header.flags.contains(Flags::RETRANSMITTED) || header.kind == Kind::Probe && dice % 2 == 0
}

// test of: mlt/switch-queues
#[test]
fn what_is_lost_of_any_class_is_sent_again_once() {
    assert_eq!(back_layers_then_front_layers(2, two_of_each_class), (4, 4));
    assert_eq!(back_layers_then_front_layers(2, tails), (18, 18));
}

/// Everything of the less urgent transfer but its first packet, once.
fn all_of_the_first(header: &Header, _: u64) -> bool {
    let is_first_time = header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED);
    header.transfer == TransferId(1) && is_first_time && header.offset > 0
}

/// The window is full of what was lost, and the only other transfer waits for a peer that does not call it.
#[test]
fn what_is_lost_of_a_less_urgent_class_is_known_though_a_more_urgent_transfer_is_asked_about() {
    let mut pair = pair(2, all_of_the_first);
    let transfer = TransferId(2);
    pair.ends[0].outgoing.insert(transfer, pattern(CHUNK));
    pair.ends[0]
        .connection
        .send(pair.now, SendTransfer::exact(transfer, CHUNK as u64, [1; 16]))
        .expect("fresh");
    pair.run_until(Duration::from_secs(1), |pair| !pair.ends[0].connection.sends[0].is_on_its_way());
    post_so_many(&mut pair, 1, 1, 10 * CHUNKS);
    let posted = pair.now;
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[0].connection.stats().packets_retransmitted > 0);
    let took = pair.now.since(posted);
    assert!(took < BEHIND * 10, "it took {took:?}");
}

std::thread_local! {
    static LOST_THE_QUESTION: Cell<bool> = const { Cell::new(false) };
}

/// The last packets of the first transfer, and the question behind them.
fn tail_and_its_question(header: &Header, _: u64) -> bool {
    let is_tail = header.kind == Kind::Data && header.offset as usize >= CHUNK * (CHUNKS - 3);
    let is_first_time = is_tail && !header.flags.contains(Flags::RETRANSMITTED);
    let is_of_the_end = header.kind == Kind::Probe && header.flags.contains(Flags::ALL_SENT);
    header.transfer == TransferId(1) && (is_first_time || is_of_the_end && !LOST_THE_QUESTION.replace(true))
}

/// The acknowledgements of a more urgent transfer that goes on tell nothing.
#[test]
fn a_lost_tail_of_a_less_urgent_class_is_asked_about_while_a_more_urgent_transfer_goes_on() {
    let mut pair = pair(2, tail_and_its_question);
    let posted = pair.now;
    post(&mut pair, 1, 1);
    let long = CHUNK * 50_000;
    pair.receive(1, 2, long, Contract::EXACT);
    pair.send_at(9, 0, 2, pattern(long), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    assert!(LOST_THE_QUESTION.get());
    let took = pair.now.since(posted);
    assert!(took < BEHIND * 10, "it took {took:?}");
    assert!(pair.missing(0, 2).is_none(), "it waited for the other one");
}

fn last_of_three(header: &Header, _: u64) -> bool {
    let is_last = header.kind == Kind::Data && header.offset as usize >= CHUNK * 2;
    header.transfer == TransferId(2) && is_last && !header.flags.contains(Flags::RETRANSMITTED)
}

/// A less urgent transfer waits in the network for a second, and so does every question about it.
#[test]
fn what_is_lost_of_an_urgent_class_waits_for_no_less_urgent_one() {
    let mut pair = pair(2, last_of_three);
    pair.late = |transmit| behind(transmit) * 200;
    post_so_many(&mut pair, 1, 1, 5);
    post_so_many(&mut pair, 2, 0, 3);
    let posted = pair.now;
    pair.run_until(Duration::from_secs(3), |pair| pair.missing(0, 2).is_some());
    let took = pair.now.since(posted);
    assert!(took < DELAY * 2 * 10, "it took {took:?}");
}

/// Of every reliability, in four classes, of which the last two share a queue; half of them are called late. A twentieth of everything is lost.
#[test]
fn whatever_is_lost_everything_ends_with_and_without_queues_for_classes() {
    let kinds = [Reliability::Exact, Reliability::Tolerant, Reliability::Deferred, Reliability::BestEffort];
    for seed in 1..=60 {
        let mut pair = pair(3, |_, dice| dice % 20 == 0);
        pair.seed = seed;
        if seed % 2 == 0 {
            pair.late = |_| Duration::ZERO;
        }
        let called = pair.now + Duration::from_millis(30);
        let chunks = |transfer: u32| (transfer as usize * 37 + seed as usize * 11) % 190 + 1;
        let contract_of = |transfer: u32| match kinds[transfer as usize % 4] {
            Reliability::Exact => Contract::EXACT,
            _ => Contract { loss_bound: 0.3, floor: 0.0, ..AUTO },
        };
        for transfer in 1..=24_u32 {
            let bytes = CHUNK * chunks(transfer);
            if transfer % 2 == 0 {
                pair.receive(1, transfer, bytes, contract_of(transfer));
            }
            let id = TransferId(transfer);
            pair.ends[0].outgoing.insert(id, pattern(bytes));
            let tags = TransferTags { class: (transfer / 4 % 4) as u8, important: None };
            let reliability = kinds[transfer as usize % 4];
            let request =
                SendTransfer { tags, reliability, ..SendTransfer::exact(id, bytes as u64, [1; 16]) };
            pair.ends[0].connection.send(pair.now, request).expect("a fresh transfer");
        }
        pair.run_until(Duration::from_secs(1), |pair| pair.now >= called);
        (1..=24).step_by(2).for_each(|transfer| {
            pair.receive(1, transfer, CHUNK * chunks(transfer), contract_of(transfer));
        });
        pair.run_until(Duration::from_secs(5), |pair| {
            (1..=24).all(|transfer| pair.missing(0, transfer).is_some())
        });
    }
}
