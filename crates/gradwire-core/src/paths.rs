//! The paths between two ranks, as one set.
//!
//! Packets are spread over them, but numbers, flight, round trips, rate and arrivals belong to each path alone
//! ([`crate::path::Path`]), so that a packet that another path overtakes never looks lost. What compares paths is
//! here: which one goes next ([`crate::spray`]), which ones are worse than the others ([`crate::path_health`]), and
//! when a packet is late though nothing comes back on its own path.
//!
//! With one path nothing is compared, and all of this costs a branch.

mod ways_back;

use crate::copies::{self, PACKETS_PER_COPY};
use crate::path::Path;
use crate::path_health::{Health, Tally};
use crate::recovery::{AckOutcome, RateController, RttEstimator, SentPacket};
use crate::spray::{PathSet, Sprayer, PATHS_MAX};
use crate::{ConnectionConfig, ConnectionStats, PathStats, Timestamp};
use alloc::vec::Vec;
use core::time::Duration;
use gradwire_wire::{PacketNumber, PathId, TransferId};

/// Chunk number of a packet that is a copy: its fate concerns the path and no transfer.
pub(crate) const COPY: u32 = u32::MAX;

/// A path and what comparing it with the others needs.
#[derive(Debug)]
struct Member {
    path: Path,
    health: Health,
    /// From this number on there are copies only.
    data_before: PacketNumber,
    /// When the next copy may go out, while the path is not trusted.
    copy_at: Timestamp,
    /// Data packets lately, of all paths' [`SHARE_MEMORY`].
    recent: u32,
    /// Packets of the peer lately, of all paths' [`HEARD_MEMORY`].
    heard: u32,
    stats: PathStats,
}

impl Member {
    /// Whether data may go over it; `proven_only`: only if it has answered.
    fn may_carry(&self, proven_only: bool) -> bool {
        self.health.is_trusted() && (!proven_only || self.path.rtt.has_sample())
    }
}

/// Path `i` is at index `i`; there is at least one.
#[derive(Debug)]
pub(crate) struct Paths {
    members: Vec<Member>,
    sprayer: Sprayer,
    /// Settings of one path: what one path alone would have, divided among all.
    each: ConnectionConfig,
    chunk_bytes: u64,
    /// Bytes that may be in flight on all paths together until the windows of all have been filled once.
    starting: Option<u64>,
    /// When the newest of all acknowledged packets and answered probes was sent.
    overtaken_at: Timestamp,
    /// Paths over which the packet that is next may go, when these are not all.
    only: Option<PathSet>,
    /// Data packets since the last copy.
    since_copy: u32,
}

impl Paths {
    pub(crate) fn new(config: &ConnectionConfig, now: Timestamp) -> Self {
        let count = config.paths.clamp(1, PATHS_MAX);
        let one = Path::new(PathId(0), config, now);
        let starting = (count > 1).then(|| one.controller.cwnd());
        // Together they start like one, and together they fill what one may fill.
        let mut each = config.clone();
        each.initial_rate /= u64::from(count);
        each.incast = config.incast.max(1).saturating_mul(u32::from(count));
        each.receive_buffer_bytes /= u64::from(count);
        let member = |id| Member {
            path: Path::new(PathId(id), &each, now),
            health: Health::new(),
            copy_at: now,
            data_before: PacketNumber(0),
            recent: 0,
            heard: 0,
            stats: PathStats { path: id, ..PathStats::default() },
        };
        Self {
            members: (0..count).map(member).collect(),
            sprayer: Sprayer::new(config.spray, config.spray_run, config.local, config.remote),
            chunk_bytes: u64::from(config.chunk_bytes()),
            each,
            starting,
            overtaken_at: Timestamp::ZERO,
            only: None,
            since_copy: 0,
        }
    }

    /// So many ranks share the receiver from now on.
    pub(crate) fn on_incast(&mut self, senders: u32) {
        let paths = self.members.len() as u32;
        let flows = senders.max(1).saturating_mul(paths);
        if flows != self.each.incast {
            self.each.incast = flows;
            self.members.iter_mut().for_each(|member| member.path.controller.on_incast(flows, paths));
        }
    }

