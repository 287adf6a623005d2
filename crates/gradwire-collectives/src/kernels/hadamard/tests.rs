use super::*;
use crate::kernels::{narrow, widen};
use proptest::prelude::*;

fn hadamard(elems: usize) -> Hadamard {
    Hadamard::of(elems).expect("large enough")
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

fn spread(hadamard: Hadamard, seed: u64, values: &[f32]) -> Vec<f32> {
    let mut target = vec![0xFF; 4 * hadamard.padded()];
    hadamard.spread(Dtype::F32, seed, &bytes(values), &mut target, &mut Vec::new());
    floats(&target)
}

fn restore(hadamard: Hadamard, seed: u64, spread: &[f32]) -> Vec<f32> {
    let mut target = vec![0xFF; 4 * hadamard.elems];
    hadamard.restore(Dtype::F32, seed, &bytes(spread), &mut target, &mut Vec::new());
    floats(&target)
}

fn ramp(elems: usize) -> Vec<f32> {
    (0..elems).map(|index| (index * 7 % 97) as f32 - 48.0).collect()
}

/// The transform by its definition: signs, then row r of output row s times minus one for each bit that r and s share.
fn naive(hadamard: Hadamard, seed: u64, values: &[f32]) -> Vec<f64> {
    let Hadamard { block, lanes, .. } = hadamard;
    let signs = Signs::new(seed, lanes);
    let signed = |row: usize, lane: usize| {
        let value = f64::from(values.get(row * lanes + lane).copied().unwrap_or(0.0));
        if signs.bits(row, lane) & 1 == 1 {
            -value
        } else {
            value
        }
    };
    let mut out = vec![0.0; block * lanes];
    for lane in 0..lanes {
        let column: Vec<f64> = (0..block).map(|row| signed(row, lane)).collect();
        for row in 0..block {
            let term = |(other, value): (usize, &f64)| {
                if (row & other).count_ones() % 2 == 0 {
                    *value
                } else {
                    -value
                }
            };
            let sum: f64 = column.iter().enumerate().map(term).sum();
            out[row * lanes + lane] = sum / (block as f64).sqrt();
        }
    }
    out
}

fn square_error(left: &[f32], right: &[f32]) -> f64 {
    left.iter().zip(right).map(|(a, b)| f64::from(a - b).powi(2)).sum()
}

/// Integers of up to 12 bits are transformed without rounding, so the definition gives the same numbers.
#[test]
#[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
fn the_transform_is_the_one_of_the_definition_and_exact_for_small_integers() {
    for elems in [2_048, 2_049, 8_000, 9_999, 40_000, 140_001] {
        let hadamard = hadamard(elems);
        let values = ramp(elems);
        let fast = spread(hadamard, 11, &values);
        let slow = naive(hadamard, 11, &values);
        assert!(fast.iter().zip(&slow).all(|(fast, slow)| f64::from(*fast) == *slow), "{elems}");
        assert_eq!(restore(hadamard, 11, &fast), values, "{elems}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
fn blocks_of_4096_are_exact_for_small_integers_too() {
    for elems in [1 << 19, (1 << 19) + 12_345] {
        let hadamard = hadamard(elems);
        assert_eq!(hadamard.block(), 4096);
        let (values, fast) = (ramp(elems), spread(hadamard, 5, &ramp(elems)));
        assert_eq!(restore(hadamard, 5, &fast), values);
        let energy = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        assert!((energy(&fast) / energy(&values) - 1.0).abs() < 1e-9, "it is a rotation");
    }
}

#[test]
fn padding_is_at_most_an_eighth_and_small_buckets_are_left_alone() {
    assert_eq!(Hadamard::of(2_047), None);
    assert_eq!(hadamard(2_048), Hadamard { elems: 2_048, block: 16, lanes: 128 });
    assert_eq!(hadamard(25 << 18).block(), 4096);
    for elems in (2_048..600_000).step_by(97) {
        let padded = hadamard(elems).padded();
        assert!(padded >= elems && padded - elems <= elems / 8, "{elems} become {padded}");
        assert!(padded - elems < 16 * hadamard(elems).block() && hadamard(elems).lanes % 16 == 0);
    }
}

#[test]
fn another_seed_is_another_rotation() {
    let hadamard = hadamard(4_096);
    let of = |seed| spread(hadamard, seed, &ramp(4_096));
    assert_eq!(of(1), of(1));
    assert_ne!(of(1), of(2));
}

/// All that the processor has, in every dtype, there and back, from and to tensors of odd lengths and addresses.
#[test]
#[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
fn every_level_gives_the_same_bits() {
    for elems in [2_051, 10_007, 50_021, 131_075, 600_011] {
        let hadamard = hadamard(elems);
        let values: Vec<f32> = (0..elems).map(|index| (index as f32 * 0.37).sin() / 3.0).collect();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let mut source = vec![0; elems * dtype.bytes() + 1];
            match dtype {
                Dtype::F32 => source[1..].copy_from_slice(&bytes(&values)),
                _ => narrow(dtype, &values, &mut source[1..]),
            }
            let of = |level| {
                let mut there = vec![0xFF; hadamard.padded() * dtype.bytes()];
                let mut back = vec![0xFF; elems * dtype.bytes()];
                let scratch = &mut vec![f32::NAN; 3];
                run(level, (dtype, hadamard.plan(3, false)), Some(&source[1..]), &mut there, scratch);
                run(level, (dtype, hadamard.plan(3, true)), Some(&there), &mut back, scratch);
                let mut in_place = there.clone();
                run(level, (dtype, hadamard.plan(3, true)), None, &mut in_place, scratch);
                assert!(in_place.starts_with(&back), "{level:?} and {dtype:?} of {elems} where it is");
                (there, back)
            };
            let expected = of(Level::Any);
            for level in Level::all() {
                assert!(of(level) == expected, "{level:?} and {dtype:?} of {elems}");
            }
        }
    }
}

/// The bound that the module states: once for the butterflies of each way, once for each rounding to the dtype.
#[test]
#[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
fn what_was_spread_comes_back_within_the_stated_bound() {
    let elems = 70_001;
    let hadamard = hadamard(elems);
    let values: Vec<f32> = (0..elems).map(|index| ((index * 31 % 1_009) as f32 - 500.0) / 333.0).collect();
    for (dtype, unit) in [(Dtype::F16, 1.0 / 2_048.0), (Dtype::Bf16, 1.0 / 256.0)] {
        let mut source = vec![0; 2 * elems];
        narrow(dtype, &values, &mut source);
        let (mut there, mut back) = (vec![0; 2 * hadamard.padded()], vec![0; 2 * elems]);
        hadamard.spread(dtype, 9, &source, &mut there, &mut Vec::new());
        hadamard.restore(dtype, 9, &there, &mut back, &mut Vec::new());
        let (mut before, mut after) = (vec![0.0; elems], vec![0.0; elems]);
        widen(dtype, &source, &mut before);
        widen(dtype, &back, &mut after);
        let norm = square_error(&before, &vec![0.0; elems]).sqrt();
        let bound = (2.0 * unit + 2.0 * 10.0 / f64::from(1 << 24)) * norm;
        assert!(square_error(&before, &after).sqrt() <= bound, "{dtype:?}");
    }
}

/// The squared error after the share `lost` of the rows was set to zero, over seeds, and the share of elements that are off.
fn error_without(lost: &[bool]) -> (f64, f64) {
    let elems = 64 * 1_024;
    let hadamard = hadamard(elems);
    // A gradient whose large values lie together: what a run of losses would hit hardest.
    let value = |index: usize| if index > elems * 9 / 10 { 3.0 } else { 0.1 };
    let values: Vec<f32> = (0..elems).map(value).collect();
    let (mut error, mut touched) = (0.0, 0);
    for seed in 0..16 {
        let mut received = spread(hadamard, seed, &values);
        for (row, line) in received.chunks_exact_mut(hadamard.lanes).enumerate() {
            if lost[row % lost.len()] {
                line.fill(0.0);
            }
        }
        let back = restore(hadamard, seed, &received);
        error += square_error(&back, &values) / 16.0;
        touched += back.iter().zip(&values).filter(|(back, value)| (*back - *value).abs() > 1e-3).count();
    }
    (error, touched as f64 / (16 * elems) as f64)
}

// test of: ultima/hadamard
#[test]
#[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
fn a_cut_off_tail_costs_no_more_than_scattered_losses() {
    let rows = 256;
    let tail: Vec<bool> = (0..rows).map(|row| row >= rows * 9 / 10).collect();
    let count = tail.iter().filter(|lost| **lost).count();
    let mut scattered = vec![false; rows];
    (0..count).for_each(|index| scattered[(index * 97 + 13) % rows] = true);
    let ((burst, touched), (anywhere, _)) = (error_without(&tail), error_without(&scattered));
    assert!(burst / anywhere < 1.1, "a burst costs {} times as much", burst / anywhere);
    // The same sum could be a tenth of the blocks, each lost whole.
    assert!(touched > 0.9, "only {touched} of the elements bear it");
}

proptest! {
    #[test]
    #[cfg_attr(miri, ignore = "whole buckets are turned, which takes minutes there")]
    fn what_was_spread_is_restored(elems in 2_048_usize..40_000, seed in any::<u64>(), scale in -3.0_f32..3.0) {
        let hadamard = hadamard(elems);
        let values: Vec<f32> = ramp(elems).iter().map(|value| value * scale.exp()).collect();
        let back = restore(hadamard, seed, &spread(hadamard, seed, &values));
        let norm = square_error(&values, &vec![0.0; elems]).sqrt();
        let bound = 2.0 * f64::from(hadamard.block().ilog2()) / f64::from(1 << 24) * norm;
        prop_assert!(square_error(&back, &values).sqrt() <= bound);
    }
}
