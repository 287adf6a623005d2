//! Runs that are taken at once: they leave the connection as it would be had it taken each datagram on its own.

use super::*;
use crate::{Datagrams, ReceivedMark};
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::format;
use std::string::String;
use std::thread_local;

thread_local! {
    /// What came as one piece is offered as such.
    static OFFERS_RUNS: Cell<bool> = const { Cell::new(false) };
    /// Datagrams that were taken in a run.
    static IN_RUNS: Cell<usize> = const { Cell::new(0) };
    /// Whether [`STATES`] is kept.
    static KEEPS: Cell<bool> = const { Cell::new(false) };
    /// Everything about the receiver after each piece.
    static STATES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// The receiver of the datagram that has come takes what came with it as one piece: at the same time, as large, and the last may be
/// shorter. Returns how many.
pub(super) fn take(pair: &mut Pair) -> usize {
    let Pair { wire, ends, now, latest_data_at, .. } = pair;
    let (at, to, first) = wire.front().expect("the caller has seen it");
    let (at, to, stride) = (*at, *to, first.len());
    let alike =
        wire.iter().take_while(|(when, whom, bytes)| (*when, *whom) == (at, to) && bytes.len() == stride);
    let mut count = alike.count();
    let last =
        wire.get(count).filter(|(when, whom, bytes)| (*when, *whom) == (at, to) && bytes.len() < stride);
    count += usize::from(last.is_some());
    let piece: Vec<u8> = wire.iter().take(count).flat_map(|(_, _, bytes)| bytes.iter().copied()).collect();
    let end = &mut ends[to];
    let mut rest = &piece[..];
    while !rest.is_empty() {
        let datagrams = Datagrams::new(rest, stride, 0);
        let run = if OFFERS_RUNS.get() {
            end.connection.handle_run(*now, datagrams, ReceivedMark::default())
        } else {
            None
        };
        if let Some(payloads) = run {
            payloads.iter().for_each(|payload| place(&mut end.incoming, &payload));
            assert_eq!(payloads.iter().count(), payloads.count);
            IN_RUNS.set(IN_RUNS.get() + payloads.count);
            *latest_data_at = *now;
            rest = &rest[payloads.count * stride..];
            continue;
        }
        let (datagram, behind) = rest.split_at(stride.min(rest.len()));
        if let Ok(Some(payload)) = end.connection.handle_datagram(*now, datagram) {
            place(&mut end.incoming, &payload);
            *latest_data_at = *now;
        }
        rest = behind;
    }
    if KEEPS.get() {
        STATES.with_borrow_mut(|states| states.push(format!("{:?}", end.connection)));
    }
    count
}

/// Transfers under contracts of every kind, with critical chunks and without, in both directions, over a link that loses `lose`.
fn states(offers_runs: bool, lose: Lose) -> (Vec<String>, [BTreeMap<TransferId, Vec<u8>>; 2]) {
    OFFERS_RUNS.set(offers_runs);
    IN_RUNS.set(0);
    KEEPS.set(true);
    STATES.with_borrow_mut(Vec::clear);
    let mut pair = Pair::connected(lose);
    let early = Some(Early { quiet: Duration::from_micros(400) });
    let contracts = [
        Contract::EXACT,
        AUTO,
        Contract { after_first_pass: false, deadline: None, ..AUTO },
        Contract { loss_bound: 0.0, early, deadline: Some(Duration::from_millis(20)), floor: 0.0, ..AUTO },
    ];
    for transfer in 1..=12_u32 {
        let (from, critical_chunks) = (transfer as usize % 2, (transfer % 3) as u16);
        // The last chunk of some is as long as the others.
        let bytes = if transfer % 5 == 0 { 1408 * 90 } else { 90_000 * transfer as usize };
        let contract = Contract { critical_chunks, ..contracts[transfer as usize / 3 % contracts.len()] };
        let reliability = if contract.is_exact() { Reliability::Exact } else { Reliability::Tolerant };
        pair.receive(1 - from, transfer, bytes, contract);
        let id = TransferId(transfer);
        pair.ends[from].outgoing.insert(id, pattern(bytes));
        let request =
            SendTransfer { reliability, critical_chunks, ..SendTransfer::exact(id, bytes as u64, [1; 16]) };
        pair.ends[from].connection.send(pair.now, request).expect("a fresh transfer");
    }
    pair.run_until(Duration::from_secs(60), |pair| {
        (1..=12).all(|transfer| pair.receipt(1 - transfer as usize % 2, transfer).is_some())
    });
    OFFERS_RUNS.set(false);
    KEEPS.set(false);
    let incoming = pair.ends.map(|end| end.incoming);
    (STATES.take(), incoming)
}

fn assert_alike(lose: Lose, share: f64) {
    let (one_by_one, incoming) = states(false, lose);
    assert_eq!(IN_RUNS.get(), 0);
    let (in_runs, incoming_in_runs) = states(true, lose);
    let first = one_by_one.iter().zip(&in_runs).position(|(one, other)| one != other);
    assert_eq!(first, None, "{}\n{}", one_by_one[first.unwrap_or(0)], in_runs[first.unwrap_or(0)]);
    assert_eq!(one_by_one.len(), in_runs.len());
    assert!(incoming == incoming_in_runs);
    let chunks: usize = incoming.iter().flat_map(BTreeMap::values).map(|bytes| bytes.len() / 1408).sum();
    assert!(IN_RUNS.get() as f64 > share * chunks as f64, "{} of {chunks} in runs", IN_RUNS.get());
}

#[test]
fn a_run_leaves_a_connection_as_its_datagrams_one_by_one_would() {
    assert_alike(never, 0.5);
}

#[test]
fn a_run_with_packets_missing_is_several() {
    assert_alike(|header, dice| lose_data_one_in(header, dice, 20), 0.2);
}

#[test]
fn runs_and_loss_of_everything_go_together() {
    assert_alike(|_, dice| dice % 7 == 0, 0.1);
}

/// What a peer might send as one piece: packets and chunks one after the other, but for what `skips` says.
#[derive(Clone, Debug)]
struct Piece {
    transfer: u32,
    first_chunk: u32,
    count: u32,
    skipped_numbers: u32,
    flags: Flags,
    /// From this packet on the flags and the weight are others.
    changes_at: u32,
    changed: Flags,
    wait: Duration,
}

const FLAGS: [Flags; 9] = [
    Flags::NONE,
    Flags::NONE,
    Flags::NONE,
    Flags::IMPORTANT,
    Flags::CRITICAL,
    Flags::LAST_PERCENTILE,
    Flags::ACK_NOW,
    Flags::ALL_SENT,
    Flags::RETRANSMITTED,
];

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let flags = || prop::sample::select(&FLAGS[..]);
    let skips = prop_oneof![3 => Just(0_u32), 1 => 1_u32..4];
    let waits = prop::sample::select(&[0_u64, 0, 20, 400, 3_000][..]).prop_map(Duration::from_micros);
    let places = (1_u32..=4, 0_u32..100, 1_u32..50);
    let changes = (1_u32..80, flags());
    let piece = (places, skips, flags(), changes, waits).prop_map(
        |((transfer, first_chunk, count), skipped_numbers, flags, (changes_at, changed), wait)| Piece {
            transfer,
            first_chunk,
            count,
            skipped_numbers,
            flags,
            changes_at,
            changed,
            wait,
        },
    );
    prop::collection::vec(piece, 1..30)
}

