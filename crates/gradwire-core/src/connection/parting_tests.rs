//! How an association ends, and what must not outlive a transfer.

use super::tests::{end, lose_data_one_in, never, pattern, Pair, AUTO};
use super::*;
use crate::{Contract, Reliability};
use core::time::Duration;
use gradwire_wire::{ConnectionId, Header, Kind};

#[test]
fn a_peer_that_leaves_says_first_which_values_of_a_tolerant_send_counted() {
    let mut pair = Pair::connected(never);
    pair.lose = |header, dice| lose_data_one_in(header, dice, 10) || header.kind == Kind::Status;
    let data = pattern(30_000);
    pair.receive(1, 1, data.len(), Contract { loss_bound: 0.5, ..AUTO });
    pair.send(0, 1, data.clone(), Reliability::Tolerant);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    pair.lose = |_, dice| dice % 3 == 0;
    let now = pair.now;
    pair.ends[1].connection.leave(now);
    pair.run_until(Duration::from_secs(1), |pair| {
        pair.ends[1].connection.is_drained() && pair.has(0, |event| *event == Event::PeerLeft)
    });
    let mut expected = data;
    let missing = pair.missing(0, 1).expect("concluded");
    assert!(!missing.is_empty(), "the link lost packets");
    missing.iter().for_each(|range| expected[range.start as usize..range.end as usize].fill(0));
    assert_eq!(pair.ends[1].incoming[&TransferId(1)], expected);
}

#[test]
fn what_a_peer_that_left_never_said_did_not_count() {
    let mut pair = Pair::connected(never);
    // Its goodbye comes through, its answers do not.
    pair.lose = |header, _| matches!(header.kind, Kind::Status | Kind::Ack);
    pair.receive(1, 1, 8_000, AUTO);
    pair.send(0, 1, pattern(8_000), Reliability::Tolerant);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    // It never took this one.
    pair.send(0, 2, pattern(5_000), Reliability::Tolerant);
    let now = pair.now;
    pair.ends[1].connection.leave(now);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, |event| *event == Event::PeerLeft));
    let all = |pair: &Pair, transfer, bytes| {
        pair.missing(0, transfer).is_some_and(|all| all.iter().eq([&(0..bytes)]))
    };
    assert!(all(&pair, 1, 8_000) && all(&pair, 2, 5_000));
    pair.send(0, 3, pattern(10), Reliability::Tolerant);
    pair.run_until(Duration::ZERO, |pair| all(pair, 3, 10));
}

#[test]
fn other_settings_are_reported_once_however_many_hellos_say_so() {
    let mut connection = end(1, 2).connection;
    let mut datagram = Header::control(Kind::Hello, ConnectionId::new(1).expect("fits")).encode().to_vec();
    datagram.extend([5; 12]);
    for _ in 0..1_000 {
        assert!(connection.handle_datagram(Timestamp::ZERO, &datagram).is_err());
    }
    let events: Vec<Event> = core::iter::from_fn(|| connection.poll_event()).collect();
    assert_eq!(events, [Event::HelloMismatch { theirs: 0x0505_0505_0505_0505 }]);
}

#[test]
fn who_says_back_the_word_of_a_hello_is_not_the_peer_and_who_says_its_own_is() {
    let connected = |words: [u64; 4]| {
        let mut pair = Pair::new(never);
        for (end, words) in pair.ends.iter_mut().zip(words.chunks(2)) {
            let hello = crate::HelloWords { says: words[0], expects: words[1] };
            let config = crate::ConnectionConfig { hello, ..end.connection.config.clone() };
            end.connection = crate::Connection::new(config, Timestamp::ZERO);
        }
        // Many hellos later, of both ends.
        pair.run_until(Duration::from_secs(2), |pair| pair.now > Timestamp::ZERO + Duration::from_secs(1));
        pair.ends.map(|end| end.connection.is_connected())
    };
    assert_eq!(connected([5, 6, 6, 5]), [true, true]);
    assert_eq!(connected([5, 6, 5, 6]), [false, false]);
    assert_eq!(connected([5, 6, 6, 7]), [false, false], "each must have the other's");
}

#[test]
fn a_copy_never_names_a_chunk_of_an_earlier_transfer_with_the_same_number() {
    let mut pair = Pair::connected(never);
    pair.receive(1, 1, 10_000, Contract::EXACT);
    pair.send(0, 1, pattern(10_000), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[0].connection.latest_sent.is_some());
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    assert_eq!(pair.ends[0].connection.latest_sent, None);
}