    /// The receiver has asked for data again after it had all been sent once.
    pub(crate) fn on_repair(&mut self) {
        self.members.iter_mut().for_each(|member| member.path.controller.on_repair());
    }

    /// The path with this id, if both ranks agreed on so many.
    pub(crate) fn get_mut(&mut self, id: PathId) -> Option<&mut Path> {
        self.members.get_mut(usize::from(id.0)).map(|member| &mut member.path)
    }

    /// The path at an index that came out of this set.
    pub(crate) fn at(&self, index: usize) -> &Path {
        &self.members[index].path
    }

    /// As [`Paths::at`], to change it.
    pub(crate) fn at_mut(&mut self, index: usize) -> &mut Path {
        &mut self.members[index].path
    }

    pub(crate) fn len(&self) -> usize {
        self.members.len()
    }

    pub(crate) fn contains(&self, id: PathId) -> bool {
        usize::from(id.0) < self.members.len()
    }

    /// There is nothing to send.
    pub(crate) fn on_starved(&mut self) {
        self.members.iter_mut().for_each(|member| member.path.on_starved());
    }

    /// The path that a data packet may take now; not `avoid`, on which the last copy of it was lost, if another can.
    pub(crate) fn choose(&mut self, now: Timestamp, avoid: Option<usize>) -> Option<usize> {
        if self.members.len() == 1 {
            return self.members[0].path.may_send(now).then_some(0);
        }
        if self.is_start_full() {
            return None;
        }
        let proven_only = self.proven_only();
        if let Some(current) = self.sprayer.current().filter(|current| Some(*current) != avoid) {
            let member = &mut self.members[current];
            if member.may_carry(proven_only) && member.path.may_send(now) {
                self.sprayer.continue_run();
                return Some(current);
            }
        }
        let mut open = self.open(now);
        self.only = avoid.map(|_| self.working()).filter(|working| !working.is_empty());
        if let Some(only) = self.only {
            open = open.within(only);
        }
        if open.is_empty() {
            return None;
        }
        let others = open.without(avoid);
        let open = if others.is_empty() { open } else { others };
        let Self { members, sprayer, .. } = self;
        Some(sprayer.choose(open, |path| score(&members[path])))
    }

    /// Whether only paths that have answered once carry data: a path that is bad from the start then costs nothing. The
    /// others have been asked when the ranks met, and carry copies until something comes back.
    fn proven_only(&self) -> bool {
        self.members.len() > 1
            && self.sprayer.adapts()
            && self.trusted().any(|member| member.path.rtt.has_sample())
    }

    /// Trusted paths whose latest packet arrived: what was lost once goes over no other while there are any.
    fn working(&self) -> PathSet {
        let (mut working, proven_only) = (PathSet::default(), self.proven_only());
        for (index, member) in self.members.iter().enumerate() {
            if member.may_carry(proven_only) && member.health.works() {
                working.insert(index);
            }
        }
        working
    }

    /// Trusted paths that may send now. The others get nothing and must not take that for the path's limit.
    fn open(&mut self, now: Timestamp) -> PathSet {
        let (mut open, proven_only) = (PathSet::default(), self.proven_only());
        for (index, member) in self.members.iter_mut().enumerate() {
            if !member.may_carry(proven_only) {
                member.path.on_starved();
            } else if member.path.may_send(now) {
                open.insert(index);
            }
        }
        open
    }

    /// Whether as much is in flight as one path would start with. Grows with what arrives until it bounds nothing.
    fn is_start_full(&self) -> bool {
        let in_flight: u64 = self.members.iter().map(|member| member.path.ledger.in_flight()).sum();
        self.starting.is_some_and(|bytes| in_flight > 0 && in_flight + self.chunk_bytes > bytes)
    }

    /// When a pacer lets the next packet go; `None` while acknowledgements must come first.
    pub(crate) fn sends_at(&self) -> Option<Timestamp> {
        if self.members.len() > 1 && self.is_start_full() {
            return None;
        }
        let may =
            |member: &&Member| self.only.is_none_or(|only| only.contains(usize::from(member.path.id.0)));
        let proven_only = self.proven_only();
        let carrying = self.members.iter().filter(|member| member.may_carry(proven_only));
        carrying.filter(may).filter_map(|member| member.path.sends_at()).min()
    }

