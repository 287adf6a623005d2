//! A small network in virtual time: the groups of all ranks in one process, datagrams through one queue.
//!
//! What happens to a datagram is decided by the test (`Fate`), so that it knows exactly what was lost.
#![allow(dead_code)] // Each test file uses its part.

use gradwire_collectives::core::wire::{ConnectionId, Header};
use gradwire_collectives::core::{ConnectionConfig, Mark, Timestamp};
use gradwire_collectives::{
    Algorithm, Collective, DeliveryReport, Dtype, ExchangePlan, Group, GroupConfig, GroupEvent, OpError,
    OpId, PeerConfig, Request, Servers, TransmitSink, View,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

/// UDP payload of a full datagram; the chunk is 1408 bytes.
pub(crate) const DATAGRAM_BYTES: usize = 1472;
/// Payload of one packet on that grid.
pub(crate) const CHUNK_BYTES: usize = 1408;
/// Silence after which the peers of a test are lost.
pub(crate) const PEER_TIMEOUT: Duration = Duration::from_secs(2);

/// What the network does with one datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    /// Arrives after this time.
    Deliver(Duration),
    /// Is lost.
    Drop,
    /// Arrives with this byte changed.
    Damage(usize, u8),
}

/// The usual way: 50 us.
pub(crate) const NORMAL: Fate = Fate::Deliver(Duration::from_micros(50));

/// One datagram on its way.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    /// Sender.
    pub(crate) from: u32,
    /// Receiver.
    pub(crate) to: u32,
    /// Its header.
    pub(crate) header: Header,
    /// All of it.
    pub(crate) bytes: Vec<u8>,
}

type Outcome = Result<DeliveryReport, OpError>;
type Arrival = Reverse<(Timestamp, u64)>;

/// All ranks of a group and the network between them.
pub(crate) struct Net {
    pub(crate) now: Timestamp,
    pub(crate) groups: Vec<Group>,
    /// Ranks that have stopped: they neither send nor hear.
    pub(crate) dead: Vec<u32>,
    pub(crate) done: Vec<BTreeMap<OpId, Outcome>>,
    pub(crate) connected: Vec<bool>,
    /// Ranks that call; dedicated servers are behind them.
    pub(crate) world_size: usize,
    /// What each rank did as a dedicated server, and which were left by all others.
    pub(crate) served: Vec<Vec<DeliveryReport>>,
    pub(crate) deserted: Vec<u32>,
    fate: Box<dyn FnMut(&Packet) -> Fate>,
    order: BinaryHeap<Arrival>,
    under_way: BTreeMap<u64, Packet>,
    count: u64,
}

struct Sink {
    from: u32,
    packets: Vec<Packet>,
}

impl TransmitSink for Sink {
    fn has_room(&self) -> bool {
        self.packets.len() < 64
    }

    fn room_for(&self, _peer: u32, _bytes: usize, most: usize) -> usize {
        most.min(64 - self.packets.len())
    }

    fn push(&mut self, peer: u32, _mark: Mark, head: &[u8], payload: &[u8]) {
        let bytes = [head, payload].concat();
        assert!(bytes.len() <= DATAGRAM_BYTES);
        let (header, _) = Header::decode(&bytes).expect("what a group sends can be parsed");
        self.packets.push(Packet { from: self.from, to: peer, header, bytes });
    }
}

impl Net {
    /// `world_size` ranks and a network with this behaviour.
    pub(crate) fn new(world_size: u32, fate: impl FnMut(&Packet) -> Fate + 'static) -> Self {
        Self::with_incast(world_size, None, fate)
    }

    /// The same with so many senders for one receiver in a transpose.
    pub(crate) fn with_incast(
        world_size: u32,
        incast: Option<u32>,
        fate: impl FnMut(&Packet) -> Fate + 'static,
    ) -> Self {
        Self::of_groups(world_size, (incast, Servers::default()), fate)
    }

    /// The same with so many parameter servers among the ranks.
    pub(crate) fn with_servers(
        world_size: u32,
        count: u32,
        fate: impl FnMut(&Packet) -> Fate + 'static,
    ) -> Self {
        Self::of_groups(world_size, (None, Servers::Colocated(count)), fate)
    }

    /// The same with dedicated servers behind the ranks.
    pub(crate) fn with_dedicated(
        world_size: u32,
        (count, buffer_bytes): (u32, u64),
        fate: impl FnMut(&Packet) -> Fate + 'static,
    ) -> Self {
        Self::of_groups(world_size, (None, Servers::Dedicated { count, buffer_bytes }), fate)
    }

