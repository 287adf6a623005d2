"""What this host's kernel counts of packets that it dropped itself, or that reached it damaged.

A test between two ranks says that packets are missing, not where. These counters, read before and after all tests, tell what was
lost in a host from what was lost between: the card's ring, the queue behind it, the socket's buffer, and frames that a bad cable
damaged. They count everything on the host, not only the doctor's packets.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.doctor.findings import PROBLEM, WARNING, Finding

_NET = Path("/proc/self/net")
_CONNECTIONS = Path("/proc/sys/net/netfilter")
_DROPPED_LEAST = 1e-3  # of a card's packets: those of protocols that nobody here speaks are fewer
_DAMAGED_LEAST = 1e-5  # of a card's packets since it came up: one of 70 MB
_FULL_LEAST = 0.9


@dataclass(frozen=True)
class Card:
    """A network card's own counts.

    Attributes:
        received: packets that were handed on.
        damaged: that were not, as their checksum or length was wrong.
        dropped: for want of memory, or because nobody here speaks their protocol.
        overrun: for want of room in the card's ring.
        unsent: that could not be sent.
        collisions: of a wire that both ends cannot use at once.
    """

    received: int = 0
    damaged: int = 0
    dropped: int = 0
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
        backlog_dropped: for want of room between the cards' interrupts and the sockets, all cores.
        buffer_dropped: for want of room in a UDP socket's receive buffer.
        wrong_checksum: UDP packets that were not what was sent.
        connections: that the packet filter follows, and the most that it can; zeros where it follows none.
    """

    cards: dict[str, Card] = field(default_factory=dict)
    backlog_dropped: int = 0
    buffer_dropped: int = 0
    wrong_checksum: int = 0
    connections: tuple[int, int] = (0, 0)


def read(net: Path = _NET, connections: Path = _CONNECTIONS) -> Counters:
    """Reads them all. What a kernel does not count stays zero."""
    udp = _udp(net)
    return Counters(
        cards=_cards(net),
        backlog_dropped=_backlog_dropped(net),
        buffer_dropped=udp.get("RcvbufErrors", 0),
        wrong_checksum=udp.get("InCsumErrors", 0),
        connections=(_number(connections / "nf_conntrack_count"), _number(connections / "nf_conntrack_max")),
    )


def judge_now(now: Counters, used: list[str], rank: int) -> list[Finding]:
    """What one reading says: damage since a card came up, and a packet filter with no room.

    Args:
        now: the reading.
        used: interfaces that gradwire uses.
        rank: whose host it is.
    """
    findings = []
    for name in used:
        card = now.cards.get(name, Card())
        if card.damaged > _DAMAGED_LEAST * max(1, card.received):
            text = f"{card.damaged} of {card.received} packets have come damaged to {name} since it is up"
            findings.append(Finding(WARNING, "card", text, _cable(name), rank))
        if card.collisions:
            text = f"{name} has counted {card.collisions} collisions: one end of its cable sends and receives by turns only"
            fix = f"let both ends negotiate speed and duplex (ethtool -s {name} autoneg on), or set both alike"
            findings.append(Finding(WARNING, "card", text, fix, rank))
    count, most = now.connections
    if most and count >= _FULL_LEAST * most:
        text = f"the packet filter follows {count} connections of at most {most}: beyond that packets of new ones are dropped"
        fix = f"sysctl -w net.netfilter.nf_conntrack_max={4 * most}, or no connection tracking for gradwire's ports (notrack)"
        findings.append(Finding(PROBLEM, "filter", text, fix, rank))
    return findings


def judge(before: Counters, after: Counters, used: list[str], rank: int) -> list[Finding]:
    """What this host dropped, or got damaged, between two readings.

    Args:
        before: the first reading.
        after: the second.
        used: interfaces that gradwire uses.
        rank: whose host it is.
    """

    def found(text: str, fix: str) -> Finding:
        return Finding(WARNING, "drops", f"{text} during the check", fix, rank)

    findings = []
    for name in used:
        card = after.cards.get(name, Card()).since(before.cards.get(name, Card()))
        if card.damaged > 0:
            findings.append(found(f"{card.damaged} of {card.received} packets came damaged to {name}", _cable(name)))
        lost = card.overrun or (card.dropped if card.dropped > _DROPPED_LEAST * max(1, card.received) else 0)
        if lost > 0:
            fix = f"a larger ring (ethtool -g {name}, ethtool -G {name} rx N), and interrupts on more cores (ethtool -X {name})"
            findings.append(
                found(f"{name} dropped {lost} packets that had come to it, {card.received} were taken", fix)
            )
        if card.unsent > 0:
            findings.append(found(f"{name} could not send {card.unsent} packets", _cable(name)))
    if (lost := after.backlog_dropped - before.backlog_dropped) > 0:
        fix = "sysctl -w net.core.netdev_max_backlog=10000, and interrupts on more cores"
        findings.append(found(f"the kernel dropped {lost} packets between cards and sockets", fix))
    if (lost := after.buffer_dropped - before.buffer_dropped) > 0:
        fix = "sysctl -w net.core.rmem_max=16777216, and cores for the programs that receive them"
        findings.append(found(f"{lost} UDP packets found the buffer of their socket full", fix))
    if (lost := after.wrong_checksum - before.wrong_checksum) > 0:
        fix = "switch checksums of the cards off (ethtool -K <interface> rx off tx off) to find who damages them"
        findings.append(found(f"{lost} UDP packets came with a wrong checksum", fix))
    return findings


def _cable(name: str) -> str:
    return f"change the cable, the optic or the port of {name} (ethtool -S {name}, the switch's counters)"


def _cards(net: Path) -> dict[str, Card]:
    """`/proc/net/dev`: eight columns of what was received, eight of what was sent."""
    found = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (net / "dev").read_text().splitlines()[2:]:
            name, _, columns = line.rpartition(":")
            counts = [int(column) for column in columns.split()]
            # bytes packets errs drop fifo frame compressed multicast, bytes packets errs drop fifo colls carrier compressed
            found[name.strip()] = Card(
                received=counts[1],
                damaged=counts[5],
                dropped=counts[3],
                overrun=counts[4],
                unsent=counts[10],
                collisions=counts[13],
            )
    return found


def _backlog_dropped(net: Path) -> int:
    """The second hexadecimal column of each core."""
    with suppress(OSError, ValueError, IndexError):
        return sum(int(line.split()[1], 16) for line in (net / "softnet_stat").read_text().splitlines())
    return 0


def _udp(net: Path) -> dict[str, int]:
    """Two lines of names and of values."""
    with suppress(OSError, ValueError):
        names, values = [line.split() for line in (net / "snmp").read_text().splitlines() if line.startswith("Udp:")]
        return dict(zip(names[1:], map(int, values[1:]), strict=True))
    return {}


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0
