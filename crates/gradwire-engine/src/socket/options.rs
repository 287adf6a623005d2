//! Binds the port and asks the kernel for buffers and offloads.

use super::plain::PlainSocket;
use super::DatagramSocket;
use crate::interfaces::Source;
use crate::{EngineError, Offload, OsError};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};

/// Receive buffer that is asked for. A burst of a full window from every peer must fit while this thread is not
/// scheduled: 16 MB hold 10 ms at 10 Gbit/s. Memory is only used when packets wait.
pub const RECEIVE_BUFFER_BYTES: i32 = 16 << 20;
/// Send buffer that is asked for: several batches, so that a shaped link keeps busy while the thread sleeps.
pub const SEND_BUFFER_BYTES: i32 = 4 << 20;

/// As far from a rank's port others of its host may have theirs, those of eight threads each.
const PORTS_NEAR: u16 = 512;
/// Of the kernel's 28,000 ports one in 28 is near; where it may choose among few (`ip_local_port_range`), one of those is better than none.
const TRIES: usize = 64;

/// What to bind.
#[derive(Clone, Debug)]
pub(crate) struct BindOptions {
    /// Local address; unspecified for all.
    pub(crate) address: IpAddr,
    /// With all bound, the local address of datagrams that have no source of their own and leave this host, as if it alone were bound;
    /// `None`, or without batched calls: as the kernel chooses.
    pub(crate) home: Option<IpAddr>,
    /// Port or 0.
    pub(crate) port: u16,
    /// What the kernel chooses is not near this port, where it has others.
    pub(crate) not_near: u16,
    /// Local addresses from which datagrams may leave through their interfaces ([`super::RawAddress::by_source`]).
    pub(crate) sources: Vec<Source>,
    /// Code point of datagrams that bring none of their own.
    pub(crate) dscp: u8,
    /// Kernel offloads.
    pub(crate) offload: Offload,
}

/// A bound socket and what the kernel granted.
pub(crate) struct Bound {
    /// The socket.
    pub(crate) socket: Box<dyn DatagramSocket>,
    /// Its port.
    pub(crate) port: u16,
    /// Granted receive buffer.
    pub(crate) receive_buffer_bytes: usize,
    /// Granted send buffer.
    pub(crate) send_buffer_bytes: usize,
    /// Segmentation offload.
    pub(crate) gso: bool,
    /// Receive offload.
    pub(crate) gro: bool,
    /// A traffic class for each datagram.
    pub(crate) traffic_class: bool,
    /// Batched system calls.
    pub(crate) batched_calls: bool,
}

/// Binds the port and probes the kernel's features.
pub(crate) fn bind(options: &BindOptions) -> Result<Bound, EngineError> {
    let (socket, port) = match options.port {
        0 => bind_away(options.address, options.not_near)?,
        port => bind_to(SocketAddr::new(options.address, port))?,
    };
    socket.set_nonblocking(true).map_err(io("making the UDP socket nonblocking"))?;
    let fd = socket.as_raw_fd();
    let receive_buffer_bytes =
        grow_buffer(fd, RECEIVE_BUFFER_BYTES, libc::SO_RCVBUF, force_option(libc::SO_RCVBUF));
    let send_buffer_bytes =
        grow_buffer(fd, SEND_BUFFER_BYTES, libc::SO_SNDBUF, force_option(libc::SO_SNDBUF));
    let marked = mark(fd, options);
    let bound = |socket, [gso, gro, traffic_class, batched_calls]: [bool; 4]| Bound {
        socket,
        port,
        receive_buffer_bytes,
        send_buffer_bytes,
        gso,
        gro,
        traffic_class: traffic_class && marked,
        batched_calls,
    };
    #[cfg(target_os = "linux")]
    if options.offload == Offload::Auto && super::linux::has_batched_calls(fd) {
        let of = (&options.sources[..], options.home);
        let mut socket = super::linux::LinuxSocket::new(socket, options.dscp << 2, of);
        socket.probe_traffic_class();
        let features = [socket.has_gso(), socket.has_gro(), socket.has_traffic_class(), true];
        return Ok(bound(Box::new(socket), features));
    }
    Ok(bound(Box::new(PlainSocket::new(socket)), [false; 4]))
}

/// A descriptor, and what it stands for: once it is closed its number is given to something else.
///
/// Descriptors that are no files (events, epoll, timers) share one inode: another one of these is taken for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    fd: RawFd,
    /// Device and inode.
    identity: (u64, u64),
}

impl Descriptor {
    /// Of an open one.
    pub(crate) fn of(fd: RawFd) -> Option<Self> {
        // SAFETY: an all-zero `stat` is valid.
        let mut stat: libc::stat = unsafe { std::mem::zeroed() };
        // SAFETY: `stat` is live.
        let failed = unsafe { libc::fstat(fd, &mut stat) };
        (failed == 0).then_some(Self { fd, identity: (stat.st_dev as u64, stat.st_ino as u64) })
    }

