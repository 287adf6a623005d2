//! Bodies of the fuzz targets, shared with the test that replays their corpus. Not part of the interface.
//!
//! [`run_group`] takes a program: each byte names a command, and the bytes behind it are its arguments. Two or three
//! ranks, perhaps with a dedicated server, call collectives, right and wrong ones, over a link that the program loses, repeats, reorders, corrupts and
//! forges packets on. Whatever it does, nothing may panic, every call ends at most once, and no moment may last for
//! ever.

use crate::agreement;
use crate::call::Call;
use crate::core::recovery::ControllerKind;
use crate::core::wire::{ConnectionId, Reader, ABORT_RECORD_BYTES, POSITION_RECORD_BYTES};
use crate::core::{ConnectionConfig, Datagrams, Mark, ReceivedMark, Spray, Timestamp};
use crate::position::PositionRecord;
use crate::settings::CallSettings;
use crate::verdict::{AbortRecord, Here};
use crate::{
    Algorithm, Collective, DeadlineRule, Dtype, ExchangePlan, Group, GroupConfig, GroupEvent, OpId,
    PeerConfig, Policy, ReduceOp, Request, Rotation, Servers, SoftRule, TransmitSink, View,
};
use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

/// Reads `bytes` as each of the records that peers send, and writes what was read again.
///
/// # Panics
/// When a record does not survive its way back.
pub fn parse_records(bytes: &[u8]) {
    let mut reader = Reader::new(bytes);
    if let Some(call) = reader.array().ok().and_then(|descriptor| Call::decode(&descriptor)) {
        assert_eq!(Call::decode(&call.encode()), Some(call));
        _ = (call.during(1), call.name(), call.tag());
        assert!(call.agrees(&call));
    }
    let mut reader = Reader::new(bytes);
    if let Some(position) = record::<POSITION_RECORD_BYTES, _>(&mut reader, PositionRecord::decode) {
        assert_eq!(PositionRecord::decode(&position.encode()), Some(position));
    }
    let mut reader = Reader::new(bytes);
    if let Some(abort) = record::<ABORT_RECORD_BYTES, _>(&mut reader, AbortRecord::decode) {
        assert_eq!(AbortRecord::decode(&abort.encode()), Some(abort));
        let (host, detail) = (|rank: u32| rank.to_string(), |_| String::new());
        let here = Here { host, detail, during: String::new(), waited: Duration::ZERO };
        _ = abort.to_error(here).to_string();
    }
    let mut reader = Reader::new(bytes);
    if let Some(settings) = record(&mut reader, CallSettings::decode) {
        // Compared as bytes: a factor may be no number, which does not equal itself.
        let again = settings.encode();
        assert_eq!(CallSettings::decode(&again).map(|settings| settings.encode()), Some(again));
    }
    agreement::parse_words(bytes);
}

fn record<const BYTES: usize, T>(
    reader: &mut Reader<'_>,
    decode: fn(&[u8; BYTES]) -> Option<T>,
) -> Option<T> {
    decode(&reader.array().ok()?)
}

/// Adds a packet of float32 as a reduction does, for the benchmark of that kernel.
pub fn add_packet(accumulator: &mut [u8], packet: &[u8]) {
    crate::kernels::combine(Dtype::F32, ReduceOp::Sum, accumulator, packet);
}

/// Adds the last packet of a mean of eight as a reduction does, for the same.
pub fn add_last_packet(accumulator: &mut [u8], packet: &[u8]) {
    crate::kernels::add_last(Dtype::F32, crate::kernels::Closing::Divide(8), accumulator, packet);
}

/// Runs the program and returns how many calls it ended well.
///
/// # Panics
/// When a group breaks one of the promises above.
pub fn run_group(program: &[u8]) -> usize {
    let mut program = Reader::new(program);
    let shape = u32::from(program.u8().unwrap_or(0));
    let mut world = World::new(2 + (shape & 1), shape >> 1 & 1, rates(shape >> 2));
    world.policy = policy(shape >> 2);
    for _ in 0..COMMANDS_MAX {
        if world.step(&mut program).is_none() {
            break;
        }
    }
    world.ended_well
}

/// Enough for any interesting history, short enough for hundreds of runs a second.
const COMMANDS_MAX: usize = 300;
const DATAGRAM_BYTES: usize = 1_200;
/// Datagrams on their way to one rank; older ones are lost.
const LINK_MAX: usize = 64;
/// Often, since programs are short.
const EXCHANGE: ExchangePlan = ExchangePlan { first: 1, every: 3, lag: 2 };
/// Calls of one rank; each needs memory of its own.
const CALLS_MAX: usize = 60;
/// Turns in which a timer may stay due at one moment: each kind once for each transfer of each call.
const TIMERS_AT_ONCE: usize = 1_000;
/// What a dedicated server may hold: two of the largest sums.
const SERVER_BYTES: u64 = 100_000;
/// Presets that a program may have.
const POLICIES: u32 = 6;
/// Elements of a call: the edges of the packet grid, and more than the eager window.
const ELEMS: [usize; 8] = [0, 1, 3, 280, 281, 900, 3_000, 12_000];

