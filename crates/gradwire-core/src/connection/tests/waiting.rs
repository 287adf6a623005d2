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
    let mut pair = with_messages(100);
    let message = |count| TransferId::point_to_point(count).0;
    for count in (0..100).rev() {
        let id = message(count);
        let offers = |event: &Event| matches!(event, Event::Offered { transfer, .. } if transfer.0 == id);
        pair.run_until(Duration::from_secs(4), |pair| pair.has(1, offers));
        pair.receive(1, id, 100, Contract::EXACT);
        pair.run_until(Duration::from_secs(4), |pair| pair.missing(0, id).is_some());
        assert_eq!(pair.ends[1].incoming[&TransferId(id)], pattern(100));
    }
}

/// A pair with room for eight messages that nobody has asked for, of which the first end sends so many.
fn with_messages(messages: u32) -> Pair {
    let mut pair = Pair::new(never);
    for end in &mut pair.ends {
        let mut config = end.connection.config.clone();
        config.eager_bytes = 1;
        end.connection = Connection::new(config, Timestamp::ZERO);
    }
    assert_eq!(pair.ends[0].connection.config.eager_chunks(), 8);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    let id = |count| TransferId::point_to_point(count).0;
    (0..messages).for_each(|count| pair.send(0, id(count), pattern(100), Reliability::Exact));
    pair
}

/// What waits behind a full window is announced as fast as the peer answers, not at the pace of questions in vain.
#[test]
fn a_thousand_messages_are_known_to_the_peer_after_as_many_round_trips_as_there_are_batches_of_questions() {
    let mut pair = with_messages(1000);
    let (started, last) = (pair.now, TransferId::point_to_point(999));
    let is_last = |event: &Event| matches!(event, Event::Offered { transfer, .. } if *transfer == last);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(1, is_last));
    let asked = pair.ends[0].connection.stats().probes_sent;
    let round_trips = pair.now.since(started).as_micros() / (DELAY * 2).as_micros();
    assert!(u128::from(asked) <= 8 * (round_trips + 1), "{asked} questions in {round_trips} round trips");
    // From then on there is nothing new to tell.
    let known = pair.now;
    let later = known + Duration::from_secs(1);
    pair.run_until(Duration::from_secs(2), |pair| pair.now >= later);
    let asked = pair.ends[0].connection.stats().probes_sent - asked;
    assert!(asked <= 8 * 30, "{asked} questions in a second about what the peer knows");
}

/// Lost questions and answers make a round longer, and leave no gap that hides what is behind it.
#[test]
fn messages_behind_a_lost_question_are_known_soon_as_well() {
    let mut pair = with_messages(1000);
    pair.lose = |header, random| matches!(header.kind, Kind::Probe | Kind::Status) && random % 10 == 0;
    let offered = |event: &&Event| matches!(event, Event::Offered { .. });
    pair.run_until(Duration::from_secs(2), |pair| pair.ends[1].events.iter().filter(offered).count() == 1000);
}

/// A peer that answers nothing is asked more and more seldom, however many messages it has not heard of.
#[test]
fn questions_about_messages_unheard_of_that_nobody_answers_become_rare() {
    let mut pair = with_messages(1000);
    pair.lose = |header, _| header.kind == Kind::Status;
    let (before, later) = (pair.ends[0].connection.stats().probes_sent, pair.now + Duration::from_secs(1));
    pair.run_until(Duration::from_secs(2), |pair| pair.now >= later);
    let asked = pair.ends[0].connection.stats().probes_sent - before;
    assert!(asked <= 8 * 30, "{asked} questions in a second");
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
