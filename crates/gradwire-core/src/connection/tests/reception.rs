//! At what rate data comes, as its receiver knows it, and what it says of what has yet to come.

use super::{never, pattern, Pair, AUTO};
use crate::{Contract, Reliability};
use core::time::Duration;

#[test]
fn how_fast_data_comes_is_known_where_it_comes_and_not_from_what_was_buffered() {
    let rate = |early: bool, bytes: usize| {
        let mut pair = Pair::connected(never);
        let data = pattern(bytes);
        if early {
            pair.send(0, 1, data.clone(), Reliability::Tolerant);
            let limit = pair.now + Duration::from_millis(20);
            pair.run_until(Duration::from_secs(1), |pair| pair.now >= limit);
        }
        pair.receive(1, 1, data.len(), AUTO);
        if !early {
            pair.send(0, 1, data, Reliability::Tolerant);
        }
        pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
        pair.ends.map(|end| end.connection.stats().reception_rate)
    };
    let [sender, receiver] = rate(false, 200_000);
    assert_eq!(sender, 0);
    // 200 KB in no less than a tenth of a millisecond and no more than the second that the test allows.
    assert!((200_000..2_000_000_000).contains(&receiver), "{receiver} bytes per second");
    assert_eq!(rate(true, 50_000), [0, 0]);
}

#[test]
fn what_a_connection_carried_for_a_while_is_the_rate_of_its_link() {
    let mut pair = Pair::connected(never);
    pair.packet_time = Duration::from_micros(200);
    let bytes = 700 * 1408;
    pair.receive(1, 1, bytes, Contract::EXACT);
    pair.send(0, 1, pattern(bytes), Reliability::Exact);
    pair.run_until(Duration::from_secs(5), |pair| pair.receipt(1, 1).is_some());
    let [sent, nothing] = pair.ends.map(|end| end.connection.stats().sustained_rate);
    // 1408 bytes in 200 us; a window of 200 of them begins and ends with an acknowledgement of a few.
    assert!((6_900_000..7_150_000).contains(&sent), "{sent}");
    assert_eq!(nothing, 0);
}

#[test]
fn small_transfers_that_wait_for_their_turn_on_a_slow_link_are_announced_once() {
    let mut pair = Pair::connected(never);
    pair.packet_time = Duration::from_micros(400);
    // Carried within 180 ms: of those that wait for longer than 100 ms many are announced again.
    let (transfers, bytes) = (30, 15 * 1408);
    (1..=transfers).for_each(|transfer| pair.receive(1, transfer, bytes, Contract::EXACT));
    (1..=transfers).for_each(|transfer| pair.send(0, transfer, pattern(bytes), Reliability::Exact));
    pair.run_until(Duration::from_secs(5), |pair| (1..=transfers).all(|id| pair.receipt(1, id).is_some()));
    let [sender, receiver] = pair.ends.map(|end| end.connection.stats());
    // An announcement and an end for each, and an acknowledgement for two or three packets.
    let said = receiver.control_sent;
    assert!(said < u64::from(transfers) * 2 + sender.packets_sent / 2, "{said}, {}", sender.packets_sent);
}