struct World {
    now: Timestamp,
    /// Ranks that call; a dedicated server is behind them.
    world_size: usize,
    /// Of the calls that may lose something.
    policy: Policy,
    groups: Vec<Group>,
    /// Datagrams on their way to each rank, with their sender.
    links: Vec<VecDeque<(u32, Vec<u8>)>>,
    open: Vec<BTreeSet<OpId>>,
    /// Tensors; kept to the end, whatever a group does with them.
    memory: Vec<Box<[u8]>>,
    ended_well: usize,
}

impl World {
    /// `dedicated` servers beside the ranks that call; without any two of those are servers.
    fn new(world_size: u32, dedicated: u32, rates: (ControllerKind, Spray)) -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let ranks = world_size + dedicated;
        let servers = match dedicated {
            0 => Servers::Colocated(2),
            count => Servers::Dedicated { count, buffer_bytes: SERVER_BYTES },
        };
        let group = |rank| {
            let peer_config = |peer| {
                let mut config = peer_config(rank, peer);
                (config.connection.controller, config.connection.spray) = rates;
                config
            };
            let peers = (0..ranks).filter(|peer| *peer != rank).map(peer_config).collect();
            let exchange = EXCHANGE;
            Group::new(GroupConfig { rank, world_size, peers, incast: None, exchange, servers }, now)
        };
        Self {
            now,
            world_size: world_size as usize,
            policy: Policy::AUTO,
            groups: (0..ranks).map(group).collect(),
            links: (0..ranks).map(|_| VecDeque::new()).collect(),
            open: (0..ranks).map(|_| BTreeSet::new()).collect(),
            memory: Vec::new(),
            ended_well: 0,
        }
    }

    /// Executes one command; `None` at the end of the program.
    fn step(&mut self, program: &mut Reader<'_>) -> Option<()> {
        let command = usize::from(program.u8().ok()?);
        let at = command % self.groups.len();
        match command / self.groups.len() % 16 {
            0 => self.call(at, program.u8().ok()?, program.u8().ok()?),
            1 | 2 => {
                let (what, how) = (program.u8().ok()?, program.u8().ok()?);
                (0..self.world_size).for_each(|rank| self.call(rank, what, how));
            }
            3..=6 => self.deliver_piece(at, 1 + command / 64),
            7 => (0..20).for_each(|_| (0..self.groups.len()).for_each(|rank| self.deliver_next(rank))),
            8 => _ = self.links[at].pop_front(),
            9 => self.shuffle(at, program.u8().ok()?),
            10 => self.deliver_corrupt(at, program)?,
            11 => self.deliver_forged(at, program)?,
            12 => self.wait(Duration::from_micros(u64::from(program.u16().ok()?))),
            13 => self.wait(Duration::from_millis(u64::from(program.u8().ok()?))),
            14 => self.wait_for_timer(at),
            _ => match program.u8().ok()? {
                0 => self.groups[at].leave(self.now),
                _ => self.wait_for_timer(at),
            },
        }
        (0..self.groups.len()).for_each(|rank| self.drain(rank));
        Some(())
    }

    fn call(&mut self, at: usize, what: u8, how: u8) {
        if self.open[at].len() >= CALLS_MAX || self.memory.len() >= CALLS_MAX * 8 {
            return;
        }
        let elems = ELEMS[usize::from(how & 7)];
        let world_size = self.world_size;
        let input = self.lend(elems * 4 * world_size);
        let output = self.lend(elems * 4 * world_size);
        let request = request_of((what, how), self.policy, (at, world_size), (input, output));
        let op = self.groups[at].submit(self.now, request);
        self.open[at].insert(op);
    }

    fn lend(&mut self, bytes: usize) -> View {
        self.memory.push(vec![1; bytes].into());
        let memory = self.memory.last_mut().unwrap_or_else(|| unreachable!("just pushed"));
        // SAFETY: the box is neither dropped, resized nor read before the groups are gone.
        unsafe { View::new(memory.as_mut_ptr(), memory.len()) }
    }

    fn deliver_next(&mut self, at: usize) {
        if let Some((from, datagram)) = self.links[at].pop_front() {
            self.groups[at].handle_datagram(self.now, from, &datagram);
            self.drain(at);
        }
    }

    /// The next datagrams, `count` at most, as one piece where they are of one peer and size.
    fn deliver_piece(&mut self, at: usize, count: usize) {
        let link = &mut self.links[at];
        let Some((from, first)) = link.front() else { return };
        let (from, stride) = (*from, first.len());
        let alike =
            link.iter().take(count).take_while(|(peer, bytes)| (*peer, bytes.len()) == (from, stride));
        let alike = alike.count();
        let bytes: Vec<u8> = link.drain(..alike).flat_map(|(_, bytes)| bytes).collect();
        let mut rest = Datagrams::new(&bytes, stride, 0);
        while let Some(first) = rest.iter().next() {
            let group = &mut self.groups[at];
            let in_run = group.handle_run(self.now, from, rest, ReceivedMark::default());
            if in_run == 0 {
                group.handle_datagram(self.now, from, first);
            }
            rest = rest.behind(in_run.max(1));
        }
        self.drain(at);
    }

    /// The network reorders, or repeats a datagram.
    fn shuffle(&mut self, at: usize, how: u8) {
        let link = &mut self.links[at];
        if link.is_empty() {
            return;
        }
        if how & 1 == 0 {
            link.rotate_left(usize::from(how >> 1) % link.len());
        } else if let Some(first) = link.front().cloned() {
            link.push_back(first);
        }
    }

    fn deliver_corrupt(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let (place, value) = (usize::from(program.u8().ok()?), program.u8().ok()?);
        let (from, mut datagram) = self.links[at].pop_front()?;
        if let Some(byte) = datagram.get_mut(place) {
            *byte ^= value;
        }
        datagram.truncate(datagram.len().saturating_sub(usize::from(value == 0) * place));
        self.groups[at].handle_datagram(self.now, from, &datagram);
        Some(())
    }

    /// A datagram that names the right connection and holds whatever the program says.
    fn deliver_forged(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let length = usize::from(program.u8().ok()?);
        let rest = program.rest();
        let mut datagram = program.take(length.min(rest.len())).ok()?.to_vec();
        let from = (at as u32 + 1) % self.groups.len() as u32;
        if let Some(id) = datagram.get_mut(4..7) {
            id.copy_from_slice(&[(from * 10 + at as u32 + 1) as u8, 0, 0]);
        }
        self.groups[at].handle_datagram(self.now, from, &datagram);
        Some(())
    }

    fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        self.groups.iter_mut().for_each(|group| group.handle_timeout(self.now));
    }

    /// Time passes until the next timer of this rank, and for as long as one is due.
    fn wait_for_timer(&mut self, at: usize) {
        for _ in 0..TIMERS_AT_ONCE {
            let Some(timeout) = self.groups[at].poll_timeout() else { return };
            let is_due = timeout.at <= self.now;
            self.now = self.now.max(timeout.at);
            self.groups[at].handle_timeout(self.now);
            self.drain(at);
            if !is_due {
                return;
            }
        }
        panic!("{:?} stays due at {:?}", self.groups[at].poll_timeout(), self.now);
    }

    fn drain(&mut self, at: usize) {
        while let Some(event) = self.groups[at].poll_event() {
            if let GroupEvent::Done { op, outcome } = event {
                assert!(self.open[at].remove(&op), "{op:?} ended twice");
                self.ended_well += usize::from(outcome.is_ok());
            }
        }
        let mut sink = Link { from: at as u32, links: &mut self.links, room: 20_000 };
        self.groups[at].poll_transmit(self.now, &mut sink);
        assert!(sink.room > 0, "packets without end");
    }
}

