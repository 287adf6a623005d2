//! Everything that happens in a run, as one hash and, on request, as text.
//!
//! Two runs of a seed must have equal hashes: that is the test that nothing but the seed decides.

use crate::mix;
use gradwire_core::wire::{Flags, Header, Kind, Reader, StatusBody};
use gradwire_core::Timestamp;
use std::fmt;

/// The record of a run.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    hash: u64,
    verbose: bool,
}

/// Where in its life a datagram is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    /// A rank sent it.
    Sent = 1,
    /// The network lost it.
    Lost = 2,
    /// A full port dropped it.
    Overflowed = 3,
    /// A rank received it.
    Received = 4,
    /// A rank's checksum did not match.
    Corrupted = 5,
}

impl Trace {
    /// An empty trace; `verbose` prints every event.
    #[must_use]
    pub(crate) const fn new(verbose: bool) -> Self {
        Self { hash: 0, verbose }
    }

    /// Hash of everything so far.
    #[must_use]
    pub(crate) const fn hash(&self) -> u64 {
        self.hash
    }

    /// A datagram took a step.
    pub(crate) fn datagram(&mut self, now: Timestamp, step: Step, from: usize, to: usize, bytes: &[u8]) {
        let mut head = [0; 24];
        let length = bytes.len().min(24);
        head[..length].copy_from_slice(&bytes[..length]);
        for word in head.chunks_exact(8) {
            self.absorb(u64::from_le_bytes(word.try_into().expect("chunks of eight bytes")));
        }
        self.absorb(now.as_nanos() ^ (step as u64) << 60);
        self.absorb((from as u64) << 40 | (to as u64) << 32 | bytes.len() as u64);
        if self.verbose {
            println!("{} {step:?} {from} -> {to}: {}", Micros(now), Datagram(bytes));
        }
    }

    /// Something happened to one rank.
    pub(crate) fn note(&mut self, now: Timestamp, rank: usize, text: impl FnOnce() -> String) {
        self.absorb(now.as_nanos());
        self.absorb(rank as u64);
        if self.verbose {
            println!("{} rank {rank}: {}", Micros(now), text());
        }
    }

    fn absorb(&mut self, value: u64) {
        self.hash = mix(self.hash.rotate_left(5) ^ value);
    }
}

struct Micros(Timestamp);

impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:12.3} us", self.0.as_nanos() as f64 / 1e3)
    }
}

/// A datagram for people.
struct Datagram<'a>(&'a [u8]);

impl fmt::Display for Datagram<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ok((header, body)) = Header::decode(self.0) else {
            return write!(f, "{} undecodable bytes", self.0.len());
        };
        write!(f, "{:?} {:?} #{}.{}", header.kind, header.transfer, header.path.0, header.packet_number.0)?;
        write!(f, " offset {} + {}", header.offset, body.len())?;
        for (flag, name) in NAMED_FLAGS {
            if header.flags.contains(flag) {
                write!(f, " {name}")?;
            }
        }
        if header.kind == Kind::Status {
            if let Ok(status) = StatusBody::decode(&mut Reader::new(body)) {
                write!(
                    f,
                    " {:?}, in {}, wants {}",
                    status.state, status.received_chunks, status.wanted_chunks
                )?;
            }
        }
        Ok(())
    }
}

const NAMED_FLAGS: [(Flags, &str); 4] = [
    (Flags::RETRANSMITTED, "again"),
    (Flags::OPENING, "opening"),
    (Flags::ALL_SENT, "all-sent"),
    (Flags::REPLY, "reply"),
];
