//! A thread beside the network thread that hands batches to the kernel.
//!
//! Half of the network thread's time goes into system calls that send: the kernel copies what it is given and takes it
//! through its layers, on some devices up to the receiver. Where cores are to spare, a thread of its own does that, and
//! seals what is sealed, while the network thread receives, adds, and fills the next batch.
//!
//! ```text
//!   NETWORK THREAD --batch, as a copy--> SENDING THREAD --> kernel
//!          ^--------empty batch, counts-------'
//! ```
//!
//! To wake a thread takes as long as to send a batch. So it looks for the next one for a while before it sleeps, and while
//! it sleeps only a batch of several kernel messages wakes it: where links are slow enough for one thread, so much does not
//! leave at once, and the network thread sends by itself. Beside a thread that looks it sends only what holds no data.
//!
//! Batches are copies of what they send, because nobody knows when they are sent, and tensors are given back meanwhile.
//! There are few, so that what the network thread decides is sent soon: with two on their way the socket counts as blocked.
//! One that a stuck socket does not take is dropped where others wait behind it ([`super::stuck`]).
//! The kernel gets datagrams in the order in which they were pushed.

use super::stuck::{any_open, Flow, Standstill};
use super::{Batch, Outlet, SendCounts, SendOutcome};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender, TryRecvError};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Batches beside those that are being filled: one is sent, one waits.
const SPARE: usize = 2;
/// A batch with so much data wakes the thread: two messages of the kernel, of which small datagrams make less than 64 KB each.
const WAKE_BYTES: usize = 96 << 10;
/// How long the thread looks for the next batch before it sleeps: about as long as it takes to wake it.
const LOOKING: Duration = Duration::from_micros(50);
/// How long it waits for room in the kernel's buffer before it looks whether it is to end.
const BLOCKED_WAIT: Duration = Duration::from_millis(5);

/// Wakes the network thread, if it sleeps.
pub(crate) type WakeUp = Box<dyn Fn() + Send>;

/// A batch on its way there or back.
struct Job {
    path: usize,
    batch: Batch,
    counts: SendCounts,
}

// SAFETY: a batch is not `Send` for its pointers into tensors; `hand_over` takes only batches that have none.
unsafe impl Send for Job {}

/// What both threads look at.
#[derive(Default)]
struct Signs {
    /// The network thread is to be woken when a batch comes back.
    is_awaited: AtomicBool,
    /// The thread sends, or looks for what to send.
    is_awake: AtomicBool,
    /// The thread ends without sending what the kernel does not take.
    is_closing: AtomicBool,
}

/// See the module's documentation: the network thread's end.
pub(crate) struct SendingThread {
    /// `None`: it is to end.
    jobs: Option<SyncSender<Job>>,
    done: Receiver<Job>,
    spare: Vec<Batch>,
    on_their_way: usize,
    /// Of batches that came back.
    counts: SendCounts,
    signs: Arc<Signs>,
    thread: Option<JoinHandle<()>>,
}

impl SendingThread {
    /// Starts it with an outlet for each path. `None`: the system starts no more threads.
    ///
    /// It has signals, urgency and timers of the thread that starts it.
    pub(super) fn start(
        outlets: Vec<Box<dyn Outlet>>,
        wake_up: WakeUp,
        standstill: Standstill,
    ) -> Option<Self> {
        // One for each path may be handed over at once.
        let batches = SPARE - 1 + outlets.len();
        let (jobs, to_do) = sync_channel(batches);
        let (finished, done) = sync_channel(batches);
        let signs = Arc::new(Signs::default());
        let outlets = outlets.into_iter().map(|outlet| (outlet, Flow::Open)).collect();
        let mut worker = Worker { outlets, to_do, finished, wake_up, standstill, signs: Arc::clone(&signs) };
        let builder = std::thread::Builder::new().name("gradwire-send".to_owned());
        let thread = builder.spawn(move || worker.run()).ok()?;
        Some(Self {
            jobs: Some(jobs),
            done,
            spare: (0..batches).map(|_| Batch::copying()).collect(),
            on_their_way: 0,
            counts: SendCounts::default(),
            signs,
            thread: Some(thread),
        })
    }

