//! What ranks tell each other through a store before they connect, and what must agree.
//!
//! Everything that can be compared is compared here, before the first packet: a difference becomes an error that names
//! the rank and both values, on every rank, because every rank reads every record.

mod reach;

use crate::config::DATAGRAM_BYTES_MIN;
use crate::cores::Cores;
use crate::digest::Fnv;
use crate::interfaces::Source;
use crate::place::Place;
use crate::security::{random_bytes, Cipher, Hex, PublishedSecret, RANDOM_BYTES};
use crate::{EngineConfig, JoinError};
use gradwire_core::wire::VERSION;
use gradwire_core::PATHS_MAX;
use gradwire_membership::Member;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;

/// Version of the record's own form.
pub(crate) const FORMAT: u32 = 1;

/// One rank's record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) format: u32,
    pub(crate) gradwire: String,
    pub(crate) protocol: u8,
    pub(crate) group: String,
    pub(crate) rank: u32,
    /// Ranks, dedicated servers included, and how many of those there are.
    pub(crate) world_size: u32,
    pub(crate) servers: u32,
    pub(crate) host: String,
    pub(crate) pid: u32,
    /// Tells hosts apart: names and addresses can repeat.
    pub(crate) boot_id: String,
    /// Tells network namespaces of one host apart: loopback does not cross them.
    pub(crate) network_namespace: u64,
    pub(crate) port: u16,
    /// UDP ports from which each path sends; all paths towards this rank end at `port`.
    pub(crate) source_ports: Vec<u16>,
    /// Addresses for other hosts and namespaces.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether the loopback address reaches this rank from its own namespace.
    pub(crate) loopback: bool,
    /// IPv6 socket: the two families do not mix.
    pub(crate) ipv6: bool,
    pub(crate) datagram_bytes: usize,
    pub(crate) datagram_bytes_local: usize,
    pub(crate) receive_buffer_bytes: u64,
    pub(crate) eager_bytes: u64,
    pub(crate) ack_every: u32,
    pub(crate) ack_delay_max_us: u64,
    pub(crate) peer_timeout_us: u64,
    /// Hexadecimal: JSON numbers lose bits in some readers.
    pub(crate) fingerprint: String,
    /// Whether datagrams are to be sealed: `auto`, `on` or `off`.
    pub(crate) security: String,
    /// Whether the processor computes AES.
    pub(crate) aes: bool,
    /// Drawn for this group: its keys depend on it, so that an old record brings no old key back.
    pub(crate) random: Hex<RANDOM_BYTES>,
    /// From rank 0, if no secret was configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) secret: Option<PublishedSecret>,
    /// Connection id for each peer to write into its packets, by rank (the own place is 0).
    pub(crate) connections: Vec<u32>,
    /// Which life of the rank it is: 0 forms the group, a later one joins it while it runs.
    #[serde(default)]
    pub(crate) incarnation: u64,
    /// In a group that goes on without lost ranks: connection id for a later life of each rank to write into what it says before it is a
    /// member.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) doors: Vec<u32>,
    /// How many cores the process may use, and its host has.
    #[serde(default)]
    pub(crate) cores: (usize, usize),
    /// Its further network threads are to be used on any link, however few the cores are.
    #[serde(default)]
    pub(crate) insists: bool,
    /// Of its groups on further network threads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) lanes: Vec<Record>,
}

/// What an engine contributes to the records of all its groups.
#[derive(Clone, Debug)]
pub(crate) struct Local {
    pub(crate) place: Place,
    pub(crate) port: u16,
    pub(crate) source_ports: Vec<u16>,
    pub(crate) bind: IpAddr,
    pub(crate) addresses: Vec<IpAddr>,
    /// Of these, the ones from which paths may go: none where the kernel takes no source with a datagram.
    pub(crate) sources: Vec<Source>,
    pub(crate) loopback: bool,
    pub(crate) datagram_bytes: usize,
    pub(crate) datagram_bytes_local: usize,
    pub(crate) receive_buffer_bytes: u64,
    pub(crate) cores: Cores,
    pub(crate) config: EngineConfig,
}

