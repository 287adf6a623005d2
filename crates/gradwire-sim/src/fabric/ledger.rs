//! Books of one port, kept beside its queues and not from them: what it does is judged from outside.

use super::BANDS_MAX;

/// What a port did that no port may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FabricViolation {
    /// Order within a band is what a queue is.
    #[error("port {port}: packet {turn} of band {band} left after packet {after}")]
    Overtaken {
        /// Where.
        port: usize,
        /// In which band.
        band: usize,
        /// Its place in the order of arrival.
        turn: u64,
        /// That of the packet before it.
        after: u64,
    },
    /// The bands of a port share what it has.
    #[error("port {port} held {bytes} bytes, and its buffer has {buffer_bytes}")]
    Overfull {
        /// Where.
        port: usize,
        /// Bytes that waited.
        bytes: u64,
        /// Bytes that may.
        buffer_bytes: u64,
    },
    /// What came has left, was dropped, or waits.
    #[error("port {port}: {arrived} bytes came, {left} left, {dropped} were dropped and {waiting} wait")]
    NotConserved {
        /// Where.
        port: usize,
        /// Bytes that came.
        arrived: u64,
        /// Bytes that left.
        left: u64,
        /// Bytes that were dropped.
        dropped: u64,
        /// Bytes that wait.
        waiting: u64,
    },
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    arrived_bytes: u64,
    left_bytes: u64,
    dropped_bytes: u64,
    turns: [u64; BANDS_MAX],
    latest: [u64; BANDS_MAX],
    first: Option<Wrong>,
}

/// The first thing that was wrong.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Order { band: usize, turn: u64, after: u64 },
    Size { bytes: u64, buffer_bytes: u64 },
}

impl Ledger {
    /// Returns the packet's place in the order of its band, from 1.
    pub(super) fn on_arrived(&mut self, band: usize, bytes: u64) -> u64 {
        self.arrived_bytes += bytes;
        self.turns[band] += 1;
        self.turns[band]
    }

    pub(super) fn on_dropped(&mut self, bytes: u64) {
        self.dropped_bytes += bytes;
    }

    pub(super) fn on_waiting(&mut self, bytes: u64, buffer_bytes: Option<u64>) {
        if let Some(buffer_bytes) = buffer_bytes.filter(|most| bytes > *most) {
            self.first.get_or_insert(Wrong::Size { bytes, buffer_bytes });
        }
    }

    pub(super) fn on_left(&mut self, band: usize, turn: u64, bytes: u64) {
        self.left_bytes += bytes;
        let after = std::mem::replace(&mut self.latest[band], turn);
        if turn <= after {
            self.first.get_or_insert(Wrong::Order { band, turn, after });
        }
    }

    /// What was wrong at `port`, in whose queues `waiting` bytes are.
    pub(super) fn check(&self, port: usize, waiting: u64) -> Result<(), FabricViolation> {
        match self.first {
            Some(Wrong::Order { band, turn, after }) => {
                return Err(FabricViolation::Overtaken { port, band, turn, after });
            }
            Some(Wrong::Size { bytes, buffer_bytes }) => {
                return Err(FabricViolation::Overfull { port, bytes, buffer_bytes });
            }
            None => {}
        }
        let (arrived, left, dropped) = (self.arrived_bytes, self.left_bytes, self.dropped_bytes);
        if arrived != left + dropped + waiting {
            return Err(FabricViolation::NotConserved { port, arrived, left, dropped, waiting });
        }
        Ok(())
    }
}
