//! Both directions between this rank and one peer.

use super::keys::{Cipher, Direction, PairSecret};
use super::open::{Opener, Refusal};
use super::seal::Sealer;
use crate::socket::SharedSeal;
use gradwire_core::Timestamp;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Seals what goes to a peer and opens what comes from it.
#[derive(Debug)]
pub(crate) struct Channel {
    /// Of whichever thread sends: numbers go up in the order in which datagrams leave.
    sealer: SharedSeal,
    seals_refused: Arc<AtomicU64>,
    opener: Opener,
}

impl Channel {
    /// Between this rank and `peer`, over so many paths; of a path so many datagrams with data may overtake one
    /// ([`gradwire_core::ConnectionConfig::overtaken_max`]).
    pub(crate) fn new(
        secret: PairSecret,
        cipher: Cipher,
        (rank, peer): (u32, u32),
        (paths, overtaken): (u8, u32),
    ) -> Self {
        let secret = Arc::new(secret);
        let sealer = Sealer::new(&secret, cipher, Direction::from_to(rank, peer), paths);
        let opener = Opener::new(&secret, cipher, Direction::from_to(peer, rank), (paths, overtaken));
        Self { seals_refused: Arc::clone(sealer.refused()), sealer: Arc::new(Mutex::new(sealer)), opener }
    }

    /// What seals.
    pub(crate) fn sealer(&self) -> &SharedSeal {
        &self.sealer
    }

