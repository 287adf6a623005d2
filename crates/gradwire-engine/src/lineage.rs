//! What a group was formed with. A group that goes on without lost ranks is formed again with it for each epoch, and it says how a rank that
//! joins is spoken to.

use crate::group::{GroupSetup, ReservedIds, SPRAY_RUN};
use crate::here::Here;
use crate::lanes::LaneSetup;
use crate::rendezvous::{read_one, Record};
use crate::security::{open_records, seal_record, Agreed, Channel, JobSecret, Security};
use crate::shared::{GroupKey, Shared};
use crate::succession::COUNT_MAX;
use crate::{EngineConfig, JoinError, SecurityStats};
use gradwire_collectives::{ExchangePlan, GroupConfig, PeerConfig, Servers};
use gradwire_core::wire::{HEADER_BYTES, TAG_BYTES};
use gradwire_core::{ConnectionConfig, ConnectionId};
use gradwire_membership::{Epoch, Member, Message, MEMBERS_MAX};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::sync::Arc;

/// What all connections of a group have in common.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub(crate) datagram_bytes: usize,
    pub(crate) paths: u8,
    pub(crate) fingerprint: u64,
}

pub(crate) fn connection(
    shared: &Shared,
    (ours, theirs): (&Record, &Record),
    (local, remote): (Option<ConnectionId>, u32),
    (grid, agreed): (Grid, &Agreed),
) -> Result<ConnectionConfig, JoinError> {
    let Some((local, remote)) = local.zip(ConnectionId::new(remote)) else {
        let problem = "a connection id does not fit in 24 bits".to_owned();
        return Err(JoinError::RecordInvalid { position: theirs.rank as usize, problem });
    };
    let config = &shared.local.config;
    let senders = u64::from(ours.world_size - 1).max(1);
    Ok(ConnectionConfig {
        local,
        remote,
        datagram_bytes: grid.datagram_bytes,
        fingerprint: grid.fingerprint,
        hello: agreed.hello(ours, theirs, grid.fingerprint),
        eager_bytes: config.eager_bytes,
        ack_every: config.ack_every,
        ack_delay_max: config.ack_delay_max,
        controller: config.controller,
        initial_rate: config.initial_rate,
        incast: ours.world_size - 1,
        turn: gradwire_core::recovery::Turn::Any,
        // The kernel counts its own overhead of each buffer as well, about as much as the data in the worst case.
        receive_buffer_bytes: theirs.receive_buffer_bytes / 2 / senders,
        peer_timeout: config.peer_timeout,
        paths: grid.paths,
        spray: config.spray,
        class_queues: config.class_queues,
        spray_run: if shared.features.gso { SPRAY_RUN } else { 1 },
    })
}

/// What a group was formed with, and is formed with again among those who are left.
pub(crate) struct Lineage {
    pub(crate) shared: Arc<Shared>,
    /// By rank, of the latest life that has been a member.
    pub(crate) records: Vec<Record>,
    pub(crate) agreed: Agreed,
    pub(crate) grid: Grid,
    /// Whether all meet over loopback, in clear unless security is `on`.
    pub(crate) is_local: bool,
    /// Connection ids by which later lives of other ranks are heard before they are members.
    pub(crate) doors: ReservedIds,
    /// This one's, in the first epoch.
    pub(crate) rank: u32,
}

/// How a later life of a rank is spoken to before it is a member.
pub(crate) struct DoorSetup {
    pub(crate) candidates: Vec<SocketAddr>,
    pub(crate) channel: Option<Channel>,
    /// Connection id that it wants to see.
    pub(crate) remote: ConnectionId,
}

impl Lineage {
    /// Whether what the members of a group of so many say about it fits into a datagram.
    pub(crate) fn fits(members: usize, datagram_bytes: usize) -> bool {
        let bytes = HEADER_BYTES + 1 + Message::bytes_max(members) + TAG_BYTES;
        members <= MEMBERS_MAX && bytes <= datagram_bytes
    }

