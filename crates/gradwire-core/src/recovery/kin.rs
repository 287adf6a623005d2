//! The window of a flow among flows of its own kind that it knows nothing of: one product, and the same few packets for each.
//!
//! Asked by [`super::BottleneckController`]. With `window = rate * least round trip + few` and `rate = window / round trip`, a flow keeps
//! `few` packets in the queue whatever its rate: one above its share finds its round trips longer than its window was made for and
//! falls, one below it rises. A second product on top, as a flow has it that is alone or beside another transport, would keep all shares
//! as they are.

use super::headroom::{Headroom, LossCount};

/// See the module's documentation.
#[derive(Clone, Copy, Debug)]
pub(super) struct KinWindow {
    packet_bytes: u64,
    few: Headroom,
}

impl KinWindow {
    pub(super) fn new(packet_bytes: u64) -> Self {
        Self { packet_bytes, few: Headroom::of_few_in_step(packet_bytes) }
    }

    /// Takes what a round trip has lost.
    pub(super) fn on_round(&mut self, losses: LossCount) {
        self.few.on_round(losses);
    }

    /// The window of a flow that has `product` bytes in flight where nothing is queued and needs `lumps` more to bridge
    /// acknowledgements that come together. Loss takes of the few alone: without what bridges the lumps a flow would stand still, take that
    /// for its rate, and need ever less.
    pub(super) fn bytes(&self, product: u64, lumps: u64) -> u64 {
        let few = KEPT_PACKETS * self.packet_bytes;
        let kept = few * self.few.per_mille() / 1_000 + lumps.saturating_sub(few);
        product.saturating_add(kept)
    }
}

/// What each keeps in the queue.
const KEPT_PACKETS: u64 = 10;

#[cfg(test)]
mod tests {
    use super::*;

    const LOST: LossCount = LossCount { acked: 900_000, lost: 100_000 };
    const CLEAN: LossCount = LossCount { acked: 1_000_000, lost: 0 };

    fn kept(kin: &KinWindow, product: u64) -> u64 {
        kin.bytes(product, 4_000) - product
    }

    #[test]
    fn a_fast_flow_keeps_as_much_in_the_queue_as_a_slow_one() {
        let kin = KinWindow::new(1_000);
        assert_eq!((kept(&kin, 1_000), kept(&kin, 1_000_000)), (10_000, 10_000));
        assert_eq!(kin.bytes(1_000, 30_000), 31_000, "or what lumps of acknowledgements need");
    }

    #[test]
    fn loss_of_a_tenth_takes_an_eighth_of_it_at_a_time_and_it_comes_back() {
        let mut kin = KinWindow::new(1_000);
        kin.on_round(LOST);
        assert_eq!(kept(&kin, 0), 8_750);
        (0..50).for_each(|_| kin.on_round(LOST));
        assert!(kept(&kin, 0) < 1_000);
        (0..16).for_each(|_| kin.on_round(CLEAN));
        assert_eq!(kept(&kin, 0), 10_000);
    }

    #[test]
    fn random_loss_of_a_twentieth_takes_nothing() {
        let mut kin = KinWindow::new(1_000);
        (0..50).for_each(|_| kin.on_round(LossCount { acked: 950_000, lost: 50_000 }));
        assert_eq!(kept(&kin, 0), 10_000);
    }

    /// A link of 1 MB/s and 20 ms that is never idle: a flow's part of it is its part of what is in flight.
    #[test]
    fn unequal_flows_become_equal() {
        let kin = KinWindow::new(1_000);
        let mut rates = [950_000, 50_000];
        for _ in 0..20 {
            let windows = rates.map(|rate| kin.bytes(rate * 20 / 1_000, 0));
            rates = windows.map(|window| 1_000_000 * window / windows.iter().sum::<u64>());
        }
        assert!(rates[0].abs_diff(rates[1]) < 1_000, "{rates:?}");
    }
}
