//! A modelled bottleneck for tests: rate, delay, drop-tail buffer, random loss; flows with endless or finite data.
//!
//! Deterministic: virtual time, a seeded generator, events in order of time and then of creation. The sender
//! uses the parts of this module exactly as the connection does; the receiver acknowledges every tenth packet, of what left at one moment
//! every ninetieth, a quarter of a millisecond after the first unacknowledged one, or when the sender asks, as in `path.rs`.

use super::{
    AckOutcome, AckSample, Controller, ControllerKind, ControllerSettings, Ledger, Pacer, RateController,
    RttEstimator, SentPacket,
};
use crate::config::tests::config;
use crate::hold::Hold;
use crate::{ConnectionConfig, Timestamp};
use alloc::boxed::Box;
use alloc::collections::BinaryHeap;
use alloc::vec::Vec;
use core::cmp::Reverse;
use core::time::Duration;
use gradwire_wire::{AckPath, PacketNumber, PathId, TransferId, ACK_WORDS_MAX};

pub(super) const PACKET: u64 = ControllerSettings::TEST.packet_bytes;
const ACK_EVERY: u32 = 10;
/// As in `arrivals.rs`.
const BURST_TIMES: u32 = 9;
/// As in the engine's defaults.
const ACK_DELAY: Duration = Duration::from_micros(250);
/// As in `path.rs`.
const ACKS_PER_WINDOW: u64 = 4;

/// What the flows share.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    /// Bytes per second.
    pub(super) rate: u64,
    /// Round trip of an empty link.
    pub(super) rtt: Duration,
    /// Packets that may wait.
    pub(super) buffer_packets: u64,
    /// Random losses among 1000 packets.
    pub(super) loss_per_mille: u64,
    /// The receiver's thread runs only at multiples of this time (zero: always).
    pub(super) slice: Duration,
}

/// What happened since the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counters {
    pub(super) sent: u64,
    pub(super) overflowed: u64,
    pub(super) delivered_bytes: u64,
    pub(super) declared_lost: u64,
    pub(super) random_lost: u64,
    pub(super) queue_delay_max: Duration,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive {
        flow: usize,
        number: u32,
        sent_at: u64,
        ack_now: bool,
    },
    AckDue {
        flow: usize,
    },
    Ack {
        flow: usize,
        words: Box<[u64; ACK_WORDS_MAX]>,
        largest: u32,
        echo: u64,
        held: u64,
        probed_at: u64,
    },
    /// Asks for an acknowledgement at once; what was sent before it and is not named in that is lost.
    Probe {
        flow: usize,
        sent_at: u64,
    },
    /// Answers a probe before any packet has arrived: the first ones were lost together.
    NothingArrived {
        flow: usize,
        probed_at: u64,
    },
    Wake {
        flow: usize,
    },
}

#[derive(Debug)]
struct Flow {
    ledger: Ledger,
    rtt: RttEstimator,
    pacer: Pacer,
    controller: Controller,
    outcome: AckOutcome,
    wake_at: Timestamp,
    /// Packets that still have to leave.
    queued: u64,
    /// As in `path.rs`: there was nothing to send though the window was open.
    app_limited: bool,
    last_sent_at: Timestamp,
    unasked_bytes: u64,
    /// Data left since the last probe.
    must_probe: bool,
    asked_at: Timestamp,
    received: Vec<bool>,
    unacked: u32,
    unacked_sent_us: u64,
    first_unacked_at: Timestamp,
    hold: Hold,
    newest: Option<(u64, Timestamp)>,
    counters: Counters,
}

/// The link with its flows.
#[derive(Debug)]
pub(super) struct World {
    pub(super) link: Link,
    now: Timestamp,
    free_at: Timestamp,
    random: u64,
    events: BinaryHeap<Reverse<(Timestamp, u64, Event)>>,
    created: u64,
    flows: Vec<Flow>,
}

