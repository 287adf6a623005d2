//! Numbers of collectives come round after 65,536: what the network has held for so long is of none that is called now.

use super::*;
use crate::DropReason;
use gradwire_wire::{StatusBody, TransferState};

/// So many collectives ahead of one that has just begun, no peer can be.
const FAR_AHEAD: TransferId = TransferId::collective(32_000, 0);

fn data_on_wire(pair: &Pair) -> Vec<Vec<u8>> {
    let is_data = |datagram: &&Vec<u8>| Header::decode(datagram).is_ok_and(|(it, _)| it.kind == Kind::Data);
    pair.wire.iter().map(|(_, _, datagram)| datagram).filter(is_data).cloned().collect()
}

#[test]
fn data_of_an_old_collective_is_not_kept_for_the_one_with_the_same_number() {
    let mut pair = Pair::connected(never);
    pair.send(0, FAR_AHEAD.0, pattern(100), Reliability::Exact);
    pair.drain();
    let held = data_on_wire(&pair);
    assert!(!held.is_empty());
    let at = pair.now;
    let receiver = &mut pair.ends[1].connection;
    for datagram in &held {
        assert_eq!(receiver.handle_datagram(at, datagram), Err(DropReason::Implausible));
    }
    assert_eq!(receiver.poll_event(), None, "nothing was offered");
    // Its number comes.
    receiver.retire(TransferId::collective(31_999, 0));
    let buffer = pair.ends[1].incoming.entry(FAR_AHEAD).or_default();
    buffer.resize(100, 0);
    let request = ReceiveTransfer::new(FAR_AHEAD, 100, [1; 16], Contract::EXACT);
    let receiver = &mut pair.ends[1].connection;
    receiver.receive(at, request).expect("a fresh transfer");
    assert!(receiver.poll_payload(at).is_none());
}

#[test]
fn what_a_peer_says_too_early_it_says_again() {
    let mut pair = Pair::connected(never);
    let data = pattern(5_000);
    pair.send(0, FAR_AHEAD.0, data.clone(), Reliability::Exact);
    let asked_at = pair.now + Duration::from_millis(300);
    pair.run_until(Duration::from_secs(1), |pair| pair.now >= asked_at);
    assert!(
        !pair.has(1, |event| matches!(event, Event::Offered { .. })),
        "neither by data nor by a question"
    );
    assert!(pair.ends[1].connection.stats().packets_dropped > 5);
    pair.ends[1].connection.retire(TransferId::collective(31_999, 0));
    pair.receive(1, FAR_AHEAD.0, data.len(), Contract::EXACT);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, FAR_AHEAD.0).is_some());
    assert_eq!(pair.ends[1].incoming[&FAR_AHEAD], data);
}

#[test]
fn the_grant_of_an_old_collective_is_not_remembered() {
    for (transfer, is_kept) in [(FAR_AHEAD, false), (TransferId::collective(100, 0), true)] {
        let mut pair = Pair::connected(never);
        pair.receive(1, transfer.0, 100_000, Contract::EXACT);
        let later = pair.now + Duration::from_millis(1);
        pair.run_until(Duration::from_secs(1), |pair| pair.now >= later);
        assert_eq!(pair.ends[0].connection.pregrants.contains(&transfer), is_kept);
    }
}

/// The end of a transfer of one chunk, as its receiver tells it.
fn closed(transfer: TransferId, sent_at: Timestamp, echo_us: u32) -> Vec<u8> {
    let mut header = Header::control(Kind::Status, ConnectionId::new(1).expect("fits"));
    (header.transfer, header.sent_at_us) = (transfer, sent_at.as_wire_us());
    let status = StatusBody {
        state: TransferState::Closed,
        words: 0,
        received_chunks: 1,
        wanted_chunks: 0,
        first_chunk: 0,
        echo_us,
        stage_us: 0,
        missing: [0; STATUS_WORDS_MAX],
    };
    let mut body = [0; 2048];
    let mut out = Writer::new(&mut body);
    status.encode(&mut out);
    let bytes = out.finish().expect("there is room");
    [&header.encode()[..], &body[..bytes]].concat()
}

/// A pair that has been connected for ten seconds, and has just sent a transfer of one chunk.
fn with_one_sent(transfer: TransferId) -> Pair {
    let mut pair = Pair::connected(never);
    let later = pair.now + Duration::from_secs(10);
    pair.run_until(Duration::from_secs(11), |pair| pair.now >= later);
    pair.send(0, transfer.0, pattern(100), Reliability::Exact);
    pair.drain();
    pair
}

#[test]
fn the_end_of_an_old_transfer_does_not_conclude_the_one_with_the_same_number() {
    let transfer = TransferId::collective(3, 0);
    let mut pair = with_one_sent(transfer);
    let at = pair.now;
    let sender = &mut pair.ends[0].connection;
    let old = closed(transfer, at.before(Duration::from_secs(6)), 0);
    assert_eq!(sender.handle_datagram(at, &old), Err(DropReason::Implausible));
    assert_eq!(sender.poll_event(), None);
    pair.receive(1, transfer.0, 100, Contract::EXACT);
    pair.run_until(Duration::from_secs(1), |pair| pair.missing(0, transfer.0).is_some());
    assert_eq!(pair.ends[1].incoming[&transfer], pattern(100));
}

#[test]
fn an_answer_to_a_question_about_a_transfer_is_not_old_whatever_the_clock_of_its_receiver_shows() {
    let transfer = TransferId::collective(3, 0);
    let mut pair = with_one_sent(transfer);
    let at = pair.now;
    let answer = closed(transfer, at.before(Duration::from_secs(6)), at.as_wire_us());
    pair.ends[0].connection.handle_datagram(at, &answer).expect("plausible");
    pair.drain();
    assert_eq!(pair.missing(0, transfer.0), Some(Vec::new()));
}