    /// A data packet leaves over `index`.
    pub(crate) fn on_sent(&mut self, now: Timestamp, index: usize, packet: SentPacket, queue: u8) {
        let member = &mut self.members[index];
        member.stats.packets_sent += 1;
        member.path.on_sent(now, packet, queue);
        if self.members.len() == 1 {
            return;
        }
        let member = &mut self.members[index];
        if packet.chunk == COPY {
            self.since_copy = 0;
            member.copy_at = copies::next(now, &member.path);
            member.stats.copies_sent += 1;
            return;
        }
        self.since_copy = self.since_copy.saturating_add(1);
        member.data_before = packet.number.next();
        member.recent += 1;
        if self.members.iter().map(|member| member.recent).sum::<u32>() >= SHARE_MEMORY {
            self.members.iter_mut().for_each(|member| member.recent /= 2);
        }
    }

    /// See [`Path::send_run`]. There is one path only.
    pub(crate) fn send_run(&mut self, now: Timestamp, first: SentPacket, queue: u8, most: u32) -> u32 {
        let count = self.members[0].path.send_run(now, first, queue, most);
        self.members[0].stats.packets_sent += u64::from(count);
        count
    }

    /// A path that is not trusted and over which a copy of the latest packet may leave now, to see whether it has
    /// healed.
    pub(crate) fn copy_due(&mut self, now: Timestamp) -> Option<usize> {
        if self.members.len() == 1 || self.since_copy < PACKETS_PER_COPY {
            return None;
        }
        let (mut due, proven_only): (Option<(Timestamp, usize)>, _) = (None, self.proven_only());
        for (index, member) in self.members.iter_mut().enumerate() {
            let at = copies::due(now, member.copy_at, &member.path, &member.health);
            if member.may_carry(proven_only) || now < at || !member.path.may_send(now) {
                continue;
            }
            // The one that waits longest, so that each gets its copies.
            if due.is_none_or(|(earliest, _)| at < earliest) {
                due = Some((at, index));
            }
        }
        due.map(|(_, index)| index)
    }

    /// When arrivals must be acknowledged though nothing more comes.
    pub(crate) fn ack_due_at(&self) -> Option<Timestamp> {
        self.members.iter().filter_map(|member| member.path.arrivals.due_at()).min()
    }

    /// The path for control that answers nothing: the best one, after each repetition the next, and at last those that
    /// are worse, because what is known of all of them may be out of date. `turn` counts the repetitions of the one
    /// thing that is said: with a common count, two that are repeated in turn would each keep to its own path.
    pub(crate) fn control(&self, turn: u32) -> PathId {
        if self.members.len() == 1 {
            return PathId(0);
        }
        let most = self.members.iter().map(|member| member.heard).max().unwrap_or(0);
        // A rank that sends no data learns nothing of its paths but which ones the peer likes.
        let good = |member: &&Member| member.health.is_trusted() && 4 * member.heard >= most;
        let best = self.members.iter().filter(good).min_by_key(|member| score(member));
        let first = best.map_or(0, |member| usize::from(member.path.id.0));
        let count = self.members.len();
        let all = || self.members.iter().cycle().skip(first).take(count);
        // The first question about a loss has the second turn: not over a path that is known to lose, where one is good.
        let is_only = all().filter(good).count() == 1 && all().all(|it| good(&it) || it.health.is_lossy());
        let again = usize::from(is_only);
        let in_order =
            all().filter(good).take(again).chain(all().filter(good)).chain(all().filter(|it| !good(it)));
        in_order.cycle().nth(turn as usize % (count + again)).map_or(PathId(0), |member| member.path.id)
    }

    /// Something came on this path.
    pub(crate) fn on_heard(&mut self, id: PathId) {
        if self.members.len() == 1 {
            return;
        }
        self.members[usize::from(id.0)].heard += 1;
        if self.members.iter().map(|member| member.heard).sum::<u32>() > HEARD_MEMORY {
            self.members.iter_mut().for_each(|member| member.heard /= 2);
        }
    }