impl World {
    pub(super) fn new(kind: ControllerKind, link: Link, flows: usize, incast: u32) -> Self {
        let settings = ControllerSettings { flows: incast, ..ControllerSettings::TEST };
        let now = Timestamp::from_nanos(1_000_000);
        let flow = |_| Flow {
            ledger: Ledger::new(),
            rtt: RttEstimator::new(Duration::from_millis(100)),
            pacer: Pacer::new(now).in_whole_bursts(PACKET),
            controller: Controller::new(kind, &settings),
            outcome: AckOutcome::default(),
            wake_at: Timestamp::ZERO,
            queued: 0,
            app_limited: true,
            last_sent_at: now,
            unasked_bytes: 0,
            must_probe: false,
            asked_at: now,
            received: Vec::new(),
            unacked: 0,
            unacked_sent_us: 0,
            first_unacked_at: now,
            hold: Hold::new(&ConnectionConfig { ack_delay_max: ACK_DELAY, controller: kind, ..config() }),
            newest: None,
            counters: Counters::default(),
        };
        let flows = (0..flows).map(flow).collect();
        let events = BinaryHeap::new();
        Self { link, now, free_at: now, random: 0x9E37_79B9_7F4A_7C15, events, created: 0, flows }
    }

    /// Gives a flow endless data from now on, or takes it away.
    pub(super) fn set_active(&mut self, flow: usize, active: bool) {
        self.flows[flow].queued = if active { u64::MAX / 2 } else { 0 };
        self.send(flow);
    }

    /// Gives every flow `packets` more to deliver, waits until all are delivered, and returns how long that took.
    pub(super) fn deliver(&mut self, packets: u64) -> Duration {
        let started = self.now;
        for flow in 0..self.flows.len() {
            self.flows[flow].queued += packets;
            self.send(flow);
        }
        let busy = |flow: &Flow| flow.queued > 0 || flow.ledger.in_flight() > 0;
        while self.flows.iter().any(busy) {
            let Some(Reverse((at, _, event))) = self.events.pop() else { panic!("a flow is stuck") };
            self.now = at;
            self.handle(event);
        }
        self.now.since(started)
    }

    /// Makes a flow one of another transport.
    pub(super) fn set_rival(&mut self, flow: usize) {
        self.flows[flow].controller = Controller::rival(&ControllerSettings::TEST);
        // Its receiver is a kernel's.
        self.flows[flow].hold =
            Hold::new(&ConnectionConfig { ack_delay_max: ACK_DELAY, paths: 2, ..config() });
    }

    /// All flows are told how many share the receiver.
    pub(super) fn set_incast(&mut self, flows: u32) {
        self.flows.iter_mut().for_each(|flow| flow.controller.on_incast(flows, 1));
    }

    /// What the receiver says to all flows.
    pub(super) fn set_flooded(&mut self, is_flooded: bool) {
        self.flows.iter_mut().for_each(|flow| flow.controller.set_flooded(is_flooded));
    }

    pub(super) fn controller(&self, flow: usize) -> &Controller {
        &self.flows[flow].controller
    }

