//! Ranks that crash, stop, come late or are cut off; buffers that overflow; datagrams that are forged.

use gradwire_collectives::{Algorithm, Policy};
use gradwire_sim::{run, Fault, NetworkOptions, OpPlan, Scenario, Summary, Trunk, Violation};
use std::time::Duration;

const MS: Duration = Duration::from_millis(1);

fn all_reduce(elems: usize, policy: Policy) -> OpPlan {
    OpPlan::all_reduce(Algorithm::Transpose, elems, policy)
}

/// 100 Mbit/s, 1 ms, 128 datagrams of buffer.
fn links() -> NetworkOptions {
    NetworkOptions::uniform(12_500_000, 128 * 1514, MS)
}

fn passes(scenario: Scenario) -> Summary {
    let text = scenario.to_string();
    run(scenario, false).unwrap_or_else(|violation| panic!("{violation}\n{text}"))
}

#[test]
fn every_survivor_of_a_crash_is_told_who_crashed_within_the_peer_timeout() {
    for seed in 0..12 {
        // A megabyte takes 126 ms or more: the crash hits the first collective.
        let ops = vec![all_reduce(1 << 18, Policy::AUTO); 3];
        let mut scenario = Scenario::quiet(seed, 4, links(), ops);
        let crashing = (seed % 4) as usize;
        scenario.faults.push((MS * (30 + 5 * seed as u32), Fault::Crash(crashing)));
        let summary = passes(scenario);
        // The world accepts no error but `PeerLost` naming that rank, and none later than the bound.
        assert!(
            summary.op_times.iter().all(Option::is_none),
            "seed {seed}: a collective succeeded without a rank"
        );
    }
}

#[test]
fn a_rank_that_comes_late_costs_its_lateness_and_nothing_else() {
    let late = |start| {
        let mut scenario = Scenario::quiet(1, 4, links(), vec![all_reduce(1 << 16, Policy::AUTO)]);
        scenario.start[2] = start;
        passes(scenario)
    };
    let (punctual, late) = (late(MS * 100), late(MS * 900));
    let times = |summary: &Summary| summary.op_times[0].expect("the collective succeeds");
    let cost = times(&late) - times(&punctual);
    // 800 ms of lateness; what remains is at most two of the longest back-offs (100 ms).
    assert!(cost >= MS * 790 && cost <= MS * 1000, "{cost:?}");
    assert_eq!(late.elems_uncounted, 0, "lateness is no reason to leave anything out");
}

#[test]
fn a_pause_or_a_partition_shorter_than_the_peer_timeout_is_survived() {
    for seed in 0..12 {
        let fault = match seed % 2 {
            0 => Fault::Pause(1, MS * 700),
            _ => Fault::Partition(0, 2, MS * 700),
        };
        let mut scenario = Scenario::quiet(seed, 3, links(), vec![all_reduce(1 << 18, Policy::RELIABLE); 2]);
        scenario.faults.push((MS * (20 + 3 * seed as u32), fault));
        let summary = passes(scenario);
        assert!(summary.op_times.iter().all(Option::is_some));
    }
}

#[test]
fn a_rank_whose_clock_jumps_ahead_blames_nobody() {
    for seed in 0..12 {
        let mut scenario = Scenario::quiet(seed, 3, links(), vec![all_reduce(1 << 18, Policy::RELIABLE); 2]);
        scenario.network.impairments.loss = 0.05;
        let jump = scenario.host.peer_timeout * [1, 2, 100][seed as usize % 3];
        scenario.faults =
            vec![(MS * (20 + 3 * seed as u32), Fault::ClockJump(1, jump)), (MS * 900, Fault::Heal)];
        let summary = passes(scenario);
        assert!(summary.op_times.iter().all(Option::is_some), "seed {seed}");
    }
}

#[test]
fn a_rank_that_stands_still_for_too_long_is_named_by_every_rank_itself_included() {
    for seed in 0..12 {
        let mut scenario = Scenario::quiet(seed, 4, links(), vec![all_reduce(1 << 18, Policy::AUTO); 2]);
        let (asleep, length) = (seed as usize % 4, scenario.host.peer_timeout * [2, 3][seed as usize % 2]);
        let fault = if seed < 6 { Fault::Pause(asleep, length) } else { Fault::Suspend(asleep, length) };
        scenario.faults.push((MS * (20 + 3 * seed as u32), fault));
        let summary = passes(scenario);
        assert_eq!(summary.verdicts, vec![Some(asleep as u32); 4], "seed {seed}");
    }
}

