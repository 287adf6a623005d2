//! Why an engine cannot start or a group cannot form. Every variant names what disagreed, and where.

use gradwire_collectives::{first_named, OpError};
use std::net::SocketAddr;
use std::time::Duration;
use thiserror::Error;

/// Why an engine could not start, or refuses a call.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The UDP port belongs to another process.
    #[error("UDP port {port} is in use on this host; choose another one, or 0 for any")]
    PortInUse {
        /// The port.
        port: u16,
    },
    /// The address is not one of this host's.
    #[error("address {address} does not belong to this host")]
    AddressUnavailable {
        /// The address.
        address: String,
    },
    /// No interface fits the selection.
    #[error("no network interface matches '{asked}' (link-local addresses of IPv6, fe80::/10, are never used); this host has: {found}")]
    NoUsableInterface {
        /// The selection.
        asked: String,
        /// `name=address` of every interface that is up.
        found: String,
    },
    /// The operating system forbids it.
    #[error("not permitted: {what}")]
    Permission {
        /// What was tried.
        what: String,
    },
    /// A setting is out of range.
    #[error("{field} = {value} is not allowed: {allowed}")]
    ConfigInvalid {
        /// The field of [`crate::EngineConfig`].
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// Rank and world size that cannot be.
    #[error("rank {rank} of {world_size} cannot be: ranks are 0 to world_size - 1, at most 16384 of them")]
    RankInvalid {
        /// The rank.
        rank: u32,
        /// The world size.
        world_size: u32,
    },
    /// Groups that live hold too many of the ids by which a network thread tells connections apart.
    #[error(
        "a group needs {needed} connection ids, and the groups that live in this process hold {held} of {ids} on one network thread: \
         destroy groups that are no longer used, or form smaller ones"
    )]
    ConnectionIdsUsedUp {
        /// By the new group: one for each other rank.
        needed: u32,
        /// By groups that live.
        held: usize,
        /// In all.
        ids: usize,
    },
    /// This process is a fork of the one that started the engine; threads and sockets stay with the parent.
    #[error("the engine was started in process {parent} and cannot be used in its forked child {child}; start one after the fork")]
    Forked {
        /// Process that started it.
        parent: u32,
        /// This process.
        child: u32,
    },
    /// The engine has been stopped.
    #[error("the engine has been stopped{}", .cause.as_ref().map_or(String::new(), |c| format!(": {c}")))]
    Stopped {
        /// What stopped it, when it was not the caller.
        cause: Option<String>,
    },
    /// The operating system failed in a way that has no better name.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The system's answer.
        source: OsError,
    },
}

/// An error number of the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OsError(pub i32);

impl OsError {
    /// The calling thread's latest error.
    #[must_use]
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

impl std::fmt::Display for OsError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for OsError {}

/// A peer that did not answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreachablePeer {
    /// Its rank.
    pub rank: u32,
    /// Its host.
    pub host: String,
    /// Addresses that were tried, each many times.
    pub tried: Vec<SocketAddr>,
    /// It answered small datagrams, and none of full size.
    pub answers_small: bool,
    /// Here or there the kernel's boot id cannot be read: two ranks of one host then take each other for ranks of different ones.
    pub host_unknown: bool,
}

impl std::fmt::Display for UnreachablePeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} ({}) at ", self.rank, self.host)?;
        if self.tried.is_empty() {
            f.write_str("no address: it published none that can be reached from here, loopback alone. ")?;
            return f.write_str(if self.host_unknown {
                "Whether it is on this host cannot be told, as /proc/sys/kernel/random/boot_id cannot be read by both: mount /proc for them, or bring an interface up that has an address"
            } else {
                "Bring an interface up on its host, or name one in GRADWIRE_INTERFACE"
            });
        }
        let tried: Vec<String> = self.tried.iter().map(ToString::to_string).collect();
        f.write_str(&tried.join(", "))?;
        if self.answers_small {
            f.write_str(
                ", which answers small ones: the MTU on the way is smaller than the interfaces say. `gradwire doctor` finds it, GRADWIRE_MTU sets it",
            )?;
        }
        Ok(())
    }
}

