//! Runs of new data: what leaves without being asked for anew is what would have left.

use super::*;
use crate::{ChunkSet, TransferTags};
use std::cell::{Cell, RefCell};
use std::string::String;
use std::thread_local;

thread_local! {
    /// Every run is ended before the next datagram is asked for.
    static ENDS_RUNS: Cell<bool> = const { Cell::new(false) };
    /// Datagrams that left in a run.
    static IN_RUNS: Cell<u32> = const { Cell::new(0) };
    /// Datagrams are asked for many at once, as they are in the tests of everything else.
    static TAKES_MANY: Cell<bool> = const { Cell::new(true) };
    /// Datagrams that were given many at once.
    static AT_ONCE: Cell<u32> = const { Cell::new(0) };
    /// All that left.
    static LEFT: RefCell<Vec<Transmit>> = const { RefCell::new(Vec::new()) };
}

/// Called before each datagram is asked for.
pub(super) fn before_poll(connection: &mut Connection) {
    if ENDS_RUNS.get() {
        connection.run = None;
    }
    IN_RUNS.set(IN_RUNS.get() + u32::from(connection.run.is_some()));
}

/// What leaves at once behind a datagram, up to a number that changes from time to time, as single datagrams.
pub(super) fn poll_at_once(connection: &mut Connection, now: Timestamp, behind: &Transmit) -> Vec<Transmit> {
    if ENDS_RUNS.get() || !TAKES_MANY.get() {
        return Vec::new();
    }
    let most = 1 + AT_ONCE.get() as usize % 45;
    let Some(run) = connection.poll_transmit_run(now, most) else { return Vec::new() };
    assert!((1..=most).contains(&run.count));
    assert!(
        matches!(behind.body, Body::Payload { bytes, .. } if bytes == run.bytes),
        "{run:?} was given behind {behind:?}"
    );
    AT_ONCE.set(AT_ONCE.get() + run.count as u32);
    let half = run.behind(run.count / 2);
    assert_eq!(half.header, run.header_of(run.count / 2));
    (0..run.count).map(|place| run.packet(place)).collect()
}

/// Called for each datagram that leaves.
pub(super) fn note(transmit: &Transmit) {
    LEFT.with_borrow_mut(|left| left.push(*transmit));
}

/// Loses one datagram in twenty.
fn one_in_twenty(_: &Header, dice: u64) -> bool {
    dice % 20 == 0
}

/// Transfers of every reliability, with critical packets and without, some more urgent, in both directions.
fn all_that_leaves(ends_runs: bool, takes_many: bool) -> (Vec<Transmit>, [String; 2], [u32; 2]) {
    ENDS_RUNS.set(ends_runs);
    TAKES_MANY.set(takes_many);
    IN_RUNS.set(0);
    AT_ONCE.set(0);
    LEFT.with_borrow_mut(Vec::clear);
    let mut pair = Pair::connected(one_in_twenty);
    let kinds = [Reliability::Exact, Reliability::Tolerant, Reliability::Deferred, Reliability::BestEffort];
    for transfer in 1..=12_u32 {
        let (from, critical_chunks) = (transfer as usize % 2, (transfer % 3) as u16);
        let bytes = 150_000 * transfer as usize;
        let mut contract = Contract { critical_chunks, ..Contract::EXACT };
        let reliability = kinds[transfer as usize % kinds.len()];
        if reliability != Reliability::Exact {
            contract = Contract { loss_bound: 0.3, floor: 0.0, repairs: true, ..contract };
        }
        pair.receive(1 - from, transfer, bytes, contract);
        let id = TransferId(transfer);
        pair.ends[from].outgoing.insert(id, pattern(bytes));
        let request = SendTransfer {
            reliability,
            critical_chunks,
            begin: transfer * 37,
            priority: (transfer % 5) as u8,
            tags: tags_of(transfer),
            ..SendTransfer::exact(id, bytes as u64, [1; 16])
        };
        pair.ends[from].connection.send(pair.now, request).expect("a fresh transfer");
    }
    pair.run_until(Duration::from_secs(60), |pair| {
        (1..=12).all(|transfer| pair.receipt(1 - transfer as usize % 2, transfer).is_some())
    });
    ENDS_RUNS.set(false);
    TAKES_MANY.set(true);
    let counted = pair
        .ends
        .each_ref()
        .map(|end| std::format!("{:?} {:?}", end.connection.stats(), end.connection.path_stats()));
    (LEFT.with_borrow(Clone::clone), counted, [IN_RUNS.get(), AT_ONCE.get()])
}