impl Local {
    /// This rank's record.
    pub(crate) fn record(&self, group: &str, rank: u32, connections: Vec<u32>) -> Record {
        Record {
            format: FORMAT,
            gradwire: crate::VERSION.to_owned(),
            protocol: VERSION,
            group: group.to_owned(),
            rank,
            world_size: connections.len() as u32,
            servers: 0,
            host: self.place.host.clone(),
            pid: std::process::id(),
            boot_id: self.place.boot_id.clone(),
            network_namespace: self.place.network_namespace,
            port: self.port,
            source_ports: self.source_ports.clone(),
            addresses: self.addresses.clone(),
            loopback: self.loopback,
            ipv6: self.bind.is_ipv6(),
            datagram_bytes: self.datagram_bytes,
            datagram_bytes_local: self.datagram_bytes_local,
            receive_buffer_bytes: self.receive_buffer_bytes,
            eager_bytes: self.config.eager_bytes,
            ack_every: self.config.ack_every,
            ack_delay_max_us: self.config.ack_delay_max.as_micros() as u64,
            peer_timeout_us: self.config.peer_timeout.as_micros() as u64,
            fingerprint: format!("{:016x}", self.config.fingerprint),
            security: self.config.security.as_str().to_owned(),
            aes: Cipher::has_aes(),
            random: Hex(random_bytes()),
            secret: None,
            connections,
            incarnation: 0,
            doors: Vec::new(),
            cores: (self.cores.of_process, self.cores.of_host),
            insists: self.config.network_threads.is_some(),
            lanes: Vec::new(),
        }
    }
}

impl Record {
    /// Ranks that call collectives.
    pub(crate) fn workers(&self) -> u32 {
        self.world_size - self.servers
    }

    /// Its published form.
    pub(crate) fn to_json(&self) -> String {
        // A struct of numbers, strings and lists always serialises.
        serde_json::to_string(self).expect("a record is plain data")
    }

    /// Whether this rank can join a group that has agreed on so large datagrams and so many paths, and may be one that meets over
    /// loopback: who does not would be spoken to in clear.
    ///
    /// # Errors
    /// [`JoinError::SettingsMismatch`].
    pub(crate) fn fits_into(
        &self,
        first: &Self,
        (datagram_bytes, paths, is_local): (usize, u8, bool),
    ) -> Result<(), JoinError> {
        let rank = self.rank;
        // Of the other version, neither has an address where the other one could speak to it.
        let version = |record: &Self| if record.ipv6 { "IPv6" } else { "IPv4" };
        same(rank, "version of IP", &version(self), &version(first))?;
        // It may have the port of the first rank of the group, which has ended.
        let meets = self.is_placed_as(first) && self.loopback;
        if is_local && !meets {
            let (theirs, ours) = ("another".to_owned(), "one for all ranks".to_owned());
            return Err(JoinError::SettingsMismatch { rank, field: "network namespace", theirs, ours });
        }
        let bytes = if is_local { self.datagram_bytes_local } else { self.datagram_bytes };
        // More of either does no harm.
        same(rank, "bytes of a datagram", &bytes.min(datagram_bytes), &datagram_bytes)?;
        let paths = usize::from(paths);
        same(rank, "paths", &self.source_ports.len().min(paths), &paths)
    }

    /// Which life of which rank it is.
    pub(crate) fn member(&self) -> Member {
        Member { rank: self.rank, incarnation: self.incarnation }
    }

    /// Two ranks with one port are on two hosts that were resumed from one image of memory, boot id included.
    fn is_local_to(&self, other: &Self) -> bool {
        self.is_placed_as(other) && (self.rank == other.rank || self.port != other.port)
    }

    fn is_placed_as(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id && self.network_namespace == other.network_namespace
    }

    fn who(&self) -> String {
        format!("process {} on {}", self.pid, self.host)
    }
}

/// Records of all ranks, compared with ours.
#[derive(Debug)]
pub(crate) struct Roster {
    /// By rank.
    pub(crate) records: Vec<Record>,
    /// UDP payload bytes of a full datagram, the same for all pairs: contributions are counted by chunk, so every peer's
    /// chunks of a shard must be the same.
    pub(crate) datagram_bytes: usize,
    /// Paths between each two ranks: the least of what the ranks have.
    pub(crate) paths: u8,
}

