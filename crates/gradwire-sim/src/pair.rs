//! Two connections and nothing above them: the transport's own promises, checked without any collective.
//!
//! Random transfers in both directions, each posted at its own time on either side. Every payload byte must come
//! out at most once and unaltered; what the receiver did not get is exactly what the sender is told; contracts are
//! kept; memory of a concluded send is never asked for; once the network is healed everything ends.

use crate::{EventQueue, Network, Port, Rng, Scenario};
use gradwire_core::wire::OPENING_BYTES;
use gradwire_core::{
    Body, CloseReason, Connection, ConnectionConfig, ConnectionId, Contract, Event, ReceiveTransfer,
    Reliability, SendTransfer, Timestamp, TransferId, TransferTags,
};
use std::ops::Range;
use std::time::Duration;

/// Runs the pair of a seed; returns the number of datagrams sent.
///
/// # Errors
/// The broken promise, in words.
pub fn run_pair(seed: u64) -> Result<u64, String> {
    Pair::new(seed).run()
}

/// One transfer and what is known of it from outside.
#[derive(Debug)]
struct Transfer {
    from: usize,
    id: TransferId,
    bytes: u64,
    contract: Contract,
    priority: u8,
    /// Payload handed out at the receiver.
    received: Vec<Range<u64>>,
    closed: Option<CloseReason>,
    /// What the sender was told.
    missing: Option<Vec<Range<u64>>>,
}

#[derive(Debug)]
enum Happening {
    AtPort(usize, Vec<u8>),
    Received(usize, Vec<u8>),
    Wake(usize, u64),
    PostSend(usize),
    PostReceive(usize),
    Heal,
}