    /// See [`Opener::open`].
    ///
    /// # Errors
    /// [`Refusal`].
    pub(crate) fn open<'d>(
        &mut self,
        now: Timestamp,
        datagram: &'d mut [u8],
    ) -> Result<&'d mut [u8], Refusal> {
        self.opener.open(now, datagram)
    }

    /// Datagrams that were not authentic, that had come before, and that were not sealed.
    pub(crate) fn counts(&self) -> (u64, u64, u64) {
        (self.opener.not_authentic(), self.opener.replayed(), self.seals_refused.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::super::keys::tests::{context, secret};
    use super::super::numbers::EPOCH_BITS;
    use super::super::replay::WINDOW;
    use super::*;
    use crate::handle::lock;
    use gradwire_core::wire::{Kind, PacketNumber, PathId, HEADER_BYTES, TAG_BYTES};
    use gradwire_core::{ConnectionId, Header};
    use proptest::prelude::*;
    use std::collections::HashSet;
    use std::time::Duration;

    const PATHS: u8 = 2;
    const NOW: Timestamp = Timestamp::ZERO;

    fn pair_in(group: &str, byte: u8) -> (Channel, Channel) {
        pair_of(group, byte, 0)
    }

    fn pair_of(group: &str, byte: u8, overtaken: u32) -> (Channel, Channel) {
        let derive = || PairSecret::derive(&secret(byte), &context(group));
        let channel = |ranks| Channel::new(derive(), Cipher::Aes256Gcm, ranks, (PATHS, overtaken));
        (channel((0, 1)), channel((1, 0)))
    }

    fn pair() -> (Channel, Channel) {
        pair_in("g", 1)
    }

    fn plain(kind: Kind, path: u8, number: u32, body: &[u8]) -> Vec<u8> {
        let mut header = Header::control(kind, ConnectionId::new(71).unwrap());
        (header.path, header.packet_number) = (PathId(path), PacketNumber(number));
        [&header.encode()[..], body].concat()
    }

    fn sealed(channel: &mut Channel, plain: &[u8]) -> Option<Vec<u8>> {
        let mut datagram = [plain, &[0; TAG_BYTES]].concat();
        lock(channel.sealer()).seal(&mut datagram).then_some(datagram)
    }

    fn data(channel: &mut Channel, number: u32) -> Vec<u8> {
        sealed(channel, &plain(Kind::Data, 0, number, b"gradients")).expect("a new number")
    }

    #[test]
    fn what_was_sealed_opens_as_it_was_and_shows_only_its_header() {
        let (mut a, mut b) = pair();
        for (kind, path) in [(Kind::Data, 0), (Kind::Hello, 0), (Kind::Ack, 1), (Kind::Data, 1)] {
            let before = plain(kind, path, 0, b"nobody may read this");
            let mut datagram = sealed(&mut a, &before).unwrap();
            assert_eq!(datagram[..8], before[..8]);
            assert!(!datagram.windows(6).any(|bytes| bytes == b"nobody"), "{kind:?}");
            assert_eq!(b.open(NOW, &mut datagram), Ok(&mut before.clone()[..]), "{kind:?}");
        }
        assert_eq!((a.counts(), b.counts()), ((0, 0, 0), (0, 0, 0)));
    }

    #[test]
    fn no_changed_byte_passes_wherever_it_is() {
        let (mut a, mut b) = pair();
        let datagram = data(&mut a, 0);
        for at in 0..datagram.len() {
            let mut changed = datagram.clone();
            changed[at] ^= 1;
            assert!(b.open(NOW, &mut changed).is_err(), "byte {at}");
        }
        for bytes in 0..datagram.len() {
            assert!(b.open(NOW, &mut datagram[..bytes].to_vec()).is_err(), "cut to {bytes} bytes");
        }
        assert!(b.open(NOW, &mut [&datagram[..], &[0]].concat()).is_err());
        assert!(b.open(NOW, &mut datagram.clone()).is_ok(), "nothing of it has used up the number");
    }

    #[test]
    fn a_packet_for_another_direction_group_secret_or_path_does_not_open() {
        let (mut a, mut b) = pair();
        let mut reflected = data(&mut a, 0);
        assert_eq!(a.open(NOW, &mut reflected), Err(Refusal::NotAuthentic), "reflected");
        for (mut other, why) in [(pair_in("h", 1).0, "group"), (pair_in("g", 2).0, "secret")] {
            assert_eq!(b.open(NOW, &mut data(&mut other, 0)), Err(Refusal::NotAuthentic), "{why}");
        }
        let mut moved = data(&mut a, 1);
        moved[7] = 1;
        assert_eq!(b.open(NOW, &mut moved), Err(Refusal::NotAuthentic), "path");
        moved[7] = PATHS;
        assert_eq!(b.open(NOW, &mut moved), Err(Refusal::NotAuthentic), "no such path");
    }

    #[test]
    fn a_packet_opens_once_and_not_behind_the_window() {
        let (mut a, mut b) = pair();
        let old = data(&mut a, 0);
        let first = data(&mut a, 1);
        assert!(b.open(NOW, &mut first.clone()).is_ok());
        assert_eq!(b.open(NOW, &mut first.clone()), Err(Refusal::Replayed));
        assert!(b.open(NOW, &mut data(&mut a, WINDOW as u32 + 5)).is_ok());
        assert_eq!(b.open(NOW, &mut old.clone()), Err(Refusal::Replayed));
        assert_eq!(b.counts(), (0, 2, 0));
        let mut hello = sealed(&mut a, &plain(Kind::Hello, 0, 0, b"")).unwrap();
        let again = hello.clone();
        assert!(b.open(NOW, &mut hello).is_ok(), "control has numbers of its own");
        assert_eq!(b.open(NOW, &mut again.clone()), Err(Refusal::Replayed));
    }

    #[test]
    fn where_urgent_packets_overtake_others_a_packet_opens_once_however_many_have() {
        const OVERTAKEN: u32 = 1 << 20;
        let (mut a, mut b) = pair_of("g", 1, OVERTAKEN);
        let (older, old) = (data(&mut a, 0), data(&mut a, 1));
        for number in [2, WINDOW as u32 + 5, OVERTAKEN] {
            assert!(b.open(NOW, &mut data(&mut a, number)).is_ok());
        }
        assert!(b.open(NOW, &mut old.clone()).is_ok());
        assert_eq!(b.open(NOW, &mut old.clone()), Err(Refusal::Replayed));
        assert_eq!(b.open(NOW, &mut older.clone()), Err(Refusal::Replayed), "behind the window");
    }

    #[test]
    fn numbers_that_nobody_authenticated_do_not_move_the_window() {
        let (mut a, mut b) = pair();
        let honest = data(&mut a, 3);
        for number in [4_u32, 1_000_000, u32::MAX / 2, u32::MAX] {
            assert!(b.open(NOW, &mut [plain(Kind::Data, 0, number, b""), vec![0; 16]].concat()).is_err());
        }
        assert!(b.open(NOW, &mut honest.clone()).is_ok());
    }

    #[test]
    fn a_number_that_was_used_is_not_sealed_again() {
        let (mut a, _) = pair();
        data(&mut a, 5);
        for number in [5, 4, 0] {
            assert_eq!(sealed(&mut a, &plain(Kind::Data, 0, number, b"other")), None, "{number}");
        }
        assert!(sealed(&mut a, &plain(Kind::Data, 1, 5, b"")).is_some(), "another path");
        assert!(sealed(&mut a, &plain(Kind::Data, PATHS, 0, b"")).is_none(), "no such path");
        assert!(sealed(&mut a, &plain(Kind::Data, 0, 6, b"")).is_some());
        assert_eq!(a.counts(), (0, 0, 4));
    }

    /// The same body under every number of every space gives another ciphertext: no pair of key and nonce comes twice.
    #[test]
    fn no_two_packets_have_a_key_stream_in_common() {
        let (mut a, mut b) = pair();
        let mut seen = HashSet::new();
        for channel in [&mut a, &mut b] {
            for number in 0..200_u32 {
                for (kind, path) in [(Kind::Data, 0), (Kind::Data, 1), (Kind::Ping, 0), (Kind::Ack, 1)] {
                    let datagram = sealed(channel, &plain(kind, path, number, &[0; 32])).unwrap();
                    assert!(
                        seen.insert(datagram[HEADER_BYTES..HEADER_BYTES + 32].to_vec()),
                        "{kind:?} {number}"
                    );
                }
            }
        }
    }

    #[test]
    fn keys_change_with_the_epoch_at_both_ends_and_late_packets_of_the_last_one_still_open() {
        let (mut a, mut b) = pair();
        // As far as a peer may jump at once.
        let step = (1_u32 << (EPOCH_BITS - 1)) - 1;
        let mut number = 0_u32;
        let mut keys = HashSet::new();
        for _ in 0..7 {
            let late = data(&mut a, number);
            let newest = data(&mut a, number + 1);
            assert!(b.open(NOW, &mut newest.clone()).is_ok(), "{number}");
            assert!(b.open(NOW, &mut late.clone()).is_ok(), "{number}");
            keys.insert(number >> EPOCH_BITS);
            number += step;
        }
        assert!(keys.len() >= 3, "{keys:?}");
        let border = 5_u32 << EPOCH_BITS;
        while number < border - 1 {
            assert!(b.open(NOW, &mut data(&mut a, number)).is_ok(), "{number}");
            number += step.min(border - 1 - number);
        }
        let (last, first) = (data(&mut a, border - 1), data(&mut a, border));
        assert!(b.open(NOW, &mut first.clone()).is_ok() && b.open(NOW, &mut last.clone()).is_ok());
    }

    #[test]
    fn a_path_that_was_dead_for_millions_of_numbers_is_heard_again() {
        let (mut a, mut b) = pair();
        let at = |ms| NOW + Duration::from_millis(ms);
        assert!(b.open(at(5_000), &mut data(&mut a, 7)).is_ok());
        let mut number = 8 + (3 << EPOCH_BITS);
        let mut far = |ms, count| -> u32 {
            let mut open = |number| u32::from(b.open(at(ms), &mut data(&mut a, number)).is_ok());
            let opened = (number..number + count).map(&mut open).sum();
            number += count;
            opened
        };
        assert_eq!([far(5_001, 40), far(6_000, 40)], [0, 0], "something was opened a second ago");
        assert_eq!([far(6_001, 40), far(6_001, 40)], [40, 40]);
    }

    #[test]
    fn what_nobody_sealed_is_tried_ten_times_in_a_second_at_most_however_far_ahead_it_is() {
        let (mut a, mut b) = pair();
        assert!(b.open(NOW, &mut data(&mut a, 7)).is_ok());
        let far = 7 + (3 << EPOCH_BITS);
        let (honest, last) = (data(&mut a, 8), data(&mut a, far));
        let at = |ms| NOW + Duration::from_secs(9) + Duration::from_millis(ms);
        // From the second on one is tried at 1000 ms, at 1100 and at 1200.
        for ms in (0..1_290).step_by(10) {
            let mut made_up = [plain(Kind::Data, 0, far, b"gradients"), vec![0; TAG_BYTES]].concat();
            assert!(b.open(at(ms), &mut made_up).is_err());
        }
        assert!(b.open(at(1_299), &mut last.clone()).is_err(), "not tried");
        assert!(b.open(at(1_299), &mut honest.clone()).is_ok(), "nothing has moved");
        assert!(b.open(at(1_300), &mut last.clone()).is_err(), "the path is not silent");
        assert!(b.open(at(2_299), &mut last.clone()).is_err());
        assert!(b.open(at(2_300), &mut last.clone()).is_ok());
    }

    #[test]
    fn numbers_go_on_after_32_bits() {
        let (mut a, mut b) = pair();
        let step = (1_u64 << (EPOCH_BITS - 1)) - 1;
        let mut number = 0_u64;
        let mut first = None;
        while number < (1 << 32) + step {
            let datagram = data(&mut a, number as u32);
            first.get_or_insert_with(|| datagram.clone());
            assert!(b.open(NOW, &mut datagram.clone()).is_ok(), "{number}");
            number += step;
        }
        // Its number, zero, is behind the window in the next 2^32 as well, and under another key.
        assert!(first.is_some_and(|mut first| b.open(NOW, &mut first).is_err()));
        assert_eq!(sealed(&mut a, &plain(Kind::Data, 0, 0, b"")), None, "zero was used, and so was 2^32");
    }

    proptest! {
        /// Whatever order, loss and duplication a network makes: each packet opens at most once, and all that are inside the
        /// window of what came before do.
        #[test]
        fn each_packet_opens_at_most_once(order in prop::collection::vec(0_usize..200, 0..400)) {
            let (mut a, mut b) = pair();
            let datagrams: Vec<Vec<u8>> = (0..200).map(|number| data(&mut a, number)).collect();
            let mut opened = HashSet::new();
            for index in order {
                let outcome = b.open(NOW, &mut datagrams[index].clone()).is_ok();
                prop_assert_eq!(outcome, opened.insert(index));
            }
        }
    }
}