    /// Takes back what was sent; whether a batch of each of so many paths can be handed over.
    pub(crate) fn has_spare(&mut self, paths: usize) -> bool {
        loop {
            match self.done.try_recv() {
                Ok(job) => {
                    self.spare.push(job.batch);
                    self.counts.add(&job.counts);
                    self.on_their_way -= 1;
                }
                Err(TryRecvError::Empty) => return self.spare.len() >= paths,
                Err(TryRecvError::Disconnected) => panic!("the sending thread has ended"),
            }
        }
    }

    /// Whether it, and not the network thread, is to send a batch: others go before it, or it holds data enough.
    pub(crate) fn takes(&self, batch: &Batch) -> bool {
        let is_awake = self.signs.is_awake.load(Ordering::Relaxed);
        // Data of two cores may overtake each other in a device with several queues.
        let bytes = if is_awake { 1 } else { WAKE_BYTES };
        batch.copies() && (self.on_their_way > 0 || batch.data_bytes() >= bytes)
    }

    /// Takes a batch to send, in exchange for an empty one.
    ///
    /// # Panics
    /// Without a spare batch, or if this one does not copy ([`SendingThread::takes`]).
    pub(crate) fn hand_over(&mut self, path: usize, batch: &mut Batch) {
        assert!(batch.copies(), "a batch with pointers into tensors was handed to another thread");
        let empty = self.spare.pop().expect("a spare batch was asked for");
        let job = Job { path, batch: std::mem::replace(batch, empty), counts: SendCounts::default() };
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.try_send(job).is_ok());
        assert!(sent, "the sending thread has ended");
        self.on_their_way += 1;
    }

    /// What it has sent since the last call.
    pub(crate) fn take_counts(&mut self) -> SendCounts {
        std::mem::take(&mut self.counts)
    }

    /// The network thread is about to sleep until a batch of each of so many paths can be handed over: `false` if that is so by now. Else
    /// it will be woken.
    pub(crate) fn is_to_be_awaited(&mut self, paths: usize) -> bool {
        self.signs.is_awaited.store(true, Ordering::SeqCst);
        let awaited = !self.has_spare(paths);
        if !awaited {
            self.signs.is_awaited.store(false, Ordering::SeqCst);
        }
        awaited
    }
}

impl Drop for SendingThread {
    /// What is on its way is sent, unless the kernel's buffer is full.
    fn drop(&mut self) {
        self.signs.is_closing.store(true, Ordering::Relaxed);
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its panic has had its message on standard error, and ends the network thread too.
            _ = thread.join();
        }
    }
}

/// The thread's own end.
struct Worker {
    outlets: Vec<(Box<dyn Outlet>, Flow)>,
    standstill: Standstill,
    to_do: Receiver<Job>,
    finished: SyncSender<Job>,
    wake_up: WakeUp,
    signs: Arc<Signs>,
}

impl Worker {
    fn run(&mut self) {
        self.signs.is_awake.store(true, Ordering::Relaxed);
        while let Some(mut job) = self.next() {
            job.counts.seals_refused = job.batch.seal();
            self.send(&mut job);
            job.counts.batches_apart = 1;
            if self.finished.try_send(job).is_err() {
                return;
            }
            if self.signs.is_awaited.swap(false, Ordering::SeqCst) {
                (self.wake_up)();
            }
        }
    }

    /// `None`: there will be no more.
    fn next(&self) -> Option<Job> {
        match self.look() {
            Err(TryRecvError::Empty) => {
                self.signs.is_awake.store(false, Ordering::Relaxed);
                let job = self.to_do.recv();
                self.signs.is_awake.store(true, Ordering::Relaxed);
                job.ok()
            }
            looked => looked.ok(),
        }
    }

