//! Packet numbers of 64 bits from the 32 that travel, and the epochs of their keys.

/// A key seals so many packets, by the power of two: half of what AES-GCM allows with full-sized packets (RFC 9001
/// section 6.6: 2^23). Both ends change keys by the number alone, so that nothing has to be said about it.
pub(crate) const EPOCH_BITS: u32 = 22;

/// The epoch of a number.
pub(crate) fn epoch(number: u64) -> u64 {
    number >> EPOCH_BITS
}

/// The number closest to `expected` whose low 32 bits are `low` (RFC 9000 appendix A.3).
pub(crate) fn extend(expected: u64, low: u32) -> u64 {
    const WINDOW: u64 = 1 << 32;
    const HALF: u64 = WINDOW / 2;
    let candidate = expected & !(WINDOW - 1) | u64::from(low);
    if candidate.checked_add(HALF).is_some_and(|end| end <= expected) {
        candidate.checked_add(WINDOW).unwrap_or(candidate)
    } else if candidate > expected.saturating_add(HALF) && candidate >= WINDOW {
        candidate - WINDOW
    } else {
        candidate
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn epochs_change_between_their_last_number_and_the_next() {
        assert_eq!((epoch((1 << 22) - 1), epoch(1 << 22), epoch(u64::MAX)), (0, 1, (1 << 42) - 1));
    }

    proptest! {
        #[test]
        fn any_number_within_half_the_window_is_found_again(expected: u64, distance in -(1_i64 << 31) + 1..1 << 31) {
            if let Some(number) = expected.checked_add_signed(distance) {
                prop_assert_eq!(extend(expected, number as u32), number);
            }
        }

        #[test]
        fn any_low_bits_give_a_number_with_them(expected: u64, low: u32) {
            prop_assert_eq!(extend(expected, low) as u32, low);
        }
    }
}
