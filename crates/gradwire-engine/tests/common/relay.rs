//! The network between two ranks in the hands of an attacker: both believe that the relay is the other one.
#![allow(dead_code)] // Each test file uses its part.

use super::PATIENCE;
use gradwire_engine::{Engine, GroupHandle, JoinError, PendingGroup};
use serde_json::Value;
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// What the relay does with a datagram from rank `from`: the datagrams that go on to the other rank instead, in order, and
/// those that go back to where it came from.
pub(crate) type Meddler = dyn Fn(usize, &[u8]) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) + Send + Sync;

/// Lives while its threads do.
pub(crate) struct Relay {
    /// Where each rank is seen by the other one.
    faces: [UdpSocket; 2],
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// Between two engines.
    pub(crate) fn new(engines: &[Engine], meddler: Arc<Meddler>) -> Self {
        let bind = || UdpSocket::bind("127.0.0.1:0").expect("loopback exists");
        let faces = [bind(), bind()];
        let over = Arc::new(AtomicBool::new(false));
        let places =
            [0, 1].map(|rank| SocketAddr::from(([127, 0, 0, 1], engines[rank as usize].local_port())));
        let threads = [0, 1].map(|from: usize| {
            // Rank `from` sends to what it takes for the other one.
            let (heard, spoken) = (clone(&faces[1 - from]), clone(&faces[from]));
            let (over, meddler) = (Arc::clone(&over), Arc::clone(&meddler));
            std::thread::spawn(move || {
                let mut buffer = vec![0; 1 << 16];
                while let Ok((bytes, _)) = heard.recv_from(&mut buffer) {
                    if over.load(Ordering::SeqCst) {
                        return;
                    }
                    let (on, back) = meddler(from, &buffer[..bytes]);
                    // What the kernel does not take is lost, as anywhere on the way.
                    on.iter().for_each(|datagram| _ = spoken.send_to(datagram, places[1 - from]));
                    back.iter().for_each(|datagram| _ = heard.send_to(datagram, places[from]));
                }
            })
        });
        Self { faces, over, threads: threads.into() }
    }

    /// Joins a group of the two engines through the relay. Their records must be in clear.
    pub(crate) fn join(&self, engines: &[Engine], name: &str) -> Vec<Result<GroupHandle, JoinError>> {
        self.join_at(engines, name, [0, 1].map(|rank| self.face_of(rank).port()), PATIENCE)
    }

    /// The same where the ranks' records show these ports.
    pub(crate) fn join_at(
        &self,
        engines: &[Engine],
        name: &str,
        ports: [u16; 2],
        timeout: Duration,
    ) -> Vec<Result<GroupHandle, JoinError>> {
        let new = |(engine, rank): (&Engine, u32)| engine.new_group(rank, 2, name).expect("valid rank");
        let pending: Vec<PendingGroup> = engines.iter().zip(0..).map(new).collect();
        let records: Vec<String> = pending.iter().map(PendingGroup::record).collect();
        let threads: Vec<_> = pending
            .into_iter()
            .enumerate()
            .map(|(rank, group)| {
                let mut seen = records.clone();
                seen[1 - rank] = moved(&records[1 - rank], ports[1 - rank]);
                std::thread::spawn(move || group.join(&seen, Some(timeout)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("join does not panic")).collect()
    }

    /// Where a rank's datagrams come from, and those for it go to.
    pub(crate) fn face_of(&self, rank: usize) -> SocketAddr {
        self.faces[rank].local_addr().expect("bound")
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        for face in &self.faces {
            let own = face.local_addr().expect("bound");
            face.send_to(&[], own).expect("loopback exists");
        }
        self.threads.drain(..).for_each(|thread| thread.join().expect("a relay does not panic"));
    }
}

fn clone(socket: &UdpSocket) -> UdpSocket {
    socket.try_clone().expect("a descriptor is free")
}

/// The record of a rank that seems to be at another port of loopback.
fn moved(record: &str, port: u16) -> String {
    let mut record: Value = serde_json::from_str(record).expect("a record is JSON");
    record["port"] = port.into();
    record["addresses"] = Value::Array(Vec::new());
    record.to_string()
}
