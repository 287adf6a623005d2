//! One rank of one process group, as its caller sees it: before and after its peers are known.

use crate::handle::lock;
use crate::here::Here;
use crate::in_flight::InFlight;
use crate::interfaces::Source;
use crate::lanes::{wait_for_all, Lane, LaneSetup};
use crate::lineage::Lineage;
use crate::routes::SLOTS_MAX;
use crate::security::Channel;
use crate::shared::{Command, GroupKey, Shared};
use crate::succession::Before;
use crate::{EngineError, GroupStats, JoinError, OnPeerLoss, OpHandle};
use crate::{SecurityStats, StragglerStats, Timeline, WatchStats};
use gradwire_collectives::{GroupConfig, OpError, Request};
use gradwire_core::ConnectionId;
use gradwire_membership::Epoch;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Packets that go over one path at a time where segmentation offload joins them: a burst over many paths would else
/// leave in messages of one or two, and a choice that comes four packets later is as good.
pub(crate) const SPRAY_RUN: u32 = 4;
/// Longest wait for an answer of the network thread, which never blocks: only a bug or a stopped process exceeds it.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Everything that the network thread needs to run a group.
pub(crate) struct GroupSetup {
    /// Its name in the engine.
    pub(crate) key: GroupKey,
    /// Its name for people.
    pub(crate) name: String,
    /// Its settings.
    pub(crate) config: GroupConfig,
    /// Addresses to try for each entry of `config.peers`.
    pub(crate) candidates: Vec<Vec<SocketAddr>>,
    /// What seals and opens datagrams, for each entry of `config.peers`; `None`: they travel in clear.
    pub(crate) channels: Vec<Option<Channel>>,
    /// How they travel, for people.
    pub(crate) security: SecurityStats,
    /// UDP payload bytes of a full datagram.
    pub(crate) datagram_bytes: usize,
    /// UDP port from which each path sends.
    pub(crate) source_ports: Vec<u16>,
    /// Paths to each peer.
    pub(crate) paths: u8,
    /// Local addresses from which paths may go.
    pub(crate) sources: Vec<Source>,
    /// Given back when the group is gone.
    pub(crate) ids: ReservedIds,
    /// On other network threads.
    pub(crate) lanes: LaneSetup,
    /// Those of its ranks that are on this host.
    pub(crate) here: Here,
    /// What the group is formed again with when a rank is lost; `None`: it ends then.
    pub(crate) lineage: Option<Box<Lineage>>,
    /// The group runs, and this rank joins it: whom to ask.
    pub(crate) contacts: Option<Epoch>,
}

/// Connection ids that return to the engine when dropped.
pub(crate) struct ReservedIds {
    shared: Arc<Shared>,
    /// By rank; `None` for the own.
    pub(crate) by_rank: Vec<Option<ConnectionId>>,
}

impl std::fmt::Debug for ReservedIds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ReservedIds").field(&self.by_rank).finish()
    }
}

impl ReservedIds {
    /// # Errors
    /// [`EngineError::ConnectionIdsUsedUp`].
    pub(crate) fn draw(shared: &Arc<Shared>, rank: u32, world_size: u32) -> Result<Self, EngineError> {
        let mut reserved = Self { shared: Arc::clone(shared), by_rank: Vec::new() };
        let mut ids = lock(&shared.ids);
        let (held, needed) = (ids.held(), world_size.saturating_sub(1));
        let used_up = || EngineError::ConnectionIdsUsedUp { needed, held, ids: SLOTS_MAX };
        for peer in 0..world_size {
            let id = if peer == rank { None } else { Some(ids.draw().ok_or_else(used_up)?) };
            reserved.by_rank.push(id);
        }
        drop(ids);
        Ok(reserved)
    }
}

impl ReservedIds {
    /// Of a rank that is alone.
    pub(crate) fn none(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), by_rank: vec![None] }
    }

    /// How long peers are waited for that are not there yet.
    pub(crate) fn connect_timeout(&self) -> Duration {
        self.shared.local.config.connect_timeout
    }

    /// As records have them.
    pub(crate) fn values(&self) -> Vec<u32> {
        self.by_rank.iter().map(|id| id.map_or(0, ConnectionId::value)).collect()
    }
}

impl Drop for ReservedIds {
    fn drop(&mut self) {
        if self.shared.check_process().is_ok() {
            let mut ids = lock(&self.shared.ids);
            self.by_rank.iter().flatten().for_each(|id| ids.release(*id));
        }
    }
}

/// Name of the calls without a policy in statistics.
const EXACT: &str = "exact";

/// One rank of a connected process group. Dropping it leaves the group in the background.
pub struct GroupHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) key: GroupKey,
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    /// Its groups on further network threads.
    pub(crate) lanes: Vec<Lane>,
    /// By rank, how long it was waited for when [`GroupHandle::watch_news`] told of it last.
    pub(crate) told: Mutex<BTreeMap<u32, StragglerStats>>,
}

impl std::fmt::Debug for GroupHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GroupHandle")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size)
            .finish_non_exhaustive()
    }
}

impl GroupHandle {
    /// This rank.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in the group, dedicated servers left out.
    #[must_use]
    pub fn world_size(&self) -> u32 {
        self.world_size
    }

    /// Hands a collective to the network thread; the same calls in the same order on every rank. `keep_alive` owns the
    /// memory behind the request's views; it is dropped on the network thread when the operation has ended, so its
    /// `Drop` must not block.
    ///
    /// # Errors
    /// [`EngineError::Stopped`], [`EngineError::Forked`]. What is wrong with the request itself, or with the group, comes
    /// out of the handle.
    pub fn submit(&self, request: Request, keep_alive: Box<dyn Send>) -> Result<OpHandle, EngineError> {
        let preset = if request.policy.is_exact() { EXACT } else { request.policy.preset_name() };
        self.submit_as(preset, request, keep_alive)
    }

