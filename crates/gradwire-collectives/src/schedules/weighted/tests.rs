use super::*;
use crate::Servers;

fn place(rank: u32, world_size: u32, sequence: u64) -> Place {
    let servers = Servers::default();
    Place { rank, world_size, sequence, chunk_bytes: 1408, incast: world_size - 1, servers }
}

fn links(rates: &[u64]) -> LinkShares {
    LinkShares::of(rates.iter().copied(), 100, None).expect("one is slow")
}

/// Parts of a bucket that each of four ranks reduces.
fn shares(links: Option<&LinkShares>, bytes: usize, sequence: u64) -> Vec<f64> {
    let portions = Portions::new(place(0, 4, sequence), bytes, links);
    let mut shares = vec![0.0; 4];
    for portion in 0..portions.owners.len() {
        let part = portions.range(portion).len() as f64 / bytes as f64;
        shares[portions.owners[portion] as usize] += part;
    }
    shares
}

// test of: auto/weighted-transpose
#[test]
fn a_rank_with_half_the_rate_reduces_nothing_and_one_with_three_quarters_some() {
    let close = |found: &[f64], wanted: &[f64]| {
        assert!(
            found.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1.0 / 16.0),
            "{found:?} for {wanted:?}"
        );
    };
    close(&shares(None, 10 << 20, 3), &[0.25; 4]);
    let third = 1.0 / 3.0;
    close(&shares(Some(&links(&[100, 100, 100, 50])), 10 << 20, 3), &[third, third, third, 0.0]);
    close(&shares(Some(&links(&[50, 100, 30, 100])), 10 << 20, 3), &[0.0, 0.5, 0.0, 0.5]);
    // All links are busy for 1.6 times what the bucket takes: 1 + 2 s of it, at three quarters 0.75 * 1.6.
    close(&shares(Some(&links(&[75, 100, 100, 100])), 10 << 20, 3), &[0.1, 0.3, 0.3, 0.3]);
}

#[test]
fn the_time_by_the_model_is_that_of_the_link_that_is_busy_for_longest() {
    let bytes = 12 << 20;
    let times = |rates: &[u64]| bytes_in_time(4, bytes, &links(rates)) / bytes as f64;
    // Twice the bucket and a quarter of a 96th of it at half the rate; 1.6 times and a quarter of a 128th at three quarters.
    assert!((times(&[100, 100, 100, 50]) - (2.0 + 2.0 / 384.0)).abs() < 0.002);
    assert!((times(&[75, 100, 100, 100]) - (1.6 + 4.0 / 3.0 / 512.0)).abs() < 0.02);
}

#[test]
fn portions_cover_the_bucket_on_the_grid_of_its_chunks_with_other_owners_in_each_call() {
    for bytes in [4, 1408, 40_000, 1 << 20, (25 << 20) + 12] {
        let owners: Vec<Vec<u32>> = (0..4)
            .map(|sequence| {
                let portions = Portions::new(place(1, 4, sequence), bytes, None);
                let mut end = 0;
                for portion in 0..portions.owners.len() {
                    let range = portions.range(portion);
                    assert_eq!((range.start, range.start % 1408), (end, 0));
                    assert!(!range.is_empty());
                    end = range.end;
                }
                assert_eq!(end, bytes);
                portions.owners
            })
            .collect();
        let first: std::collections::BTreeSet<u32> = owners.iter().map(|owners| owners[0]).collect();
        assert_eq!(first.len(), 4, "{bytes} bytes: {owners:?}");
    }
}

#[test]
fn indices_stay_within_those_of_an_operation_and_name_one_portion_however_large_the_group() {
    for (world_size, bytes) in [(3, 1 << 30), (1_000, 65 << 20), (16_384, 1 << 30)] {
        let rates: Vec<u64> = (0..world_size).map(|rank| if rank == 1 { 50 } else { 100 }).collect();
        let portions = Portions::new(place(0, world_size, 7), bytes, Some(&links(&rates)));
        for portion in 0..portions.owners.len() {
            let index = portions.reduce_index(portion);
            assert!(index < 1 << 14);
            assert_eq!(portions.reduced_by(portions.owners[portion], index), Some(portion));
            assert_eq!(portions.reduced_by(portions.owners[portion], index + 1), None);
        }
        assert!(!portions.owners.contains(&1));
    }
}

#[test]
fn every_rank_of_many_has_a_weight_however_slow_the_others_are() {
    for world_size in 3..40_u32 {
        let rates: Vec<u64> =
            (0..u64::from(world_size)).map(|rank| [100, 100, 13, 75, 100][rank as usize % 5]).collect();
        let weights = weights(world_size, Some(&links(&rates)));
        let fast = weights.iter().zip(&rates).filter(|(_, rate)| **rate == 100).map(|(weight, _)| *weight);
        assert!(fast.min() == weights.iter().max().copied(), "{weights:?}");
        assert!(weights[2] == 0, "{weights:?}");
    }
}
