//! Tolerant reductions of a rotated bucket: the transform is done again here, in float64 and from its definition.
//!
//! What did not count is told as places in the rotated bucket. The reduction over that mask, turned back, is what every rank
//! must have, and the masked part of a rank's own input, turned back, what its residual must hold. A result that counts a
//! value too many or too few is off by about the size of a gradient.
//!
//! Right means: within the rounding of the arithmetic that the bucket went through. A butterfly keeps the norm of a block and
//! rounds each value once, so a transform is off by at most log2(block) units of the block's norm. Two transforms, one addition for
//! each rank and up to four roundings more (division, scale) make `2 log2(block) + ranks + 4` units of float32, times
//! the sum of all ranks' norms. Where a rest is mixed in, each way has six more: four sums of 16, a difference and what it adds. Halves are rounded besides: when they are sent, when the result is, when it is turned back, and in
//! a ring at each step.

use super::tolerant::{contains, View};
use crate::mix;
use crate::record::merge;
use crate::values::{contribution, load};
use crate::Violation;
use gradwire_collectives::{DivideBy, Dtype, Fill, Hadamard, ReduceOp, WholeHadamard};
use half::{bf16, f16};

/// Checks a reduction of which every report says that it was rotated.
pub(super) fn check(view: &View<'_>) -> Result<(), Violation> {
    let rotated = Rotated::new(view)?;
    let results = rotated.results(view);
    for rank in 0..view.outputs.len() {
        let mut expected = results.clone();
        rotated.fill(view, rank, &mut expected);
        let wrong = rotated.compare(view, expected.clone(), view.outputs[rank], 1.0);
        let to_violation =
            |(elem, expected, got)| Violation::WrongElement { op: view.op, rank, elem, expected, got };
        wrong.map_or(Ok(()), |wrong| Err(to_violation(wrong)))?;
        rotated.check_residual(view, rank, &expected)?;
    }
    Ok(())
}

/// The rotated inputs of one reduction.
struct Rotated {
    block: usize,
    lanes: usize,
    /// Elements of the matrix. Of a large bucket, which is turned where it is, the others are mixed with it.
    matrix: usize,
    seed: u64,
    /// For each rank, `[block, lanes]`, and the rest.
    inputs: Vec<Vec<f64>>,
    /// For each column, the sum of the ranks' norms.
    norms: Vec<f64>,
    unit: f64,
}

impl Rotated {
    fn new(view: &View<'_>) -> Result<Self, Violation> {
        let plan = view.plan;
        let whole = WholeHadamard::of(plan.elems);
        let hadamard = Hadamard::of(plan.elems);
        let padded = match whole {
            Some(_) => plan.elems as u64,
            None => hadamard.map_or(0, Hadamard::padded) as u64,
        };
        if let Some(rank) = view.reports.iter().position(|report| report.rotated_elems != padded) {
            let reported = format!("{} rotated elements", view.reports[rank].rotated_elems);
            return Err(Violation::ReportDisagrees {
                op: view.op,
                rank,
                reported,
                actual: padded.to_string(),
            });
        }
        let block = whole.map_or(hadamard.map_or(1, Hadamard::block), WholeHadamard::block);
        // Whole columns, sixteen at a time; padding makes them so.
        let lanes = padded as usize / (16 * block) * 16;
        let matrix = block * lanes;
        let seed = GROUP ^ view.reports[0].sequence.wrapping_mul(ODD);
        let ranks = view.outputs.len();
        let mut rotated = Self {
            block,
            lanes,
            matrix,
            seed,
            inputs: Vec::new(),
            norms: Vec::new(),
            unit: unit(view, block),
        };
        for rank in 0..ranks {
            let value = |elem: u64| contribution(plan.dtype, plan.reduce, view.op, rank, elem) as f64;
            let mut values: Vec<f64> = (0..plan.elems as u64).map(value).collect();
            values.resize(padded as usize, 0.0);
            rotated.flip(&mut values);
            rotated.mix_rest(&mut values);
            rotated.butterflies(&mut values);
            rotated.inputs.push(values);
        }
        let norm = |lane: usize| rotated.inputs.iter().map(|input| rotated.norm(input, lane)).sum();
        rotated.norms = (0..lanes).map(norm).collect();
        Ok(rotated)
    }

