//! A path that brings packets out of order and loses none is no path that loses.

use super::*;

/// Of a datagram at 1 Gbit/s.
const PACKET_TIME: Duration = Duration::from_micros(12);
const CHUNK: usize = 1408;
/// So much is carried before anything is counted: a path's order has to be learned.
const LEARNING: usize = 4_000 * CHUNK;
const MEASURED: usize = 20_000 * CHUNK;

/// How much later than others each of these data packets comes.
fn data(transmit: &Transmit, late: impl Fn(u32) -> u32) -> Duration {
    match transmit.header.kind {
        Kind::Data => PACKET_TIME * late(transmit.header.packet_number.0),
        _ => Duration::ZERO,
    }
}

/// Two lines, of which each takes a message of 44 packets by turns: packets come up to 25 places late.
fn messages_by_turns(transmit: &Transmit) -> Duration {
    data(transmit, |number| number / 44 % 2 * 25)
}

/// Two lines, of which each takes a packet by turns, and one is longer: all of it comes 16 places late.
fn packets_by_turns(transmit: &Transmit) -> Duration {
    data(transmit, |number| number % 2 * 16)
}

/// Many lines of which none is as long as another: a quarter of the packets comes 4 to 30 places late.
fn scattered(transmit: &Transmit) -> Duration {
    data(transmit, |number| {
        let dice = number.wrapping_mul(2_654_435_761) >> 16;
        if dice % 4 == 0 {
            4 + dice / 4 % 27
        } else {
            0
        }
    })
}

fn in_order(_: &Transmit) -> Duration {
    Duration::ZERO
}

type Late = fn(&Transmit) -> Duration;

const OUT_OF_ORDER: [(&str, Late); 3] = [
    ("messages by turns", messages_by_turns),
    ("packets by turns", packets_by_turns),
    ("scattered", scattered),
];

fn on_link(late: Late, lose: Lose) -> Pair {
    let mut pair = Pair { packet_time: PACKET_TIME, late, ..Pair::new(never) };
    pair.run_until(Duration::from_secs(1), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    pair.lose = lose;
    pair
}

/// One transfer after the other, of so many bytes each; how long that took, and the packets sent and sent again for it.
fn carry(pair: &mut Pair, ids: core::ops::Range<u32>, bytes: usize) -> (Duration, u64, u64) {
    let (before, started) = (pair.ends[0].connection.stats(), pair.now);
    for id in ids {
        pair.receive(1, id, bytes, Contract::EXACT);
        pair.send(0, id, pattern(bytes), Reliability::Exact);
        pair.run_until(Duration::from_secs(60), |pair| pair.missing(0, id).is_some());
    }
    let after = pair.ends[0].connection.stats();
    let again = after.packets_retransmitted - before.packets_retransmitted;
    (pair.now.since(started), after.packets_sent - before.packets_sent, again)
}

fn learned(late: Late, lose: Lose) -> Pair {
    let mut pair = on_link(late, lose);
    carry(&mut pair, 1..2, LEARNING);
    pair
}

#[test]
fn once_its_order_is_known_a_path_that_reorders_sends_next_to_nothing_twice_and_is_as_fast_as_one_that_does_not(
) {
    let (usual, ..) = carry(&mut learned(in_order, never), 2..3, MEASURED);
    for (name, late) in OUT_OF_ORDER {
        let (took, sent, again) = carry(&mut learned(late, never), 2..3, MEASURED);
        assert!(again * 1_000 <= sent * 3, "{name}: {again} of {sent} packets went twice");
        assert!(took <= usual * 11 / 10, "{name}: {took:?} instead of {usual:?}");
    }
}

#[test]
fn to_learn_its_order_costs_a_few_hundred_packets() {
    for (name, late) in OUT_OF_ORDER {
        let (_, _, again) = carry(&mut on_link(late, never), 1..2, LEARNING);
        assert!(again <= 400, "{name}: {again} packets went twice");
    }
}

/// Each ends with a question, which may overtake what it asks about.
#[test]
fn the_question_at_the_end_of_a_transfer_overtakes_packets_that_are_not_lost() {
    for (name, late) in OUT_OF_ORDER {
        let (_, sent, again) = carry(&mut learned(late, never), 2..202, 64 * CHUNK);
        assert!(again * 1_000 <= sent * 3, "{name}: {again} of {sent} packets went twice");
    }
}

#[test]
fn what_is_lost_on_a_path_that_reorders_goes_again_and_little_else_does() {
    let lose: Lose = |header, dice| lose_data_one_in(header, dice, 100);
    for (name, late) in OUT_OF_ORDER {
        let mut pair = learned(late, lose);
        let (_, sent, again) = carry(&mut pair, 2..3, MEASURED);
        assert!((sent * 7 / 1_000..=sent * 15 / 1_000).contains(&again), "{name}: {again} of {sent} packets");
        assert_eq!(pair.ends[1].incoming[&TransferId(2)], pattern(MEASURED), "{name}");
    }
}

#[test]
fn where_packets_keep_their_order_what_is_lost_and_what_comes_twice_teaches_nothing() {
    let mut pair = on_link(in_order, |header, dice| lose_data_one_in(header, dice, 20));
    pair.receive(1, 1, LEARNING, Contract::EXACT);
    pair.send(0, 1, pattern(LEARNING), Reliability::Exact);
    for _ in 0..10 {
        pair.run_until(Duration::from_secs(1), |pair| pair.wire.len() > 20);
        let copies: Vec<Vec<u8>> =
            pair.wire.iter().filter(|on_it| on_it.1 == 1).map(|it| it.2.clone()).collect();
        let later = pair.now + DELAY * 3;
        pair.run_until(Duration::from_secs(1), |pair| pair.now >= later);
        for copy in copies {
            _ = pair.ends[1].connection.handle_datagram(pair.now, &copy);
        }
    }
    pair.run_until(Duration::from_secs(60), |pair| pair.missing(0, 1).is_some());
    let stats = (pair.ends[0].connection.stats(), pair.ends[1].connection.stats());
    assert!(stats.0.packets_retransmitted > 100 && stats.1.packets_duplicate > 100, "{stats:?}");
    assert!(!pair.ends[0].connection.paths.at(0).ledger.reorders());
}

/// All of the last quarter, so that nothing of this transfer comes behind it.
#[test]
fn a_lost_tail_on_a_path_that_reorders_is_found_within_a_few_round_trips() {
    for (name, late) in OUT_OF_ORDER {
        let mut pair = learned(late, |header, _| {
            let is_tail = header.offset >= 48 * CHUNK as u32 && header.transfer == TransferId(2);
            header.kind == Kind::Data && is_tail && !header.flags.contains(Flags::RETRANSMITTED)
        });
        let (took, ..) = carry(&mut pair, 2..3, 64 * CHUNK);
        assert!(took < DELAY * 2 * 6, "{name}: {took:?}");
    }
}