impl Roster {
    /// Reads and compares records (`ours` may be among them, and is used in any case).
    ///
    /// # Errors
    /// The first disagreement; a wrong world size comes before missing ranks, because it explains them.
    pub(crate) fn new(ours: &Record, published: &[String]) -> Result<Self, JoinError> {
        let mut slots = read(ours, published)?;
        let own = &mut slots[ours.rank as usize];
        if own.as_ref().is_some_and(|record| record != ours) {
            let first = own.as_ref().map_or(String::new(), Record::who);
            return Err(JoinError::DuplicateRank { rank: ours.rank, first, second: ours.who() });
        }
        *own = Some(ours.clone());
        Self::of_all(slots)
    }

    /// Of a group that runs, for a rank that is to join it: the records of those who formed it, its own earlier life among them.
    ///
    /// # Errors
    /// The first disagreement with `ours`, or with what the group has agreed on.
    pub(crate) fn of_running(ours: &Record, published: &[String]) -> Result<Self, JoinError> {
        let roster = Self::of_all(read(ours, published)?)?;
        let grid = (roster.datagram_bytes, roster.paths, roster.is_local());
        ours.fits_into(&roster.records[0], grid)?;
        Ok(roster)
    }

    fn of_all(slots: Vec<Option<Record>>) -> Result<Self, JoinError> {
        let world_size = slots.len() as u32;
        let missing: Vec<u32> = (0..world_size).filter(|r| slots[*r as usize].is_none()).collect();
        if !missing.is_empty() {
            return Err(JoinError::MissingRanks { ranks: missing, world_size });
        }
        let records: Vec<Record> = slots.into_iter().flatten().collect();
        let least = |r: &Record| r.datagram_bytes.min(r.datagram_bytes_local);
        if let Some(small) = records.iter().find(|r| least(r) < DATAGRAM_BYTES_MIN) {
            let problem = format!("rank {} has datagrams of {} bytes", small.rank, least(small));
            return Err(JoinError::RecordInvalid { position: small.rank as usize, problem });
        }
        let datagram_bytes = common_datagram_bytes(&records);
        let paths = common_paths(&records);
        Ok(Self { records, datagram_bytes, paths })
    }

    /// Whether all ranks are in one network namespace and meet over loopback.
    pub(crate) fn is_local(&self) -> bool {
        are_local(&self.records)
    }

    /// How many network threads each rank may use as every rank sees it: where not all insist, as many as each has cores.
    pub(crate) fn threads_max(&self) -> usize {
        if self.records.iter().all(|record| record.insists) {
            return usize::MAX;
        }
        let of = |record: &Record| {
            let ranks = self.records.iter().filter(|other| other.boot_id == record.boot_id).count();
            let (of_process, of_host) = record.cores;
            Cores { of_process, of_host }.for_each_of(ranks)
        };
        self.records.iter().map(of).min().unwrap_or(1)
    }

    /// Digest of what must be equal, for the hellos: a stale record of an earlier run cannot pass for a current one.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut digest = Fnv::new();
        for record in &self.records {
            digest.add(record.group.as_bytes());
            digest.add(record.fingerprint.as_bytes());
            digest.add(&record.rank.to_le_bytes());
            digest.add(&record.pid.to_le_bytes());
            digest.add(record.boot_id.as_bytes());
            digest.add(&record.random.0);
            for connection in &record.connections {
                digest.add(&connection.to_le_bytes());
            }
        }
        digest.0
    }
}

fn read(ours: &Record, published: &[String]) -> Result<Vec<Option<Record>>, JoinError> {
    let mut slots: Vec<Option<Record>> = vec![None; ours.world_size as usize];
    for (position, text) in published.iter().enumerate() {
        let theirs = parse(position, text)?;
        compare(&theirs, ours)?;
        place(&mut slots, theirs)?;
    }
    Ok(slots)
}

/// Reads the record of a rank that is to join the group of `ours`, or has joined it before.
///
/// # Errors
/// It is none, or disagrees.
pub(crate) fn read_one(ours: &Record, text: &str) -> Result<Record, JoinError> {
    let theirs = parse(0, text)?;
    compare(&theirs, ours)?;
    let ranks = ours.world_size as usize;
    let fits =
        (theirs.rank as usize) < ranks && theirs.connections.len() == ranks && theirs.doors.len() == ranks;
    if fits {
        return Ok(theirs);
    }
    let problem = format!("rank {} with {} doors", theirs.rank, theirs.doors.len());
    Err(JoinError::RecordInvalid { position: 0, problem })
}