#[test]
fn two_racks_and_a_narrow_trunk_keep_every_promise() {
    for seed in 0..8 {
        let mut network = links();
        let trunk = Trunk { first_rack: 3, rate: 6_250_000, delay: MS / 4, buffer_bytes: 64 * 1514 };
        network.trunk = Some(trunk);
        network.impairments.loss = 0.01;
        let summary = passes(Scenario::quiet(seed, 6, network, vec![all_reduce(1 << 17, Policy::AUTO); 2]));
        // 512 KiB: each rack sends 9/36 of the bucket per rank pair across, 0.79 MB in both stages, at 6.25 MB/s.
        assert!(summary.op_times.iter().flatten().all(|time| *time > MS * 120), "{:?}", summary.op_times);
    }
}

/// Seed 2026129525 of the swarm, made small: hellos as large as a datagram may be were repeated faster than a slow trunk carries
/// them, and filled its buffer, behind which their answers waited.
#[test]
fn ranks_meet_over_a_slow_trunk_before_it_could_carry_two_full_datagrams_for_each_pair() {
    let (datagram, rate) = (8_972_u32, 180_000_u32);
    for seed in 0..4 {
        let mut network = links();
        network.trunk = Some(Trunk {
            first_rack: 4,
            rate: rate.into(),
            delay: MS,
            buffer_bytes: u64::from(100 * datagram),
        });
        let mut scenario = Scenario::quiet(seed, 8, network, vec![all_reduce(1, Policy::AUTO)]);
        (scenario.host.datagram_bytes, scenario.host.paths) = (datagram as usize, 2);
        let summary = passes(scenario);
        let crossing = Duration::from_secs(u64::from(16 * datagram)) / rate;
        assert!(
            summary.op_times[0].is_some_and(|time| time < crossing * 2),
            "{:?} {crossing:?}",
            summary.op_times
        );
    }
}

/// Seed 2423 of the swarm, made small: heartbeats that left together with other packets did not count as looking at the
/// clock, so that a rank believed that it had stood still, and gave a dead peer another timeout.
#[test]
fn a_crash_among_idle_ranks_is_found_within_the_peer_timeout() {
    for seed in 0..12 {
        let mut scenario = Scenario::quiet(seed, 7, links(), vec![all_reduce(1 << 10, Policy::AUTO); 3]);
        let crash = MS * (500 + seed as u32);
        scenario.faults.push((crash, Fault::Crash(3)));
        // One rank computes until after the verdict: the others' second collective waits for it.
        scenario.compute = vec![Duration::ZERO; 7];
        scenario.compute[5] = scenario.host.peer_timeout + MS * 900;
        let summary = passes(scenario);
        assert!(summary.verdicts.iter().enumerate().all(|(rank, lost)| rank == 3 || *lost == Some(3)));
    }
}

/// Seed 471 of the swarm, made small: of one of several paths all that was known was an answer that had waited until the
/// rank went on, so that it asked every few seconds only. One in four seeds was so late then. At 20 % loss three in a hundred
/// are by chance: which ones they are changes with every packet.
#[test]
fn a_rank_that_stood_still_asks_at_once_over_every_path() {
    let resumes = MS * 1200;
    let is_late = |seed: &u64| {
        let mut scenario = Scenario::quiet(*seed, 3, links(), vec![all_reduce(16, Policy::AUTO); 2]);
        scenario.network.impairments.loss = 0.2;
        scenario.host.paths = 4;
        scenario.faults = vec![(MS, Fault::Pause(2, resumes - MS)), (resumes * 100, Fault::Heal)];
        let took = passes(scenario).op_times[0].expect("the collective succeeds");
        took >= resumes + MS * 1500
    };
    let late = (0..100).filter(is_late).count();
    assert!(late <= 10, "{late} of 100 were late");
}

