"""What is measured from one rank to another, and what follows from it for training."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.config import Config
from gradwire.doctor import marks, rails, ways
from gradwire.doctor.family import family_of
from gradwire.doctor.findings import NOTE, PROBLEM, WARNING, Finding
from gradwire.doctor.marks import Marks, octets_of
from gradwire.doctor.probe import WAIT_SECONDS, Count, End, Prober, trace
from gradwire.doctor.rails import Rail
from gradwire.doctor.reach import is_loopback
from gradwire.doctor.ways import BURST_TEST, LARGE_TEST, LOSS_TEST, Plan, Way

_TRIES = 10  # for a first answer: over a way that loses 30 % one in 100,000 pairs is called unreachable
_MTU_TRIES = 5
_RTT_PROBES = 20
_TAG_TRIES = 4
_FLOWS, _HOPS = 8, 6
_BURST_PACKETS = 48  # of full size at once: 72 KB, a quarter of a gradwire eager window
_BURST_ROUNDS, _BURST_PAUSE_SECONDS = 4, 0.1
_BURST_SENT = _BURST_PACKETS * _BURST_ROUNDS
_BURST_LOST_LEAST = 0.1  # less may be chance
_TELLING_NS = 20_000  # between packets; cards collect several closer ones before the kernel hears of any
_SLOW = 0.5  # of most ways' rate
_OFFSET_SECONDS = 0.5  # between wall clocks, from which on logs mislead
_LONG_RTT_SECONDS = 0.05


@dataclass(frozen=True)
class Peer:
    """A rank as this one reaches it: addresses, best first, and port; the code points that arrive there are its business."""

    rank: int
    addresses: Sequence[str]
    port: int


@dataclass(frozen=True)
class PairFacts:
    """What one rank measured towards another.

    Attributes:
        address: that answered; empty: none did, and nothing else was measured.
        rtt_ms: least and median round trip.
        ip_bytes: largest IP packet that arrives, up to the one that gradwire would send (`ip_bytes_wanted`).
        sent: packets of the loss test; `lost` and `reordered` are of these. All are lost where the peer never says a count.
        large: packets sent of full size, and those of them that were lost: what damages bits, or counts them, takes these first.
        rate_mbit: at which bursts came, in IP packets, and at most `rate_most`; None: not known. A shaper that lets as much go at once is
            not seen.
        burst_lost: share of packets lost of short bursts at full speed; 1 where the peer never says a count.
        marks: for each octet sent the one that arrived; None: nothing arrived with it.
        paths: different ways that were seen and pass packets of full size: local addresses, and routers that flows from different ports
            meet.
        rails: the same for each local address of this rank but the one that the kernel takes.
        offset_s: the peer's wall clock minus this one's.
        threads: for each network thread beside the first, as far as both have it, whether the peer's answered this rank's.
    """

    rank: int
    peer: int
    address: str = ""
    rtt_ms: tuple[float, float] = (0.0, 0.0)
    ip_bytes: int = 0
    ip_bytes_wanted: int = 0
    sent: int = 0
    lost: int = 0
    reordered: int = 0
    large: tuple[int, int] = (0, 0)
    rate_mbit: float | None = None
    burst_lost: float = 0.0
    marks: Marks = ()
    paths: int = 0
    rails: tuple[Rail, ...] = ()
    offset_s: float = 0.0
    threads: tuple[bool, ...] = ()

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def measure(
    prober: Prober,
    peer: Peer,
    config: Config,
    *,
    ip_bytes: int,
    sources: Sequence[str],
    plan: Plan,
    can_join: bool = False,
    further: Sequence[tuple[Prober, int]] = (),
) -> PairFacts:
    """Measures the way to a peer.

    Args:
        prober: this rank's socket.
        peer: the other.
        config: decides which code points are tried.
        ip_bytes: of the packets that gradwire would send.
        sources: local addresses that gradwire would use.
        plan: how losses are counted.
        can_join: whether the kernel cuts several packets of one call apart (GSO); an older one would send them as one.
        further: this rank's socket and the peer's port of each network thread beside the first.
    """
    to = _first_answering(prober, peer)
    if to is None:
        return PairFacts(prober.rank, peer.rank)
    sources = [to.address] if is_loopback(to.address) else sources
    answers = [answer for answer in (prober.ask(to) for _ in range(_RTT_PROBES)) if answer is not None]
    times = [1e3 * answer.rtt_s for answer in answers] or [0.0]
    to = to._replace(rtt_s=min((answer.rtt_s for answer in answers), default=to.rtt_s))
    largest = _largest(prober, to, ip_bytes)
    own_way = Way(prober, to)
    small, large = own_way.small_loss(plan), own_way.large_loss(plan, largest)
    used = _source_to(to)
    others = rails.ways(prober, to, peer.addresses, [source for source in sources if source != used])
    found = tuple(rails.measure(way, plan, config, ip_bytes) for way in others)
    passing = [*({used} & {*sources} if largest >= ip_bytes else ()), *(r.source for r in found if r.is_path(ip_bytes))]
    burst = _burst(prober, to, largest, joined=can_join)
    return PairFacts(
        rank=prober.rank,
        peer=peer.rank,
        address=to.address,
        rtt_ms=(min(times), statistics.median(times)),
        ip_bytes=largest,
        ip_bytes_wanted=ip_bytes,
        sent=small.sent,
        lost=small.lost,
        reordered=small.reordered,
        large=(large.sent, large.lost),
        rate_mbit=_rate_mbit(largest, burst),
        burst_lost=1.0 if burst is None else 1 - burst.arrived / _BURST_SENT,
        marks=tuple((octet, _arriving(prober, to, octet)) for octet in octets_of(config)),
        paths=_paths(to, passing),
        rails=found,
        offset_s=statistics.median(answer.offset_s for answer in answers) if answers else 0.0,
        threads=tuple(_first_answering(own, Peer(peer.rank, [to.address], port)) is not None for own, port in further),
    )


def judge_rates(pairs: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Which ways between ranks are much slower than the fastest quarter: of six ways of three hosts a slow one has four.

    Args:
        pairs: of all ranks, each on a host of its own, as described.
    """
    rates = [pair["rate_mbit"] for pair in pairs if pair["rate_mbit"] is not None]
    usual = sorted(rates, reverse=True)[(len(rates) + 1) // 4] if rates else 0.0
    findings = []
    for pair in pairs:
        rate = pair["rate_mbit"]
        if rate is None or rate >= rate_most(pair["ip_bytes"]):
            continue
        if rate < _SLOW * usual:
            text = f"packets come at {rate:.0f} Mbit/s, on the fastest ways at {usual:.0f} or more: the slowest link is what all wait for"
            fix = "look for a port that has fallen back to a lower speed (ethtool, the switch's counters), or a shaper on that way"
            findings.append(Finding(WARNING, "rate", text, fix, pair["rank"], pair["peer"]))
    return findings


def planned_s(packets: int, addresses: int, further_ports: int) -> tuple[float, float]:
    """How long the counted tests of one pair take: where nothing is wrong; and at most, with counts again and silent ports.

    Args:
        packets: of the loss test.
        addresses: local ones, at most.
        further_ports: of network threads.
    """
    burst_s = _BURST_ROUNDS * _BURST_PAUSE_SECONDS
    least_s = ways.planned_s(packets, again=False) * max(1, addresses) + burst_s
    # The kernel's own way may begin at an address that the engine does not use.
    most_s = ways.planned_s(packets, again=True) * (1 + addresses) + burst_s + further_ports * _TRIES * WAIT_SECONDS
    return least_s, most_s


def judge(facts: PairFacts, config: Config, loss_max: float) -> list[Finding]:
    """What follows from it. Whether a peer that does not answer has heard this rank is told elsewhere."""
    if not facts.address:
        return []

    def found(level: str, check: str, text: str, fix: str = "") -> Finding:
        return Finding(level, check, text, fix, facts.rank, facts.peer)

    findings = [
        *_judge_size(facts, found),
        *_judge_loss(facts, found, loss_max),
        *marks.judge(facts.marks, config, found),
    ]
    of_rails = rails.Judge(config, facts.ip_bytes_wanted, loss_max, facts.marks, found)
    findings += [finding for rail in facts.rails for finding in of_rails.judge(rail)]
    if facts.reordered:
        findings.append(
            found(
                NOTE,
                "reordering",
                f"{facts.reordered} of {facts.sent} packets came after a later one; gradwire does not mind",
            )
        )
    if facts.rtt_ms[0] > 1e3 * _LONG_RTT_SECONDS:
        findings.append(
            found(
                NOTE,
                "rtt",
                f"{facts.rtt_ms[0]:.1f} ms: long ways need more in flight; results take at least two of these",
            )
        )
    if abs(facts.offset_s) > _OFFSET_SECONDS:
        findings.append(
            found(
                WARNING,
                "clock",
                f"the wall clocks differ by {facts.offset_s:+.2f} s",
                "run chrony or systemd-timesyncd on both hosts",
            )
        )
    return findings


def _judge_size(facts: PairFacts, found: Any) -> list[Finding]:
    if facts.ip_bytes >= facts.ip_bytes_wanted:
        return []
    text = f"IP packets of {facts.ip_bytes_wanted} bytes, which the interface allows, disappear on the way; {facts.ip_bytes} arrive"
    return [
        found(
            PROBLEM,
            "mtu",
            text,
            f"GRADWIRE_MTU={facts.ip_bytes} on every rank, or a larger MTU on the switches between",
        )
    ]


def _judge_loss(facts: PairFacts, found: Any, loss_max: float) -> list[Finding]:
    findings = []
    counted = [("packets", facts.sent, facts.lost), ("packets of full size", *facts.large)]
    loss = ways.worst(counted, loss_max)
    if loss.lost:
        fix = "look for errors of cables, optics and ports (ethtool -S, the switch's counters)"
        findings.append(found(PROBLEM if loss.is_problem else WARNING, "loss", loss.text(loss_max), fix))
    if facts.burst_lost > max(4 * loss.share, _BURST_LOST_LEAST):
        text = f"{facts.burst_lost:.0%} of bursts of {_BURST_PACKETS} full packets lost: a buffer on the way is smaller than that"
        fix = "give the switches' ports more buffer, or set GRADWIRE_INCAST to fewer senders at once"
        findings.append(found(WARNING, "buffers", text, fix))
    return findings


def rate_most(ip_bytes: int) -> float:
    """Mbit/s beyond which rates of packets of this size are not told apart."""
    return 8e3 * ip_bytes / _TELLING_NS


def _rate_mbit(ip_bytes: int, count: Count | None) -> float | None:
    if count is None or count.spacing_ns is None:
        return None
    return 8e3 * ip_bytes / max(count.spacing_ns, _TELLING_NS)


def _first_answering(prober: Prober, peer: Peer) -> End | None:
    return prober.find([End(address, peer.port, peer.rank) for address in peer.addresses], _TRIES)


def _source_to(to: End) -> str:
    """The local address that the kernel gives to what is sent there from none in particular; empty where there is no way any more."""
    with socket.socket(family_of(to.address).number, socket.SOCK_DGRAM) as way:
        try:
            way.connect(to.place)  # sends nothing
        except OSError:
            return ""
        return str(way.getsockname()[0])


def _passes(prober: Prober, to: End, ip_bytes: int) -> bool:
    return prober.ask_for_certain(to, _MTU_TRIES, size_bytes=ip_bytes) is not None


def _largest(prober: Prober, to: End, wanted: int) -> int:
    """The largest IP packet up to `wanted` that is answered; the way back is tried by the peer itself."""
    if _passes(prober, to, wanted):
        return wanted
    was_gone = prober.is_gone(to)
    low = ways.largest_passing(lambda ip_bytes: _passes(prober, to, ip_bytes), to.least_bytes, wanted)
    # Of a peer that has come back since it is not known yet whether the way takes them.
    if was_gone and low > to.least_bytes and _passes(prober, to, wanted):
        return wanted
    return low


def _arriving(prober: Prober, to: End, octet: int) -> int | None:
    answer = prober.ask_for_certain(to, _TAG_TRIES, octet=octet)
    if answer is None and prober.is_gone(to):  # it stood still: that says nothing of the way
        answer = prober.ask_for_certain(to, _TAG_TRIES, octet=octet)
    return None if answer is None else answer.octet


def _burst(prober: Prober, to: End, ip_bytes: int, *, joined: bool) -> Count | None:
    return prober.count(
        to, BURST_TEST, _BURST_SENT, size_bytes=ip_bytes, batch=_BURST_PACKETS, pause_s=_BURST_PAUSE_SECONDS, joined=joined
    )  # fmt: skip


def _paths(to: End, sources: Sequence[str]) -> int:
    """Different ways: by this host's address, and by the routers that flows from different ports meet."""
    return sum(_distinct(trace(source, to.place, _FLOWS, _HOPS, to.wait_s)) for source in sources)


def _distinct(ways: Sequence[Mapping[int, str]]) -> int:
    """Flows of which each two met different routers at a hop that answered both, counted from the best known one on.

    Silence says nothing: a router that limits its answers makes no way of its own, and may hide one.
    """
    different: list[Mapping[int, str]] = []
    for way in sorted(ways, key=len, reverse=True):
        if all(any(way.get(hop, router) != router for hop, router in other.items()) for other in different):
            different.append(way)
    return len(different)


__all__ = [
    "BURST_TEST",
    "LARGE_TEST",
    "LOSS_TEST",
    "PairFacts",
    "Peer",
    "judge",
    "judge_rates",
    "measure",
    "octets_of",
    "planned_s",
    "rate_most",
]