    /// What `outcome` says about path `index`, and with it about the others.
    pub(crate) fn learn(&mut self, index: usize, outcome: &AckOutcome) {
        let member = &mut self.members[index];
        let is_copy = |packet: &&SentPacket| packet.chunk == COPY;
        let (acked, lost) = (outcome.acked.len() as u32, outcome.lost.len() as u32);
        member.stats.packets_lost += u64::from(lost);
        if self.members.len() == 1 || acked + lost == 0 {
            return;
        }
        let newest = outcome.acked.iter().map(|packet| packet.sent_at).max();
        self.overtaken_at = self.overtaken_at.max(newest.unwrap_or_default());
        let copies_acked = outcome.acked.iter().filter(is_copy).count() as u32;
        let copies_lost = outcome.lost.iter().filter(is_copy).count() as u32;
        let others = self.others(index);
        let member = &mut self.members[index];
        member.health.on_packets(acked - copies_acked, lost - copies_lost);
        member.health.on_unlost(outcome.unlost.0);
        if copies_acked + copies_lost > 0 && member.health.on_copies(copies_acked, copies_lost, others) {
            member.path.restart(&self.each);
        }
        self.grow_start(outcome.acked.iter().map(|packet| u64::from(packet.bytes)).sum());
        if self.sprayer.adapts() {
            self.judge(index, others);
        }
    }

    /// What the other trusted paths have shown.
    fn others(&self, index: usize) -> Tally {
        let mut others = Tally::default();
        for (at, member) in self.members.iter().enumerate() {
            if at != index && member.health.is_trusted() {
                others.add(member.health.recent());
            }
        }
        others
    }

    fn grow_start(&mut self, acked_bytes: u64) {
        let windows: u64 = self.members.iter().map(|member| member.path.controller.cwnd()).sum();
        self.starting = self.starting.map(|bytes| bytes + 2 * acked_bytes).filter(|bytes| *bytes < windows);
    }

    /// Compares path `index` with the others that are trusted.
    fn judge(&mut self, index: usize, others: Tally) {
        let mut least = self.members[index].path.rtt.smoothed();
        for (at, member) in self.members.iter().enumerate() {
            if at != index && member.path.rtt.has_sample() && !member.health.is_lossy() {
                least = least.min(member.path.rtt.smoothed());
            }
        }
        let member = &mut self.members[index];
        if member.path.rtt.has_sample() {
            member.health.judge_delay(member.path.rtt.smoothed(), least);
        }
        member.health.judge(others);
        // What is left is dead: whatever is wrong with the others is better, and being late better than losing.
        if self.trusted().all(|member| member.health.seems_dead()) {
            let all_dead = self.members.iter().all(|member| member.health.seems_dead());
            let some_are_late = self.members.iter().any(|member| !member.health.is_lossy());
            for member in &mut self.members {
                let health = &mut member.health;
                let is_better =
                    if some_are_late { !health.is_lossy() } else { all_dead || !health.seems_dead() };
                if is_better {
                    health.trust();
                }
            }
        }
    }

    /// An answer to a probe that was sent at `sent_at` arrived.
    pub(crate) fn on_answer(&mut self, sent_at: Timestamp) {
        self.overtaken_at = self.overtaken_at.max(sent_at);
    }

    /// When [`Paths::check_losses`] is due.
    pub(crate) fn loss_time(&self) -> Option<Timestamp> {
        (0..self.len()).filter_map(|index| self.loss_time_of(index)).min()
    }

    fn loss_time_of(&self, index: usize) -> Option<Timestamp> {
        let overtaken = self.overtaken_time_of(index);
        let own = self.members[index].path.loss_time();
        own.map_or(overtaken, |own| Some(overtaken.map_or(own, |at| at.min(own))))
    }

    /// When the oldest packet of a path is late though nothing on its own path says so: something that was sent later
    /// has been answered, and an answer to this one would have come. Only a path that died falls silent like this.
    fn overtaken_time_of(&self, index: usize) -> Option<Timestamp> {
        if self.members.len() == 1 {
            return None;
        }
        let oldest = self.members[index].path.ledger.oldest_sent_at()?;
        (oldest <= self.overtaken_at).then(|| (oldest + self.patience(index)).max(self.silent_at(index)))
    }