struct Link<'a> {
    from: u32,
    links: &'a mut [VecDeque<(u32, Vec<u8>)>],
    room: usize,
}

impl TransmitSink for Link<'_> {
    fn has_room(&self) -> bool {
        self.room > 0
    }

    fn room_for(&self, _peer: u32, _bytes: usize, most: usize) -> usize {
        most.min(self.room)
    }

    fn push(&mut self, peer: u32, _mark: Mark, head: &[u8], payload: &[u8]) {
        assert!(head.len() + payload.len() <= DATAGRAM_BYTES);
        self.room -= 1;
        let link = &mut self.links[peer as usize];
        link.push_back((self.from, [head, payload].concat()));
        if link.len() > LINK_MAX {
            link.pop_front();
        }
    }
}

/// What the choice of a preset leaves of its byte: the first six have the defaults, as most of the corpus.
fn rates(which: u32) -> (ControllerKind, Spray) {
    let left = which as usize / POLICIES as usize;
    let spray = match left % 3 {
        0 => Spray::Adaptive,
        1 => Spray::Random,
        _ => Spray::RoundRobin,
    };
    (ControllerKind::ALL[left / 3 % ControllerKind::ALL.len()], spray)
}

/// A preset; what one learns over many rounds is learned in a few.
fn policy(which: u32) -> Policy {
    match which % POLICIES {
        1 => Policy::MLT,
        2 => Policy::DLCP,
        3 => Policy { soft: Policy::LTP.soft.map(|soft| SoftRule { epoch: 3, ..soft }), ..Policy::LTP },
        4 => Policy { deadline: DeadlineRule::WarmUp { rounds: 1, percentile: 0.95 }, ..Policy::ULTIMA },
        5 => Policy { rotation: Rotation::On, ..Policy::AUTO },
        _ => Policy::AUTO,
    }
}