/// Why a group could not form. Nothing of it is left; a new attempt needs a new [`crate::PendingGroup`].
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum JoinError {
    /// A record that is not one, or not of this format.
    #[error("record number {position} cannot be read: {problem}")]
    RecordInvalid {
        /// Its place in the list that was passed.
        position: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A rank has another idea of the number of ranks.
    #[error(
        "rank {rank} has world size {theirs}, this rank has {ours}; start all ranks with one world size"
    )]
    WorldSizeMismatch {
        /// The other rank.
        rank: u32,
        /// Its world size.
        theirs: u32,
        /// Ours.
        ours: u32,
    },
    /// A setting that must be equal differs.
    #[error("rank {rank} has {field} = {theirs}, this rank has {ours}; {}", remedy(field))]
    SettingsMismatch {
        /// The other rank.
        rank: u32,
        /// Which setting.
        field: &'static str,
        /// Its value.
        theirs: String,
        /// Ours.
        ours: String,
    },
    /// A record that this rank's job secret does not open, or that only one of the two has sealed.
    #[error("the job secret of rank {rank} does not match: {problem}. Give GRADWIRE_SECRET or GRADWIRE_SECRET_FILE the same content on every rank, or none on any")]
    SecretMismatch {
        /// The other rank, as its record says.
        rank: u32,
        /// What is seen of it here.
        problem: &'static str,
    },
    /// No record of these ranks was passed.
    #[error("no record of rank(s) {ranks:?} of a group of {world_size}")]
    MissingRanks {
        /// The ranks.
        ranks: Vec<u32>,
        /// Ranks in the group.
        world_size: u32,
    },
    /// Two processes say that they are the same rank.
    #[error("rank {rank} is claimed by two processes: {first} and {second}; end one of them")]
    DuplicateRank {
        /// The rank.
        rank: u32,
        /// Host and process of one.
        first: String,
        /// Host and process of the other.
        second: String,
    },
    /// Peers that use the other version of IP: no packet gets there, however long anybody waits.
    #[error("this rank uses its {ours} addresses and rank(s) {} their {theirs} ones: the two do not reach each other. Name addresses or networks of one family on every rank in GRADWIRE_INTERFACE", .peers.join(", "))]
    OtherFamily {
        /// Their ranks.
        ranks: Vec<u32>,
        /// Rank and host of each.
        peers: Vec<String>,
        /// IPv4 or IPv6.
        theirs: &'static str,
        /// The other one.
        ours: &'static str,
    },
    /// Peers that did not answer in time.
    #[error("no answer within {waited:?} to UDP datagrams of {datagram_bytes} bytes from {}{}{}", list(.peers), refused_by(.refused), advice(.peers))]
    Unreachable {
        /// Who, and where they were tried.
        peers: Vec<UnreachablePeer>,
        /// Size of the datagrams that were sent: a path with a smaller MTU swallows them.
        datagram_bytes: usize,
        /// How long.
        waited: Duration,
        /// The system's latest answer, if it has refused all that was to be sent.
        refused: Option<OsError>,
    },
    /// The group failed while it connected: a peer aborted, or is not the one of the record.
    #[error("the group failed while it connected: {0}")]
    Failed(OpError),
    /// The engine refuses.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// What to do about a setting that differs.
fn remedy(field: &str) -> &'static str {
    if field.ends_with(" version") {
        return "install the same version of gradwire on all hosts, built of the same sources, and start again what runs with another one";
    }
    "it must be equal on all ranks"
}

fn list(peers: &[UnreachablePeer]) -> String {
    first_named(peers.iter().map(ToString::to_string))
}

fn refused_by(refused: &Option<OsError>) -> String {
    refused.map_or(String::new(), |error| {
        format!("; the system refused all that was to be sent to them: {error}")
    })
}

/// What to do about peers that answer nothing at all; of those that answer small datagrams it is said beside each.
fn advice(peers: &[UnreachablePeer]) -> &'static str {
    if peers.iter().all(|peer| peer.answers_small || peer.tried.is_empty()) {
        return "";
    }
    ". Let UDP through to these ports; `gradwire doctor`, started as the job, says where it stops"
}