    /// When a path counts as silent. While its acknowledgements keep coming, a packet that none of them names waits in a
    /// queue that grows; a lost one is found by those behind it. They are asked for four times in each window, so half a
    /// round trip without any is twice the usual gap. A path from which nothing ever came is like the slowest of the others:
    /// its own round trip is a guess, which may be a hundred times too long.
    fn silent_at(&self, index: usize) -> Timestamp {
        let path = &self.members[index].path;
        let known = path.rtt.has_sample();
        let gap =
            if known { path.rtt.smoothed() / 2 + self.each.ack_delay_max } else { self.probe_timeout().0 };
        path.news_at + gap
    }

    /// A question that left at `asked_at` over another path was answered: what had left `timeout` before that on this
    /// one is lost, if the path is silent.
    pub(crate) fn lose_silent(
        &mut self,
        now: Timestamp,
        index: usize,
        (asked_at, timeout): (Timestamp, Duration),
        outcome: &mut AckOutcome,
    ) {
        outcome.clear();
        if now >= self.silent_at(index) {
            let before = asked_at.before(timeout.max(self.patience(index)));
            self.members[index].path.lose_before(now, before, outcome);
        }
    }

    /// How long an answer takes on a path at most; of one without a sample as on the slowest path. A queue that grows is seen first on the path
    /// that answers first, and may be this one's too. Where nothing but copies is under way it is waited for longer: nobody needs them.
    fn patience(&self, index: usize) -> Duration {
        let Member { path, health, data_before, .. } = &self.members[index];
        if !path.rtt.has_sample() {
            return self.probe_timeout().0;
        }
        let sampled = self.members.iter().filter(|member| member.path.rtt.has_sample());
        let latest = sampled.map(|member| member.path.rtt.latest()).max().unwrap_or_default();
        let grown = latest.saturating_sub(path.rtt.smoothed());
        let are_copies = || path.ledger.oldest().is_some_and(|packet| packet.number.since(*data_before) >= 0);
        let times = if !health.is_trusted() && are_copies() { COPY_PATIENCE } else { 1 };
        path.rtt.probe_timeout(self.each.ack_delay_max) * times + grown
    }

    /// Declares by time what is lost on path `index`; `false` when nothing is due there.
    pub(crate) fn check_losses(&mut self, now: Timestamp, index: usize, outcome: &mut AckOutcome) -> bool {
        if self.loss_time_of(index).is_none_or(|at| now < at) {
            return false;
        }
        if self.overtaken_time_of(index).is_some_and(|at| now >= at) {
            let before = now.before(self.patience(index)).min(self.overtaken_at);
            self.members[index].path.lose_before(now, before, outcome);
        } else {
            self.members[index].path.on_loss_timeout(now, outcome);
        }
        true
    }

    /// A transfer is over.
    pub(crate) fn forget(&mut self, transfer: TransferId) {
        self.members.iter_mut().for_each(|member| member.path.forget(transfer));
    }

    /// How long to wait for an answer over the trusted path that takes longest, and the least round trip of all. The
    /// least, because a path may have one sample only, of a time when this rank stood still.
    pub(crate) fn probe_timeout(&self) -> (Duration, Duration) {
        self.longest(|rtt| rtt.probe_timeout(self.each.ack_delay_max))
    }

    /// The same of any other timeout of a path.
    pub(crate) fn longest(&self, timeout: impl Fn(&RttEstimator) -> Duration) -> (Duration, Duration) {
        let of = |path: &Path| (timeout(&path.rtt), path.rtt.min());
        let sampled = || self.trusted().filter(|member| member.path.rtt.has_sample());
        let timeout = sampled().map(|member| of(&member.path).0).max();
        let least = sampled().map(|member| of(&member.path).1).min();
        timeout.zip(least).unwrap_or_else(|| of(&self.members[0].path))
    }

    /// How long a packet of the peer may be overtaken by later ones: half a round trip, and as much longer as the slowest
    /// path takes now. Measured anew for each decision: a transfer may begin before the first round trip is known. A clock
    /// that jumped proves nothing, so twenty of the least round trips count at most.
    pub(crate) fn overtaken_max(&self, now: Timestamp) -> Duration {
        let sampled = self.trusted().map(|member| &member.path.rtt).filter(|rtt| rtt.has_sample());
        let half = |rtt: &RttEstimator| (rtt.smoothed() / 2).min(rtt.min() * OVERTAKEN_MAX);
        sampled.map(half).min().unwrap_or_default() + self.skew(now)
    }