    /// The reduction of the rotated inputs over what the reports say counted.
    fn results(&self, view: &View<'_>) -> Vec<f64> {
        let ranks = self.inputs.len();
        let shard = self.shard(view);
        let result = |place: usize| {
            let first = if view.is_ring() { place / shard } else { 0 };
            let (mut sum, mut count) = (0.0, 0.0);
            for step in 0..ranks {
                let rank = (first + step) % ranks;
                let counts = !contains(&view.uncounted[rank], place as u64);
                if view.is_ring() {
                    // A partial sum that is lost leaves the next rank with its own value.
                    (sum, count) = (sum + self.inputs[rank][place], count + 1.0);
                    if !counts {
                        (sum, count) = (0.0, 0.0);
                    }
                } else if counts {
                    (sum, count) = (sum + self.inputs[rank][place], count + 1.0);
                }
            }
            let divisor = if view.plan.policy.divide_by == DivideBy::World { ranks as f64 } else { count };
            if count <= 0.0 {
                // What no worker brought to a dedicated server is zero.
                0.0
            } else if view.plan.reduce == ReduceOp::Avg {
                sum / divisor
            } else {
                sum * ranks as f64 / divisor
            }
        };
        (0..self.inputs[0].len()).map(result).collect()
    }

    /// Puts in `results` what `rank` has where they did not reach it.
    fn fill(&self, view: &View<'_>, rank: usize, results: &mut [f64]) {
        let sums = view.plan.reduce != ReduceOp::Avg;
        for place in view.reports[rank].filled.iter().cloned().flatten().map(|place| place as usize) {
            let own = self.inputs[rank][place];
            results[place] = match view.plan.policy.gather.fill {
                Fill::Zero => 0.0,
                Fill::Local if sums => own * self.inputs.len() as f64,
                Fill::Local | Fill::Previous => own,
            };
        }
    }

    /// What `rank` owes, turned back: what it sent and did not count, less what its result holds in place of it.
    fn check_residual(&self, view: &View<'_>, rank: usize, results: &[f64]) -> Result<(), Violation> {
        let uncounted = &view.uncounted[rank];
        if uncounted.is_empty() {
            return view.check_untouched(rank);
        }
        let of_mean = match view.plan.reduce {
            ReduceOp::Avg => 1.0,
            _ => 1.0 / self.inputs.len() as f64,
        };
        let filled = merge(view.reports[rank].filled.clone());
        let mut owed = vec![0.0; self.inputs[rank].len()];
        for place in uncounted.iter().cloned().flatten() {
            let (sum, weight) = self.sent(view, rank, place as usize);
            // Divided by all ranks, zero stands in for a value wherever there is a result.
            let by_world = view.plan.policy.divide_by == DivideBy::World;
            let of_mean = if by_world && !contains(&filled, place) { 0.0 } else { of_mean };
            owed[place as usize] = sum - weight * of_mean * results[place as usize];
        }
        // The results that are taken away are rounded too, once for each rank in what was lost.
        let times = 1.0 + self.inputs.len() as f64;
        let wrong = self.compare(view, owed, view.residuals[rank], times);
        let to_violation =
            |(elem, expected, got)| Violation::Residual { op: view.op, rank, elem, expected, got };
        wrong.map_or(Ok(()), |wrong| Err(to_violation(wrong)))
    }

    /// What `rank` sent at `place`, and of how many ranks: in a ring of those before it as well, as far as they were not
    /// lost.
    fn sent(&self, view: &View<'_>, rank: usize, place: usize) -> (f64, f64) {
        if !view.is_ring() {
            return (self.inputs[rank][place], 1.0);
        }
        let ranks = self.inputs.len();
        let first = place / self.shard(view);
        let steps = (rank + ranks - first) % ranks;
        let (mut sum, mut weight) = (0.0, 0.0);
        for step in 0..=steps {
            let sender = (first + step) % ranks;
            (sum, weight) = (sum + self.inputs[sender][place], weight + 1.0);
            if step < steps && contains(&view.uncounted[sender], place as u64) {
                (sum, weight) = (0.0, 0.0);
            }
        }
        (sum, weight)
    }

