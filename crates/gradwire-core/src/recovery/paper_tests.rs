//! What the papers say about their rate controllers, number by number: samples go in, rates come out.

use super::{AckSample, Controller, ControllerKind, ControllerSettings, RateController};
use crate::Timestamp;
use alloc::vec::Vec;
use core::time::Duration;

const PACKET: u64 = 1_472;
/// 10 Gbit/s in bytes per second.
const LINE: u64 = 1_250_000_000;
const MBIT: u64 = 125_000;

/// A controller, and the time of its path.
struct Flow {
    controller: Controller,
    now: Timestamp,
}

/// One round trip as its acknowledgements show it; they come evenly.
#[derive(Clone, Copy)]
struct Trip {
    rtt_us: u64,
    /// Rate at which the receiver gets data.
    rate: u64,
    lost_percent: u64,
}

impl Flow {
    fn new(kind: ControllerKind, initial_rate: u64, senders: u32) -> Self {
        let settings = ControllerSettings {
            initial_rate,
            flows: senders,
            packet_bytes: PACKET,
            ..ControllerSettings::TEST
        };
        Self { controller: Controller::new(kind, &settings), now: Timestamp::from_nanos(1_000_000) }
    }

    /// One round trip; then an acknowledgement that names nothing new ends it.
    fn trip(&mut self, trip: Trip) {
        let step = Duration::from_micros(trip.rtt_us) / ACKS;
        for _ in 0..ACKS {
            self.now = self.now + step;
            let acked_bytes = (trip.rate as f64 * step.as_secs_f64()) as u64;
            self.controller.on_ack(&AckSample {
                now: self.now,
                rtt: Some(Duration::from_micros(trip.rtt_us)),
                acked_bytes,
                lost_bytes: acked_bytes * trip.lost_percent / (100 - trip.lost_percent),
                in_flight: self.controller.cwnd(),
                delivery_rate: Some(trip.rate),
                ..AckSample::default()
            });
        }
        let in_flight = self.controller.cwnd();
        self.controller.on_ack(&AckSample {
            now: self.now,
            in_flight,
            round_ended: true,
            ..AckSample::default()
        });
    }

    /// The rate after it, bytes per second.
    fn rate_after(&mut self, trip: Trip) -> u64 {
        self.trip(trip);
        self.controller.pacing_rate()
    }
}

/// `got` is `want` but for rounding to thousandths.
fn assert_rate(got: u64, want: f64, what: &str) {
    assert!((got as f64 - want).abs() <= want / 500.0, "{what}: {got} bytes/s, not {want}");
}

fn quiet(rtt_us: u64, rate: u64) -> Trip {
    Trip { rtt_us, rate, lost_percent: 0 }
}

/// A flow at about 8 Gbit/s over an empty path of 100 us that has found its rate.
fn timely() -> Flow {
    let mut flow = Flow::new(ControllerKind::Timely, LINE, 1);
    // Less than half of the line, or the link would be taken for a faster one.
    flow.trip(quiet(100, 500_000_000));
    assert_eq!(flow.controller.pacing_rate(), LINE, "it starts at line rate");
    // A queue of more than T_high ends the start.
    flow.rate_after(quiet(400, 1_000_000_000));
    flow.controller.on_idle_restart(flow.now);
    flow
}

// test of: mlt/rate-control
#[test]
fn timely_steps_and_cuts_by_the_numbers_of_its_paper() {
    const ALPHA: f64 = 5e6;
    // Round trips of the round before and of this one, and what becomes of the rate r; the empty path takes 100 us.
    type After = fn(f64) -> f64;
    let rows: [(&str, u64, u64, After); 6] = [
        ("below T_low = 12.5 us of queue, and it rises: alpha = 40 Mbit/s more", 100, 112, |r| r + ALPHA),
        ("just above T_low, and it rises: as it was", 100, 114, |r| r),
        ("just below T_high = 125 us of queue, and it rises: as it was", 150, 224, |r| r),
        ("between the thresholds, and it falls: alpha more", 220, 150, |r| r + ALPHA),
        ("above T_high: beta = 0.8 of the excess off", 220, 450, |r| r * (1.0 - 0.8 * (1.0 - 225.0 / 450.0))),
        ("above T_high the excess counts even while it falls", 460, 300, |r| {
            r * (1.0 - 0.8 * (1.0 - 225.0 / 300.0))
        }),
    ];
    for (what, before, this, after) in rows {
        let mut flow = timely();
        // While a queue drains less arrives than is sent; more would be taken for lumps of acknowledgements.
        let through = |rtt_us| if rtt_us > 225 { 400_000_000 } else { 1_000_000_000 };
        let rate = flow.rate_after(quiet(before, through(before)));
        let got = flow.rate_after(quiet(this, through(this)));
        assert_rate(got, after(rate as f64), what);
    }
}

// test of: mlt/rate-control
#[test]
fn timely_takes_loss_for_no_signal_and_doubles_its_step_after_five_that_found_room() {
    let mut flow = timely();
    let mut steps = Vec::new();
    for _ in 0..8 {
        let before = flow.controller.pacing_rate();
        let lossy = Trip { lost_percent: 10, ..quiet(100, 1_200_000_000) };
        flow.trip(lossy);
        let after = flow.controller.pacing_rate();
        steps.push((after - before) as f64 / 5e6);
    }
    assert_eq!(steps, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0]);
}

