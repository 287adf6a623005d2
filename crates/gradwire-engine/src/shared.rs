//! What the callers' threads and the network thread share: commands one way, completions the other.

use crate::group::GroupSetup;
use crate::handle::lock;
use crate::in_flight::InFlight;
use crate::rendezvous::Local;
use crate::routes::ConnectionIds;
use crate::socket::{assert_open, Descriptor};
use crate::succession::Before;
use crate::{
    Completions, EngineError, EngineStats, Features, GroupStats, JoinError, OsError, Timeline, WatchStats,
};
use gradwire_collectives::{OpError, Request, Verdict};
use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Mutex;
use std::time::Instant;

/// Names a group inside its engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct GroupKey(pub(crate) u64);

/// A peer that did not answer.
pub(crate) struct Unanswered {
    pub(crate) rank: u32,
    /// It answered small datagrams.
    pub(crate) answers_small: bool,
    pub(crate) tried: Vec<SocketAddr>,
}

/// What a caller asks of the network thread.
pub(crate) enum Command {
    /// Connect a group; answered when every peer has answered, or when the group has failed.
    Join { setup: Box<GroupSetup>, connected: Sender<Result<(), OpError>> },
    /// Which peers of a group have not answered yet; the group goes on until its handle is dropped.
    Unanswered { group: GroupKey, missing: Sender<Vec<Unanswered>> },
    /// Start a collective.
    Submit { group: GroupKey, request: Box<(Request, Before)>, in_flight: InFlight },
    /// Fail as another group of this rank's has, of which it has parts or which has parts of it.
    Adopt { group: GroupKey, verdict: Box<Verdict> },
    /// A rank has published this to join a group that goes on without lost ones; answered with what it needs to know.
    Admit { group: GroupKey, record: String, admitted: Sender<Result<String, JoinError>> },
    /// Leave a group; answered when nothing more has to be said.
    Leave { group: GroupKey, left: Option<Sender<()>> },
    /// Answered when every worker has left the group of a dedicated server, or when it has failed. The latest asker counts.
    AwaitWorkers { group: GroupKey, ended: Sender<Result<(), OpError>> },
    /// Counters of a group.
    GroupStats { group: GroupKey, stats: Sender<Option<GroupStats>> },
    /// Who is waited for in a group.
    Watch { group: GroupKey, watch: Sender<Option<WatchStats>> },
    /// The latest collectives of a group.
    Timeline { group: GroupKey, calls: usize, timeline: Sender<Option<Timeline>> },
    /// Counters of the engine.
    EngineStats { stats: Sender<EngineStats> },
    /// Leave every group and end the thread.
    Stop,
    /// End the thread at once, as if the process had been killed.
    Crash,
}

/// See the module's documentation.
pub(crate) struct Shared {
    /// Process that started the engine.
    parent: u32,
    /// What the clock of the network thread counts from.
    pub(crate) origin: Instant,
    inbox: Mutex<Inbox>,
    doorbell: Doorbell,
    next_id: AtomicU64,
    /// Queue of ended operations.
    pub(crate) completions: Completions,
    /// Connection ids in use.
    pub(crate) ids: Mutex<ConnectionIds>,
    /// What goes into records.
    pub(crate) local: Local,
    /// What the kernel granted.
    pub(crate) features: Features,
    /// Of its sockets, which the network thread owns.
    descriptors: Vec<Descriptor>,
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Command>,
    stopped: bool,
    cause: Option<String>,
}

impl Shared {
    pub(crate) fn new(
        local: Local,
        (features, descriptors): (Features, Vec<Descriptor>),
        (origin, completions): (Instant, Completions),
    ) -> Result<Self, EngineError> {
        Ok(Self {
            parent: std::process::id(),
            origin,
            inbox: Mutex::default(),
            doorbell: Doorbell::new()?,
            next_id: AtomicU64::new(1),
            completions,
            ids: Mutex::default(),
            local,
            features,
            descriptors,
        })
    }

