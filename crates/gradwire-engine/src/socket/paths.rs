//! The sockets of all paths, each with the datagrams that wait for it.
//!
//! Switches choose among equal ways by a hash over addresses and ports, so each path sends from a socket of its own, and
//! all paths end at the one published port. What goes over a path is collected in that path's batch: datagrams that
//! alternate between paths still reach the kernel as one run for each path, and segmentation offload joins them. The
//! price of P paths is P system calls for a burst instead of one, each with a P-th of the segments.
//!
//! While a socket is blocked nothing is added for any path, but no longer than until it counts as stuck ([`super::stuck`]).

use super::sending::{SendingThread, WakeUp};
use super::stuck::{any_open, Flow, Standstill};
use super::{
    assert_open, bind, Batch, BindOptions, Bound, DatagramSocket, Message, Outlet, RawAddress, SendCounts,
    SendOutcome, SharedSeal,
};
use crate::interfaces::Source;
use crate::{EngineError, EngineStats, OsError};
use gradwire_core::{TransmitRun, PATHS_MAX};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Calls for what has arrived before anything is sent, while each is full. What came together is answered together, in fuller messages and fewer
/// acknowledgements; with more of them the first of what came are out of the caches again when they are sent on, and their senders wait.
const CALLS_AT_ONCE: usize = 2;
/// A busy thread looks into the sockets of the further paths once in so many turns.
const OTHERS_EVERY: u32 = 64;

/// One path.
struct PathSocket {
    socket: BoundSocket,
    batch: Batch,
    flow: Flow,
    /// Something may have come to it.
    readable: bool,
}

/// See the module's documentation. Path 0 is the published port.
pub(crate) struct PathSockets {
    paths: Vec<PathSocket>,
    /// Sends large batches, where it was started.
    sending: Option<SendingThread>,
    standstill: Standstill,
    /// What was sent since it was last told.
    counts: SendCounts,
    /// Calls of `receive`.
    turn: u32,
}

/// A socket as it moves to the network thread.
pub(crate) type BoundSocket = Box<dyn DatagramSocket>;

/// The sockets of all paths.
pub(crate) struct BoundPaths {
    /// The published port.
    pub(crate) first: Bound,
    /// The sockets of the further paths.
    pub(crate) further: Vec<BoundSocket>,
    /// Source port of each path.
    pub(crate) ports: Vec<u16>,
}

impl PathSockets {
    /// Binds the published port and for each further path an ephemeral one. None is bound to an interface: which of
    /// them leads to a peer shows when it has answered ([`crate::ways`]).
    pub(crate) fn bind(options: &BindOptions, paths: u8) -> Result<BoundPaths, EngineError> {
        let first = bind(options)?;
        let (mut sockets, mut ports) = (Vec::new(), vec![first.port]);
        for _ in 1..paths.clamp(1, PATHS_MAX) {
            let bound = bind(&BindOptions { port: 0, ..options.clone() })?;
            ports.push(bound.port);
            sockets.push(bound.socket);
        }
        Ok(BoundPaths { first, further: sockets, ports })
    }

    /// On the network thread: batches point into tensors. `sources` are the local addresses from which they send.
    pub(crate) fn new(first: BoundSocket, further: Vec<BoundSocket>, sources: &[Source]) -> Self {
        let paths = std::iter::once(first).chain(further).map(PathSocket::new).collect();
        let standstill = Standstill::new(sources);
        Self { paths, sending: None, standstill, counts: SendCounts::default(), turn: 0 }
    }

    /// From now on a thread of its own sends what is large, where the sockets are of that form and the system starts one; it calls
    /// `wake_up` when this thread waits for it. Whether it does.
    ///
    /// # Panics
    /// While datagrams wait.
    pub(crate) fn send_apart(&mut self, wake_up: WakeUp) -> bool {
        assert!(self.is_empty(), "datagrams wait in batches that do not copy");
        let outlets = self.paths.iter().map(|path| path.socket.another_outlet());
        let Some(outlets) = outlets.collect::<Option<Vec<Box<dyn Outlet>>>>() else { return false };
        self.sending = SendingThread::start(outlets, wake_up, self.standstill.clone());
        if self.sending.is_some() {
            self.paths.iter_mut().for_each(|path| path.batch = Batch::copying());
        }
        self.sending.is_some()
    }

    /// Whether a datagram of any size fits, whatever its path.
    pub(crate) fn has_room(&self) -> bool {
        self.paths.iter().all(|path| path.batch.has_room())
    }

    /// How many datagrams of `bytes` bytes fit, whatever their path, `most` at most.
    pub(crate) fn room_for(&self, bytes: usize, most: usize) -> usize {
        self.paths.iter().map(|path| path.batch.room_for(bytes, most)).min().unwrap_or(0)
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.paths.iter().all(|path| path.batch.is_empty())
    }

    /// Whether a kernel buffer is full, or all batches are on their way: nothing may be added until [`PathSockets::send`] has succeeded.
    pub(crate) fn is_blocked(&mut self) -> bool {
        self.paths.iter().any(|path| path.flow.is_blocked()) || !self.has_spare()
    }