    fn look(&self) -> Result<Job, TryRecvError> {
        let since = Instant::now();
        loop {
            match self.to_do.try_recv() {
                Err(TryRecvError::Empty) if since.elapsed() < LOOKING => std::hint::spin_loop(),
                looked => return looked,
            }
        }
    }

    fn send(&mut self, job: &mut Job) {
        loop {
            let (outlet, flow) = &mut self.outlets[job.path];
            let waiting = job.batch.slots().len();
            if outlet.send(&mut job.batch, &mut job.counts) == SendOutcome::Sent {
                *flow = Flow::Open;
                return;
            }
            if self.signs.is_closing.load(Ordering::Relaxed) {
                return job.batch.clear();
            }
            let (fd, now) = (outlet.fd(), Instant::now());
            flow.on_full(now, job.batch.slots().len() < waiting);
            if self.gives_up(job.path, now) {
                job.counts.refuse(job.batch.slots().len(), 0);
                return job.batch.clear();
            }
            wait_writable(fd, BLOCKED_WAIT);
        }
    }

    /// Whether what is for a path is dropped: it is stuck, and batches of others wait behind it.
    fn gives_up(&mut self, path: usize, now: Instant) -> bool {
        let unsent = self.outlets.iter().map(|(outlet, _)| outlet.unsent_bytes());
        let (is_reached, flow) = (self.standstill.is_reached(unsent, now), self.outlets[path].1);
        let takes_nothing = flow.is_stuck() || is_reached && flow.is_overdue(now);
        if !takes_nothing {
            return false;
        }
        let others = self.outlets.iter_mut().enumerate().filter(|(place, _)| *place != path);
        let is_alone = !any_open(others.map(|(_, (outlet, flow))| (flow, outlet.fd())), now);
        if !is_alone {
            self.outlets[path].1 = Flow::Stuck(now);
        }
        !is_alone
    }
}

/// Whether a socket has room. Waits for it, but no longer than this.
pub(super) fn wait_writable(fd: RawFd, timeout: Duration) -> bool {
    let mut fd = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one live entry. An interruption or an error is as good as a timeout: sending is tried again.
    unsafe { libc::poll(&raw mut fd, 1, timeout.as_millis() as libc::c_int) };
    fd.revents & libc::POLLOUT != 0
}

