//! A way that loses all data while questions and answers pass: the MTU has become smaller, or somebody drops what is large or marked.
//!
//! Each answer shows a whole window to be lost, and so makes room for the next one: without a bound such a flow sends more than the path ever
//! carried, for as long as its call may take (RFC 8085 section 3.1).

use crate::Timestamp;
use core::time::Duration;

/// So many packets lost in a row, with none that arrived among them, are no congestion: in it some come through.
const LOST_MIN: u32 = 256;
/// What is tried at once from then on.
const PACKETS: u64 = 4;
/// The longest pause between two tries. A way that has healed is found out so much later, or as much as it was broken where that was less.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// How long nothing has come through.
#[derive(Clone, Debug, Default)]
pub(crate) struct Drought {
    lost: u32,
    pause: Duration,
    until: Timestamp,
}

impl Drought {
    /// Packets are known to be lost.
    pub(crate) fn on_lost(&mut self, now: Timestamp, packets: usize, round_trip: Duration) {
        self.lost = self.lost.saturating_add(u32::try_from(packets).unwrap_or(u32::MAX));
        if self.lasts() && packets > 0 {
            self.pause = (self.pause * 2).max(round_trip).min(PAUSE_MAX);
            self.until = now + self.pause;
        }
    }

    /// A packet has arrived.
    pub(crate) fn end(&mut self) {
        *self = Self::default();
    }

    /// Whether nothing of many packets has arrived.
    pub(crate) fn lasts(&self) -> bool {
        self.lost >= LOST_MIN
    }

    /// No data leaves before.
    pub(crate) fn until(&self) -> Timestamp {
        self.until
    }

    /// The most bytes under way, of packets of so many each.
    pub(crate) fn window(&self, packet_bytes: u64) -> u64 {
        if self.lasts() {
            PACKETS * packet_bytes
        } else {
            u64::MAX
        }
    }
}