struct Pair {
    connections: [Connection; 2],
    transfers: Vec<Transfer>,
    network: Network,
    queue: EventQueue<Happening>,
    now: Timestamp,
    armed: [(Option<Timestamp>, u64); 2],
    limit: Timestamp,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed).fork(20);
        let scenario = Scenario::swarm(seed);
        let mut network = scenario.network.clone();
        // Two ranks are one flow: the trunk is one more link in a row, which the narrowest one stands for.
        (network.trunk, network.impaired_rank) = (None, None);
        let connections = [0, 1].map(|side| Connection::new(config(&scenario, side), Timestamp::ZERO));
        let transfers: Vec<Transfer> =
            (0..rng.below(1..12) as u32).map(|index| draw(&mut rng, index)).collect();
        let mut queue = EventQueue::new();
        let skew = if rng.chance(0.5) { Duration::from_micros(300) } else { Duration::from_millis(300) };
        for index in 0..transfers.len() {
            queue.schedule(Timestamp::ZERO + rng.duration(skew), Happening::PostSend(index));
            queue.schedule(Timestamp::ZERO + rng.duration(skew), Happening::PostReceive(index));
        }
        let healed = rng.duration(Duration::from_secs(3));
        queue.schedule(Timestamp::ZERO + healed, Happening::Heal);
        let total: u64 = transfers.iter().map(|transfer| transfer.bytes).sum();
        let rate = network.narrowest_rate(2) as f64;
        let patience = Duration::from_secs_f64(16.0 * total as f64 / rate) + Duration::from_secs(1);
        let network = Network::new(network, 2, &rng.fork(21));
        let armed = [(None, 0); 2];
        let limit = Timestamp::ZERO + skew + healed + patience;
        Self { connections, transfers, network, queue, now: Timestamp::ZERO, armed, limit }
    }

    fn run(mut self) -> Result<u64, String> {
        (0..2).try_for_each(|side| self.drain(side))?;
        while self.transfers.iter().any(|transfer| transfer.closed.is_none() || transfer.missing.is_none()) {
            let (at, happening) = self.queue.pop().ok_or("nothing happens any more")?;
            self.now = at;
            if at > self.limit {
                let open = |t: &&Transfer| t.closed.is_none() || t.missing.is_none();
                return Err(format!("stuck at {at:?}: {:?}", self.transfers.iter().find(open)));
            }
            self.handle(happening)?;
        }
        self.transfers.iter().try_for_each(check)?;
        Ok(self.network.stats().sent)
    }

    fn handle(&mut self, happening: Happening) -> Result<(), String> {
        let side = match happening {
            Happening::AtPort(to, bytes) => {
                if let Some(at) = self.network.enqueue(self.now, Port::Host(to), bytes.len()) {
                    self.queue.schedule(at, Happening::Received(to, bytes));
                }
                return Ok(());
            }
            Happening::Heal => {
                self.network.heal();
                return Ok(());
            }
            Happening::Received(to, bytes) => {
                if let Ok(Some(payload)) = self.connections[to].handle_datagram(self.now, &bytes) {
                    let (id, offset, bytes) = (payload.transfer, payload.offset, payload.bytes);
                    take(&mut self.transfers, to, id, offset, bytes)?;
                }
                to
            }
            Happening::Wake(side, armed) if self.armed[side].1 != armed => return Ok(()),
            Happening::Wake(side, _) => {
                self.armed[side].0 = None;
                self.connections[side].handle_timeout(self.now);
                side
            }
            Happening::PostSend(index) => self.post_send(index)?,
            Happening::PostReceive(index) => self.post_receive(index)?,
        };
        self.drain(side)
    }

    fn post_send(&mut self, index: usize) -> Result<usize, String> {
        let transfer = &self.transfers[index];
        let exact = transfer.contract.is_exact();
        let request = SendTransfer {
            transfer: transfer.id,
            bytes: transfer.bytes,
            descriptor: [7; 16],
            reliability: if exact { Reliability::Exact } else { Reliability::Tolerant },
            priority: transfer.priority,
            critical_chunks: 0,
            begin: if exact { 0 } else { transfer.id.0.wrapping_mul(0x9E37_79B9) },
            tags: TransferTags::default(),
            called_at: None,
        };
        let posted = self.connections[transfer.from].send(self.now, request);
        posted.map(|()| transfer.from).map_err(|error| format!("send refused: {error}"))
    }

    fn post_receive(&mut self, index: usize) -> Result<usize, String> {
        let transfer = &self.transfers[index];
        let (id, bytes, contract) = (transfer.id, transfer.bytes, transfer.contract);
        let to = 1 - transfer.from;
        let request = ReceiveTransfer::new(id, bytes, [7; 16], contract);
        let posted = self.connections[to].receive(self.now, request);
        posted.map_err(|error| format!("receive refused: {error}"))?;
        while let Some(payload) = self.connections[to].poll_payload(self.now) {
            take(&mut self.transfers, to, payload.transfer, payload.offset, payload.bytes)?;
        }
        Ok(to)
    }

    fn drain(&mut self, side: usize) -> Result<(), String> {
        while let Some(event) = self.connections[side].poll_event() {
            self.on_event(side, event)?;
        }
        let mut scratch = vec![0; 9000];
        while let Some(transmit) = self.connections[side].poll_transmit(self.now, &mut scratch) {
            let mut bytes = transmit.header.encode().to_vec();
            if let Some(opening) = transmit.opening {
                bytes.extend_from_slice(&opening.total_bytes.to_le_bytes());
                bytes.extend_from_slice(&opening.descriptor);
                assert_eq!(bytes.len() % 8, 0, "header and opening ({OPENING_BYTES}) are whole words");
            }
            match transmit.body {
                Body::Control { bytes: length } => bytes.extend_from_slice(&scratch[..length]),
                Body::Payload { offset, bytes: length } => {
                    let id = transmit.header.transfer;
                    let live = |t: &&Transfer| t.from == side && t.id == id && t.missing.is_none();
                    let transfer =
                        self.transfers.iter().find(live).ok_or("a concluded send was read again")?;
                    bytes.extend((offset..offset + length as u64).map(|at| content(transfer.id, at)));
                }
            }
            self.send(side, bytes);
        }
        self.arm(side);
        Ok(())
    }

    fn send(&mut self, from: usize, bytes: Vec<u8>) {
        let flight = self.network.transmit(self.now, from, 1 - from, bytes.len());
        if let Some(again) = flight.duplicate_at {
            self.queue.schedule(again, Happening::AtPort(1 - from, bytes.clone()));
        }
        if let Some(at) = flight.arrives_at {
            self.queue.schedule(at, Happening::AtPort(1 - from, bytes));
        }
    }

    fn arm(&mut self, side: usize) {
        let due = self.connections[side].poll_timeout().map(|timeout| timeout.at);
        let (armed_at, armed) = &mut self.armed[side];
        if *armed_at != due {
            (*armed_at, *armed) = (due, *armed + 1);
            if let Some(due) = due {
                self.queue.schedule(due.max(self.now), Happening::Wake(side, *armed));
            }
        }
    }

    fn find(&mut self, from: usize, id: TransferId) -> Result<&mut Transfer, String> {
        let found = self.transfers.iter_mut().find(|transfer| transfer.from == from && transfer.id == id);
        found.ok_or_else(|| format!("event for an unknown transfer {id:?}"))
    }

    fn on_event(&mut self, side: usize, event: Event) -> Result<(), String> {
        match event {
            Event::Received(receipt) => {
                let transfer = self.find(1 - side, receipt.transfer)?;
                let got: u64 = transfer.received.iter().map(|range| range.end - range.start).sum();
                if transfer.closed.replace(receipt.reason).is_some() || got != receipt.received_bytes {
                    return Err(format!("receipt {receipt:?} after {got} bytes"));
                }
            }
            Event::Sent(receipt) => {
                let transfer = self.find(side, receipt.transfer)?;
                if transfer.missing.replace(receipt.missing).is_some() {
                    return Err("a send ended twice".into());
                }
            }
            Event::Connected { .. } | Event::Offered { .. } => {}
            other => return Err(format!("side {side}: unexpected {other:?}")),
        }
        Ok(())
    }
}

