//! The network thread: drives every group of the process with datagrams, time and commands.
//!
//! One turn: take commands, take what has arrived, do what is due, let each group that was touched send, and sleep when
//! there was nothing. A group for which nothing came and nothing is due is not looked at ([`crate::groups`]). Nothing in a turn
//! allocates or blocks for a packet; only commands and completions, which come once for each collective, do. What is sealed takes
//! a lock that nobody else holds, or where a thread sends beside this one ([`crate::socket`]), that thread alone.

use crate::active::ActiveGroup;
use crate::busy_poll::BusyPoll;
use crate::chaos::Chaos;
use crate::code_points::CodePoints;
use crate::cores::Cores;
use crate::flood::{FloodWatch, Traffic};
use crate::giving_way::GivingWay;
use crate::groups::Groups;
use crate::in_flight::shut_down;
use crate::inlet::Inlet;
use crate::own_core::OwnCore;
use crate::routes::Routes;
use crate::sending_apart::SendingApart;
use crate::shared::{Command, Shared};
use crate::socket::{BoundSocket, Datagram, PathSockets};
use crate::timeline::Clock;
use crate::{news, Choice, EngineStats};
use gradwire_core::Timestamp;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest that stopping waits for goodbyes: the transport gives up after half a second.
const STOP_MAX: Duration = Duration::from_millis(700);
/// While the kernel's send buffer is full a due pacer must not make the thread spin.
const BLOCKED_RETRY: Duration = Duration::from_millis(1);

/// Why the loop ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Running,
    /// Goodbyes are being said, until then.
    Stopping(Timestamp),
    Crashed,
}

/// See the module's documentation.
pub(crate) struct Driver {
    shared: Arc<Shared>,
    sockets: PathSockets,
    origin: Instant,
    /// What `origin` is on the clocks of the host.
    clock: Clock,
    now: Timestamp,
    groups: Groups<ActiveGroup>,
    routes: Routes,
    codes: CodePoints,
    chaos: Option<Box<Chaos>>,
    commands: Vec<Command>,
    stats: EngineStats,
    busy_poll: BusyPoll,
    giving_way: GivingWay,
    sending_apart: SendingApart,
    /// Most ranks of a group that are on this host.
    most_ranks_here: usize,
    own_core: OwnCore,
    /// How many cores the process may use.
    cores: Cores,
    flood: FloodWatch,
    /// What was nobody's, or not authentic, so far.
    refused: Traffic,
    ending: Ending,
}

impl Driver {
    /// Body of the network thread. A panic in it is a bug; it must not leave callers waiting for ever, so it ends every
    /// operation and becomes the cause of [`crate::EngineError::Stopped`].
    pub(crate) fn run_thread(shared: Arc<Shared>, first: BoundSocket, further: Vec<BoundSocket>) {
        prepare_thread(shared.local.config.urgency);
        let mut driver = Self::new(&shared, first, further);
        let result = catch_unwind(AssertUnwindSafe(|| driver.run()));
        let cause = result.err().map(|panic| format!("the network thread panicked: {}", panic_text(&*panic)));
        if let Some(cause) = &cause {
            news::crashed(shared.local.port, cause);
            driver.groups.iter().for_each(|group| group.tell_end(cause));
        }
        let waiting = shared.close(cause.clone());
        // Commands and groups answer by being dropped: every channel in them disconnects.
        for command in std::mem::take(&mut driver.commands).into_iter().rev().chain(waiting) {
            driver.refuse(command, cause.as_deref());
        }
        driver.groups.iter_mut().for_each(|group| group.end_all(cause.as_deref()));
        if cause.is_some() && !shared.has_its_descriptors() {
            // Whoever has closed them has the numbers, for files of its own: they are not closed once more.
            std::mem::forget(driver.sockets);
        }
    }

