//! What a lost last packet costs where the path is much shorter than what a receiver may hold back.

use super::*;
use std::cell::Cell;
use std::thread_local;

const ROUND_TRIP: Duration = Duration::from_micros(20);
/// How many are lost of those that one test asks.
const QUESTIONS: u32 = 5;

/// The time that six packets take, and how often was asked.
fn six_packets(lose: Lose) -> (Duration, u64) {
    let mut pair = Pair { delay: ROUND_TRIP / 2, ..Pair::new(lose) };
    pair.run_until(Duration::from_secs(1), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    let started = pair.now;
    pair.receive(1, 1, 1408 * 6, Contract::EXACT);
    pair.send(0, 1, pattern(1408 * 6), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    (pair.now.since(started), pair.ends[0].connection.stats().probes_sent)
}

// test of: auto/repaired-in-round-trips
#[test]
fn a_lost_last_packet_is_asked_about_before_the_receiver_would_acknowledge_what_came() {
    let held_back = crate::config::tests::config().ack_delay_max;
    let (took, asked) = six_packets(|header, _| {
        let is_last = header.offset >= 1408 * 5 && !header.flags.contains(Flags::RETRANSMITTED);
        header.kind == Kind::Data && is_last
    });
    // One until the first packets are acknowledged, one and what threads may be late until it is asked, one to the answer, one for
    // the packet and the word that all is here.
    assert!(took <= ROUND_TRIP * 4 + Duration::from_micros(100) && took < held_back, "it took {took:?}");
    assert_eq!(asked, 1);
}

#[test]
fn nobody_asks_where_nothing_is_lost() {
    assert_eq!(six_packets(never), (ROUND_TRIP, 0));
}

/// The queue before the receiver has become longer than the longest pause between two questions, so that each answer comes when a
/// later one was asked: a flow whose whole window was lost waited until the queue was shorter.
// test of: auto/repaired-in-round-trips
#[test]
fn what_is_lost_is_known_from_the_first_answer_though_other_questions_were_asked_since() {
    let mut pair = Pair::connected(|header, _| {
        header.kind == Kind::Data && !header.flags.contains(Flags::RETRANSMITTED)
    });
    pair.receive(1, 1, 1408 * 2, Contract::EXACT);
    pair.delay = Duration::from_millis(400);
    let started = pair.now;
    pair.send(0, 1, pattern(1408 * 2), Reliability::Exact);
    pair.run_until(Duration::from_secs(20), |pair| pair.missing(0, 1).is_some());
    let took = pair.now.since(started);
    // The first answer, what it asked for again, and the word that all is here.
    assert!(took <= pair.delay * 4 + Duration::from_millis(100), "it took {took:?}");
    assert!(pair.ends[0].connection.stats().probes_sent > 2, "the round trip is longer than several pauses");
}

// test of: auto/repaired-in-round-trips
#[test]
fn a_new_transfer_is_asked_about_soon_however_often_the_peer_had_nothing_to_say_of_an_earlier_one() {
    let mut pair = Pair::connected(|header, _| {
        let is_second = header.transfer == TransferId(2) && header.kind == Kind::Data;
        is_second && !header.flags.contains(Flags::RETRANSMITTED)
    });
    // The peer has called neither.
    pair.send(0, 1, pattern(100), Reliability::Exact);
    let late = pair.now + Duration::from_millis(700);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= late);
    let started = pair.now;
    pair.send(0, 2, pattern(100), Reliability::Exact);
    let again = |pair: &Pair| pair.ends[0].connection.stats().packets_retransmitted > 0;
    pair.run_until(Duration::from_secs(1), again);
    let took = pair.now.since(started);
    assert!(took <= DELAY * 2 * 7, "it took {took:?}");
}

thread_local! {
    /// Questions that the network has lost.
    static LOST_QUESTIONS: Cell<u32> = const { Cell::new(0) };
}

/// Seed 1795983176036 of the swarm, made small: the answer names a packet of a transfer that has ended since, which shows the one before it
/// to be lost. That was no progress, so that a repair that was lost too waited for all of the pause that lost questions had made.
// test of: auto/repaired-in-round-trips
#[test]
fn a_loss_that_an_answer_shows_without_acknowledging_anything_begins_the_pause_anew() {
    LOST_QUESTIONS.set(0);
    let mut pair = Pair::connected(|header, _| match header.kind {
        Kind::Data => header.transfer == TransferId(1),
        Kind::Ack => !header.flags.contains(Flags::REPLY),
        Kind::Probe => LOST_QUESTIONS.replace(LOST_QUESTIONS.get() + 1) < QUESTIONS,
        _ => false,
    });
    for transfer in [1, 2] {
        pair.receive(1, transfer, 100, Contract::EXACT);
        pair.send(0, transfer, pattern(100), Reliability::Exact);
    }
    let repairs = |count| move |pair: &Pair| pair.ends[0].connection.stats().packets_retransmitted >= count;
    pair.run_until(Duration::from_secs(1), repairs(1));
    assert!(LOST_QUESTIONS.get() > QUESTIONS && pair.missing(0, 2).is_some());
    let repaired_at = pair.now;
    pair.run_until(Duration::from_secs(1), repairs(2));
    let took = pair.now.since(repaired_at);
    assert!(took <= DELAY * 2 * 7, "it took {took:?}");
}