    /// A number that was not given out before.
    pub(crate) fn next_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Refuses a forked child. Must come before any lock: the fork may have copied a held one.
    pub(crate) fn check_process(&self) -> Result<(), EngineError> {
        let child = std::process::id();
        if child == self.parent {
            return Ok(());
        }
        Err(EngineError::Forked { parent: self.parent, child })
    }

    /// Whether nobody has closed the sockets behind the engine's back.
    pub(crate) fn has_its_descriptors(&self) -> bool {
        self.descriptors.iter().all(Descriptor::is_there)
    }

    /// In a forked child: closes what it has inherited of the sockets. Else nothing. Takes no lock.
    pub(crate) fn let_go_in_child(&self) {
        if self.check_process().is_err() {
            // Only threads of the parent use them, so that nothing closes the numbers once more.
            self.descriptors.iter().for_each(Descriptor::close);
        }
    }

    /// Hands a command to the network thread.
    pub(crate) fn send(&self, command: Command) -> Result<(), EngineError> {
        self.check_process()?;
        let mut inbox = lock(&self.inbox);
        if inbox.stopped {
            return Err(EngineError::Stopped { cause: inbox.cause.clone() });
        }
        inbox.commands.push(command);
        drop(inbox);
        if self.doorbell.ring() {
            Ok(())
        } else {
            // It lies where nobody may look again, and ends with the engine.
            Err(EngineError::Io {
                what:
                    "waking the network thread, whose event descriptor something in this process has closed",
                source: OsError(libc::EBADF),
            })
        }
    }

    /// Whether its network thread takes commands.
    pub(crate) fn is_running(&self) -> bool {
        !lock(&self.inbox).stopped
    }

    /// Why the engine no longer answers.
    pub(crate) fn stopped_error(&self) -> EngineError {
        EngineError::Stopped { cause: lock(&self.inbox).cause.clone() }
    }

    /// Network thread: swaps the waiting commands into the empty `commands`.
    pub(crate) fn take_commands(&self, commands: &mut Vec<Command>) {
        if self.doorbell.answer() {
            std::mem::swap(&mut lock(&self.inbox).commands, commands);
        }
    }

    /// Network thread: no command will be taken any more; returns those that nobody has looked at.
    pub(crate) fn close(&self, cause: Option<String>) -> Vec<Command> {
        let mut inbox = lock(&self.inbox);
        inbox.stopped = true;
        inbox.cause = cause;
        std::mem::take(&mut inbox.commands)
    }

    /// What the network thread sleeps beside.
    pub(crate) fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }
}

/// Wakes the network thread for a command, and costs a system call only when it sleeps.
pub(crate) struct Doorbell {
    has_commands: AtomicBool,
    asleep: AtomicBool,
    wake: EventFd,
}

impl Doorbell {
    fn new() -> Result<Self, EngineError> {
        Ok(Self {
            has_commands: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            wake: EventFd::new()?,
        })
    }

    /// A command is there, or what it sleeps for has come otherwise. Either the thread sees the flag before it sleeps, or we see that it sleeps: both are in one
    /// total order. `false`: it sleeps and cannot be woken.
    pub(crate) fn ring(&self) -> bool {
        self.has_commands.store(true, Ordering::SeqCst);
        if !self.asleep.swap(false, Ordering::SeqCst) || self.wake.signal() {
            return true;
        }
        // Whoever rings next is told as well.
        self.asleep.store(true, Ordering::SeqCst);
        false
    }

    /// Whether a command has come since the last call.
    fn answer(&self) -> bool {
        self.has_commands.swap(false, Ordering::SeqCst)
    }

