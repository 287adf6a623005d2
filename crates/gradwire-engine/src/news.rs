//! Lines for the program's logger, through the `log` crate: one when something changes, none for a packet and none for a collective.
//!
//! A program without a logger, as Python is, pays one look at a number for each change. Most lines are written on the network thread:
//! a logger that blocks keeps it from its packets for that long.

use crate::{EpochStats, SecurityStats};
use gradwire_collectives::OpError;
use log::{error, info, log, warn, Level};
use std::fmt::Display;

/// Of every line: as Python's logger is called.
pub(crate) const TARGET: &str = "gradwire";

/// The engine listens, and loses on purpose what `chaos` says.
pub(crate) fn started(port: u16, addresses: &[String], chaos: Option<&str>) {
    info!(target: TARGET, "engine on UDP port {port} of {}", addresses.join(", "));
    if let Some(chaos) = chaos {
        warn!(target: TARGET, "FAULT INJECTION IS ON at UDP port {port}: chaos = {chaos}. What comes in is lost or delayed on purpose");
    }
}

/// One interface makes all packets small, between all ranks, though another carries much larger ones.
pub(crate) fn narrow((narrowest, mtu): (&str, usize), (wider, its_mtu): (&str, usize)) {
    warn!(target: TARGET, "{narrowest} carries packets of {mtu} bytes and {wider} of {its_mtu}: all ranks send such as fit {narrowest}. \
        If it leads to no peer, leave it out (GRADWIRE_INTERFACE=^{narrowest}); GRADWIRE_INTERFACE or GRADWIRE_MTU ends this warning");
}

/// The network thread has ended by a bug.
pub(crate) fn crashed(port: u16, cause: &str) {
    error!(target: TARGET, "engine on UDP port {port}: {cause}; every call on it fails");
}

/// What is nobody's floods the port, or no longer.
pub(crate) fn flooded(port: u16, is_flooded: bool) {
    if is_flooded {
        warn!(target: TARGET, "what is nobody's floods UDP port {port}: peers are told, and go on at the rate that they had");
    } else {
        info!(target: TARGET, "the flood of UDP port {port} is over");
    }
}

/// A group and one of its ranks, as callers know it.
#[derive(Clone, Copy)]
pub(crate) struct About<'a> {
    pub(crate) group: &'a str,
    pub(crate) rank: u32,
}

impl About<'_> {
    /// All of its peers have answered.
    pub(crate) fn formed(self, peers: usize, security: &SecurityStats) {
        let (level, how) = travels(security);
        let Self { group, rank } = self;
        log!(target: TARGET, level, "group {group}: rank {rank} is connected to {peers} others, {how}");
    }

    /// Not all of its network threads reach those of the others: so many do.
    pub(crate) fn cannot_divide(self, threads: usize) {
        let Self { group, rank } = self;
        warn!(target: TARGET, "group {group}: of the network threads of rank {rank} only {threads} can be used: does a firewall let their ports through?");
    }

    /// A peer was lost, and the others are about to go on without it.
    pub(crate) fn lost(self, error: &OpError) {
        let Self { group, rank } = self;
        warn!(target: TARGET, "group {group}, on rank {rank}: {error}");
    }

    /// It has failed, on this rank for good. Who leaves has said so.
    pub(crate) fn failed(self, error: &OpError) {
        let Self { group, rank } = self;
        if matches!(error, OpError::ShutDown(_)) {
            return;
        }
        error!(target: TARGET, "group {group} has failed on rank {rank}: {error}");
    }

    /// Calls go on under another epoch; `told`: the last one that was told.
    pub(crate) fn goes_on(self, epoch: &EpochStats, told: u64) {
        let Self { group, rank } = self;
        let named = |(rank, host): (u32, &str)| format!("rank {rank} ({host})");
        let lost = epoch.lost.iter().filter(|lost| lost.epoch > told);
        let lost = listed(lost.map(|lost| named((lost.rank, &lost.host))));
        let joined = epoch.joined.iter().filter(|joined| joined.epoch > told);
        let joined = listed(joined.map(|joined| named((joined.rank, &joined.host))));
        let change = match (lost.is_empty(), joined.is_empty()) {
            (false, false) => format!(" without {lost}, with {joined}, which joined"),
            (false, true) => format!(" without {lost}"),
            (true, false) => format!(" with {joined}, which joined"),
            (true, true) => String::new(),
        };
        let (number, members) = (epoch.number, listed(epoch.members.iter()));
        warn!(target: TARGET, "group {group}, epoch {number}: ranks {members} go on{change}, seen by rank {rank}");
    }

    /// This rank leaves, in good order.
    pub(crate) fn leaves(self) {
        let Self { group, rank } = self;
        info!(target: TARGET, "group {group}: rank {rank} leaves");
    }
}

/// How a group's datagrams travel, and how loudly that is said: in clear between hosts is a warning.
fn travels(security: &SecurityStats) -> (Level, String) {
    match security {
        SecurityStats { cipher: None, all_local: true, .. } => {
            (Level::Info, "in clear: all are on this host".to_owned())
        }
        SecurityStats { cipher: None, .. } => {
            let text = "IN CLEAR: datagrams leave this host, and whoever can send to it can forge them";
            (Level::Warn, text.to_owned())
        }
        SecurityStats { cipher: Some(cipher), secret_configured: true, .. } => {
            (Level::Info, format!("sealed with {cipher} and the job secret"))
        }
        SecurityStats { cipher: Some(cipher), .. } => {
            let text = format!("sealed with {cipher}; whoever reads the store of records has the secret");
            (Level::Info, text)
        }
    }
}

fn listed(items: impl Iterator<Item = impl Display>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_traffic_that_leaves_the_host_in_clear_is_a_warning() {
        let security = |cipher, all_local| SecurityStats { cipher, secret_configured: false, all_local };
        assert_eq!(travels(&security(None, true)).0, Level::Info);
        assert_eq!(travels(&security(Some("aes-256-gcm"), false)).0, Level::Info);
        let (level, text) = travels(&security(None, false));
        assert!(level == Level::Warn && text.contains("IN CLEAR"), "{text}");
    }
}
