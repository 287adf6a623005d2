//! A socket among several whose device takes nothing any more.
//!
//! With a full buffer a kernel says that a link is busy, and nothing more is sent until it has room. But a device may stop for good
//! and keep its carrier: a switch pauses it, or its queue hangs. With several paths that must not end what goes over the others, so
//! what is for a socket that has taken nothing for a while is lost as on the way, and the transport finds out which path is bad.
//!
//! ```text
//!   OPEN --buffer full--> BLOCKED --standstill for 100 ms, another one has room--> STUCK
//!     ^---all was taken------'                                                       |
//!     '------------------------half of the buffer is free----------------------------'
//! ```
//!
//! One that is only slow must not lose anything. Paths may share a card, and there what one socket has handed over waits behind
//! what the others have: it takes nothing for as long as that takes, and then goes on. So with one card no socket is ever stuck,
//! and with several only when nothing has left any of them meanwhile ([`Standstill`]). To ask by which card a socket sends lost: the
//! kernel routes most of it, to each peer by another one.

use super::sending::wait_writable;
use crate::interfaces::Source;
use gradwire_core::PATHS_MAX;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A message of 64 KB takes half of that time at 10 Mbit/s: where a link is only slow, something is taken meanwhile. Peers miss a rank
/// that says nothing after many times as long.
const STUCK_AFTER: Duration = Duration::from_millis(100);
/// So often it is looked whether a stuck socket has room again.
const LOOK_AFTER: Duration = Duration::from_millis(10);

/// How a socket takes what it is given.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Flow {
    /// As it comes.
    #[default]
    Open,
    /// Its buffer is full, and has been taking nothing since.
    Blocked(Instant),
    /// For so long that what is for it is dropped; when it was last looked at.
    Stuck(Instant),
}

impl Flow {
    pub(super) fn is_blocked(self) -> bool {
        matches!(self, Self::Blocked(_))
    }

    pub(super) fn is_stuck(self) -> bool {
        matches!(self, Self::Stuck(_))
    }

    /// Its buffer was full before it had taken all; whether it had taken something.
    pub(super) fn on_full(&mut self, now: Instant, has_taken: bool) {
        match self {
            Self::Blocked(_) if !has_taken => {}
            Self::Stuck(_) => {}
            _ => *self = Self::Blocked(now),
        }
    }

    /// Whether it has been blocked for so long that it is stuck, if others are not.
    pub(super) fn is_overdue(self, now: Instant) -> bool {
        matches!(self, Self::Blocked(since) if now.duration_since(since) >= STUCK_AFTER)
    }

    /// How long until a blocked one is to be sent to again, whoever wakes meanwhile.
    pub(super) fn rest(self, now: Instant) -> Option<Duration> {
        let Self::Blocked(since) = self else { return None };
        Some(STUCK_AFTER.saturating_sub(now.duration_since(since)).max(LOOK_AFTER))
    }

    /// A stuck one is open again once its socket is writable.
    pub(super) fn look(&mut self, now: Instant, fd: RawFd) {
        if matches!(self, Self::Stuck(at) if now.duration_since(*at) >= LOOK_AFTER) {
            *self = if wait_writable(fd, Duration::ZERO) { Self::Open } else { Self::Stuck(now) };
        }
    }
}

/// Whether one of these is open and has room. Looks at those that are stuck.
pub(super) fn any_open<'f>(flows: impl Iterator<Item = (&'f mut Flow, RawFd)>, now: Instant) -> bool {
    flows.fold(false, |any, (flow, fd)| {
        flow.look(now, fd);
        any || *flow == Flow::Open && wait_writable(fd, Duration::ZERO)
    })
}

/// Whether anything leaves any of the sockets, while one of them is blocked and nothing is added to the others.
#[derive(Clone, Debug)]
pub(super) struct Standstill {
    /// Several cards are listed (`interface`), of which one may go on where another one does not: whether each carries a path is not asked.
    is_possible: bool,
    /// What waited in each socket's buffer when it was last looked at, bytes.
    unsent: [usize; PATHS_MAX as usize],
    /// When there was last less than before.
    left_at: Option<Instant>,
}

impl Standstill {
    /// For sockets that send from these local addresses.
    pub(super) fn new(sources: &[Source]) -> Self {
        let cards = || sources.iter().map(|source| source.interface).filter(|interface| *interface > 0);
        let is_possible = cards().max() != cards().min();
        Self { is_possible, unsent: [0; PATHS_MAX as usize], left_at: None }
    }

    /// Whether there may be one.
    pub(super) fn is_possible(&self) -> bool {
        self.is_possible
    }