/// What a text of any version of gradwire has, in clear also where the rest is sealed. Read and compared first: the rest of another version
/// may be anything.
#[derive(Deserialize)]
pub(crate) struct Version {
    format: u32,
    rank: Option<u32>,
    gradwire: Option<String>,
    protocol: Option<u32>,
}

impl Version {
    /// Of the text at a position, if it is the one that this process reads.
    ///
    /// # Errors
    /// [`JoinError::SettingsMismatch`], or [`JoinError::RecordInvalid`] where it is of no version.
    pub(crate) fn check(position: usize, text: &str) -> Result<(), JoinError> {
        let version: Self = serde_json::from_str(text)
            .map_err(|error| JoinError::RecordInvalid { position, problem: error.to_string() })?;
        let rank = version.rank.unwrap_or(position as u32);
        if let Some(gradwire) = version.gradwire {
            same(rank, "gradwire version", &gradwire.as_str(), &crate::VERSION)?;
        }
        if let Some(protocol) = version.protocol {
            same(rank, "protocol version", &protocol, &u32::from(VERSION))?;
        }
        if version.format == FORMAT {
            return Ok(());
        }
        let problem = format!("it has format {}, this version of gradwire reads {FORMAT}", version.format);
        Err(JoinError::RecordInvalid { position, problem })
    }
}

fn parse(position: usize, text: &str) -> Result<Record, JoinError> {
    Version::check(position, text)?;
    serde_json::from_str(text)
        .map_err(|error| JoinError::RecordInvalid { position, problem: error.to_string() })
}

fn compare(theirs: &Record, ours: &Record) -> Result<(), JoinError> {
    let rank = theirs.rank;
    same(rank, "gradwire version", &theirs.gradwire, &ours.gradwire)?;
    same(rank, "protocol version", &theirs.protocol, &ours.protocol)?;
    same(rank, "group", &theirs.group, &ours.group)?;
    if theirs.world_size != ours.world_size {
        let (theirs, ours) = (theirs.world_size, ours.world_size);
        return Err(JoinError::WorldSizeMismatch { rank, theirs, ours });
    }
    same(rank, "dedicated servers", &theirs.servers, &ours.servers)?;
    same(rank, "eager_bytes", &theirs.eager_bytes, &ours.eager_bytes)?;
    same(rank, "ack_every", &theirs.ack_every, &ours.ack_every)?;
    same(rank, "ack_delay_us", &theirs.ack_delay_max_us, &ours.ack_delay_max_us)?;
    same(rank, "peer_timeout in microseconds", &theirs.peer_timeout_us, &ours.peer_timeout_us)?;
    same(rank, "security", &theirs.security, &ours.security)?;
    same(rank, "fingerprint of the group's settings", &theirs.fingerprint, &ours.fingerprint)
}

fn same<T: PartialEq + ToString>(
    rank: u32,
    field: &'static str,
    theirs: &T,
    ours: &T,
) -> Result<(), JoinError> {
    if theirs == ours {
        return Ok(());
    }
    Err(JoinError::SettingsMismatch { rank, field, theirs: theirs.to_string(), ours: ours.to_string() })
}

fn place(slots: &mut [Option<Record>], record: Record) -> Result<(), JoinError> {
    let world_size = slots.len();
    let fits = record.connections.len() == world_size;
    let Some(slot) = slots.get_mut(record.rank as usize).filter(|_| fits) else {
        let problem = format!("rank {} with {} connections", record.rank, record.connections.len());
        return Err(JoinError::RecordInvalid { position: record.rank as usize, problem });
    };
    match slot {
        Some(first) if *first != record => {
            Err(JoinError::DuplicateRank { rank: record.rank, first: first.who(), second: record.who() })
        }
        _ => {
            *slot = Some(record);
            Ok(())
        }
    }
}

fn common_datagram_bytes(records: &[Record]) -> usize {
    let local = are_local(records);
    let bytes = |r: &Record| if local { r.datagram_bytes_local } else { r.datagram_bytes };
    records.iter().map(bytes).min().unwrap_or(0)
}

/// Whether all are in one network namespace and meet over loopback: each two of them, so that no two have one port.
pub(crate) fn are_local(records: &[Record]) -> bool {
    let mut ports = std::collections::HashSet::new();
    records.iter().all(|r| r.is_placed_as(&records[0]) && r.loopback && ports.insert(r.port))
}

