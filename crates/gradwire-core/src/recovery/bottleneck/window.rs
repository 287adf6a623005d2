//! What the default rate control keeps in flight: the model of the path, what acknowledgements hold together, and room above both.

use super::{gain, BottleneckController, Mode, KEPT_PACKETS, STANDING, UNIT};
use crate::recovery::filters::bytes_in;
use core::time::Duration;

impl BottleneckController {
    /// The window where a short path has a queue and nobody else keeps it is what makes flows of this kind equal. Over a long path the
    /// second product is as good: looks that fall together are what it takes, and what one product leaves unused there is more.
    pub(super) fn steady_window(&self, cwnd_gain: u64) -> u64 {
        if self.others.stands() || self.is_free() || self.is_far() {
            return self.window(cwnd_gain);
        }
        self.kin.bytes(self.product(self.decided.get()), self.lumps()).max(self.floor())
    }

    /// One bandwidth-delay product and what lumps need, and above that what the headroom leaves of the rest: another
    /// product, and the same few packets for every flow. Those make flows equal: what grows with a flow's rate only keeps
    /// the shares as they are. Of a burst, which a token bucket let go, what waits on the way back counts once: twice at its rate was what made
    /// the ranks of a ring wait for each other's queues.
    pub(super) fn window(&self, cwnd_gain: u64) -> u64 {
        let bdp = self.bdp();
        let lumps = self.lumps();
        let standing = if self.others.stands() {
            bytes_in(self.bandwidth.max(), STANDING) + self.others.allowance(self.bandwidth.max(), bdp)
        } else {
            KEPT_PACKETS * self.packet_bytes
        };
        let standing = standing.min(self.standing_bytes);
        let rate = self.bandwidth.max();
        let doubled = if self.average.is_burst(rate) { self.path_bytes(rate) } else { bdp };
        let above = gain(doubled, cwnd_gain - UNIT).saturating_add(standing.saturating_sub(lumps));
        let headroom = self.headroom_per_mille();
        let product = if self.others.stands() { bdp } else { gain(bdp, (UNIT + headroom) / 2) };
        product.saturating_add(lumps).saturating_add(gain(above, headroom))
    }

    /// Among known others: what the flow's rate makes in the empty path, and its share of the queue.
    pub(super) fn shared_window(&self, rate: u64) -> u64 {
        let path = self.path_bytes(rate);
        let share = gain(self.share.queue_bytes_in_turn(path), self.headroom.per_mille());
        path.saturating_add(share.max(self.lumps())).max(2 * self.packet_bytes)
    }

    /// Acknowledgements come in lumps, and without their size on top a flow would stand still between two of them.
    /// Bounded by a time at the flow's own rate, so that on a slow link that many flows share no queue of many
    /// milliseconds builds up.
    pub(super) fn lumps(&self) -> u64 {
        // Against an estimate that still grows everything seems to run ahead.
        if self.share.is_known() && matches!(self.mode, Mode::Startup) {
            return self.floor();
        }
        let bound = bytes_in(self.bandwidth.max(), LUMP_MAX);
        let bound = gain(bound, self.headroom_per_mille().max(UNIT / 2)).min(self.standing_bytes);
        self.aggregation.bytes().min(bound).max(self.floor())
    }

    /// Where others keep the queue it is theirs that overflows, and what this flow left they would take, unless it has more than they.
    fn headroom_per_mille(&self) -> u64 {
        if self.others.stands() {
            self.others.room()
        } else {
            self.headroom.per_mille()
        }
    }

    pub(super) fn bdp(&self) -> u64 {
        self.product(self.bandwidth.max())
    }

    /// What is in flight at `rate` where this flow queues nothing. Acknowledgements wait behind the data of the other direction, whose window
    /// is made of waits in turn: at more than what is delivered both would grow without end. A thread that was not run looks like a wait as
    /// well: no more for that than the receiver's socket holds.
    fn product(&self, rate: u64) -> u64 {
        self.path_bytes(rate).saturating_add(self.waiting(rate))
    }

    /// What is in flight while acknowledgements wait on their way back.
    fn waiting(&self, rate: u64) -> u64 {
        bytes_in(self.delivered(rate), self.way_back.get()).min(self.standing_bytes)
    }

    /// What the empty path holds at `rate`.
    fn path_bytes(&self, rate: u64) -> u64 {
        bytes_in(rate, self.rtt.min().unwrap_or_default())
    }

    /// What goes on arriving while acknowledgements wait, `rate` at most: the newest rate, or the average where that was a burst's.
    fn delivered(&self, rate: u64) -> u64 {
        let newest = self.decided.get();
        match if self.average.is_burst(newest) { self.average.get() } else { newest } {
            0 => rate,
            delivered => rate.min(delivered),
        }
    }

    /// From a packet to its acknowledgement where this flow queues nothing: what the way back takes in addition is not its
    /// queue, but its packets are in flight meanwhile.
    pub(super) fn round_trip(&self) -> Duration {
        self.rtt.min().unwrap_or_default() + self.way_back.get()
    }

    /// Two packets for each flow of a large incast, else four: three that overtake and one overtaken, so that a
    /// loss can be seen without a timer.
    pub(super) fn floor(&self) -> u64 {
        (2 * self.packet_bytes).max(self.share.initial_cwnd().min(4 * self.packet_bytes))
    }

    /// What is in flight where a probe's queue is gone. What acknowledgements hold together that wait for data of the other direction is none: where the
    /// path was free, draining went on for four round trips otherwise, in each cycle.
    pub(super) fn drained_window(&self) -> u64 {
        let waiting =
            if self.is_free() && !self.share.is_known() { self.waiting(self.bandwidth.max()) } else { 0 };
        self.bdp().saturating_add(self.lumps().min(waiting).max(self.floor()))
    }
}

/// Longest lump of acknowledgements that is made up for: a few time slices of a busy machine.
const LUMP_MAX: Duration = Duration::from_millis(10);