/// Payload came out at `to`.
fn take(
    transfers: &mut [Transfer],
    to: usize,
    id: TransferId,
    offset: u64,
    bytes: &[u8],
) -> Result<(), String> {
    let found = transfers.iter_mut().find(|transfer| transfer.from == 1 - to && transfer.id == id);
    let transfer = found.ok_or_else(|| format!("payload of an unknown transfer {id:?}"))?;
    let range = offset..offset + bytes.len() as u64;
    let overlaps = |other: &Range<u64>| range.start < other.end && other.start < range.end;
    if transfer.received.iter().any(overlaps) || transfer.closed.is_some() {
        return Err(format!("{id:?}: bytes {range:?} came out twice or after the end"));
    }
    if bytes.iter().zip(offset..).any(|(byte, at)| *byte != content(id, at)) {
        return Err(format!("{id:?}: bytes {range:?} are altered"));
    }
    transfer.received.push(range);
    Ok(())
}

/// What must hold when a transfer is over on both sides.
fn check(transfer: &Transfer) -> Result<(), String> {
    let missing = transfer.missing.clone().unwrap_or_default();
    let received: u64 = transfer.received.iter().map(|range| range.end - range.start).sum();
    let lost: u64 = missing.iter().map(|range| range.end - range.start).sum();
    let contradicts =
        |range: &Range<u64>| missing.iter().any(|hole| range.start < hole.end && hole.start < range.end);
    if received + lost != transfer.bytes || transfer.received.iter().any(contradicts) {
        return Err(format!("the sender was told {missing:?}, but {received} bytes came: {transfer:?}"));
    }
    let fraction = match transfer.closed {
        Some(CloseReason::BoundMet) => 1.0 - transfer.contract.loss_bound,
        Some(CloseReason::Deadline) => transfer.contract.floor,
        _ => 1.0,
    };
    if received < Contract::needed(transfer.bytes, fraction) {
        return Err(format!("the contract was broken: {transfer:?}"));
    }
    Ok(())
}

/// Every byte of every transfer is known.
fn content(id: TransferId, at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9) >> 11) as u8 ^ id.0 as u8
}

fn draw(rng: &mut Rng, index: u32) -> Transfer {
    let point_to_point = rng.chance(0.2);
    let id =
        if point_to_point { TransferId::point_to_point(index) } else { TransferId::collective(index, 0) };
    let bytes = if rng.chance(0.1) { 0 } else { rng.log_uniform(1, 600_000) };
    let bounded = Contract {
        loss_bound: rng.pick(&[0.01, 0.05, 0.2]),
        after_first_pass: rng.chance(0.6),
        deadline: rng.chance(0.5).then(|| Duration::from_millis(rng.log_uniform(1, 200))),
        floor: 0.5,
        reorder_slack: Duration::from_micros(200),
        ..Contract::EXACT
    };
    Transfer {
        from: rng.below(0..2) as usize,
        id,
        bytes,
        contract: if rng.chance(0.5) { Contract::EXACT } else { bounded },
        priority: rng.below(0..3) as u8,
        received: Vec::new(),
        closed: None,
        missing: None,
    }
}

fn config(scenario: &Scenario, side: u32) -> ConnectionConfig {
    let id = |side: u32| ConnectionId::new(side + 1).expect("small numbers fit 24 bits");
    let host = &scenario.host;
    ConnectionConfig {
        local: id(side),
        remote: id(1 - side),
        datagram_bytes: host.datagram_bytes,
        fingerprint: 1,
        hello: gradwire_core::HelloWords::both(1),
        eager_bytes: host.eager_bytes,
        ack_every: host.ack_every,
        ack_delay_max: host.ack_delay_max,
        controller: host.controller,
        initial_rate: host.initial_rate,
        incast: 1,
        turn: gradwire_core::recovery::Turn::Any,
        receive_buffer_bytes: host.socket_bytes,
        peer_timeout: host.peer_timeout,
        paths: host.paths,
        spray: gradwire_core::Spray::Adaptive,
        spray_run: 1,
        class_queues: 0,
    }
}
