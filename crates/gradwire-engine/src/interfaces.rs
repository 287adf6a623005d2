//! Which local addresses a process offers to its peers, and how large a packet they carry.

use crate::{EngineError, OsError};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Largest packet that is used unless the user asks for more: jumbo frames, which most data-centre switches carry.
const MTU_AUTO_MAX: usize = 9_000;
/// Bridges of container and virtual machine managers: the same address on every host, so they never lead to a peer.
const BRIDGES: [&str; 3] = ["docker", "virbr", "podman"];

/// One address of one interface that is up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Interface {
    /// Name, such as `eth0`.
    pub(crate) name: String,
    /// Address.
    pub(crate) address: IpAddr,
    /// Bits of its network.
    pub(crate) bits: u8,
    /// Number that the kernel knows it by.
    pub(crate) index: u32,
    /// Whether it reaches this host only.
    pub(crate) loopback: bool,
    /// Largest IP packet.
    pub(crate) mtu: usize,
}

/// The addresses that were selected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selection {
    /// What to bind: the one address that was named, or all.
    pub(crate) bind: IpAddr,
    /// Addresses for other hosts, of one family.
    pub(crate) addresses: Vec<IpAddr>,
    /// Where each of these is, in the same order.
    pub(crate) sources: Vec<Source>,
    /// Whether ranks in this network namespace can use the loopback address.
    pub(crate) loopback: bool,
    /// Largest IP packet towards other hosts.
    pub(crate) mtu: usize,
}

/// A local address and its interface, for what is sent from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub(crate) address: IpAddr,
    /// Bits of its network.
    pub(crate) bits: u8,
    /// The kernel's number of the interface.
    pub(crate) interface: u32,
}

impl Source {
    /// Whether `peer` is on the same network, so that no router is needed.
    pub(crate) fn is_near(&self, peer: IpAddr) -> bool {
        in_network(peer, self.address, self.bits)
    }
}

/// Chooses among `found` by the list `asked` (see [`crate::EngineConfig::interface`]).
pub(crate) fn select(asked: &str, found: &[Interface]) -> Result<Selection, EngineError> {
    let (excluding, list) = match asked.trim().strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, asked.trim()),
    };
    let patterns: Vec<Pattern> =
        list.split(',').map(str::trim).filter(|p| !p.is_empty()).map(Pattern::parse).collect();
    if let [Pattern::Network(address, bits)] = patterns[..] {
        let whole = if address.is_ipv4() { 32 } else { 128 };
        if !excluding && bits == whole && !found.iter().any(|i| i.address == address) {
            return Err(EngineError::AddressUnavailable { address: address.to_string() });
        }
    }
    let by_name_only_exact = |name: &str| found.iter().any(|i| i.name == name);
    let named = |i: &Interface| patterns.iter().any(|p| p.matches(i, &by_name_only_exact));
    // A link-local address is of no use to a peer that does not know the link.
    let chosen: Vec<&Interface> = found
        .iter()
        .filter(|i| !is_link_local(i.address))
        .filter(|i| match (patterns.is_empty(), excluding) {
            (true, _) => !i.loopback && !BRIDGES.iter().any(|b| i.name.starts_with(b)),
            (false, true) => !i.loopback && !named(i),
            (false, false) => named(i),
        })
        .collect();
    // Without any network a single host can still train.
    let alone = patterns.is_empty() && found.iter().any(|i| i.loopback);
    if chosen.is_empty() && !alone {
        let found: Vec<String> = found.iter().map(|i| format!("{}={}", i.name, i.address)).collect();
        return Err(EngineError::NoUsableInterface { asked: asked.to_owned(), found: found.join(", ") });
    }
    Ok(selection(&chosen, !excluding && !patterns.is_empty(), found))
}

