//! Notices in a start that sending faster no longer delivers faster.

use super::headroom::LossCount;

/// Asked by [`super::BottleneckController`] after each round trip of its start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FullPipe {
    best: u64,
    flat_rounds: u32,
    lossy_rounds: u32,
}

impl FullPipe {
    /// Takes the bandwidth after one round and what that lost; true when the pipe is full.
    pub(super) fn on_round(
        &mut self,
        bandwidth: u64,
        losses: LossCount,
        app_limited: bool,
        queued: bool,
    ) -> bool {
        self.lossy_rounds = if losses.exceeds(STARTUP_LOSS_PERCENT) { self.lossy_rounds + 1 } else { 0 };
        if bandwidth >= self.best.saturating_add(self.best / 4) {
            self.best = bandwidth;
            self.flat_rounds = 0;
        } else if !app_limited {
            self.flat_rounds += 1;
        }
        self.flat_rounds >= 3 || queued && self.flat_rounds >= 1 || self.lossy_rounds >= 2
    }
}

/// Random loss is a few percent at most; overshooting by 2.77 into a full buffer loses 64 %.
const STARTUP_LOSS_PERCENT: u64 = 20;
