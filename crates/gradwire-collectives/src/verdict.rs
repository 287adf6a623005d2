//! The record that tells every rank why the group failed, so that all of them raise the same error.
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | cause |
//! | 1 | zero |
//! | 2..4 | rank that found out |
//! | 4..6, 6..8 | the ranks concerned |
//! | 8..16 | sequence |
//! | 16..32, 32..48 | what those ranks called |
//! | 48..56 | nanoseconds of silence or waiting, or bytes needed |
//! | 56..64 | bytes allowed |

use crate::call::{mismatch, Call};
use crate::OpError;
use gradwire_core::wire::ABORT_RECORD_BYTES;
use gradwire_core::Descriptor;
use std::time::Duration;

/// Why a group failed, as it travels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct AbortRecord {
    pub(crate) cause: Cause,
    /// Rank that found out.
    pub(crate) reporter: u32,
    /// The ranks concerned, with what they called; equal where only one is.
    pub(crate) ranks: [u32; 2],
    pub(crate) calls: [Descriptor; 2],
    pub(crate) sequence: u64,
    pub(crate) waited: Duration,
    /// Bytes needed and allowed, where memory was the cause; then nobody waited.
    pub(crate) amounts: [u64; 2],
}

/// Why a group failed, for the groups of the same rank's other network threads ([`crate::Group::adopt`]).
#[derive(Clone, Debug)]
pub struct Verdict {
    pub(crate) error: OpError,
    pub(crate) record: AbortRecord,
}

impl Verdict {
    /// What calls on this rank end with.
    #[must_use]
    pub const fn error(&self) -> &OpError {
        &self.error
    }
}

/// What a rank that is told adds of its own.
pub(crate) struct Here<H, D> {
    /// The host of a rank.
    pub(crate) host: H,
    /// What had arrived from a rank, or from each that is behind.
    pub(crate) detail: D,
    /// The collective in progress, and how long it had waited.
    pub(crate) during: String,
    pub(crate) waited: Duration,
}

/// Kinds of fatal errors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Cause {
    Mismatch = 1,
    PeerLost = 2,
    PeerLeft = 3,
    TimedOut = 4,
    ShutDown = 5,
    Settings = 6,
    ServerMemory = 7,
    /// A server cannot read what a worker says about a call.
    CallSettings = 8,
}

impl AbortRecord {
    /// A record about one rank, or about the reporter itself.
    pub(crate) fn about(cause: Cause, reporter: u32, rank: u32) -> Self {
        let calls = [Descriptor::default(); 2];
        Self {
            cause,
            reporter,
            ranks: [rank, rank],
            calls,
            sequence: 0,
            waited: Duration::ZERO,
            amounts: [0; 2],
        }
    }