    /// Runs for `time` and returns what each flow saw in it.
    pub(super) fn run(&mut self, time: Duration) -> Vec<Counters> {
        let end = self.now + time;
        while let Some(Reverse((at, _, _))) = self.events.peek() {
            if *at > end {
                break;
            }
            let Some(Reverse((at, _, event))) = self.events.pop() else { break };
            assert!(at >= self.now, "time never goes backwards");
            self.now = at;
            self.handle(event);
        }
        self.now = end;
        self.flows.iter_mut().map(|flow| core::mem::take(&mut flow.counters)).collect()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrive { flow, number, sent_at, ack_now } => self.arrive(flow, number, sent_at, ack_now),
            Event::AckDue { flow } => self.acknowledge(flow, 0),
            Event::Probe { flow, sent_at } => self.acknowledge(flow, sent_at),
            Event::Ack { flow, words, largest, echo, held, probed_at } => {
                let ack = AckPath {
                    path: PathId(0),
                    largest: PacketNumber(largest),
                    words: ACK_WORDS_MAX as u8,
                    bitmap: *words,
                };
                self.flows[flow].on_ack(self.now, &ack, echo, held);
                if probed_at > 0 {
                    self.flows[flow].on_answer(self.now, Timestamp::from_nanos(probed_at));
                }
                self.send(flow);
            }
            Event::NothingArrived { flow, probed_at } => {
                self.flows[flow].on_answer(self.now, Timestamp::from_nanos(probed_at));
                self.send(flow);
            }
            Event::Wake { flow } => {
                if self.now >= self.flows[flow].wake_at {
                    self.flows[flow].on_wake(self.now);
                    self.send(flow);
                }
            }
        }
    }

    fn arrive(&mut self, flow: usize, number: u32, sent_at: u64, ack_now: bool) {
        let now = self.now;
        let receiver = &mut self.flows[flow];
        if receiver.received.len() <= number as usize {
            receiver.received.resize(number as usize + 1, false);
        }
        receiver.received[number as usize] = true;
        receiver.counters.delivered_bytes += PACKET;
        receiver.newest = Some((sent_at, now));
        if receiver.unacked == 0 {
            receiver.unacked_sent_us = sent_at / 1_000;
            receiver.first_unacked_at = now;
        }
        receiver.unacked += 1;
        let is_one_burst = sent_at / 1_000 == receiver.unacked_sent_us;
        let enough = if is_one_burst { ACK_EVERY * BURST_TIMES } else { ACK_EVERY };
        if receiver.unacked >= enough || ack_now {
            self.acknowledge(flow, 0);
        } else if receiver.unacked == 1 {
            let due_at = now + receiver.hold.longest();
            self.at(due_at, Event::AckDue { flow });
        }
    }

    fn acknowledge(&mut self, flow: usize, probed_at: u64) {
        let receiver = &mut self.flows[flow];
        if receiver.unacked == 0 && probed_at == 0 {
            return;
        }
        let Some((echo, arrived)) = receiver.newest else {
            self.at(self.now + self.link.rtt / 2, Event::NothingArrived { flow, probed_at });
            return;
        };
        receiver.hold.on_acknowledged(receiver.unacked, Some(receiver.first_unacked_at), arrived);
        receiver.unacked = 0;
        let largest = receiver.received.len() - 1;
        let mut words = Box::new([0_u64; ACK_WORDS_MAX]);
        for back in 0..(64 * ACK_WORDS_MAX).min(largest + 1) {
            words[back / 64] |= u64::from(receiver.received[largest - back]) << (back % 64);
        }
        let held = self.now.since(arrived).as_nanos() as u64;
        let event = Event::Ack { flow, words, largest: largest as u32, echo, held, probed_at };
        self.at(self.now + self.link.rtt / 2, event);
    }

    /// Sends what window and pacer allow, then plans the next wake-up.
    fn send(&mut self, flow: usize) {
        let now = self.now;
        let mut paced_until = None;
        loop {
            let sender = &mut self.flows[flow];
            if sender.queued == 0 {
                sender.pacer.on_starved(sender.controller.makes_up_pauses());
                sender.app_limited = true;
                break;
            }
            if sender.ledger.in_flight() + PACKET > sender.controller.cwnd() {
                sender.pacer.on_held_back();
                sender.app_limited = false;
                break;
            }
            let rate = sender.controller.pacing_rate();
            let burst = sender.controller.burst();
            if !sender.pacer.allows(now, rate, burst) {
                sender.app_limited = false;
                paced_until = Some(sender.pacer.next_send(rate, burst));
                break;
            }
            let (number, ack_now) = sender.transmit(now);
            self.enqueue(flow, number, ack_now);
        }
        let sender = &mut self.flows[flow];
        let blocked = sender.queued == 0 || sender.probe_time().is_some_and(|at| at <= now);
        if blocked && core::mem::take(&mut sender.must_probe) {
            self.probe(flow);
        }
        let sender = &mut self.flows[flow];
        let timer = sender.timer();
        if let Some(at) = [paced_until, timer].into_iter().flatten().min() {
            sender.wake_at = at.max(now + Duration::from_nanos(1));
            let at = sender.wake_at;
            self.at(at, Event::Wake { flow });
        }
    }

    /// A probe is too small to matter in the queue, but it waits there and may be lost.
    fn probe(&mut self, flow: usize) {
        let lost = self.random() % 1_000 < self.link.loss_per_mille;
        self.flows[flow].asked_at = self.now;
        if !lost {
            let sent_at = self.now.as_nanos();
            self.at(self.free_at.max(self.now) + self.link.rtt / 2, Event::Probe { flow, sent_at });
        }
    }

    fn enqueue(&mut self, flow: usize, number: u32, ack_now: bool) {
        let waiting = self.free_at.since(self.now);
        let service = Duration::from_nanos(PACKET * 1_000_000_000 / self.link.rate);
        let counters = &mut self.flows[flow].counters;
        counters.queue_delay_max = counters.queue_delay_max.max(waiting);
        if waiting.as_nanos() > u128::from(self.link.buffer_packets) * service.as_nanos() {
            counters.overflowed += 1;
            return;
        }
        self.free_at = self.free_at.max(self.now) + service;
        if self.random() % 1_000 < self.link.loss_per_mille {
            self.flows[flow].counters.random_lost += 1;
            return;
        }
        let mut at = (self.free_at + self.link.rtt / 2).as_nanos();
        let slice = self.link.slice.as_nanos() as u64;
        if slice > 0 {
            at = at.div_ceil(slice) * slice;
        }
        let sent_at = self.now.as_nanos();
        self.at(Timestamp::from_nanos(at), Event::Arrive { flow, number, sent_at, ack_now });
    }

    fn at(&mut self, at: Timestamp, event: Event) {
        self.created += 1;
        self.events.push(Reverse((at, self.created, event)));
    }

    /// xorshift64*, so that a run repeats exactly.
    fn random(&mut self) -> u64 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32
    }
}