    /// Whether nothing has left them for as long as it takes to be stuck, as far as was looked; so much waits in each of them.
    pub(super) fn is_reached(&mut self, unsent: impl Iterator<Item = usize>, now: Instant) -> bool {
        for (before, unsent) in self.unsent.iter_mut().zip(unsent) {
            if unsent < *before {
                self.left_at = Some(now);
            }
            *before = unsent;
        }
        self.is_possible && self.left_at.is_none_or(|at| now.duration_since(at) >= STUCK_AFTER)
    }
}

#[cfg(test)]
mod tests {
    use super::super::sending::{unsent_bytes, SendingThread};
    use super::super::{
        Batch, DatagramSocket, Message, Outlet, PathSockets, RawAddress, SendCounts, SendOutcome,
    };
    use super::*;
    use crate::EngineStats;
    use std::net::{Ipv4Addr, UdpSocket};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixDatagram;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::Arc;

    /// A device that stops while it has a carrier, which no device of this machine does when it is told to.
    #[derive(Clone)]
    struct Device {
        runs: Arc<AtomicBool>,
        sent: Arc<AtomicU64>,
        /// What it has still to send, of which a byte leaves each time that it is looked at.
        unsent: Arc<AtomicU64>,
        /// Always writable.
        socket: Arc<UdpSocket>,
    }

    impl Device {
        fn new(runs: bool) -> Self {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            Self {
                runs: Arc::new(runs.into()),
                sent: Arc::default(),
                unsent: Arc::default(),
                socket: socket.into(),
            }
        }

        fn sent(&self) -> u64 {
            self.sent.load(Ordering::Relaxed)
        }
    }

    impl Outlet for Device {
        fn fd(&self) -> RawFd {
            if self.runs.load(Ordering::Relaxed) {
                self.socket.as_raw_fd()
            } else {
                -1
            }
        }

        fn unsent_bytes(&self) -> usize {
            let less = |unsent: u64| Some(unsent.saturating_sub(1));
            self.unsent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).unwrap_or(0) as usize
        }

