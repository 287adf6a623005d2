//! A group before its peers are known: what a rank publishes, and how it joins.

use crate::group::{GroupHandle, GroupSetup, ReservedIds, ANSWER_MAX};
use crate::here::Here;
use crate::lanes::{Connecting, Lane, LaneSetup};
use crate::lineage::{configured_secret, connection, not_running, published, Grid, Lineage, Running};
use crate::place::is_unknown_boot;
use crate::rendezvous::{read_one, Record, Roster};
use crate::security::{agree, open_records, Agreed, JobSecret, PublishedSecret, Security};
use crate::shared::{Command, GroupKey, Shared};
use crate::succession::NOT_TAKEN_IN;
use crate::{EngineConfig, EngineError, JoinError, OnPeerLoss, OsError, SecurityStats, UnreachablePeer};
use gradwire_collectives::{ExchangePlan, GroupConfig, OpError, PeerConfig, Servers};
use std::sync::mpsc::{channel, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A group whose peers are not known yet.
pub struct PendingGroup {
    shared: Arc<Shared>,
    record: Record,
    ids: ReservedIds,
    /// For ranks that join later.
    doors: Option<ReservedIds>,
    dedicated: Option<DedicatedServers>,
    /// On further network threads, of the records in this one's.
    lanes: Vec<PendingGroup>,
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
        let has_both = world_size > 0 && dedicated.is_none_or(|servers| servers.count > 0);
        if rank >= ranks || ranks > WORLD_SIZE_MAX || !has_both {
            return Err(EngineError::RankInvalid { rank, world_size });
        }
        let ids = ReservedIds::draw(shared, rank, ranks)?;
        let connections = ids.values();
        let config = &shared.local.config;
        let continues = config.on_peer_loss == OnPeerLoss::Continue && dedicated.is_none();
        let doors = if continues { Some(ReservedIds::draw(shared, rank, ranks)?) } else { None };
        let makes_secret = rank == 0 && config.secret.is_none() && config.security != Security::Off;
        let secret = makes_secret.then(|| PublishedSecret(JobSecret::generate()));
        let places = doors.as_ref().map(ReservedIds::values).unwrap_or_default();
        let record =
            Record { servers, secret, doors: places, ..shared.local.record(name, rank, connections) };
        Ok(Self { shared: Arc::clone(shared), record, ids, doors, dedicated, lanes: Vec::new() })
    }

    /// Has it divide what is large with groups on these network threads, where the others do too. Who goes on without lost ranks does not.
    ///
    /// # Errors
    /// As [`PendingGroup::new`].
    pub(crate) fn with_lanes<'a>(
        mut self,
        further: impl Iterator<Item = &'a Arc<Shared>>,
    ) -> Result<Self, EngineError> {
        let Record { rank, world_size, .. } = self.record;
        let is_asked = self.shared.local.config.network_threads.is_some();
        let ranks = if is_asked { 2..=WORLD_SIZE_MAX } else { 2..=LANE_RANKS_MAX };
        if self.doors.is_some() || self.dedicated.is_some() || !ranks.contains(&world_size) {
            return Ok(self);
        }
        for (number, shared) in (2..).zip(further.filter(|shared| shared.is_running())) {
            let name = format!("{}/thread {number}", self.record.group);
            let lane = Self::new(shared, rank, (world_size, None), &name)?;
            self.record.lanes.push(lane.record.clone());
            self.lanes.push(lane);
        }
        Ok(self)
    }

    /// This rank is a later life of its own, which joins a group that runs ([`PendingGroup::join_running_while`]). Say so before
    /// [`PendingGroup::record`]; `incarnation` is larger than that of every earlier life.
    pub fn live_again(&mut self, incarnation: u64) {
        (self.record.incarnation, self.record.secret) = (incarnation, None);
    }

    /// This rank's record, JSON of about a kilobyte for each network thread: format, version, rank, world size, host, addresses, settings; sealed
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
        let others = of_other_family(&self.record, &roster);
        if !others.is_empty() {
            return Err(other_family(&self.record, &others));
        }
        let timeout = timeout.unwrap_or(self.shared.local.config.connect_timeout);
        let key = GroupKey(self.shared.next_id());
        let shared = Arc::clone(&self.shared);
        let place = (self.record.rank, self.record.workers());
        let setup = Box::new(self.into_setup(key, &roster)?);
        connect(shared, (setup, &roster), place, timeout, &mut goes_on)
    }

    /// Has the lanes connect that every rank has. Those with a record that fits no other are not used, as if that rank had none.
    fn connect_lanes(&mut self, first: &Lane, roster: &Roster) -> LaneSetup {
        let insists = self.shared.local.config.network_threads.is_some();
        let mut connecting = Vec::new();
        let further = roster.threads_max().saturating_sub(1);
        for (number, pending) in std::mem::take(&mut self.lanes).into_iter().take(further).enumerate() {
            let Some(connected) = pending.connect_as_lane(number, first, roster) else { break };
            connecting.push(connected);
        }
        LaneSetup { connecting, first: None, insists }
    }

    /// Has it connect as the lane of that number, of which the records are in those of `roster`.
    fn connect_as_lane(self, number: usize, first: &Lane, roster: &Roster) -> Option<Connecting> {
        let record = |of: &Record| of.lanes.get(number).map(Record::to_json);
        let records = roster.records.iter().map(record).collect::<Option<Vec<String>>>()?;
        let roster = Roster::new(&self.record, &records).ok()?;
        let (shared, key) = (Arc::clone(&self.shared), GroupKey(self.shared.next_id()));
        let mut setup = self.into_setup(key, &roster).ok()?;
        setup.lanes.first = Some(first.clone());
        Some(Lane::connect(Box::new(setup), &shared))
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
            ids: ReservedIds::none(&self.shared),
            lanes: LaneSetup::default(),
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
        let security = SecurityStats {
            cipher: agreed.cipher_name(),
            secret_configured: self.shared.local.config.secret.is_some(),
            all_local: roster.is_local(),
        };
        let fingerprint = roster.fingerprint();
        let grid = Grid { datagram_bytes: roster.datagram_bytes, paths: roster.paths, fingerprint };
        let lineage = self.lineage(roster, &agreed, grid)?;
        for theirs in roster.records.iter().filter(|record| record.rank != self.record.rank) {
            let ids = (self.ids.by_rank[theirs.rank as usize], theirs.connections[self.record.rank as usize]);
            let connection = connection(&self.shared, (&self.record, theirs), ids, (grid, &agreed))?;
            channels.push(agreed.channel(&self.record, theirs, (roster.paths, connection.overtaken_max())));
            let host = match theirs.rank.checked_sub(self.record.workers()) {
                Some(index) => format!("parameter server {index} on {}", theirs.host),
                None => theirs.host.clone(),
            };
            peers.push(PeerConfig { rank: theirs.rank, host, connection });
            candidates.push(self.record.candidates(theirs, security.stays_within_host()));
        }
        let lanes = self.connect_lanes(&Lane::new(&self.shared, key), roster);
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
            security,
            datagram_bytes: roster.datagram_bytes,
            source_ports: self.record.source_ports.clone(),
            paths: roster.paths,
            sources: self.shared.local.sources.clone(),
            here: Here::of(rank as usize, roster.records.iter().map(|record| record.boot_id.as_str())),
            ids: self.ids,
            lanes,
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

#[cfg(test)]
impl PendingGroup {
    /// What its group would be formed again with.
    pub(crate) fn into_lineage(self, records: &[String]) -> Option<Box<Lineage>> {
        self.into_setup_of(records)?.lineage
    }

    /// What its group would be formed with.
    pub(crate) fn into_setup_of(self, records: &[String]) -> Option<GroupSetup> {
        let roster = Roster::new(&self.record, records).ok()?;
        let key = GroupKey(self.shared.next_id());
        self.into_setup(key, &roster).ok()
    }

    /// The network thread that its group would be on.
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
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
    let lanes = setup.lanes.connecting.iter().map(|connecting| connecting.lane.clone()).collect();
    let (connected, wait) = channel();
    // From here on it leaves its lanes when it is dropped.
    let handle = GroupHandle { shared, key, rank, world_size, lanes, told: Mutex::default() };
    handle.shared.send(Command::Join { setup, connected })?;
    let started = Instant::now();
    loop {
        let left = timeout.saturating_sub(started.elapsed());
        match wait.recv_timeout(left.min(ASK_INTERVAL)) {
            Ok(connected) => return joined(handle, connected),
            Err(RecvTimeoutError::Disconnected) => return Err(handle.shared.stopped_error().into()),
            Err(RecvTimeoutError::Timeout) if left <= ASK_INTERVAL => {
                let error = unreachable(&handle, roster, timeout);
                // The last peer may have answered in the meantime; then nobody is missing.
                return wait.try_recv().map_or(Err(error), |connected| joined(handle, connected));
            }
            // Dropped, the handle leaves: who was reached already is told.
            Err(RecvTimeoutError::Timeout) if !goes_on() => return Ok(None),
            Err(RecvTimeoutError::Timeout) => {}
        }
    }
}

fn joined(handle: GroupHandle, connected: Result<(), OpError>) -> Result<Option<GroupHandle>, JoinError> {
    connected.map(|()| Some(handle)).map_err(JoinError::Failed)
}

/// The ranks that use the other version of IP.
fn of_other_family<'r>(ours: &Record, roster: &'r Roster) -> Vec<&'r Record> {
    roster.records.iter().filter(|theirs| theirs.ipv6 != ours.ipv6).collect()
}