    /// Turns `rotated` back and compares each block with the tensor, within so many times the bound. The first that is off: its first element, what was
    /// expected, what was found.
    fn compare(
        &self,
        view: &View<'_>,
        mut rotated: Vec<f64>,
        tensor: &[u8],
        times: f64,
    ) -> Option<(u64, String, String)> {
        self.butterflies(&mut rotated);
        self.mix_rest(&mut rotated);
        self.flip(&mut rotated);
        let dtype = view.plan.dtype;
        let mut errors = vec![0.0; self.lanes];
        for elem in 0..view.plan.elems {
            errors[elem % self.lanes] += (decode(dtype, load(tensor, dtype, elem)) - rotated[elem]).powi(2);
        }
        // Not-a-number is off as well.
        let is_off =
            |lane: &usize| !(0.0..=times * self.unit * self.norms[*lane]).contains(&errors[*lane].sqrt());
        let lane = (0..self.lanes).find(is_off)?;
        let expected =
            format!("block {lane} within {} of the masked reduction", times * self.unit * self.norms[lane]);
        Some((lane as u64, expected, format!("{} off", errors[lane].sqrt())))
    }

    /// Places of a shard.
    fn shard(&self, view: &View<'_>) -> usize {
        let width = view.plan.dtype.bytes();
        (self.inputs[0].len() * width).div_ceil(self.inputs.len()).next_multiple_of(64) / width
    }

    fn norm(&self, values: &[f64], lane: usize) -> f64 {
        values.iter().skip(lane).step_by(self.lanes).map(|value| value * value).sum::<f64>().sqrt()
    }

    fn flip(&self, values: &mut [f64]) {
        let words = self.lanes.div_ceil(64) as u64;
        for (row, line) in values[..self.matrix].chunks_exact_mut(self.lanes).enumerate() {
            for (word, part) in line.chunks_mut(64).enumerate() {
                let number = row as u64 * words + word as u64;
                // SplitMix64 from the mixed seed, by position.
                let state = mix(self.seed.wrapping_add(ODD)).wrapping_add(number.wrapping_mul(ODD));
                let signs = mix(state.wrapping_add(ODD));
                for (_, value) in part.iter_mut().enumerate().filter(|(bit, _)| signs >> bit & 1 == 1) {
                    *value = -*value;
                }
            }
        }
    }

    /// Swaps each element behind the matrix with the sum over four of 16 elements of its column: rows 16 i to 16 i + 15 in row i of
    /// the rest. A reflection, its own inverse.
    fn mix_rest(&self, values: &mut [f64]) {
        for place in self.matrix..values.len() {
            let (row, lane) = (place / self.lanes - self.block, place % self.lanes);
            let partners = (0..16).map(|index| (16 * row + index) * self.lanes + lane);
            let share = partners.clone().map(|partner| values[partner]).sum::<f64>() / 4.0;
            let more = (values[place] - share) / 4.0;
            values[place] = share;
            partners.for_each(|partner| values[partner] += more);
        }
    }

    /// The orthonormal transform of each column of the matrix.
    fn butterflies(&self, values: &mut [f64]) {
        let values = &mut values[..self.matrix];
        let mut half = self.lanes;
        while half < values.len() {
            for pair in values.chunks_exact_mut(2 * half) {
                let (first, second) = pair.split_at_mut(half);
                for (a, b) in first.iter_mut().zip(second) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let scale = (self.block as f64).sqrt();
        values.iter_mut().for_each(|value| *value /= scale);
    }
}

/// The bound of the module, as a share of the ranks' norms.
fn unit(view: &View<'_>, block: usize) -> f64 {
    let ranks = view.outputs.len() as f64;
    let halves = if view.is_ring() { 3.0 + ranks } else { 3.0 };
    let half_unit = match view.plan.dtype {
        Dtype::F16 => 1.0 / 2048.0,
        Dtype::Bf16 => 1.0 / 256.0,
        _ => 0.0,
    };
    let single = (2.0 * (f64::from(block.ilog2()) + 6.0) + ranks + 4.0) / f64::from(1 << 24);
    // A sum from which values are missing is scaled to all ranks.
    let scale = if view.plan.reduce == ReduceOp::Avg { 1.0 } else { ranks };
    (single + halves * half_unit) * scale
}

fn decode(dtype: Dtype, bits: u64) -> f64 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits as u16).to_f64(),
        Dtype::Bf16 => bf16::from_bits(bits as u16).to_f64(),
        _ => f64::from(f32::from_bits(bits as u32)),
    }
}

/// What the simulated ranks agree on when they connect.
const GROUP: u64 = crate::rank::FINGERPRINT;
const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