        fn send(&mut self, batch: &mut Batch, _: &mut SendCounts) -> SendOutcome {
            if !self.runs.load(Ordering::Relaxed) {
                return SendOutcome::Blocked;
            }
            self.sent.fetch_add(batch.slots().len() as u64, Ordering::Relaxed);
            batch.clear();
            SendOutcome::Sent
        }
    }

    impl DatagramSocket for Device {
        fn another_outlet(&self) -> Option<Box<dyn Outlet>> {
            None
        }

        fn receive(&mut self, _: &mut EngineStats, _: &mut dyn FnMut(Message<'_>)) -> bool {
            false
        }
    }

    /// Addresses, each on one of these interfaces.
    fn sources(interfaces: &[u32]) -> Vec<Source> {
        let of = |&interface: &u32| Source { address: Ipv4Addr::LOCALHOST.into(), bits: 8, interface };
        interfaces.iter().map(of).collect()
    }

    fn sockets(devices: &[Device], interfaces: &[u32]) -> PathSockets {
        let mut sockets =
            devices.iter().map(|device| -> Box<dyn DatagramSocket> { Box::new(device.clone()) });
        let first = sockets.next().unwrap();
        PathSockets::new(first, sockets.collect(), &self::sources(interfaces))
    }

    fn push(sockets: &mut PathSockets, path: usize) {
        // SAFETY: no payload.
        unsafe { sockets.push(path, (RawAddress::EMPTY, 0), &[1; 24], &[]) };
    }

    /// As the network thread does while it is blocked, for several times as long as it takes to be stuck; whether it still is.
    fn stays_blocked(sockets: &mut PathSockets) -> bool {
        for _ in 0..20 {
            sockets.send();
            if !sockets.is_blocked() {
                return false;
            }
            sockets.poll(-1, Some(STUCK_AFTER / 5));
        }
        true
    }

    #[test]
    fn what_is_for_a_stuck_socket_is_lost_while_the_others_send_and_until_it_has_room() {
        let devices = [Device::new(true), Device::new(false)];
        let mut sockets = sockets(&devices, &[2, 3]);
        [0, 1, 1, 1].into_iter().for_each(|path| push(&mut sockets, path));
        sockets.send();
        assert!(sockets.is_blocked(), "as with one path");
        assert!(!stays_blocked(&mut sockets));
        [1, 1, 0].into_iter().for_each(|path| push(&mut sockets, path));
        sockets.send();
        assert!(!sockets.is_blocked());
        assert_eq!((devices[0].sent(), devices[1].sent(), sockets.take_counts().refused), (2, 0, 5));
        devices[1].runs.store(true, Ordering::Relaxed);
        let deadline = Instant::now() + Duration::from_secs(30);
        while sockets.is_empty() {
            assert!(Instant::now() < deadline, "it is looked at now and then");
            push(&mut sockets, 1);
        }
        sockets.send();
        assert_eq!(devices[1].sent(), 1);
    }

    #[test]
    fn what_is_for_a_socket_that_shares_the_only_card_waits_however_long_that_is() {
        for interfaces in [&[][..], &[0, 2], &[2], &[2, 2]] {
            let devices = [Device::new(true), Device::new(false)];
            let mut sockets = sockets(&devices, interfaces);
            push(&mut sockets, 1);
            assert!(stays_blocked(&mut sockets), "{interfaces:?}");
            devices[1].runs.store(true, Ordering::Relaxed);
            assert!(!stays_blocked(&mut sockets));
            assert_eq!((devices[1].sent(), sockets.take_counts().refused), (1, 0), "{interfaces:?}");
        }
    }

    #[test]
    fn while_something_leaves_another_socket_a_blocked_one_may_wait_behind_it() {
        let devices = [Device::new(true), Device::new(true), Device::new(false)];
        devices[1].unsent.store(u64::MAX, Ordering::Relaxed);
        let mut sockets = sockets(&devices, &[2, 3]);
        push(&mut sockets, 2);
        assert!(stays_blocked(&mut sockets));
        devices[1].unsent.store(0, Ordering::Relaxed);
        assert!(!stays_blocked(&mut sockets));
        assert_eq!(sockets.take_counts().refused, 1);
    }

    #[test]
    fn sockets_of_which_none_has_room_wait_though_not_all_are_known_to_be_blocked() {
        let devices = [Device::new(false), Device::new(false)];
        let mut sockets = sockets(&devices, &[2, 3]);
        push(&mut sockets, 1);
        assert!(stays_blocked(&mut sockets));
    }

    #[test]
    fn what_waits_in_a_sockets_buffer_is_known() {
        // UDP over loopback is out of the sender's buffer at once.
        let (sender, receiver) = UnixDatagram::pair().unwrap();
        assert_eq!((unsent_bytes(sender.as_raw_fd()), unsent_bytes(-1)), (0, 0));
        sender.send(&[1; 1_000]).unwrap();
        assert!(unsent_bytes(sender.as_raw_fd()) >= 1_000);
        receiver.recv(&mut [0; 1_000]).unwrap();
        assert_eq!(unsent_bytes(sender.as_raw_fd()), 0);
    }

    #[test]
    fn sockets_that_are_all_blocked_wait_however_long_that_is() {
        for paths in [1, 2] {
            let devices: Vec<Device> = (0..paths).map(|_| Device::new(false)).collect();
            let mut sockets = sockets(&devices, &[2, 3]);
            (0..paths).for_each(|path| push(&mut sockets, path));
            assert!(stays_blocked(&mut sockets), "{paths}");
            devices[0].runs.store(true, Ordering::Relaxed);
            assert!(!stays_blocked(&mut sockets));
            // One that the other waited for has been waiting for long enough.
            assert_eq!((devices[0].sent(), sockets.take_counts().refused), (1, paths as u64 - 1));
        }
    }

    #[test]
    fn the_thread_that_sends_passes_a_stuck_socket_by() {
        let devices = [Device::new(true), Device::new(false)];
        let outlets = devices.iter().map(|device| -> Box<dyn Outlet> { Box::new(device.clone()) });
        let mut sending =
            SendingThread::start(outlets.collect(), Box::new(|| {}), Standstill::new(&sources(&[2, 3])))
                .expect("a thread");
        let deadline = Instant::now() + Duration::from_secs(30);
        let mut refused = 0;
        for turn in 1..=5 {
            for path in [1, 0] {
                let mut batch = Batch::copying();
                // SAFETY: it is copied.
                unsafe { batch.push((RawAddress::EMPTY, 0), &[1; 24], &[7; 1_000]) };
                while !sending.has_spare(2) {
                    assert!(Instant::now() < deadline, "in turn {turn}");
                    std::thread::yield_now();
                }
                sending.hand_over(path, &mut batch);
            }
        }
        while refused < 5 {
            assert!(Instant::now() < deadline, "{refused} were dropped");
            sending.has_spare(2);
            refused += sending.take_counts().refused;
        }
        drop(sending);
        assert_eq!((refused, devices[0].sent(), devices[1].sent()), (5, 5, 0));
    }
}
