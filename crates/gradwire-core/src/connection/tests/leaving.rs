//! Exact sends to a peer that leaves in good order: it may have taken them, or never called for them.

use super::*;

/// Whether the peer left without having taken the send, once that is known.
fn is_untaken(pair: &Pair, transfer: u32) -> Option<bool> {
    pair.ends[0].events.iter().find_map(|event| match event {
        Event::Sent(receipt) if receipt.transfer == TransferId(transfer) => Some(receipt.is_untaken),
        _ => None,
    })
}

fn leave(pair: &mut Pair) {
    let now = pair.now;
    pair.ends[1].connection.leave(now);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, |event| *event == Event::PeerLeft));
}

#[test]
fn an_exact_send_that_a_peer_left_without_is_told_from_one_whose_end_was_lost() {
    let mut pair = Pair::connected(|header, _| header.kind == Kind::Status);
    pair.receive(1, 1, 8_000, Contract::EXACT);
    pair.send(0, 1, pattern(8_000), Reliability::Exact);
    pair.send(0, 2, pattern(5_000), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    pair.lose = |_, dice| dice % 3 == 0;
    leave(&mut pair);
    assert_eq!((is_untaken(&pair, 1), is_untaken(&pair, 2)), (Some(false), Some(true)));
    // Nobody there can have waited for what comes now.
    pair.send(0, 3, pattern(10), Reliability::Exact);
    pair.run_until(Duration::ZERO, |pair| is_untaken(pair, 3) == Some(true));
}

#[test]
fn an_exact_send_of_which_a_peer_that_left_says_nothing_counts_as_delivered() {
    let mut pair = Pair::connected(|header, _| header.kind == Kind::Status);
    pair.send(0, 1, pattern(5_000), Reliability::Exact);
    leave(&mut pair);
    assert_eq!((is_untaken(&pair, 1), pair.missing(0, 1)), (Some(false), Some(Vec::new())));
}

#[test]
fn an_exact_send_of_which_parts_never_left_is_untaken_though_a_peer_that_left_says_nothing() {
    let mut pair = Pair::connected(|header, _| header.kind == Kind::Status);
    // Nothing is granted, so no more than the eager window leaves.
    let bytes = 2 * pair.ends[0].connection.config.eager_bytes as usize;
    pair.send(0, 1, pattern(bytes), Reliability::Exact);
    leave(&mut pair);
    assert_eq!((is_untaken(&pair, 1), pair.missing(0, 1)), (Some(true), Some(Vec::new())));
}

#[test]
fn a_peer_that_repeats_its_goodbye_no_more_is_asked_until_it_answers() {
    let mut pair = Pair::connected(never);
    pair.send(0, 1, pattern(100), Reliability::Exact);
    let left_at = pair.now;
    pair.ends[1].connection.leave(left_at);
    // Of its goodbyes the first one comes through, and late; the first questions do not.
    pair.lose = |header, _| header.kind != Kind::Goodbye;
    pair.late = |_| Duration::from_millis(600);
    pair.drain();
    pair.lose = |_, _| true;
    let healed_at = left_at + Duration::from_millis(650);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= healed_at);
    assert!(pair.ends[1].connection.is_drained() && is_untaken(&pair, 1).is_none());
    pair.lose = never;
    pair.late = |_| Duration::ZERO;
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, |event| *event == Event::PeerLeft));
    assert_eq!(is_untaken(&pair, 1), Some(true));
}

#[test]
fn what_a_peer_said_before_it_took_a_send_and_left_is_not_its_last_word() {
    let mut pair = Pair::connected(never);
    // Its goodbye overtakes all that it says about transfers.
    pair.late = |transmit| match transmit.header.kind {
        Kind::Status => DELAY * 40,
        _ => Duration::ZERO,
    };
    pair.send(0, 1, pattern(100), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[0].connection.stats().probes_sent > 0);
    let answered_at = pair.now + DELAY * 2;
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= answered_at);
    pair.receive(1, 1, 100, Contract::EXACT);
    assert!(is_untaken(&pair, 1).is_none(), "what it says is on its way");
    leave(&mut pair);
    assert_eq!(is_untaken(&pair, 1), Some(false));
}

#[test]
fn a_peer_that_leaves_before_this_side_is_connected_has_left_after_a_while() {
    let mut pair = Pair::new(|_, _| true);
    pair.send(0, 1, pattern(100), Reliability::Exact);
    let now = pair.now;
    pair.ends[0].connection.on_goodbye(now, false);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, |event| *event == Event::PeerLeft));
    assert_eq!(is_untaken(&pair, 1), Some(true), "none of it was sent");
}
