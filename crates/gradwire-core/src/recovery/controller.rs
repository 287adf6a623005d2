//! Any of the rate controllers, chosen when a connection is made, without a virtual call for each packet.

use super::{
    AckSample, BottleneckController, ControllerKind, ControllerSettings, RateController,
    ReceivingRateController, TimelyController,
};
use crate::Timestamp;

/// One of the rate controllers.
#[derive(Debug)]
pub enum Controller {
    /// See [`BottleneckController`].
    Bottleneck(BottleneckController),
    /// See [`TimelyController`].
    Timely(TimelyController),
    /// See [`ReceivingRateController`].
    ReceivingRate(ReceivingRateController),
    /// See [`super::rival`].
    #[cfg(test)]
    Rival(super::rival::RivalController),
}

impl Controller {
    /// A fresh controller of this kind.
    #[must_use]
    pub fn new(kind: ControllerKind, settings: &ControllerSettings) -> Self {
        match kind {
            ControllerKind::Bottleneck => Self::Bottleneck(BottleneckController::new(settings)),
            ControllerKind::Timely => Self::Timely(TimelyController::new(settings)),
            ControllerKind::ReceivingRate => Self::ReceivingRate(ReceivingRateController::new(settings)),
        }
    }
}

/// Calls the same method of whichever controller it is.
macro_rules! forward {
    ($self:ident, $controller:ident => $call:expr) => {
        match $self {
            Controller::Bottleneck($controller) => $call,
            Controller::Timely($controller) => $call,
            Controller::ReceivingRate($controller) => $call,
            #[cfg(test)]
            Controller::Rival($controller) => $call,
        }
    };
}

impl RateController for Controller {
    fn on_sent(&mut self, now: Timestamp, bytes: u64, in_flight: u64) {
        forward!(self, controller => controller.on_sent(now, bytes, in_flight));
    }

    fn on_ack(&mut self, sample: &AckSample) {
        forward!(self, controller => controller.on_ack(sample));
    }

    fn on_idle_restart(&mut self, now: Timestamp) {
        forward!(self, controller => controller.on_idle_restart(now));
    }

    fn on_repair(&mut self) {
        forward!(self, controller => controller.on_repair());
    }

    fn on_incast(&mut self, flows: u32, paths: u32) {
        forward!(self, controller => controller.on_incast(flows, paths));
    }

    fn cwnd(&self) -> u64 {
        forward!(self, controller => controller.cwnd())
    }

    fn pacing_rate(&self) -> u64 {
        forward!(self, controller => controller.pacing_rate())
    }

    fn bandwidth(&self) -> u64 {
        forward!(self, controller => controller.bandwidth())
    }
}
