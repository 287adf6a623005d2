//! Opening what comes from one peer.

use super::keys::{Cipher, Direction, Domain, KeyPlace, PacketKey, PairSecret};
use super::numbers::{epoch, extend, EPOCH_BITS};
use super::replay::{ReplayWindow, Seen};
use super::seal::{domain_of, low_number, NUMBER_AT, PATH_AT};
use gradwire_core::wire::{HEADER_BYTES, TAG_BYTES};
use gradwire_core::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// After so long without anything that opened, a number may be further ahead than is plausible: the path was dead meanwhile.
const SILENT_AFTER: Duration = Duration::from_secs(1);
/// So long after one such number was tried the next one may be: a key is derived for each, whoever made it up. Strangers can use the tries
/// up; a key that is kept for its epoch would not help, since they can name another one each time.
const BETWEEN_TRIES: Duration = Duration::from_millis(100);

/// Why a datagram was not opened. It has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// Nobody with the keys made it for this place.
    NotAuthentic,
    /// Its number was taken before, or is behind the window.
    Replayed,
}

/// Opens datagrams of one peer, in place and without allocating.
#[derive(Debug)]
pub(crate) struct Opener {
    secret: Arc<PairSecret>,
    cipher: Cipher,
    direction: Direction,
    /// By path and domain.
    spaces: Vec<[Space; 2]>,
    not_authentic: u64,
    replayed: u64,
}

/// Numbers of one path and domain.
#[derive(Debug)]
struct Space {
    window: ReplayWindow,
    /// Of the last even and odd epoch that a packet named.
    keys: [(u64, PacketKey); 2],
    far: FarNumbers,
}

/// Numbers that are further ahead than is plausible. A path that is dead for hours while it is tried uses up millions of them.
#[derive(Debug, Default)]
struct FarNumbers {
    /// The number that was expected when the first of them came, and when that was.
    expected: u64,
    since: Timestamp,
    tried_at: Timestamp,
}

impl FarNumbers {
    /// Whether another one may be tried, while `expected` is what comes next.
    fn may_try(&mut self, now: Timestamp, expected: u64) -> bool {
        if self.expected != expected {
            (self.expected, self.since) = (expected, now);
        }
        let may = now.since(self.since) >= SILENT_AFTER && now.since(self.tried_at) >= BETWEEN_TRIES;
        if may {
            self.tried_at = now;
        }
        may
    }
}

impl Opener {
    /// Of so many paths; of a path so many datagrams with data may overtake one.
    pub(super) fn new(
        secret: &Arc<PairSecret>,
        cipher: Cipher,
        direction: Direction,
        (paths, overtaken): (u8, u32),
    ) -> Self {
        let key = |path, domain, epoch| {
            (epoch, secret.packet_key(cipher, KeyPlace { direction, path, domain, epoch }))
        };
        let space = |path, domain, overtaken| Space {
            window: ReplayWindow::new(overtaken),
            keys: [key(path, domain, 0), key(path, domain, 1)],
            far: FarNumbers::default(),
        };
        let both = |path| [space(path, Domain::Data, overtaken), space(path, Domain::Control, 0)];
        let spaces = (0..paths).map(both).collect();
        let secret = Arc::clone(secret);
        Self { secret, cipher, direction, spaces, not_authentic: 0, replayed: 0 }
    }

    /// Decrypts a datagram and returns it without its tag, as the connection wrote it.
    ///
    /// # Errors
    /// [`Refusal`]; what the buffer holds then is of no use.
    pub(crate) fn open<'d>(
        &mut self,
        now: Timestamp,
        datagram: &'d mut [u8],
    ) -> Result<&'d mut [u8], Refusal> {
        let opened = self.try_open(now, datagram);
        match opened {
            Ok(_) => {}
            Err(Refusal::NotAuthentic) => self.not_authentic += 1,
            Err(Refusal::Replayed) => self.replayed += 1,
        }
        let bytes = opened?;
        Ok(&mut datagram[..bytes])
    }

    /// Datagrams that were not authentic.
    pub(crate) fn not_authentic(&self) -> u64 {
        self.not_authentic
    }

    /// Datagrams that had come before.
    pub(crate) fn replayed(&self) -> u64 {
        self.replayed
    }

    fn try_open(&mut self, now: Timestamp, datagram: &mut [u8]) -> Result<usize, Refusal> {
        if datagram.len() < HEADER_BYTES + TAG_BYTES {
            return Err(Refusal::NotAuthentic);
        }
        let (header, sealed) = datagram.split_at_mut(HEADER_BYTES);
        let (path, domain) = (header[PATH_AT], domain_of(header[0]));
        let space = self.spaces.get_mut(usize::from(path)).ok_or(Refusal::NotAuthentic)?;
        let space = &mut space[domain as usize];
        let number = extend(space.window.expected(), low_number(header));
        if space.window.seen(number) == Seen::Yes {
            return Err(Refusal::Replayed);
        }
        let epoch = epoch(number);
        let place = KeyPlace { direction: self.direction, path, domain, epoch };
        let expected = space.window.expected();
        let body = if is_plausible(expected, number) {
            let (present, key) = &mut space.keys[(epoch % 2) as usize];
            if *present != epoch {
                (*present, *key) = (epoch, self.secret.packet_key(self.cipher, place));
            }
            key.open(number, header, sealed).ok_or(Refusal::NotAuthentic)?.len()
        } else if space.far.may_try(now, expected) {
            // The keys in use stay until it is known that the peer has gone on.
            let key = self.secret.packet_key(self.cipher, place);
            let body = key.open(number, header, sealed).ok_or(Refusal::NotAuthentic)?.len();
            space.keys[(epoch % 2) as usize] = (epoch, key);
            body
        } else {
            return Err(Refusal::NotAuthentic);
        };
        space.window.take(number);
        if domain == Domain::Control {
            // Control packets are not numbered above.
            header[NUMBER_AT].fill(0);
        }
        Ok(HEADER_BYTES + body)
    }
}

/// Whether a peer may have come so far. A flight is much smaller than half an epoch; with this bound a stranger's numbers
/// cannot make the two keys be derived again and again: the next epoch's is only needed in the second half of the present
/// one, and that of the one before, which has its place, only at the beginning. What is beyond it is tried now and then
/// ([`FarNumbers`]).
fn is_plausible(expected: u64, number: u64) -> bool {
    number < expected.saturating_add(1 << (EPOCH_BITS - 1))
}
