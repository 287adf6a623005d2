"""What is measured from one rank to another, and what follows from it for training."""

from __future__ import annotations

import socket
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import Any

from gradwire.config import Config
from gradwire.doctor.family import family_of
from gradwire.doctor.findings import NOTE, PROBLEM, WARNING, Finding
from gradwire.doctor.probe import WAIT_SECONDS, Count, End, Prober, trace
from gradwire.doctor.reach import is_loopback

CAPABLE = 0b10  # ECT(0)
_TRIES = 10  # for a first answer: over a way that loses 30 % one in 100,000 pairs is called unreachable
_MTU_TRIES = 5
_RTT_PROBES = 20
_TAG_TRIES = 4
_FLOWS, _HOPS = 8, 6
_BATCH, _PAUSE_SECONDS, _SMALL_BYTES = 10, 2e-3, 200  # 5,000 small packets a second: 8 Mbit/s, which fills no buffer
_LARGE_SHARE, _LARGE_BIT_SECONDS = 4, 1 / 8e6  # one large packet for so many small ones, at the same rate in bits
_BURST_PACKETS = 48  # of full size at once: 72 KB, a quarter of a gradwire eager window
_BURST_ROUNDS, _BURST_PAUSE_SECONDS = 4, 0.1
_BURST_LOST_LEAST = 0.1  # less may be chance
_TELLING_NS = 20_000  # between packets; cards collect several closer ones before the kernel hears of any
_SLOW = 0.5  # of most ways' rate
_OFFSET_SECONDS = 0.5  # between wall clocks, from which on logs mislead
_LONG_RTT_SECONDS = 0.05
LOSS_TEST, BURST_TEST, LARGE_TEST, RAIL_TESTS = 1, 2, 3, 4  # those of rails are numbered on


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
        paths: different ways that were seen and work: local addresses, and routers that flows from different ports meet.
        rails: for each local address of this rank but the one that the kernel takes, the packets that were sent from it and lost.
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
    marks: tuple[tuple[int, int | None], ...] = ()
    paths: int = 0
    rails: tuple[tuple[str, int, int], ...] = ()
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
    packets: int,
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
        packets: of the loss test.
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
    loss = prober.count(to, LOSS_TEST, packets, size_bytes=_SMALL_BYTES, batch=_BATCH, pause_s=_PAUSE_SECONDS)
    large = _large_loss(prober, to, largest, packets // _LARGE_SHARE)
    used = _source_to(to)
    others = [source for source in sources if source != used]
    rails = tuple((rail[1], *_rail_loss(prober, (to, peer), rail, packets)) for rail in enumerate(others))
    burst_sent = _BURST_PACKETS * _BURST_ROUNDS
    burst = prober.count(
        to,
        BURST_TEST,
        burst_sent,
        size_bytes=largest,
        batch=_BURST_PACKETS,
        pause_s=_BURST_PAUSE_SECONDS,
        joined=can_join,
    )
    arrived = 0 if loss is None else loss.arrived  # as on a rail: who never says a count has not been reached
    return PairFacts(
        rank=prober.rank,
        peer=peer.rank,
        address=to.address,
        rtt_ms=(min(times), statistics.median(times)),
        ip_bytes=largest,
        ip_bytes_wanted=ip_bytes,
        sent=packets,
        lost=packets - arrived,
        reordered=0 if loss is None else loss.reordered,
        large=large,
        rate_mbit=_rate_mbit(largest, burst),
        burst_lost=1.0 if burst is None else 1 - burst.arrived / burst_sent,
        marks=tuple((octet, _arriving(prober, to, octet)) for octet in octets_of(config)),
        paths=_paths(to, [*({used} & {*sources}), *(source for source, sent, lost in rails if lost < sent)]),
        rails=rails,
        offset_s=statistics.median(answer.offset_s for answer in answers) if answers else 0.0,
        threads=tuple(_first_answering(own, Peer(peer.rank, [to.address], port)) is not None for own, port in further),
    )


def judge_rates(pairs: Sequence[Mapping[str, Any]], rank: int) -> list[Finding]:
    """Which of this rank's ways to others are much slower than the fastest quarter: of six ways of three hosts a slow one has four.

    Args:
        pairs: of all ranks, each on a host of its own, as described.
        rank: this one.
    """
    rates = [pair["rate_mbit"] for pair in pairs if pair["rate_mbit"] is not None]
    usual = sorted(rates, reverse=True)[(len(rates) + 1) // 4] if rates else 0.0
    findings = []
    for pair in pairs:
        rate = pair["rate_mbit"]
        if pair["rank"] != rank or rate is None or rate >= rate_most(pair["ip_bytes"]):
            continue
        if rate < _SLOW * usual:
            text = f"packets come at {rate:.0f} Mbit/s, on the fastest ways at {usual:.0f} or more: the slowest link is what all wait for"
            fix = "look for a port that has fallen back to a lower speed (ethtool, the switch's counters), or a shaper on that way"
            findings.append(Finding(WARNING, "rate", text, fix, rank, pair["peer"]))
    return findings


def planned_s(packets: int, addresses: int, further_ports: int) -> float:
    """How long the counted tests of one pair take at least, and the tries of ports that nobody answers."""
    large_s = packets / _LARGE_SHARE * _PAUSE_SECONDS
    counted_s = packets / _BATCH * _PAUSE_SECONDS * (1 + addresses) + large_s + _BURST_ROUNDS * _BURST_PAUSE_SECONDS
    return counted_s + further_ports * _TRIES * WAIT_SECONDS


def octets_of(config: Config) -> list[int]:
    """Traffic class octets that a job sends: its code points, ECN-capable; without any what `mlt` would send."""
    own = [*(config.code_points() or [config.dscp]), config.control_code_point()]
    points = own if any(own) else [*Config.mlt().code_points(), 40]
    return [point << 2 | CAPABLE for point in dict.fromkeys(points)]


def judge(facts: PairFacts, config: Config, loss_max: float) -> list[Finding]:
    """What follows from it. Whether a peer that does not answer has heard this rank is told elsewhere."""
    if not facts.address:
        return []

    def found(level: str, check: str, text: str, fix: str = "") -> Finding:
        return Finding(level, check, text, fix, facts.rank, facts.peer)

    findings = [
        *_judge_size(facts, found),
        *_judge_loss(facts, found, loss_max),
        *_judge_rails(facts, config, found, loss_max),
        *_judge_marks(facts, config, found),
    ]
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
    share, what, sent, lost = max(((lost / sent, what, sent, lost) for what, sent, lost in counted if sent), key=_first)
    if lost:
        level = PROBLEM if share > loss_max else WARNING
        text = f"{lost} of {sent} {what} lost ({share:.2%}) at a rate that fills no buffer"
        findings.append(
            found(
                level, "loss", text, "look for errors of cables, optics and ports (ethtool -S, the switch's counters)"
            )
        )
    if facts.burst_lost > max(4 * share, _BURST_LOST_LEAST):
        text = f"{facts.burst_lost:.0%} of bursts of {_BURST_PACKETS} full packets lost: a buffer on the way is smaller than that"
        fix = "give the switches' ports more buffer, or set GRADWIRE_INCAST to fewer senders at once"
        findings.append(found(WARNING, "buffers", text, fix))
    return findings


def _first(found: tuple[float, str, int, int]) -> float:
    return found[0]


def _judge_rails(facts: PairFacts, config: Config, found: Any, loss_max: float) -> list[Finding]:
    """Ways of further paths, and of the first one where a hello is answered there first. One that leads nowhere is found out and left."""
    findings = []
    is_used = config.paths > 1
    for source, sent, lost in facts.rails:
        if lost == sent:
            use = "a path that would begin there takes another way" if is_used else "no path of this job begins there"
            text = f"nothing that is sent from {source} arrives there: {use}"
            fix = "repair that way, or leave its interface out (GRADWIRE_INTERFACE)" if is_used else ""
            findings.append(found(WARNING if is_used else NOTE, "paths", text, fix))
        elif lost:
            level = PROBLEM if lost / sent > loss_max else WARNING
            text = f"from {source} {lost} of {sent} packets are lost ({lost / sent:.2%})"
            fix = "repair that way, or leave its interface out (GRADWIRE_INTERFACE); with several paths (GRADWIRE_PATHS) others take over"
            findings.append(found(level, "paths", text, fix))
    return findings


def _judge_marks(facts: PairFacts, config: Config, found: Any) -> list[Finding]:
    """Marks that arrive changed matter where the job sets them."""
    tried = [(sent, came) for sent, came in facts.marks if came is not None]
    bleached = sorted({sent >> 2 for sent, came in tried if came >> 2 != sent >> 2})
    cleared = [sent for sent, came in tried if not came & 3]
    silent = sorted({sent >> 2 for sent, came in facts.marks if came is None})
    points, unset = _set_by(config)
    findings = []
    if silent:
        level = PROBLEM if points else NOTE
        findings.append(
            found(
                level,
                "dscp",
                f"nothing with DSCP {', '.join(map(str, silent))} arrives",
                f"a filter or policer on the way drops these code points: see docs/switch.md, or set {unset}",
            )
        )
    if bleached:
        came = sorted({came >> 2 for sent, came in tried if came >> 2 != sent >> 2})
        text = f"DSCP {', '.join(map(str, bleached))} arrives as {', '.join(map(str, came))}: switches cannot tell layers apart"
        findings.append(
            found(
                PROBLEM if points else NOTE,
                "dscp",
                text,
                f"have the network trust DSCP (docs/switch.md), or set {unset}",
            )
        )
    if cleared:
        text = "the ECN field arrives cleared: switches drop important gradients like any other"
        findings.append(
            found(
                PROBLEM if config.marks_importance() else NOTE,
                "ecn",
                text,
                "have the network leave ECN alone, or set GRADWIRE_IMPORTANCE=off",
            )
        )
    return findings


def _set_by(config: Config) -> tuple[bool, str]:
    """Whether the job sets code points, and what would have it set none."""
    set_by = [("GRADWIRE_DSCP_CLASSES=off", bool(config.code_points())), ("GRADWIRE_DSCP=0", config.dscp > 0)]
    set_by.append(("GRADWIRE_DSCP_CONTROL=0", bool(config.dscp_control)))
    unset = [setting for setting, is_set in set_by if is_set]
    return bool(unset), " and ".join(unset) or "GRADWIRE_DSCP_CLASSES=off"


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
    low, high = to.least_bytes, wanted  # `low` passes, `high` does not
    for likely in (1500, 1450, 1400, 1280):
        if low < likely < high:
            low, high = (likely, high) if _passes(prober, to, likely) else (low, likely)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _passes(prober, to, middle) else (low, middle)
    # Of a peer that has come back since it is not known yet whether the way takes them.
    if was_gone and low > to.least_bytes and _passes(prober, to, wanted):
        return wanted
    return low


def _arriving(prober: Prober, to: End, octet: int) -> int | None:
    answer = prober.ask_for_certain(to, _TAG_TRIES, octet=octet)
    if answer is None and prober.is_gone(to):  # it stood still: that says nothing of the way
        answer = prober.ask_for_certain(to, _TAG_TRIES, octet=octet)
    return None if answer is None else answer.octet


def _large_loss(prober: Prober, to: End, ip_bytes: int, packets: int) -> tuple[int, int]:
    """Packets of full size that were sent, one by one, and those of them that were lost; all where the peer never says a count."""
    pause_s = min(
        8 * ip_bytes * _LARGE_BIT_SECONDS, _PAUSE_SECONDS
    )  # jumbo frames come over links for which more is little
    found = prober.count(to, LARGE_TEST, packets, size_bytes=ip_bytes, batch=1, pause_s=pause_s)
    return packets, packets if found is None else packets - found.arrived


def _rail_loss(prober: Prober, way: tuple[End, Peer], rail: tuple[int, str], packets: int) -> tuple[int, int]:
    """Packets sent from another local address to the peer's nearest one, and those of them that were lost; all where nothing is answered.

    From the same port as all others: a filter may let nothing else in, and another port would be called a dead way.
    """
    (to, peer), (number, source) = way, rail
    found = prober.count(
        to._replace(address=_nearest(source, peer.addresses)),
        RAIL_TESTS + number,
        packets,
        size_bytes=_SMALL_BYTES,
        batch=_BATCH,
        pause_s=_PAUSE_SECONDS,
        source=source,
        asked_at=to,
    )
    return packets, packets if found is None else packets - found.arrived


def _nearest(source: str, addresses: Sequence[str]) -> str:
    """The one that has most leading bits in common with a local address: that of the same network, where there is one."""
    own = ip_address(source)

    def different(address: str) -> int:
        other = ip_address(address)
        return int(own) ^ int(other) if other.version == own.version else 1 << own.max_prefixlen

    return min(addresses, key=lambda address: different(address).bit_length())


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
    "PairFacts",
    "Peer",
    "judge",
    "judge_rates",
    "measure",
    "octets_of",
    "planned_s",
    "rate_most",
]