    fn new(shared: &Arc<Shared>, first: BoundSocket, further: Vec<BoundSocket>) -> Self {
        Self {
            shared: Arc::clone(shared),
            sockets: PathSockets::new(first, further, &shared.local.sources),
            origin: shared.origin,
            clock: Clock::at(shared.origin),
            now: Timestamp::ZERO,
            groups: Groups::default(),
            routes: Routes::default(),
            codes: CodePoints::new(&shared.local.config),
            chaos: shared.local.config.chaos.map(|config| Box::new(Chaos::new(config))),
            commands: Vec::new(),
            stats: EngineStats::default(),
            busy_poll: BusyPoll::new(shared.local.config.busy_poll),
            giving_way: GivingWay::new(shared.local.config.give_way),
            most_ranks_here: 1,
            sending_apart: SendingApart::new(shared.local.config.send_thread),
            own_core: OwnCore::new(shared.local.config.own_core, shared.local.config.send_thread),
            cores: Cores::read(),
            flood: FloodWatch::default(),
            refused: Traffic::default(),
            ending: Ending::Running,
        }
    }

    /// Ends a command that can no longer be carried out.
    fn refuse(&mut self, command: Command, cause: Option<&str>) {
        if let Command::Submit { group, in_flight, .. } = command {
            let error = self.groups.find(group).map_or_else(shut_down, |group| group.why_ended(cause));
            in_flight.end(Err(error));
        }
    }

    fn run(&mut self) {
        while !self.has_ended() {
            self.now = since(self.origin);
            self.take_commands();
            let received = self.receive();
            self.handle_timeouts();
            self.drain();
            if !received && !self.has_ended() {
                self.sleep();
            }
        }
    }

    fn has_ended(&self) -> bool {
        match self.ending {
            Ending::Running => false,
            Ending::Crashed => true,
            Ending::Stopping(until) => self.now >= until || self.groups.iter().all(ActiveGroup::has_left),
        }
    }

    fn take_commands(&mut self) {
        self.shared.take_commands(&mut self.commands);
        if !self.commands.is_empty() {
            self.on_busy(self.now);
        }
        // Each is taken out for itself, from the end: those that a panic leaves there hear of it.
        self.commands.reverse();
        while let Some(command) = self.commands.pop() {
            self.command(command);
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Join { setup, connected } => {
                let group = ActiveGroup::new(*setup, connected, self.now);
                let (place, group) = self.groups.insert(group.key(), group);
                group.set_flooded(self.flood.is_flooded());
                group.insert_routes(place as u32, &mut self.routes);
                group.insert_doors(place as u32, &mut self.routes);
            }
            Command::Unanswered { group, missing } => {
                if let Some(group) = self.groups.find(group) {
                    let _ = missing.send(group.unanswered());
                }
            }
            Command::Submit { group, request, in_flight } => match self.groups.touch_key(group) {
                Some(group) => group.submit(self.now, *request, in_flight),
                None => in_flight.end(Err(shut_down())),
            },
            Command::Adopt { group, verdict } => {
                if let Some(group) = self.groups.touch_key(group) {
                    group.adopt(self.now, *verdict);
                }
            }
            Command::Admit { group, record, admitted } => {
                if let Some(group) = self.groups.touch_key(group) {
                    // The caller may have stopped waiting.
                    let _ = admitted.send(group.admit(&record));
                }
            }
            Command::Leave { group, left } => {
                if let Some(group) = self.groups.touch_key(group) {
                    group.leave(self.now, left);
                }
            }
            Command::AwaitWorkers { group, ended } => {
                if let Some(group) = self.groups.touch_key(group) {
                    group.await_workers(ended);
                }
            }
            Command::GroupStats { group, stats } => {
                _ = stats.send(self.groups.find(group).map(|group| group.stats(self.now)));
            }
            Command::Watch { group, watch } => {
                _ = watch.send(self.groups.find(group).map(|group| group.watch(self.now)));
            }
            Command::Timeline { group, calls, timeline } => {
                let found = self.groups.find(group);
                _ = timeline.send(found.map(|group| group.timeline(self.now, self.clock, calls)));
            }
            Command::EngineStats { stats } => {
                self.sockets.take_counts().add_to(&mut self.stats);
                _ = stats.send(self.stats);
            }
            Command::Stop => {
                self.groups.touch_all();
                self.groups.iter_mut().for_each(|group| group.leave(self.now, None));
                self.ending = Ending::Stopping(self.now + STOP_MAX);
            }
            Command::Crash => self.ending = Ending::Crashed,
        }
    }

