//! From the job secret to the key of one packet (docs/protocol.md section 8).
//!
//! ```text
//! job secret, both ranks' random bytes -> pair secret   (HKDF-SHA256; also: versions, group, ranks, connection ids)
//! pair secret, direction, path, domain, epoch -> key and nonce mask
//! nonce = mask xor packet number
//! ```
//! Each key seals the numbers of one epoch of one path, direction and domain, so a number that is used once makes a nonce
//! that is used once.

use super::secret::JobSecret;
use super::RANDOM_BYTES;
use gradwire_core::wire::TAG_BYTES;
use ring::aead::{Aad, Algorithm, LessSafeKey, Nonce, UnboundKey, AES_256_GCM, CHACHA20_POLY1305, NONCE_LEN};
use ring::hkdf::{KeyType, Prk, Salt, HKDF_SHA256};
use std::mem::MaybeUninit;
use zeroize::{Zeroize, Zeroizing};

/// Bytes of every key and of the pair secret.
const KEY_BYTES: usize = 32;

/// What seals.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Cipher {
    /// Where every rank's processor has instructions for it.
    Aes256Gcm,
    /// Fast without any.
    ChaCha20Poly1305,
}

impl Cipher {
    /// Whether this processor computes AES in hardware.
    pub(crate) fn has_aes() -> bool {
        #[cfg(target_arch = "x86_64")]
        return std::arch::is_x86_feature_detected!("aes")
            && std::arch::is_x86_feature_detected!("pclmulqdq");
        #[cfg(target_arch = "aarch64")]
        return std::arch::is_aarch64_feature_detected!("aes")
            && std::arch::is_aarch64_feature_detected!("pmull");
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        false
    }

    /// Its name in statistics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Aes256Gcm => "AES-256-GCM",
            Self::ChaCha20Poly1305 => "ChaCha20-Poly1305",
        }
    }

    fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::Aes256Gcm => &AES_256_GCM,
            Self::ChaCha20Poly1305 => &CHACHA20_POLY1305,
        }
    }
}

/// Packets with numbers of their own on each path.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Domain {
    /// Numbered by the connection.
    Data = 0,
    /// Numbered by what seals them.
    Control = 1,
}

/// Which way between two ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Direction {
    /// From the lower rank to the higher.
    Up = 0,
    /// From the higher to the lower.
    Down = 1,
}

impl Direction {
    /// From one rank to another.
    pub(crate) fn from_to(from: u32, to: u32) -> Self {
        if from < to {
            Self::Up
        } else {
            Self::Down
        }
    }
}

/// One rank of a pair, for the key schedule.
#[derive(Clone, Debug)]
pub(crate) struct PairEnd {
    pub(crate) rank: u32,
    /// Connection id that it receives by.
    pub(crate) connection: u32,
    /// What it drew for this group.
    pub(crate) random: [u8; RANDOM_BYTES],
}

/// Everything that tells the keys of one pair of ranks from all others.
#[derive(Clone, Debug)]
pub(crate) struct PairContext<'a> {
    pub(crate) protocol: u8,
    pub(crate) group: &'a str,
    /// The lower rank first.
    pub(crate) ends: [PairEnd; 2],
}

/// What all keys between two ranks of one group come from. Overwritten when dropped.
pub(crate) struct PairSecret(Zeroizing<[u8; KEY_BYTES]>);

impl PairSecret {
    pub(crate) fn derive(secret: &JobSecret, context: &PairContext<'_>) -> Self {
        let [low, high] = &context.ends;
        let salt = [low.random, high.random].concat();
        let group_bytes = (context.group.len() as u32).to_le_bytes();
        let numbers = [low.rank, high.rank, low.connection, high.connection].map(u32::to_le_bytes).concat();
        let info = [PAIR_LABEL, &[context.protocol], &group_bytes, context.group.as_bytes(), &numbers];
        let prk = Salt::new(HKDF_SHA256, &salt).extract(secret.bytes());
        Self(expand(&prk, &info))
    }

    /// What the hellos of one direction say in a group in clear with this fingerprint. Who has heard those of one direction cannot say those
    /// of the other.
    pub(crate) fn hello_word(&self, direction: Direction, fingerprint: u64) -> u64 {
        let prk = Prk::new_less_safe(HKDF_SHA256, &*self.0);
        let fingerprint = fingerprint.to_le_bytes();
        u64::from_le_bytes(*expand(&prk, &[HELLO_LABEL, &[direction as u8], &fingerprint]))
    }

    /// The key of one epoch.
    pub(crate) fn packet_key(&self, cipher: Cipher, place: KeyPlace) -> PacketKey {
        let prk = Prk::new_less_safe(HKDF_SHA256, &*self.0);
        let KeyPlace { direction, path, domain, epoch } = place;
        let place = [direction as u8, path, domain as u8];
        let epoch = epoch.to_le_bytes();
        let key: Zeroizing<[u8; KEY_BYTES]> = expand(&prk, &[KEY_LABEL, &place, &epoch]);
        let mask: Zeroizing<[u8; NONCE_LEN]> = expand(&prk, &[MASK_LABEL, &place, &epoch]);
        PacketKey::new(cipher, &key, *mask)
    }
}