impl Flow {
    fn transmit(&mut self, now: Timestamp) -> (u32, bool) {
        let number = self.ledger.next_number();
        let packet =
            SentPacket { number, transfer: TransferId(1), chunk: 0, bytes: PACKET as u32, sent_at: now };
        if self.ledger.in_flight() == 0 && now.since(self.last_sent_at) > self.rtt.smoothed() {
            self.controller.on_idle_restart(now);
        }
        self.last_sent_at = now;
        self.queued -= 1;
        self.must_probe = true;
        self.ledger.on_sent(packet, 0, self.app_limited);
        self.pacer.on_sent(PACKET, self.controller.burst());
        self.counters.sent += 1;
        self.unasked_bytes += PACKET;
        let ack_now = self.unasked_bytes >= self.controller.cwnd() / ACKS_PER_WINDOW;
        if ack_now {
            self.unasked_bytes = 0;
        }
        (number.0, ack_now)
    }

    fn on_ack(&mut self, now: Timestamp, ack: &AckPath, echo: u64, held: u64) {
        let rtt = now.since(Timestamp::from_nanos(echo + held));
        self.rtt.on_sample(now, rtt);
        let held = if self.controller.measures_arrivals() { held } else { 0 };
        let held = Duration::from_nanos(held);
        assert!(self.ledger.on_ack(now, held, ack, self.rtt.loss_delay(), &mut self.outcome));
        self.report(now, Some(rtt));
    }

    fn on_wake(&mut self, now: Timestamp) {
        let loss_delay = self.rtt.loss_delay();
        if self.ledger.loss_time(loss_delay).is_some_and(|at| at <= now) {
            self.ledger.on_timeout(now, loss_delay, &mut self.outcome);
            self.report(now, None);
        }
        self.must_probe |= self.probe_time().is_some_and(|at| at <= now);
    }

    fn on_answer(&mut self, now: Timestamp, probed_at: Timestamp) {
        self.ledger.lose_before(probed_at, &mut self.outcome);
        self.report(now, None);
    }

    fn report(&mut self, now: Timestamp, rtt: Option<Duration>) {
        let bytes = |packets: &[SentPacket]| packets.iter().map(|p| u64::from(p.bytes)).sum();
        self.counters.declared_lost += self.outcome.lost.len() as u64;
        self.queued += self.outcome.lost.len() as u64;
        self.controller.on_ack(&AckSample {
            now,
            rtt,
            waited: Duration::ZERO,
            acked_bytes: bytes(&self.outcome.acked),
            lost_bytes: bytes(&self.outcome.lost),
            in_flight: self.ledger.in_flight(),
            delivery_rate: self.outcome.delivery_rate,
            rate_bytes: self.outcome.rate_bytes,
            app_limited: self.outcome.app_limited,
            round_ended: self.outcome.round_ended,
        });
    }

    fn timer(&self) -> Option<Timestamp> {
        [self.ledger.loss_time(self.rtt.loss_delay()), self.probe_time()].into_iter().flatten().min()
    }

    fn probe_time(&self) -> Option<Timestamp> {
        Some(self.ledger.oldest_sent_at()?.max(self.asked_at) + self.rtt.probe_timeout(ACK_DELAY))
    }
}