    /// As [`GroupHandle::submit`], counted in [`crate::CallStats`] under a preset of which the policy keeps not every value.
    ///
    /// # Errors
    /// As [`GroupHandle::submit`].
    pub fn submit_as(
        &self,
        preset: &'static str,
        request: Request,
        keep_alive: Box<dyn Send>,
    ) -> Result<OpHandle, EngineError> {
        self.shared.check_process()?;
        let op = OpHandle::new(self.shared.next_id(), self.shared.completions.clone());
        let continues = self.shared.local.config.on_peer_loss == OnPeerLoss::Continue;
        // Copied here and not on the network thread, which must not be kept from its packets.
        let before = if continues { Before::of(&request) } else { Before::default() };
        let (request, handle) = (Box::new((request, before)), op.clone());
        let in_flight = InFlight::new(op, keep_alive, preset);
        self.shared.send(Command::Submit { group: self.key, request, in_flight })?;
        Ok(handle)
    }

    /// Lets the rank join that has published `record`, in a group that goes on without lost ranks. All members call it for the same
    /// record, and then each makes one exact call among all; with that one ended, the rank may be handed the text that is returned here by
    /// any of them. What the members call next is the first call in which it takes part, if it has come by then
    /// ([`crate::EpochStats::joined`]).
    ///
    /// # Errors
    /// [`JoinError`]: it has another secret or settings, its rank is a member, or this life of it was admitted before.
    pub fn admit(&self, record: String) -> Result<String, JoinError> {
        let (admitted, wait) = channel();
        self.shared.send(Command::Admit { group: self.key, record, admitted })?;
        wait.recv_timeout(ANSWER_MAX).map_err(|_| self.shared.stopped_error())?
    }

    /// Ends everything in flight with [`gradwire_collectives::OpError::ShutDown`], at once; peers are told in the
    /// background. Safe to call at any time and twice.
    pub fn abort(&self) {
        // A stopped engine has ended everything already.
        let _ = self.shared.send(Command::Leave { group: self.key, left: None });
        self.lanes.iter().for_each(|lane| drop(lane.leave()));
    }

    /// Says goodbye to the peers and waits until they have confirmed or the transport has given up on them (half a
    /// second), or `timeout`. Operations that are still in flight end with
    /// [`gradwire_collectives::OpError::ShutDown`]. `false` when `timeout` passed first.
    pub fn leave(&self, timeout: Duration) -> bool {
        // Of a stopped engine the channel says so.
        let lanes = std::iter::once(Lane::new(&self.shared, self.key)).chain(self.lanes.iter().cloned());
        let left: Vec<_> = lanes.map(|lane| lane.leave()).collect();
        wait_for_all(&left, timeout)
    }

    /// On a dedicated server: waits until every worker has left in good order; `None` when `timeout` passed first. The
    /// inner error is why the group failed before that.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn wait_for_workers(&self, timeout: Duration) -> Result<Option<Result<(), OpError>>, EngineError> {
        let (ended, wait) = channel();
        self.shared.send(Command::AwaitWorkers { group: self.key, ended })?;
        match wait.recv_timeout(timeout) {
            Ok(outcome) => Ok(Some(outcome)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.shared.stopped_error()),
        }
    }

    /// Counters of the connection to each peer.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn stats(&self) -> Result<GroupStats, EngineError> {
        let mut stats = stats_of(&self.shared, self.key)?;
        for lane in &self.lanes {
            // One that was of no use has been left.
            if let Ok(part) = stats_of(lane.shared(), lane.key()) {
                stats.add_lane(&part);
            }
        }
        Ok(stats)
    }

    /// Who is waited for.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn watch(&self) -> Result<WatchStats, EngineError> {
        let mut watch = watch_of(&self.shared, self.key)?;
        for lane in &self.lanes {
            if let Ok(part) = watch_of(lane.shared(), lane.key()) {
                watch.add_lane(part);
            }
        }
        Ok(watch)
    }

    /// The same without those of `stragglers` who have not been waited for since this was asked last: what a watch asks for every second. After
    /// hours each rank of a large group has been waited for once.
    ///
    /// # Errors
    /// As [`GroupHandle::watch`].
    pub fn watch_news(&self) -> Result<WatchStats, EngineError> {
        let mut watch = self.watch()?;
        watch.keep_news(&mut lock(&self.told));
        Ok(watch)
    }

    /// The latest collectives with their times: so many of the group's sequence, and as many of the other calls; of both together some
    /// thousand at most.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn timeline(&self, calls: usize) -> Result<Timeline, EngineError> {
        ask(&self.shared, |timeline| Command::Timeline { group: self.key, calls, timeline })
    }
}

/// Asks the network thread about a group.
///
/// # Errors
/// As [`GroupHandle::stats`].
fn ask<T>(shared: &Shared, question: impl FnOnce(Sender<Option<T>>) -> Command) -> Result<T, EngineError> {
    let (answer, wait) = channel();
    shared.send(question(answer))?;
    match wait.recv_timeout(ANSWER_MAX) {
        Ok(Some(answer)) => Ok(answer),
        _ => Err(shared.stopped_error()),
    }
}

fn stats_of(shared: &Shared, group: GroupKey) -> Result<GroupStats, EngineError> {
    ask(shared, |stats| Command::GroupStats { group, stats })
}

fn watch_of(shared: &Shared, group: GroupKey) -> Result<WatchStats, EngineError> {
    ask(shared, |watch| Command::Watch { group, watch })
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.abort();
    }
}
