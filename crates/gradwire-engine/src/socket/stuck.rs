//! A socket among several whose device takes nothing any more.
//!
//! With a full buffer a kernel says that a link is busy, and nothing more is sent until it has room. But a device may stop for good
//! and keep its carrier: a switch pauses it, or its queue hangs. With several paths that must not end what goes over the others, so
//! what is for a socket that has taken nothing for a while is lost as on the way, and the transport finds out which path is bad.
//!
//! ```text
//!   OPEN --buffer full--> BLOCKED --nothing taken for 100 ms, another one open--> STUCK
//!     ^---all was taken------'                                                      |
//!     '------------------------half of the buffer is free---------------------------'
//! ```

use super::sending::wait_writable;
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

/// Whether one of these is open, as far as is known. Looks at those that are stuck.
pub(super) fn any_open<'f>(flows: impl Iterator<Item = (&'f mut Flow, RawFd)>, now: Instant) -> bool {
    flows.fold(false, |any, (flow, fd)| {
        flow.look(now, fd);
        any || *flow == Flow::Open
    })
}

#[cfg(test)]
mod tests {
    use super::super::sending::SendingThread;
    use super::super::{
        Batch, DatagramSocket, Message, Outlet, PathSockets, RawAddress, SendCounts, SendOutcome,
    };
    use super::*;
    use crate::EngineStats;
    use std::net::{Ipv4Addr, UdpSocket};
    use std::os::fd::AsRawFd;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::sync::Arc;

    /// A device that stops while it has a carrier, which no device of this machine does when it is told to.
    #[derive(Clone)]
    struct Device {
        runs: Arc<AtomicBool>,
        sent: Arc<AtomicU64>,
        /// Always writable.
        socket: Arc<UdpSocket>,
    }

    impl Device {
        fn new(runs: bool) -> Self {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            Self { runs: Arc::new(runs.into()), sent: Arc::default(), socket: socket.into() }
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

    fn sockets(devices: &[Device]) -> PathSockets {
        let mut sockets =
            devices.iter().map(|device| -> Box<dyn DatagramSocket> { Box::new(device.clone()) });
        let first = sockets.next().unwrap();
        PathSockets::new(first, sockets.collect())
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
        let mut sockets = sockets(&devices);
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
    fn sockets_that_are_all_blocked_wait_however_long_that_is() {
        for paths in [1, 2] {
            let devices: Vec<Device> = (0..paths).map(|_| Device::new(false)).collect();
            let mut sockets = sockets(&devices);
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
        let mut sending = SendingThread::start(outlets.collect(), Box::new(|| {})).expect("a thread");
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