/// Some have important chunks, a few at a time.
fn tags_of(transfer: u32) -> TransferTags {
    let important = (transfer % 4 == 0).then(|| ChunkSet::new(vec![0xff0f_0000_3fff_ff00; 64].into(), 3));
    TransferTags { class: (transfer % 3) as u8, important }
}

#[test]
fn what_leaves_in_runs_is_what_would_have_left_packet_by_packet() {
    let (one_by_one, counted, [none, _]) = all_that_leaves(true, false);
    let (in_runs, counted_in_runs, [followed, _]) = all_that_leaves(false, false);
    let (at_once, counted_at_once, [_, many]) = all_that_leaves(false, true);
    assert_eq!(none, 0);
    assert_eq!(counted, counted_in_runs);
    assert_eq!(counted, counted_at_once);
    assert!(followed as usize > in_runs.len() / 2, "{followed} of {} datagrams", in_runs.len());
    assert!(in_runs == one_by_one, "{} and {} datagrams", in_runs.len(), one_by_one.len());
    assert!(many as usize > at_once.len() / 3, "{many} of {} datagrams", at_once.len());
    assert!(at_once == one_by_one, "{} and {} datagrams", at_once.len(), one_by_one.len());
}

/// A sender in the middle of a run, and the transfer that it sends.
fn in_a_run() -> Pair {
    let mut pair = Pair::connected(never);
    pair.receive(1, 1, 600_000, Contract::EXACT);
    pair.send_at(9, 0, 1, pattern(600_000), Reliability::Exact);
    // The grant comes, and the window opens.
    let later = pair.now + 3 * DELAY;
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= later);
    let asked = pair.now + Duration::from_secs(1);
    while pair.ends[0].connection.run.is_none_or(|run| run.at != pair.now) {
        assert!(pair.now < asked, "no run begins");
        pair.now = pair.now + Duration::from_micros(50);
        let mut scratch = [0; 2048];
        _ = pair.ends[0].connection.poll_transmit(pair.now, &mut scratch);
    }
    pair
}

fn next_of(pair: &mut Pair) -> Header {
    let mut scratch = [0; 2048];
    let transmit = pair.ends[0].connection.poll_transmit(pair.now, &mut scratch);
    transmit.expect("something leaves").header
}

#[test]
fn what_is_more_urgent_ends_a_run_at_once() {
    let mut pair = in_a_run();
    assert_eq!(next_of(&mut pair).transfer, TransferId(1));
    pair.send_at(1, 0, 2, pattern(20_000), Reliability::Exact);
    assert_eq!(next_of(&mut pair).transfer, TransferId(2));
}

#[test]
fn what_comes_in_the_middle_of_a_run_is_answered_before_it_goes_on() {
    let mut pair = in_a_run();
    let mut ping = Header::control(Kind::Ping, ConnectionId::new(1).expect("fits"));
    ping.sent_at_us = pair.now.as_wire_us();
    let datagram = [&ping.encode()[..], &[0; gradwire_wire::POSITION_RECORD_BYTES]].concat();
    assert_eq!(pair.ends[0].connection.handle_datagram(pair.now, &datagram), Ok(None));
    let answer = next_of(&mut pair);
    assert_eq!((answer.kind, answer.flags.contains(Flags::REPLY)), (Kind::Ping, true));
}
