//! Any of the rate controllers, chosen when a connection is made, without a virtual call for each packet.

use super::flooded::FloodedPath;
use super::incast::IncastBound;
use super::pacer::burst_for;
use super::{
    AckSample, BottleneckController, ControllerKind, ControllerSettings, RateController,
    ReceivingRateController, TimelyController,
};
use crate::Timestamp;

/// One of the rate controllers, and what bounds each of them among known senders.
#[derive(Debug)]
pub struct Controller {
    law: Law,
    incast: IncastBound,
    flooded: FloodedPath,
    packet_bytes: u64,
    said: Said,
}

/// What it answers until the next event: asked for each packet, and an acknowledgement comes for ten or more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Said {
    cwnd: u64,
    pacing_rate: u64,
    burst: u64,
}

#[derive(Debug)]
enum Law {
    Bottleneck(BottleneckController),
    Timely(TimelyController),
    ReceivingRate(ReceivingRateController),
    #[cfg(test)]
    Rival(super::rival::RivalController),
}

/// Calls the same method of whichever controller it is.
macro_rules! forward {
    ($self:ident, $controller:ident => $call:expr) => {
        match &$self.law {
            Law::Bottleneck($controller) => $call,
            Law::Timely($controller) => $call,
            Law::ReceivingRate($controller) => $call,
            #[cfg(test)]
            Law::Rival($controller) => $call,
        }
    };
    (mut $self:ident, $controller:ident => $call:expr) => {
        match &mut $self.law {
            Law::Bottleneck($controller) => $call,
            Law::Timely($controller) => $call,
            Law::ReceivingRate($controller) => $call,
            #[cfg(test)]
            Law::Rival($controller) => $call,
        }
    };
}

impl Controller {
    /// A fresh controller of this kind.
    #[must_use]
    pub fn new(kind: ControllerKind, settings: &ControllerSettings) -> Self {
        let law = match kind {
            ControllerKind::Bottleneck => Law::Bottleneck(BottleneckController::new(settings)),
            ControllerKind::Timely => Law::Timely(TimelyController::new(settings)),
            ControllerKind::ReceivingRate => Law::ReceivingRate(ReceivingRateController::new(settings)),
        };
        Self::of(law, settings)
    }

    fn of(law: Law, settings: &ControllerSettings) -> Self {
        let (incast, packet_bytes) = (IncastBound::new(settings), settings.packet_bytes);
        let flooded = FloodedPath::new(settings.flows);
        Self { law, incast, flooded, packet_bytes, said: Said::default() }.decided()
    }

    /// Itself, with what it answers from now on.
    fn decided(mut self) -> Self {
        self.decide();
        self
    }

    /// To be called at the end of every event that may change an answer.
    fn decide(&mut self) {
        self.said = self.answers();
    }

    fn answers(&self) -> Said {
        let law = forward!(self, controller => controller.pacing_rate());
        let pacing_rate = self.incast.pace(self.flooded.pace(law));
        let burst = self.incast.burst(burst_for(pacing_rate, self.packet_bytes));
        Said { cwnd: self.window(pacing_rate), pacing_rate, burst }
    }

    fn window(&self, pacing_rate: u64) -> u64 {
        let cwnd = forward!(self, controller => controller.cwnd());
        if !self.is_flooded() {
            return self.incast.window(cwnd);
        }
        // Twice what may be under way: what is lost counts as in flight until that is known, a round trip later.
        self.incast.window(self.flooded.window(cwnd / 2, pacing_rate)).saturating_mul(2)
    }

    /// A fresh one in place of this, whose path is another now. A flood goes on, and with it what is held: it is the most that is known.
    #[must_use]
    pub fn restarted(&self, kind: ControllerKind, settings: &ControllerSettings) -> Self {
        let new = Self::new(kind, settings);
        match self.is_flooded() {
            true => Self { flooded: self.flooded, ..new }.decided(),
            false => new,
        }
    }

    /// Another transport, which knows no incast.
    #[cfg(test)]
    pub(super) fn rival(settings: &ControllerSettings) -> Self {
        Self::of(Law::Rival(super::rival::RivalController::new(settings.packet_bytes)), settings)
    }

    /// Whether it takes others to keep a queue.
    #[cfg(test)]
    pub(super) fn is_beside_others(&self) -> bool {
        matches!(&self.law, Law::Bottleneck(law) if law.is_beside_others())
    }

    /// Whether a pause of the sender counts as lateness that may be made up at once. Alone it does no harm; of k senders each
    /// would fill the buffer that they share.
    #[must_use]
    pub fn makes_up_pauses(&self) -> bool {
        !self.incast.is_known()
    }

    /// Whether delivery rates leave out what an acknowledgement waited at the receiver for more packets. The product of rate and round trip
    /// (LTP III-D) is measured where packets arrive; the other controllers were made for what acknowledgements bring.
    #[must_use]
    pub fn measures_arrivals(&self) -> bool {
        matches!(self.law, Law::Bottleneck(_))
    }

    /// The receiver says whether strangers flood it.
    pub fn set_flooded(&mut self, is_flooded: bool) {
        self.flooded.set(is_flooded);
        self.decide();
    }

    /// Whether it does.
    #[must_use]
    pub fn is_flooded(&self) -> bool {
        self.flooded.is_set()
    }

    /// Bytes that may leave at once.
    #[must_use]
    pub const fn burst(&self) -> u64 {
        self.said.burst
    }
}

impl RateController for Controller {
    fn on_ack(&mut self, sample: &AckSample) {
        // Of the path it would learn what a flood leaves of it, and from packets that are sent several times nothing at all.
        if !self.is_flooded() {
            self.incast.on_ack(sample);
            forward!(mut self, controller => controller.on_ack(sample));
        }
        self.flooded.on_ack(sample, self.incast.share_of(self.bandwidth()));
        self.decide();
    }

    fn on_idle_restart(&mut self, now: Timestamp) {
        self.incast.on_idle_restart(now);
        forward!(mut self, controller => controller.on_idle_restart(now));
        self.decide();
    }

    fn on_repair(&mut self) {
        forward!(mut self, controller => controller.on_repair());
        self.decide();
    }

    fn on_incast(&mut self, flows: u32, paths: u32) {
        self.incast.on_incast(flows, paths);
        self.flooded.on_incast(flows);
        forward!(mut self, controller => controller.on_incast(flows, paths));
        self.decide();
    }

    fn cwnd(&self) -> u64 {
        self.said.cwnd
    }

    fn pacing_rate(&self) -> u64 {
        self.said.pacing_rate
    }

    fn bandwidth(&self) -> u64 {
        forward!(self, controller => controller.bandwidth())
    }
}
