//! Settings of a rank.

use crate::{GRADWIRE_INVALID, GRADWIRE_NULL, GRADWIRE_OK};
use gradwire_collectives::{ExchangePlan, GroupConfig, Magnitude, PeerConfig, Policy, Preset, Servers};
use gradwire_core::recovery::ControllerKind;
use gradwire_core::{ConnectionConfig, ConnectionId, Spray, CHUNKS_MAX, PATHS_MAX};
use std::ffi::{c_char, CStr};
use std::ops::RangeInclusive;
use std::time::Duration;

/// See `include/gradwire.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GradwireConfig {
    /// This rank: workers first, then dedicated servers.
    pub rank: u32,
    /// Ranks that call.
    pub workers: u32,
    /// Dedicated parameter servers; 0: every worker is one.
    pub servers: u32,
    /// Place of the preset among those of the product.
    pub preset: u32,
    /// Rate controller: 0 bottleneck, 1 timely, 2 receiving rate.
    pub controller: u32,
    /// UDP payload of a full datagram.
    pub datagram_bytes: u32,
    /// Data packets for each acknowledgement; nine times as many that left at one moment.
    pub ack_every: u32,
    /// Paths to each peer.
    pub paths: u32,
    /// Bytes that may be sent before the receiver has asked.
    pub eager_bytes: u64,
    /// Rate of a fresh connection, bytes per second.
    pub initial_rate: u64,
    /// Bytes that the receiver's socket holds, of all peers.
    pub socket_bytes: u64,
    /// Longest that an acknowledgement is held back where packets come fast; where they come slowly up to eight times as long and 2 ms.
    pub ack_delay_ns: u64,
    /// Silence after which a peer is lost.
    pub peer_timeout_ns: u64,
}

impl GradwireConfig {
    fn named(name: &str) -> Option<Self> {
        let found = Preset::named(name)?;
        let preset = Policy::PRESETS.iter().position(|(preset, _)| *preset == name)?;
        let controller = ControllerKind::ALL.iter().position(|kind| *kind == found.controller)?;
        Some(Self { preset: preset as u32, controller: controller as u32, ..DEFAULTS })
    }

    /// Whether it reduces and calls nothing.
    pub(crate) fn is_server(&self) -> bool {
        self.rank >= self.workers
    }

    pub(crate) fn is_valid(&self) -> bool {
        let ranks = self.ranks();
        self.workers > 0
            && (2..=RANKS_MAX).contains(&ranks)
            && u64::from(self.rank) < ranks
            && (self.preset as usize) < Policy::PRESETS.len()
            && (self.controller as usize) < ControllerKind::ALL.len()
            && (DATAGRAM_BYTES_MIN..=DATAGRAM_BYTES_MAX).contains(&self.datagram_bytes)
            && (1..=1_000).contains(&self.ack_every)
            && (1..=PATHS_MAX as u32).contains(&self.paths)
            && self.initial_rate >= 10_000
            && self.eager_bytes <= EAGER_BYTES_MAX
            && self.socket_bytes >= u64::from(self.datagram_bytes)
            && ACK_DELAY_NS.contains(&self.ack_delay_ns)
            && PEER_TIMEOUT_NS.contains(&self.peer_timeout_ns)
    }

    fn ranks(&self) -> u64 {
        u64::from(self.workers) + u64::from(self.servers)
    }

    pub(crate) fn policy(&self) -> Policy {
        Policy::PRESETS[self.preset as usize].1
    }

    /// How packets are told apart that may be dropped; `None`: the network is told nothing.
    pub(crate) fn importance(&self) -> Option<Magnitude> {
        Preset::named(Policy::PRESETS[self.preset as usize].0)?.importance
    }

    pub(crate) fn group(&self) -> GroupConfig {
        let peers = (0..self.ranks() as u32).filter(|peer| *peer != self.rank);
        let peer = |peer| PeerConfig { rank: peer, host: String::new(), connection: self.connection(peer) };
        let servers = match self.servers {
            0 => Servers::EVERY_RANK,
            count => Servers::Dedicated { count, buffer_bytes: u64::MAX },
        };
        GroupConfig {
            rank: self.rank,
            world_size: self.workers,
            peers: peers.map(peer).collect(),
            incast: None,
            exchange: ExchangePlan::DEFAULT,
            servers,
        }
    }

    /// Of one call: its sum goes to one rank as one transfer at most.
    pub(crate) fn call_bytes_max(&self) -> usize {
        let grid = self.connection(u32::from(self.rank == 0)).chunk_bytes() as usize;
        grid.saturating_mul(CHUNKS_MAX as usize).min(u32::MAX as usize)
    }