/// Key of what ranks publish in the store.
pub(crate) fn record_key(secret: &JobSecret, protocol: u8, group: &str) -> PacketKey {
    let prk = Salt::new(HKDF_SHA256, RECORD_LABEL).extract(secret.bytes());
    let key: Zeroizing<[u8; KEY_BYTES]> = expand(&prk, &[RECORD_LABEL, &[protocol], group.as_bytes()]);
    // Every processor can compute it, and a record is small.
    PacketKey::new(Cipher::ChaCha20Poly1305, &key, [0; NONCE_LEN])
}

/// Which packets a key is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct KeyPlace {
    pub(crate) direction: Direction,
    pub(crate) path: u8,
    pub(crate) domain: Domain,
    pub(crate) epoch: u64,
}

/// A key and the mask of its nonces. Both are overwritten when dropped.
pub(crate) struct PacketKey {
    /// Always initialised: only in this form can its memory be overwritten, because ring does not do it.
    key: MaybeUninit<LessSafeKey>,
    mask: [u8; NONCE_LEN],
}

impl PacketKey {
    fn new(cipher: Cipher, key: &[u8; KEY_BYTES], mask: [u8; NONCE_LEN]) -> Self {
        let key = UnboundKey::new(cipher.algorithm(), key).expect("both ciphers have keys of 32 bytes");
        Self { key: MaybeUninit::new(LessSafeKey::new(key)), mask }
    }

    /// Encrypts `body` in place and returns the tag that goes behind it.
    pub(crate) fn seal(&self, number: u64, header: &[u8], body: &mut [u8]) -> [u8; TAG_BYTES] {
        self.seal_with(self.nonce(number), header, body)
    }

    /// Decrypts `sealed`, the body with the tag behind it, in place; the body. `None`: it was not sealed so.
    pub(crate) fn open<'d>(&self, number: u64, header: &[u8], sealed: &'d mut [u8]) -> Option<&'d mut [u8]> {
        self.open_with(self.nonce(number), header, sealed)
    }

    /// As [`PacketKey::seal`], with a nonce of the caller's.
    pub(crate) fn seal_with(
        &self,
        nonce: [u8; NONCE_LEN],
        header: &[u8],
        body: &mut [u8],
    ) -> [u8; TAG_BYTES] {
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = self.key().seal_in_place_separate_tag(nonce, Aad::from(header), body);
        // Fails above 64 GiB.
        let tag = tag.expect("a datagram is short enough");
        tag.as_ref().try_into().expect("both ciphers have tags of 16 bytes")
    }

    /// As [`PacketKey::open`], with a nonce of the caller's.
    pub(crate) fn open_with<'d>(
        &self,
        nonce: [u8; NONCE_LEN],
        header: &[u8],
        sealed: &'d mut [u8],
    ) -> Option<&'d mut [u8]> {
        self.key().open_in_place(Nonce::assume_unique_for_key(nonce), Aad::from(header), sealed).ok()
    }

    fn nonce(&self, number: u64) -> [u8; NONCE_LEN] {
        let mut nonce = self.mask;
        for (byte, other) in nonce[NONCE_LEN - 8..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= other;
        }
        nonce
    }

    fn key(&self) -> &LessSafeKey {
        // SAFETY: `new` initialises it, and only `drop` takes that away.
        unsafe { self.key.assume_init_ref() }
    }
}

impl Drop for PacketKey {
    fn drop(&mut self) {
        // ring's key owns nothing that it would have to give back.
        self.key.zeroize();
        self.mask.zeroize();
    }
}

impl std::fmt::Debug for PacketKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PacketKey(..)")
    }
}

impl std::fmt::Debug for PairSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PairSecret(..)")
    }
}

/// Each derivation has a label of its own, so that no output can serve for another.
const PAIR_LABEL: &[u8] = b"gradwire pair";
const KEY_LABEL: &[u8] = b"gradwire key";
const MASK_LABEL: &[u8] = b"gradwire mask";
const HELLO_LABEL: &[u8] = b"gradwire hello";
const RECORD_LABEL: &[u8] = b"gradwire record";

/// Length of what is derived.
struct Bytes<const N: usize>;

impl<const N: usize> KeyType for Bytes<N> {
    fn len(&self) -> usize {
        N
    }
}