fn other_family(own: &Record, others: &[&Record]) -> JoinError {
    let name = |ipv6: bool| if ipv6 { "IPv6" } else { "IPv4" };
    JoinError::OtherFamily {
        ranks: others.iter().map(|record| record.rank).collect(),
        peers: others.iter().map(|record| format!("{} ({})", record.rank, record.host)).collect(),
        theirs: name(!own.ipv6),
        ours: name(own.ipv6),
    }
}

/// Says who did not answer. The group ends when `handle` is dropped.
fn unreachable(handle: &GroupHandle, roster: &Roster, waited: Duration) -> JoinError {
    let (missing, wait) = channel();
    if let Err(error) = handle.shared.send(Command::Unanswered { group: handle.key, missing }) {
        return error.into();
    }
    let Ok(missing) = wait.recv_timeout(ANSWER_MAX) else { return handle.shared.stopped_error().into() };
    let host = |rank: u32| roster.records.get(rank as usize).map_or(String::new(), |r| r.host.clone());
    let is_known = !is_unknown_boot(&handle.shared.local.place.boot_id);
    let is_unknown =
        |rank: u32| roster.records.get(rank as usize).is_some_and(|r| is_unknown_boot(&r.boot_id));
    let peers = missing
        .into_iter()
        .map(|peer| UnreachablePeer {
            rank: peer.rank,
            host: host(peer.rank),
            tried: peer.tried,
            answers_small: peer.answers_small,
            host_unknown: !is_known || is_unknown(peer.rank),
        })
        .collect();
    let (datagram_bytes, refused) = (roster.datagram_bytes, all_refused(handle));
    JoinError::Unreachable { peers, datagram_bytes, waited, refused }
}

