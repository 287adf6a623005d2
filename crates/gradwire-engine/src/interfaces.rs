//! Which local addresses a process offers to its peers, and how large a packet they carry.

use crate::{EngineError, OsError};
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Largest packet that is used unless the user asks for more: jumbo frames, which most data-centre switches carry.
const MTU_AUTO_MAX: usize = 9_000;
/// Bridges of container and virtual machine managers: the same address on every host, so they never lead to a peer.
pub const BRIDGES: [&str; 3] = ["docker", "virbr", "podman"];
/// A network that a user of docker makes has a bridge of this name, and as many digits. Only so: `br-ex` and `br-lan` may be a host's way out.
const DOCKER_NETWORK: (&str, usize) = ("br-", 12);

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
    /// An IPv6 address that is about to end, or is not to be used yet: temporary, deprecated, tentative, or another host's as well.
    pub(crate) passes: bool,
}

/// The addresses that were selected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selection {
    /// What to bind: the one address that was named as such, or all.
    pub(crate) bind: IpAddr,
    /// The one address from which everything goes that is for other hosts, though all are bound: that of the interface or network that was named.
    pub(crate) home: Option<IpAddr>,
    /// Addresses for other hosts, of one family.
    pub(crate) addresses: Vec<IpAddr>,
    /// Where each of these is, in the same order.
    pub(crate) sources: Vec<Source>,
    /// Whether ranks in this network namespace can use the loopback address.
    pub(crate) loopback: bool,
    /// Largest IP packet towards other hosts.
    pub(crate) mtu: usize,
    /// The interface that says so; empty: none does.
    pub(crate) narrowest: String,
    /// The one with the largest packets, and their size, where nobody has chosen and that is more than twice as large.
    pub(crate) much_wider: Option<(String, usize)>,
}

/// A local address and its interface, for what is sent from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Source {
    pub(crate) address: IpAddr,
    /// Bits of its network.
    pub(crate) bits: u8,
    /// The kernel's number of the interface; 0: the kernel routes, because the address is on the loopback interface.
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
    // A link-local address is of no use to a peer that does not know the link. Of IPv4 it may be all that a cable between two hosts has.
    let is_asked = |i: &Interface| !excluding && patterns.iter().any(|p| p.means_link_local(i, found));
    let mut chosen: Vec<&Interface> = found
        .iter()
        .filter(|i| !is_link_local(i.address) || i.address.is_ipv4() && is_asked(i))
        .filter(|i| match (patterns.is_empty(), excluding) {
            (true, _) => is_outward(i),
            (false, true) => is_outward(i) && !named(i),
            (false, false) => named(i),
        })
        .collect();
    if chosen.is_empty() && patterns.is_empty() {
        chosen.extend(found.iter().filter(|i| i.address.is_ipv4() && is_outward(i)));
    }
    let is_address_asked = |i: &Interface| !excluding && patterns.iter().any(|p| p.is_address(i.address));
    // A peer stays at the address that it has found: one that ends takes the group with it.
    let stays = |i: &&Interface| i.address.is_ipv6() && !i.passes;
    let staying: Vec<String> = chosen.iter().copied().filter(stays).map(|i| i.name.clone()).collect();
    chosen.retain(|i| !i.passes || is_address_asked(i) || !staying.contains(&i.name));
    // Without any network a single host can still train.
    let alone = patterns.is_empty() && found.iter().any(|i| i.loopback);
    if chosen.is_empty() && !alone {
        let found: Vec<String> = found.iter().map(|i| format!("{}={}", i.name, i.address)).collect();
        return Err(EngineError::NoUsableInterface { asked: asked.to_owned(), found: found.join(", ") });
    }
    let mut selection = selection(&chosen, !excluding && !patterns.is_empty(), &is_address_asked, found);
    selection.much_wider = selection.much_wider.filter(|_| patterns.is_empty());
    Ok(selection)
}

/// Whether it may lead to other hosts.
fn is_outward(interface: &Interface) -> bool {
    let name = &interface.name;
    let (prefix, digits) = DOCKER_NETWORK;
    let is_id = |id: &str| id.len() == digits && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_bridge = BRIDGES.iter().any(|bridge| name.starts_with(bridge));
    !interface.loopback && !is_bridge && !name.strip_prefix(prefix).is_some_and(is_id)
}