fn expand<const N: usize>(prk: &Prk, info: &[&[u8]]) -> Zeroizing<[u8; N]> {
    let mut out = Zeroizing::new([0; N]);
    let filled = prk.expand(info, Bytes::<N>).and_then(|okm| okm.fill(&mut *out));
    filled.expect("far below HKDF's limit of 255 blocks");
    out
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::HashSet;

    pub(crate) fn secret(byte: u8) -> JobSecret {
        JobSecret::new(vec![byte; 32]).unwrap()
    }

    pub(crate) fn context(group: &str) -> PairContext<'_> {
        let end = |rank: u32| PairEnd { rank, connection: 70 + rank, random: [rank as u8; RANDOM_BYTES] };
        PairContext { protocol: 1, group, ends: [end(0), end(1)] }
    }

    const PLACE: KeyPlace = KeyPlace { direction: Direction::Up, path: 0, domain: Domain::Data, epoch: 0 };

    fn tag(secret: &JobSecret, context: &PairContext<'_>, place: KeyPlace) -> [u8; TAG_BYTES] {
        let key = PairSecret::derive(secret, context).packet_key(Cipher::ChaCha20Poly1305, place);
        key.seal(0, b"header", &mut [7; 40])
    }

    /// Everything that goes into a key makes another key.
    #[test]
    fn no_two_places_groups_ids_random_bytes_or_secrets_share_a_key() {
        let base = context("g");
        let changed = |change: &dyn Fn(&mut PairContext<'_>)| {
            let mut context = base.clone();
            change(&mut context);
            tag(&secret(1), &context, PLACE)
        };
        let mut tags = vec![
            tag(&secret(1), &base, PLACE),
            tag(&secret(2), &base, PLACE),
            tag(&secret(1), &context("h"), PLACE),
            changed(&|c| c.protocol = 2),
            changed(&|c| c.ends[0].connection += 1),
            changed(&|c| c.ends[1].connection += 1),
            changed(&|c| c.ends[1].rank += 1),
            changed(&|c| c.ends[0].random[31] ^= 1),
            changed(&|c| c.ends[1].random[0] ^= 1),
            changed(&|c| c.ends.swap(0, 1)),
        ];
        for place in [
            KeyPlace { direction: Direction::Down, ..PLACE },
            KeyPlace { path: 1, ..PLACE },
            KeyPlace { domain: Domain::Control, ..PLACE },
            KeyPlace { epoch: 1, ..PLACE },
        ] {
            tags.push(tag(&secret(1), &base, place));
        }
        let distinct: HashSet<_> = tags.iter().collect();
        assert_eq!(distinct.len(), tags.len());
    }

    #[test]
    fn both_ends_derive_the_same_and_both_ciphers_open_what_they_sealed() {
        for cipher in [Cipher::Aes256Gcm, Cipher::ChaCha20Poly1305] {
            let key = || PairSecret::derive(&secret(1), &context("g")).packet_key(cipher, PLACE);
            let mut datagram = [9_u8; 56];
            let tag = key().seal(5, b"header", &mut datagram[..40]);
            datagram[40..].copy_from_slice(&tag);
            for (number, header) in [(6, b"header"), (5, b"Header")] {
                assert!(key().open(number, header, &mut datagram.clone()).is_none(), "{number}");
            }
            assert_eq!(key().open(5, b"header", &mut datagram).map(|body| body.to_vec()), Some(vec![9; 40]));
        }
    }

    #[test]
    fn every_number_has_a_nonce_of_its_own() {
        let key = PairSecret::derive(&secret(1), &context("g")).packet_key(Cipher::Aes256Gcm, PLACE);
        let numbers = (0..64).map(|bit| 1_u64 << bit).chain([0, 3, u64::MAX]);
        let nonces: Vec<_> = numbers.map(|number| key.nonce(number)).collect();
        assert_eq!(nonces.iter().collect::<HashSet<_>>().len(), nonces.len());
    }

    #[test]
    fn a_dropped_key_leaves_nothing_in_its_place() {
        let key = PairSecret::derive(&secret(1), &context("g")).packet_key(Cipher::Aes256Gcm, PLACE);
        let mut place = Box::new(MaybeUninit::new(key));
        let memory = place.as_ptr().cast::<u8>();
        let fields = [
            (std::mem::offset_of!(PacketKey, key), size_of::<LessSafeKey>()),
            (std::mem::offset_of!(PacketKey, mask), NONCE_LEN),
        ];
        let read = |memory: *const u8| -> Vec<u8> {
            let bytes = fields.iter().flat_map(|(start, bytes)| *start..start + bytes);
            // SAFETY: the box lives, and reading its bytes one by one needs no valid key.
            bytes.map(|at| unsafe { memory.add(at).read_volatile() }).collect()
        };
        let before = read(memory);
        // SAFETY: it was initialised above and is not used again.
        unsafe { place.assume_init_drop() };
        let after = read(memory);
        let left = before.iter().zip(&after).filter(|(b, a)| **b != 0 && b == a).count();
        assert!(before.iter().filter(|byte| **byte != 0).count() > 200, "there was a key");
        assert_eq!(left, 0, "bytes of the key are left");
    }
}