    fn connection(&self, peer: u32) -> ConnectionConfig {
        let ranks = self.ranks() as u32;
        let id = |receiver: u32, sender: u32| {
            ConnectionId::new(receiver * ranks + sender + 1).expect("pairs of RANKS_MAX ranks fit 24 bits")
        };
        ConnectionConfig {
            local: id(self.rank, peer),
            remote: id(peer, self.rank),
            datagram_bytes: self.datagram_bytes as usize,
            fingerprint: FINGERPRINT,
            hello: gradwire_core::HelloWords::both(FINGERPRINT),
            eager_bytes: self.eager_bytes,
            ack_every: self.ack_every,
            ack_delay_max: Duration::from_nanos(self.ack_delay_ns),
            controller: ControllerKind::ALL[self.controller as usize],
            initial_rate: self.initial_rate,
            incast: ranks - 1,
            turn: gradwire_core::recovery::Turn::Any,
            receive_buffer_bytes: self.socket_bytes / u64::from(ranks - 1),
            peer_timeout: Duration::from_nanos(self.peer_timeout_ns),
            paths: self.paths as u8,
            spray: Spray::Adaptive,
            spray_run: 1,
            // All data has one class here.
            class_queues: 0,
        }
    }
}

/// Writes the product's defaults for a preset (`auto`, `mlt`, ...), for one rank of so many.
///
/// # Safety
/// `preset` is a string that ends with a zero byte, and `config` can be written; either may be null.
#[no_mangle]
pub unsafe extern "C" fn gradwire_config_default(
    preset: *const c_char,
    rank: u32,
    workers: u32,
    servers: u32,
    config: *mut GradwireConfig,
) -> i32 {
    if preset.is_null() || config.is_null() {
        return GRADWIRE_NULL;
    }
    // SAFETY: not null, and the caller promises the zero byte.
    let name = unsafe { CStr::from_ptr(preset) }.to_str().unwrap_or_default();
    let Some(found) = GradwireConfig::named(name) else { return GRADWIRE_INVALID };
    // SAFETY: not null, and the caller promises that it can be written.
    unsafe { config.write(GradwireConfig { rank, workers, servers, ..found }) };
    GRADWIRE_OK
}

/// The engine's.
const DEFAULTS: GradwireConfig = GradwireConfig {
    rank: 0,
    workers: 0,
    servers: 0,
    preset: 0,
    controller: 0,
    datagram_bytes: 1472,
    ack_every: 10,
    paths: 1,
    eager_bytes: 256 << 10,
    initial_rate: 125_000_000,
    socket_bytes: 4 << 20,
    ack_delay_ns: 250_000,
    peer_timeout_ns: 10_000_000_000,
};
/// Room for a status and an acknowledgement of several paths.
const DATAGRAM_BYTES_MIN: u32 = 512;
/// What UDP over IPv4 carries, less what seals a datagram.
const DATAGRAM_BYTES_MAX: u32 = 65_000;
/// The ranges of the engine's settings.
const EAGER_BYTES_MAX: u64 = 1 << 30;
const ACK_DELAY_NS: RangeInclusive<u64> = 0..=1_000_000_000;
const PEER_TIMEOUT_NS: RangeInclusive<u64> = 100_000_000..=3_600_000_000_000;
/// Ids of connections have 24 bits.
const RANKS_MAX: u64 = 4_095;
/// What every rank says of the group's settings: here they are one program's.
const FINGERPRINT: u64 = 0x0067_7261_6477_6972;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_preset_is_the_place_of_its_name_and_has_the_rate_control_of_its_paper() {
        for (place, (name, policy)) in Policy::PRESETS.into_iter().enumerate() {
            let config = GradwireConfig::named(name).expect(name);
            assert_eq!((config.preset as usize, config.policy()), (place, policy), "{name}");
        }
        let [mlt, dlcp, auto] = ["mlt", "dlcp", "auto"].map(|name| GradwireConfig::named(name).expect(name));
        assert_eq!(
            [mlt.controller, dlcp.controller, auto.controller],
            [1, 2, 0],
            "as include/gradwire.h says"
        );
        assert!(mlt.importance().is_some() && dlcp.importance().is_some() && auto.importance().is_none());
        assert_eq!(GradwireConfig::named("none"), None);
    }

    #[test]
    fn what_is_out_of_range_is_refused() {
        let fine = GradwireConfig { workers: 3, servers: 1, ..DEFAULTS };
        assert!(fine.is_valid());
        let bad = [
            GradwireConfig { rank: 4, ..fine },
            GradwireConfig { workers: 0, ..fine },
            GradwireConfig { workers: u32::MAX, servers: u32::MAX, ..fine },
            GradwireConfig { preset: 99, ..fine },
            GradwireConfig { controller: 3, ..fine },
            GradwireConfig { datagram_bytes: 20, ..fine },
            GradwireConfig { datagram_bytes: 70_000, ..fine },
            GradwireConfig { ack_every: 0, ..fine },
            GradwireConfig { paths: 0, ..fine },
            GradwireConfig { paths: 1_000, ..fine },
            GradwireConfig { initial_rate: 0, ..fine },
            GradwireConfig { eager_bytes: u64::MAX, ..fine },
            GradwireConfig { socket_bytes: 0, ..fine },
            GradwireConfig { ack_delay_ns: 2_000_000_000, ..fine },
            GradwireConfig { peer_timeout_ns: 9, ..fine },
            GradwireConfig { peer_timeout_ns: u64::MAX, ..fine },
        ];
        bad.iter().for_each(|config| assert!(!config.is_valid(), "{config:?}"));
    }
}
