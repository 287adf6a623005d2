//! The fast path: receive offload (one buffer holds many datagrams), batched calls, and the sending end in `outlet`.
//!
//! All arrays are allocated once; pointers into them are written anew before each call.

mod outlet;

use super::options::{get, set};
use super::{
    assert_open, is_would_block, Batch, DatagramSocket, Message, Outlet, RawAddress, SendCounts, SendOutcome,
};
use crate::interfaces::Source;
use crate::{EngineStats, OsError};
use outlet::LinuxOutlet;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

/// Receive buffers of one call. Few and large: with receive offload one buffer is a burst of 64 KB, and the same hot
/// memory is used again by the next call (4 to 16 measured alike over loopback, 1 is half as fast).
const RECEIVE_BUFFERS: usize = 8;
/// A receive buffer: the largest coalesced datagram.
const RECEIVE_BYTES: usize = 1 << 16;
/// Any class but the default one.
const PROBE_OCTET: u8 = 8 << 2;
/// Room for the control messages of one received message: segment size, traffic class, overflow counter.
const CONTROL_WORDS: usize = 16;

/// See the module's documentation.
pub(super) struct LinuxSocket {
    socket: Arc<UdpSocket>,
    gro: bool,
    outlet: LinuxOutlet,
    receive: ReceiveArrays,
    overflows_seen: u32,
}

// SAFETY: the raw pointers inside point into this value's own heap memory, are written anew before each system call,
// and are not used between calls.
unsafe impl Send for LinuxSocket {}

struct ReceiveArrays {
    buffers: Box<[u8]>,
    names: Box<[RawAddress]>,
    controls: Box<[[u64; CONTROL_WORDS]]>,
    pieces: Box<[libc::iovec]>,
    messages: Box<[libc::mmsghdr]>,
}

/// Whether the system calls for several messages are there: the filter of a sandbox may refuse them. Of none, nothing else can fail.
pub(super) fn has_batched_calls(fd: RawFd) -> bool {
    let none = std::ptr::null_mut();
    // SAFETY: no message is named.
    unsafe {
        libc::recvmmsg(fd, none, 0, libc::MSG_DONTWAIT, std::ptr::null_mut()) == 0
            && libc::sendmmsg(fd, none, 0, libc::MSG_DONTWAIT) == 0
    }
}

impl LinuxSocket {
    /// Takes a bound, nonblocking socket, whose datagrams have the traffic class `octet` unless they say otherwise, and
    /// switches on what the kernel has. `of`: see [`super::BindOptions`].
    pub(super) fn new(socket: UdpSocket, octet: u8, of: (&[Source], Option<IpAddr>)) -> Self {
        let fd = socket.as_raw_fd();
        // Reading the option succeeds exactly where the kernel knows it.
        let gso = get(fd, libc::SOL_UDP, libc::UDP_SEGMENT).is_some();
        let gro = set(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
        set(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
        // An IPv6 socket may carry IPv4 too.
        let of_ipv6 = set(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1);
        let traffic_class = set(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1) || of_ipv6;
        let socket = Arc::new(socket);
        let outlet = LinuxOutlet::new(&socket, (gso, traffic_class), octet, of);
        Self { socket, gro, outlet, receive: ReceiveArrays::new(), overflows_seen: 0 }
    }

    /// Finds out, with one datagram over loopback, whether the kernel takes a traffic class with a datagram; without it
    /// all have the socket's.
    pub(super) fn probe_traffic_class(&mut self) {
        let Ok(socket) = UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0)) else { return };
        let Ok(to) = socket.local_addr() else { return };
        let mut probe = Self::new(socket, 0, (&[], None));
        let mut batch = Batch::new();
        // SAFETY: no payload.
        unsafe { batch.push((RawAddress::new(to), PROBE_OCTET), &[0], &[]) };
        probe.outlet.build(&batch, 0);
        // Control messages are looked at before anything that depends on the network.
        let refused = matches!(probe.outlet.send_messages(0), Err(libc::EINVAL | libc::ENOPROTOOPT));
        self.outlet.traffic_class &= probe.outlet.traffic_class && !refused;
    }

    /// Whether segmentation offload is in use.
    pub(super) fn has_gso(&self) -> bool {
        self.outlet.gso
    }

    /// Whether receive offload is in use.
    pub(super) fn has_gro(&self) -> bool {
        self.gro
    }

    /// Whether each datagram has the traffic class that it asks for.
    pub(super) fn has_traffic_class(&self) -> bool {
        self.outlet.traffic_class
    }
}

impl Outlet for LinuxSocket {
    fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn send(&mut self, batch: &mut Batch, counts: &mut SendCounts) -> SendOutcome {
        self.outlet.send(batch, counts)
    }
}

