//! What a schedule costs and promises, in virtual time: round trips, senders at one receiver, every world size.

use gradwire_collectives::{Algorithm, Dtype, GatherRule, Policy, ReduceOp};
use gradwire_sim::{run, Fault, NetworkOptions, OpKind, OpPlan, Scenario};
use std::time::Duration;

const RTT: Duration = Duration::from_millis(1);

fn all_reduce(algorithm: Algorithm, elems: usize) -> OpPlan {
    OpPlan { reduce: ReduceOp::Sum, ..OpPlan::all_reduce(algorithm, elems, Policy::RELIABLE) }
}

/// The shortest of five all-reduces of `elems` float32 among `world_size` ranks at 1 Gbit/s.
fn time_of(op: OpPlan, world_size: usize, incast: Option<u32>) -> Duration {
    let network = NetworkOptions::uniform(125_000_000, 500_000, RTT);
    let mut scenario = Scenario::quiet(1, world_size, network, vec![op; 5]);
    scenario.faults[0].0 = Duration::from_secs(100);
    scenario.host.incast = incast;
    let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
    summary.op_times.iter().flatten().min().copied().expect("five collectives have ended")
}

// test of: ultima/incast-factor
#[test]
fn a_small_all_reduce_among_eight_ranks_gets_shorter_with_each_sender_more_that_shares_a_receiver() {
    let times: Vec<Duration> =
        [1, 2, 3, 5].map(|incast| time_of(all_reduce(Algorithm::Transpose, 2000), 8, Some(incast))).to_vec();
    println!("I = 1, 2, 3, 5: {times:?}");
    assert!(times.windows(2).all(|pair| pair[1] < pair[0]), "{times:?}");
    // 14 rounds of about one round trip each at I = 1, the last of which only has to arrive.
    assert!(times[0] > RTT * 13 && times[0] < RTT * 17, "{times:?}");
}

// test of: auto/shared-cores
#[test]
fn a_ring_of_eight_loses_half_as_much_of_each_partial_sum_as_one_of_four() {
    // Ends each transfer as soon as its bound is met, and has no deadline.
    let policy = Policy { gather: GatherRule::EXACT, ..Policy::MLT };
    let lost_of_partial_sums = |world_size: usize| {
        let op = OpPlan { policy, ..all_reduce(Algorithm::Ring, 200_000) };
        let mut network = NetworkOptions::uniform(125_000_000, 500_000, RTT);
        network.impairments.loss = 0.2;
        let mut scenario = Scenario::quiet(1, world_size, network, vec![op; 3]);
        scenario.faults[0].0 = Duration::from_secs(100);
        let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
        summary.elems_uncounted as f64 / (3 * (world_size - 1) * 200_000) as f64
    };
    let [four, eight] = [4, 8].map(lost_of_partial_sums);
    assert!(four > 0.06 && four <= 0.1, "{four}");
    assert!(eight > 0.02 && eight <= 0.05, "{eight}");
}

#[test]
fn rounds_do_not_hang_on_a_rank_that_comes_late_and_are_done_soon_after_it() {
    for incast in [1, 2] {
        let late = Duration::from_millis(500);
        let network = NetworkOptions::uniform(125_000_000, 500_000, RTT);
        let mut scenario = Scenario::quiet(1, 8, network, vec![all_reduce(Algorithm::Transpose, 20_000); 2]);
        scenario.faults[0].0 = Duration::from_secs(100);
        scenario.host.incast = Some(incast);
        scenario.start[3] = late;
        let summary = run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
        let first = summary.op_times[0].expect("it has ended");
        assert!(first > late && first < late + RTT * 40, "{first:?}");
    }
}

#[test]
fn a_rank_that_dies_in_a_round_ends_the_others_with_its_name_in_bounded_time() {
    let network = NetworkOptions::uniform(12_500_000, 500_000, RTT);
    let mut scenario = Scenario::quiet(1, 6, network, vec![all_reduce(Algorithm::Transpose, 500_000); 4]);
    scenario.host.incast = Some(1);
    scenario.faults =
        vec![(Duration::from_millis(600), Fault::Crash(2)), (Duration::from_secs(20), Fault::Heal)];
    // The checkers want the same verdict from every survivor, in time.
    run(scenario, false).unwrap_or_else(|violation| panic!("{violation}"));
}

