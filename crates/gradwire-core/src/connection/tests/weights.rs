//! A packet that says that it sums other ranks than it may is none of its transfer.

use super::*;
use crate::{Datagrams, ReceivedMark};

const BYTES: usize = 20_000;
/// So many are granted, so that packets have not to say what they are of, and after some leave in runs.
const GRANTED_BYTES: usize = 1 << 20;
/// Place of the weight in a header.
const WEIGHT: core::ops::Range<usize> = 2..4;

/// As [`Pair::receive`], of which each packet has what one rank has contributed.
fn receive_of_one(pair: &mut Pair, bytes: usize) {
    let transfer = TransferId(1);
    pair.ends[1].incoming.insert(transfer, vec![0; bytes]);
    let request = ReceiveTransfer::new(transfer, bytes as u64, [1; 16], Contract::EXACT);
    let request = ReceiveTransfer { weights: (1, 1), ..request };
    let end = &mut pair.ends[1];
    end.connection.receive(pair.now, request).expect("a fresh transfer");
    while let Some(payload) = end.connection.poll_payload(pair.now) {
        assert_eq!(payload.weight, 1);
        place(&mut end.incoming, &payload);
    }
}

/// All data on its way to the second end.
fn data_on_wire(pair: &mut Pair) -> impl Iterator<Item = &mut Vec<u8>> {
    let is_data = |datagram: &[u8]| Header::decode(datagram).is_ok_and(|(it, _)| it.kind == Kind::Data);
    let data = pair.wire.iter_mut().filter(move |(_, to, datagram)| *to == 1 && is_data(datagram));
    data.map(|(.., datagram)| datagram)
}

/// Changes what it says of whom it sums.
fn forge(pair: &mut Pair, weight: u16) -> usize {
    data_on_wire(pair).map(|datagram| datagram[WEIGHT].copy_from_slice(&weight.to_le_bytes())).count()
}

#[test]
fn what_says_that_it_sums_other_ranks_is_dropped_and_comes_again() {
    for weight in [0, 2, 1_000, u16::MAX] {
        // Posted before its data comes, and behind it.
        for is_early in [false, true] {
            let mut pair = Pair::connected(never);
            if !is_early {
                receive_of_one(&mut pair, BYTES);
            }
            let data = pattern(BYTES);
            pair.send(0, 1, data.clone(), Reliability::Exact);
            pair.drain();
            assert!(forge(&mut pair, weight) > 1);
            if is_early {
                let offered = |pair: &Pair| pair.has(1, |event| matches!(event, Event::Offered { .. }));
                pair.run_until(Duration::from_secs(1), offered);
                receive_of_one(&mut pair, BYTES);
            }
            pair.run_until(Duration::from_secs(2), |pair| pair.missing(0, 1).is_some());
            assert_eq!(pair.missing(0, 1), Some(Vec::new()), "{weight} {is_early}");
            assert!(pair.ends[1].incoming[&TransferId(1)] == data, "{weight} {is_early}");
        }
    }
}

/// As from a socket that puts datagrams together.
#[test]
fn a_run_of_packets_that_say_that_they_sum_other_ranks_is_none() {
    for (weight, is_run) in [(0, false), (2, false), (1, true)] {
        let mut pair = Pair::connected(never);
        receive_of_one(&mut pair, GRANTED_BYTES);
        pair.send(0, 1, pattern(GRANTED_BYTES), Reliability::Exact);
        pair.run_until(Duration::from_secs(1), |pair| pair.ends[1].connection.stats().packets_received > 100);
        let sent: Vec<Vec<u8>> = data_on_wire(&mut pair).map(|datagram| datagram.clone()).collect();
        forge(&mut pair, weight);
        let forged: Vec<u8> = data_on_wire(&mut pair).flat_map(|datagram| datagram.clone()).collect();
        let (stride, now, receiver) = (sent[0].len(), pair.now, &mut pair.ends[1].connection);
        let lengths: Vec<usize> = sent.iter().map(Vec::len).collect();
        assert!(sent.len() > 10 && forged.len() == sent.len() * stride, "{lengths:?}");
        let mut runs = 0;
        for (at, datagram) in sent.iter().enumerate() {
            let datagrams = Datagrams::new(&forged[at * stride..], stride, 0);
            if receiver.handle_run(now, datagrams, ReceivedMark::default()).is_some() {
                runs += 1;
                break;
            }
            receiver.handle_datagram(now, datagram).expect("well-formed");
        }
        assert_eq!(runs > 0, is_run, "{weight}");
    }
}