/// The states of a receiver to which these come, and what it has then.
fn states_after(pieces: &[Piece], offers_runs: bool) -> (Vec<String>, BTreeMap<TransferId, Vec<u8>>) {
    OFFERS_RUNS.set(offers_runs);
    let mut pair = Pair::connected(never);
    let tail_bound = Contract { after_first_pass: false, deadline: None, critical_chunks: 2, ..AUTO };
    for (transfer, contract) in (1..).zip([Contract::EXACT, AUTO, tail_bound, Contract::EXACT]) {
        // The last chunk of the fourth is whole.
        pair.receive(1, transfer, 1408 * 100 - usize::from(transfer != 4) * 400, contract);
    }
    let remote = ConnectionId::new(2).expect("fits");
    let mut number = gradwire_wire::PacketNumber(0);
    let mut states = Vec::new();
    for piece in pieces {
        pair.now = pair.now + piece.wait;
        (0..piece.skipped_numbers).for_each(|_| number = number.next());
        for place in 0..piece.count {
            let mut header = Header::control(Kind::Data, remote);
            let has_changed = place >= piece.changes_at;
            header.flags = if has_changed { piece.changed } else { piece.flags };
            (header.weight, header.transfer) = (1 + u16::from(has_changed), TransferId(piece.transfer));
            (header.packet_number, header.offset) = (number, (piece.first_chunk + place) * 1408);
            header.sent_at_us = pair.now.as_wire_us().wrapping_sub(500);
            number = number.next();
            let total = pair.ends[1].incoming[&header.transfer].len();
            let bytes = total.saturating_sub(header.offset as usize).min(1408);
            let datagram = [&header.encode()[..], &vec![place as u8; bytes]].concat();
            pair.wire.push_back((pair.now, 1, datagram));
        }
        while !pair.wire.is_empty() {
            let taken = take(&mut pair);
            pair.wire.drain(..taken);
        }
        let connection = &mut pair.ends[1].connection;
        let mut scratch = [0; 2048];
        while connection.poll_event().is_some() {}
        while connection.poll_transmit(pair.now, &mut scratch).is_some() {}
        states.push(format!("{connection:?}"));
    }
    OFFERS_RUNS.set(false);
    let [_, receiver] = pair.ends;
    (states, receiver.incoming)
}

proptest! {
    #[test]
    fn whatever_comes_as_one_piece_does_what_its_datagrams_one_by_one_would(pieces in pieces()) {
        let (one_by_one, in_runs) = (states_after(&pieces, false), states_after(&pieces, true));
        for (one, other) in one_by_one.0.iter().zip(&in_runs.0) {
            prop_assert_eq!(one, other);
        }
        prop_assert!(one_by_one.1 == in_runs.1);
    }
}
