//! How long a peer is told that the group failed.

use super::*;

#[test]
fn a_peer_that_others_found_dead_is_told_no_longer_than_one_that_this_rank_did() {
    let mut pair = Pair::connected(never);
    pair.lose = |_, _| true;
    let quiet_until = pair.now + pair.ends[0].connection.config.heartbeat() * 3;
    pair.run_until(Duration::from_secs(5), |pair| pair.now >= quiet_until);
    let now = pair.now;
    pair.ends[0].connection.abort(now, [9; ABORT_RECORD_BYTES]);
    pair.run_until(Duration::from_millis(600), |pair| pair.ends[0].connection.is_drained());
    assert!(
        !pair.has(0, |event| matches!(event, Event::PeerSilent { .. })),
        "it has not missed the peer itself"
    );
}

#[test]
fn a_peer_that_has_told_of_an_abort_is_answered_and_has_nothing_to_confirm() {
    let mut pair = Pair::connected(never);
    let now = pair.now;
    pair.ends[1].connection.abort(now, [9; ABORT_RECORD_BYTES]);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, |event| matches!(event, Event::Aborted(_))));
    // The answer to the first one is lost, and so is all that the peer says from now on but the same again.
    pair.lose = |header, dice| header.kind != Kind::Abort || header.connection.value() == 2 && dice % 2 == 0;
    let now = pair.now;
    pair.ends[0].connection.abort(now, [8; ABORT_RECORD_BYTES]);
    pair.run_until(Duration::ZERO, |pair| pair.ends[0].connection.is_drained());
    pair.run_until(Duration::from_secs(1), |pair| pair.ends[1].connection.is_drained());
    assert!(!pair.has(1, |event| matches!(event, Event::Aborted(_))), "nothing new to it");
}
