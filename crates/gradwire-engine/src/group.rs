//! One rank of one process group, as its caller sees it: before and after its peers are known.

use crate::handle::lock;
use crate::here::Here;
use crate::interfaces::Source;
use crate::lineage::{configured_secret, connection, not_running, published, Grid, Lineage, Running};
use crate::rendezvous::{read_one, Record, Roster};
use crate::security::{agree, open_records, Agreed, Channel, JobSecret, PublishedSecret, Security};
use crate::shared::{Command, GroupKey, Shared};
use crate::succession::{Before, NOT_TAKEN_IN};
use crate::{
    EngineConfig, EngineError, GroupStats, JoinError, OnPeerLoss, OpHandle, SecurityStats, Timeline,
    UnreachablePeer, WatchStats,
};
use gradwire_collectives::{ExchangePlan, GroupConfig, OpError, PeerConfig, Request, Servers};
use gradwire_core::ConnectionId;
use gradwire_membership::Epoch;
use std::net::SocketAddr;
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Packets that go over one path at a time where segmentation offload joins them: a burst over many paths would else
/// leave in messages of one or two, and a choice that comes four packets later is as good.
pub(crate) const SPRAY_RUN: u32 = 4;
/// Longest wait for an answer of the network thread, which never blocks: only a bug or a stopped process exceeds it.
const ANSWER_MAX: Duration = Duration::from_secs(10);

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
    pub(crate) fn draw(shared: &Arc<Shared>, rank: u32, world_size: u32) -> Option<Self> {
        let mut reserved = Self { shared: Arc::clone(shared), by_rank: Vec::new() };
        let mut ids = lock(&shared.ids);
        for peer in 0..world_size {
            let id = if peer == rank { None } else { Some(ids.draw()?) };
            reserved.by_rank.push(id);
        }
        drop(ids);
        Some(reserved)
    }
}

impl ReservedIds {
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

/// A group whose peers are not known yet.
pub struct PendingGroup {
    shared: Arc<Shared>,
    record: Record,
    ids: ReservedIds,
    /// For ranks that join later.
    doors: Option<ReservedIds>,
    dedicated: Option<DedicatedServers>,
}

/// Parameter servers that are ranks of their own, numbered behind the workers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DedicatedServers {
    /// So many, at least one. Equal on all ranks.
    pub count: u32,
    /// Bytes that the sums in flight on this rank may take, if it is a server.
    pub buffer_bytes: u64,
}

impl std::fmt::Debug for PendingGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingGroup").field("record", &self.record).finish_non_exhaustive()
    }
}

