//! Runs of new data: what leaves without being asked for anew is what would have left.

use super::*;
use std::cell::{Cell, RefCell};
use std::thread_local;

thread_local! {
    /// Every run is ended before the next datagram is asked for.
    static ENDS_RUNS: Cell<bool> = const { Cell::new(false) };
    /// Datagrams that left in a run.
    static IN_RUNS: Cell<u32> = const { Cell::new(0) };
    /// All that left.
    static LEFT: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Called before each datagram is asked for.
pub(super) fn before_poll(connection: &mut Connection) {
    if ENDS_RUNS.get() {
        connection.run = None;
    }
    IN_RUNS.set(IN_RUNS.get() + u32::from(connection.run.is_some()));
}

/// Loses one datagram in twenty.
fn note(header: &Header, dice: u64) -> bool {
    LEFT.with_borrow_mut(|left| left.push(header.encode().to_vec()));
    dice % 20 == 0
}

/// Transfers of every reliability, with critical packets and without, some more urgent, in both directions.
fn all_that_leaves(ends_runs: bool) -> (Vec<Vec<u8>>, u32) {
    ENDS_RUNS.set(ends_runs);
    IN_RUNS.set(0);
    LEFT.with_borrow_mut(Vec::clear);
    let mut pair = Pair::connected(note);
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
            priority: (transfer % 5) as u8,
            ..SendTransfer::exact(id, bytes as u64, [1; 16])
        };
        pair.ends[from].connection.send(pair.now, request).expect("a fresh transfer");
    }
    pair.run_until(Duration::from_secs(60), |pair| {
        (1..=12).all(|transfer| pair.receipt(1 - transfer as usize % 2, transfer).is_some())
    });
    ENDS_RUNS.set(false);
    (LEFT.with_borrow(Clone::clone), IN_RUNS.get())
}

#[test]
fn what_leaves_in_runs_is_what_would_have_left_packet_by_packet() {
    let (one_by_one, none) = all_that_leaves(true);
    let (in_runs, followed) = all_that_leaves(false);
    assert_eq!(none, 0);
    assert!(followed as usize > in_runs.len() / 2, "{followed} of {} datagrams", in_runs.len());
    assert!(in_runs == one_by_one, "{} and {} datagrams", in_runs.len(), one_by_one.len());
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
    while pair.ends[0].connection.run.is_none_or(|run| run.at() != pair.now) {
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
