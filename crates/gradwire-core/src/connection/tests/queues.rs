//! In which order packets leave: LTP's three queues (section IV-B).

use super::*;
use std::cell::RefCell;
use std::thread_local;

const CHUNKS: u32 = 100;
const CHUNK: u32 = 1408;

thread_local! {
    /// Data packets as they left: transfer, chunk, flags.
    static LEFT: RefCell<Vec<(u32, u32, Flags)>> = const { RefCell::new(Vec::new()) };
}

/// Loses chunks 0 and 10 to 19 of the first transfer once.
fn lose_and_note(header: &Header, _dice: u64) -> bool {
    if header.kind != Kind::Data {
        return false;
    }
    let chunk = header.offset / CHUNK;
    LEFT.with_borrow_mut(|left| left.push((header.transfer.0, chunk, header.flags)));
    let first = !header.flags.contains(Flags::RETRANSMITTED);
    first && header.transfer == TransferId(1) && (chunk == 0 || (10..20).contains(&chunk))
}

fn post(pair: &mut Pair, transfer: u32, contract: Contract) {
    let bytes = (CHUNKS * CHUNK) as usize;
    pair.receive(1, transfer, bytes, contract);
    let transfer = TransferId(transfer);
    pair.ends[0].outgoing.insert(transfer, pattern(bytes));
    let request = SendTransfer {
        reliability: Reliability::Deferred,
        critical_chunks: contract.critical_chunks,
        ..SendTransfer::exact(transfer, bytes as u64, [1; 16])
    };
    pair.ends[0].connection.send(pair.now, request).expect("a fresh transfer");
}

// test of: ltp/three-queues, ltp/critical-packets
#[test]
fn critical_packets_go_before_the_rest_of_their_transfer_lost_ones_at_once_and_other_lost_ones_after_everything_new(
) {
    let mut pair = Pair::connected(lose_and_note);
    let contract = Contract { critical_chunks: 1, ..Contract::EXACT };
    post(&mut pair, 1, contract);
    post(&mut pair, 2, contract);
    pair.run_until(Duration::from_secs(30), |pair| {
        pair.receipt(1, 1).is_some() && pair.receipt(1, 2).is_some()
    });
    let left = LEFT.with_borrow(Clone::clone);
    let again = |flags: &Flags| flags.contains(Flags::RETRANSMITTED);
    // A contract's clock begins with the first packet: not while the data still waits behind that of another transfer.
    let new: Vec<_> = left.iter().filter(|(.., flags)| !again(flags)).map(|(of, at, _)| (*of, *at)).collect();
    let in_turn =
        |transfer| [0, CHUNKS - 1].into_iter().chain(1..CHUNKS - 1).map(move |chunk| (transfer, chunk));
    assert_eq!(new, in_turn(1).chain(in_turn(2)).collect::<Vec<_>>());
    let is_critical = |chunk: u32| chunk == 0 || chunk == CHUNKS - 1;
    assert!(left.iter().all(|(_, chunk, flags)| flags.contains(Flags::CRITICAL) == is_critical(*chunk)));
    let last_new = left.iter().rposition(|(_, _, flags)| !again(flags)).expect("data left");
    let critical_again = left.iter().position(|(_, chunk, flags)| is_critical(*chunk) && again(flags));
    assert!(critical_again.is_some_and(|at| at < last_new), "a lost critical packet waited");
    let others_again = left.iter().position(|(_, chunk, flags)| !is_critical(*chunk) && again(flags));
    assert!(others_again.is_some_and(|at| at > last_new), "a repair went before new data");
}

// test of: ltp/critical-packets
#[test]
fn no_rule_closes_a_transfer_that_misses_a_critical_packet() {
    let lose = |header: &Header, _: u64| header.kind == Kind::Data && header.offset == 99 * CHUNK;
    let mut pair = Pair::connected(lose);
    let deadline = Some(Duration::from_millis(5));
    post(&mut pair, 1, Contract { critical_chunks: 1, floor: 0.0, deadline, ..Contract::EXACT });
    let later = pair.now + Duration::from_secs(1);
    pair.run_until(Duration::from_secs(2), |pair| pair.now >= later);
    assert!(pair.receipt(1, 1).is_none(), "its last packet is critical and never arrived");
    pair.lose = never;
    pair.run_until(Duration::from_secs(1), |pair| pair.receipt(1, 1).is_some());
}

#[test]
fn a_transfer_of_which_only_the_end_is_heard_closes_at_its_deadline() {
    let mut pair = Pair::connected(|header, _| header.kind == Kind::Data);
    let (bytes, deadline) = (50_000, Duration::from_millis(5));
    let contract = Contract { floor: 0.0, deadline: Some(deadline), repairs: false, ..Contract::EXACT };
    pair.receive(1, 1, bytes, contract);
    pair.send(0, 1, pattern(bytes), Reliability::BestEffort);
    pair.run_until(Duration::from_secs(2), |pair| pair.missing(0, 1).is_some());
    let receipt = pair.receipt(1, 1).expect("the sender knows that it is over");
    assert_eq!((receipt.reason, receipt.received_bytes), (CloseReason::Deadline, 0));
    assert!(receipt.elapsed >= deadline && receipt.elapsed < deadline * 2);
    let all = core::slice::from_ref(&(0..bytes as u64)).to_vec();
    assert_eq!(pair.missing(0, 1), Some(all.clone()));
    assert_eq!(receipt.missing, all);
}

#[test]
fn a_receiver_tells_the_time_of_its_stage_when_it_closes_a_transfer() {
    let mut pair = Pair::connected(never);
    let bytes = 3000;
    let transfer = TransferId(1);
    pair.ends[1].incoming.insert(transfer, vec![0; bytes]);
    let request = ReceiveTransfer {
        stage_us: 4321,
        ..ReceiveTransfer::new(transfer, bytes as u64, [1; 16], Contract::EXACT)
    };
    pair.ends[1].connection.receive(pair.now, request).expect("a fresh transfer");
    pair.send(0, 1, pattern(bytes), Reliability::Exact);
    let told = |event: &Event| matches!(event, Event::Sent(receipt) if receipt.stage_us == 4321);
    pair.run_until(Duration::from_secs(1), |pair| pair.has(0, told));
}