    fn of_groups(
        world_size: u32,
        (incast, servers): (Option<u32>, Servers),
        fate: impl FnMut(&Packet) -> Fate + 'static,
    ) -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let ranks = match servers {
            Servers::Dedicated { count, .. } => world_size + count,
            _ => world_size,
        };
        let groups = (0..ranks)
            .map(|rank| {
                let peers =
                    (0..ranks).filter(|peer| *peer != rank).map(|peer| peer_config(rank, peer)).collect();
                let exchange = ExchangePlan::DEFAULT;
                Group::new(GroupConfig { rank, world_size, peers, incast, exchange, servers }, now)
            })
            .collect();
        Self {
            now,
            groups,
            dead: Vec::new(),
            done: vec![BTreeMap::new(); ranks as usize],
            connected: vec![false; ranks as usize],
            world_size: world_size as usize,
            served: vec![Vec::new(); ranks as usize],
            deserted: Vec::new(),
            fate: Box::new(fate),
            order: BinaryHeap::new(),
            under_way: BTreeMap::new(),
            count: 0,
        }
    }

    /// A network that loses nothing.
    pub(crate) fn perfect(world_size: u32) -> Self {
        Self::new(world_size, |_| NORMAL)
    }

    pub(crate) fn submit(&mut self, rank: u32, request: Request) -> OpId {
        self.groups[rank as usize].submit(self.now, request)
    }

    /// Runs until `finished`, which must come within `limit` of virtual time.
    pub(crate) fn run_until(&mut self, limit: Duration, finished: impl Fn(&Self) -> bool) {
        let end = self.now + limit;
        self.drain();
        while !finished(self) {
            let next = self.next_time().filter(|at| *at <= end);
            let done: Vec<usize> = self.done.iter().map(BTreeMap::len).collect();
            self.now = next
                .unwrap_or_else(|| panic!("nothing more within {limit:?}; ended: {done:?}"))
                .max(self.now);
            self.step();
        }
    }

    /// Runs for `time`.
    pub(crate) fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        self.drain();
        while let Some(next) = self.next_time().filter(|at| *at <= end) {
            self.now = next.max(self.now);
            self.step();
        }
        self.now = end;
    }

    /// Runs until every living rank has ended `count` operations.
    pub(crate) fn run_all(&mut self, count: usize) {
        self.run_until(Duration::from_secs(60), |net| {
            (0..net.world_size).all(|rank| net.dead.contains(&(rank as u32)) || net.done[rank].len() >= count)
        });
    }

    /// How `op` ended on `rank`.
    pub(crate) fn outcome(&self, rank: u32, op: OpId) -> &Outcome {
        &self.done[rank as usize][&op]
    }

    /// The only report of `rank`.
    pub(crate) fn report(&self, rank: u32) -> &DeliveryReport {
        assert_eq!(self.done[rank as usize].len(), 1);
        self.done[rank as usize]
            .values()
            .next()
            .and_then(|outcome| outcome.as_ref().ok())
            .expect("it ended well")
    }

    /// The first error of `rank`.
    pub(crate) fn error(&self, rank: u32) -> &OpError {
        self.done[rank as usize].values().find_map(|outcome| outcome.as_ref().err()).expect("it failed")
    }

    fn next_time(&self) -> Option<Timestamp> {
        let arrival = self.order.peek().map(|Reverse((at, _))| *at);
        let alive = self.groups.iter().enumerate().filter(|(rank, _)| !self.dead.contains(&(*rank as u32)));
        let timers = alive.filter_map(|(_, group)| group.poll_timeout().map(|timeout| timeout.at));
        timers.chain(arrival).min()
    }

    fn step(&mut self) {
        while let Some(Reverse((at, number))) =
            self.order.peek().copied().filter(|Reverse((at, _))| *at <= self.now)
        {
            assert!(at <= self.now);
            self.order.pop();
            let packet = self.under_way.remove(&number).expect("it is under way");
            if !self.dead.contains(&packet.to) {
                self.groups[packet.to as usize].handle_datagram(self.now, packet.from, &packet.bytes);
            }
        }
        for rank in 0..self.groups.len() {
            let group = &mut self.groups[rank];
            if group.poll_timeout().is_some_and(|timeout| timeout.at <= self.now) {
                group.handle_timeout(self.now);
            }
        }
        self.drain();
    }

    fn drain(&mut self) {
        for rank in 0..self.groups.len() {
            while let Some(event) = self.groups[rank].poll_event() {
                self.on_event(rank, event);
            }
            loop {
                let mut sink = Sink { from: rank as u32, packets: Vec::new() };
                self.groups[rank].poll_transmit(self.now, &mut sink);
                if sink.packets.is_empty() {
                    break;
                }
                sink.packets.into_iter().for_each(|packet| self.forward(packet));
            }
        }
    }

    fn on_event(&mut self, rank: usize, event: GroupEvent) {
        match event {
            GroupEvent::Connected => self.connected[rank] = true,
            GroupEvent::Served(report) => self.served[rank].push(report),
            GroupEvent::WorkersLeft => self.deserted.push(rank as u32),
            GroupEvent::Done { op, outcome } => {
                assert!(self.done[rank].insert(op, outcome).is_none(), "an operation ends once");
            }
            _ => {}
        }
    }

    fn forward(&mut self, mut packet: Packet) {
        if self.dead.contains(&packet.from) {
            return;
        }
        let delay = match (self.fate)(&packet) {
            Fate::Deliver(delay) => delay,
            Fate::Drop => return,
            Fate::Damage(at, byte) => {
                packet.bytes[at] = byte;
                Duration::from_micros(50)
            }
        };
        self.order.push(Reverse((self.now + delay, self.count)));
        self.under_way.insert(self.count, packet);
        self.count += 1;
    }
}

