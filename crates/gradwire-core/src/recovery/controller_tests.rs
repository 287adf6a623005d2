//! What holds for every controller, whatever it is told, and what an incast costs at its start.

use super::link::{Link, World, PACKET};
use super::{
    AckSample, BottleneckController, Controller, ControllerKind, ControllerSettings, RateController,
};
use crate::Timestamp;
use alloc::vec::Vec;
use core::time::Duration;
use proptest::prelude::*;

const MBIT: u64 = 125_000;
/// The switch buffer of the incast: packets for each port.
const BUFFER: u64 = 64;

/// The same data for each of seven senders, again and again with idle times between: how many packets were sent in each
/// incast, how many overflowed, and how much longer than the link's time and one round trip it took.
fn incasts(kind: ControllerKind, mbit: u64, rtt: Duration) -> Vec<(u64, u64, f64)> {
    let link =
        Link { rate: mbit * MBIT, rtt, buffer_packets: BUFFER, loss_per_mille: 0, slice: Duration::ZERO };
    let mut world = World::new(kind, link, 7, 7);
    let ideal = (7 * PACKETS * PACKET) as f64 / link.rate as f64 + rtt.as_secs_f64();
    let mut incast = || {
        let took = world.deliver(PACKETS).as_secs_f64();
        let counters = world.run(Duration::from_millis(20));
        let (sent, lost) =
            counters.iter().fold((0, 0), |(sent, lost), c| (sent + c.sent, lost + c.overflowed));
        (sent, lost, took / ideal)
    };
    (0..=REPEATED).map(|_| incast()).collect()
}

/// Packets of each sender in each incast.
const PACKETS: u64 = 200;
/// Incasts after the first.
const REPEATED: usize = 20;

fn kinds_and_paths() -> impl Iterator<Item = (ControllerKind, u64, Duration)> {
    let paths =
        || [100, 1_000, 10_000].into_iter().flat_map(|mbit| [50, 100, 200, 1_000].map(|us| (mbit, us)));
    let of = move |kind| paths().map(move |(mbit, us)| (kind, mbit, Duration::from_micros(us)));
    ControllerKind::ALL.into_iter().flat_map(of)
}

// test of: auto/schedule-aware-start
#[test]
fn an_incast_of_seven_loses_less_than_a_percent_in_a_small_switch_buffer() {
    for (kind, mbit, rtt) in kinds_and_paths() {
        for (round, (sent, lost, _)) in incasts(kind, mbit, rtt).into_iter().enumerate() {
            assert!(
                lost * 100 < sent,
                "{kind:?}, {mbit} Mbit/s, {rtt:?}, after {round} rounds: {lost} of {sent}"
            );
        }
    }
}

// test of: faults/holds-its-rate-in-a-flood
#[test]
fn seven_senders_that_hold_their_rates_in_a_flood_lose_no_half_of_an_incast_to_each_other() {
    for (kind, mbit, rtt) in kinds_and_paths() {
        let link =
            Link { rate: mbit * MBIT, rtt, buffer_packets: BUFFER, loss_per_mille: 0, slice: Duration::ZERO };
        let mut world = World::new(kind, link, 7, 7);
        (0..5).for_each(|_| _ = world.deliver(PACKETS));
        world.run(Duration::from_millis(20));
        world.set_flooded(true);
        (0..5).for_each(|_| _ = world.deliver(PACKETS));
        let counters = world.run(Duration::from_millis(20));
        let (sent, lost) =
            counters.iter().fold((0, 0), |(sent, lost), c| (sent + c.sent, lost + c.overflowed));
        // Each may have twice in flight what fits, and up to half of that would overflow; a quarter where the paces are right.
        assert!(lost * 4 < sent, "{kind:?}, {mbit} Mbit/s, {rtt:?}: {lost} of {sent}");
    }
}

/// The figures that docs/rate-control.md names: `cargo test -p gradwire-core figures -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures for docs/rate-control.md and asserts nothing"]
fn figures_of_an_incast_of_seven() {
    for (kind, mbit, rtt) in kinds_and_paths() {
        let incasts = incasts(kind, mbit, rtt);
        for round in [0, 1, 2, 5, 10, REPEATED] {
            let (sent, lost, times) = incasts[round];
            let percent = lost as f64 * 100.0 / sent as f64;
            std::println!(
                "{kind:?}, {mbit} Mbit/s, {rtt:?}, after {round} rounds: {percent:.2} % of {sent}, {times:.2} times the link's time"
            );
        }
    }
}

/// One thing that happens to a controller.
#[derive(Clone, Debug)]
enum Step {
    Ack(AckSample),
    Restart,
    Incast(u32),
    Flooded(bool),
}

fn steps() -> impl Strategy<Value = (u64, Step)> {
    let amount = prop_oneof![Just(0), 1_u64..100_000, Just(1 << 40)];
    let rtt = prop::option::of(prop_oneof![Just(0), 1_000_u64..100_000_000, Just(60_000_000_000)]);
    let rate = prop::option::of(prop_oneof![Just(0), Just(u64::MAX), 1_u64..10_000_000_000]);
    let ack = (rtt.clone(), rtt, amount.clone(), amount.clone(), amount, rate, any::<(bool, bool)>())
        .prop_map(
            |(rtt, waited, acked_bytes, lost_bytes, in_flight, delivery_rate, (app_limited, round_ended))| {
                Step::Ack(AckSample {
                    now: Timestamp::ZERO,
                    rtt: rtt.map(Duration::from_nanos),
                    waited: Duration::from_nanos(waited.unwrap_or(0)),
                    acked_bytes,
                    lost_bytes,
                    in_flight,
                    delivery_rate,
                    rate_bytes: acked_bytes,
                    app_limited,
                    round_ended,
                })
            },
        );
    let step = prop_oneof![6 => ack, 1 => Just(Step::Restart), 1 => any::<u32>().prop_map(Step::Incast),
        1 => any::<bool>().prop_map(Step::Flooded)];
    (prop_oneof![Just(0), 0_u64..5_000_000, Just(20_000_000_000)], step)
}

