//! What share of its packets and values a rank lost lately.

/// Recent shares of what was lost. Few packets say nothing about a share: then the one before stays, and they count on.
#[derive(Debug, Default)]
pub(super) struct LossMeter {
    numbered_before: u64,
    arrived_before: u64,
    pub(super) expected_bytes: u64,
    pub(super) missing_bytes: u64,
    pub(super) lost_ppm: u32,
    pub(super) left_out_ppm: u32,
}

impl LossMeter {
    /// Takes the totals of all connections.
    pub(super) fn update(&mut self, numbered: u64, arrived: u64) {
        let packets = numbered - self.numbered_before;
        if packets >= PACKETS_MIN {
            // What was overtaken by the exchange before came since, beside what is due.
            let lost = packets.saturating_sub(arrived - self.arrived_before);
            self.lost_ppm = ppm(lost, packets);
            (self.numbered_before, self.arrived_before) = (numbered, arrived);
        }
        if self.expected_bytes >= BYTES_MIN {
            self.left_out_ppm = ppm(self.missing_bytes, self.expected_bytes);
            (self.expected_bytes, self.missing_bytes) = (0, 0);
        }
    }
}

fn ppm(part: u64, whole: u64) -> u32 {
    u32::try_from(u128::from(part) * u128::from(PPM) / u128::from(whole)).unwrap_or(u32::MAX).min(PPM as u32)
}

/// Shares are told in millionths.
pub(super) const PPM: u64 = 1_000_000;
/// At 1 % loss 400 packets lose 4 +- 2: enough to tell it from 5 %, where decisions change.
const PACKETS_MIN: u64 = 400;
/// As many packets of the common size.
const BYTES_MIN: u64 = PACKETS_MIN * 1408;
