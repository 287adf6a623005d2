//! What a batch holds, however it was filled.

use super::*;
use gradwire_core::wire::PacketNumber;
use gradwire_core::{ConnectionId, Header, Kind, Mark};

fn whole(batch: &Batch, index: usize) -> Vec<u8> {
    let (head, payload) = batch.parts(&batch.slots()[index]);
    [head, payload].concat()
}

#[test]
fn what_the_kernel_did_not_take_survives_its_tensor() {
    let mut batch = Batch::new();
    let mut tensor = [7_u8; 100];
    for i in 0..4_u8 {
        // SAFETY: `tensor` outlives the first `keep_from`.
        unsafe { batch.push((RawAddress::EMPTY, 0), &[i], &tensor[usize::from(i) * 10..][..10]) };
    }
    batch.keep_from(2);
    tensor.fill(0);
    assert_eq!(whole(&batch, 0), [&[2][..], &[7; 10]].concat());
    batch.keep_from(1);
    assert_eq!(whole(&batch, 0), [&[3][..], &[7; 10]].concat());
    batch.keep_from(1);
    assert!(batch.is_empty() && batch.has_room());
}

/// Seals by overwriting what lies behind the head of three bytes, and refuses what begins with 5.
#[derive(Debug)]
struct Nines;

impl Seal for Nines {
    fn seal(&mut self, datagram: &mut [u8]) -> bool {
        datagram[3..].fill(9);
        datagram[0] != 5
    }
}

fn nines() -> SharedSeal {
    Arc::new(Mutex::new(Nines))
}

#[test]
fn a_sealed_datagram_lies_in_the_batch_and_a_refused_one_does_not() {
    for mut batch in [Batch::new(), Batch::copying()] {
        let (to, one, other) = ((RawAddress::EMPTY, 0), nines(), nines());
        batch.push_sealed(to, &[1, 2], &[3, 4], &one);
        batch.push_sealed(to, &[5], &[6], &one);
        batch.push_sealed(to, &[5], &[8], &other);
        batch.push_sealed(to, &[7, 8, 7], &[], &one);
        assert_eq!(batch.seal(), 2);
        assert_eq!(batch.seal(), 0, "told once");
        assert_eq!(batch.slots().len(), 2);
        batch.keep_from(0);
        assert_eq!(whole(&batch, 0), [&[1, 2, 3][..], &[9; 17]].concat());
        assert_eq!(whole(&batch, 1), [&[7, 8, 7][..], &[9; 16]].concat());
    }
}

#[test]
fn what_is_sealed_later_is_sealed_once() {
    let (mut batch, seal) = (Batch::copying(), nines());
    let to = (RawAddress::EMPTY, 0);
    (0..3_u8).for_each(|i| batch.push_sealed(to, &[i], &[4; 10], &seal));
    assert_eq!(whole(&batch, 0)[..5], [0, 4, 4, 4, 4]);
    batch.seal();
    batch.keep_from(1);
    batch.heads.fill(5);
    batch.push_sealed(to, &[6], &[4; 10], &seal);
    assert_eq!(batch.seal(), 0, "nothing of the rest is sealed again, or it would be refused");
    assert_eq!(batch.slots().len(), 3);
}

#[test]
fn a_batch_that_copies_holds_what_one_that_points_does_and_outlives_the_tensor() {
    let mut tensor: Vec<u8> = (0..20_000).map(|i| i as u8).collect();
    let to = (RawAddress::EMPTY, 3);
    let header = Header::control(Kind::Data, ConnectionId::new(1).expect("fits"));
    let run = TransmitRun { header, mark: Mark::CONTROL, offset: 0, bytes: 1_408, count: 6 };
    let fill = |batch: &mut Batch| {
        // SAFETY: `tensor` outlives the use of the one that points.
        unsafe {
            batch.push(to, &[1; 24], &tensor[..1_408]);
            batch.push(to, &[2; 50], &[]);
            batch.push_run(to, &run, &tensor[..6 * 1_408]);
        }
        (batch.data_bytes(), batch.room_for(1_432, usize::MAX))
    };
    let (mut pointing, mut copying) = (Batch::new(), Batch::copying());
    assert_eq!(fill(&mut pointing), fill(&mut copying));
    let all = |batch: &Batch| (0..batch.slots().len()).map(|at| whole(batch, at)).collect::<Vec<_>>();
    let expected = all(&pointing);
    pointing.clear();
    tensor.fill(0);
    assert!(all(&copying) == expected);
}

