//! In the middle of a transfer nothing is allocated: not for a packet sent, not for one received, not for one lost.

#[path = "common/counting.rs"]
mod counting;

use counting::allocations_in;
use gradwire_core::recovery::ControllerKind;
use gradwire_core::wire::{Writer, OPENING_BYTES};
use gradwire_core::{
    Body, Connection, ConnectionConfig, ConnectionId, Contract, Event, ReceiveTransfer, Reliability,
    SendTransfer, Spray, Timestamp, TransferId,
};
use std::time::Duration;

const DATAGRAM_BYTES: usize = 1472;
const CHUNK_BYTES: u64 = 1408;
static PAYLOAD: [u8; CHUNK_BYTES as usize] = [0; CHUNK_BYTES as usize];
/// Datagrams that one step carries in each direction.
const ROOM: usize = 64;

fn config(local: u32, remote: u32, paths: u8) -> ConnectionConfig {
    ConnectionConfig {
        local: ConnectionId::new(local).expect("fits"),
        remote: ConnectionId::new(remote).expect("fits"),
        datagram_bytes: DATAGRAM_BYTES,
        fingerprint: 0,
        hello: gradwire_core::HelloWords::both(0),
        eager_bytes: 256 << 10,
        ack_every: 10,
        ack_delay_max: Duration::from_micros(500),
        controller: ControllerKind::default(),
        initial_rate: 1 << 27,
        incast: 1,
        turn: gradwire_core::recovery::Turn::Any,
        receive_buffer_bytes: 1 << 20,
        peer_timeout: Duration::from_secs(5),
        paths,
        spray: Spray::Adaptive,
        spray_run: 1,
        class_queues: 0,
    }
}

/// Datagrams for one end, in memory that is there from the start.
struct Wire {
    datagrams: Vec<[u8; DATAGRAM_BYTES]>,
    lengths: Vec<usize>,
    count: usize,
}

struct Pair {
    now: Timestamp,
    ends: [Connection; 2],
    wires: [Wire; 2],
    /// One in so many datagrams is lost; none when zero.
    lose_one_in: u64,
    sent: u64,
    received: u64,
    next: u32,
    ended: u32,
}

impl Pair {
    fn new(lose_one_in: u64, paths: u8) -> Self {
        let now = Timestamp::from_nanos(1_000_000);
        let ends = [(1, 2), (2, 1)].map(|(local, remote)| Connection::new(config(local, remote, paths), now));
        let wires = [0, 1].map(|_| Wire {
            datagrams: vec![[0; DATAGRAM_BYTES]; ROOM],
            lengths: vec![0; ROOM],
            count: 0,
        });
        let mut pair = Self { now, ends, wires, lose_one_in, sent: 0, received: 0, next: 1, ended: 0 };
        while !pair.ends.iter().all(Connection::is_connected) {
            pair.step();
        }
        pair
    }

    /// Up to [`ROOM`] datagrams leave each end and arrive 50 microseconds later.
    fn step(&mut self) {
        for from in 0..2 {
            self.transmit(from);
        }
        self.now = self.now + Duration::from_micros(50);
        for from in 0..2 {
            let (wire, to) = (&mut self.wires[from], &mut self.ends[1 - from]);
            for at in 0..wire.count {
                let datagram = &wire.datagrams[at][..wire.lengths[at]];
                let payload = to.handle_datagram(self.now, datagram);
                self.received += u64::from(matches!(payload, Ok(Some(_))));
            }
            wire.count = 0;
        }
        for end in &mut self.ends {
            end.handle_timeout(self.now);
            while let Some(event) = end.poll_event() {
                self.ended += u32::from(matches!(event, Event::Sent(_) | Event::Received(_)));
            }
        }
    }

    fn transmit(&mut self, from: usize) {
        let mut scratch = [0; DATAGRAM_BYTES];
        let wire = &mut self.wires[from];
        while wire.count < ROOM {
            let Some(transmit) = self.ends[from].poll_transmit(self.now, &mut scratch) else { return };
            self.sent += 1;
            if self.lose_one_in > 0 && self.sent % self.lose_one_in == 0 {
                continue;
            }
            let mut out = Writer::new(&mut wire.datagrams[wire.count]);
            out.put(&transmit.header.encode());
            if let Some(opening) = transmit.opening {
                let mut bytes = [0; OPENING_BYTES];
                opening.encode(&mut Writer::new(&mut bytes));
                out.put(&bytes);
            }
            match transmit.body {
                Body::Control { bytes } => out.put(&scratch[..bytes]),
                Body::Payload { bytes, .. } => out.put(&PAYLOAD[..bytes]),
            };
            wire.lengths[wire.count] = out.finish().expect("a datagram fits");
            wire.count += 1;
        }
    }

    /// Posts a transfer of `chunks` packets in each direction.
    fn post(&mut self, chunks: u64, contract: Contract) {
        let (transfer, bytes) = (TransferId::collective(self.next, 0), chunks * CHUNK_BYTES);
        let descriptor = [0; 16];
        self.next += 1;
        self.ended = 0;
        let reliability = if contract.is_exact() { Reliability::Exact } else { Reliability::Tolerant };
        for end in &mut self.ends {
            end.retire(transfer);
            let receive = ReceiveTransfer::new(transfer, bytes, descriptor, contract);
            end.receive(self.now, receive).expect("fresh");
            let send = SendTransfer { reliability, ..SendTransfer::exact(transfer, bytes, descriptor) };
            end.send(self.now, send).expect("fresh");
        }
    }

    fn run_until(&mut self, done: impl Fn(&Self) -> bool) {
        for _ in 0..10_000_000 {
            if done(self) {
                return;
            }
            self.step();
        }
        panic!("no end after 500 s: {} received, {} halves ended", self.received, self.ended);
    }

    /// Allocations while the middle half of a transfer of `chunks` packets each way goes over the wire, and the
    /// packets of that time.
    fn allocations_in_the_middle(&mut self, chunks: u64, contract: Contract) -> (u64, u64) {
        let before = self.received;
        self.post(chunks, contract);
        self.run_until(|pair| pair.received - before >= chunks / 2);
        let sent = self.sent;
        let counted =
            allocations_in(|| self.run_until(|pair| pair.received - before >= chunks * 2 - chunks / 2));
        let sent = self.sent - sent;
        self.run_until(|pair| pair.ended == 4);
        (counted, sent)
    }
}

const TOLERANT: Contract =
    Contract { loss_bound: 0.2, reorder_slack: Duration::from_millis(1), ..Contract::EXACT };

#[test]
fn the_middle_of_a_transfer_allocates_nothing_whether_packets_are_lost_or_not() {
    for lose_one_in in [0, 50] {
        for (paths, contract) in [(1, Contract::EXACT), (4, Contract::EXACT), (1, TOLERANT), (4, TOLERANT)] {
            let mut pair = Pair::new(lose_one_in, paths);
            // The largest first: what is kept has its size from then on.
            (0..3).for_each(|_| _ = pair.allocations_in_the_middle(20_000, contract));
            let (counted, packets) = pair.allocations_in_the_middle(10_000, contract);
            let lost = pair.ends.iter().map(|end| end.stats().packets_lost).sum::<u64>();
            println!("{counted} allocations, {packets} packets, {paths} paths, {lost} lost");
            assert!(packets > 10_000, "{packets} packets are not the middle of a transfer");
            assert_eq!(lost > 0, lose_one_in > 0);
            assert_eq!(counted, 0, "{packets} packets over {paths} paths, one in {lose_one_in} lost");
        }
    }
}
