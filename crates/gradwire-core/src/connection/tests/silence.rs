//! When a peer counts as silent.

use super::*;

/// The tail of the first transfer and all questions about it never come.
fn lose_tail(header: &Header, _: u64) -> bool {
    let tail = header.transfer == TransferId(1) && header.offset >= 1408 * 140;
    header.kind == Kind::Probe || header.kind == Kind::Data && tail
}

#[test]
fn what_came_early_and_is_handed_out_later_does_not_prove_that_the_peer_still_sends() {
    let mut pair = Pair::connected(lose_tail);
    let deadline = Duration::from_millis(4);
    pair.receive(1, 1, 1408 * 200, Contract { deadline: Some(deadline), ..AUTO });
    pair.send(0, 2, pattern(100), Reliability::Exact);
    pair.send(0, 1, pattern(1408 * 200), Reliability::Tolerant);
    let half = deadline / 8;
    pair.run_until(Duration::from_secs(1), |pair| {
        pair.latest_data_at > Timestamp::ZERO
            && pair.now.since(pair.latest_data_at) >= half
            && pair.ends[1].incoming[&TransferId(1)][1408 * 139] != 0
    });
    assert!(pair.receipt(1, 1).is_none(), "it is still waiting");
    pair.receive(1, 2, 100, Contract::EXACT);
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
    assert_eq!(pair.receipt(1, 1).expect("just seen").reason, CloseReason::Deadline);
    let waited = pair.now.since(pair.latest_data_at);
    // A quarter of its deadline, and what a step of the link takes.
    assert!(waited <= deadline / 4 + half / 2, "it waited {waited:?}");
}
