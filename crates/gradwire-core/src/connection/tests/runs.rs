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
