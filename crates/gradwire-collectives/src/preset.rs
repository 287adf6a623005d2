//! The presets of the product, with what each of them means beside its policy.

use crate::{Magnitude, Policy};
use gradwire_core::recovery::ControllerKind;

/// What a preset of the configuration means for the transport.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preset {
    /// Its name.
    pub name: &'static str,
    /// What a reduction may lose.
    pub policy: Policy,
    /// Rate controller.
    pub controller: ControllerKind,
    /// Whether packets carry classes and importance, by this rule; `None`: everything is alike to the network.
    pub importance: Option<Magnitude>,
}

impl Preset {
    /// The preset of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let (name, policy) = Policy::PRESETS.into_iter().find(|(preset, _)| *preset == name)?;
        let (controller, importance) = match name {
            "mlt" => (ControllerKind::Timely, Some(Magnitude::MLT)),
            "dlcp" => (ControllerKind::ReceivingRate, Some(Magnitude::DLCP)),
            _ => (ControllerKind::Bottleneck, None),
        };
        Some(Self { name, policy, controller, importance })
    }
}