/// Seed 1792 of the swarm, made small: the answers of a rank that stood still looked like round trips of a second, and
/// the next lost status stalled the collective for seconds.
#[test]
fn a_rank_that_stood_still_does_not_slow_down_what_is_lost_after_it() {
    for seed in 0..40 {
        let mut scenario = Scenario::quiet(seed, 2, links(), vec![all_reduce(16, Policy::RELIABLE)]);
        scenario.network.impairments.loss = 0.05;
        scenario.start = vec![MS * 100; 2];
        let resumes = MS * 1600;
        scenario.faults = vec![(MS * 99, Fault::Pause(1, resumes - MS * 99)), (resumes * 100, Fault::Heal)];
        let took = passes(scenario).op_times[0].expect("the collective succeeds");
        // Five repetitions at the longest pause of 100 ms: less likely to be needed than once in a million runs.
        assert!(took < resumes - MS * 100 + MS * 500, "seed {seed}: {took:?}");
    }
}

#[test]
fn nothing_is_lost_where_the_network_loses_nothing() {
    for seed in 0..10 {
        let roomy = NetworkOptions::uniform(12_500_000, 4 << 20, MS);
        let summary = passes(Scenario::quiet(seed, 4, roomy, vec![all_reduce(1 << 18, Policy::AUTO); 3]));
        assert_eq!(summary.network.overflowed, 0, "the buffers were meant to hold everything");
        assert_eq!(summary.elems_uncounted, 0);
        assert_eq!(summary.bytes_retransmitted, 0, "seed {seed} sent something again without reason");
    }
}

#[test]
fn an_incast_of_seven_into_a_small_buffer_ends_and_keeps_its_bound() {
    for seed in 0..5 {
        let tight = NetworkOptions::uniform(12_500_000, 32 * 1514, MS / 5);
        passes(Scenario::quiet(seed, 8, tight, vec![all_reduce(1 << 17, Policy::AUTO); 2]));
    }
}

// test of: auto/schedule-aware-start
#[test]
fn an_incast_of_seven_loses_less_than_a_percent_in_a_buffer_of_64_packets() {
    for (seed, ops) in (0..3).flat_map(|seed| [(seed, 1), (seed, 4)]) {
        let (lost, sent) = overflow_of_seven(seed, (1 << 17, ops), 1);
        assert!(lost * 100 < sent, "seed {seed}, {ops} collectives: {lost} overflowed, {sent} of data");
    }
}

/// Packets that overflow in a buffer of 64 where eight ranks with so many paths reduce so many elements so often, and how many have data.
fn overflow_of_seven(seed: u64, (elems, ops): (usize, usize), paths: u8) -> (u64, u64) {
    let switch = NetworkOptions::uniform(12_500_000, 64 * 1514, MS / 5);
    let mut scenario = Scenario::quiet(seed, 8, switch, vec![all_reduce(elems, Policy::AUTO); ops]);
    scenario.host.paths = paths;
    let summary = passes(scenario);
    // Of a shard from each of 8 ranks to each other: data of the reduce stage, first pass. What overflowed of all else counts too.
    (summary.network.overflowed, ops as u64 * 8 * 7 * (elems as u64 / 2).div_ceil(1_408))
}

/// Each path keeps three packets at least, which are 84 of seven times four. Eight paths lose 1.8 to 2.5 % of calls of 4 MB
/// (docs/rate-control.md).
// test of: auto/schedule-aware-start
#[test]
fn an_incast_of_seven_over_four_paths_loses_less_than_a_percent_in_a_buffer_of_64_packets() {
    for (elems, ops) in [(1 << 17, 4), (1 << 20, 1), (1 << 20, 3)] {
        let (lost, sent) = overflow_of_seven(0, (elems, ops), 4);
        assert!(lost * 100 < sent, "{ops} of {elems}: {lost} overflowed, {sent} of data");
    }
}

#[test]
fn forged_and_damaged_datagrams_panic_nowhere() {
    for seed in 0..150 {
        let mut scenario = Scenario::swarm(seed);
        scenario.network.impairments.forge = 0.02;
        // Without a checksum a flipped payload bit is a wrong value, so results mean nothing here.
        if let Err(
            violation @ (Violation::Panicked(_)
            | Violation::Overrun { .. }
            | Violation::TimeStandsStill { .. }),
        ) = run(scenario, false)
        {
            panic!("seed {seed}: {violation}");
        }
    }
}