fn selection(
    chosen: &[&Interface],
    explicit: bool,
    is_address_asked: &dyn Fn(&Interface) -> bool,
    found: &[Interface],
) -> Selection {
    // One socket has one family: IPv4 where there is any.
    let among: Vec<&Interface> = if chosen.is_empty() { found.iter().collect() } else { chosen.to_vec() };
    let ipv4 = among.iter().any(|i| i.address.is_ipv4());
    let family: Vec<&Interface> = chosen.iter().copied().filter(|i| i.address.is_ipv4() == ipv4).collect();
    // A host that is reached by several routers may have its address on the loopback interface; others have one there that leads nowhere.
    let outward = || family.iter().filter(|i| !i.loopback || explicit && !i.address.is_loopback());
    let addresses: Vec<IpAddr> = outward().map(|i| i.address).collect();
    let source = |i: &&Interface| Source {
        address: i.address,
        bits: i.bits,
        interface: if i.loopback { 0 } else { i.index },
    };
    let sources = outward().map(source).collect();
    let all = if ipv4 { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
    // Who names an address wants no other one to be open. Who names an interface says which way leads to the others: bound alone, ranks of one host
    // would not meet over loopback. What is on the loopback interface is open to no other host, and stays so.
    let (bind, home) = match family[..] {
        [only] if explicit && (only.loopback || is_address_asked(only)) => (only.address, None),
        [only] if explicit => (all, Some(only.address)),
        _ => (all, None),
    };
    // Through which it then leaves the routes say.
    let leaves_by_any = outward().any(|i| i.loopback);
    let others = found.iter().filter(move |i| leaves_by_any && is_outward(i));
    let cards = || outward().copied().filter(|i| !i.loopback).chain(others.clone());
    let narrowest = cards().min_by_key(|i| i.mtu);
    let mtu = narrowest.map_or(MTU_AUTO_MAX, |i| i.mtu.min(MTU_AUTO_MAX));
    let widest = cards().max_by_key(|i| i.mtu).filter(|i| i.mtu.min(MTU_AUTO_MAX) > 2 * mtu);
    Selection {
        bind,
        home,
        addresses,
        sources,
        loopback: bind == all || bind.is_loopback(),
        mtu,
        much_wider: widest.map(|i| (i.name.clone(), i.mtu)),
        narrowest: narrowest.map_or_else(String::new, |i| i.name.clone()),
    }
}

fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.segments()[0] & 0xFFC0 == 0xFE80,
    }
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

    /// Whether it names this address as such.
    fn is_address(&self, address: IpAddr) -> bool {
        let whole = if address.is_ipv4() { 32 } else { 128 };
        matches!(*self, Self::Network(named, bits) if named == address && bits == whole)
    }

    /// Whether it names a link-local address as such, or an interface that has no other.
    fn means_link_local(&self, interface: &Interface, found: &[Interface]) -> bool {
        match *self {
            Self::Name(name) => {
                interface.name.starts_with(name)
                    && found.iter().all(|i| i.name != interface.name || is_link_local(i.address))
            }
            Self::Network(network, _) => is_link_local(network),
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
    // Not there: a kernel without IPv6, or another system.
    let text = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let passing = passing(&text);
    found.iter_mut().for_each(|interface| interface.passes = passing.contains(&interface.address));
    Ok(found)
}

/// The addresses in the kernel's list (`/proc/net/if_inet6`: address, interface, bits, scope, flags, all hexadecimal, and name) that pass.
fn passing(text: &str) -> Vec<IpAddr> {
    let read = |line: &str| {
        let mut words = line.split_whitespace();
        let address = u128::from_str_radix(words.next()?, 16).ok()?;
        let flags = u32::from_str_radix(words.nth(3)?, 16).ok()?;
        (flags & PASSING != 0).then_some(IpAddr::V6(Ipv6Addr::from(address)))
    };
    text.lines().filter_map(read).collect()
}

/// Temporary (RFC 8981), found twice in the network, deprecated, tentative: `IFA_F_TEMPORARY` and so on.
const PASSING: u32 = 0x01 | 0x08 | 0x20 | 0x40;

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
    Some(Interface {
        name: name.to_string_lossy().into_owned(),
        address,
        bits,
        index,
        loopback,
        mtu,
        passes: false,
    })
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
    let socket = unbound_socket()?;
    // SAFETY: an all-zero `ifreq` is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let bytes = name.to_bytes_with_nul();
    for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
        *to = *from as libc::c_char;
    }
    let fd = socket.as_raw_fd();
    // SAFETY: the request is live and names an interface; the kernel fills in its MTU.
    let mtu = unsafe {
        if libc::ioctl(fd, libc::SIOCGIFMTU, &mut request) != 0 {
            return None;
        }
        request.ifr_ifru.ifru_mtu
    };
    usize::try_from(mtu).ok()
}

