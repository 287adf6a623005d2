"""What this host's kernel counts of packets that it dropped itself, or that reached it damaged.

A test between two ranks says that packets are missing, not where. These counters, read before and after all tests, tell what was
lost in a host from what was lost between: the card's ring, the queue behind it, the socket's buffer, the sender's own queue, and frames
that a bad cable damaged. They count everything on the host, not only the doctor's packets.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from gradwire.doctor import netlink
from gradwire.doctor.findings import PROBLEM, WARNING, Finding

_NET = Path("/proc/self/net")
_CONNECTIONS = Path("/proc/sys/net/netfilter")
_UDP_OF_IPV6 = "Udp6"
_DAMAGED_SHARE, _DAMAGED_LEAST = 1e-5, 10  # since the driver was loaded: one of 70 MB, and not one bad minute long ago
_COLLISIONS_SHARE = 1e-3
_FULL_SHARE = 0.9
_GET_LINK, _LINK = 18, struct.Struct("BxHiII")  # RTM_GETLINK, struct ifinfomsg
_NAME, _STATISTICS = 3, 23  # IFLA_IFNAME, IFLA_STATS64
_STATISTICS_LEAST = 16 * 8


@dataclass(frozen=True)
class Card:
    """A network card's own counts.

    Attributes:
        received, sent: packets.
        damaged: received with a wrong checksum or form, and dropped.
        overrun: dropped for want of room in the card's ring.
        unsent: that could not be sent.
        collisions: of a wire that both ends cannot use at once.
    """

    received: int = 0
    sent: int = 0
    damaged: int = 0
    overrun: int = 0
    unsent: int = 0
    collisions: int = 0

    def since(self, before: Card) -> Card:
        """What came since an earlier reading."""
        return Card(**{name: value - getattr(before, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Counters:
    """One reading.

    Attributes:
        cards: by interface.
        backlog_dropped: for want of room between the cards' interrupts and the sockets, all cores of the machine.
        buffer_dropped: for want of room in a UDP socket's receive buffer.
        queue_dropped: UDP packets that this host's own queue before the card did not take.
        wrong_checksum: UDP packets that were not what was sent.
        connections: that the packet filter follows, and the most that it can; zeros where it follows none.
    """

    cards: dict[str, Card] = field(default_factory=dict)
    backlog_dropped: int = 0
    buffer_dropped: int = 0
    queue_dropped: int = 0
    wrong_checksum: int = 0
    connections: tuple[int, int] = (0, 0)

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def read(net: Path = _NET, connections: Path = _CONNECTIONS) -> Counters:
    """Reads them all. What a kernel does not count stays zero."""
    udp = _udp(net)
    return Counters(
        cards=_cards(),
        backlog_dropped=_backlog_dropped(net),
        buffer_dropped=udp["RcvbufErrors"],
        queue_dropped=udp["SndbufErrors"],
        wrong_checksum=udp["InCsumErrors"],
        connections=(_number(connections / "nf_conntrack_count"), _number(connections / "nf_conntrack_max")),
    )


def judge_now(now: Counters, used: list[str], rank: int) -> list[Finding]:
    """What one reading says: damage since a card's driver was loaded, and a packet filter with no room.

    Args:
        now: the reading.
        used: interfaces that gradwire uses.
        rank: whose host it is.
    """
    findings = []
    for name in used:
        card = now.cards.get(name, Card())
        if card.damaged >= _DAMAGED_LEAST and card.damaged > _DAMAGED_SHARE * card.received:
            text = f"{card.damaged} packets have come damaged to {name}, and {card.received} well, since its driver was loaded"
            findings.append(Finding(WARNING, "card", text, _cable(name), rank))
        if card.collisions > _COLLISIONS_SHARE * card.sent:
            text = f"{name} has counted {card.collisions} collisions: one end of its cable sends and receives by turns only"
            fix = f"let both ends negotiate speed and duplex (ethtool -s {name} autoneg on), or set both alike"
            findings.append(Finding(WARNING, "card", text, fix, rank))
    count, most = now.connections
    if most and count >= _FULL_SHARE * most:
        text = f"the packet filter follows {count} connections of at most {most}: when it is full, packets of new ones are dropped"
        fix = f"sysctl -w net.netfilter.nf_conntrack_max={4 * most}, or no connection tracking for gradwire's ports (notrack)"
        findings.append(Finding(PROBLEM if count >= most else WARNING, "filter", text, fix, rank))
    return findings


def judge(before: Counters, after: Counters, used: list[str], rank: int) -> list[Finding]:
    """What this host dropped, or got damaged, between two readings.

    Args:
        before: the first reading.
        after: the second.
        used: interfaces that gradwire uses.
        rank: whose host it is.
    """
    read_twice = [name for name in used if name in before.cards and name in after.cards]
    of_cards = [_judge_card(name, after.cards[name].since(before.cards[name])) for name in read_twice]
    found = chain(*of_cards, _judge_host(before, after))
    return [Finding(WARNING, "drops", f"{text} during the check", fix, rank) for text, fix in found]


def _judge_card(name: str, card: Card) -> Iterator[tuple[str, str]]:
    """What it dropped and how to mend it, of its counts during the check."""
    if card.damaged > 0:
        yield f"{card.damaged} packets came damaged to {name}, and {card.received} well,", _cable(name)
    if card.overrun > 0:
        fix = f"a larger ring (ethtool -g {name}, ethtool -G {name} rx N), and interrupts on more cores (ethtool -X {name})"
        yield f"{name} dropped {card.overrun} packets for want of room, and took {card.received},", fix
    if card.unsent > 0:
        yield f"{name} could not send {card.unsent} packets", _cable(name)


def _judge_host(before: Counters, after: Counters) -> Iterator[tuple[str, str]]:
    """The same of what is behind all cards."""
    for name, text, fix in _BEHIND_CARDS:
        if (lost := getattr(after, name) - getattr(before, name)) > 0:
            yield text.format(lost), fix


_BEHIND_CARDS = (
    (
        "backlog_dropped",
        "the kernel dropped {} packets between cards and sockets",
        "sysctl -w net.core.netdev_max_backlog=10000, and interrupts on more cores",
    ),
    (
        "buffer_dropped",
        "{} UDP packets found the buffer of their socket full",
        "sysctl -w net.core.rmem_max=16777216, and cores for the programs that receive them",
    ),
    (
        "queue_dropped",
        "{} UDP packets found this host's own queue to the card full",
        "a longer queue before the card (ip link set <interface> txqueuelen 1000; tc -s qdisc shows where)",
    ),
    (
        "wrong_checksum",
        "{} UDP packets came with a wrong checksum",
        "switch checksums of the cards off (ethtool -K <interface> rx off tx off) to find who damages them",
    ),
)
"""What is counted, how it is told, and how it is mended."""


def _cable(name: str) -> str:
    return f"change the cable, the optic or the port of {name} (ethtool -S {name}, the switch's counters)"


def _cards() -> dict[str, Card]:
    """Of all links of this process's network namespace."""
    found: dict[str, Card] = {}
    for content in netlink.dump(_GET_LINK, _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
        found.update(card_of(content[_LINK.size :]))
    return found


def card_of(attributes: bytes) -> dict[str, Card]:
    """Name and counts of one link, from its attributes as rtnetlink has them; nothing where it has no counts."""
    name, counts = "", ()
    for kind, content in netlink.attributes(attributes):
        if kind == _NAME:
            name = content.rstrip(b"\0").decode(errors="replace")
        elif kind == _STATISTICS and len(content) >= _STATISTICS_LEAST:
            counts = struct.unpack_from("16Q", content)
    if not name or not counts:
        return {}
    # struct rtnl_link_stats64, which is not the order of /proc/net/dev; there several of these are one column.
    received, sent, _, _, _, unsent, _, _, _, collisions, _, over, checksum, form, fifo, missed = counts
    return {name: Card(received, sent, checksum + form, over + fifo + missed, unsent, collisions)}


def _backlog_dropped(net: Path) -> int:
    """The second hexadecimal column of each core."""
    with suppress(OSError, ValueError, IndexError):
        return sum(int(line.split()[1], 16) for line in (net / "softnet_stat").read_text().splitlines())
    return 0


def _udp(net: Path) -> Counter[str]:
    """Of both families: two lines of names and of values, and a line for each of IPv6."""
    found: Counter[str] = Counter()
    with suppress(OSError, ValueError):
        names, values = [line.split() for line in (net / "snmp").read_text().splitlines() if line.startswith("Udp:")]
        found.update(dict(zip(names[1:], map(int, values[1:]), strict=True)))
    with suppress(OSError, ValueError):
        lines = [line.split() for line in (net / "snmp6").read_text().splitlines() if line.startswith(_UDP_OF_IPV6)]
        found.update({name.removeprefix(_UDP_OF_IPV6): int(value) for name, value in lines})
    return found


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