/// What the system says to all that this thread sends, if it takes none of it.
fn all_refused(handle: &GroupHandle) -> Option<OsError> {
    let (stats, wait) = channel();
    handle.shared.send(Command::EngineStats { stats }).ok()?;
    let stats = wait.recv_timeout(ANSWER_MAX).ok()?;
    let is_all = stats.datagrams_sent == 0 && stats.send_refused_errno != 0;
    is_all.then_some(OsError(stats.send_refused_errno))
}

/// Members answered, and did not decide on an epoch with this rank.
fn not_taken_in(running: &Running, waited: Duration) -> JoinError {
    let cause = format!("nothing was decided within {waited:?}: start it again");
    JoinError::Failed(OpError::NotMember { epoch: running.number(), outcome: NOT_TAKEN_IN, cause })
}

/// How soon an interrupted caller is heard.
const ASK_INTERVAL: Duration = Duration::from_millis(200);
/// In larger groups nobody gets unasked what each thread has for every other rank: a connection, and a number in every record.
pub const LANE_RANKS_MAX: u32 = 128;
/// Largest group: each rank needs a connection id for every other, and there are 65,536 in a process.
pub const WORLD_SIZE_MAX: u32 = 16_384;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::SLOTS_MAX;
    use crate::{Completions, Engine};

    /// Joins a group of one on a network thread that says how it has ended only when it is given up.
    fn joined_at_the_last_moment(connected: Result<(), OpError>) -> Result<Option<GroupHandle>, JoinError> {
        let engine = Engine::start(EngineConfig { network_threads: Some(1), ..EngineConfig::default() });
        let pending = engine.expect("it starts").new_group(0, 1, "late").expect("valid");
        let Shared { local, features, .. } = &*pending.shared;
        let of_engine = (features.clone(), Vec::new());
        let shared = Shared::new(local.clone(), of_engine, (Instant::now(), Completions::default()));
        let shared = Arc::new(shared.expect("descriptors are left"));
        let roster = Roster::new(&pending.record, &[]).expect("of one");
        let setup = Box::new(pending.into_setup(GroupKey(1), &roster).expect("valid"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut commands, mut waiting) = (Vec::new(), None);
                let begun = Instant::now();
                let missing = loop {
                    assert!(begun.elapsed() < Duration::from_secs(30), "nobody gives it up");
                    if commands.is_empty() {
                        shared.take_commands(&mut commands);
                    }
                    match (!commands.is_empty()).then(|| commands.remove(0)) {
                        Some(Command::Join { connected, .. }) => waiting = Some(connected),
                        Some(Command::Unanswered { missing, .. }) => break missing,
                        _ => std::thread::yield_now(),
                    }
                };
                waiting.expect("it was handed over before").send(connected).expect("it is waited for");
                missing.send(Vec::new()).expect("it is waited for");
            });
            connect(Arc::clone(&shared), (setup, &roster), (0, 1), Duration::ZERO, &mut || true)
        })
    }

    #[test]
    fn a_join_that_ends_while_it_is_given_up_has_ended_so() {
        assert!(matches!(joined_at_the_last_moment(Ok(())), Ok(Some(_))));
        let error = OpError::Invalid("as it was told".to_owned());
        let outcome = joined_at_the_last_moment(Err(error.clone())).map(|_| ());
        assert_eq!(outcome, Err(JoinError::Failed(error)));
    }

    #[test]
    fn a_group_for_which_no_connection_ids_are_left_says_how_many_others_hold() {
        let config = EngineConfig { port: 0, network_threads: Some(1), ..EngineConfig::default() };
        let engine = Engine::start(config).expect("it starts");
        let largest = |name: &str| engine.new_group(1, WORLD_SIZE_MAX, name);
        let mut living: Vec<PendingGroup> =
            (0..4).map(|number| largest(&number.to_string()).expect("there are ids")).collect();
        let (needed, held) = (WORLD_SIZE_MAX - 1, 4 * (WORLD_SIZE_MAX as usize - 1));
        let expected = EngineError::ConnectionIdsUsedUp { needed, held, ids: SLOTS_MAX };
        let refused = largest("one too many").map(|_| ()).expect_err("there are none");
        assert_eq!(refused, expected);
        let text = refused.to_string();
        assert!(text.contains("16383") && text.contains("65532 of 65536"), "{text}");
        // What was drawn for it is free again, and so is what another one gives back.
        living.push(engine.new_group(0, 1 + (SLOTS_MAX - held) as u32, "small").expect("there are ids"));
        drop(living.remove(0));
        largest("in its place").expect("there are ids again");
    }
}