/// To ask the kernel about interfaces. Bound to nothing: no address is sure to be there, not even loopback's.
fn unbound_socket() -> Option<OwnedFd> {
    [libc::AF_INET, libc::AF_INET6].into_iter().find_map(|family| {
        // SAFETY: the call takes no pointers, and what it returns belongs to nobody else.
        unsafe {
            let fd = libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            (fd >= 0).then(|| OwnedFd::from_raw_fd(fd))
        }
    })
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
            passes: false,
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
        assert_eq!(addresses("^eth1"), ["192.168.7.5"], "bridges of containers stay out");
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
    fn an_interface_that_is_named_leaves_loopback_to_the_ranks_of_the_host() {
        for asked in ["eth1", "10.0.0.0/8", "eth1,ib0"] {
            let chosen = select(asked, &host()).unwrap();
            assert_eq!((chosen.bind.to_string().as_str(), chosen.loopback), ("0.0.0.0", true), "{asked}");
            assert_eq!(chosen.home, Some("10.0.0.5".parse().unwrap()), "{asked}: all else goes from there");
            assert_eq!((&chosen.addresses[..], chosen.mtu), (&[chosen.home.unwrap()][..], 9_000), "{asked}");
        }
        for asked in ["10.0.0.5", "10.0.0.5/32", "eth1,10.0.0.5"] {
            let chosen = select(asked, &host()).unwrap();
            assert_eq!((chosen.bind, chosen.home), (chosen.addresses[0], None), "{asked}");
        }
        let local = select("lo", &host()).unwrap();
        assert_eq!(
            (local.bind.to_string().as_str(), local.loopback),
            ("127.0.0.1", true),
            "open to this host alone"
        );
        assert_eq!(select("", &host()).unwrap().home, None);
    }

    #[test]
    fn an_interface_much_narrower_than_others_is_told_unless_somebody_has_chosen() {
        let found = with(&[("eth0", "10.0.0.5", 9_000), ("tailscale0", "100.64.0.3", 1_280)]);
        let chosen = select("", &found).unwrap();
        assert_eq!((chosen.mtu, chosen.narrowest.as_str()), (1_280, "tailscale0"));
        assert_eq!(chosen.much_wider, Some(("eth0".to_owned(), 9_000)));
        for asked in ["^tailscale", "eth0,tailscale0", "tailscale0"] {
            assert_eq!(select(asked, &found).unwrap().much_wider, None, "{asked}");
        }
        let alike = with(&[("eth0", "10.0.0.5", 1_500), ("wg0", "10.9.0.3", 1_420)]);
        assert_eq!(select("", &alike).unwrap().much_wider, None);
    }

    #[test]
    fn an_address_that_passes_is_left_out_where_another_of_its_interface_remains() {
        let text = "20010db8000000000000000000000005 02 40 00 00     eth0\n\
                    20010db8000000000000000000000077 02 40 00 01     eth0\n\
                    20010db8000000000000000000000078 02 40 00 20     eth0\n\
                    20010db8000000000000000000000079 03 40 00 c0     eth1\n\
                    00000000000000000000000000000001 01 80 10 80       lo\nno such line\n";
        let ended: Vec<String> = passing(text).iter().map(ToString::to_string).collect();
        assert_eq!(ended, ["2001:db8::77", "2001:db8::78", "2001:db8::79"]);
        let mut found = with(&[
            ("eth0", "2001:db8::77", 1_500),
            ("eth0", "2001:db8::5", 1_500),
            ("eth0", "2001:db8::78", 1_500),
            ("eth1", "2001:db8::79", 1_500),
        ]);
        found.iter_mut().for_each(|i| i.passes = ended.contains(&i.address.to_string()));
        assert_eq!(texts("", &found), ["2001:db8::5", "2001:db8::79"], "eth1 has no other");
        assert_eq!(texts("eth0", &found), ["2001:db8::5"]);
        assert_eq!(texts("2001:db8::77", &found), ["2001:db8::77"], "who names it has it");
        assert_eq!(texts("2001:db8::78/127", &found), ["2001:db8::78", "2001:db8::79"]);
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let error = select("ib0", &host()).unwrap_err();
        assert!(matches!(&error, EngineError::NoUsableInterface { asked, .. } if asked == "ib0"));
        assert!(error.to_string().contains("eth1=10.0.0.5"), "{error}");
        let link_local_only: Vec<Interface> =
            host().into_iter().filter(|i| is_link_local(i.address)).collect();
        assert!(select("eth10", &link_local_only).is_err());
        let only = Interface { address: "fe80::1".parse().unwrap(), ..host()[0].clone() };
        let error = select(&only.name, std::slice::from_ref(&only)).unwrap_err();
        assert!(error.to_string().contains("fe80::/10, are never used"), "{error}");
        let error = select("10.9.9.9", &host()).unwrap_err();
        assert_eq!(error, EngineError::AddressUnavailable { address: "10.9.9.9".to_owned() });
    }

    fn with(more: &[(&str, &str, usize)]) -> Vec<Interface> {
        let interface = |(name, address, mtu): &(&str, &str, usize)| Interface {
            name: (*name).to_owned(),
            address: address.parse().unwrap(),
            mtu: *mtu,
            loopback: *name == "lo",
            ..host()[0].clone()
        };
        more.iter().map(interface).collect()
    }

    fn texts(asked: &str, found: &[Interface]) -> Vec<String> {
        select(asked, found).unwrap().addresses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_link_local_address_of_ipv4_does_not_decide_the_family_but_may_be_asked_for() {
        let pod = with(&[
            ("lo", "127.0.0.1", 65_536),
            ("eth0", "2001:db8::5", 9_001),
            ("v4if0", "169.254.172.2", 9_001),
        ]);
        assert_eq!(texts("", &pod), ["2001:db8::5"]);
        assert_eq!(texts("^lo", &pod), ["2001:db8::5"]);
        assert!(select("", &pod).unwrap().bind.is_ipv6());
        let server = with(&[
            ("eth0", "10.0.0.5", 1_500),
            ("eth0", "169.254.7.7", 1_500),
            ("usb0", "169.254.3.1", 1_500),
        ]);
        assert_eq!(texts("", &server), ["10.0.0.5"]);
        assert_eq!(texts("eth0", &server), ["10.0.0.5"]);
        assert_eq!(texts("0.0.0.0/0", &server), ["10.0.0.5"]);
        for asked in ["usb0", "169.254.3.1", "169.254.3.0/24"] {
            assert_eq!(texts(asked, &server), ["169.254.3.1"], "{asked}");
        }
        assert_eq!(texts("169.254.0.0/16", &server), ["169.254.7.7", "169.254.3.1"]);
        assert_eq!(texts("eth0,0.0.0.0/0", &server), ["10.0.0.5"], "a name means its own alone");
        let cable = with(&[("lo", "127.0.0.1", 65_536), ("eth0", "169.254.7.7", 1_500)]);
        assert_eq!(texts("", &cable), ["169.254.7.7"], "it is all that there is");
    }

    #[test]
    fn bridges_of_container_networks_stay_out_and_bridges_that_lead_out_do_not() {
        let found = with(&[
            ("br-0a1b2c3d4e5f", "172.18.0.1", 1_500),
            ("br-ex", "10.0.0.5", 1_500),
            ("br-lan", "10.1.0.5", 1_500),
        ]);
        assert_eq!(texts("", &found), ["10.0.0.5", "10.1.0.5"]);
        assert_eq!(texts("br-0a1b2c3d4e5f", &found), ["172.18.0.1"]);
    }

    #[test]
    fn an_address_on_the_loopback_interface_is_used_where_it_is_named() {
        let found = with(&[
            ("lo", "127.0.0.1", 65_536),
            ("lo", "10.255.0.5", 65_536),
            ("eth0", "10.0.0.5", 9_000),
            ("eth1", "10.1.0.5", 1_500),
            ("docker0", "172.17.0.1", 1_280),
        ]);
        let chosen = select("10.255.0.5", &found).unwrap();
        let address: IpAddr = "10.255.0.5".parse().unwrap();
        assert_eq!((chosen.bind, &chosen.addresses[..], chosen.mtu), (address, &[address][..], 1_500));
        assert_eq!(chosen.sources[0].interface, 0, "it leaves by a card, as the kernel routes");
        assert_eq!(texts("", &found), ["10.0.0.5", "10.1.0.5"]);
        assert_eq!(texts("127.0.0.1", &found), [""; 0]);
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