    pub(crate) fn encode(&self) -> [u8; ABORT_RECORD_BYTES] {
        let mut out = [0; ABORT_RECORD_BYTES];
        out[0] = self.cause as u8;
        out[2..4].copy_from_slice(&(self.reporter as u16).to_le_bytes());
        out[4..6].copy_from_slice(&(self.ranks[0] as u16).to_le_bytes());
        out[6..8].copy_from_slice(&(self.ranks[1] as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..32].copy_from_slice(&self.calls[0]);
        out[32..48].copy_from_slice(&self.calls[1]);
        let nanos = u64::try_from(self.waited.as_nanos()).unwrap_or(u64::MAX);
        let [needed, allowed] = self.amounts;
        let first = if self.cause == Cause::ServerMemory { needed } else { nanos };
        out[48..56].copy_from_slice(&first.to_le_bytes());
        out[56..64].copy_from_slice(&allowed.to_le_bytes());
        out
    }

    /// `None` for a cause that this version does not know.
    pub(crate) fn decode(record: &[u8; ABORT_RECORD_BYTES]) -> Option<Self> {
        let causes = [
            Cause::Mismatch,
            Cause::PeerLost,
            Cause::PeerLeft,
            Cause::TimedOut,
            Cause::ShutDown,
            Cause::Settings,
            Cause::ServerMemory,
            Cause::CallSettings,
        ];
        let u16_at = |at: usize| u32::from(u16::from_le_bytes([record[at], record[at + 1]]));
        let u64_at = |at: usize| {
            let mut raw = [0; 8];
            raw.copy_from_slice(&record[at..at + 8]);
            u64::from_le_bytes(raw)
        };
        let mut calls = [Descriptor::default(); 2];
        calls[0].copy_from_slice(&record[16..32]);
        calls[1].copy_from_slice(&record[32..48]);
        let cause = causes.into_iter().find(|cause| *cause as u8 == record[0])?;
        let (waited, amounts) = match cause {
            Cause::ServerMemory => (Duration::ZERO, [u64_at(48), u64_at(56)]),
            _ => (Duration::from_nanos(u64_at(48)), [0, 0]),
        };
        Some(Self {
            cause,
            reporter: u16_at(2),
            ranks: [u16_at(4), u16_at(6)],
            calls,
            sequence: u64_at(8),
            waited,
            amounts,
        })
    }

    /// The error that a rank raises which was told.
    pub(crate) fn to_error(
        self,
        here: Here<impl Fn(u32) -> String, impl Fn(Option<u32>) -> String>,
    ) -> OpError {
        let rank = self.ranks[0];
        let Here { host, detail, during, waited } = here;
        let aborted = |cause: String, during| {
            let (rank, cause, detail) = (self.reporter, cause.into(), detail(None).into());
            OpError::Aborted { rank, host: host(rank).into(), cause, during, waited, detail }
        };
        match self.cause {
            Cause::Mismatch => {
                let [a, b] = [(self.ranks[0], &self.calls[0]), (self.ranks[1], &self.calls[1])];
                OpError::Mismatch(Box::new(mismatch(self.sequence, a, b)))
            }
            Cause::PeerLost => {
                let reported_by = Some(self.reporter);
                let (host, detail) = (host(rank), detail(Some(rank)).into());
                OpError::PeerLost { rank, host, silent: self.waited, during, detail, reported_by }
            }
            Cause::PeerLeft | Cause::ShutDown => {
                let (host, detail) = (host(rank), detail(Some(rank)).into());
                OpError::PeerLeft { rank, host, during, waited, detail }
            }
            Cause::TimedOut => {
                let call = Call::decode(&self.calls[0]);
                let name = call.map_or("a collective".to_owned(), |call| call.during(self.sequence));
                aborted(format!("{name} timed out there after {:?}", self.waited), during)
            }
            Cause::ServerMemory => {
                let [needed, bytes_max] = self.amounts;
                OpError::ServerMemory { rank, host: host(rank), during, needed, bytes_max }
            }
            Cause::CallSettings => {
                let call = Call::decode(&self.calls[0]);
                let name = call.map_or("a call".to_owned(), |call| call.during(self.sequence));
                let problem = "that cannot be read: start all ranks and servers with one version of gradwire";
                aborted(format!("rank {rank} ({}) sent settings of {name} {problem}", host(rank)), during)
            }
            Cause::Settings => {
                let problem =
                    "is not of this group: it is of an earlier start, was shown other records, or does not know the job secret, if there is one";
                aborted(format!("what answers as rank {rank} ({}) {problem}", host(rank)), during)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_wire() {
        let record = AbortRecord {
            cause: Cause::Mismatch,
            reporter: 3,
            ranks: [1, 2],
            calls: [[4; 16], [5; 16]],
            sequence: 1 << 40,
            waited: Duration::from_millis(12),
            amounts: [0; 2],
        };
        assert_eq!(AbortRecord::decode(&record.encode()), Some(record));
        let full = AbortRecord { amounts: [9, 8], ..AbortRecord::about(Cause::ServerMemory, 4, 4) };
        assert_eq!(AbortRecord::decode(&full.encode()), Some(full));
        assert_eq!(AbortRecord::decode(&[0; 64]), None);
    }

    #[test]
    fn every_rank_words_a_mismatch_alike() {
        let record = AbortRecord {
            ranks: [1, 2],
            calls: [[4; 16], [5; 16]],
            ..AbortRecord::about(Cause::Mismatch, 1, 1)
        };
        let error = record.to_error(Here {
            host: |_| String::new(),
            detail: |_| String::new(),
            during: String::new(),
            waited: Duration::ZERO,
        });
        assert_eq!(error, OpError::Mismatch(Box::new(mismatch(0, (2, &[5; 16]), (1, &[4; 16])))));
    }
}
