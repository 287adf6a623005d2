//! Datagrams that no rank of this group has sent: what a port of a shared machine also receives.

use crate::Rng;
use gradwire_core::wire::HEADER_BYTES;

/// Something that arrives beside `genuine`. It never carries a connection id of this group: those are drawn at random
/// from 24 bits, and who is not on the way cannot know them.
pub(crate) fn datagram(rng: &mut Rng, genuine: &[u8]) -> Vec<u8> {
    let mut bytes = match rng.below(0..4) {
        // Of another job with the same protocol.
        0 => genuine.to_vec(),
        // The same, cut off anywhere.
        1 => genuine[..rng.below(0..genuine.len() as u64 + 1) as usize].to_vec(),
        // A header that promises more than there is, over noise.
        2 => {
            let mut mixed = genuine[..genuine.len().min(HEADER_BYTES)].to_vec();
            extend_with_noise(rng, &mut mixed, 100);
            flip_bits(rng, &mut mixed);
            mixed
        }
        _ => {
            let mut noise = Vec::new();
            extend_with_noise(rng, &mut noise, 1500);
            noise
        }
    };
    if let Some(top) = bytes.get_mut(CONNECTION_ID_TOP) {
        *top |= 0x80;
    }
    bytes
}

/// Flips up to eight bits, mostly in the header, where it hurts.
pub(crate) fn flip_bits(rng: &mut Rng, bytes: &mut [u8]) {
    for _ in 0..rng.below(1..9) {
        let reach = if rng.chance(0.8) { bytes.len().min(56) } else { bytes.len() };
        let at = rng.below(0..reach as u64) as usize;
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << rng.below(0..8);
        }
    }
}

fn extend_with_noise(rng: &mut Rng, bytes: &mut Vec<u8>, length_max: u64) {
    let length = rng.below(0..length_max);
    bytes.extend((0..length).map(|_| rng.draw() as u8));
}

/// Most significant byte of the connection id (docs/protocol.md section 2). The ids of simulated groups are small.
const CONNECTION_ID_TOP: usize = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use gradwire_core::wire::Header;

    #[test]
    fn a_stray_datagram_never_has_an_id_of_the_group() {
        let mut rng = Rng::new(1);
        let mut genuine = vec![0; 200];
        (genuine[0], genuine[4]) = (0x10, 3);
        let ids: Vec<u32> = (0..1000)
            .filter_map(|_| {
                Header::decode(&datagram(&mut rng, &genuine)).ok().map(|(h, _)| h.connection.value())
            })
            .collect();
        assert!(ids.len() > 100 && ids.iter().all(|id| *id >= 1 << 23), "{} decodable", ids.len());
    }
}
