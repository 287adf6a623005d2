"""What rank 0 writes down as the ranks say it, and the report that follows, of a whole check or of the part that was done.

All else that ranks say of themselves and of their ways to others is read by rank 0 alone: of some hundred ranks with several addresses it
is tens of megabytes, which would go through one Store for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gradwire.doctor import pairs, reach, threads
from gradwire.doctor.findings import Finding, ordered, suffers


@dataclass(frozen=True)
class Report:
    """What all ranks found together.

    Attributes:
        hosts: what each rank said of itself.
        pairs: what each measured towards others.
        findings: the worst first.
        missing: why the check did not end, so that there may be more to find; empty: it did.
    """

    hosts: list[dict[str, Any]]
    pairs: list[dict[str, Any]]
    findings: list[Finding]
    missing: str = ""

    @property
    def suffers(self) -> bool:
        """Whether training would, by what was found."""
        return suffers(self.findings)

    def described(self) -> dict[str, Any]:
        """As JSON. Where the check did not end and nothing was found it is not known whether training would suffer."""
        return {
            "training_would_suffer": self.suffers or (None if self.missing else False),
            "incomplete": self.missing or None,
            "findings": [finding.described() for finding in self.findings],
            "hosts": self.hosts,
            "pairs": self.pairs,
        }


def mates(everyone: Sequence[dict[str, Any]], rank: int) -> list[int]:
    """The ranks of this rank's network namespace with the same addresses, itself among them; none where its engine did not start."""
    own = everyone[rank]

    def is_mate(each: dict[str, Any]) -> bool:
        return reach.are_local([own, each]) and own["features"]["addresses"] == each["features"]["addresses"]

    return [other for other, each in enumerate(everyone) if other == rank or is_mate(each)]


@dataclass
class Book:
    """Of rank 0.

    Attributes:
        hosts: what each rank said of itself; empty: not all have.
        pairs: what each measured towards others, of all rounds that all ranks have ended.
        findings: that each rank made by itself, of its host and of these ways.
    """

    hosts: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def note(self, found: Sequence[Sequence[dict[str, Any]]]) -> None:
        """What each rank has found."""
        self.findings += [Finding(**finding) for each in found for finding in each]

    def note_round(self, measured: Sequence[dict[str, Any]]) -> None:
        """What each rank has measured in one round, and found in that."""
        self.pairs += [each["pair"] for each in measured if each["pair"] is not None]
        self.note([each["findings"] for each in measured])

    def part(self, missing: str) -> Report:
        """Of a check that did not end, and why.

        Of ranks that do not answer it is not known what they have heard, nor of further network threads, which is why those are not judged.
        """
        silent = [finding for pair in self.pairs for finding in self._judge_reach(pair, is_heard=None)]
        return self._report(silent, self.hosts, missing)

    def whole(self, tested: Sequence[dict[str, Any]]) -> Report:
        """Of one that did.

        Args:
            tested: what each rank said after all rounds: whom it has heard at each of its ports, and its host's counters.
        """
        level = threads.level_of(self.hosts)
        self.note([each["findings"] for each in tested])
        found = []
        for pair in self.pairs:
            rank, peer = pair["rank"], pair["peer"]
            first, *further = [rank in heard for heard in tested[peer]["heard"]]
            found += self._judge_reach(pair, is_heard=first)
            ports = threads.Ports(*(threads.told(self.hosts[each]["threads"]) for each in (rank, peer)))
            found += threads.judge(rank, peer, ports, answered=pair["threads"], heard=further, level=level)
        hosts = [_with_counters(each, then) for each, then in zip(self.hosts, tested, strict=True)]
        return self._report(found, hosts)

    def _judge_reach(self, pair: dict[str, Any], *, is_heard: bool | None) -> list[Finding]:
        rank, peer = pair["rank"], pair["peer"]
        own, other = self.hosts[rank], self.hosts[peer]
        return reach.judge((rank, peer), own, other, answered=bool(pair["address"]), peer_heard=is_heard)

    def _report(self, of_ways: list[Finding], hosts: list[dict[str, Any]], missing: str = "") -> Report:
        # Ranks of one host measure over the same link at once, and over none between each other.
        are_alone = all(len(mates(self.hosts, rank)) == 1 for rank in range(len(self.hosts)))
        rates = pairs.judge_rates(self.pairs) if are_alone else []
        by_rank = sorted(self.pairs, key=lambda pair: int(pair["rank"]))
        return Report(hosts, by_rank, ordered([*self.findings, *of_ways, *rates]), missing)


def _with_counters(each: dict[str, Any], tested: dict[str, Any]) -> dict[str, Any]:
    """What a host said of itself, with its counters right before and after the tests."""
    return {**each, "counters": tested["counters_before"], "counters_after": tested["counters_after"]}
