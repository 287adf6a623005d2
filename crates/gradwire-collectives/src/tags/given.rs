//! Importance as the caller gives it: a mask over the bucket.

use super::{Bucket, ImportanceRule, Marks, PartOfBucket};
use std::sync::Arc;

/// A mask of any length: the bucket is thought of as cut into as many equal parts. Whoever makes it need not know how the
/// bucket is cut into packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Given {
    parts: Arc<[bool]>,
    /// The bucket is that part of another one, which the mask is over.
    part: Option<PartOfBucket>,
}

impl Given {
    /// Part `i` of `parts.len()` equal ones is important where `parts[i]` is. Without parts nothing is.
    #[must_use]
    pub fn new(parts: Vec<bool>) -> Self {
        Self { parts: parts.into(), part: None }
    }
}

impl ImportanceRule for Given {
    /// A packet is important when any part that it touches is.
    fn mark(&self, bucket: &Bucket<'_>, _scratch: &mut Vec<f32>, marks: &mut Marks) {
        let whole = self.part.as_ref().map_or(bucket.bytes(), |part| part.whole);
        let (bytes, parts) = (whole.max(1) as u128, self.parts.len() as u128);
        for (number, packet) in bucket.packets() {
            let start = self.part.as_ref().map_or(packet.start, |part| part.in_whole(packet.start));
            let first = start as u128 * parts / bytes;
            let end = ((start + packet.len()) as u128 * parts).div_ceil(bytes);
            // Both are at most the number of parts.
            if self.parts[first as usize..end as usize].contains(&true) {
                marks.set(number);
            }
        }
    }

    fn of_part(&self, part: &PartOfBucket) -> Option<Arc<dyn ImportanceRule>> {
        Some(Arc::new(Self { parts: Arc::clone(&self.parts), part: Some(part.clone()) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Dtype;

    fn important(parts: Vec<bool>, bytes: &[u8]) -> Vec<bool> {
        let bucket = Bucket::new(Dtype::F32, bytes, 1, 256, 0);
        let mut marks = bucket.marks();
        Given::new(parts).mark(&bucket, &mut Vec::new(), &mut marks);
        bucket.packets().map(|(number, _)| marks.contains(number)).collect()
    }

    #[test]
    fn a_packet_is_important_when_a_part_that_it_touches_is() {
        let bytes = [0; 1_024];
        assert_eq!(important(vec![true, false, false, false], &bytes), [true, false, false, false]);
        assert_eq!(important(vec![false, true], &bytes), [false, false, true, true]);
        // Three parts of 341.3 bytes: the second lies in packets 1 and 2.
        assert_eq!(important(vec![false, true, false], &bytes), [false, true, true, false]);
        let mut elems = vec![false; 256];
        elems[130] = true;
        assert_eq!(important(elems, &bytes), [false, false, true, false]);
        assert_eq!(important(Vec::new(), &bytes), [false; 4]);
        assert_eq!(important(vec![true; 5_000], &bytes), [true; 4]);
    }

    #[test]
    fn the_mask_of_a_part_marks_what_that_of_the_whole_marks_there() {
        let bytes = [0; 2_048];
        for mask in [vec![true, false, false], vec![false, true], (0..77).map(|i| i % 5 == 0).collect()] {
            let whole = important(mask.clone(), &bytes);
            let part = PartOfBucket { whole: 2_048, row: 2_048, columns: 1_024..2_048 };
            let rule = Given::new(mask).of_part(&part).expect("a mask has parts");
            let bucket = Bucket::new(Dtype::F32, &bytes[1_024..], 1, 256, 0);
            let mut marks = bucket.marks();
            rule.mark(&bucket, &mut Vec::new(), &mut marks);
            let part: Vec<bool> = bucket.packets().map(|(number, _)| marks.contains(number)).collect();
            assert_eq!(part, whole[4..]);
        }
    }

    #[test]
    fn the_mask_of_columns_marks_what_that_of_the_whole_marks_there() {
        let bytes = [0; 4_096];
        for mask in [vec![true, false, false], (0..77).map(|i| i % 5 == 0).collect()] {
            let whole = important(mask.clone(), &bytes);
            let part = PartOfBucket { whole: 4_096, row: 2_048, columns: 512..1_024 };
            let rule = Given::new(mask).of_part(&part).expect("a mask has parts");
            let bucket = Bucket::new(Dtype::F32, &bytes[..1_024], 2, 256, 0);
            let mut marks = bucket.marks();
            rule.mark(&bucket, &mut Vec::new(), &mut marks);
            let part: Vec<bool> = bucket.packets().map(|(number, _)| marks.contains(number)).collect();
            assert_eq!(part, [&whole[2..4], &whole[10..12]].concat());
        }
    }
}