fn selection(chosen: &[&Interface], explicit: bool, found: &[Interface]) -> Selection {
    // One socket has one family: IPv4 where there is any.
    let among: Vec<&Interface> = if chosen.is_empty() { found.iter().collect() } else { chosen.to_vec() };
    let ipv4 = among.iter().any(|i| i.address.is_ipv4());
    let family: Vec<&Interface> = chosen.iter().copied().filter(|i| i.address.is_ipv4() == ipv4).collect();
    let outward = || family.iter().filter(|i| !i.loopback);
    let addresses: Vec<IpAddr> = outward().map(|i| i.address).collect();
    let sources =
        outward().map(|i| Source { address: i.address, bits: i.bits, interface: i.index }).collect();
    let all = if ipv4 { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    let bind = match family[..] {
        [only] if explicit => only.address,
        _ => all,
    };
    let mtu = family.iter().filter(|i| !i.loopback).map(|i| i.mtu).min().unwrap_or(MTU_AUTO_MAX);
    Selection {
        bind,
        addresses,
        sources,
        loopback: bind == all || bind.is_loopback(),
        mtu: mtu.min(MTU_AUTO_MAX),
    }
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.segments()[0] & 0xFFC0 == 0xFE80)
}

enum Pattern<'a> {
    Name(&'a str),
    Network(IpAddr, u8),
}

impl<'a> Pattern<'a> {
    /// An address is a network of one host; what is neither is the beginning of an interface name.
    fn parse(text: &'a str) -> Self {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, bits.parse().ok()),
            None => (text, None),
        };
        let Ok(address) = address.parse::<IpAddr>() else { return Self::Name(text) };
        let most = if address.is_ipv4() { 32 } else { 128 };
        match (text.contains('/'), bits) {
            (true, None) => Self::Name(text),
            (true, Some(bits)) if bits > most => Self::Name(text),
            _ => Self::Network(address, bits.unwrap_or(most)),
        }
    }

    /// `eth1` does not mean `eth10` where there is an `eth1`, but `docker` means every `docker0`.
    fn matches(&self, interface: &Interface, exists: &dyn Fn(&str) -> bool) -> bool {
        match *self {
            Self::Name(name) if exists(name) => interface.name == name,
            Self::Name(name) => interface.name.starts_with(name),
            Self::Network(network, bits) => in_network(interface.address, network, bits),
        }
    }
}

fn in_network(address: IpAddr, network: IpAddr, bits: u8) -> bool {
    let (a, b, width) = match (address, network) {
        (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(a.to_bits()), u128::from(b.to_bits()), 32),
        (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits(), b.to_bits(), 128),
        _ => return false,
    };
    let shift = width - u32::from(bits);
    a.checked_shr(shift).unwrap_or(0) == b.checked_shr(shift).unwrap_or(0)
}

/// Every address of every interface that is up.
pub(crate) fn list() -> Result<Vec<Interface>, EngineError> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is a valid place for the list's head.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(EngineError::Io { what: "listing network interfaces", source: OsError::last() });
    }
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: `next` is an element of the list, which lives until `freeifaddrs`.
        let element = unsafe { &*next };
        if let Some(interface) = read_interface(element) {
            found.push(interface);
        }
        next = element.ifa_next;
    }
    // SAFETY: `first` came from `getifaddrs` and nothing refers to it any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

fn read_interface(element: &libc::ifaddrs) -> Option<Interface> {
    let flags = element.ifa_flags as i32;
    if element.ifa_addr.is_null() || flags & libc::IFF_UP == 0 {
        return None;
    }
    // SAFETY: an address of the list is null or of the length of its family, and the name is a terminated string.
    let (address, netmask, name) =
        unsafe { (ip_of(element.ifa_addr)?, ip_of(element.ifa_netmask), CStr::from_ptr(element.ifa_name)) };
    let mtu = mtu_of(name).unwrap_or(1_500);
    // SAFETY: the name is a terminated string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    // Without a mask, as on a link between two points, only the address itself is near.
    let bits = match netmask {
        Some(IpAddr::V4(mask)) => mask.to_bits().leading_ones() as u8,
        Some(IpAddr::V6(mask)) => mask.to_bits().leading_ones() as u8,
        None if address.is_ipv4() => 32,
        None => 128,
    };
    let loopback = flags & libc::IFF_LOOPBACK != 0;
    Some(Interface { name: name.to_string_lossy().into_owned(), address, bits, index, loopback, mtu })
}