    /// Whether it is blocked still, for the thread that is about to sleep: from now on it will be woken when the sending thread has room
    /// again; the kernel's buffer must be polled.
    pub(crate) fn stays_blocked(&mut self) -> bool {
        let paths = self.paths.len();
        let awaits = self.sending.as_mut().is_some_and(|sending| sending.is_to_be_awaited(paths));
        awaits || self.paths.iter().any(|path| path.flow.is_blocked())
    }

    fn has_spare(&mut self) -> bool {
        let paths = self.paths.len();
        self.sending.as_mut().is_none_or(|sending| sending.has_spare(paths))
    }

    /// Takes a datagram for a path (one that does not exist is path 0), with its destination and traffic class octet.
    ///
    /// # Panics
    /// Without room ([`PathSockets::has_room`]).
    ///
    /// # Safety
    /// The bytes of `payload` must stay valid until [`PathSockets::send`], which must succeed, since it is only called where nothing is blocked.
    pub(crate) unsafe fn push(&mut self, path: usize, to: (RawAddress, u8), head: &[u8], payload: &[u8]) {
        let Some(batch) = self.batch(path, 1) else { return };
        // SAFETY: `send` hands the batch to the kernel or copies what is left of it.
        unsafe { batch.push(to, head, payload) };
    }

    /// The same for each packet of a run; see [`Batch::push_run`].
    ///
    /// # Panics
    /// Without room for all ([`PathSockets::room_for`]).
    ///
    /// # Safety
    /// As for [`PathSockets::push`].
    pub(crate) unsafe fn push_run(
        &mut self,
        path: usize,
        to: (RawAddress, u8),
        run: &TransmitRun,
        payload: &[u8],
    ) {
        let Some(batch) = self.batch(path, run.count) else { return };
        // SAFETY: as in `push`.
        unsafe { batch.push_run(to, run, payload) };
    }

    /// The same for a datagram that is sealed; see [`Batch::push_sealed`].
    ///
    /// # Panics
    /// Without room ([`PathSockets::has_room`]).
    pub(crate) fn push_sealed(
        &mut self,
        path: usize,
        to: (RawAddress, u8),
        (head, payload): (&[u8], &[u8]),
        seal: &SharedSeal,
    ) {
        let Some(batch) = self.batch(path, 1) else { return };
        batch.push_sealed(to, head, payload, seal);
    }

    /// The same for each packet of a run; see [`Batch::push_sealed_run`].
    ///
    /// # Panics
    /// Without room for all ([`PathSockets::room_for`]).
    pub(crate) fn push_sealed_run(
        &mut self,
        path: usize,
        to: (RawAddress, u8),
        (run, payload): (&TransmitRun, &[u8]),
        seal: &SharedSeal,
    ) {
        let Some(batch) = self.batch(path, run.count) else { return };
        batch.push_sealed_run(to, run, payload, seal);
    }

    /// For so many datagrams of a path; `None`: its socket is stuck, and they are lost.
    fn batch(&mut self, path: usize, datagrams: usize) -> Option<&mut Batch> {
        let path = if path < self.paths.len() { path } else { 0 };
        let path = &mut self.paths[path];
        if path.flow.is_stuck() {
            path.flow.look(Instant::now(), path.socket.fd());
        }
        if path.flow.is_stuck() {
            self.counts.refuse(datagrams, 0);
            return None;
        }
        Some(&mut path.batch)
    }

    /// Datagrams that wait for a path.
    pub(crate) fn waiting(&self, path: usize) -> usize {
        self.paths.get(path).map_or(0, |path| path.batch.slots().len())
    }

    /// The last datagram of a path may leave behind those that follow.
    pub(crate) fn let_last_follow(&mut self, path: usize) {
        if let Some(path) = self.paths.get_mut(path) {
            path.batch.let_last_follow();
        }
    }

    /// Hands over everything; afterwards no batch holds a pointer into a tensor.
    pub(crate) fn send(&mut self) {
        if !self.has_spare() {
            return;
        }
        for (place, path) in self.paths.iter_mut().enumerate().filter(|(_, path)| !path.batch.is_empty()) {
            match &mut self.sending {
                Some(sending) if sending.takes(&path.batch) => {
                    sending.hand_over(place, &mut path.batch);
                    path.flow = Flow::Open;
                }
                _ => {
                    self.counts.seals_refused += path.batch.seal();
                    let waiting = path.batch.slots().len();
                    match path.socket.send(&mut path.batch, &mut self.counts) {
                        SendOutcome::Sent => path.flow = Flow::Open,
                        SendOutcome::Blocked => {
                            path.flow.on_full(Instant::now(), path.batch.slots().len() < waiting);
                        }
                    }
                }
            }
        }
        self.give_up_stuck();
    }

