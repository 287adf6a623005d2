//! What the network is told about packets, and what is counted of it.

use super::*;
use crate::transfer::SendHalf;
use crate::{ChunkSet, Ecn, Mark, ReceivedMark, TagStats, TrafficClass, TransferTags};
use gradwire_wire::StatusBody;

const CLASS: u8 = 3;
const CHUNK: usize = 1408;
/// Fewer than the first window holds: no acknowledgement is needed.
const CHUNKS: usize = 8;

/// A send of `chunks` chunks of which the odd ones are important.
fn odd_ones_matter(transfer: u32, chunks: usize, reliability: Reliability) -> SendTransfer {
    let words: Vec<u64> = vec![0xAAAA_AAAA_AAAA_AAAA; 2];
    let tags = TransferTags { class: CLASS, important: Some(ChunkSet::new(words.into(), 0)) };
    let exact = SendTransfer::exact(TransferId(transfer), (chunks * CHUNK) as u64, [1; 16]);
    SendTransfer { reliability, tags, ..exact }
}

/// Posts both halves and returns the datagrams of the first pass with their marks; none has been delivered.
fn first_pass(pair: &mut Pair, send: SendTransfer) -> Vec<(Header, Mark, Vec<u8>)> {
    let (bytes, transfer) = (send.bytes as usize, send.transfer);
    pair.receive(1, transfer.0, bytes, Contract::EXACT);
    pair.ends[0].outgoing.insert(transfer, pattern(bytes));
    pair.ends[0].connection.send(pair.now, send).expect("a fresh transfer");
    let mut scratch = [0; 2048];
    let mut out = Vec::new();
    for _ in 0..100 {
        match pair.ends[0].connection.poll_transmit(pair.now, &mut scratch) {
            Some(transmit) => {
                let datagram = assemble(&transmit, &scratch, &pair.ends[0].outgoing);
                out.push((transmit.header, transmit.mark, datagram));
            }
            None => pair.now = pair.now + Duration::from_micros(50),
        }
    }
    out
}

// test of: mlt/gradient-aware-queueing
#[test]
fn a_switch_is_told_to_keep_what_is_important_or_awaited() {
    for reliability in [Reliability::Tolerant, Reliability::Exact] {
        let mut pair = Pair::connected(never);
        let mut data = 0;
        for (header, mark, _) in first_pass(&mut pair, odd_ones_matter(5, CHUNKS, reliability)) {
            if header.kind != Kind::Data {
                assert_eq!(mark, Mark::CONTROL);
                continue;
            }
            data += 1;
            let is_important = header.offset as usize / CHUNK % 2 == 1;
            assert_eq!(header.flags.contains(Flags::IMPORTANT), is_important);
            assert_eq!(mark.class, TrafficClass::Data(CLASS));
            assert_eq!(mark.ecn_capable, is_important || reliability == Reliability::Exact);
        }
        assert_eq!(data, CHUNKS);
    }
}

#[test]
fn what_nobody_has_told_apart_is_kept() {
    let mut pair = Pair::connected(never);
    let send = odd_ones_matter(5, CHUNKS, Reliability::Tolerant);
    let tags = TransferTags { important: None, ..send.tags };
    let packets = first_pass(&mut pair, SendTransfer { tags, ..send });
    let data: Vec<_> = packets.iter().filter(|(header, ..)| header.kind == Kind::Data).collect();
    assert!(data.len() == CHUNKS && data.iter().all(|(_, mark, _)| mark.ecn_capable), "{data:?}");
    assert!(data.iter().all(|(header, ..)| !header.flags.contains(Flags::IMPORTANT)));
}

// test of: tags/counted
#[test]
fn classes_importance_and_congestion_marks_are_counted_at_both_ends() {
    let mut pair = Pair::connected(never);
    let packets = first_pass(&mut pair, odd_ones_matter(5, CHUNKS, Reliability::Tolerant));
    for (i, (header, _, datagram)) in packets.iter().enumerate() {
        let ecn = [Ecn::NotCapable, Ecn::Capable, Ecn::Congestion][i % 3];
        // The network has cleared the class of one in four.
        let class = if i % 4 == 0 { None } else { Some(CLASS) };
        let mark = ReceivedMark { class, ecn };
        let result = pair.ends[1].connection.handle_marked_datagram(pair.now, datagram, mark);
        assert!(header.kind != Kind::Data || matches!(result, Ok(Some(_))), "{result:?}");
    }
    assert!(packets.iter().all(|(header, ..)| header.kind == Kind::Data) && packets.len() == CHUNKS);
    let mut expected = TagStats { important_sent: 4, ..TagStats::default() };
    expected.sent[usize::from(CLASS)] = 8;
    assert_eq!(pair.ends[0].connection.stats().tags, expected);
    let mut expected = TagStats { important_received: 4, ..TagStats::default() };
    expected.received[usize::from(CLASS)] = 6;
    (expected.ecn_capable_received, expected.congestion_received) = (5, 2);
    assert_eq!(pair.ends[1].connection.stats().tags, expected);
}

/// In the first queue of a switch with one for each class it would overtake what it asks about, which would then count as lost.
#[test]
fn a_question_stays_behind_the_data_of_its_class() {
    let mut pair = Pair::connected(never);
    let packets = first_pass(&mut pair, odd_ones_matter(5, CHUNKS, Reliability::Tolerant));
    assert_eq!(packets.len(), CHUNKS);
    // Nothing was delivered.
    pair.now = pair.now + Duration::from_millis(100);
    let sender = &mut pair.ends[0].connection;
    sender.handle_timeout(pair.now);
    let mut scratch = [0; 2048];
    let mut out = core::iter::from_fn(|| sender.poll_transmit(pair.now, &mut scratch));
    let question = out.find(|transmit| transmit.header.kind == Kind::Probe).expect("it asks");
    assert_eq!(question.mark, Mark { class: TrafficClass::Data(CLASS), ecn_capable: true });
}

#[test]
fn of_what_a_tolerant_receiver_asks_for_the_important_goes_first() {
    let missing = |chunks: &[u32]| chunks.iter().fold(0_u64, |word, chunk| word | 1 << chunk);
    let resent = |reliability| {
        let mut half = SendHalf::new(odd_ones_matter(5, 20, reliability), CHUNK as u32, true);
        (0..20).for_each(|chunk| half.on_sent(chunk, 0));
        (0..20).for_each(|chunk| half.on_lost(chunk));
        (0..20)
            .filter(|chunk| !matches!(chunk, 2 | 4 | 8 | 11 | 15))
            .for_each(|chunk| half.on_acked(chunk, 1));
        let mut status = StatusBody {
            state: gradwire_wire::TransferState::Open,
            received_chunks: 15,
            wanted_chunks: 2,
            first_chunk: 0,
            echo_us: 0,
            stage_us: 0,
            words: 1,
            missing: [0; STATUS_WORDS_MAX],
        };
        status.missing[0] = missing(&[2, 4, 8, 11, 15]);
        half.on_status(&status);
        let mut chunks = Vec::new();
        while let Some(chunk) = half.peek_resend() {
            half.on_sent(chunk, 0);
            chunks.push(chunk);
        }
        chunks
    };
    // Two and one to spare.
    assert_eq!(resent(Reliability::Tolerant), [2, 11, 15]);
    assert_eq!(resent(Reliability::Exact), [2, 4, 8, 11, 15]);
}
