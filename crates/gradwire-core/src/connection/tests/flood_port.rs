//! How fast two ranks exchange through a port that a stranger keeps full.
//!
//! The port is a drop-tail queue of bytes, and the stranger's full frames come at one pace, that of the link or nearly. So a packet of ours
//! finds room only where it is there before the stranger's next one takes what has become free: phases decide, not chance.

use super::*;
use core::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bytes in a second: 200 Mbit/s.
const RATE: u64 = 25_000_000;
const BUFFER: u64 = 256 << 10;
const FULL_FRAME: u64 = 1_514;
/// Tag and headers around a datagram.
const AROUND: u64 = 16 + 8 + 20 + 14;
/// What a packet of bulk fills.
const OUR_FRAME: u64 = 1_408 + 24 + AROUND;
const HALF_TRIP: Duration = Duration::from_micros(500);
/// Half a gradient.
const BYTES: usize = 525_000;
const COMPUTE: Duration = Duration::from_millis(20);
/// Until the receiver takes it for a flood.
const NOTICED: Duration = Duration::from_millis(150);

/// How a host's device hands over what it is given at once.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Device {
    /// As its link does: one after the other.
    Wire,
    /// As a token bucket does: up to four frames at the same time.
    Bucket,
}

/// Something that sends at [`RATE`], until when it is busy.
#[derive(Clone, Copy, Default)]
struct Line(u64);

fn time_of(bytes: u64) -> u64 {
    bytes * 1_000_000_000 / RATE
}

impl Line {
    /// When the frame has left.
    fn send(&mut self, now: u64, bytes: u64) -> u64 {
        self.0 = self.0.max(now) + time_of(bytes);
        self.0
    }

    /// The same through a buffer; `None`: it is full.
    fn enqueue(&mut self, now: u64, bytes: u64) -> Option<u64> {
        let waits = self.0.saturating_sub(now) * RATE / 1_000_000_000;
        (waits + bytes <= BUFFER).then(|| self.send(now, bytes))
    }

    /// The same from a bucket of tokens.
    fn pour(&mut self, now: u64, bytes: u64) -> u64 {
        let depth = time_of(4 * FULL_FRAME);
        self.send(now.saturating_sub(depth), bytes).saturating_sub(depth).max(now)
    }
}

/// A stranger's datagrams, and how ours come.
#[derive(Clone, Copy, Debug)]
struct Flood {
    frame: u64,
    /// Of the link's rate.
    per_mille: u64,
    device: Device,
    /// Nanoseconds after which the first one comes.
    phase: u64,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Wake,
    Stranger,
    AtPort(usize, Vec<u8>),
    At(usize, Vec<u8>),
}

struct World {
    pair: Pair,
    flood: Flood,
    events: BinaryHeap<Reverse<(u64, u64, What)>>,
    scheduled: u64,
    devices: [Line; 2],
    ports: [Line; 2],
}

impl World {
    fn new(flood: Flood) -> Self {
        let pair = Pair::connected(never);
        let (events, devices, ports) = Default::default();
        Self { pair, flood, events, scheduled: 0, devices, ports }
    }

    fn schedule(&mut self, at: u64, what: What) {
        self.scheduled += 1;
        self.events.push(Reverse((at, self.scheduled, what)));
    }

    fn drain(&mut self) {
        let now = self.pair.now.as_nanos();
        let mut scratch = [0; 2048];
        for from in 0..2 {
            while let Some(event) = self.pair.ends[from].connection.poll_event() {
                self.pair.ends[from].events.push(event);
            }
            loop {
                let end = &mut self.pair.ends[from];
                let Some(transmit) = end.connection.poll_transmit(self.pair.now, &mut scratch) else { break };
                let datagram = assemble(&transmit, &scratch, &end.outgoing);
                let bytes = datagram.len() as u64 + AROUND;
                let at = match self.flood.device {
                    Device::Wire => self.devices[from].send(now, bytes),
                    Device::Bucket => self.devices[from].pour(now, bytes),
                };
                self.schedule(at, What::AtPort(1 - from, datagram));
            }
        }
    }

    fn happen(&mut self, now: u64, what: What) {
        match what {
            What::Wake => {}
            What::Stranger => {
                _ = self.ports[1].enqueue(now, self.flood.frame);
                self.schedule(now + time_of(self.flood.frame) * 1_000 / self.flood.per_mille, What::Stranger);
            }
            What::AtPort(to, datagram) => {
                let left_at = self.ports[to].enqueue(now, datagram.len() as u64 + AROUND);
                if let Some(at) = left_at {
                    self.schedule(at + HALF_TRIP.as_nanos() as u64, What::At(to, datagram));
                }
            }
            What::At(to, datagram) => {
                let end = &mut self.pair.ends[to];
                if let Ok(Some(payload)) = end.connection.handle_datagram(self.pair.now, &datagram) {
                    place(&mut end.incoming, &payload);
                }
            }
        }
    }