    /// Takes what has arrived; `false` when that was nothing. The clock is read after each call that brought something: a
    /// packet that seemed to have arrived before it did would make round trips look shorter than they are.
    fn receive(&mut self) -> bool {
        let (before, refused) = (self.stats.datagrams_received, self.refused.datagrams);
        let origin = self.origin;
        let mut now = self.now;
        let mut inlet = Inlet::new(&mut self.groups, &self.routes, &self.codes, self.refused);
        let mut lost = 0;
        let (stats, sockets) = (&mut self.stats, &mut self.sockets);
        let more = if let Some(chaos) = &mut self.chaos {
            let more = sockets.receive(stats, &mut |mut message| {
                if message.is_fresh {
                    now = since(origin);
                }
                for datagram in message.datagrams() {
                    let (from, octet) = (*datagram.from, datagram.octet);
                    let arrival = chaos.on_arrival(datagram.bytes);
                    lost += u64::from(inlet.endanger(chaos, now, datagram, arrival.is_damaged));
                    if let Some(mut copy) = arrival.copy {
                        let again = Datagram { bytes: &mut copy, from: &from, octet };
                        lost += u64::from(inlet.endanger(chaos, now, again, false));
                    }
                }
            });
            now = since(origin);
            while let Some(mut held) = chaos.release(now) {
                inlet.deliver_held(now, &held.datagram());
            }
            more
        } else {
            sockets.receive(stats, &mut |message| {
                if message.is_fresh {
                    now = since(origin);
                }
                inlet.take(now, message);
            })
        };
        self.now = now;
        self.refused = inlet.refused;
        self.stats.datagrams_in_runs += inlet.in_runs;
        self.stats.datagrams_unknown += inlet.unknown;
        self.stats.datagrams_not_authentic += inlet.not_authentic;
        self.stats.datagrams_replayed += inlet.replayed;
        self.stats.chaos_lost += lost;
        self.watch_for_floods();
        let received = self.stats.datagrams_received - before;
        // What strangers send must not keep the thread from its sleep.
        if received > self.refused.datagrams - refused {
            self.on_busy(now);
        }
        more || received > 0
    }

    /// Packets or commands have come.
    fn on_busy(&mut self, now: Timestamp) {
        self.busy_poll.on_busy(now);
        self.giving_way.on_busy(now);
    }

    fn watch_for_floods(&mut self) {
        let EngineStats { datagrams_received: datagrams, bytes_received: bytes, .. } = self.stats;
        let received = Traffic { datagrams, bytes };
        if let Some(is_flooded) = self.flood.on_counts(self.now, received, self.refused) {
            news::flooded(self.shared.local.port, is_flooded);
            self.groups.touch_all();
            self.groups.iter_mut().for_each(|group| group.set_flooded(is_flooded));
        }
    }

    /// Each group has its turn, and then hears what the host is like: not before, since a later turn may bring a group with more ranks here.
    fn handle_timeouts(&mut self) {
        self.groups.touch_due(self.now);
        self.each_touched(Self::turn_to);
        self.each_touched(Self::tell_host);
    }

    fn each_touched(&mut self, take: impl Fn(&mut Self, usize)) {
        let mut index = 0;
        while let Some(place) = self.groups.touched(index) {
            take(self, place);
            index += 1;
        }
    }

