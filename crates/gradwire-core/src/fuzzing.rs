//! Body of the connection's fuzz target, shared with the test that replays the seed corpus. Not part of the
//! interface.
//!
//! The input is a program: each byte names a command, and the bytes behind it are its arguments. Two connections
//! talk over a link that the program loses, repeats, reorders, corrupts and forges packets on, while it posts,
//! retires, leaves and lets time pass. Whatever it does, nothing may panic, grow without bound, or wake up for
//! ever at the same moment, and no byte of a transfer may be handed out twice or outside of it.

use crate::recovery::ControllerKind;
use crate::{
    Body, Connection, ConnectionConfig, Contract, Datagrams, Early, Event, Payload, ReceiveTransfer,
    ReceivedMark, Reliability, SendTransfer, Soft, Spray, Timestamp, TransferTags, Transmit,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{
    ConnectionId, Reader, TransferId, Writer, ABORT_RECORD_BYTES, OPENING_BYTES, POSITION_RECORD_BYTES,
};

/// Runs the program and returns how many transfers it completed.
///
/// # Panics
/// When a connection breaks one of the promises above.
pub fn run_connection(program: &[u8]) -> usize {
    let mut program = Reader::new(program);
    let options = program.u8().unwrap_or(0);
    let mut world = World::new(options);
    // The first bit decides whether the two have met; most of the state lies behind that.
    if options & 1 == 1 {
        world.meet();
    }
    for _ in 0..COMMANDS_MAX {
        if world.step(&mut program).is_none() {
            break;
        }
    }
    world.completed
}

/// Hands datagrams that hold whatever `bytes` say to a connection with transfers in both directions: a byte for the
/// length of each, then its bytes, with the version and the connection id set right.
///
/// # Panics
/// When a connection breaks one of the promises above.
pub fn run_datagrams(bytes: &[u8]) {
    let mut world = World::new(0);
    world.meet();
    for small in 0..4 {
        let post = [small * 9, small * 40, small];
        _ = world.post_send(0, &mut Reader::new(&post));
        _ = world.post_receive(0, &mut Reader::new(&post));
    }
    let mut bytes = Reader::new(bytes);
    for _ in 0..COMMANDS_MAX {
        let Ok(length) = bytes.u8() else { return };
        let length = usize::from(length).min(bytes.rest().len());
        let mut datagram = bytes.take(length).map_or_else(|_| Vec::new(), Vec::from);
        if let Some(first) = datagram.first_mut() {
            *first = gradwire_wire::VERSION << 4 | *first & 0x0F;
        }
        if let Some(id) = datagram.get_mut(4..7) {
            id.copy_from_slice(&[1, 0, 0]);
        }
        world.deliver(0, &datagram);
        world.drain(0);
        world.wait_for_timer(0);
    }
}

/// Enough for any interesting history, short enough for thousands of runs a second.
const COMMANDS_MAX: usize = 400;
const DATAGRAM_BYTES: usize = 1_200;
/// Datagrams on the way in one direction; older ones are lost.
const LINK_MAX: usize = 64;
/// No call may cause more datagrams or events than this.
const BURST_MAX: usize = 20_000;

#[derive(Debug)]
struct Side {
    connection: Connection,
    /// Datagrams on their way to this side.
    link: VecDeque<Vec<u8>>,
    /// Sizes of posted sends and receives.
    sends: BTreeMap<TransferId, u64>,
    receives: BTreeMap<TransferId, u64>,
    /// Offsets handed out of each open receive.
    placed: BTreeMap<TransferId, BTreeSet<u64>>,
}

#[derive(Debug)]
struct World {
    now: Timestamp,
    sides: [Side; 2],
    /// Transfers close by every rule that a contract has, and are sent in every way; else by a bound or a deadline.
    all_rules: bool,
    completed: usize,
}

fn config(local: u32, remote: u32, options: u8) -> ConnectionConfig {
    let id = |value| ConnectionId::new(value).unwrap_or_else(|| unreachable!("small"));
    ConnectionConfig {
        local: id(local),
        remote: id(remote),
        datagram_bytes: DATAGRAM_BYTES,
        fingerprint: 7,
        hello: crate::HelloWords::both(7),
        eager_bytes: 16 << 10,
        ack_every: 3,
        ack_delay_max: Duration::from_micros(500),
        controller: ControllerKind::ALL[usize::from(options >> 2 & 7) % ControllerKind::ALL.len()],
        initial_rate: 125_000_000,
        incast: 1,
        turn: crate::recovery::Turn::Any,
        receive_buffer_bytes: 1 << 20,
        peer_timeout: Duration::from_secs(5),
        paths: 1 + (options >> 6),
        spray: spray(options),
        spray_run: 1 + u32::from(options >> 5 & 1),
        class_queues: if options & 2 == 2 { 3 } else { 0 },
    }
}

fn side(local: u32, remote: u32, options: u8) -> Side {
    Side {
        connection: Connection::new(config(local, remote, options), Timestamp::ZERO),
        link: VecDeque::new(),
        sends: BTreeMap::new(),
        receives: BTreeMap::new(),
        placed: BTreeMap::new(),
    }
}

/// What is left of the bits for the controller chooses it: most programs of the corpus have the default.
fn spray(options: u8) -> Spray {
    match (usize::from(options >> 2 & 7) / ControllerKind::ALL.len(), options >> 5 & 1) {
        (0, _) => Spray::Adaptive,
        (1, 0) => Spray::Random,
        _ => Spray::RoundRobin,
    }
}

impl World {
    /// `options`: bit 1 which rules, and whether classes overtake each other, bits 2 to 4 controller and spray, bit 5 the run of a path, bits 6 and 7 the number of paths.
    fn new(options: u8) -> Self {
        Self {
            now: Timestamp::ZERO,
            sides: [side(1, 2, options), side(2, 1, options)],
            all_rules: options & 2 != 0,
            completed: 0,
        }
    }

    /// Delivers everything until both sides know each other.
    fn meet(&mut self) {
        for _ in 0..4 {
            (0..2).for_each(|at| self.drain(at));
            self.now = self.now + Duration::from_micros(100);
            for at in 0..2 {
                while let Some(datagram) = self.sides[at].link.pop_front() {
                    self.deliver(at, &datagram);
                }
            }
        }
        assert!(self.sides.iter().all(|side| side.connection.is_connected()), "nothing was lost");
    }

    /// Executes one command; `None` at the end of the program.
    fn step(&mut self, program: &mut Reader<'_>) -> Option<()> {
        let command = program.u8().ok()?;
        let at = usize::from(command & 1);
        match command >> 1 & 0xF {
            0 | 1 => self.post_send(at, program)?,
            2 | 3 => self.post_receive(at, program)?,
            4..=6 => self.deliver_next(at, 1 + usize::from(command >> 5)),
            7 => _ = self.sides[at].link.pop_front(),
            8 => self.sides[at].link.rotate_left(1.min(self.sides[at].link.len())),
            9 => self.deliver_corrupt(at, program)?,
            10 => self.deliver_forged(at, program)?,
            11 => self.wait(Duration::from_micros(u64::from(program.u16().ok()?))),
            12 => self.wait(Duration::from_millis(u64::from(program.u8().ok()?))),
            13 => self.wait_for_timer(at),
            14 => self.sides[at].connection.retire(transfer(program.u8().ok()?)),
            _ => self.rare(at, program)?,
        }
        (0..2).for_each(|at| self.drain(at));
        Some(())
    }

    fn rare(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let what = program.u8().ok()?;
        let connection = &mut self.sides[at].connection;
        match what {
            0 => connection.leave(self.now),
            1 => connection.abort(self.now, [what; ABORT_RECORD_BYTES]),
            2..=127 => connection.set_position(self.now, [what; POSITION_RECORD_BYTES]),
            _ => {
                // The network repeats a datagram.
                if let Some(datagram) = self.sides[at].link.front().cloned() {
                    self.sides[at].link.push_back(datagram);
                }
            }
        }
        Some(())
    }

    fn post_send(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let (transfer, bytes) = (transfer(program.u8().ok()?), size(program.u16().ok()?));
        let reliability = match bytes % 4 {
            1 if self.all_rules => Reliability::BestEffort,
            2 if self.all_rules => Reliability::Deferred,
            0 | 2 => Reliability::Exact,
            _ => Reliability::Tolerant,
        };
        let request = SendTransfer {
            transfer,
            bytes,
            descriptor: [1; 16],
            reliability,
            priority: 0,
            critical_chunks: if self.all_rules { critical_chunks(bytes) } else { 0 },
            begin: if self.all_rules { bytes as u32 / 8 } else { 0 },
            tags: TransferTags { class: (bytes / 4 % 4) as u8, important: None },
            called_at: None,
        };
        let side = &mut self.sides[at];
        if side.connection.send(self.now, request).is_ok() {
            side.sends.insert(transfer, bytes);
        }
        Some(())
    }

    fn post_receive(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let (transfer, bytes) = (transfer(program.u8().ok()?), size(program.u16().ok()?));
        let bounded = Contract {
            loss_bound: if bytes % 2 == 0 { 0.0 } else { 0.25 },
            deadline: (bytes % 3 == 0).then_some(Duration::from_millis(20)),
            ..Contract::EXACT
        };
        let contract = if self.all_rules { every_rule(bytes, bounded) } else { bounded };
        let request = ReceiveTransfer::new(transfer, bytes, [1; 16], contract);
        let side = &mut self.sides[at];
        if side.connection.receive(self.now, request).is_ok() {
            side.receives.insert(transfer, bytes);
            side.placed.insert(transfer, BTreeSet::new());
        }
        Some(())
    }

    fn deliver_next(&mut self, at: usize, count: usize) {
        let link = &mut self.sides[at].link;
        let mut next: Vec<Vec<u8>> = link.drain(..count.min(link.len())).collect();
        // Neighbours of one size come as one piece, as receive offload brings them.
        for piece in next.chunk_by_mut(|one, other| one.len() == other.len()) {
            self.deliver_piece(at, piece);
            self.drain(at);
        }
    }

    fn deliver_piece(&mut self, at: usize, piece: &[Vec<u8>]) {
        let bytes = piece.concat();
        let mut rest = Datagrams::new(&bytes, piece[0].len(), 0);
        while let Some(first) = rest.iter().next() {
            let side = &mut self.sides[at];
            let run = side.connection.handle_run(self.now, rest, ReceivedMark::default());
            let Some(payloads) = run else {
                self.deliver(at, first);
                rest = rest.behind(1);
                continue;
            };
            payloads.iter().for_each(|payload| place(&side.receives, &mut side.placed, &payload));
            rest = rest.behind(payloads.count);
        }
    }

    fn deliver_corrupt(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let (place, value) = (usize::from(program.u8().ok()?), program.u8().ok()?);
        let mut datagram = self.sides[at].link.pop_front().unwrap_or_default();
        if let Some(byte) = datagram.get_mut(place) {
            *byte ^= value;
        }
        datagram.truncate(datagram.len().saturating_sub(usize::from(value == 0) * place));
        self.deliver(at, &datagram);
        Some(())
    }

    /// A datagram that names the right connection and holds whatever the program says.
    fn deliver_forged(&mut self, at: usize, program: &mut Reader<'_>) -> Option<()> {
        let length = usize::from(program.u8().ok()?) + 4;
        let rest = program.rest();
        let body = rest.get(..length.min(rest.len()))?;
        program.take(body.len()).ok()?;
        let mut datagram = Vec::from(body);
        if let Some(id) = datagram.get_mut(4..7) {
            id.copy_from_slice(&[at as u8 + 1, 0, 0]);
        }
        self.deliver(at, &datagram);
        Some(())
    }

    fn deliver(&mut self, at: usize, datagram: &[u8]) {
        let side = &mut self.sides[at];
        if let Ok(Some(payload)) = side.connection.handle_datagram(self.now, datagram) {
            place(&side.receives, &mut side.placed, &payload);
        }
    }

    fn wait(&mut self, time: Duration) {
        self.now = self.now + time;
        for side in &mut self.sides {
            side.connection.handle_timeout(self.now);
        }
    }

    /// Sleeps exactly until the next timer. Handling it must lead to a later one.
    fn wait_for_timer(&mut self, at: usize) {
        for _ in 0..TIMERS_AT_ONCE {
            let Some(timeout) = self.sides[at].connection.poll_timeout() else { return };
            if timeout.at > self.now + Duration::from_secs(10) {
                return;
            }
            let due = timeout.at <= self.now;
            self.now = self.now.max(timeout.at);
            self.sides[at].connection.handle_timeout(self.now);
            self.drain(at);
            if !due {
                return;
            }
        }
        panic!("{:?} stays due at {:?}", self.sides[at].connection.poll_timeout(), self.now);
    }

    fn drain(&mut self, at: usize) {
        let side = &mut self.sides[at];
        while let Some(payload) = side.connection.poll_payload(self.now) {
            place(&side.receives, &mut side.placed, &payload);
        }
        for count in 0.. {
            assert!(count < BURST_MAX, "events without end");
            match side.connection.poll_event() {
                Some(Event::Received(receipt)) => {
                    assert!(side.placed.remove(&receipt.transfer).is_some(), "closed twice");
                    assert!(receipt.received_bytes <= receipt.total_bytes);
                    self.completed += 1;
                }
                Some(Event::Sent(receipt)) => {
                    let total = side.sends.remove(&receipt.transfer).unwrap_or_else(|| panic!("sent twice"));
                    let ends = receipt.missing.iter().flat_map(|range| [range.start, range.end]);
                    assert!(ends.is_sorted(), "missing ranges are in order");
                    assert!(receipt.missing.iter().all(|range| range.end <= total));
                }
                Some(_) => {}
                None => break,
            }
        }
        self.transmit(at);
    }

    fn transmit(&mut self, at: usize) {
        let mut scratch = [0; DATAGRAM_BYTES];
        for count in 0.. {
            assert!(count < BURST_MAX, "packets without end");
            let side = &mut self.sides[at];
            let Some(transmit) = side.connection.poll_transmit(self.now, &mut scratch) else { return };
            self.put_on_link(at, &transmit, &scratch);
            // What leaves with it at once, some of it or all.
            while let Some(run) = self.sides[at].connection.poll_transmit_run(self.now, 1 + count % 7) {
                (0..run.count).for_each(|place| self.put_on_link(at, &run.packet(place), &scratch));
            }
        }
    }

    fn put_on_link(&mut self, at: usize, transmit: &Transmit, scratch: &[u8]) {
        let datagram = assemble(transmit, scratch, &self.sides[at].sends);
        assert!(datagram.len() <= DATAGRAM_BYTES);
        let link = &mut self.sides[1 - at].link;
        link.push_back(datagram);
        if link.len() > LINK_MAX {
            link.pop_front();
        }
    }
}

/// Timers that may be due at the same moment: each kind once, and one for each posted transfer.
const TIMERS_AT_ONCE: usize = 256;

/// Few enough that both sides often mean the same one.
fn transfer(byte: u8) -> TransferId {
    match byte {
        0..=191 => TransferId::collective(u32::from(byte >> 3 & 7), u32::from(byte & 7)),
        192.. => TransferId::point_to_point(u32::from(byte & 7)),
    }
}

/// Critical chunks at each end of a transfer of so many bytes: both sides know.
fn critical_chunks(bytes: u64) -> u16 {
    (bytes % 5 / 2) as u16
}

/// A contract like those of LTP and ULTIMA. What nobody sends again ends by a deadline.
fn every_rule(bytes: u64, bounded: Contract) -> Contract {
    let ms = Duration::from_millis;
    let critical_chunks = critical_chunks(bytes);
    match bytes % 4 {
        0 => bounded,
        1 => Contract {
            loss_bound: 0.0,
            after_first_pass: false,
            deadline: Some(ms(9)),
            floor: 0.0,
            early: Some(Early { quiet: ms(1) }),
            critical_chunks,
            repairs: false,
            ..bounded
        },
        2 => Contract {
            after_first_pass: false,
            soft: Some(Soft { after: ms(2), min_fraction: 0.8 }),
            deadline: Some(ms(30)),
            floor: 0.0,
            critical_chunks,
            ..bounded
        },
        _ => Contract { after_first_pass: false, critical_chunks, ..bounded },
    }
}

/// Up to 60 chunks; the smallest values are the edges of the grid.
fn size(value: u16) -> u64 {
    let chunk = gradwire_wire::chunk_bytes_for(DATAGRAM_BYTES) as u64;
    match u64::from(value) {
        small @ 0..=8 => (small / 3 * chunk + small % 3).saturating_sub(1),
        value => value,
    }
}

fn place(
    receives: &BTreeMap<TransferId, u64>,
    placed: &mut BTreeMap<TransferId, BTreeSet<u64>>,
    payload: &Payload<'_>,
) {
    let total =
        receives.get(&payload.transfer).copied().unwrap_or_else(|| panic!("nobody posted {payload:?}"));
    assert!(payload.offset + payload.bytes.len() as u64 <= total, "outside of its transfer");
    let offsets = placed.get_mut(&payload.transfer).unwrap_or_else(|| panic!("payload after the end"));
    assert!(offsets.insert(payload.offset), "handed out twice");
}

fn assemble(transmit: &Transmit, scratch: &[u8], sends: &BTreeMap<TransferId, u64>) -> Vec<u8> {
    let mut datagram = transmit.header.encode().to_vec();
    if let Some(opening) = transmit.opening {
        let mut bytes = [0; OPENING_BYTES];
        opening.encode(&mut Writer::new(&mut bytes));
        datagram.extend_from_slice(&bytes);
    }
    match transmit.body {
        Body::Control { bytes } => datagram.extend_from_slice(&scratch[..bytes]),
        Body::Payload { offset, bytes } => {
            let total =
                sends.get(&transmit.header.transfer).copied().unwrap_or_else(|| panic!("memory is gone"));
            assert!(offset + bytes as u64 <= total, "outside of its transfer");
            datagram.resize(datagram.len() + bytes, 0);
        }
    }
    datagram
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_seed_corpus_passes_and_reaches_what_it_is_meant_to() {
        for (program, completed) in SEEDS {
            assert_eq!(run_connection(program), completed);
        }
    }

    #[test]
    fn programs_have_every_controller_with_every_spray() {
        let drawn = |controller, wanted| {
            (0..=u8::MAX).any(|options| {
                let config = config(1, 2, options);
                (config.controller, config.spray) == (controller, wanted) && config.paths > 1
            })
        };
        for spray in [Spray::Adaptive, Spray::Random, Spray::RoundRobin] {
            assert!(ControllerKind::ALL.iter().all(|kind| drawn(*kind, spray)), "{spray:?}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_programs_keep_every_promise(program in prop::collection::vec(any::<u8>(), 0..600)) {
            run_connection(&program);
        }
    }

    const SEEDS: [(&[u8], usize); 6] = [
        (include_bytes!("../../../fuzz/corpus/connection/every_rule_closes_a_transfer"), 3),
        (include_bytes!("../../../fuzz/corpus/connection/exact_transfer"), 1),
        (include_bytes!("../../../fuzz/corpus/connection/early_and_tolerant"), 2),
        (include_bytes!("../../../fuzz/corpus/connection/loss_and_timers"), 1),
        (include_bytes!("../../../fuzz/corpus/connection/forged_packets"), 1),
        (include_bytes!("../../../fuzz/corpus/connection/leave_and_abort"), 1),
    ];
}