impl PendingGroup {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        rank: u32,
        (world_size, dedicated): (u32, Option<DedicatedServers>),
        name: &str,
    ) -> Result<Self, EngineError> {
        shared.check_process()?;
        let servers = dedicated.map_or(0, |servers| servers.count);
        let ranks = world_size.saturating_add(servers);
        let invalid = EngineError::RankInvalid { rank, world_size };
        let has_both = world_size > 0 && dedicated.is_none_or(|servers| servers.count > 0);
        if rank >= ranks || ranks > WORLD_SIZE_MAX || !has_both {
            return Err(invalid);
        }
        let ids = ReservedIds::draw(shared, rank, ranks).ok_or(invalid)?;
        let connections = ids.values();
        let config = &shared.local.config;
        let continues = config.on_peer_loss == OnPeerLoss::Continue && dedicated.is_none();
        let doors = if continues { ReservedIds::draw(shared, rank, ranks) } else { None };
        let makes_secret = rank == 0 && config.secret.is_none() && config.security != Security::Off;
        let secret = makes_secret.then(|| PublishedSecret(JobSecret::generate()));
        let places = doors.as_ref().map(ReservedIds::values).unwrap_or_default();
        let record =
            Record { servers, secret, doors: places, ..shared.local.record(name, rank, connections) };
        Ok(Self { shared: Arc::clone(shared), record, ids, doors, dedicated })
    }

    /// This rank is a later life of its own, which joins a group that runs ([`PendingGroup::join_running_while`]). Say so before
    /// [`PendingGroup::record`]; `incarnation` is larger than that of every earlier life.
    pub fn live_again(&mut self, incarnation: u64) {
        (self.record.incarnation, self.record.secret) = (incarnation, None);
    }

    /// This rank's record, JSON of about a kilobyte: format, version, rank, world size, host, addresses, settings; sealed
    /// with the job secret, if one was configured. Publish it in the store that all ranks can read.
    #[must_use]
    pub fn record(&self) -> String {
        published(&self.shared, &self.record)
    }

    /// Compares every rank's record with our own (which may be among them), connects to all peers and returns when all
    /// have answered. `timeout` `None`: the engine's `connect_timeout`.
    ///
    /// # Errors
    /// [`JoinError`]: what disagreed on which rank, or who did not answer at which addresses.
    pub fn join(self, records: &[String], timeout: Option<Duration>) -> Result<GroupHandle, JoinError> {
        self.join_while(records, timeout, || true).map(|joined| joined.expect("nobody called it off"))
    }

    /// [`PendingGroup::join`] that asks several times in a second whether to go on, so that a caller can be interrupted:
    /// `None` when `goes_on` said no before all peers had answered. The group is given up then.
    ///
    /// # Errors
    /// As [`PendingGroup::join`].
    pub fn join_while(
        self,
        records: &[String],
        timeout: Option<Duration>,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<GroupHandle>, JoinError> {
        let records = open_records(&self.record, configured_secret(&self.shared), records)?;
        let roster = Roster::new(&self.record, &records)?;
        let timeout = timeout.unwrap_or(self.shared.local.config.connect_timeout);
        let key = GroupKey(self.shared.next_id());
        let shared = Arc::clone(&self.shared);
        let place = (self.record.rank, self.record.workers());
        let setup = Box::new(self.into_setup(key, &roster)?);
        connect(shared, (setup, &roster), place, timeout, &mut goes_on)
    }

    /// Joins a group that goes on without lost ranks and runs, in the place of an earlier life of this rank: `formed` are the records of
    /// those who formed it, `running` what a member has answered to this rank's record ([`GroupHandle::admit`]). Returns when the members
    /// have decided on an epoch with this rank and reached it: its first call is the first that they make after they have admitted it. Asks
    /// several times in a second whether to go on, as [`PendingGroup::join_while`].
    ///
    /// # Errors
    /// [`JoinError`]: what disagrees; [`JoinError::Failed`] when no member took this rank in, which was then given up.
    pub fn join_running_while(
        self,
        formed: &[String],
        running: &str,
        timeout: Duration,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<GroupHandle>, JoinError> {
        let secret = configured_secret(&self.shared);
        let roster = Roster::of_running(&self.record, &open_records(&self.record, secret, formed)?)?;
        let running = Running::read(running)?;
        let later = open_records(&self.record, secret, &running.records)?;
        let later = later.iter().map(|text| read_one(&self.record, text));
        let later = later.collect::<Result<Vec<Record>, JoinError>>()?;
        let key = GroupKey(self.shared.next_id());
        let (shared, place) = (Arc::clone(&self.shared), (self.record.rank, self.record.workers()));
        let setup = Box::new(self.into_joining(key, &roster, later, &running)?);
        connect(shared, (setup, &roster), place, timeout, &mut goes_on).map_err(|error| match error {
            // It has no peers of its own until it is a member.
            JoinError::Unreachable { peers, waited, .. } if peers.is_empty() => {
                not_taken_in(&running, waited)
            }
            other => other,
        })
    }

    fn into_joining(
        mut self,
        key: GroupKey,
        roster: &Roster,
        later: Vec<Record>,
        running: &Running,
    ) -> Result<GroupSetup, JoinError> {
        let agreed = agree(self.shared.local.config.security, configured_secret(&self.shared), roster)?;
        let grid = Grid {
            datagram_bytes: roster.datagram_bytes,
            paths: roster.paths,
            fingerprint: roster.fingerprint(),
        };
        let Some(mut lineage) = self.lineage(roster, &agreed, grid)? else {
            return Err(not_running("only a group with on_peer_loss = continue can be joined".to_owned()));
        };
        for record in later.into_iter().chain([self.record.clone()]) {
            let rank = record.rank as usize;
            lineage.records[rank] = record;
        }
        let contacts = running.epoch(lineage.rank, |rank| lineage.member(rank))?;
        let (rank, world_size, peers) = (0, 1, Vec::new());
        let (exchange, servers) = (ExchangePlan::DEFAULT, Servers::EVERY_RANK);
        let incast = self.shared.local.config.incast;
        Ok(GroupSetup {
            key,
            name: self.record.group.clone(),
            config: GroupConfig { rank, world_size, peers, incast, exchange, servers },
            candidates: Vec::new(),
            channels: Vec::new(),
            security: lineage.security(),
            datagram_bytes: grid.datagram_bytes,
            source_ports: self.record.source_ports.clone(),
            paths: grid.paths,
            sources: self.shared.local.sources.clone(),
            // The epoch that takes it in counts them: of the records some are of ranks that have gone.
            here: Here::ALONE,
            ids: ReservedIds { shared: Arc::clone(&self.shared), by_rank: vec![None] },
            lineage: Some(lineage),
            contacts: Some(contacts),
        })
    }

    fn into_setup(mut self, key: GroupKey, roster: &Roster) -> Result<GroupSetup, JoinError> {
        let mut peers = Vec::new();
        let mut candidates = Vec::new();
        let mut channels = Vec::new();
        let mode = self.shared.local.config.security;
        let agreed = agree(mode, configured_secret(&self.shared), roster)?;
        let fingerprint = roster.fingerprint();
        let grid = Grid { datagram_bytes: roster.datagram_bytes, paths: roster.paths, fingerprint };
        let lineage = self.lineage(roster, &agreed, grid)?;
        for theirs in roster.records.iter().filter(|record| record.rank != self.record.rank) {
            let ids = (self.ids.by_rank[theirs.rank as usize], theirs.connections[self.record.rank as usize]);
            let connection = connection(&self.shared, (&self.record, theirs), ids, grid)?;
            let host = match theirs.rank.checked_sub(self.record.workers()) {
                Some(index) => format!("parameter server {index} on {}", theirs.host),
                None => theirs.host.clone(),
            };
            peers.push(PeerConfig { rank: theirs.rank, host, connection });
            candidates.push(self.record.candidates(theirs));
            channels.push(agreed.channel(&self.record, theirs, roster.paths));
        }
        let (rank, world_size) = (self.record.rank, self.record.workers());
        let EngineConfig { incast, servers, .. } = self.shared.local.config;
        let servers = match self.dedicated {
            Some(DedicatedServers { count, buffer_bytes }) => Servers::Dedicated { count, buffer_bytes },
            None => servers.map_or(Servers::EVERY_RANK, Servers::Colocated),
        };
        Ok(GroupSetup {
            key,
            name: self.record.group.clone(),
            config: GroupConfig { rank, world_size, peers, incast, exchange: ExchangePlan::DEFAULT, servers },
            candidates,
            channels,
            security: SecurityStats {
                cipher: agreed.cipher_name(),
                secret_configured: self.shared.local.config.secret.is_some(),
                all_local: roster.is_local(),
            },
            datagram_bytes: roster.datagram_bytes,
            source_ports: self.record.source_ports.clone(),
            paths: roster.paths,
            sources: self.shared.local.sources.clone(),
            here: Here::of(rank as usize, roster.records.iter().map(|record| record.boot_id.as_str())),
            ids: self.ids,
            lineage,
            contacts: None,
        })
    }

    fn lineage(
        &mut self,
        roster: &Roster,
        agreed: &Agreed,
        grid: Grid,
    ) -> Result<Option<Box<Lineage>>, JoinError> {
        if self.shared.local.config.on_peer_loss == OnPeerLoss::Raise {
            return Ok(None);
        }
        let allowed = if self.dedicated.is_some() {
            Some("`raise` in a group with dedicated parameter servers")
        } else if Lineage::fits(roster.records.len(), grid.datagram_bytes) {
            None
        } else {
            Some("`raise` in a group whose members do not fit into one datagram: 64 ranks, fewer below an MTU of 1000 bytes")
        };
        if let Some(allowed) = allowed {
            let value = "continue".to_owned();
            return Err(EngineError::ConfigInvalid { field: "on_peer_loss", value, allowed }.into());
        }
        let shared = Arc::clone(&self.shared);
        let (records, agreed) = (roster.records.clone(), agreed.clone());
        let (rank, is_local) = (self.record.rank, roster.is_local());
        let Some(doors) = self.doors.take() else {
            return Err(EngineError::RankInvalid { rank, world_size: self.record.world_size }.into());
        };
        Ok(Some(Box::new(Lineage { shared, records, agreed, grid, is_local, doors, rank })))
    }
}

/// Hands a group to the network thread and waits until it is connected.
fn connect(
    shared: Arc<Shared>,
    (setup, roster): (Box<GroupSetup>, &Roster),
    (rank, world_size): (u32, u32),
    timeout: Duration,
    goes_on: &mut impl FnMut() -> bool,
) -> Result<Option<GroupHandle>, JoinError> {
    let key = setup.key;
    let (connected, wait) = channel();
    shared.send(Command::Join { setup, connected })?;
    let handle = GroupHandle { shared, key, rank, world_size };
    let started = Instant::now();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        match wait.recv_timeout(left.min(ASK_INTERVAL)) {
            Ok(Ok(())) => return Ok(Some(handle)),
            Ok(Err(error)) => return Err(JoinError::Failed(error)),
            Err(RecvTimeoutError::Disconnected) => return Err(handle.shared.stopped_error().into()),
            Err(RecvTimeoutError::Timeout) if left <= ASK_INTERVAL => {
                return Err(handle.unreachable(roster, timeout));
            }
            // Dropped, the handle leaves: who was reached already is told.
            Err(RecvTimeoutError::Timeout) if !goes_on() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

/// Members answered, and did not decide on an epoch with this rank.
fn not_taken_in(running: &Running, waited: Duration) -> JoinError {
    let cause = format!("nothing was decided within {waited:?}: start it again");
    JoinError::Failed(OpError::NotMember { epoch: running.number(), outcome: NOT_TAKEN_IN, cause })
}

/// How soon an interrupted caller is heard.
const ASK_INTERVAL: Duration = Duration::from_millis(200);
/// Largest group: each rank needs a connection id for every other, and there are 65,536 in a process.
const WORLD_SIZE_MAX: u32 = 16_384;

/// Name of the calls without a policy in statistics.
const EXACT: &str = "exact";

/// One rank of a connected process group. Dropping it leaves the group in the background.
pub struct GroupHandle {
    shared: Arc<Shared>,
    key: GroupKey,
    rank: u32,
    world_size: u32,
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
        self.shared.send(Command::Submit { group: self.key, request, preset, op, keep_alive })?;
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
    }

    /// Says goodbye to the peers and waits until they have confirmed or the transport has given up on them (half a
    /// second), or `timeout`. Operations that are still in flight end with
    /// [`gradwire_collectives::OpError::ShutDown`]. `false` when `timeout` passed first.
    pub fn leave(&self, timeout: Duration) -> bool {
        let (left, wait) = channel();
        if self.shared.send(Command::Leave { group: self.key, left: Some(left) }).is_err() {
            return true;
        }
        !matches!(wait.recv_timeout(timeout), Err(RecvTimeoutError::Timeout))
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
        let (stats, wait) = channel();
        self.shared.send(Command::GroupStats { group: self.key, stats })?;
        match wait.recv_timeout(ANSWER_MAX) {
            Ok(Some(stats)) => Ok(stats),
            _ => Err(self.shared.stopped_error()),
        }
    }

    /// Who is waited for: what a watch asks for every second.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn watch(&self) -> Result<WatchStats, EngineError> {
        let (watch, wait) = channel();
        self.shared.send(Command::Watch { group: self.key, watch })?;
        match wait.recv_timeout(ANSWER_MAX) {
            Ok(Some(watch)) => Ok(watch),
            _ => Err(self.shared.stopped_error()),
        }
    }

    /// The latest collectives with their times, some thousand at most.
    ///
    /// # Errors
    /// [`EngineError::Stopped`] (also when this group was left), [`EngineError::Forked`].
    pub fn timeline(&self) -> Result<Timeline, EngineError> {
        let (timeline, wait) = channel();
        self.shared.send(Command::Timeline { group: self.key, timeline })?;
        match wait.recv_timeout(ANSWER_MAX) {
            Ok(Some(timeline)) => Ok(timeline),
            _ => Err(self.shared.stopped_error()),
        }
    }

    fn unreachable(&self, roster: &Roster, waited: Duration) -> JoinError {
        let (missing, wait) = channel();
        if let Err(error) = self.shared.send(Command::Abandon { group: self.key, missing }) {
            return error.into();
        }
        let Ok(missing) = wait.recv_timeout(ANSWER_MAX) else { return self.shared.stopped_error().into() };
        let host = |rank: u32| roster.records.get(rank as usize).map_or(String::new(), |r| r.host.clone());
        let peers = missing
            .into_iter()
            .map(|peer| UnreachablePeer {
                rank: peer.rank,
                host: host(peer.rank),
                tried: peer.tried,
                answers_small: peer.answers_small,
            })
            .collect();
        JoinError::Unreachable { peers, datagram_bytes: roster.datagram_bytes, waited }
    }
}

impl Drop for GroupHandle {
    fn drop(&mut self) {
        self.abort();
    }
}