#[test]
fn a_batch_ends_where_its_last_message_is_full() {
    let payload = [0_u8; 32_616];
    for (bytes, message) in [(1_408, 45), (32_616, 2), (100, 64), (8_896, 7)] {
        let mut batch = Batch::new();
        while batch.has_room() {
            // SAFETY: `payload` outlives the batch's last use.
            unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 24], &payload[..bytes]) };
        }
        assert_eq!(batch.slots().len(), MESSAGES * message, "{bytes} bytes");
        batch.clear();
        assert!(batch.has_room());
    }
}

#[test]
fn a_run_lies_in_the_batch_as_its_packets_would_and_leaves_as_much_room() {
    let payload: Vec<u8> = (0..60_000).map(|i| i as u8).collect();
    let to = (RawAddress::EMPTY, 3);
    for (bytes, before) in [(1_408, 1), (1_408, 30), (8_896, 3), (100, 200)] {
        let mut header = Header::control(Kind::Data, ConnectionId::new(1).expect("fits"));
        (header.packet_number, header.offset) = (PacketNumber(u32::MAX), 7);
        let run = TransmitRun { header, mark: Mark::CONTROL, offset: 7, bytes, count: 6 };
        let (mut at_once, mut one_by_one) = (Batch::new(), Batch::new());
        for batch in [&mut at_once, &mut one_by_one] {
            for _ in 0..before {
                // SAFETY: `payload` outlives the batches.
                unsafe { batch.push(to, &[0; HEADER_BYTES], &payload[..bytes]) };
            }
        }
        let mut rounds = 0;
        while at_once.room_for(HEADER_BYTES + bytes, run.count) == run.count {
            // SAFETY: as above.
            unsafe { at_once.push_run(to, &run, &payload[..6 * bytes]) };
            for (place, part) in payload[..6 * bytes].chunks(bytes).enumerate() {
                // SAFETY: as above.
                unsafe { one_by_one.push(to, &run.header_of(place).encode(), part) };
            }
            rounds += 1;
        }
        assert!(rounds > 1, "{bytes} bytes");
        let all = |batch: &Batch| (0..batch.slots().len()).map(|at| whole(batch, at)).collect::<Vec<_>>();
        assert!(all(&at_once) == all(&one_by_one), "{bytes} bytes");
        let left = at_once.room_for(HEADER_BYTES + bytes, usize::MAX);
        let mut fit = 0;
        while one_by_one.has_room() {
            // SAFETY: as above.
            unsafe { one_by_one.push(to, &[0; HEADER_BYTES], &payload[..bytes]) };
            fit += 1;
        }
        assert_eq!(left, fit, "{bytes} bytes");
    }
}

#[test]
fn small_datagrams_take_no_room_of_full_messages_and_memory_suffices_for_all() {
    let payload = [0_u8; 1_384];
    let mut batch = Batch::new();
    let mut data = 0;
    while batch.has_room() {
        let is_small = batch.slots().len() % 46 == 0;
        let payload = if is_small { &payload[..0] } else { &payload[..] };
        data += usize::from(!is_small);
        // SAFETY: `payload` outlives the batch's last use.
        unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 24], payload) };
    }
    assert_eq!(data, MESSAGES * 46, "46 of 1408 bytes, whatever lies between");
    let mut small = Batch::new();
    small.push_sealed((RawAddress::EMPTY, 0), &[0; 24], &[0; 1_384], &nines());
    while small.has_room() {
        small.push_sealed((RawAddress::EMPTY, 0), &[0; 1_000], &[], &nines());
    }
    assert!(small.slots().len() > 300, "as much as the memory holds");
    assert_eq!(small.heads.capacity(), BATCH_BYTES);
}

#[test]
fn a_batch_never_grows_beyond_its_memory() {
    let mut batch = Batch::new();
    let payload = vec![0_u8; 60_000];
    let mut pushed = 0;
    while batch.has_room() {
        // SAFETY: `payload` outlives the batch's last use.
        unsafe { batch.push((RawAddress::EMPTY, 0), &[0; 48], &payload) };
        pushed += 1;
    }
    batch.keep_from(0);
    assert!(pushed >= 3);
    assert_eq!(batch.kept.capacity(), BATCH_BYTES);
}