fn connection_id(from: u32, to: u32) -> ConnectionId {
    ConnectionId::new(from * 100 + to + 1).expect("small numbers fit")
}

pub(crate) fn peer_config(rank: u32, peer: u32) -> PeerConfig {
    let connection = ConnectionConfig {
        local: connection_id(peer, rank),
        remote: connection_id(rank, peer),
        datagram_bytes: DATAGRAM_BYTES,
        fingerprint: 1,
        hello: gradwire_core::HelloWords::both(1),
        eager_bytes: 64 << 10,
        ack_every: 10,
        ack_delay_max: Duration::from_micros(500),
        controller: gradwire_core::recovery::ControllerKind::default(),
        initial_rate: 125_000_000,
        incast: 3,
        turn: gradwire_core::recovery::Turn::Any,
        receive_buffer_bytes: 1 << 20,
        peer_timeout: PEER_TIMEOUT,
        paths: 1,
        spray: gradwire_core::Spray::Adaptive,
        spray_run: 1,
        class_queues: 0,
    };
    PeerConfig { rank: peer, host: format!("host{peer}"), connection }
}

/// A pseudo-random number below `below`, from a counter: the same in every run.
pub(crate) fn scatter(seed: u64, below: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x ^ x >> 31) % below
}

/// A network that loses `percent` of its packets, delays each by 50 to 150 us and so reorders them.
pub(crate) fn lossy(seed: u64, percent: u64) -> impl FnMut(&Packet) -> Fate {
    let mut count = seed << 32;
    move |_| {
        count += 1;
        if scatter(count, 100) < percent {
            return Fate::Drop;
        }
        Fate::Deliver(Duration::from_micros(50 + scatter(count ^ 1 << 60, 100)))
    }
}

/// A network in which every rank receives at so many bytes per second, through a queue of any length, so that nothing is lost.
pub(crate) fn slow(bytes_per_second: u64) -> impl FnMut(&Packet) -> Fate {
    let mut free_at: BTreeMap<u32, u64> = BTreeMap::new();
    move |packet| {
        // A test takes less than the hour after which the stamps begin anew.
        let now = u64::from(packet.header.sent_at_us) * 1_000;
        let free = free_at.entry(packet.to).or_default();
        *free = now.max(*free) + packet.bytes.len() as u64 * 1_000_000_000 / bytes_per_second;
        Fate::Deliver(Duration::from_nanos(*free - now) + Duration::from_micros(50))
    }
}

/// The memory of one rank's tensors, lent to the group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tensor(pub(crate) Vec<u8>);

impl Tensor {
    pub(crate) fn f32(values: impl IntoIterator<Item = f32>) -> Self {
        Self(values.into_iter().flat_map(f32::to_le_bytes).collect())
    }

    pub(crate) fn to_f32(&self) -> Vec<f32> {
        self.0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
    }

    /// The tests keep every tensor until its operation has ended.
    pub(crate) fn view(&mut self) -> View {
        // SAFETY: the test owns the vector, does not resize it, and reads it only after the operation.
        unsafe { View::new(self.0.as_mut_ptr(), self.0.len()) }
    }

    /// Some of its bytes, in the same way.
    pub(crate) fn part(&mut self, bytes: std::ops::Range<usize>) -> View {
        let part = &mut self.0[bytes];
        // SAFETY: as above.
        unsafe { View::new(part.as_mut_ptr(), part.len()) }
    }
}

/// A reliable request with every view empty.
pub(crate) fn request(collective: Collective) -> Request {
    Request::exact(collective, Dtype::F32, Duration::from_secs(30))
}

/// An in-place all-reduce of `tensor`.
pub(crate) fn all_reduce(tensor: &mut Tensor, algorithm: Algorithm) -> Request {
    let view = tensor.view();
    Request { input: view, output: view, ..request(Collective::AllReduce { algorithm }) }
}