fn common_paths(records: &[Record]) -> u8 {
    let paths = records.iter().map(|record| record.source_ports.len()).min().unwrap_or(1);
    u8::try_from(paths).unwrap_or(PATHS_MAX).clamp(1, PATHS_MAX)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    fn local(pid_offset: u16) -> Local {
        Local {
            place: Place { host: "a".into(), boot_id: "b".into(), network_namespace: 1 },
            port: 47_400 + pid_offset,
            source_ports: vec![47_400 + pid_offset],
            bind: std::net::Ipv4Addr::UNSPECIFIED.into(),
            addresses: vec!["10.0.0.1".parse().unwrap()],
            sources: Vec::new(),
            loopback: true,
            datagram_bytes: 1_472,
            datagram_bytes_local: 8_972,
            receive_buffer_bytes: 1 << 20,
            cores: Cores::of(8),
            config: EngineConfig::default(),
        }
    }

    pub(crate) fn records(world_size: u32) -> Vec<Record> {
        (0..world_size).map(|r| local(r as u16).record("g", r, vec![r; world_size as usize])).collect()
    }

    fn published(records: &[Record]) -> Vec<String> {
        records.iter().map(Record::to_json).collect()
    }

    #[test]
    fn who_joins_a_group_that_runs_must_fit_into_what_it_has_agreed_on() {
        let formed = records(3);
        let again = || Record { incarnation: 1, doors: vec![7; 3], ..formed[1].clone() };
        let join = |record: &Record| Roster::of_running(record, &published(&formed));
        assert_eq!(join(&again()).unwrap().records, formed, "its earlier life is part of what was agreed");
        let elsewhere = Record { network_namespace: 9, ..again() };
        let small = Record { datagram_bytes_local: 1_000, ..again() };
        let other = Record { ipv6: !formed[1].ipv6, ..again() };
        let fields = ["network namespace", "bytes of a datagram", "version of IP"];
        for (record, what) in [elsewhere, small, other].into_iter().zip(fields) {
            let refused = join(&record).unwrap_err();
            let JoinError::SettingsMismatch { field, .. } = &refused else { panic!("{refused}") };
            assert_eq!(*field, what, "{refused}");
        }
        assert!(read_one(&formed[0], &again().to_json()).is_ok());
        for doors in [vec![], vec![7; 2]] {
            assert!(read_one(&formed[0], &Record { doors, ..again() }.to_json()).is_err());
        }
    }

    #[test]
    fn agreeing_records_form_a_roster_with_or_without_our_own() {
        let all = records(3);
        let roster = Roster::new(&all[1], &published(&all)).unwrap();
        assert_eq!(roster.records, all);
        let without = [all[0].to_json(), all[2].to_json()];
        assert_eq!(Roster::new(&all[1], &without).unwrap().records, all);
    }

    #[test]
    fn a_group_uses_the_least_number_of_paths_that_a_rank_has() {
        let mut all = records(3);
        (all[0].source_ports, all[1].source_ports) = (vec![1; 4], vec![2; 3]);
        assert_eq!(Roster::new(&all[0], &published(&all)).unwrap().paths, 1);
        all[2].source_ports = vec![3; 200];
        assert_eq!(Roster::new(&all[0], &published(&all)).unwrap().paths, 3);
    }

    #[test]
    fn every_disagreement_names_the_rank_and_both_values() {
        let mut all = records(3);
        all[2].world_size = 4;
        let error = Roster::new(&all[0], &published(&all)).unwrap_err();
        let said = "rank 2 has world size 4, this rank has 3; start all ranks with one world size";
        assert_eq!(error.to_string(), said);
        let mut all = records(3);
        all[1].eager_bytes = 7;
        let error = Roster::new(&all[0], &published(&all)).unwrap_err();
        let said = "rank 1 has eager_bytes = 7, this rank has 262144; it must be equal on all ranks";
        assert_eq!(error.to_string(), said);
        let mut all = records(3);
        all[1].fingerprint = "ff".into();
        let error = Roster::new(&all[0], &published(&all)).unwrap_err();
        assert!(matches!(error, JoinError::SettingsMismatch { rank: 1, .. }), "{error}");
    }

    #[test]
    fn a_record_of_another_version_is_called_that_whatever_else_it_has() {
        let ours = &records(2)[0];
        for (text, field, theirs) in [
            (r#"{"format": 2, "rank": 1, "gradwire": "9.0.0", "protocol": 1}"#, "gradwire version", "9.0.0"),
            (r#"{"format": 1, "gradwire": "0.1.0", "news": [1]}"#, "gradwire version", "0.1.0"),
            (r#"{"format": 1, "rank": 1, "protocol": 300}"#, "protocol version", "300"),
        ] {
            let error = Roster::new(ours, &[ours.to_json(), text.to_owned()]).unwrap_err();
            let JoinError::SettingsMismatch { rank: 1, field: found, theirs: told, .. } = &error else {
                panic!("{text}: {error}");
            };
            assert_eq!((*found, told.as_str()), (field, theirs), "{error}");
            assert!(matches!(read_one(ours, text), Err(JoinError::SettingsMismatch { .. })), "{text}");
        }
    }

    #[test]
    fn a_rank_uses_no_more_threads_than_each_has_cores_unless_all_insist() {
        let mut all = records(4);
        let most = |all: &[Record]| Roster::new(&all[0], &published(all)).unwrap().threads_max();
        assert_eq!(most(&all), 2, "eight cores of one host");
        all[3].boot_id = "another".to_owned();
        assert_eq!(most(&all), 2);
        (all[3].cores, all[0].cores) = ((1, 8), (8, 8));
        assert_eq!(most(&all), 1);
        all[2].cores = (0, 0);
        assert_eq!(most(&all), 0, "of who says nothing");
        all.iter_mut().for_each(|record| record.insists = true);
        assert_eq!(most(&all), usize::MAX);
    }

    #[test]
    fn missing_and_doubled_ranks_are_named() {
        let all = records(4);
        let error = Roster::new(&all[0], &published(&all[..2])).unwrap_err();
        assert_eq!(error, JoinError::MissingRanks { ranks: vec![2, 3], world_size: 4 });
        let mut twin = all[1].clone();
        twin.pid += 1;
        let error = Roster::new(&all[0], &[all[1].to_json(), twin.to_json()]).unwrap_err();
        assert!(matches!(error, JoinError::DuplicateRank { rank: 1, .. }), "{error}");
        let mut twin = all[0].clone();
        twin.pid += 1;
        let error = Roster::new(&all[0], &[twin.to_json()]).unwrap_err();
        assert!(error.to_string().starts_with("rank 0 is claimed"), "{error}");
        assert!(error.to_string().ends_with("; end one of them"), "{error}");
    }

    #[test]
    fn nonsense_is_an_error_that_says_where() {
        let all = records(2);
        for text in ["", "{}", "[1]", "{\"format\": 1}", "{\"format\": 99}"] {
            let error = Roster::new(&all[0], &[all[0].to_json(), text.to_owned()]).unwrap_err();
            assert!(matches!(error, JoinError::RecordInvalid { position: 1, .. }), "{text}: {error}");
        }
        let mut wrong = all[1].clone();
        wrong.connections.pop();
        let error = Roster::new(&all[0], &[wrong.to_json()]).unwrap_err();
        assert!(matches!(error, JoinError::RecordInvalid { .. }), "{error}");
        let wrong = Record { rank: 9, ..all[1].clone() };
        assert!(Roster::new(&all[0], &[wrong.to_json()]).is_err());
        for (outward, local) in [(0, 8_972), (527, 8_972), (1_472, 527)] {
            let small = Record { datagram_bytes: outward, datagram_bytes_local: local, ..all[1].clone() };
            let error = Roster::new(&all[0], &[small.to_json()]).unwrap_err().to_string();
            assert!(error.contains("rank 1 has datagrams of"), "{error}");
        }
    }

    #[test]
    fn the_datagram_size_is_the_least_and_local_only_when_all_are() {
        let mut all = records(3);
        assert_eq!(Roster::new(&all[0], &published(&all)).unwrap().datagram_bytes, 8_972);
        all[2].network_namespace = 9;
        all[2].datagram_bytes = 1_400;
        assert_eq!(Roster::new(&all[0], &published(&all)).unwrap().datagram_bytes, 1_400);
    }

    #[test]
    fn the_fingerprint_tells_runs_apart() {
        let all = records(2);
        let mut again = all.clone();
        again[1].pid += 1;
        let of = |records: &[Record]| Roster::new(&records[0], &published(records)).unwrap().fingerprint();
        assert_ne!(of(&all), of(&again));
    }
}