fn broadcast(elems: usize) -> OpPlan {
    OpPlan { kind: OpKind::Broadcast(0), in_place: false, ..all_reduce(Algorithm::Auto, elems) }
}

#[test]
fn a_large_broadcast_takes_little_longer_than_its_bytes_on_one_link_however_many_ranks_there_are() {
    for world_size in [3, 4, 8, 16] {
        let elems = 1_000_000;
        let took = time_of(broadcast(elems), world_size, None).as_secs_f64();
        let link = elems as f64 * 4.0 / 125e6;
        // Along a tree 2, 3, 6 and 10 times as long.
        assert!(took < 1.75 * link, "{world_size} ranks: {took} s, one link {link} s");
    }
}

/// Whichever of eight ranks calls late: the call ends behind it, and within 45 round trips.
fn ends_soon_after_a_late_rank(plan: &OpPlan) {
    for rank in 0..8 {
        let late = Duration::from_millis(500);
        let network = NetworkOptions::uniform(125_000_000, 500_000, RTT);
        let mut scenario = Scenario::quiet(1, 8, network, vec![plan.clone(); 2]);
        scenario.faults[0].0 = Duration::from_secs(100);
        scenario.start[rank] = late;
        let summary = run(scenario, false).unwrap_or_else(|violation| panic!("rank {rank}: {violation}"));
        let first = summary.op_times[0].expect("it has ended");
        assert!(first > late && first < late + RTT * 45, "rank {rank}: {first:?}");
    }
}

/// Whichever of eight ranks dies.
fn ends_with_the_name_of_a_dead_rank(plan: &OpPlan) {
    for rank in 0..8 {
        let network = NetworkOptions::uniform(12_500_000, 500_000, RTT);
        let mut scenario = Scenario::quiet(1, 8, network, vec![plan.clone(); 4]);
        scenario.faults =
            vec![(Duration::from_millis(600), Fault::Crash(rank)), (Duration::from_secs(20), Fault::Heal)];
        run(scenario, false).unwrap_or_else(|violation| panic!("rank {rank}: {violation}"));
    }
}

#[test]
fn a_broadcast_does_not_hang_on_a_rank_that_comes_late_and_is_done_soon_after_it() {
    // Along the tree of the smaller one a link takes six times its 3.2 ms, of the larger one 12.8 ms once or twice.
    [100_000, 400_000].iter().for_each(|elems| ends_soon_after_a_late_rank(&broadcast(*elems)));
}

#[test]
fn a_rank_that_dies_in_a_broadcast_ends_the_others_with_its_name_in_bounded_time() {
    // Along a tree, and scattered.
    [200_000, 500_000].iter().for_each(|elems| ends_with_the_name_of_a_dead_rank(&broadcast(*elems)));
}

fn reduce(root: usize, elems: usize) -> OpPlan {
    OpPlan { kind: OpKind::Reduce(root), ..broadcast(elems) }
}

#[test]
fn a_large_reduce_takes_little_longer_than_its_bytes_on_one_link_however_many_ranks_there_are() {
    for world_size in [3, 4, 8, 16] {
        let elems = 1_000_000;
        let took = time_of(reduce(1, elems), world_size, None).as_secs_f64();
        let link = elems as f64 * 4.0 / 125e6;
        // All to the root: 2.2, 3.4, 7.7 and 16.9 times as long.
        assert!(took < 2.0 * link, "{world_size} ranks: {took} s, one link {link} s");
    }
}

#[test]
fn a_reduce_does_not_hang_on_a_rank_that_comes_late_and_is_done_soon_after_it() {
    // A link takes 12.8 ms once each way.
    ends_soon_after_a_late_rank(&reduce(5, 400_000));
}

#[test]
fn a_rank_that_dies_in_a_reduce_ends_the_others_with_its_name_in_bounded_time() {
    // All to the root, and gathered.
    [100_000, 500_000].iter().for_each(|elems| ends_with_the_name_of_a_dead_rank(&reduce(5, *elems)));
}

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

