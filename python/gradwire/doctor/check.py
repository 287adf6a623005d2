"""The whole check: this host, then, where there are several ranks, all pairs of them in turns.

In round k rank r asks rank r + k, so that each rank asks one other and is asked by one other at a time, and no link carries
more than two tests. Every wait has an end: a rank that does not come is named.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gradwire.config import Config
from gradwire.doctor import card, counters, host, pairs
from gradwire.doctor.findings import Finding, ordered, suffers
from gradwire.doctor.meeting import Place, everybody
from gradwire.doctor.probe import HEADER_BYTES, Prober
from gradwire.errors import RendezvousError

_PART_SECONDS = 10.0


@dataclass(frozen=True)
class Options:
    """How thorough, and when it is bad.

    Attributes:
        packets: of the loss test of each pair.
        loss_max: share lost, 0 to 1, beyond which training would suffer.
    """

    packets: int = 2_000
    loss_max: float = 0.005


@dataclass(frozen=True)
class Report:
    """What all ranks found together."""

    hosts: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    findings: list[Finding]

    @property
    def suffers(self) -> bool:
        """Whether training would."""
        return suffers(self.findings)

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "training_would_suffer": self.suffers,
            "findings": [finding.described() for finding in self.findings],
            "hosts": self.hosts,
            "pairs": self.pairs,
        }


def check_host(config: Config) -> Report:
    """This host alone."""
    facts = host.examine(config)
    return Report([facts.described()], [], ordered(host.judge(facts)))


def check_all(config: Config, place: Place, options: Options, tell: Callable[[str], None]) -> Report:
    """All ranks; each calls it, and all get the same report.

    Raises:
        MissingRankError: a rank did not come in time.
    """
    rank, world_size = place.rank, place.world_size
    facts = host.examine(config)
    token = secrets.randbits(32)
    everyone = everybody(place, "host", {**facts.described(), "token": token})
    tell(f"{world_size} ranks are here")
    findings = [*host.judge(facts, rank), *card.judge_speeds(everyone, rank)]
    found: list[pairs.PairFacts] = []
    heard: list[int] = []
    prober = _bind(facts, rank, everyone[0]["token"])
    everybody(place, "ready", prober is not None)
    try:
        for step in range(1, world_size):
            peer = (rank + step) % world_size
            if prober is not None and facts.features is not None and everyone[peer]["features"] is not None:
                tell(f"rank {rank} asks rank {peer}")
                target = pairs.Peer(peer, everyone[peer]["features"]["addresses"], everyone[peer]["port"])
                ip_bytes = _ip_bytes(facts.features, everyone[peer]["features"])
                found.append(
                    pairs.measure(
                        prober,
                        target,
                        config,
                        ip_bytes=ip_bytes,
                        sources=facts.features["addresses"],
                        packets=options.packets,
                    )
                )
            everybody(place, f"round-{step}", True)
        heard = sorted(prober.heard) if prober is not None else []
    finally:
        if prober is not None:
            prober.close()
    all_heard = everybody(place, "heard", heard)
    findings += counters.judge(facts.counters, counters.read(), facts.used, rank)
    for pair in found:
        other = everyone[pair.peer]
        findings += pairs.judge_reach(
            rank, pair.peer, answered=bool(pair.address), peer_heard=rank in all_heard[pair.peer],
            peer_addresses=other["features"]["addresses"], port=other["port"], own_port=facts.port,
        )  # fmt: skip
        findings += pairs.judge(pair, config, options.loss_max)
    measured = [pair for each in everybody(place, "pairs", [pair.described() for pair in found]) for pair in each]
    findings += pairs.judge_rates(measured, rank)
    gathered = everybody(place, "findings", [finding.described() for finding in findings])
    _part(place)
    return Report(
        hosts=everyone,
        pairs=measured,
        findings=ordered([Finding(**finding) for each in gathered for finding in each]),
    )


def _part(place: Place) -> None:
    """Rank 0, which may hold the Store, goes last: the others must have read everything."""
    place.meeting.put(f"done/{place.rank}", True)
    if place.rank == 0:
        with suppress(RendezvousError):  # whoever does not say so has gone without it
            for other in range(1, place.world_size):
                place.meeting.get(f"done/{other}", _PART_SECONDS)


def _bind(facts: host.HostFacts, rank: int, token: int) -> Prober | None:
    """The job's own port, where the engine could have it."""
    return None if facts.features is None else Prober(facts.port, rank, token)


def _ip_bytes(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """The packets that gradwire would send between two: those of the smaller interface."""
    return int(min(ours["datagram_bytes"], theirs["datagram_bytes"])) + HEADER_BYTES
