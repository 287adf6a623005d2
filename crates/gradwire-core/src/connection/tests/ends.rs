//! How a transfer ends for its receiver, and what its sender does about that.

use super::*;
use crate::recovery::{ControllerKind, RateController};
use crate::{ConnectionConfig, Receipt};
use std::cell::RefCell;
use std::thread_local;

const CHUNKS: u32 = 300;
const CHUNK: u32 = 1408;
/// A hundredth of the chunks, by the paper's rule.
const LAST_PERCENT: core::ops::Range<u32> = 297..300;
const DEADLINE: Duration = Duration::from_secs(1);
const QUIET: Duration = Duration::from_millis(5);

/// ULTIMA's: nothing is sent again, so what is lost is waited for until one of two times is over.
const BEST_EFFORT: Contract = Contract {
    after_first_pass: false,
    deadline: Some(DEADLINE),
    floor: 0.0,
    early: Some(Early { quiet: QUIET }),
    repairs: false,
    ..Contract::EXACT
};

thread_local! {
    /// Data packets as they left: chunk, flags.
    static LEFT: RefCell<Vec<(u32, Flags)>> = const { RefCell::new(Vec::new()) };
}

/// Loses each word that all has been sent, the last packet with it, and one of the middle.
fn lose_the_end(header: &Header, _dice: u64) -> bool {
    let chunk = header.offset / CHUNK;
    if header.kind == Kind::Data {
        LEFT.with_borrow_mut(|left| left.push((chunk, header.flags)));
    }
    header.kind == Kind::Probe || header.kind == Kind::Data && [150, CHUNKS - 1].contains(&chunk)
}

fn connected(lose: Lose, change: impl Fn(&mut ConnectionConfig)) -> Pair {
    let mut pair = Pair::new(lose);
    for end in &mut pair.ends {
        let mut config = end.connection.config.clone();
        change(&mut config);
        end.connection = Connection::new(config, Timestamp::ZERO);
    }
    pair.run_until(Duration::from_secs(5), |pair| pair.ends.iter().all(|end| end.connection.is_connected()));
    pair
}

/// Its processor time was used up, say. What came meanwhile waits in the socket.
// test of: auto/no-needless-wait
#[test]
fn a_receiver_that_stood_still_reads_what_has_come_before_it_looks_at_its_clocks() {
    let chunks = 20;
    let early = Some(Early { quiet: Duration::from_millis(2) });
    for early in [None, early] {
        let mut pair = connected(never, |config| config.eager_bytes = 1 << 20);
        pair.packet_time = Duration::from_micros(100);
        let bytes = (chunks * CHUNK) as usize;
        let contract = Contract { deadline: Some(Duration::from_millis(10)), early, ..BEST_EFFORT };
        pair.receive(1, 1, bytes, contract);
        pair.send(0, 1, pattern(bytes), Reliability::BestEffort);
        pair.run_until(DEADLINE, |pair| pair.ends[1].incoming[&TransferId(1)][CHUNK as usize] != 0);
        pair.go_to(pair.now + Duration::from_millis(100));
        pair.run_until(DEADLINE, |pair| pair.receipt(1, 1).is_some());
        let receipt = pair.receipt(1, 1).expect("just seen");
        assert_eq!((receipt.reason, receipt.missing), (CloseReason::AllArrived, Vec::new()), "{early:?}");
    }
}

#[test]
fn a_receiver_that_is_always_late_still_ends_what_does_not_come() {
    let mut pair = connected(|header, _| header.kind == Kind::Data && header.offset >= 10 * CHUNK, |_| {});
    let bytes = (20 * CHUNK) as usize;
    pair.receive(1, 1, bytes, Contract { early: None, deadline: Some(QUIET), ..BEST_EFFORT });
    pair.send(0, 1, pattern(bytes), Reliability::BestEffort);
    for _ in 0..10 {
        pair.drain();
        pair.go_to(pair.now + Duration::from_millis(20));
    }
    assert_eq!(pair.receipt(1, 1).map(|receipt| receipt.reason), Some(CloseReason::Deadline));
}

#[test]
fn repairs_that_keep_coming_put_the_end_off_a_few_times_only_though_every_look_is_late() {
    let contract = Contract { deadline: Some(QUIET), floor: 0.0, ..AUTO };
    let (transfer, bytes, descriptor) = (TransferId(1), u64::from(20 * CHUNK), [1; 16]);
    let request = ReceiveTransfer::new(transfer, bytes, descriptor, contract);
    let mut half = ReceiveHalf::new(request, CHUNK, Timestamp::ZERO);
    half.on_all_sent(Timestamp::ZERO);
    let in_order = || Overtaken { most: Duration::ZERO, by_path: Duration::ZERO };
    let ended = (0..20).find_map(|chunk| {
        let now = Timestamp::ZERO + QUIET * 4 * chunk;
        assert!(half.accept(now, chunk));
        half.verdict(now, now, in_order).map(|reason| (chunk, reason))
    });
    assert_eq!(ended, Some((4, CloseReason::Deadline)));
}