proptest! {
    #[test]
    fn nothing_makes_a_controller_panic_or_stand_still(
        which in 0..ControllerKind::ALL.len(),
        initial_rate in prop_oneof![Just(0), Just(u64::MAX), 10_000_u64..10_000_000_000],
        flows in any::<u32>(),
        steps in prop::collection::vec(steps(), 1..200),
    ) {
        let settings = ControllerSettings { initial_rate, flows, ..ControllerSettings::TEST };
        let mut controller = Controller::new(ControllerKind::ALL[which], &settings);
        let mut now = Timestamp::from_nanos(1);
        for (later, step) in steps {
            now = now + Duration::from_nanos(later);
            match step {
                Step::Ack(sample) => controller.on_ack(&AckSample { now, ..sample }),
                Step::Restart => controller.on_idle_restart(now),
                Step::Incast(senders) => controller.on_incast(senders, 1),
                Step::Flooded(is_flooded) => controller.set_flooded(is_flooded),
            }
            prop_assert!(controller.cwnd() >= 2 * PACKET, "window {}", controller.cwnd());
            prop_assert!(controller.pacing_rate() > 0);
        }
    }
}

/// A flow of `bottleneck` alone, which has sent at 10 MB/s over a path of a millisecond behind a queue of another until it looks for the empty path.
fn looking() -> (BottleneckController, Timestamp) {
    let settings = ControllerSettings { initial_rate: 10_000_000, ..ControllerSettings::TEST };
    let mut flow = BottleneckController::new(&settings);
    let mut now = Timestamp::from_nanos(1_000_000);
    flow.on_ack(&acked(now, Duration::from_millis(1), 10_000_000));
    while flow.cwnd() > 2 * PACKET {
        now = now + Duration::from_millis(2);
        flow.on_ack(&acked(now, Duration::from_millis(2), 10_000_000));
        assert!(now < Timestamp::from_nanos(1_000_000_000), "it never looks: {flow:?}");
    }
    (flow, now)
}

/// The end of a round trip of twenty packets.
fn acked(now: Timestamp, rtt: Duration, rate: u64) -> AckSample {
    let bytes = 20 * PACKET;
    AckSample {
        now,
        rtt: Some(rtt),
        acked_bytes: bytes,
        rate_bytes: bytes,
        in_flight: bytes,
        delivery_rate: Some(rate),
        round_ended: true,
        ..AckSample::default()
    }
}

#[test]
fn what_two_packets_of_a_look_show_is_not_the_rate_of_the_link_and_what_twenty_show_is() {
    for (packets, rate) in [(2, 10_000_000), (20, 80_000_000)] {
        let (mut flow, now) = looking();
        let bytes = packets * PACKET;
        let sample = acked(now + Duration::from_millis(1), Duration::from_millis(1), 80_000_000);
        flow.on_ack(&AckSample { acked_bytes: bytes, rate_bytes: bytes, ..sample });
        assert_eq!(flow.bandwidth(), rate, "{packets} packets");
    }
}

#[test]
fn what_waits_on_the_way_back_counts_at_the_newest_rate_and_not_at_the_largest() {
    let (mut flow, mut now) = looking();
    let mut trip = |rate, waited| {
        now = now + Duration::from_millis(20);
        flow.on_ack(&AckSample { waited, ..acked(now, Duration::from_millis(1), rate) });
        flow.cwnd()
    };
    let burst = trip(80_000_000, Duration::ZERO);
    let window = (0..7).map(|_| trip(10_000_000, Duration::from_millis(50))).max().unwrap_or(0);
    // 50 ms are 500 KB at 10 MB/s; two products and a quarter more are in flight at most.
    let most = burst + 1_300_000;
    assert!(window <= most, "{window} bytes, at most {most}");
}

/// The thread of one of three senders had stood still, so that acknowledgements seem to wait on their way back, and its look for the empty path is long.
#[test]
fn a_look_of_more_than_ten_rounds_leaves_the_rate_of_the_link_known() {
    let settings = ControllerSettings {
        initial_rate: 10_000_000,
        flows: 3,
        paths: 1,
        turn: super::Turn::Any,
        packet_bytes: PACKET,
        standing_bytes: 1 << 20,
    };
    let mut flow = BottleneckController::new(&settings);
    let mut now = Timestamp::from_nanos(1_000_000);
    let mut round = |flow: &mut BottleneckController, rtt: u64, rate, packets| {
        now = now + Duration::from_millis(5);
        let sample = acked(now, Duration::from_millis(rtt), rate);
        flow.on_ack(&AckSample { waited: Duration::from_millis(100), in_flight: packets * PACKET, ..sample });
    };
    round(&mut flow, 1, 10_000_000, 20);
    let mut rounds = 0;
    while flow.cwnd() > 2 * PACKET {
        round(&mut flow, 2, 10_000_000, 20);
        rounds += 1;
        assert!(rounds < 1_000, "it never looks: {flow:?}");
    }
    let mut rounds = 0;
    while flow.cwnd() == 2 * PACKET {
        round(&mut flow, 1, 1_000_000, 2);
        rounds += 1;
        assert!(rounds < 1_000, "it looks for ever: {flow:?}");
    }
    assert!(rounds > 10, "{rounds}");
    assert_eq!(flow.bandwidth(), 10_000_000, "{rounds} rounds");
}
