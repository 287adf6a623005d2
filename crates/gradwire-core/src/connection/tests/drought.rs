//! A way that loses all data and nothing else, as where the MTU has become smaller.

use super::*;

const CHUNK: usize = 1408;

/// A pair that has carried data, and loses all of it from now on.
fn pair_in_drought() -> Pair {
    pair_that_loses_all(20_000, Contract::EXACT, Reliability::Exact)
}

/// The same, of a transfer of so many chunks under this contract.
fn pair_that_loses_all(chunks: usize, contract: Contract, reliability: Reliability) -> Pair {
    let mut pair = Pair::connected(never);
    pair.receive(1, 1, CHUNK * 1_000, Contract::EXACT);
    pair.receive(1, 2, CHUNK * chunks, contract);
    pair.send(0, 1, pattern(CHUNK * 1_000), Reliability::Exact);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    pair.lose = |header, _| header.kind == Kind::Data;
    pair.send_at(9, 0, 2, pattern(CHUNK * chunks), reliability);
    pair
}

fn lost(pair: &Pair) -> u64 {
    pair.ends[0].connection.stats().packets_lost
}

#[test]
fn into_a_way_that_loses_all_data_a_rank_sends_no_more_than_a_few_packets_in_each_pause() {
    let mut pair = pair_in_drought();
    let (second, start) = (Duration::from_secs(1), pair.now);
    pair.run_until(second * 2, |pair| pair.now >= start + second);
    let before = lost(&pair);
    pair.run_until(second * 2, |pair| pair.now >= start + second * 2);
    let tried = lost(&pair) - before;
    assert!((20..=50).contains(&tried), "{tried} packets in a second");
}

#[test]
fn a_way_that_has_healed_carries_data_again_within_the_longest_pause() {
    let mut pair = pair_in_drought();
    let start = pair.now;
    pair.run_until(Duration::from_secs(2), |pair| pair.now >= start + Duration::from_secs(1));
    pair.lose = never;
    let healed_at = pair.now;
    pair.run_until(Duration::from_secs(2), |pair| pair.ends[1].incoming[&TransferId(2)][0] != 0);
    let took = pair.now.since(healed_at);
    // What was under way when it healed is lost, and is asked about first.
    assert!(took <= Duration::from_millis(100) + DELAY * 2 * 7, "it took {took:?}");
    pair.run_until(Duration::from_secs(5), |pair| pair.missing(0, 2).is_some());
    assert_eq!(pair.ends[1].incoming[&TransferId(2)], pattern(CHUNK * 20_000));
}

/// Their ends say so, before any acknowledgement.
#[test]
fn small_transfers_that_arrive_are_no_drought_though_nothing_acknowledges_them() {
    let mut pair = Pair::connected(|header, dice| match header.kind {
        Kind::Ack => !header.flags.contains(Flags::REPLY),
        _ => lose_data_one_in(header, dice, 2),
    });
    for transfer in 1..2_000 {
        pair.receive(1, transfer, 100, Contract::EXACT);
        pair.send(0, transfer, pattern(100), Reliability::Exact);
    }
    pair.run_until(Duration::from_secs(60), |pair| pair.missing(0, 1_999).is_some());
    assert!(pair.ends[0].connection.paths.at(0).lost_in_drought().is_none());
}

/// As where a full buffer takes the end of a window, or the receiver is stopped: what is sent when that is known arrives.
#[test]
fn a_window_whose_end_is_lost_is_no_drought() {
    let mut pair = Pair::connected(|header, _| {
        let is_tail = header.offset as usize >= CHUNK * 400 && !header.flags.contains(Flags::RETRANSMITTED);
        header.kind == Kind::Data && is_tail
    });
    pair.receive(1, 1, CHUNK * 1_000, Contract::EXACT);
    pair.send(0, 1, pattern(CHUNK * 1_000), Reliability::Exact);
    let mut had = false;
    while pair.missing(0, 1).is_none() {
        let before = lost(&pair);
        pair.run_until(Duration::from_secs(1), |pair| lost(pair) > before || pair.missing(0, 1).is_some());
        had |= pair.ends[0].connection.loses_all_data().is_some();
    }
    assert!(!had && lost(&pair) == 600, "{} lost", lost(&pair));
}

#[test]
fn a_way_that_nothing_large_is_to_go_is_not_said_to_lose_it() {
    let contract = Contract { deadline: Some(Duration::from_secs(1)), floor: 0.0, ..AUTO };
    let mut pair = pair_that_loses_all(2_000, contract, Reliability::Tolerant);
    pair.run_until(Duration::from_secs(1), |pair| {
        pair.ends[0].connection.loses_all_data() == Some(CHUNK as u32)
    });
    // At a few packets in each pause the rest takes its time.
    pair.run_until(Duration::from_secs(120), |pair| pair.missing(0, 2).is_some());
    assert!(pair.ends[0].connection.paths.at(0).lost_in_drought().is_some());
    assert_eq!(pair.ends[0].connection.loses_all_data(), None);
}
