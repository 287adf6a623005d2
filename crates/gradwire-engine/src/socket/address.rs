//! Socket addresses in the kernel's form, built and read byte by byte: no conversion per packet, no unsafe code.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// Bytes of the larger of `sockaddr_in` and `sockaddr_in6`.
pub(crate) const RAW_ADDRESS_BYTES: usize = 28;

/// A `sockaddr_in` or `sockaddr_in6`, and from where what is sent there leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C, align(8))]
pub(crate) struct RawAddress {
    bytes: [u8; RAW_ADDRESS_BYTES],
    len: u8,
    /// Place in the socket's list of sources, from 1; 0: the kernel chooses.
    source: u8,
}

impl RawAddress {
    /// No address: a place for the kernel to write one.
    pub(crate) const EMPTY: Self = Self { bytes: [0; RAW_ADDRESS_BYTES], len: 0, source: 0 };

    /// The kernel's form of `address`.
    pub(crate) fn new(address: SocketAddr) -> Self {
        let mut bytes = [0; RAW_ADDRESS_BYTES];
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address {
            SocketAddr::V4(v4) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                bytes[4..8].copy_from_slice(&v4.ip().octets());
                Self { bytes, len: 16, source: 0 }
            }
            SocketAddr::V6(v6) => {
                bytes[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                Self { bytes, len: 28, source: 0 }
            }
        }
    }

    /// The same destination, from the source at this place of [`super::BindOptions::sources`].
    pub(crate) fn by_source(self, place: usize) -> Self {
        Self { source: u8::try_from(place + 1).unwrap_or(0), ..self }
    }

    /// The place of its source; `None`: the kernel chooses.
    pub(crate) fn source(&self) -> Option<usize> {
        usize::from(self.source).checked_sub(1)
    }

    /// Reads an address that the kernel wrote (the length follows from the family).
    pub(crate) fn to_socket_addr(self) -> Option<SocketAddr> {
        let b = &self.bytes;
        let port = u16::from_be_bytes([b[2], b[3]]);
        match i32::from(u16::from_ne_bytes([b[0], b[1]])) {
            libc::AF_INET => {
                Some(SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::new(b[4], b[5], b[6], b[7]), port)))
            }
            libc::AF_INET6 => {
                let octets: [u8; 16] = b[8..24].try_into().ok()?;
                let scope = u32::from_ne_bytes([b[24], b[25], b[26], b[27]]);
                let mapped = Ipv6Addr::from(octets);
                Some(match mapped.to_ipv4_mapped() {
                    Some(v4) => SocketAddr::new(IpAddr::V4(v4), port),
                    None => SocketAddr::V6(SocketAddrV6::new(mapped, port, 0, scope)),
                })
            }
            _ => None,
        }
    }

    /// Where the kernel reads it.
    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// Where the kernel writes [`RAW_ADDRESS_BYTES`].
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.bytes.as_mut_ptr()
    }

    /// Whether it is an IPv4 address.
    pub(crate) fn is_ipv4(&self) -> bool {
        i32::from(u16::from_ne_bytes([self.bytes[0], self.bytes[1]])) == libc::AF_INET
    }

    /// Whether it is one of this host that no other host can send from: the kernel drops what comes with one over a network.
    pub(crate) fn is_loopback(&self) -> bool {
        self.to_socket_addr().is_some_and(|address| address.ip().is_loopback())
    }

    /// Length that the kernel is told.
    pub(crate) fn len(&self) -> u32 {
        u32::from(self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_the_kernels_form() {
        for text in ["10.1.2.3:47400", "127.0.0.1:1", "[fd00::12]:65535", "[fe80::1%3]:9"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(RawAddress::new(address).to_socket_addr(), Some(address), "{text}");
        }
        assert_eq!(RawAddress::EMPTY.to_socket_addr(), None);
    }

    #[test]
    fn only_a_loopback_address_is_one() {
        let is_loopback = |text: &str| RawAddress::new(text.parse().unwrap()).is_loopback();
        assert!(["127.0.0.1:1", "127.9.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"]
            .into_iter()
            .all(is_loopback));
        assert!(!["10.127.0.1:1", "[fe80::1%3]:1", "[fd00::127]:1"].into_iter().any(is_loopback));
        assert!(!RawAddress::EMPTY.is_loopback());
    }
}