    /// Does what is due for a group, and looks what it has become.
    fn turn_to(&mut self, place: usize) {
        let Some(group) = self.groups.at_mut(place) else { return };
        self.stats.group_turns += 1;
        group.handle_timeout(self.now);
        group.succeed(self.now, (&mut self.routes, place as u32));
        let here = group.here();
        self.giving_way.on_ranks(here.ranks, self.cores.of_process);
        if group.is_over(self.now) {
            group.remove_routes(&mut self.routes);
            let key = group.key();
            self.groups.remove(key);
        }
        if here.ranks > self.most_ranks_here {
            self.most_ranks_here = here.ranks;
            // They are told as well.
            self.groups.touch_all();
        }
    }

    /// Tells a group what the host is like, and takes what it needs of that.
    fn tell_host(&mut self, place: usize) {
        let Some(group) = self.groups.at_mut(place) else { return };
        let here = group.here();
        group.tell_host(self.now, &self.cores, self.most_ranks_here);
        if group.is_among_others() {
            // In this order: a thread begins on the cores of the one that starts it.
            if !group.is_divided() || self.shared.local.config.send_thread == Choice::On {
                self.send_apart(here.ranks);
            }
            self.own_core.on_ranks(here, &self.cores);
        }
    }

    /// Starts the thread that sends, where one is wanted and the system has one to give.
    fn send_apart(&mut self, ranks_here: usize) {
        // What the kernel did not take waits in a batch that does not copy.
        if self.sockets.is_empty() && self.sending_apart.begins(ranks_here, &self.cores) {
            let shared = Arc::clone(&self.shared);
            self.sockets.send_apart(Box::new(move || _ = shared.doorbell().ring()));
        }
    }

    /// Takes events and datagrams of every group that was touched. Who could not send all stays touched; the one that blocked the sockets goes behind
    /// those that have not sent since.
    fn drain(&mut self) {
        if self.sockets.is_blocked() {
            self.sockets.send();
        }
        let mut has_blocked = None;
        for _ in 0..self.groups.touched_count() {
            let Some(place) = self.groups.next_touched() else { break };
            let was_blocked = self.sockets.is_blocked();
            let is_drained = self.drain_group(place);
            if !is_drained {
                // A thread that sends makes room at any moment, and then another one can block them.
                let before = if was_blocked { Some(place) } else { has_blocked.replace(place) };
                before.into_iter().for_each(|place| self.groups.put_back(place));
            }
        }
        has_blocked.into_iter().for_each(|place| self.groups.put_back(place));
    }

    /// Whether it could send all that it has.
    fn drain_group(&mut self, place: usize) -> bool {
        let Some(group) = self.groups.at_mut(place) else { return true };
        group.poll_events(self.now);
        let mut has_filled = false;
        while !has_filled && !self.sockets.is_blocked() {
            group.fill(self.now, &mut self.sockets, &self.codes);
            has_filled = self.sockets.has_room();
            if !self.sockets.is_empty() {
                self.sockets.send();
            }
        }
        group.poll_events(self.now);
        group.settle(self.now);
        let wake_at = group.wake_at();
        self.groups.settle(place, wake_at);
        has_filled
    }

    /// Sleeps until something arrives, is due, or is commanded; or looks again, at once or when others have gone first, where that pays.
    fn sleep(&mut self) {
        // Asked once: a batch may come back at any moment.
        let is_blocked = self.sockets.is_blocked();
        if !is_blocked && self.groups.touched_count() > 0 {
            // Blocked a moment ago.
            return;
        }
        let now = since(self.origin);
        let due = self.groups.wake_at();
        let stop = if let Ending::Stopping(until) = self.ending { Some(until) } else { None };
        let held = self.chaos.as_ref().and_then(|chaos| chaos.due());
        let due = [due, stop, held].into_iter().flatten().min();
        let mut wait = due.map(|at| at.since(now));
        if is_blocked {
            if !self.sockets.stays_blocked() {
                return;
            }
            wait = Some(wait.map_or(BLOCKED_RETRY, |wait| wait.max(BLOCKED_RETRY)));
        }
        if wait == Some(Duration::ZERO) {
            return;
        }
        if self.looks_again(now, wait) {
            return;
        }
        if !self.shared.doorbell().fall_asleep() {
            return;
        }
        self.stats.sleeps += 1;
        let bell = self.shared.doorbell();
        let signalled = self.sockets.poll(bell.fd(), wait);
        bell.wake_up(signalled);
    }