/// Every reduction of every dtype that has it, each by one of the collectives and schedules that reduce: by all of them
/// in six world sizes that follow each other.
fn every_reduction(world_size: usize) -> Vec<OpPlan> {
    let kinds = [
        OpKind::AllReduce(Algorithm::Ring),
        OpKind::AllReduce(Algorithm::Transpose),
        OpKind::AllReduce(Algorithm::HalvingDoubling),
        OpKind::AllReduce(Algorithm::ParameterServer),
        OpKind::AllReduce(Algorithm::OneShot),
        OpKind::ReduceScatter,
        OpKind::Reduce(world_size / 2),
    ];
    let of =
        |dtype: Dtype| REDUCTIONS.into_iter().filter(move |r| dtype.supports(*r)).map(move |r| (dtype, r));
    let pairs = Dtype::ALL.into_iter().flat_map(of).enumerate();
    let plan = |(index, (dtype, reduce)): (usize, (Dtype, ReduceOp))| {
        let kind = kinds[(index + world_size) % kinds.len()];
        let in_place = matches!(kind, OpKind::AllReduce(_)) && (index / 6 + world_size / 6) % 2 == 0;
        OpPlan { kind, dtype, elems: 1 + index * 7 % 90, reduce, in_place, ..all_reduce(Algorithm::Auto, 0) }
    };
    pairs.map(plan).collect()
}

#[test]
fn every_reduction_of_every_dtype_is_right_in_every_world_size_up_to_16() {
    for world_size in 1..=16 {
        let mut network = NetworkOptions::uniform(125_000_000, 500_000, Duration::from_micros(200));
        network.impairments.loss = 0.01;
        let plans = every_reduction(world_size);
        assert!(plans.len() > 90, "{} calls", plans.len());
        let mut scenario = Scenario::quiet(world_size as u64, world_size, network, plans);
        scenario.in_flight_max = 8;
        scenario.faults[0].0 = Duration::from_secs(30);
        run(scenario, false).unwrap_or_else(|violation| panic!("{world_size} ranks: {violation}"));
    }
}

#[test]
fn every_large_reduce_of_every_dtype_is_right_whoever_is_the_root() {
    for world_size in [3, 4, 7] {
        let mut network = NetworkOptions::uniform(125_000_000, 500_000, Duration::from_micros(200));
        network.impairments.loss = 0.01;
        let shards = if world_size == 3 { 4 } else { world_size - 1 };
        let of = |dtype: Dtype| {
            REDUCTIONS.into_iter().filter(move |reduce| dtype.supports(*reduce)).map(move |r| (dtype, r))
        };
        let pairs = Dtype::ALL.into_iter().flat_map(of).enumerate();
        let plans = pairs.map(|(index, (dtype, op))| {
            // One piece of each shard, and several.
            let bytes = shards * (1 + index % 3) * 65_536;
            let elems = bytes / dtype.bytes() + 1 + index * 7 % 90;
            OpPlan { dtype, reduce: op, ..reduce(index % world_size, elems) }
        });
        let mut scenario = Scenario::quiet(world_size as u64, world_size, network, plans.collect());
        scenario.in_flight_max = 8;
        scenario.faults[0].0 = Duration::from_secs(60);
        run(scenario, false).unwrap_or_else(|violation| panic!("{world_size} ranks: {violation}"));
    }
}

#[test]
fn copies_of_every_dtype_arrive_in_every_world_size_up_to_16() {
    for world_size in 1..=16 {
        let network = NetworkOptions::uniform(125_000_000, 500_000, Duration::from_micros(200));
        let root = world_size - 1;
        let kinds = [
            OpKind::Broadcast(root),
            OpKind::AllGather,
            OpKind::Gather(root),
            OpKind::Scatter(root),
            OpKind::AllToAll,
        ];
        let plans = Dtype::ALL.into_iter().flat_map(|dtype| {
            kinds.map(|kind| OpPlan {
                kind,
                dtype,
                elems: 333,
                in_place: false,
                ..all_reduce(Algorithm::Auto, 0)
            })
        });
        let large = [250_001, 1_000_003].map(|elems| OpPlan { kind: kinds[0], ..broadcast(elems) });
        let plans = plans.chain(large);
        let mut scenario = Scenario::quiet(world_size as u64, world_size, network, plans.collect());
        scenario.in_flight_max = 8;
        scenario.faults[0].0 = Duration::from_secs(30);
        run(scenario, false).unwrap_or_else(|violation| panic!("{world_size} ranks: {violation}"));
    }
}