    /// Drops what waits for sockets that are stuck, if there is another one.
    fn give_up_stuck(&mut self) {
        if !self.may_be_stuck() {
            return;
        }
        let now = Instant::now();
        let is_reached =
            self.standstill.is_reached(self.paths.iter().map(|path| path.socket.unsent_bytes()), now);
        if !is_reached || !self.paths.iter().any(|path| path.flow.is_overdue(now)) {
            return;
        }
        if !any_open(self.paths.iter_mut().map(|path| (&mut path.flow, path.socket.fd())), now) {
            return;
        }
        for path in self.paths.iter_mut().filter(|path| path.flow.is_overdue(now)) {
            path.flow = Flow::Stuck(now);
            self.counts.refuse(path.batch.slots().len(), 0);
            path.batch.clear();
        }
    }

    /// Whether one of several is blocked, and not all for the same cause.
    fn may_be_stuck(&self) -> bool {
        self.paths.len() > 1
            && self.standstill.is_possible()
            && self.paths.iter().any(|path| path.flow.is_blocked())
    }

    /// What was sent since the last call.
    pub(crate) fn take_counts(&mut self) -> SendCounts {
        // Takes back what has been sent by now.
        self.has_spare();
        let mut counts = std::mem::take(&mut self.counts);
        if let Some(sending) = &mut self.sending {
            counts.add(&sending.take_counts());
        }
        counts
    }

    /// Hands out what has arrived, a bounded amount. `true`: more may be waiting.
    pub(crate) fn receive(&mut self, stats: &mut EngineStats, handle: &mut dyn FnMut(Message<'_>)) -> bool {
        // Peers send to the published port. What comes to another one is an answer that some box on the way has sent to
        // the port it saw; it is looked for when the kernel says so, and now and then.
        self.turn = self.turn.wrapping_add(1);
        let look = self.turn % OTHERS_EVERY == 0;
        let main = &mut self.paths[0].socket;
        let mut more = (0..CALLS_AT_ONCE).all(|_| main.receive(stats, handle));
        for path in self.paths[1..].iter_mut().filter(|path| look || path.readable) {
            path.readable = path.socket.receive(stats, handle);
            more |= path.readable;
        }
        more
    }

    /// Waits until a socket is readable (or writable, if it is blocked), `wake` is readable, or `timeout` has passed, or for as long as a
    /// blocked one among several has until it is stuck.
    /// Whether `wake` is readable.
    ///
    /// # Panics
    /// If one of them is closed.
    pub(crate) fn poll(&mut self, wake: RawFd, timeout: Option<Duration>) -> bool {
        let none = libc::pollfd { fd: -1, events: 0, revents: 0 };
        let mut fds = [none; PATHS_MAX as usize + 1];
        fds[0] = libc::pollfd { fd: wake, events: libc::POLLIN, revents: 0 };
        // What is blocked for want of batches as well cannot be sent yet, however writable.
        let has_spare = self.has_spare();
        for (slot, path) in fds[1..].iter_mut().zip(&self.paths) {
            let events =
                if path.flow.is_blocked() && has_spare { libc::POLLIN | libc::POLLOUT } else { libc::POLLIN };
            *slot = libc::pollfd { fd: path.socket.fd(), events, revents: 0 };
        }
        let timeout = timeout.into_iter().chain(self.rest()).min();
        wait(&mut fds[..=self.paths.len()], timeout);
        if fds.iter().any(|slot| slot.revents & libc::POLLNVAL != 0) {
            assert_open(libc::EBADF);
        }
        for (path, slot) in self.paths.iter_mut().zip(&fds[1..]) {
            path.readable = slot.revents & !libc::POLLOUT != 0;
        }
        fds[0].revents != 0
    }

    /// How long until a blocked socket among several is to be looked at again.
    fn rest(&self) -> Option<Duration> {
        if !self.may_be_stuck() {
            return None;
        }
        let now = Instant::now();
        self.paths.iter().filter_map(|path| path.flow.rest(now)).min()
    }
}

/// Until one of them is ready, or for the time. Interruptions just make a turn without work.
///
/// # Panics
/// Where the kernel, or the filter of a sandbox, has no call that waits: the thread would never sleep.
fn wait(fds: &mut [libc::pollfd], timeout: Option<Duration>) {
    let is_refused = |outcome: libc::c_int| {
        outcome < 0 && matches!(OsError::last().0, libc::ENOSYS | libc::EPERM | libc::EACCES)
    };
    let exact = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let exact = exact.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: the array and the time are live, no signal mask is passed.
    if !is_refused(unsafe { libc::ppoll(fds.as_mut_ptr(), count, exact, std::ptr::null()) }) {
        return;
    }
    // Rounded up, or the last part of a millisecond would be waited for without sleep.
    let round =
        |timeout: Duration| timeout.as_micros().div_ceil(1_000).try_into().unwrap_or(libc::c_int::MAX);
    // SAFETY: the array is live.
    let outcome = unsafe { libc::poll(fds.as_mut_ptr(), count, timeout.map_or(-1, round)) };
    assert!(!is_refused(outcome), "a sandbox refuses ppoll and poll: let its filter allow one of them");
}

impl PathSocket {
    fn new(socket: BoundSocket) -> Self {
        Self { socket, batch: Batch::new(), flow: Flow::Open, readable: false }
    }
}
