//! Sends that wait for a word of the receiver, and are asked about until it comes.

use super::*;

#[test]
fn every_transfer_that_waits_for_a_grant_is_announced_in_the_end() {
    // Which one the receiver wants first is known to it alone: it must hear of all, however many block each other.
    let mut pair = Pair::connected(never);
    for transfer in 0..30 {
        pair.send(0, transfer, pattern(200_000), Reliability::Exact);
    }
    pair.run_until(Duration::from_secs(2), |pair| {
        let offered = |event: &&Event| matches!(event, Event::Offered { .. });
        pair.ends[1].events.iter().filter(offered).count() == 30
    });
}

/// A receiver that takes messages in the order of its own tags hears of each, with whatever few slots for what comes early.
#[test]
fn a_hundred_messages_are_received_last_first_though_eight_have_room() {
    let mut pair = Pair::new(never);
    for end in &mut pair.ends {
        let mut config = end.connection.config.clone();
        config.eager_bytes = 1;
        end.connection = Connection::new(config, Timestamp::ZERO);
    }
    assert_eq!(pair.ends[0].connection.config.eager_chunks(), 8);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    let message = |count| TransferId::point_to_point(count).0;
    (0..100).for_each(|count| pair.send(0, message(count), pattern(100), Reliability::Exact));
    for count in (0..100).rev() {
        let id = message(count);
        let offers = |event: &Event| matches!(event, Event::Offered { transfer, .. } if transfer.0 == id);
        pair.run_until(Duration::from_secs(4), |pair| pair.has(1, offers));
        pair.receive(1, id, 100, Contract::EXACT);
        pair.run_until(Duration::from_secs(4), |pair| pair.missing(0, id).is_some());
        assert_eq!(pair.ends[1].incoming[&TransferId(id)], pattern(100));
    }
}

/// Longer than one status describes, closed before all of it has left, and the question for the rest of the bitmap is lost.
#[test]
fn the_rest_of_a_closing_bitmap_is_asked_for_while_another_send_waits() {
    let mut pair = Pair::connected(|header, _| match header.kind {
        // Of what has not come none is acknowledged, so that the sender's window is full long before its end.
        Kind::Data => header.offset >= 1408 * 100,
        kind => kind == Kind::Probe,
    });
    let bytes = 1408 * (STATUS_WORDS_MAX * 64 + 1000);
    let deadline = Some(Duration::from_millis(5));
    let contract = Contract { floor: 0.0, deadline, repairs: false, ..Contract::EXACT };
    pair.receive(1, 1, bytes, contract);
    pair.send(0, 1, pattern(bytes), Reliability::BestEffort);
    pair.run_until(Duration::from_secs(2), |pair| pair.receipt(1, 1).is_some());
    let told = pair.now + DELAY * 4;
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= told);
    assert!(!pair.ends[0].connection.sends[0].is_all_sent() && pair.missing(0, 1).is_none());
    // The peer does not call this one, and of the first one it must be asked for what is not known yet.
    pair.send(0, 2, pattern(100), Reliability::Exact);
    pair.lose =
        |header, _| header.kind == Kind::Probe && header.offset == 0 && header.transfer == TransferId(1);
    pair.run_until(Duration::from_secs(2), |pair| pair.missing(0, 1).is_some());
    assert_eq!(pair.missing(0, 1), Some(pair.receipt(1, 1).expect("closed").missing));
}

/// The first one is not received, so that the receiver retires nothing.
#[test]
fn a_message_whose_end_was_lost_ends_however_many_came_behind_it() {
    let mut pair = Pair::connected(|header, _| {
        header.kind == Kind::Status && header.transfer == TransferId::point_to_point(1)
    });
    let id = |count| TransferId::point_to_point(count).0;
    let batches: Vec<u32> = (1..8_400).step_by(40).collect();
    for (first, end) in batches.iter().zip(&batches[1..]) {
        (*first..*end).for_each(|count| pair.send(0, id(count), pattern(10), Reliability::Exact));
        (*first..*end).for_each(|count| pair.receive(1, id(count), 10, Contract::EXACT));
        let last = id(end - 1);
        pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, last).is_some());
    }
    assert!(pair.receipt(1, id(1)).is_some() && pair.missing(0, id(1)).is_none());
    pair.lose = never;
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, id(1)).is_some());
}