/// The address in the kernel's form at `raw`, if there is one.
///
/// # Safety
/// `raw` is null or points to a socket address of the length that follows from its family.
unsafe fn ip_of(raw: *const libc::sockaddr) -> Option<IpAddr> {
    if raw.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match i32::from((*raw).sa_family) {
            libc::AF_INET => {
                let raw = &*raw.cast::<libc::sockaddr_in>();
                Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr))))
            }
            libc::AF_INET6 => {
                let raw = &*raw.cast::<libc::sockaddr_in6>();
                Some(IpAddr::V6(Ipv6Addr::from(raw.sin6_addr.s6_addr)))
            }
            _ => None,
        }
    }
}

/// MTU by name. Asked of the kernel, because `/sys` may show another network namespace.
fn mtu_of(name: &CStr) -> Option<usize> {
    let socket = std::net::UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok()?;
    // SAFETY: an all-zero `ifreq` is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes_with_nul();
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the request is live and names an interface; the kernel fills in its MTU.
    let mtu = unsafe {
        if libc::ioctl(fd, libc::SIOCGIFMTU, &mut request) != 0 {
            return None;
        }
        request.ifr_ifru.ifru_mtu
    };
    usize::try_from(mtu).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1", 65_536),
            ("lo", "::1", 65_536),
            ("eth1", "10.0.0.5", 9_000),
            ("eth10", "192.168.7.5", 1_500),
            ("eth10", "fe80::1", 1_500),
            ("docker0", "172.17.0.1", 1_500),
        ]
        .into_iter()
        .map(|(name, address, mtu)| Interface {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            bits: 24,
            index: 1,
            loopback: name == "lo",
            mtu,
        })
        .collect()
    }

    fn addresses(asked: &str) -> Vec<String> {
        select(asked, &host()).unwrap().addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn names_networks_addresses_and_exclusions_select() {
        assert_eq!(addresses(""), ["10.0.0.5", "192.168.7.5"]);
        assert_eq!(addresses("eth1"), ["10.0.0.5"]);
        assert_eq!(addresses("eth"), ["10.0.0.5", "192.168.7.5"]);
        assert_eq!(addresses("192.168.0.0/16"), ["192.168.7.5"]);
        assert_eq!(addresses("^lo,docker"), ["10.0.0.5", "192.168.7.5"]);
        assert_eq!(addresses("10.0.0.5, docker0"), ["10.0.0.5", "172.17.0.1"]);
        assert_eq!(addresses("lo"), [""; 0]);
    }

    #[test]
    fn a_single_address_is_bound_alone_and_sets_the_packet_size() {
        let one = select("10.0.0.5", &host()).unwrap();
        assert_eq!((one.bind.to_string().as_str(), one.loopback, one.mtu), ("10.0.0.5", false, 9_000));
        let all = select("", &host()).unwrap();
        assert_eq!((all.bind.to_string().as_str(), all.loopback, all.mtu), ("0.0.0.0", true, 1_500));
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let error = select("ib0", &host()).unwrap_err();
        assert!(matches!(&error, EngineError::NoUsableInterface { asked, .. } if asked == "ib0"));
        assert!(error.to_string().contains("eth1=10.0.0.5"), "{error}");
        let link_local_only: Vec<Interface> =
            host().into_iter().filter(|i| is_link_local(i.address)).collect();
        assert!(select("eth10", &link_local_only).is_err());
        let error = select("10.9.9.9", &host()).unwrap_err();
        assert_eq!(error, EngineError::AddressUnavailable { address: "10.9.9.9".to_owned() });
    }

    #[test]
    fn a_host_without_network_still_has_loopback() {
        let found: Vec<Interface> = host().into_iter().filter(|i| i.loopback).collect();
        let chosen = select("", &found).unwrap();
        assert!(chosen.addresses.is_empty() && chosen.loopback && chosen.bind.is_ipv4());
    }

    #[test]
    fn this_machine_lists_its_loopback_with_its_mtu() {
        let found = list().unwrap();
        assert!(found.iter().any(|i| i.loopback && i.mtu >= 1_500), "{found:?}");
    }
}