/// A call of rank `rank`; the sizes fit the collective unless `how` says otherwise.
fn request_of(
    (what, how): (u8, u8),
    policy: Policy,
    (rank, world_size): (usize, usize),
    (input, output): (View, View),
) -> Request {
    let row = 0..input.len() / world_size;
    let (one_in, one_out) = (input.part(&row), output.part(&row));
    let root = u32::from(what >> 4) % world_size as u32;
    let at_root = root as usize == rank;
    let to = (rank as u32 + 1) % world_size as u32;
    let algorithm = match what >> 4 & 7 {
        0 | 4 => Algorithm::Ring,
        1 | 5 => Algorithm::HalvingDoubling,
        2 | 6 => Algorithm::ParameterServer,
        7 => Algorithm::WeightedTranspose,
        3 if world_size > 1 => Algorithm::OneShot,
        _ => Algorithm::Transpose,
    };
    let splits = vec![row.len(); world_size];
    let (collective, input, output) = match what & 15 {
        0..=3 => (Collective::AllReduce { algorithm }, one_out, one_out),
        4 => (Collective::AllReduce { algorithm: Algorithm::Auto }, one_in, one_out),
        5 => (Collective::Broadcast { root }, View::EMPTY, one_out),
        6 => (Collective::AllGather, one_in, output),
        7 => (Collective::ReduceScatter, input, one_out),
        8 => (Collective::Reduce { root }, one_in, if at_root { one_out } else { View::EMPTY }),
        9 => (Collective::Gather { root }, one_in, if at_root { output } else { View::EMPTY }),
        10 => (Collective::Scatter { root }, if at_root { input } else { View::EMPTY }, one_out),
        11 => {
            let (input_split_bytes, output_split_bytes) = (splits.clone(), splits);
            (Collective::AllToAll { input_split_bytes, output_split_bytes }, input, output)
        }
        12 => (Collective::Send { to, tag: root }, one_in, View::EMPTY),
        13 => (Collective::Receive { from: None, tag: root }, View::EMPTY, one_out),
        14 => (Collective::Receive { from: Some(to), tag: root }, View::EMPTY, one_out),
        _ => (Collective::Barrier, View::EMPTY, View::EMPTY),
    };
    let is_tolerant = matches!(what & 15, 0..=3 | 7) && how & 8 != 0;
    Request {
        reduce: if how & 32 == 0 { ReduceOp::Sum } else { ReduceOp::Avg },
        input,
        output,
        policy: if is_tolerant { policy } else { Policy::RELIABLE },
        priority: how >> 7,
        ..Request::exact(
            collective,
            if how & 16 == 0 { Dtype::F32 } else { Dtype::I32 },
            Duration::from_millis(if how & 64 == 0 { 30_000 } else { 50 }),
        )
    }
}

pub(crate) fn peer_config(rank: u32, peer: u32) -> PeerConfig {
    let id = |from, to| ConnectionId::new(from * 10 + to + 1).unwrap_or_else(|| unreachable!("small"));
    let connection = ConnectionConfig {
        local: id(peer, rank),
        remote: id(rank, peer),
        datagram_bytes: DATAGRAM_BYTES,
        fingerprint: 1,
        hello: gradwire_core::HelloWords::both(1),
        eager_bytes: 16 << 10,
        ack_every: 3,
        ack_delay_max: Duration::from_micros(500),
        initial_rate: 125_000_000,
        incast: 2,
        turn: gradwire_core::recovery::Turn::Any,
        receive_buffer_bytes: 1 << 20,
        peer_timeout: Duration::from_secs(5),
        paths: 2,
        controller: ControllerKind::default(),
        spray: Spray::Adaptive,
        spray_run: 2,
        class_queues: 0,
    };
    PeerConfig { rank: peer, host: "peer".to_owned(), connection }
}
