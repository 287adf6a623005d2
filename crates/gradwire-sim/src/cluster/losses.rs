//! Which contributions did not count, by layer and by importance.

use super::outcome::{LayerLoss, Losses};
use super::{BucketPlan, ClusterPlan};
use crate::{Rng, Tensor};
use gradwire_collectives::{Bucket, Dtype, ImportanceRule};
use gradwire_core::wire::chunk_bytes_for;
use std::ops::Range;

/// Counts over a run: stretches of each bucket that are one thing, with what was lost of them.
#[derive(Debug)]
pub(super) struct LossTally {
    /// The layers of each bucket.
    layers: Vec<Vec<Stretch>>,
    /// The packets of each bucket; none where importance is not told.
    packets: Vec<Vec<Stretch>>,
    names: Vec<Vec<String>>,
    /// Calls that were counted, of each bucket.
    calls: Vec<u64>,
}

#[derive(Debug)]
struct Stretch {
    elems: Range<u64>,
    is_important: bool,
    lost: u64,
}

impl LossTally {
    pub(super) fn new(plan: &ClusterPlan, input: &Tensor) -> Self {
        let packets = |bucket: &BucketPlan| packets(plan, &input.as_slice()[..bucket.bytes()]);
        let names = |bucket: &BucketPlan| bucket.layers.iter().map(|layer| layer.name.clone()).collect();
        Self {
            layers: plan.buckets.iter().map(layers).collect(),
            packets: plan.buckets.iter().map(packets).collect(),
            names: plan.buckets.iter().map(names).collect(),
            calls: vec![0; plan.buckets.len()],
        }
    }

    /// One rank's call for `bucket` has ended.
    pub(super) fn note(&mut self, bucket: usize, lost: &[Range<u64>]) {
        self.calls[bucket] += 1;
        self.note_lost(bucket, lost, 1);
    }

    /// These elements of a bucket did not count, of so many ranks.
    pub(super) fn note_lost(&mut self, bucket: usize, lost: &[Range<u64>], ranks: u64) {
        for lost in lost {
            count(&mut self.layers[bucket], lost, ranks);
            count(&mut self.packets[bucket], lost, ranks);
        }
    }

    pub(super) fn into_losses(self) -> Losses {
        let mut losses = Losses::default();
        let Self { layers, packets, names, calls } = self;
        for (bucket, (layers, names)) in layers.into_iter().zip(names).enumerate() {
            for (layer, name) in layers.into_iter().zip(names) {
                let elems = length(&layer.elems) * calls[bucket];
                losses.layers.push(LayerLoss { bucket, name, elems, lost: layer.lost });
            }
        }
        for (packets, calls) in packets.into_iter().zip(calls) {
            for packet in packets {
                let of = if packet.is_important { &mut losses.important } else { &mut losses.unimportant };
                of.0 += length(&packet.elems) * calls;
                of.1 += packet.lost;
            }
        }
        losses
    }
}

/// Adds to each stretch what it has in common with `lost`, of so many ranks. Stretches are in order and do not overlap.
fn count(stretches: &mut [Stretch], lost: &Range<u64>, ranks: u64) {
    let first = stretches.partition_point(|stretch| stretch.elems.end <= lost.start);
    let touched = stretches[first..].iter_mut().take_while(|stretch| stretch.elems.start < lost.end);
    for stretch in touched {
        let (start, end) = (stretch.elems.start.max(lost.start), stretch.elems.end.min(lost.end));
        stretch.lost += end.saturating_sub(start) * ranks;
    }
}

fn layers(bucket: &BucketPlan) -> Vec<Stretch> {
    let mut start = 0;
    let stretch = |layer: &super::Layer| {
        let elems = start..start + layer.elems;
        start = elems.end;
        Stretch { elems, is_important: false, lost: 0 }
    };
    bucket.layers.iter().map(stretch).collect()
}

/// The packets of a bucket as the rule of the preset sees them.
fn packets(plan: &ClusterPlan, input: &[u8]) -> Vec<Stretch> {
    let Some(rule) = plan.preset.importance else { return Vec::new() };
    let chunk = chunk_bytes_for(plan.host.datagram_bytes);
    let bucket = Bucket::new(Dtype::F32, input, plan.shards(), chunk, plan.seed);
    let mut marks = bucket.marks();
    rule.mark(&bucket, &mut Vec::new(), &mut marks);
    let stretch = |(number, bytes): (u32, Range<usize>)| Stretch {
        elems: bytes.start as u64 / 4..bytes.end as u64 / 4,
        is_important: marks.contains(number),
        lost: 0,
    };
    bucket.packets().map(stretch).collect()
}

fn length(range: &Range<u64>) -> u64 {
    range.end - range.start
}

/// Gradients of every rank, float32: tensors differ in scale by two orders of magnitude, in stretches of 4096 elements, and the
/// values within one follow a triangle about zero.
pub(super) fn gradients(bytes: usize, rng: &Rng) -> Tensor {
    let mut tensor = Tensor::new(bytes, 0);
    let mut rng = rng.clone();
    for stretch in tensor.as_mut_slice().chunks_mut(4 * 4096) {
        let scale = 10f64.powf(-4.0 + 2.0 * rng.unit());
        for value in stretch.chunks_exact_mut(4) {
            let value_of = (scale * (rng.unit() - rng.unit())) as f32;
            value.copy_from_slice(&value_of.to_le_bytes());
        }
    }
    tensor
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_divided_among_the_stretches_that_it_touches() {
        let stretch = |elems| Stretch { elems, is_important: false, lost: 0 };
        let mut stretches = [stretch(0..10), stretch(10..20), stretch(20..30)];
        count(&mut stretches, &(5..25), 1);
        count(&mut stretches, &(29..30), 4);
        assert_eq!(stretches.map(|stretch| stretch.lost), [5, 10, 9]);
    }
}
