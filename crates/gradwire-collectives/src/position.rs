//! Where a rank is, as its heartbeats say it: the only way to find a mismatch in which nobody sends.
//!
//! | byte | field |
//! | --- | --- |
//! | 0 | 0 nothing said yet, 1 idle, 2 in a collective |
//! | 1..8 | zero |
//! | 8..16 | sequence: of the oldest collective in flight, or of the next one when idle |
//! | 16..32 | descriptor of that collective |

use gradwire_core::wire::POSITION_RECORD_BYTES;
use gradwire_core::Descriptor;

/// What a heartbeat says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PositionRecord {
    /// Number of the oldest collective in flight, or of the next one.
    pub(crate) sequence: u64,
    /// Its descriptor; `None` when idle.
    pub(crate) call: Option<Descriptor>,
}

impl PositionRecord {
    pub(crate) fn encode(&self) -> [u8; POSITION_RECORD_BYTES] {
        let mut out = [0; POSITION_RECORD_BYTES];
        out[0] = if self.call.is_some() { 2 } else { 1 };
        out[8..16].copy_from_slice(&self.sequence.to_le_bytes());
        out[16..].copy_from_slice(&self.call.unwrap_or_default());
        out
    }

    /// `None` before a rank has said anything.
    pub(crate) fn decode(record: &[u8; POSITION_RECORD_BYTES]) -> Option<Self> {
        let (mut sequence, mut call) = ([0; 8], Descriptor::default());
        sequence.copy_from_slice(&record[8..16]);
        call.copy_from_slice(&record[16..]);
        match record[0] {
            1 => Some(Self { sequence: u64::from_le_bytes(sequence), call: None }),
            2 => Some(Self { sequence: u64::from_le_bytes(sequence), call: Some(call) }),
            _ => None,
        }
    }
}

/// The latest calls of this rank by their sequence number, to compare with what peers say about theirs.
#[derive(Debug)]
pub(crate) struct History {
    entries: [Option<(u64, Descriptor)>; History::LENGTH],
}

impl History {
    /// As many as can be in flight: a peer cannot be further behind than that.
    const LENGTH: usize = crate::ops::IN_FLIGHT_MAX;

    pub(crate) fn new() -> Self {
        Self { entries: [None; Self::LENGTH] }
    }

    pub(crate) fn record(&mut self, sequence: u64, call: Descriptor) {
        self.entries[(sequence % Self::LENGTH as u64) as usize] = Some((sequence, call));
    }

    /// What was called at `sequence`, if that is recent.
    pub(crate) fn at(&self, sequence: u64) -> Option<Descriptor> {
        let (recorded, call) = self.entries[(sequence % Self::LENGTH as u64) as usize]?;
        (recorded == sequence).then_some(call)
    }

    /// What was called at the latest sequence number that ends in the 16 bits `op`, with the whole number.
    pub(crate) fn at_op(&self, op: u32) -> Option<(u64, Descriptor)> {
        self.entries[op as usize % Self::LENGTH].filter(|(sequence, _)| sequence & 0xFFFF == u64::from(op))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_wire() {
        for record in [
            PositionRecord { sequence: 7, call: None },
            PositionRecord { sequence: u64::MAX, call: Some([9; 16]) },
        ] {
            assert_eq!(PositionRecord::decode(&record.encode()), Some(record));
        }
        assert_eq!(PositionRecord::decode(&[0; 32]), None);
    }

    #[test]
    fn history_forgets_what_was_overwritten() {
        let mut history = History::new();
        history.record(3, [3; 16]);
        assert_eq!(history.at(3), Some([3; 16]));
        assert_eq!(history.at(3 + History::LENGTH as u64), None);
        history.record(3 + History::LENGTH as u64, [4; 16]);
        assert_eq!(history.at(3), None);
        assert_eq!(history.at_op(3), None);
        assert_eq!(history.at_op(67), Some((67, [4; 16])));
    }
}