    /// Whether the thread has let others of its core go first and is to look again, at `now` or later; else it may sleep for `wait`.
    fn looks_again(&mut self, now: Timestamp, wait: Option<Duration>) -> bool {
        if self.sockets.is_blocked() {
            return false;
        }
        if self.busy_poll.looks_again(now) {
            self.stats.busy_polls += 1;
            std::thread::yield_now();
            return true;
        }
        if !self.giving_way.is_wanted(now, wait) {
            return false;
        }
        self.stats.yields += 1;
        std::thread::yield_now();
        self.giving_way.on_back(since(self.origin).since(now));
        true
    }
}

/// The driver's clock.
fn since(origin: Instant) -> Timestamp {
    Timestamp::from_nanos(origin.elapsed().as_nanos() as u64)
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

/// Signals belong to the main thread (Python's handlers run there) unless this thread's own fault raised them, and a wake-up for pacing must come within
/// microseconds rather than the kernel's default slack of 50.
fn prepare_thread(urgency: u8) {
    // SAFETY: `signals` is filled before it is used; both calls only change this thread.
    unsafe {
        let mut signals: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut signals);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL] {
            libc::sigdelset(&mut signals, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &signals, std::ptr::null_mut());
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_TIMERSLACK, 1);
    }
    crate::rounding::as_on_every_rank();
    #[cfg(target_os = "linux")]
    ask_for_short_slices();
    ask_for_urgency(urgency);
}

/// Asks the scheduler for short time slices. The thread runs for microseconds at a time, and an acknowledgement that waits
/// behind the slice of a computing thread holds up a peer; a thread with a short slice is run first. Measured on busy
/// cores at 100 Mbit/s: a fifth less time. Needs no privilege; kernels before 6.12 ignore it.
#[cfg(target_os = "linux")]
fn ask_for_short_slices() {
    const SLICE_NANOS: u64 = 100_000;
    let size = size_of::<libc::sched_attr>() as u32;
    // SAFETY: `sched_attr` is plain numbers, and zero is valid for each; the kernel writes and reads `size` bytes of it and
    // changes this thread only. Nothing depends on success.
    unsafe {
        let mut attributes: libc::sched_attr = std::mem::zeroed();
        let pointer = &raw mut attributes;
        let read = libc::syscall(libc::SYS_sched_getattr, 0, pointer, size, 0);
        // A policy that the user chose (real time, batch) stays.
        if read == 0 && (*pointer).sched_policy == libc::SCHED_OTHER as u32 {
            (*pointer).sched_runtime = SLICE_NANOS;
            libc::syscall(libc::SYS_sched_setattr, 0, pointer, 0);
        }
    }
}

/// Runs this thread before those that compute, where the system allows it. On busy cores it is woken tens of thousands of
/// times in a second of sending, and short slices alone leave it behind them. Elsewhere than on Linux a niceness is the process's.
fn ask_for_urgency(steps: u8) {
    if steps == 0 || !cfg!(target_os = "linux") {
        return;
    }
    // SAFETY: both calls take numbers, 0 is this thread, and nothing depends on success.
    unsafe {
        let niceness = libc::getpriority(libc::PRIO_PROCESS, 0);
        libc::setpriority(libc::PRIO_PROCESS, 0, niceness - libc::c_int::from(steps));
    }
}

#[cfg(test)]
mod tests;
