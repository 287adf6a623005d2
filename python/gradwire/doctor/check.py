"""The whole check: this host, then, where there are several ranks, all pairs of them in turns.

In round k rank r asks rank r + k, so that each rank asks one other and is asked by one other at a time, and no link carries
more than two tests for each rank of its host. Every wait has an end: a rank that does not come is named.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gradwire.config import Config
from gradwire.doctor import card, counters, host, pairs, reach, threads
from gradwire.doctor.family import family_of_engine
from gradwire.doctor.findings import Finding, ordered, suffers
from gradwire.doctor.kept import Kept
from gradwire.doctor.meeting import Place, everybody
from gradwire.doctor.probe import Prober
from gradwire.doctor.ways import Plan
from gradwire.errors import RendezvousError

_PART_SECONDS = 10.0
_OF_HOST = ("card", "drops", "filter", "reserved")  # what the first rank of a host says for all of it


@dataclass(frozen=True)
class Options:
    """How thorough, and when it is bad.

    Attributes:
        packets: of the loss test of each pair; where it leaves open whether too many are lost up to four times as many more follow.
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
    alone = facts.described()
    findings = [*host.judge(facts), *threads.judge_ports(alone["threads"], threads.used([alone]), 0)]
    return Report([alone], [], ordered(findings))


def check_all(config: Config, place: Place, options: Options, tell: Callable[[str], None]) -> Report:
    """All ranks; each calls it, and all get the same report.

    Raises:
        MissingRankError: a rank did not come in time.
    """
    facts, kept = host.examine_and_keep(config)
    with kept:
        return _check(facts, kept, config=config, place=place, options=options, tell=tell)


def _check(
    facts: host.HostFacts, kept: Kept, *, config: Config, place: Place, options: Options, tell: Callable[[str], None]
) -> Report:
    rank = place.rank
    everyone = everybody(place, "host", {**facts.described(), "token": secrets.randbits(32)})
    tell(f"{place.world_size} ranks are here")
    further, level = threads.used(everyone), threads.level_of(everyone)
    findings = [*host.judge(facts, rank, meets_here=reach.are_local(everyone)), *card.judge_speeds(everyone, rank)]
    findings += threads.judge_ports(everyone[rank]["threads"], further, rank, level)
    probers, lost = kept.probers(further, rank, everyone[0]["token"])
    findings += lost
    ready = everybody(place, "ready", len(probers))
    before = counters.read()
    found, heard = _measure(probers, facts, everyone, ready, config=config, place=place, options=options, tell=tell)
    after = counters.read()
    mine = {"heard": heard, "counters_before": before.described(), "counters_after": after.described()}
    tested = everybody(place, "tested", mine)
    measured = [pair for each in everybody(place, "pairs", [pair.described() for pair in found]) for pair in each]

    findings += counters.judge(before, after, facts.used, rank)
    if _mates(everyone, rank)[0] != rank:
        findings = [finding for finding in findings if finding.check not in _OF_HOST]
    for pair in found:
        other = everyone[pair.peer]
        is_heard = rank in tested[pair.peer]["heard"][0]
        findings += reach.judge(
            (rank, pair.peer), everyone[rank], other, answered=bool(pair.address), peer_heard=is_heard
        )
        ports = threads.Ports(threads.told(everyone[rank]["threads"]), threads.told(other["threads"]))
        heard_there = [rank in ranks for ranks in tested[pair.peer]["heard"][1:]]
        findings += threads.judge(rank, pair.peer, ports, answered=pair.threads, heard=heard_there, level=level)
        findings += pairs.judge(pair, config, options.loss_max)
    # Ranks of one host measure over the same link at once, and over none between each other.
    if all(len(_mates(everyone, other)) == 1 for other in range(place.world_size)):
        findings += pairs.judge_rates(measured, rank)
    gathered = everybody(place, "findings", [finding.described() for finding in findings])
    _part(place)
    return Report(
        hosts=[_with_counters(each, then) for each, then in zip(everyone, tested, strict=True)],
        pairs=measured,
        findings=ordered([Finding(**finding) for each in gathered for finding in each]),
    )


def _measure(
    probers: list[Prober],
    facts: host.HostFacts,
    everyone: list[dict[str, Any]],
    ready: list[int],
    *,
    config: Config,
    place: Place,
    options: Options,
    tell: Callable[[str], None],
) -> tuple[list[pairs.PairFacts], list[list[int]]]:
    """This rank's ways to all others, in rounds, and the ranks that it has heard meanwhile, at each of its ports."""
    found: list[pairs.PairFacts] = []
    addresses = max(len((each["features"] or {}).get("addresses", [])) for each in everyone)
    least_s, most_s = pairs.planned_s(options.packets, addresses, max(0, max(ready) - 1))
    tell(
        f"{place.world_size - 1} rounds of {least_s:.1f} s and a little more, up to {most_s:.0f} s each where losses are counted again"
    )
    plan = Plan(options.packets, options.loss_max, tell)
    try:
        for step in range(1, place.world_size):
            peer = (place.rank + step) % place.world_size
            theirs = everyone[peer]["features"]
            if probers and ready[peer] and facts.features is not None:
                tell(f"rank {place.rank} asks rank {peer}")
                found.append(
                    pairs.measure(
                        probers[0],
                        pairs.Peer(peer, reach.addresses(facts.features, theirs), everyone[peer]["port"]),
                        config,
                        ip_bytes=_ip_bytes(facts.features, theirs),
                        sources=facts.features["addresses"],
                        plan=plan,
                        can_join=bool(facts.features["gso"]),
                        further=list(
                            zip(probers[1:], everyone[peer]["threads"]["ports"][1 : ready[peer]], strict=False)
                        ),
                    )
                )
            everybody(place, f"round-{step}", True, most_s)
        return found, [sorted(prober.heard) for prober in probers] or [[]]
    finally:
        for prober in probers:
            prober.close()


def _mates(everyone: list[dict[str, Any]], rank: int) -> list[int]:
    """The ranks of this rank's network namespace with the same addresses, itself among them; none where its engine did not start."""
    own = everyone[rank]

    def is_mate(each: dict[str, Any]) -> bool:
        return reach.are_local([own, each]) and own["features"]["addresses"] == each["features"]["addresses"]

    return [other for other, each in enumerate(everyone) if other == rank or is_mate(each)]


def _with_counters(each: dict[str, Any], tested: dict[str, Any]) -> dict[str, Any]:
    """What a host said of itself, with its counters right before and after the tests."""
    return {**each, "counters": tested["counters_before"], "counters_after": tested["counters_after"]}


def _part(place: Place) -> None:
    """Rank 0, which may hold the Store, goes last, and removes what was said: the others must have read everything."""
    with suppress(RendezvousError):  # whoever does not say so has gone without it
        place.meeting.put(f"done/{place.rank}", True)
        if place.rank == 0:
            for other in range(1, place.world_size):
                place.meeting.get(f"done/{other}", _PART_SECONDS)
            place.meeting.clear()


def _ip_bytes(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """The packets that gradwire would send between two: those of the smaller interface."""
    return int(min(ours["datagram_bytes"], theirs["datagram_bytes"])) + family_of_engine(ours).header_bytes