    fn run_until(&mut self, done: impl Fn(&Pair) -> bool) {
        let deadline = self.pair.now + Duration::from_secs(20);
        loop {
            self.drain();
            if done(&self.pair) {
                return;
            }
            let timers = self.pair.ends.iter().filter_map(|end| end.connection.poll_timeout());
            let events = self.events.peek().map(|Reverse((at, ..))| Timestamp::from_nanos(*at));
            let next = timers.map(|timer| timer.at).chain(events).min().expect("somebody waits");
            assert!(next <= deadline, "stuck in {:?}", self.flood);
            self.pair.now = next.max(self.pair.now);
            let now = self.pair.now.as_nanos();
            while self.events.peek().is_some_and(|Reverse((at, ..))| *at <= now) {
                let Some(Reverse((_, _, what))) = self.events.pop() else { break };
                self.happen(now, what);
            }
            for end in &mut self.pair.ends {
                end.connection.handle_timeout(self.pair.now);
            }
        }
    }

    fn wait(&mut self, time: Duration) {
        let until = self.pair.now + time;
        self.schedule(until.as_nanos(), What::Wake);
        self.run_until(|pair| pair.now >= until);
    }

    /// Both ranks compute, send half a gradient, and the other half once the peer's first is there.
    fn step(&mut self, number: u32) -> Duration {
        let [scatter, gather] = [2 * number, 2 * number + 1];
        let begun = self.pair.now;
        self.wait(COMPUTE);
        for at in 0..2 {
            self.pair.receive(at, scatter, BYTES, Contract::EXACT);
            self.pair.receive(at, gather, BYTES, Contract::EXACT);
            self.pair.send(at, scatter, pattern(BYTES), Reliability::Exact);
        }
        let mut waiting = vec![0, 1];
        while !waiting.is_empty() {
            self.run_until(|pair| waiting.iter().any(|at| pair.receipt(*at, scatter).is_some()));
            let (ready, others) =
                waiting.into_iter().partition(|at| self.pair.receipt(*at, scatter).is_some());
            waiting = others;
            let ready: Vec<usize> = ready;
            ready.iter().for_each(|at| self.pair.send(*at, gather, pattern(BYTES), Reliability::Exact));
        }
        self.run_until(|pair| (0..2).all(|at| pair.receipt(at, gather).is_some()));
        let took = self.pair.now.since(begun);
        self.run_until(|pair| {
            (0..2).all(|at| pair.missing(at, scatter).is_some() && pair.missing(at, gather).is_some())
        });
        for end in &mut self.pair.ends {
            assert!(end.incoming.values().all(|came| *came == pattern(BYTES)));
            end.events.clear();
            end.incoming.clear();
            end.outgoing.clear();
        }
        took
    }

    fn steps(&mut self, numbers: core::ops::Range<u32>) -> Duration {
        let count = numbers.len() as u32;
        numbers.map(|number| self.step(number)).sum::<Duration>() / count
    }

    /// How many times as long a step takes in the flood.
    fn slower(flood: Flood) -> f64 {
        let mut world = Self::new(flood);
        world.steps(1..35);
        let calm = world.steps(35..40);
        world.schedule(world.pair.now.as_nanos() + flood.phase, What::Stranger);
        world.wait(NOTICED);
        world.pair.ends[1].connection.set_flooded(true);
        world.steps(40..55).as_secs_f64() / calm.as_secs_f64()
    }
}

/// Floods of such frames at and above the link's rate.
fn floods(frame: u64, device: Device) -> impl Iterator<Item = Flood> {
    let rates = [900, 1_000, 1_050, 1_200];
    rates
        .into_iter()
        .flat_map(move |per_mille| [0, 30_000].map(|phase| Flood { frame, per_mille, device, phase }))
}

// test of: faults/holds-its-rate-in-a-flood
#[test]
fn a_step_at_most_doubles_in_a_flood_of_full_frames_at_the_rate_of_the_link() {
    for flood in floods(FULL_FRAME, Device::Bucket).chain(floods(FULL_FRAME, Device::Wire)) {
        let slower = World::slower(flood);
        assert!(slower <= 2.0, "{slower:.2} times as long in {flood:?}");
    }
}

/// The figures that docs/security.md names: `cargo test -p gradwire-core figures_of_a_flood -- --ignored --nocapture`.
#[test]
#[ignore = "prints figures for docs/security.md and asserts nothing"]
fn figures_of_a_flood() {
    for device in [Device::Bucket, Device::Wire] {
        for frame in [FULL_FRAME, OUR_FRAME] {
            for flood in floods(frame, device) {
                std::println!("{:.2} times as long in {flood:?}", World::slower(flood));
            }
        }
    }
}
