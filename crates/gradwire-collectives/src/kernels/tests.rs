//! The fast kernels against one element at a time, written from the definition.

use super::*;
use ::half::{bf16, f16};
use proptest::prelude::*;

const REDUCTIONS: [ReduceOp; 9] = [
    ReduceOp::Sum,
    ReduceOp::Avg,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::BitAnd,
    ReduceOp::BitOr,
    ReduceOp::BitXor,
    ReduceOp::PremulSum(2.0),
];

/// One float reduction by definition.
fn naive_float(reduce: ReduceOp, a: f64, b: f64) -> f64 {
    match reduce {
        ReduceOp::Product => a * b,
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f64::NAN,
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => a + b,
    }
}

/// One integer reduction by definition; the caller truncates to the width of the dtype.
fn naive_integer(reduce: ReduceOp, a: i128, b: i128) -> i128 {
    match reduce {
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::BitAnd => a & b,
        ReduceOp::BitOr => a | b,
        ReduceOp::BitXor => a ^ b,
        _ => a + b,
    }
}

fn naive_bool(reduce: ReduceOp, a: bool, b: bool) -> bool {
    match reduce {
        ReduceOp::Product | ReduceOp::Min | ReduceOp::BitAnd => a && b,
        ReduceOp::BitXor => a != b,
        _ => a || b,
    }
}

/// One element `[dtype.bytes()]` of each operand.
fn naive(dtype: Dtype, reduce: ReduceOp, a: &[u8], b: &[u8]) -> Vec<u8> {
    macro_rules! integer {
        ($type:ty) => {{
            let read = |x: &[u8]| i128::from(<$type>::from_le_bytes(x.try_into().unwrap()));
            (naive_integer(reduce, read(a), read(b)) as $type).to_le_bytes().to_vec()
        }};
    }
    match dtype {
        Dtype::F32 => {
            let read = |x: &[u8]| f64::from(f32::from_le_bytes(x.try_into().unwrap()));
            (naive_float(reduce, read(a), read(b)) as f32).to_le_bytes().to_vec()
        }
        Dtype::F64 => {
            let read = |x: &[u8]| f64::from_le_bytes(x.try_into().unwrap());
            naive_float(reduce, read(a), read(b)).to_le_bytes().to_vec()
        }
        Dtype::F16 => {
            let read = |x: &[u8]| f64::from(f16::from_le_bytes(x.try_into().unwrap()).to_f32());
            f16::from_f32(naive_float(reduce, read(a), read(b)) as f32).to_le_bytes().to_vec()
        }
        Dtype::Bf16 => {
            let read = |x: &[u8]| f64::from(bf16::from_le_bytes(x.try_into().unwrap()).to_f32());
            bf16::from_f32(naive_float(reduce, read(a), read(b)) as f32).to_le_bytes().to_vec()
        }
        Dtype::U8 => integer!(u8),
        Dtype::I8 => integer!(i8),
        Dtype::I16 => integer!(i16),
        Dtype::I32 => integer!(i32),
        Dtype::I64 => integer!(i64),
        Dtype::U16 => integer!(u16),
        Dtype::U32 => integer!(u32),
        Dtype::U64 => integer!(u64),
        Dtype::Bool => vec![u8::from(naive_bool(reduce, a[0] != 0, b[0] != 0))],
        Dtype::Bytes => unreachable!(),
    }
}

fn is_nan(dtype: Dtype, bytes: &[u8]) -> bool {
    match dtype {
        Dtype::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        Dtype::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => false,
    }
}

fn assert_same(dtype: Dtype, reduce: ReduceOp, got: &[u8], want: &[u8]) {
    for (index, (got, want)) in got.chunks(dtype.bytes()).zip(want.chunks(dtype.bytes())).enumerate() {
        let both_nan = is_nan(dtype, got) && is_nan(dtype, want);
        // Least and largest of +0 and -0 are the same number.
        let zeros = dtype.is_float() && got.iter().chain(want).all(|b| *b == 0 || *b == 0x80);
        assert!(got == want || both_nan || zeros, "{dtype:?} {reduce:?} [{index}]: {got:?} != {want:?}");
    }
}

