//! Nothing is allocated for each packet: the number of allocations inside the groups does not grow with the size
//! of a bucket.

mod common;
#[path = "../../gradwire-core/tests/common/counting.rs"]
mod counting;
#[path = "common/pair.rs"]
mod pair;

use counting::allocations_in;
use gradwire_collectives::Policy;
use pair::{ones, Pair};

/// Allocations and packets of one all-reduce of `elems` elements.
fn all_reduce(pair: &mut Pair, elems: usize, policy: Policy) -> (u64, usize) {
    let mut tensors = ones(elems);
    let before = pair.packets;
    let counted = allocations_in(|| {
        pair.submit(&mut tensors, policy);
        pair.finish();
    });
    (counted, pair.packets - before)
}

/// Allocations while the given packets of one all-reduce are on the wire.
fn allocations_between(
    pair: &mut Pair,
    packets: std::ops::Range<usize>,
    elems: usize,
    policy: Policy,
) -> u64 {
    let mut tensors = ones(elems);
    let packets = pair.packets + packets.start..pair.packets + packets.end;
    pair.submit(&mut tensors, policy);
    while pair.packets < packets.start {
        pair.step();
    }
    let counted = allocations_in(|| {
        while pair.packets < packets.end {
            pair.step();
        }
    });
    pair.finish();
    counted
}

#[test]
fn allocations_do_not_grow_with_the_packets_of_a_bucket() {
    for policy in [Policy::RELIABLE, Policy::AUTO] {
        let mut pair = Pair::new(0);
        // The largest first: buffers that are kept have their size from then on.
        (0..3).for_each(|_| _ = all_reduce(&mut pair, 4_000_000, policy));
        let (small, few) = all_reduce(&mut pair, 40_000, policy);
        let (large, many) = all_reduce(&mut pair, 4_000_000, policy);
        println!("{small} allocations for {few} packets, {large} for {many}");
        assert!(many > 50 * few, "{many} packets against {few}");
        assert!(large <= small + 40, "{large} allocations for {many} packets, {small} for {few}");
    }
}

#[test]
fn inside_a_stage_nothing_is_allocated_whether_packets_are_lost_or_not() {
    for lose_one_in in [0, 50] {
        for policy in [Policy::RELIABLE, Policy::AUTO] {
            let mut pair = Pair::new(lose_one_in);
            // Lists that are kept have grown by then to the largest lump of acknowledgements.
            (0..8).for_each(|_| _ = all_reduce(&mut pair, 4_000_000, policy));
            // Two stages of two shards of 5,700 packets: the first half of the reduce stage.
            let counted = allocations_between(&mut pair, 1_000..6_000, 4_000_000, policy);
            assert_eq!(counted, 0, "5,000 packets of which one in {lose_one_in} was lost");
        }
    }
}
