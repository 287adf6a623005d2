//! What the callers' threads and the network thread share: commands one way, completions the other.

use crate::group::GroupSetup;
use crate::handle::lock;
use crate::in_flight::InFlight;
use crate::rendezvous::Local;
use crate::routes::ConnectionIds;
use crate::socket::Descriptor;
use crate::succession::Before;
use crate::{
    Completions, EngineError, EngineStats, Features, GroupStats, JoinError, OsError, Timeline, WatchStats,
};
use gradwire_collectives::{OpError, Request, Verdict};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
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
    /// Forget a group that did not connect in time; answered with who is missing.
    Abandon { group: GroupKey, missing: Sender<Vec<Unanswered>> },
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
    Timeline { group: GroupKey, timeline: Sender<Option<Timeline>> },
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
            self.descriptors.iter().for_each(Descriptor::close_inherited);
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
        self.doorbell.ring();
        Ok(())
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
    /// total order.
    pub(crate) fn ring(&self) {
        self.has_commands.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wake.signal();
        }
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
        self.wake.0.as_raw_fd()
    }
}

/// A counter of the kernel that wakes a poll.
struct EventFd(OwnedFd);

impl EventFd {
    fn new() -> Result<Self, EngineError> {
        // SAFETY: plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(EngineError::Io { what: "making an event descriptor", source: OsError::last() });
        }
        // SAFETY: the descriptor is new and ours alone.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    fn signal(&self) {
        let one = 1_u64.to_ne_bytes();
        // SAFETY: eight live bytes. It can only fail when the counter is full, and then the poll wakes anyway.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn clear(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: eight live bytes. It fails when nothing was signalled, which is as good.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
