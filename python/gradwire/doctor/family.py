"""What IPv4 and IPv6 call the same things of a socket: numbers of Linux's headers that Python's `socket` does not all have."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Family:
    """One of the two, of which there is one object each.

    Attributes:
        number, level: of sockets, and of their options.
        anywhere, loopback: the address that stands for all local ones, and the one that leads to this host alone.
        header_bytes: of its header and UDP's.
        class_of_sent: option and ancillary data of the traffic class octet of packets.
        class_of_received: option that has received packets come with theirs, under the name `class_of_sent`.
        sent_from: kind of ancillary data that names the local address of a packet to send.
        mtu_discover: option that says whether packets may be sent in parts.
        errors: option that keeps what routers say, and the kind of ancillary data that it comes as.
        hops: option of the most routers that packets pass.
        hops_ended: origin and type of what a router says that a packet did not get beyond.
        router: where its address is behind such an error: after the port of a `sockaddr_in`, or port and flow of a `sockaddr_in6`.
    """

    number: int
    level: int
    anywhere: str
    loopback: str
    header_bytes: int
    class_of_sent: int
    class_of_received: int
    sent_from: int
    mtu_discover: int
    errors: int
    hops: int
    hops_ended: tuple[int, int]
    router: slice

    def from_address(self, address: str) -> tuple[int, int, bytes]:
        """Ancillary data that sends a packet from this local address, on whichever interface the kernel routes it to."""
        packed, no_interface = socket.inet_pton(self.number, address), 0
        is_ipv4 = self.number == socket.AF_INET
        info = struct.pack("=i4s4x", no_interface, packed) if is_ipv4 else struct.pack("=16sI", packed, no_interface)
        return self.level, self.sent_from, info


IPV4 = Family(
    number=socket.AF_INET, level=socket.IPPROTO_IP, anywhere="0.0.0.0", loopback="127.0.0.1", header_bytes=28,  # noqa: S104  (as training)
    class_of_sent=socket.IP_TOS, class_of_received=socket.IP_RECVTOS, sent_from=8, mtu_discover=10, errors=11, hops=socket.IP_TTL,
    hops_ended=(2, 11), router=slice(20, 24),
)  # fmt: skip
IPV6 = Family(
    number=socket.AF_INET6, level=socket.IPPROTO_IPV6, anywhere="::", loopback="::1", header_bytes=48,
    class_of_sent=socket.IPV6_TCLASS, class_of_received=socket.IPV6_RECVTCLASS,
    sent_from=socket.IPV6_PKTINFO, mtu_discover=23, errors=25,
    hops=socket.IPV6_UNICAST_HOPS, hops_ended=(3, 3), router=slice(24, 40),
)  # fmt: skip


def family_of(address: str) -> Family:
    """The one that an address is of."""
    return IPV6 if ":" in address else IPV4


def family_of_engine(features: Mapping[str, Any]) -> Family:
    """The one of an engine's sockets, by what it got."""
    return IPV6 if features["ipv6"] else IPV4