#[test]
fn integers_are_multiplied_by_whole_factors_and_wrap_around() {
    let mut values = [100_u8, 0xFF, 3];
    close(Dtype::I8, Closing::Scale(2.0), &mut values);
    assert_eq!(values.map(|v| v as i8), [-56, -2, 6]);
    let mut wide = (u64::MAX - 1).to_le_bytes();
    close(Dtype::U64, Closing::Scale(-1.0), &mut wide);
    assert_eq!(u64::from_le_bytes(wide), 2);
}

proptest! {
    #[test]
    fn combine_equals_the_definition_for_every_dtype_and_reduction(
        raw in prop::collection::vec(any::<u8>(), 0..1500),
        other in prop::collection::vec(any::<u8>(), 1500),
        skew in 0_usize..8,
    ) {
        for dtype in Dtype::ALL {
            let bytes = raw.len() / dtype.bytes() * dtype.bytes();
            // Both operands start at odd addresses, as payloads behind a header do.
            let source = &other[skew..][..bytes.min(1400) / dtype.bytes() * dtype.bytes()];
            for reduce in REDUCTIONS.into_iter().filter(|r| dtype.supports(*r)) {
                let mut got = raw[..source.len()].to_vec();
                combine(dtype, reduce, &mut got, source);
                let want: Vec<u8> = raw[..source.len()]
                    .chunks(dtype.bytes())
                    .zip(source.chunks(dtype.bytes()))
                    .flat_map(|(a, b)| naive(dtype, reduce, a, b))
                    .collect();
                assert_same(dtype, reduce, &got, &want);
            }
        }
    }

    #[test]
    fn halves_widen_and_narrow_as_the_half_crate_does(values in prop::collection::vec(any::<u32>(), 0..300)) {
        let floats: Vec<f32> = values.iter().map(|bits| f32::from_bits(*bits)).collect();
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let mut bytes = vec![0; 2 * floats.len()];
            narrow(dtype, &floats, &mut bytes);
            let want: Vec<u8> = floats.iter().flat_map(|v| match dtype {
                Dtype::F16 => f16::from_f32(*v).to_le_bytes(),
                _ => bf16::from_f32(*v).to_le_bytes(),
            }).collect();
            assert_same(dtype, ReduceOp::Sum, &bytes, &want);
            let mut back = vec![0.0; floats.len()];
            widen(dtype, &bytes, &mut back);
            let mut again = vec![0; bytes.len()];
            narrow(dtype, &back, &mut again);
            assert_same(dtype, ReduceOp::Sum, &again, &bytes);
        }
    }

    #[test]
    fn a_float32_accumulator_of_halves_is_rounded_only_once(values in prop::collection::vec(-500_i16..500, 8..200)) {
        // 1024 + k / 8 has more bits than either half type keeps; float32 holds every sum exactly.
        let addend: Vec<f32> = values.iter().map(|v| f32::from(*v) / 8.0).collect();
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let mut bytes = vec![0; 2 * addend.len()];
            narrow(dtype, &addend, &mut bytes);
            let mut rounded = vec![0.0; addend.len()];
            widen(dtype, &bytes, &mut rounded);
            let mut sum = vec![1024.0; addend.len()];
            accumulate(dtype, ReduceOp::Sum, &mut sum, &bytes);
            accumulate(dtype, ReduceOp::Sum, &mut sum, &bytes);
            for (got, value) in sum.iter().zip(&rounded) {
                prop_assert_eq!(*got, 1024.0 + 2.0 * value);
            }
        }
    }
}

