//! Words of the receiver that are lost while other transfers go on.

use super::*;
use std::cell::Cell;
use std::thread_local;

const CHUNK: usize = 1408;
/// Of the transfer that goes on meanwhile.
const LONG: usize = CHUNK * 20_000;

thread_local! {
    /// How many packets the network still loses of those that a test is about.
    static LEFT_TO_LOSE: Cell<u32> = const { Cell::new(0) };
    /// Questions about the first transfer, and those of them that ask for an acknowledgement too.
    static ASKED: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
}

fn loses(count: u32) {
    LEFT_TO_LOSE.set(count);
    ASKED.set((0, 0));
}

fn note(header: &Header) {
    if header.kind == Kind::Probe && header.transfer == TransferId(1) {
        let (all, settle) = ASKED.get();
        ASKED.set((all + 1, settle + u32::from(header.flags.contains(Flags::ACK_NOW))));
    }
}

fn lose(is_one: bool) -> bool {
    let left = LEFT_TO_LOSE.get();
    let lost = is_one && left > 0;
    LEFT_TO_LOSE.set(left - u32::from(lost));
    lost
}

fn status_of_the_first(header: &Header, _: u64) -> bool {
    note(header);
    lose(header.kind == Kind::Status && header.transfer == TransferId(1))
}

/// The last packets of the first transfer, and the question behind them.
fn tail_of_the_first(header: &Header, _: u64) -> bool {
    note(header);
    let is_tail = header.kind == Kind::Data && header.offset as usize >= CHUNK * 98;
    lose(header.transfer == TransferId(1) && (is_tail || header.kind == Kind::Probe))
}

/// A pair of which all that these tests send leaves before a word of the receiver.
fn with_room() -> Pair {
    let mut pair = Pair::new(never);
    for end in &mut pair.ends {
        let mut config = end.connection.config.clone();
        config.eager_bytes = 1 << 18;
        end.connection = Connection::new(config, Timestamp::ZERO);
    }
    pair
}

/// A pair that has sent so much of the long transfer that it has a round trip to go by.
fn at_work(packet_time: Duration, lose: Lose) -> Pair {
    let mut pair = Pair { packet_time, ..with_room() };
    pair.receive(1, 2, LONG, Contract::EXACT);
    pair.send_at(9, 0, 2, pattern(LONG), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[1].incoming[&TransferId(2)][LONG / 10] != 0);
    pair.lose = lose;
    pair
}

fn long_goes_on(pair: &Pair) -> bool {
    pair.missing(0, 2).is_none()
}

// test of: auto/repaired-in-round-trips
#[test]
fn an_end_that_is_lost_is_asked_for_while_another_transfer_goes_on() {
    loses(3);
    let mut pair = at_work(Duration::from_micros(12), status_of_the_first);
    pair.receive(1, 1, 100, Contract::EXACT);
    pair.send(0, 1, pattern(100), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    let ended = pair.now;
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    let took = pair.now.since(ended);
    let rtt = pair.ends[0].connection.paths.at(0).rtt.smoothed();
    assert!(long_goes_on(&pair), "it waited for the other one");
    // Three times in vain, with pauses of one, two, four and eight answers' times.
    assert!(took < rtt * 2 * 15, "{took:?} with a round trip of {rtt:?}");
    assert_eq!(ASKED.get(), (3, 0), "the lost one was nobody's answer");
    assert_eq!(pair.ends[0].connection.stats().packets_lost, 0, "a question that settles nothing");
}

// test of: auto/repaired-in-round-trips
#[test]
fn the_lost_tail_of_a_tolerant_transfer_is_asked_about_while_another_one_goes_on() {
    loses(3);
    let mut pair = at_work(Duration::from_micros(12), tail_of_the_first);
    let contract = Contract { deadline: None, ..AUTO };
    pair.receive(1, 1, CHUNK * 100, contract);
    pair.send(0, 1, pattern(CHUNK * 100), Reliability::Tolerant);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    assert_eq!(LEFT_TO_LOSE.get(), 0);
    assert!(long_goes_on(&pair), "it waited for the other one");
    assert_eq!(pair.receipt(1, 1).expect("closed").received_bytes, (CHUNK * 98) as u64);
}

#[test]
fn a_peer_that_has_not_called_a_transfer_is_asked_ten_times_in_a_second() {
    loses(0);
    let mut pair = at_work(Duration::from_micros(50), status_of_the_first);
    let late = pair.now + Duration::from_millis(500);
    pair.send(0, 1, pattern(100), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= late);
    assert!(long_goes_on(&pair));
    let (asked, settle) = ASKED.get();
    assert!((4..=6).contains(&asked) && settle == 0, "{asked} times");
    // And hears the end, though the first word of it is lost.
    loses(1);
    pair.receive(1, 1, 100, Contract::EXACT);
    let called = pair.now;
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    assert!(long_goes_on(&pair) && LEFT_TO_LOSE.get() == 0);
    assert!(pair.now.since(called) <= Duration::from_millis(110));
}

/// The peer calls late, and does not hear that all has been sent: what it says meanwhile is no reason to ask later.
// test of: auto/repaired-in-round-trips
#[test]
fn a_late_peer_that_misses_the_end_is_told_of_it_a_round_trip_after_it_has_called() {
    loses(3);
    let mut pair = at_work(Duration::from_micros(50), tail_of_the_first);
    pair.send(0, 1, pattern(CHUNK * 100), Reliability::Tolerant);
    let late = pair.now + Duration::from_millis(50);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= late);
    assert_eq!(LEFT_TO_LOSE.get(), 0);
    let contract = Contract { deadline: None, ..AUTO };
    pair.receive(1, 1, CHUNK * 100, contract);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    assert!(long_goes_on(&pair), "it waited for the other one");
    let rtt = pair.ends[0].connection.paths.at(0).rtt.smoothed();
    let took = pair.now.since(late);
    assert!(took < rtt * 4, "{took:?} with a round trip of {rtt:?}");
}

/// Those that the peer has not called take turns with the one that it has.
#[test]
fn over_a_long_path_every_transfer_that_waits_is_asked_about() {
    loses(0);
    let mut pair = at_work(Duration::from_micros(300), status_of_the_first);
    pair.delay = Duration::from_millis(40);
    let called = pair.now + Duration::from_millis(500);
    (100..160).for_each(|transfer| pair.send(0, transfer, pattern(100), Reliability::Exact));
    pair.send(0, 1, pattern(100), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= called);
    loses(1);
    pair.receive(1, 1, 100, Contract::EXACT);
    pair.run_until(Duration::from_secs(2), |pair| pair.missing(0, 1).is_some());
    assert!(long_goes_on(&pair) && LEFT_TO_LOSE.get() == 0);
}

/// Of many that wait it asks about a few at a time.
#[test]
fn questions_for_words_leave_a_few_at_a_time() {
    loses(0);
    let mut pair = at_work(Duration::from_micros(50), never);
    let started = pair.now;
    let before = pair.ends[0].connection.stats().probes_sent;
    (100..200).for_each(|transfer| pair.send(0, transfer, pattern(100), Reliability::Exact));
    let while_ms = Duration::from_millis(400);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= started + while_ms);
    assert!(long_goes_on(&pair));
    let asked = pair.ends[0].connection.stats().probes_sent - before;
    let pause = pair.ends[0].connection.paths.at(0).rtt.smoothed();
    let most = 8 * (while_ms.as_micros() / pause.as_micros() + 1);
    assert!((100..=most.min(500) as u64).contains(&asked), "{asked} questions, and {most} in such pauses");
}