/// What waits in the buffer of a socket, in the kernel's own measure; 0 where it does not say.
pub(super) fn unsent_bytes(fd: RawFd) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer, which is live.
    let failed = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) };
    usize::try_from(bytes).ok().filter(|_| failed == 0).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::RawAddress;
    use super::*;
    use std::sync::mpsc::{channel, Sender};

    /// An outlet that says what it was given, and does with each batch what it is told: `false`, the kernel's buffer is full.
    struct Told {
        taken: Sender<Vec<usize>>,
        orders: Receiver<bool>,
    }

    impl Outlet for Told {
        fn fd(&self) -> RawFd {
            // No file: waiting takes its time.
            -1
        }

        fn send(&mut self, batch: &mut Batch, counts: &mut SendCounts) -> SendOutcome {
            counts.calls += 1;
            // Without orders the test is over.
            match self.orders.recv() {
                Ok(false) => SendOutcome::Blocked,
                _ => {
                    _ = self.taken.send(batch.slots().iter().map(|slot| slot.bytes()).collect());
                    batch.clear();
                    SendOutcome::Sent
                }
            }
        }
    }

    struct Bench {
        sending: SendingThread,
        orders: Sender<bool>,
        taken: Receiver<Vec<usize>>,
        woken: Receiver<()>,
    }

    fn bench() -> Bench {
        let ((orders, ordered), (took, taken), (wake, woken)) = (channel(), channel(), channel());
        let outlet = Box::new(Told { taken: took, orders: ordered });
        let wake_up = Box::new(move || _ = wake.send(()));
        let sending = SendingThread::start(vec![outlet], wake_up, Standstill::new(&[])).expect("a thread");
        Bench { sending, orders, taken, woken }
    }

    /// A batch of one datagram of so many bytes, at least 24, of which the rest is data.
    fn batch(bytes: usize) -> Batch {
        let mut batch = Batch::copying();
        // SAFETY: it is copied.
        unsafe { batch.push((RawAddress::EMPTY, 0), &[1; 24], &vec![7; bytes - 24]) };
        batch
    }

    const PATIENCE: Duration = Duration::from_secs(30);

    #[test]
    fn control_is_sent_at_once_unless_batches_go_before_it() {
        let Bench { mut sending, orders, taken, .. } = bench();
        let (mut data, mut control) = (batch(1_000), batch(24));
        assert!(!sending.takes(&control) && !sending.takes(&Batch::new()));
        sending.hand_over(0, &mut data);
        assert!(data.is_empty() && sending.takes(&control), "in the order in which they were pushed");
        sending.hand_over(0, &mut control);
        (0..2).for_each(|_| orders.send(true).unwrap());
        assert_eq!(taken.recv_timeout(PATIENCE), Ok(vec![1_000]));
        assert_eq!(taken.recv_timeout(PATIENCE), Ok(vec![24]));
    }

    #[test]
    fn while_it_sleeps_only_several_messages_are_worth_waking_it() {
        let Bench { mut sending, orders, taken, .. } = bench();
        let mut several = Batch::copying();
        while several.data_bytes() < WAKE_BYTES {
            // SAFETY: it is copied.
            unsafe { several.push((RawAddress::EMPTY, 0), &[1; 24], &[7; 1_408]) };
        }
        // It is what it does last before it sleeps.
        sending.hand_over(0, &mut batch(1_000));
        orders.send(true).unwrap();
        taken.recv_timeout(PATIENCE).unwrap();
        while sending.on_their_way > 0 || sending.signs.is_awake.load(Ordering::Relaxed) {
            sending.has_spare(1);
            std::thread::yield_now();
        }
        let (large, control) = (batch(60_000), batch(24));
        assert!(!sending.takes(&large) && sending.takes(&several));
        sending.signs.is_awake.store(true, Ordering::Relaxed);
        assert!(sending.takes(&large) && !sending.takes(&control));
    }

    #[test]
    fn with_all_batches_on_their_way_it_has_none_to_spare_and_wakes_whoever_waits() {
        let Bench { mut sending, orders, woken, .. } = bench();
        (0..SPARE).for_each(|_| sending.hand_over(0, &mut batch(40_000)));
        assert!(!sending.has_spare(1) && sending.is_to_be_awaited(1));
        orders.send(true).unwrap();
        assert_eq!(woken.recv_timeout(PATIENCE), Ok(()));
        assert!(sending.has_spare(1) && !sending.is_to_be_awaited(1));
        orders.send(true).unwrap();
        while sending.on_their_way > 0 {
            sending.has_spare(1);
            std::thread::yield_now();
        }
        assert!(woken.try_recv().is_err(), "nobody waited for the second");
        let counts = SendCounts { calls: 2, batches_apart: 2, ..SendCounts::default() };
        assert_eq!((sending.take_counts(), sending.take_counts()), (counts, SendCounts::default()));
    }

    #[test]
    fn what_a_full_buffer_did_not_take_is_sent_again_and_ends_with_the_thread() {
        let Bench { mut sending, orders, taken, .. } = bench();
        sending.hand_over(0, &mut batch(40_000));
        [false, false, true].iter().for_each(|order| orders.send(*order).unwrap());
        assert_eq!(taken.recv_timeout(PATIENCE), Ok(vec![40_000]));
        sending.hand_over(0, &mut batch(50_000));
        orders.send(false).unwrap();
        let signs = Arc::clone(&sending.signs);
        let still_full = std::thread::spawn(move || {
            while !signs.is_closing.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            _ = orders.send(false);
        });
        drop(sending);
        still_full.join().expect("sends an order");
        assert!(taken.try_recv().is_err());
    }
}
