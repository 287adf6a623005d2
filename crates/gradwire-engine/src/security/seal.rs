//! Sealing what goes to one peer.

use super::keys::{Cipher, Direction, Domain, KeyPlace, PacketKey, PairSecret};
use super::numbers::{epoch, extend};
use crate::socket::Seal;
use gradwire_core::wire::{HEADER_BYTES, TAG_BYTES};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Where the header holds its path and its number.
pub(super) const PATH_AT: usize = 7;
pub(super) const NUMBER_AT: std::ops::Range<usize> = 8..12;
/// Low four bits of a data packet's first byte.
const KIND_DATA: u8 = 0;

/// Seals datagrams to one peer, in place and without allocating.
#[derive(Debug)]
pub(crate) struct Sealer {
    secret: Arc<PairSecret>,
    cipher: Cipher,
    direction: Direction,
    /// By path and domain.
    spaces: Vec<[Space; 2]>,
    refused: Arc<AtomicU64>,
}

/// Numbers of one path and domain.
#[derive(Debug)]
struct Space {
    /// Larger than every number that was used.
    next: u64,
    epoch: u64,
    key: PacketKey,
}

impl Sealer {
    pub(super) fn new(secret: &Arc<PairSecret>, cipher: Cipher, direction: Direction, paths: u8) -> Self {
        let space = |path, domain| Space {
            next: 0,
            epoch: 0,
            key: secret.packet_key(cipher, KeyPlace { direction, path, domain, epoch: 0 }),
        };
        let both = |path| [space(path, Domain::Data), space(path, Domain::Control)];
        let spaces = (0..paths).map(both).collect();
        Self { secret: Arc::clone(secret), cipher, direction, spaces, refused: Arc::default() }
    }

    /// Counts datagrams that it refuses.
    pub(super) fn refused(&self) -> &Arc<AtomicU64> {
        &self.refused
    }

    fn try_seal(&mut self, datagram: &mut [u8]) -> Option<()> {
        let body_bytes = datagram.len().checked_sub(HEADER_BYTES + TAG_BYTES)?;
        let (header, rest) = datagram.split_at_mut(HEADER_BYTES);
        let (body, tag) = rest.split_at_mut(body_bytes);
        let (path, domain) = (header[PATH_AT], domain_of(header[0]));
        let space = &mut self.spaces.get_mut(usize::from(path))?[domain as usize];
        let number = match domain {
            Domain::Data => extend(space.next, low_number(header)),
            Domain::Control => space.next,
        };
        if number < space.next {
            return None;
        }
        space.next = number.checked_add(1)?;
        if epoch(number) != space.epoch {
            space.epoch = epoch(number);
            let place = KeyPlace { direction: self.direction, path, domain, epoch: space.epoch };
            space.key = self.secret.packet_key(self.cipher, place);
        }
        header[NUMBER_AT].copy_from_slice(&(number as u32).to_le_bytes());
        tag.copy_from_slice(&space.key.seal(number, header, body));
        Some(())
    }
}

/// Which numbers a packet has, by the first byte of its header.
pub(super) fn domain_of(first: u8) -> Domain {
    if first & 0x0F == KIND_DATA {
        Domain::Data
    } else {
        Domain::Control
    }
}

impl Seal for Sealer {
    /// Seals `datagram`: header, body, and room for the tag. `false`: it must not be sent, because its path does not exist or
    /// its number was used before; whatever made it so, no nonce is ever used twice.
    fn seal(&mut self, datagram: &mut [u8]) -> bool {
        let sealed = self.try_seal(datagram).is_some();
        if !sealed {
            self.refused.fetch_add(1, Ordering::Relaxed);
        }
        sealed
    }
}

/// The 32 bits of the number that travel.
pub(super) fn low_number(header: &[u8]) -> u32 {
    let mut low = [0; 4];
    low.copy_from_slice(&header[NUMBER_AT]);
    u32::from_le_bytes(low)
}
