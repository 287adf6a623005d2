//! The UDP socket behind one interface, in two forms: with the kernel's offloads and without.
//!
//! Both send a [`Batch`] and hand out what was received as it came. What the network refuses (no route, firewall, too
//! large) is counted and lost like a packet on its way: recovery is the transport's business.

mod address;
mod batch;
#[cfg(all(test, target_os = "linux"))]
mod denied;
#[cfg(target_os = "linux")]
mod linux;
mod options;
mod paths;
mod plain;
mod sending;
mod stuck;
#[cfg(test)]
mod tests;

pub(crate) use address::RawAddress;
pub(crate) use batch::{Batch, Seal, SharedSeal, DATAGRAM_BYTES_MAX};
pub(crate) use options::{bind, BindOptions, Bound, Descriptor};
pub use options::{RECEIVE_BUFFER_BYTES, SEND_BUFFER_BYTES};
pub(crate) use paths::{BoundPaths, BoundSocket, PathSockets};

use crate::{EngineStats, OsError};
use std::os::fd::RawFd;

/// One received datagram.
#[derive(Debug)]
pub(crate) struct Datagram<'a> {
    /// UDP payload, in the receive buffer: a sealed one is opened in place.
    pub(crate) bytes: &'a mut [u8],
    /// Where it came from, in the kernel's form.
    pub(crate) from: &'a RawAddress,
    /// Traffic class octet of its IP header; zero where the kernel does not say.
    pub(crate) octet: u8,
}

/// What the kernel brought as one piece: datagrams of one sender and size behind each other, of which the last may be shorter.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    /// Their UDP payloads, in the receive buffer.
    pub(crate) bytes: &'a mut [u8],
    /// Bytes from the beginning of one to that of the next; at least one.
    pub(crate) stride: usize,
    /// See [`Datagram::from`].
    pub(crate) from: &'a RawAddress,
    /// See [`Datagram::octet`].
    pub(crate) octet: u8,
    /// The first that its system call returned: the clock must be read after that call.
    pub(crate) is_fresh: bool,
}

impl Message<'_> {
    /// Each of them; an empty message is one empty datagram.
    pub(crate) fn datagrams(&mut self) -> impl Iterator<Item = Datagram<'_>> {
        let Self { from, octet, .. } = *self;
        let empty: Option<&mut [u8]> = self.bytes.is_empty().then_some(&mut []);
        let parts = self.bytes.chunks_mut(self.stride).chain(empty);
        parts.map(move |bytes| Datagram { bytes, from, octet })
    }
}

/// How a hand-over to the kernel ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SendOutcome {
    /// The batch is empty.
    Sent,
    /// The kernel's buffer is full; the batch holds the rest. Try again when the socket is writable.
    Blocked,
}

/// What sending has come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SendCounts {
    /// System calls.
    pub(crate) calls: u64,
    /// Datagrams that the kernel took.
    pub(crate) datagrams: u64,
    /// Bytes of them.
    pub(crate) bytes: u64,
    /// Datagrams that it refused, or that were for a stuck socket: lost like on the way.
    pub(crate) refused: u64,
    /// The error number of the latest of them; 0: there was none, or it was for a stuck socket.
    pub(crate) refused_errno: i32,
    /// Times that its buffer was full.
    pub(crate) blocked: u64,
    /// Batches that a thread for it has sent.
    pub(crate) batches_apart: u64,
    /// Datagrams that could not be sealed.
    pub(crate) seals_refused: u64,
}

impl SendCounts {
    /// Counts datagrams that the kernel refused with an error number, or (0) that were for a stuck socket.
    pub(crate) fn refuse(&mut self, datagrams: usize, errno: i32) {
        self.refused += datagrams as u64;
        self.refused_errno = errno;
    }

    pub(crate) fn add_to(&self, stats: &mut EngineStats) {
        stats.send_calls += self.calls;
        stats.datagrams_sent += self.datagrams;
        stats.bytes_sent += self.bytes;
        stats.send_refused += self.refused;
        if self.refused > 0 {
            stats.send_refused_errno = self.refused_errno;
        }
        stats.send_blocked += self.blocked;
        stats.batches_apart += self.batches_apart;
        stats.seals_refused += self.seals_refused;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        self.datagrams += other.datagrams;
        self.bytes += other.bytes;
        if other.refused > 0 {
            self.refuse(other.refused as usize, other.refused_errno);
        }
        self.blocked += other.blocked;
        self.batches_apart += other.batches_apart;
        self.seals_refused += other.seals_refused;
    }
}

/// The sending end of a nonblocking UDP socket.
pub(crate) trait Outlet: Send {
    /// For polling.
    fn fd(&self) -> RawFd;
    /// What the kernel has taken and not sent yet, in its own measure; 0 where it does not say.
    fn unsent_bytes(&self) -> usize {
        sending::unsent_bytes(self.fd())
    }
    /// Sends the batch; afterwards it holds no pointer into a tensor.
    fn send(&mut self, batch: &mut Batch, counts: &mut SendCounts) -> SendOutcome;
}

/// A nonblocking UDP socket.
pub(crate) trait DatagramSocket: Outlet {
    /// Another sending end, for a thread beside this one; `None`: this form has none.
    fn another_outlet(&self) -> Option<Box<dyn Outlet>>;
    /// Hands out what has arrived, a bounded amount. `true`: more may be waiting.
    fn receive(&mut self, stats: &mut EngineStats, handle: &mut dyn FnMut(Message<'_>)) -> bool;
}

/// Whether the kernel asks to come back later.
fn is_would_block(errno: i32) -> bool {
    errno == libc::EAGAIN || errno == libc::EWOULDBLOCK
}

/// What a call that waits for datagrams has failed with is over with the next one, mostly.
///
/// # Panics
/// Where every later call fails with it too, since the descriptor is closed, or another file's: the thread would never sleep again.
pub(crate) fn assert_open(errno: i32) {
    let is_gone = matches!(errno, libc::EBADF | libc::ENOTSOCK | libc::ENOTCONN | libc::EINVAL);
    assert!(
        !is_gone,
        "a descriptor of it is gone, which something in this process has closed: {}",
        OsError(errno)
    );
}