/// What the receiver says of a best-effort transfer, `late` so long after its data was sent, whose end is lost.
fn receipt_without_an_end(late: Duration) -> (Receipt, Duration) {
    LEFT.with_borrow_mut(Vec::clear);
    let bytes = (CHUNKS * CHUNK) as usize;
    let mut pair = connected(lose_the_end, |config| config.eager_bytes = 1 << 20);
    pair.send(0, 1, pattern(bytes), Reliability::BestEffort);
    let called_at = pair.now + late;
    pair.run_until(DEADLINE, |pair| pair.now >= called_at);
    let posted_at = pair.now;
    pair.receive(1, 1, bytes, BEST_EFFORT);
    pair.run_until(DEADLINE * 2, |pair| pair.receipt(1, 1).is_some());
    (pair.receipt(1, 1).expect("just seen"), pair.now.since(posted_at))
}

// test of: ultima/last-percentile, ultima/early-timeout
#[test]
fn a_packet_marked_as_of_the_last_percent_ends_a_transfer_early_though_no_word_of_its_end_came() {
    let (receipt, took) = receipt_without_an_end(Duration::ZERO);
    let marked = |chunk: u32| LAST_PERCENT.contains(&chunk);
    LEFT.with_borrow(|left| {
        assert_eq!(left.len(), CHUNKS as usize, "nothing is sent again");
        assert!(left.iter().all(|(chunk, flags)| flags.contains(Flags::LAST_PERCENTILE) == marked(*chunk)));
    });
    assert_eq!((receipt.reason, receipt.received_bytes), (CloseReason::EarlyTimeout, 298 * 1408));
    assert!(took >= QUIET && took < DEADLINE / 10, "{took:?}");
}

// test of: ultima/last-percentile, ultima/early-timeout
#[test]
fn the_mark_of_the_last_percent_counts_also_where_it_came_before_the_receiver_called() {
    let (receipt, took) = receipt_without_an_end(Duration::from_millis(100));
    assert_eq!((receipt.reason, receipt.received_bytes), (CloseReason::EarlyTimeout, 298 * 1408));
    assert!(took >= QUIET && took < QUIET * 2, "{took:?} since all was handed out");
}

// test of: mlt/stop
#[test]
fn mlt_stops_as_soon_as_the_bound_is_met() {
    const LONG: u64 = 20_000;
    let contract = Contract { loss_bound: 0.1, after_first_pass: false, deadline: None, ..AUTO };
    let mut pair = connected(never, |config| config.controller = ControllerKind::Timely);
    pair.packet_time = Duration::from_micros(10);
    pair.receive(1, 1, 1408 * LONG as usize, contract);
    pair.send(0, 1, pattern(1408 * LONG as usize), Reliability::Tolerant);
    pair.run_until(Duration::from_secs(5), |pair| pair.receipt(1, 1).is_some());
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, 1).is_some());
    let receipt = pair.receipt(1, 1).expect("closed");
    let needed = LONG / 10 * 9;
    assert_eq!((receipt.reason, receipt.received_bytes), (CloseReason::BoundMet, 1408 * needed));
    let missing = pair.missing(0, 1).expect("concluded");
    assert_eq!((missing.len(), &missing[0]), (1, &(1408 * needed..1408 * LONG)));
    // What may be on its way when the bound is met, and what leaves until the word of that is there.
    let stats = pair.ends[0].connection.stats();
    let window = pair.ends[0].connection.paths.at(0).controller.cwnd() / 1408;
    let round_trip = (DELAY * 2).as_micros() as u64 * stats.bandwidth / 1_000_000 / 1408;
    let more = stats.packets_sent - needed;
    assert!(
        more <= window + round_trip,
        "{more} more, of a window of {window} and {round_trip} in a round trip"
    );
    assert!(more < LONG - needed, "it sent everything");
    assert_eq!(stats.packets_retransmitted, 0);
}

/// The rate goes down by losses and up by small steps; only what is asked for again sets it to where it began.
// test of: dlcp/receiving-rate
#[test]
fn what_the_receiver_asks_for_again_sets_the_receiving_rate_to_the_line_rate() {
    let line_rate = crate::config::tests::config().initial_rate;
    let lose: Lose = |header, dice| header.kind == Kind::Data && dice % 10 < 7;
    let mut pair = connected(lose, |config| config.controller = ControllerKind::ReceivingRate);
    let rate = |pair: &Pair| pair.ends[0].connection.paths.at(0).controller.pacing_rate();
    pair.receive(1, 1, 400_000, Contract { deadline: None, ..AUTO });
    pair.send(0, 1, pattern(400_000), Reliability::Tolerant);
    let mut lowered = false;
    // An answer is taken in without anything being sent: an idle time before a packet sets the rate as well.
    loop {
        pair.drain();
        let (next, before) = (pair.next_at(), rate(&pair));
        lowered |= before <= line_rate / 2;
        pair.go_to(next);
        if before <= line_rate / 2 && rate(&pair) >= line_rate {
            break;
        }
        assert!(pair.missing(0, 1).is_none(), "it was never set; lowered: {lowered}");
    }
}