    /// Whether its number stands for the same still, and not for nothing or another file.
    pub(crate) fn is_there(&self) -> bool {
        Self::of(self.fd) == Some(*self)
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd
    }

    /// Closes it if its number stands for the same still. Nobody may use it any more.
    pub(crate) fn close(&self) {
        if self.is_there() {
            // SAFETY: it stands for what it was made of, which is its owner's.
            unsafe { libc::close(self.fd) };
        }
    }
}

fn bind_to(address: SocketAddr) -> Result<(UdpSocket, u16), EngineError> {
    let socket = UdpSocket::bind(address).map_err(|error| bind_error(&error, address))?;
    let port = socket.local_addr().map_err(io("reading the bound address"))?.port();
    Ok((socket, port))
}

/// A port that the kernel chooses, if it can be one that no other process of this job may be about to bind: its ranks' ports on a host follow each other,
/// and those of their further threads lie behind.
fn bind_away(address: IpAddr, not_near: u16) -> Result<(UdpSocket, u16), EngineError> {
    let mut found = bind_to(SocketAddr::new(address, 0))?;
    // Held until the end, so that none is chosen twice.
    let mut near = Vec::new();
    while found.1.abs_diff(not_near) < PORTS_NEAR && near.len() < TRIES {
        let Ok(next) = bind_to(SocketAddr::new(address, 0)) else { break };
        near.push(std::mem::replace(&mut found, next));
    }
    Ok(found)
}

fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> EngineError {
    move |error| EngineError::Io { what, source: os_error(&error) }
}

fn os_error(error: &std::io::Error) -> OsError {
    OsError(error.raw_os_error().unwrap_or(0))
}

fn bind_error(error: &std::io::Error, address: SocketAddr) -> EngineError {
    match error.raw_os_error() {
        Some(libc::EADDRINUSE) => EngineError::PortInUse { port: address.port() },
        Some(libc::EADDRNOTAVAIL) => EngineError::AddressUnavailable { address: address.ip().to_string() },
        Some(libc::EACCES | libc::EPERM) => {
            EngineError::Permission { what: format!("binding UDP port {}", address.port()) }
        }
        _ => EngineError::Io { what: "binding the UDP port", source: os_error(error) },
    }
}

#[cfg(target_os = "linux")]
fn force_option(option: i32) -> Option<i32> {
    Some(if option == libc::SO_RCVBUF { libc::SO_RCVBUFFORCE } else { libc::SO_SNDBUFFORCE })
}

#[cfg(not(target_os = "linux"))]
fn force_option(_option: i32) -> Option<i32> {
    None
}

/// Asks for `bytes` (privileged form first, which ignores the system's limit) and returns what was granted.
fn grow_buffer(fd: RawFd, bytes: i32, option: i32, force: Option<i32>) -> usize {
    let forced = force.is_some_and(|force| set(fd, libc::SOL_SOCKET, force, bytes));
    if !forced {
        set(fd, libc::SOL_SOCKET, option, bytes);
    }
    get(fd, libc::SOL_SOCKET, option).and_then(|granted| usize::try_from(granted).ok()).unwrap_or(0)
}

/// Code point, and no fragmentation: a datagram that does not fit is lost instead, and the hello finds out. What fits the device is sent whatever
/// ICMP says of the way (`PROBE`): anybody can write such a message, and `DO` would refuse all full datagrams for ten minutes after it. `false` when
/// the kernel refuses the code point; everything is sent all the same.
fn mark(fd: RawFd, options: &BindOptions) -> bool {
    let traffic_class = i32::from(options.dscp) << 2;
    if options.address.is_ipv6() {
        #[cfg(target_os = "linux")]
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE);
        set(fd, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, traffic_class)
    } else {
        #[cfg(target_os = "linux")]
        set(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE);
        set(fd, libc::IPPROTO_IP, libc::IP_TOS, traffic_class)
    }
}

/// Sets an integer option; `false` when the kernel refuses.
pub(super) fn set(fd: RawFd, level: i32, option: i32, value: i32) -> bool {
    let pointer = std::ptr::from_ref(&value).cast();
    // SAFETY: `pointer` is a live integer of the length that is passed.
    unsafe { libc::setsockopt(fd, level, option, pointer, size_of::<i32>() as u32) == 0 }
}

/// Reads an integer option.
pub(super) fn get(fd: RawFd, level: i32, option: i32) -> Option<i32> {
    let mut value = 0_i32;
    let mut bytes = size_of::<i32>() as u32;
    let pointer = std::ptr::from_mut(&mut value).cast();
    // SAFETY: `pointer` is a live integer of the length that is passed.
    let failed = unsafe { libc::getsockopt(fd, level, option, pointer, &mut bytes) };
    (failed == 0).then_some(value)
}
