//! What the protocol costs for each packet: two connections exchange a transfer in virtual time, without sockets
//! and without copying payload. `cargo bench -p gradwire-core`.

// `criterion_group!` makes a public function without documentation.
#![allow(missing_docs)]

use criterion::{criterion_group, criterion_main, Criterion, Throughput};
use gradwire_core::{
    Body, Connection, ConnectionConfig, ConnectionId, Contract, Event, ReceiveTransfer, Reliability,
    SendTransfer, Timestamp, TransferId, TransferTags,
};
use std::time::Duration;

const TRANSFER_BYTES: usize = 6 << 20;

fn config(local: u32, remote: u32) -> ConnectionConfig {
    ConnectionConfig {
        local: ConnectionId::new(local).expect("fits"),
        remote: ConnectionId::new(remote).expect("fits"),
        datagram_bytes: 1472,
        fingerprint: 0,
        hello: gradwire_core::HelloWords::both(0),
        eager_bytes: 256 << 10,
        ack_every: 10,
        ack_delay_max: Duration::from_micros(500),
        controller: gradwire_core::recovery::ControllerKind::default(),
        initial_rate: 1 << 30,
        incast: 1,
        turn: gradwire_core::recovery::Turn::Any,
        receive_buffer_bytes: 8 << 20,
        peer_timeout: Duration::from_secs(5),
        paths: 1,
        spray: gradwire_core::Spray::Adaptive,
        spray_run: 1,
        class_queues: 0,
    }
}

/// A datagram on the virtual wire: its head, and how many zero payload bytes follow.
type Wire = Vec<(usize, Vec<u8>)>;

struct Pair {
    now: Timestamp,
    ends: [Connection; 2],
    spare: Vec<Vec<u8>>,
    wire: Wire,
    next: u32,
}

impl Pair {
    fn new() -> Self {
        let now = Timestamp::ZERO;
        let ends = [Connection::new(config(1, 2), now), Connection::new(config(2, 1), now)];
        let mut pair = Self { now, ends, spare: Vec::new(), wire: Vec::new(), next: 1 };
        while !pair.ends.iter().all(Connection::is_connected) {
            pair.step();
        }
        pair
    }

    /// Everything that may leave leaves and arrives 20 microseconds later.
    fn step(&mut self) {
        let mut scratch = [0; 2048];
        for from in 0..2 {
            while let Some(transmit) = self.ends[from].poll_transmit(self.now, &mut scratch) {
                let mut datagram = self.spare.pop().unwrap_or_default();
                datagram.clear();
                datagram.extend_from_slice(&transmit.header.encode());
                if let Some(opening) = transmit.opening {
                    datagram.extend_from_slice(&opening.total_bytes.to_le_bytes());
                    datagram.extend_from_slice(&opening.descriptor);
                }
                match transmit.body {
                    Body::Control { bytes } => datagram.extend_from_slice(&scratch[..bytes]),
                    Body::Payload { bytes, .. } => datagram.resize(datagram.len() + bytes, 0),
                }
                self.wire.push((1 - from, datagram));
            }
        }
        let timers = self.ends.iter().filter_map(Connection::poll_timeout).map(|timeout| timeout.at);
        let next = timers.min().expect("a heartbeat at least");
        self.now =
            if self.wire.is_empty() { next.max(self.now) } else { self.now + Duration::from_micros(20) };
        for (to, datagram) in std::mem::take(&mut self.wire) {
            let _ = self.ends[to].handle_datagram(self.now, &datagram);
            self.spare.push(datagram);
        }
        self.ends.iter_mut().for_each(|end| end.handle_timeout(self.now));
    }

    fn transfer(&mut self) {
        let (transfer, bytes, descriptor) =
            (TransferId::collective(self.next, 0), TRANSFER_BYTES as u64, [0; 16]);
        self.next += 1;
        let receive = ReceiveTransfer::new(transfer, bytes, descriptor, Contract::EXACT);
        self.ends[1].receive(self.now, receive).expect("fresh");
        let send = SendTransfer {
            transfer,
            bytes,
            descriptor,
            reliability: Reliability::Exact,
            priority: 0,
            critical_chunks: 0,
            begin: 0,
            tags: TransferTags::default(),
            called_at: None,
        };
        self.ends[0].send(self.now, send).expect("fresh");
        loop {
            self.step();
            while self.ends[1].poll_event().is_some() {}
            if std::iter::from_fn(|| self.ends[0].poll_event()).any(|event| matches!(event, Event::Sent(_))) {
                return;
            }
        }
    }
}

fn transfers(criterion: &mut Criterion) {
    let mut pair = Pair::new();
    let mut group = criterion.benchmark_group("connection");
    group.throughput(Throughput::Elements((TRANSFER_BYTES / 1408) as u64));
    group.sample_size(20);
    group.bench_function("packets of an exact transfer, both ends", |bencher| {
        bencher.iter(|| pair.transfer())
    });
    group.finish();
}

criterion_group!(benches, transfers);
criterion_main!(benches);
