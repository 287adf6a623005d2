//! Runs that are taken at once: they leave the connection as it would be had it taken each datagram on its own.

use super::*;
use crate::{Datagrams, ReceivedMark};
use gradwire_wire::PacketNumber;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::format;
use std::string::String;
use std::thread_local;

thread_local! {
    /// What came as one piece is offered as such, as it is in the tests of everything else.
    static OFFERS_RUNS: Cell<bool> = const { Cell::new(true) };
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
        let request = SendTransfer {
            reliability,
            critical_chunks,
            begin: transfer * 37,
            ..SendTransfer::exact(id, bytes as u64, [1; 16])
        };
        pair.ends[from].connection.send(pair.now, request).expect("a fresh transfer");
    }
    pair.run_until(Duration::from_secs(60), |pair| {
        (1..=12).all(|transfer| pair.receipt(1 - transfer as usize % 2, transfer).is_some())
    });
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

/// What a peer, or who claims to be it, might send as one piece: packets and chunks one after the other, but for what the fields say.
#[derive(Clone, Debug)]
struct Piece {
    /// One to four are posted.
    transfer: u32,
    first_chunk: u32,
    count: u32,
    /// Numbers left out before it, or used again.
    skipped_numbers: i32,
    flags: Flags,
    /// From this packet on the flags, the weight and the time stamp are others.
    changes_at: u32,
    changed: Flags,
    is_for_us: bool,
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

const CHUNK: usize = 1408;

fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let flags = || prop::sample::select(&FLAGS[..]);
    let skips = prop_oneof![6 => Just(0_i32), 2 => 1_i32..4, 1 => -40_i32..0];
    let waits = prop::sample::select(&[0_u64, 0, 20, 400, 3_000][..]).prop_map(Duration::from_micros);
    let places = (1_u32..=5, 0_u32..100, 1_u32..50);
    let changes = (1_u32..80, flags());
    let piece = (places, skips, flags(), changes, prop::bool::weighted(0.95), waits).prop_map(
        |((transfer, first_chunk, count), skipped_numbers, flags, (changes_at, changed), is_for_us, wait)| {
            Piece {
                transfer,
                first_chunk,
                count,
                skipped_numbers,
                flags,
                changes_at,
                changed,
                is_for_us,
                wait,
            }
        },
    );
    prop::collection::vec(piece, 1..30)
}

/// A receiver with four transfers.
fn receiver() -> Pair {
    let mut pair = Pair::connected(never);
    let tail_bound = Contract { after_first_pass: false, deadline: None, critical_chunks: 2, ..AUTO };
    for (transfer, contract) in (1..).zip([Contract::EXACT, AUTO, tail_bound, Contract::EXACT]) {
        // The last chunk of the fourth is whole.
        pair.receive(1, transfer, CHUNK * 100 - usize::from(transfer != 4) * 400, contract);
    }
    pair
}

/// Puts a piece on the wire, from packet `number` on. Returns the number behind it.
fn send(pair: &mut Pair, piece: &Piece, number: u32) -> u32 {
    let number = number.wrapping_add_signed(piece.skipped_numbers);
    let to = ConnectionId::new(if piece.is_for_us { 2 } else { 3 }).expect("fits");
    for place in 0..piece.count {
        let mut header = Header::control(Kind::Data, to);
        let has_changed = place >= piece.changes_at;
        header.flags = if has_changed { piece.changed } else { piece.flags };
        (header.weight, header.transfer) = (1 + u16::from(has_changed), TransferId(piece.transfer));
        header.packet_number = PacketNumber(number.wrapping_add(place));
        header.offset = (piece.first_chunk + place) * CHUNK as u32;
        header.sent_at_us = pair.now.as_wire_us().wrapping_sub(500 - u32::from(has_changed));
        let total = pair.ends[1].incoming.get(&header.transfer).map_or(CHUNK * 100, Vec::len);
        let bytes = total.saturating_sub(header.offset as usize).min(CHUNK);
        let datagram = [&header.encode()[..], &vec![place as u8; bytes]].concat();
        pair.wire.push_back((pair.now, 1, datagram));
    }
    number.wrapping_add(piece.count)
}

/// All that a receiver to which these come does, and what it has then.
fn after(pieces: &[Piece], offers_runs: bool) -> (Vec<String>, BTreeMap<TransferId, Vec<u8>>) {
    OFFERS_RUNS.set(offers_runs);
    let mut pair = receiver();
    IN_RUNS.set(0);
    let (mut number, mut said) = (0, Vec::new());
    for piece in pieces {
        pair.now = pair.now + piece.wait;
        number = send(&mut pair, piece, number);
        while !pair.wire.is_empty() {
            let taken = take(&mut pair);
            pair.wire.drain(..taken);
        }
        let connection = &mut pair.ends[1].connection;
        said.push(format!("{connection:?}"));
        while let Some(event) = connection.poll_event() {
            said.push(format!("{event:?}"));
        }
        let mut scratch = [0; 2048];
        while let Some(transmit) = connection.poll_transmit(pair.now, &mut scratch) {
            let Body::Control { bytes } = transmit.body else { continue };
            said.push(format!("{transmit:?} {:?}", &scratch[..bytes]));
        }
    }
    let [_, receiver] = pair.ends;
    (said, receiver.incoming)
}

proptest! {
    #[test]
    fn whatever_comes_as_one_piece_does_what_its_datagrams_one_by_one_would(pieces in pieces()) {
        let (one_by_one, in_runs) = (after(&pieces, false), after(&pieces, true));
        for (one, other) in one_by_one.0.iter().zip(&in_runs.0) {
            prop_assert_eq!(one, other);
        }
        prop_assert!(one_by_one == in_runs);
    }
}

/// All of a transfer but its last chunk, in order.
#[test]
fn every_contract_takes_runs() {
    for transfer in 1..=4 {
        let piece = Piece {
            transfer,
            first_chunk: 0,
            count: 50,
            skipped_numbers: 0,
            flags: Flags::NONE,
            changes_at: 100,
            changed: Flags::NONE,
            is_for_us: true,
            wait: Duration::ZERO,
        };
        let second = Piece { first_chunk: 50, count: 49, ..piece.clone() };
        after(&[piece, second], true);
        // The very first packet of a path begins it; the rest of a piece in which a contract may close goes in smaller runs.
        assert!(IN_RUNS.get() > 80, "{} of 99 of transfer {transfer}", IN_RUNS.get());
    }
}
