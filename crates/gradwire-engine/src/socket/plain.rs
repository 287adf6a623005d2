//! One system call for each datagram: works wherever UDP does. All datagrams have the traffic class of the socket.

use super::{
    assert_open, is_would_block, Batch, DatagramSocket, Message, Outlet, RawAddress, SendCounts, SendOutcome,
    DATAGRAM_BYTES_MAX,
};
use crate::EngineStats;
use std::net::UdpSocket;
use std::os::fd::{AsRawFd, RawFd};

/// Datagrams taken at a time.
const RECEIVE_MAX: usize = 64;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct PlainSocket {
    socket: UdpSocket,
    buffer: Vec<u8>,
}

impl PlainSocket {
    /// Takes a bound, nonblocking socket.
    pub(super) fn new(socket: UdpSocket) -> Self {
        Self { socket, buffer: vec![0; DATAGRAM_BYTES_MAX + 1] }
    }
}

impl Outlet for PlainSocket {
    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn send(&mut self, batch: &mut Batch, counts: &mut SendCounts) -> SendOutcome {
        for index in 0..batch.slots().len() {
            let slot = batch.slots()[index];
            let Some(to) = slot.to.to_socket_addr() else { continue };
            let (head, payload) = batch.parts(&slot);
            let bytes = slot.bytes();
            self.buffer[..head.len()].copy_from_slice(head);
            self.buffer[head.len()..bytes].copy_from_slice(payload);
            counts.calls += 1;
            match self.socket.send_to(&self.buffer[..bytes], to) {
                Ok(_) => {
                    counts.datagrams += 1;
                    counts.bytes += bytes as u64;
                }
                Err(error) if is_would_block(error.raw_os_error().unwrap_or(0)) => {
                    counts.blocked += 1;
                    batch.keep_from(index);
                    return SendOutcome::Blocked;
                }
                // Whatever it is, the datagram did not leave: a lost packet.
                Err(error) => counts.refuse(1, error.raw_os_error().unwrap_or(0)),
            }
        }
        batch.clear();
        SendOutcome::Sent
    }
}

impl DatagramSocket for PlainSocket {
    /// A call for each datagram is for where nothing else works: not for the fastest links.
    fn another_outlet(&self) -> Option<Box<dyn Outlet>> {
        None
    }

    fn receive(&mut self, stats: &mut EngineStats, handle: &mut dyn FnMut(Message<'_>)) -> bool {
        for _ in 0..RECEIVE_MAX {
            stats.receive_calls += 1;
            match self.socket.recv_from(&mut self.buffer) {
                Ok((bytes, from)) => {
                    stats.datagrams_received += 1;
                    stats.bytes_received += bytes as u64;
                    let (stride, from) = (bytes.max(1), &RawAddress::new(from));
                    let bytes = &mut self.buffer[..bytes];
                    handle(Message { bytes, stride, from, octet: 0, is_fresh: true });
                }
                Err(error) if is_would_block(error.raw_os_error().unwrap_or(0)) => return false,
                // A pending error of an earlier send (a port that refused); it is cleared by having been read.
                Err(error) => assert_open(error.raw_os_error().unwrap_or(0)),
            }
        }
        true
    }
}
