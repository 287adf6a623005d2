"""Network threads beside the first: how many a job uses, and their ports.

Whether they get those that firewalls are told, and whether those of two ranks reach each other. Where they do not, the first
one does what they would have done: training goes on, and large calls take longer.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.doctor.card import rate_mbit
from gradwire.doctor.findings import NOTE, WARNING, Finding

PORTS_APART = 64  # as the engine has it: so many ranks may be on a host
PORT_MAX = 65_535
RANKS_MAX = 128  # of groups that divide calls unasked
RATE_MOST_MBIT = 2500  # of links over which they do not
_WITHOUT = "or do without: GRADWIRE_NETWORK_THREADS=1 on every rank"
_THOSE_BEHIND = (
    "it and those behind it are not used, so that large calls over fast links are divided between fewer threads"
)


@dataclass(frozen=True)
class Threads:
    """The network threads of one rank.

    Attributes:
        ports: that the engine got for them, the first one's first.
        is_fixed: whether the job's ports are the same at each start.
        is_asked: whether somebody has said how many there are to be.
        cores: that the process may use, and those of its host.
    """

    ports: Sequence[int] = field(default_factory=lambda: [0])
    is_fixed: bool = True
    is_asked: bool = False
    cores: tuple[int, int] = (1, 1)


def used(hosts: Sequence[Mapping[str, Any]]) -> int:
    """How many beside the first of each rank would connect, as the engines decide when they meet.

    On links up to 2.5 Gbit/s they have no part of any call unless all ranks have asked for them (`level_of`).

    Args:
        hosts: what each rank has said of itself.
    """
    further = min(len(host["threads"]["ports"]) - 1 for host in hosts)
    if _all_have_asked(hosts):
        return further
    boots = [host["boot"] or rank for rank, host in enumerate(hosts)]  # whose kernel says nothing is alone on its host
    here = Counter(boots)
    each = zip((host["threads"]["cores"] for host in hosts), boots, strict=True)
    cores = [min(of_process, of_host // here[boot]) for (of_process, of_host), boot in each]
    return max(0, min(further, min(cores) - 1)) if len(hosts) <= RANKS_MAX else 0


def level_of(hosts: Sequence[Mapping[str, Any]]) -> str:
    """How much it matters that some do not reach each other: little where cards say that they would have no part of any call.

    Args:
        hosts: what each rank has said of itself.
    """
    return NOTE if _have_slow_links(hosts) and not _all_have_asked(hosts) else WARNING


def _all_have_asked(hosts: Sequence[Mapping[str, Any]]) -> bool:
    return all(host["threads"]["is_asked"] for host in hosts)


def _have_slow_links(hosts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the cards of half of the ranks or more are too slow, and no two ranks are on one host, between which no card is."""
    boots = {host["boot"] for host in hosts if host["boot"]}
    rates = [rate_mbit(host) for host in hosts]
    known = [rate for rate in rates if rate is not None]
    is_known = len(boots) == len(known) == len(hosts) > 1
    return is_known and statistics.median_low(known) <= RATE_MOST_MBIT


def told(threads: Mapping[str, Any]) -> list[int | None]:
    """The ports beside the first that firewalls can be told; None: the thread has whatever was free.

    Args:
        threads: of one rank, as described.
    """
    first, *further = threads["ports"]
    wanted = range(first + PORTS_APART, first + PORTS_APART * (len(further) + 1), PORTS_APART)
    return [got if threads["is_fixed"] and got == want else None for want, got in zip(wanted, further, strict=True)]


def judge_ports(threads: Mapping[str, Any], most: int, rank: int, level: str = WARNING) -> list[Finding]:
    """Which of the first so many beside the first do not have the port that firewalls are told; `level`: how much it matters."""
    if not threads["is_fixed"]:
        return []
    missing = [at for at, port in enumerate(told(threads)[:most], 1) if port is None]
    wanted = [threads["ports"][0] + PORTS_APART * at for at in missing]
    taken = [str(port) for port in wanted if port <= PORT_MAX]
    findings = []
    if taken:
        text = (
            f"UDP port {', '.join(taken)} of further network threads cannot be had here: a job takes any free one, which "
            "a firewall may not let in"
        )
        findings.append(Finding(level, "threads", text, f"end the process that has it (ss -ulpn), {_WITHOUT}", rank))
    if len(taken) < len(wanted):
        text = f"further network threads would have ports beyond {PORT_MAX}: a job takes any free ones, which a firewall may not let in"
        findings.append(Finding(level, "threads", text, f"a lower GRADWIRE_PORT, {_WITHOUT}", rank))
    return findings


@dataclass(frozen=True)
class Ports:
    """Where the network threads beside the first listen that firewalls can be told of (`told`): on this rank, and on a peer."""

    own: Sequence[int | None]
    peers: Sequence[int | None]


def judge(
    rank: int, peer: int, ports: Ports, *, answered: Sequence[bool], heard: Sequence[bool], level: str = WARNING
) -> list[Finding]:
    """What it means that some of a peer's did not answer.

    Args:
        rank: this one.
        peer: the other, which answers at the port of its first network thread.
        ports: of both.
        answered: for each thread that was asked whether the peer's answered.
        heard: whether the peer's has heard this rank's.
        level: how much it matters (`level_of`).
    """
    silent = [at for at, is_well in enumerate(answered) if not is_well]
    there = [str(ports.peers[at]) for at in silent if not heard[at] and ports.peers[at] is not None]
    back = [str(ports.own[at]) for at in silent if heard[at] and ports.own[at] is not None]
    findings = []
    if there:
        text = f"nothing arrives at UDP port {', '.join(there)} of a further network thread: {_THOSE_BEHIND}"
        fix = f"let it in on rank {peer}'s host and in the network, {_WITHOUT}"
        findings.append(Finding(level, "threads", text, fix, rank, peer))
    if back:
        text = f"no answer comes back to UDP port {', '.join(back)} of a further network thread here: {_THOSE_BEHIND}"
        fix = f"let it in on rank {rank}'s host and in the network, {_WITHOUT}"
        findings.append(Finding(level, "threads", text, fix, rank, peer))
    return findings