    /// How much longer than on the fastest path packets of the peer take on the slowest, now.
    pub(crate) fn skew(&self, now: Timestamp) -> Duration {
        let mut delays = self.members.iter().filter_map(|member| member.path.arrivals.delay(now));
        let Some(first) = delays.next() else { return Duration::ZERO };
        // Clocks differ by any amount, modulo 2^32: only differences mean something.
        let (mut least, mut most) = (0, 0);
        for delay in delays {
            let difference = delay.wrapping_sub(first) as i32;
            least = least.min(difference);
            most = most.max(difference);
        }
        Duration::from_micros(u64::from(most.abs_diff(least))).min(SKEW_MAX)
    }

    fn trusted(&self) -> impl Iterator<Item = &Member> {
        self.members.iter().filter(|member| member.health.is_trusted())
    }

    /// Adds the estimates: the best round trip, the sum of rates and windows.
    pub(crate) fn fill_stats(&self, stats: &mut ConnectionStats) {
        let sampled = self.trusted().filter(|member| member.path.rtt.has_sample());
        if let Some(best) = sampled.min_by_key(|member| member.path.rtt.smoothed()) {
            stats.rtt_smoothed = best.path.rtt.smoothed();
            stats.rtt_min = best.path.rtt.min();
        }
        stats.bandwidth = self.trusted().map(|member| member.path.controller.bandwidth()).sum();
        // Of all, or the paths that have carried little so far would seem to be missing.
        let sustained = || self.trusted().map(|member| member.path.sustained.get());
        stats.sustained_rate = if sustained().all(|rate| rate > 0) { sustained().sum() } else { 0 };
        stats.cwnd = self.trusted().map(|member| member.path.controller.cwnd()).sum();
        let tallies = || self.members.iter().map(|member| member.path.arrivals.tally());
        stats.packets_numbered = tallies().map(|tally| tally.numbered).sum();
        stats.packets_arrived = tallies().map(|tally| tally.arrived).sum();
    }

    /// What each path did and how it is.
    pub(crate) fn stats(&self) -> Vec<PathStats> {
        let all: u32 = self.members.iter().map(|member| member.recent).sum();
        let rtt = |path: &Path| if path.rtt.has_sample() { path.rtt.smoothed() } else { Duration::ZERO };
        let of = |member: &Member| PathStats {
            rtt_smoothed: rtt(&member.path),
            round_trips: member.path.round_trips,
            share: if self.members.len() == 1 { 1.0 } else { member.recent as f32 / all.max(1) as f32 },
            trusted: member.health.is_trusted(),
            ..member.stats
        };
        self.members.iter().map(of).collect()
    }
}

/// Bytes of a path of an acknowledgement with so many words.
pub(crate) fn ack_path_bytes(words: u8) -> usize {
    6 + 8 * usize::from(words)
}

/// Lower is better: the expected time of a packet, where a loss costs about [`LOSS_RTTS`] round trips, and the more the
/// longer nothing came through. A path that was never tried comes first.
fn score(member: &Member) -> u64 {
    if !member.path.rtt.has_sample() {
        return 0;
    }
    let rtt = u64::try_from(member.path.rtt.smoothed().as_nanos()).unwrap_or(u64::MAX) / 1_024;
    let silent = u64::from(member.health.lost_in_a_row());
    rtt.saturating_mul((1_024 + LOSS_RTTS * member.health.loss()) * (1 + silent))
}

/// What a loss costs: to be noticed, asked for and sent again, while everything else waits for it.
const LOSS_RTTS: u64 = 16;
/// How much longer: a copy taken for lost while it stands in a queue makes a path that has healed prove itself from the beginning.
const COPY_PATIENCE: u32 = 4;
/// Packets over which is seen which paths the peer uses.
const HEARD_MEMORY: u32 = 256;
/// Packets over which the share of a path is taken.
const SHARE_MEMORY: u32 = 1_024;
/// Half of the longest round trip, in the least ones, for which it is waited that a packet may be overtaken.
const OVERTAKEN_MAX: u32 = 10;
/// More is no difference between paths but a disturbance: the slack of a transfer must end.
const SKEW_MAX: Duration = Duration::from_millis(50);