    /// Ranks of the first epoch.
    pub(crate) fn world_size(&self) -> u32 {
        self.records.len() as u32
    }

    /// The latest life of a rank that has been a member.
    pub(crate) fn member(&self, rank: u32) -> Option<Member> {
        self.records.get(rank as usize).map(Record::member)
    }

    /// Reads what a rank has published to join.
    ///
    /// # Errors
    /// It has another secret, or disagrees with what the group has agreed on.
    pub(crate) fn read(&self, text: &str) -> Result<Record, JoinError> {
        let ours = &self.records[self.rank as usize];
        let opened = open_records(ours, configured_secret(&self.shared), &[text.to_owned()])?;
        let theirs = read_one(ours, &opened[0])?;
        theirs.fits_into(ours, (self.grid.datagram_bytes, self.grid.paths, self.is_local))?;
        Ok(theirs)
    }

    /// How to speak to a later life of a rank, or as one to a member. Its keys are those of two lives: what one of an earlier life has said
    /// opens nowhere.
    pub(crate) fn door(&self, theirs: &Record) -> Option<DoorSetup> {
        let as_door = |record: &Record| {
            let (group, connections) = (format!("{}/door", record.group), record.doors.clone());
            Record { group, connections, ..record.clone() }
        };
        let (ours, theirs) = (as_door(&self.records[self.rank as usize]), as_door(theirs));
        let remote = ConnectionId::new(*theirs.connections.get(self.rank as usize)?)?;
        // No data goes over it.
        let channel = self.agreed.channel(&ours, &theirs, (self.grid.paths, 0));
        let within_host = self.security().stays_within_host();
        Some(DoorSetup { candidates: ours.candidates(&theirs, within_host), channel, remote })
    }

    /// What a rank that joins needs to know.
    pub(crate) fn running(&self, epoch: u64, members: &[Member]) -> String {
        let later = |member: &&Member| member.incarnation > 0;
        let record = |member: &Member| published(&self.shared, &self.records[member.rank as usize]);
        let records = members.iter().filter(later).map(record).collect();
        let members = members.iter().map(|member| (member.rank, member.incarnation)).collect();
        serde_json::to_string(&Running { epoch, members, records }).expect("plain data")
    }

    pub(crate) fn security(&self) -> SecurityStats {
        SecurityStats {
            cipher: self.agreed.cipher_name(),
            secret_configured: self.shared.local.config.secret.is_some(),
            all_local: self.is_local,
        }
    }

    /// The host of a rank of the first epoch.
    pub(crate) fn host(&self, rank: u32) -> String {
        self.records.get(rank as usize).map_or(String::new(), |record| record.host.clone())
    }