    /// Network thread: announces sleep; `false` when a command has come and it must not sleep.
    pub(crate) fn fall_asleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.has_commands.load(Ordering::SeqCst) {
            self.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Network thread: awake again; `signalled`: the descriptor was readable. Who rings signals after it has seen that we
    /// sleep, and meanwhile a packet may have woken us: a late signal must be cleared too, or every sleep until the next
    /// command would end at once.
    pub(crate) fn wake_up(&self, signalled: bool) {
        self.asleep.store(false, Ordering::SeqCst);
        if signalled {
            self.wake.clear();
        }
    }

    /// Descriptor that becomes readable when a sleeping thread must wake.
    pub(crate) fn fd(&self) -> RawFd {
        self.wake.0.fd()
    }
}

/// A counter of the kernel that wakes a poll. Once the program has closed it behind our back its number may be that of a file of the program's: nothing
/// is written there or read, and it is not closed.
struct EventFd(Descriptor);

impl EventFd {
    fn new() -> Result<Self, EngineError> {
        // SAFETY: plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        let failed = EngineError::Io { what: "making an event descriptor", source: OsError::last() };
        Descriptor::of(fd).filter(|_| fd >= 0).map(Self).ok_or(failed)
    }

    /// Whether it is there.
    fn signal(&self) -> bool {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight live bytes. Where the counter is full the poll wakes anyway.
        let write = || unsafe { libc::write(self.0.fd(), one.as_ptr().cast(), one.len()) };
        self.0.is_there() && (write() == 8 || OsError::last() == OsError(libc::EAGAIN))
    }

    /// # Panics
    /// If it is not there: a poll would end at once for ever.
    fn clear(&self) {
        let mut count = [0_u8; 8];
        if !self.0.is_there() {
            assert_open(libc::EBADF);
        }
        // SAFETY: eight live bytes. Where nothing was signalled it fails with EAGAIN, which is as good.
        if unsafe { libc::read(self.0.fd(), count.as_mut_ptr().cast(), count.len()) } < 0 {
            assert_open(OsError::last().0);
        }
    }
}

impl Drop for EventFd {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
    use std::os::unix::net::UnixStream;
    use std::panic::{catch_unwind, AssertUnwindSafe};

    fn is_signalled(bell: &Doorbell) -> bool {
        let mut fd = libc::pollfd { fd: bell.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live entry.
        unsafe { libc::poll(&mut fd, 1, 0) == 1 }
    }

    #[test]
    fn a_command_wakes_a_sleeping_thread_once() {
        let bell = Doorbell::new().unwrap();
        assert!(bell.fall_asleep() && !is_signalled(&bell));
        bell.ring();
        assert!(is_signalled(&bell));
        bell.wake_up(true);
        assert!(bell.answer() && !is_signalled(&bell));
    }

    #[test]
    fn a_bell_whose_number_is_another_files_is_not_rung_and_not_closed() {
        let (file, mut written) = UnixStream::pair().unwrap();
        let bell = Doorbell::new().unwrap();
        assert!(bell.fall_asleep());
        // As if the program had closed the bell, and then opened a file: it has the number.
        // SAFETY: both are open.
        assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), bell.fd()) }, bell.fd());
        assert!(!bell.ring() && !bell.ring(), "it says that the thread has been woken");
        let read = catch_unwind(AssertUnwindSafe(|| bell.wake_up(true)));
        assert!(read.is_err(), "it reads from the file");
        let number = bell.fd();
        drop(bell);
        assert!(Descriptor::of(number).is_some(), "it has closed the file");
        // SAFETY: it is this test's alone.
        drop(unsafe { OwnedFd::from_raw_fd(number) });
        drop(file);
        assert_eq!(written.read(&mut [0; 8]).unwrap(), 0, "something was written");
    }

    #[test]
    fn a_thread_does_not_fall_asleep_before_a_command() {
        let bell = Doorbell::new().unwrap();
        bell.ring();
        assert!(!bell.fall_asleep() && !is_signalled(&bell));
    }

    /// The caller has seen that the thread sleeps, a packet wakes the thread, and only then the caller signals.
    #[test]
    fn a_late_signal_ends_one_sleep_and_not_all_that_follow() {
        let bell = Doorbell::new().unwrap();
        assert!(bell.fall_asleep());
        bell.wake_up(false);
        bell.wake.signal();
        assert!(bell.fall_asleep() && is_signalled(&bell));
        bell.wake_up(is_signalled(&bell));
        assert!(bell.fall_asleep() && !is_signalled(&bell));
    }
}