impl DatagramSocket for LinuxSocket {
    fn another_outlet(&self) -> Option<Box<dyn Outlet>> {
        Some(Box::new(self.outlet.another()))
    }

    fn receive(&mut self, stats: &mut EngineStats, handle: &mut dyn FnMut(Message<'_>)) -> bool {
        stats.receive_calls += 1;
        let arrays = &mut self.receive;
        arrays.prepare();
        // SAFETY: `prepare` pointed every message at live memory of `arrays` with its true length.
        let received = unsafe {
            libc::recvmmsg(
                self.socket.as_raw_fd(),
                arrays.messages.as_mut_ptr(),
                RECEIVE_BUFFERS as u32,
                libc::MSG_DONTWAIT,
                std::ptr::null_mut(),
            )
        };
        let Ok(received) = usize::try_from(received) else {
            // Nothing there, an interruption, or a pending error of an earlier send, which has been cleared by reading.
            let errno = OsError::last().0;
            assert_open(errno);
            return !is_would_block(errno);
        };
        let mut is_fresh = true;
        for index in 0..received {
            let message = &arrays.messages[index];
            let bytes = (message.msg_len as usize).min(RECEIVE_BYTES);
            let ancillary = Ancillary::read(&message.msg_hdr);
            let stride = ancillary.segment_bytes.filter(|s| *s > 0).unwrap_or(bytes).max(1);
            let datagrams = bytes.div_ceil(stride).max(1) as u64;
            stats.datagrams_received += datagrams;
            stats.bytes_received += bytes as u64;
            stats.ecn_marked += if ancillary.octet & 3 == 3 { datagrams } else { 0 };
            if let Some(overflows) = ancillary.overflows {
                stats.receive_overflows += u64::from(overflows.wrapping_sub(self.overflows_seen));
                self.overflows_seen = overflows;
            }
            let bytes = &mut arrays.buffers[index * RECEIVE_BYTES..][..bytes];
            let (from, octet) = (&arrays.names[index], ancillary.octet);
            handle(Message { bytes, stride, from, octet, is_fresh });
            is_fresh = false;
        }
        received == RECEIVE_BUFFERS
    }
}

impl ReceiveArrays {
    fn new() -> Self {
        // SAFETY: all-zero `iovec` and `mmsghdr` are valid values (null pointers, zero lengths).
        let (piece, message): (libc::iovec, libc::mmsghdr) = unsafe { std::mem::zeroed() };
        Self {
            buffers: vec![0; RECEIVE_BUFFERS * RECEIVE_BYTES].into(),
            names: vec![RawAddress::EMPTY; RECEIVE_BUFFERS].into(),
            controls: vec![[0; CONTROL_WORDS]; RECEIVE_BUFFERS].into(),
            pieces: vec![piece; RECEIVE_BUFFERS].into(),
            messages: vec![message; RECEIVE_BUFFERS].into(),
        }
    }

    /// Points every message at its buffer; the kernel overwrites the lengths at each call.
    fn prepare(&mut self) {
        for (index, buffer) in self.buffers.chunks_exact_mut(RECEIVE_BYTES).enumerate() {
            self.pieces[index] = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: RECEIVE_BYTES };
            let header = &mut self.messages[index].msg_hdr;
            header.msg_name = self.names[index].as_mut_ptr().cast();
            header.msg_namelen = super::address::RAW_ADDRESS_BYTES as u32;
            header.msg_iov = &mut self.pieces[index];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[index].as_mut_ptr().cast();
            header.msg_controllen = size_of::<[u64; CONTROL_WORDS]>();
            header.msg_flags = 0;
        }
    }
}

/// What came with a message besides its bytes.
#[derive(Default)]
struct Ancillary {
    segment_bytes: Option<usize>,
    octet: u8,
    overflows: Option<u32>,
}

impl Ancillary {
    fn read(header: &libc::msghdr) -> Self {
        let mut out = Self::default();
        // SAFETY: the kernel wrote a well-formed chain of control messages of `msg_controllen` bytes; the macros stay
        // inside it, and each value is read with the size that its type defines.
        unsafe {
            let mut control = libc::CMSG_FIRSTHDR(header);
            while !control.is_null() {
                let data = libc::CMSG_DATA(control);
                match ((*control).cmsg_level, (*control).cmsg_type) {
                    (libc::SOL_UDP, libc::UDP_GRO) => {
                        out.segment_bytes = usize::try_from(data.cast::<i32>().read_unaligned()).ok();
                    }
                    (libc::IPPROTO_IP, libc::IP_TOS) => out.octet = data.read(),
                    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                        out.octet = data.cast::<i32>().read_unaligned() as u8;
                    }
                    (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                        out.overflows = Some(data.cast::<u32>().read_unaligned());
                    }
                    _ => {}
                }
                control = libc::CMSG_NXTHDR(header, control);
            }
        }
        out
    }
}