    /// The group of an epoch: its members are numbered from 0 in the order of their first ranks. Keys depend on the epoch and on
    /// the connection ids, so nothing of another epoch opens. `remote`: the connection id that a member wants to see, by its first rank.
    pub(crate) fn setup(
        &self,
        key: GroupKey,
        members: (u64, &[u32]),
        ids: ReservedIds,
        remote: impl Fn(u32) -> u32,
    ) -> Result<GroupSetup, JoinError> {
        let (epoch, members) = members;
        let place = members.iter().position(|rank| *rank == self.rank).unwrap_or_default();
        let world_size = members.len() as u32;
        let name = self.records[self.rank as usize].group.clone();
        let record = |index: usize| {
            let mut record = self.records[members[index] as usize].clone();
            (record.rank, record.world_size) = (index as u32, world_size);
            record.group = format!("{name}/epoch/{epoch}");
            record.connections = vec![0; members.len()];
            record
        };
        let fingerprint = members.iter().fold(self.grid.fingerprint ^ epoch, |digest, rank| {
            (digest ^ u64::from(*rank)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let grid = Grid { fingerprint, ..self.grid };
        let mut ours = record(place);
        ours.connections = ids.values();
        let (mut peers, mut candidates, mut channels) = (Vec::new(), Vec::new(), Vec::new());
        for index in (0..members.len()).filter(|index| *index != place) {
            let mut theirs = record(index);
            theirs.connections[place] = remote(members[index]);
            let ids = (ids.by_rank[index], theirs.connections[place]);
            let connection = connection(&self.shared, (&ours, &theirs), ids, (grid, &self.agreed))?;
            channels.push(self.agreed.channel(&ours, &theirs, (grid.paths, connection.overtaken_max())));
            let host = format!("rank {} of the first epoch, on {}", members[index], theirs.host);
            peers.push(PeerConfig { rank: index as u32, host, connection });
            candidates.push(ours.candidates(&theirs, self.security().stays_within_host()));
        }
        let EngineConfig { incast, servers, .. } = self.shared.local.config;
        let servers = servers.map_or(Servers::EVERY_RANK, Servers::Colocated);
        let rank = place as u32;
        Ok(GroupSetup {
            key,
            name,
            config: GroupConfig { rank, world_size, peers, incast, exchange: ExchangePlan::DEFAULT, servers },
            candidates,
            channels,
            security: self.security(),
            datagram_bytes: grid.datagram_bytes,
            source_ports: ours.source_ports,
            paths: grid.paths,
            sources: self.shared.local.sources.clone(),
            here: Here::of(place, members.iter().map(|rank| self.records[*rank as usize].boot_id.as_str())),
            ids,
            lanes: LaneSetup::default(),
            lineage: None,
            contacts: None,
        })
    }
}

/// The configured secret, where it is used.
pub(crate) fn configured_secret(shared: &Shared) -> Option<&JobSecret> {
    let config = &shared.local.config;
    config.secret.as_ref().filter(|_| config.security != Security::Off)
}

/// What others may see of a record.
pub(crate) fn published(shared: &Shared, record: &Record) -> String {
    match configured_secret(shared) {
        Some(secret) => seal_record(secret, record),
        None => record.to_json(),
    }
}

/// What a rank that joins is told: members with their lives, and the records of those who have joined before it. Believed as far as the
/// records are: who is in the group is heard from the members themselves.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Running {
    pub(crate) epoch: u64,
    pub(crate) members: Vec<(u32, u64)>,
    pub(crate) records: Vec<String>,
}

impl Running {
    pub(crate) fn read(text: &str) -> Result<Self, JoinError> {
        serde_json::from_str(text).map_err(|error| not_running(error.to_string()))
    }

    /// The epoch that a member was in when it answered.
    pub(crate) fn number(&self) -> u64 {
        self.epoch
    }

    /// What rank `own` may ask; `member_of`: the life of a rank whose record is here.
    pub(crate) fn epoch(
        &self,
        own: u32,
        member_of: impl Fn(u32) -> Option<Member>,
    ) -> Result<Epoch, JoinError> {
        if self.epoch >= COUNT_MAX {
            // No member would read a question about it.
            return Err(not_running(format!("it is in epoch {}, and none counts so far", self.epoch)));
        }
        let life = |&(rank, incarnation): &(u32, u64)| Member { rank, incarnation };
        let mut members: Vec<Member> = self.members.iter().map(life).collect();
        members.sort_unstable();
        members.dedup();
        let known = |member: &Member| member_of(member.rank) == Some(*member);
        let asks = |member: &Member| member.rank != own;
        match members.first().copied() {
            Some(source) if members.iter().all(|member| known(member) && asks(member)) => {
                Ok(Epoch { number: self.epoch, members, frontier: 0, source })
            }
            _ => Err(not_running("its members are not those whose records are here".to_owned())),
        }
    }
}

pub(crate) fn not_running(problem: String) -> JoinError {
    JoinError::RecordInvalid { position: 0, problem: format!("the group that runs: {problem}") }
}