// test of: dlcp/receiving-rate
#[test]
fn receiving_rate_starts_at_line_rate_and_halves_or_adds_five_percent_in_each_period() {
    let mut flow = Flow::new(ControllerKind::ReceivingRate, LINE, 1);
    assert_eq!(flow.controller.pacing_rate(), LINE);
    // What it sends is bounded by a window that grows: at first too little for a verdict.
    flow.trip(quiet(1_000, 600_000_000));
    assert_eq!(flow.controller.pacing_rate(), LINE);
    // Period by period: what the receiver gets, and the rate.
    let line = LINE as f64;
    let mut rate = line;
    type After = fn(f64, f64) -> f64;
    let rows: [(u64, After); 6] = [
        (600_000_000, |rate, _| rate / 2.0),
        (600_000_000, |rate, line| rate + line / 20.0),
        (400_000_000, |rate, line| rate + line / 20.0),
        (300_000_000, |rate, _| rate / 2.0),
        (200_000_000, |rate, line| rate + line / 20.0),
        (200_000_000, |rate, _| rate / 2.0),
    ];
    for (received, after) in rows {
        rate = after(rate, line);
        let got = flow.rate_after(quiet(1_000, received));
        assert_rate(got, rate, &std::format!("{received} bytes/s received"));
    }
}

// test of: dlcp/receiving-rate
#[test]
fn receiving_rate_waits_for_200_us_and_takes_repairs_and_restarts_for_a_new_start_of_the_rate() {
    let mut flow = Flow::new(ControllerKind::ReceivingRate, LINE, 1);
    (0..8).for_each(|_| flow.trip(quiet(100, 1_000_000_000)));
    let mut rates: Vec<u64> = Vec::new();
    for _ in 0..40 {
        flow.trip(quiet(100, 100_000_000));
        rates.push(flow.controller.pacing_rate());
    }
    rates.dedup();
    let fell = rates.windows(2).filter(|pair| pair[1] < pair[0]).count();
    assert!(fell >= 3 && rates.len() <= 21, "a period is two of these round trips: {rates:?}");
    for again in [
        |flow: &mut Flow| flow.controller.on_repair(),
        |flow: &mut Flow| flow.controller.on_idle_restart(flow.now),
    ] {
        let (before, window) = (flow.controller.pacing_rate(), flow.controller.cwnd());
        assert!(before < LINE / 2);
        again(&mut flow);
        assert_eq!(flow.controller.pacing_rate(), LINE);
        assert!(
            flow.controller.cwnd() <= window,
            "the window stays, or each stage would begin with an overflow"
        );
        (0..8).for_each(|_| flow.trip(quiet(100, 100_000_000)));
    }
}

/// A flow of 1 Gbit/s over 1 ms that has found its rate.
fn bottleneck(senders: u32) -> Flow {
    let mut flow = Flow::new(ControllerKind::Bottleneck, 100 * MBIT, senders);
    (0..20).for_each(|_| flow.trip(quiet(1_000, 1_000 * MBIT)));
    flow
}

// test of: ltp/bdp-control
#[test]
fn bottleneck_keeps_at_most_about_two_products_in_flight_and_one_where_the_collective_says_who_shares() {
    let bdp = 1_000 * MBIT / 1_000;
    let lump = bdp / u64::from(ACKS);
    // A probe asks for a quarter more; a lump is what one acknowledgement names, more than the four packets for the queue.
    let alone = (2 * bdp + lump) * 5 / 4;
    // Lost packets are made up for by a sixth; a share of the queue among four is ten packets.
    let shared = bdp * 7 / 6 + 10 * PACKET;
    for (senders, most) in [(1, alone), (4, shared)] {
        let mut flow = bottleneck(senders);
        for number in 0..200 {
            flow.trip(Trip { lost_percent: number % 3 * 5, ..quiet(1_000, 1_000 * MBIT) });
            let cwnd = flow.controller.cwnd();
            assert!(cwnd <= most, "{senders} senders, round {number}: {cwnd} of {most}, product {bdp}");
        }
    }
}

// test of: ltp/bdp-control
#[test]
fn bottleneck_takes_loss_for_no_signal_and_follows_the_bandwidth_of_ten_round_trips() {
    let mut flow = bottleneck(1);
    for _ in 0..50 {
        flow.trip(Trip { lost_percent: 10, ..quiet(1_000, 1_000 * MBIT) });
        assert_eq!(flow.controller.bandwidth(), 1_000 * MBIT);
        assert!(flow.controller.pacing_rate() >= 750 * MBIT, "{}", flow.controller.pacing_rate());
    }
    for number in 0..13 {
        // The tenth is the one that has just begun.
        assert_eq!(flow.controller.bandwidth() == 1_000 * MBIT, number < 9, "round {number}");
        flow.trip(quiet(1_000, 500 * MBIT));
    }
    assert_eq!(flow.controller.bandwidth(), 500 * MBIT);
}

/// Acknowledgements of a round trip.
const ACKS: u32 = 10;
