//! What one call with segmentation offload hands to the kernel: a message of datagrams that go to one peer.
//!
//! The kernel's layers and the devices take about as long for a message of a few packets as for a full one, so what paces and
//! what takes turns does so by whole messages where rates are high.

use gradwire_wire::{HEADER_BYTES, TAG_BYTES};

/// Most bytes of a message: the largest UDP payload.
pub const MESSAGE_BYTES_MAX: usize = 65_507;

/// Most datagrams of a message that every kernel with segmentation offload takes (`UDP_MAX_SEGMENTS`).
pub const MESSAGE_DATAGRAMS_MAX: usize = 64;

/// Data packets with so many bytes of payload that a message holds, sealed or not, unless they carry openings; at least one.
#[must_use]
pub const fn message_packets(payload_bytes: usize) -> usize {
    let fit = MESSAGE_BYTES_MAX / payload_bytes.saturating_add(HEADER_BYTES + TAG_BYTES);
    match fit {
        0 => 1,
        1..MESSAGE_DATAGRAMS_MAX => fit,
        _ => MESSAGE_DATAGRAMS_MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_holds_what_fits_and_one_packet_at_least() {
        let packets = [1_408, 8_896, 32_000, 65_000, 65_507, 1, 0, usize::MAX].map(message_packets);
        assert_eq!(packets, [45, 7, 2, 1, 1, 64, 64, 1]);
    }
}