#[test]
fn adding_the_last_contribution_gives_the_bits_of_adding_and_closing_on_every_processor() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| dtype.supports(ReduceOp::PremulSum(3.0))) {
        for closing in [Closing::Keep, Closing::Divide(3), Closing::Divide(7), Closing::Scale(3.0)] {
            for elems in [1, 7, 350] {
                // Bits of all kinds, but finite: the exponents of floats stay in the middle.
                let values = |seed: usize| -> Vec<u8> {
                    (0..elems * dtype.bytes())
                        .map(|at| {
                            if dtype.is_float() && (at + 1) % dtype.bytes() == 0 {
                                0x3E
                            } else {
                                (at * seed % 251) as u8
                            }
                        })
                        .collect()
                };
                let (source, mut want) = (values(97), values(53));
                let (mut fused, mut portable) = (want.clone(), want.clone());
                combine(dtype, ReduceOp::Sum, &mut want, &source);
                close(dtype, closing, &mut want);
                add_last(dtype, closing, &mut fused, &source);
                scale::add_last_any(dtype, closing, &mut portable, &source);
                assert!(fused == want && portable == want, "{elems} of {dtype:?}, {closing:?}");
            }
        }
    }
}

#[test]
fn a_mean_of_equal_values_is_that_value() {
    for count in 1..=8_u16 {
        let mut floats: Vec<u8> =
            (0..100).flat_map(|i| (i as f32 * f32::from(count)).to_le_bytes()).collect();
        close(Dtype::F32, Closing::Divide(count), &mut floats);
        let want: Vec<u8> = (0..100).flat_map(|i| (i as f32).to_le_bytes()).collect();
        assert_eq!(floats, want);
    }
}

#[test]
fn integer_means_truncate_towards_zero() {
    let mut values: Vec<u8> = [-7_i32, -1, 0, 7, i32::MIN].into_iter().flat_map(i32::to_le_bytes).collect();
    close(Dtype::I32, Closing::Divide(2), &mut values);
    let want: Vec<u8> = [-3_i32, 0, 0, 3, i32::MIN / 2].into_iter().flat_map(i32::to_le_bytes).collect();
    assert_eq!(values, want);
}

#[test]
fn halves_are_scaled_in_float32() {
    let mut values = f16::from_f32(1000.0).to_le_bytes().to_vec();
    close(Dtype::F16, Closing::Scale(0.001), &mut values);
    assert_eq!(values, f16::from_f32(1000.0 * 0.001_f32).to_le_bytes());
}

#[test]
fn what_is_left_of_halves_is_finite_and_only_what_is_too_large_is_cut() {
    // The least number without half of its last bit more, which is the end of what is rounded to it.
    for (dtype, least, half_a_bit) in
        [(Dtype::F16, f16::MIN.to_f32(), 16.0), (Dtype::Bf16, bf16::MIN.to_f32(), 2.0_f32.powi(119))]
    {
        let bytes = |values: [f32; 4]| {
            let mut bytes = vec![0; 8];
            narrow(dtype, &values, &mut bytes);
            bytes
        };
        let mut values = bytes([least, least, f32::INFINITY, 3.0]);
        take_away(dtype, &mut values, &bytes([half_a_bit, -half_a_bit, 1.0, f32::NAN]), 1.0);
        let more_than_least = least + half_a_bit;
        assert_eq!(values, bytes([least, more_than_least, 0.0, 0.0]), "{dtype:?}");
        let mut values = bytes([f32::NEG_INFINITY, least, f32::NAN, -least]);
        drop_infinite(dtype, &mut values);
        assert_eq!(values, bytes([0.0, least, 0.0, -least]), "{dtype:?}");
    }
    for value in [f64::INFINITY, f64::NAN] {
        let mut values = [(value as f32).to_le_bytes(), 1.5_f32.to_le_bytes()].concat();
        drop_infinite(Dtype::F32, &mut values);
        assert_eq!(values, [0.0_f32.to_le_bytes(), 1.5_f32.to_le_bytes()].concat());
        let mut values = [value.to_le_bytes(), 1.5_f64.to_le_bytes()].concat();
        drop_infinite(Dtype::F64, &mut values);
        assert_eq!(values, [0.0_f64.to_le_bytes(), 1.5_f64.to_le_bytes()].concat());
    }
}
