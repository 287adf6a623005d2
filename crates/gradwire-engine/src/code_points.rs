//! What a packet is, as bits of its IP header: the traffic class octet is the code point (DSCP, 6 bits) and the ECN field.
//!
//! The ECN field is used as MLT (section 5.2) and DLCP (section 4.2) do: a switch with RED and ECN marks a capable packet
//! where it drops others, so capable means "keep this one". It promises no reaction to the marks, and is therefore off
//! until somebody who owns the switches turns it on.

use crate::EngineConfig;
use gradwire_core::{Ecn, Mark, ReceivedMark, TrafficClass, CLASSES_MAX};

/// The octets of this process's packets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CodePoints {
    data: [u8; CLASSES_MAX],
    control: u8,
    ecn: bool,
    /// Class by code point; [`NO_CLASS`] where none has it.
    classes: [u8; 64],
}

/// ECT(0): an ECN-capable packet that no switch has marked.
const CAPABLE: u8 = 0b10;
const NO_CLASS: u8 = u8::MAX;

impl CodePoints {
    /// As configured. Classes beyond the last code point share it.
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let mut data = [config.dscp << 2; CLASSES_MAX];
        let mut classes = [NO_CLASS; 64];
        if let Some(last) = config.dscp_classes.last() {
            for (class, octet) in data.iter_mut().enumerate() {
                let code_point = config.dscp_classes.get(class).unwrap_or(last);
                *octet = code_point << 2;
                let of_class = &mut classes[usize::from(*code_point & 63)];
                *of_class = (*of_class).min(class as u8);
            }
        }
        Self { data, control: config.dscp_control.unwrap_or(config.dscp) << 2, ecn: config.ecn, classes }
    }

    /// The octet of a packet.
    pub(crate) fn octet(&self, mark: Mark) -> u8 {
        let code_point = match mark.class {
            TrafficClass::Control => self.control,
            TrafficClass::Data(class) => self.data[usize::from(class).min(CLASSES_MAX - 1)],
        };
        code_point | if self.ecn && mark.ecn_capable { CAPABLE } else { 0 }
    }

    /// What a received octet says.
    pub(crate) fn read(&self, octet: u8) -> ReceivedMark {
        let class = self.classes[usize::from(octet >> 2)];
        ReceivedMark { class: (class != NO_CLASS).then_some(class), ecn: Ecn::from_bits(octet) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IMPORTANT: Mark = Mark { class: TrafficClass::Data(0), ecn_capable: true };
    const LAST: Mark = Mark { class: TrafficClass::Data(7), ecn_capable: false };

    #[test]
    fn by_default_every_packet_has_the_same_octet() {
        let codes = CodePoints::new(&EngineConfig { dscp: 10, ..EngineConfig::default() });
        assert!([IMPORTANT, LAST, Mark::CONTROL].into_iter().all(|mark| codes.octet(mark) == 10 << 2));
        assert_eq!(codes.read(10 << 2), ReceivedMark::default());
    }

    #[test]
    fn a_class_and_the_ecn_field_survive_the_way_through_the_octet() {
        let dscp_classes = vec![34, 26, 18, 10];
        let config =
            EngineConfig { dscp_classes, dscp_control: Some(40), ecn: true, ..EngineConfig::default() };
        let codes = CodePoints::new(&config);
        assert_eq!(codes.octet(IMPORTANT), 34 << 2 | 2);
        assert_eq!(codes.octet(LAST), 10 << 2, "classes beyond the last code point share it");
        assert_eq!(codes.octet(Mark::CONTROL), 40 << 2 | 2);
        assert_eq!(codes.read(18 << 2 | 3), ReceivedMark { class: Some(2), ecn: Ecn::Congestion });
        assert_eq!(codes.read(10 << 2), ReceivedMark { class: Some(3), ecn: Ecn::NotCapable });
        assert_eq!(codes.read(40 << 2 | 2).class, None);
        assert_eq!(
            codes.read(0),
            ReceivedMark::default(),
            "a network that clears code points hides the class"
        );
    }
}
