"""The whole check: this host, then, where there are several ranks, all pairs of them in turns.

In round k rank r asks rank r + k, so that each rank asks one other and is asked by one other at a time, and no link carries
more than two tests for each rank of its host. Every wait has an end: a rank that does not come is named.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gradwire.config import Config
from gradwire.doctor import card, counters, host, pairs, parting, reach, threads
from gradwire.doctor.book import Book, Report, mates
from gradwire.doctor.family import family_of_engine
from gradwire.doctor.findings import Finding, ordered
from gradwire.doctor.kept import Kept
from gradwire.doctor.meeting import Place, said_by_all, say
from gradwire.doctor.probe import Prober
from gradwire.doctor.ways import Plan
from gradwire.errors import RendezvousError

_OF_HOST = ("card", "drops", "filter", "reserved")  # what the first rank of a host says for all of it

_READING_S = 30.0  # more than rank 0 takes to read what some hundred ranks have measured in one round


@dataclass(frozen=True)
class Options:
    """How thorough, and when it is bad.

    Attributes:
        packets: of the loss test of each pair; where it leaves open whether too many are lost up to four times as many more follow.
        loss_max: share lost, 0 to 1, beyond which training would suffer.
    """

    packets: int = 2_000
    loss_max: float = 0.005


def check_host(config: Config) -> Report:
    """This host alone."""
    facts = host.examine(config)
    alone = facts.described()
    findings = [*host.judge(facts), *threads.judge_ports(alone["threads"], threads.used([alone]), 0)]
    return Report([alone], [], ordered(findings))


def check_all(
    config: Config, place: Place, options: Options, tell: Callable[[str], None], show: Callable[[Report], None]
) -> bool:
    """All ranks; each calls it. No rank returns before rank 0 has shown what all have found, or has had long to do so.

    Args:
        config: the job's.
        place: of this rank.
        options: how thorough the check is.
        tell: says what is being done.
        show: shows the report; called on rank 0 alone, and what it raises goes on. Where Terminated is raised meanwhile it is called
            again, for what it has not shown then.

    Returns:
        Whether training would suffer, the same on all ranks.

    Raises:
        MissingRankError: a rank did not come in time. Rank 0 has shown what was measured until then, where anything was.
        RendezvousError: where they meet nobody answers any more; or what rank 0 says of that.
        Terminated: as a handler of signals has raised it on rank 0, which has then shown what there is.
    """
    check = _Check(config, place, options, tell)
    try:
        return _ended(check, place, show)
    except parting.Terminated as error:
        missing = str(error)
        parting.leave(place, error, lambda: check.show_part(missing, show))
        raise


def _ended(check: _Check, place: Place, show: Callable[[Report], None]) -> bool:
    """As `check_all`, but that nothing is shown where it is terminated."""
    try:
        report = check.run()
        if report is None:
            return parting.verdict(place)
    except (RendezvousError, OSError) as error:
        missing = str(error)
        parting.give_up(place, error, lambda: check.show_part(missing, show), due=check.due, more_s=check.most_s)
        raise
    parting.conclude(place, lambda: show(report), is_suffering=report.suffers)
    return report.suffers


class _Check:
    """One rank's part.

    Attributes:
        book: rank 0's: what all have said so far.
        most_s: that a round may take at most, in seconds, once that is known.
    """

    def __init__(self, config: Config, place: Place, options: Options, tell: Callable[[str], None]) -> None:
        self._config, self._place, self._options, self._tell = config, place, options, tell
        self.book, self.most_s = Book(), 0.0
        self._report: Report | None = None
        rounds = [f"{key}-{step}" for step in range(1, place.world_size) for key in ("measured", "round")]
        self._due = ["host", "ready", *rounds, "tested"]

    @property
    def due(self) -> list[str]:
        """What rank 0 and what all wait for next from this rank; empty: nothing any more."""
        return self._due[:2]

    def _say(self, value: Any) -> str:
        """Says what is due; under which key."""
        say(self._place, self._due[0], value)
        return self._due.pop(0)

    def _everybody(self, value: Any, more_s: float = 0.0) -> list[Any]:
        """Says what is due, and waits until all have."""
        return said_by_all(self._place, self._say(value), more_s)

    def run(self) -> Report | None:
        """The report, on rank 0; elsewhere None."""
        facts, kept = host.examine_and_keep(self._config)
        with kept:
            self._report = self._run(facts, kept)
        return self._report

    def show_part(self, missing: str, show: Callable[[Report], None]) -> None:
        """Rank 0's: the whole report where there is one, else of what was done until now, if anything was."""
        if self._report is not None:
            show(self._report)
        elif self.book.hosts:
            show(self.book.part(missing))

    def _run(self, facts: host.HostFacts, kept: Kept) -> Report | None:
        place, rank = self._place, self._place.rank
        say(place, "facts", facts.described())
        everyone = self._everybody({**_for_all(facts), "token": secrets.randbits(32)})
        self._tell(f"{place.world_size} ranks are here")
        further = threads.used(everyone)
        probers, lost = kept.probers(further, rank, everyone[0]["token"])
        with ExitStack() as open_probers:
            for prober in probers:
                open_probers.enter_context(prober)
            say(place, "about", self._described([*_judge(facts, everyone, rank, further), *lost], everyone))
            ready = self._everybody(len(probers))
            if rank == 0:
                self.book.note(said_by_all(place, "about"))
                self.book.hosts = said_by_all(place, "facts")
            before = counters.read()
            self._measure(probers, facts, everyone, ready)
            heard = [sorted(prober.heard) for prober in probers] or [[]]
        after = counters.read()
        dropped = self._described(counters.judge(before, after, facts.used, rank), everyone)
        read = {"counters_before": before.described(), "counters_after": after.described()}
        tested = self._say({"heard": heard, "findings": dropped, **read})
        return self.book.whole(said_by_all(place, tested)) if rank == 0 else None

    def _described(self, findings: list[Finding], everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As others read it; what is of the host only where this is its first rank."""
        is_first = mates(everyone, self._place.rank)[0] == self._place.rank
        return [finding.described() for finding in findings if is_first or finding.check not in _OF_HOST]

    def _measure(
        self, probers: list[Prober], facts: host.HostFacts, everyone: list[dict[str, Any]], ready: list[int]
    ) -> None:
        """This rank's ways to all others, in rounds; rank 0 writes down each round that all have ended."""
        place, options = self._place, self._options
        addresses = max(len((each["features"] or {}).get("addresses", [])) for each in everyone)
        least_s, self.most_s = pairs.planned_s(options.packets, addresses, max(0, max(ready) - 1))
        rounds = f"{place.world_size - 1} rounds of {least_s:.1f} s and a little more"
        self._tell(f"{rounds}, up to {self.most_s:.0f} s each where losses are counted again")
        for step in range(1, place.world_size):
            peer, found = (place.rank + step) % place.world_size, None
            if probers and ready[peer] and facts.features is not None:
                self._tell(f"rank {place.rank} asks rank {peer}")
                found = self._ask(probers, facts.features, everyone[peer], peer, ready[peer])
            judged = [] if found is None else pairs.judge(found, self._config, options.loss_max)
            measured = {"pair": found and found.described(), "findings": [finding.described() for finding in judged]}
            self._end_round(self._say(measured), step)

    def _end_round(self, measured: str, step: int) -> None:
        """Waits until all have ended it, and rank 0 has written it down.

        Rank 0 reads before it says that it has ended: who asks it meanwhile would find it slow. So it waits first for the one that does.
        """
        place = self._place
        if place.rank == 0:
            self.book.note_round(said_by_all(place, measured, self.most_s, first=place.world_size - step))
            said_by_all(place, self._say(True), self.most_s)
        else:  # rank 0 comes last; where another does not come it is not rank 0 that is named
            said_by_all(place, self._say(True), self.most_s + _READING_S, first=1)

    def _ask(
        self, probers: list[Prober], own: dict[str, Any], theirs: dict[str, Any], peer: int, ports: int
    ) -> pairs.PairFacts:
        """What the way to a peer is like, which answers at so many ports."""
        return pairs.measure(
            probers[0],
            pairs.Peer(peer, reach.addresses(own, theirs["features"]), theirs["port"]),
            self._config,
            ip_bytes=_ip_bytes(own, theirs["features"]),
            sources=own["addresses"],
            plan=Plan(self._options.packets, self._options.loss_max, self._tell),
            can_join=bool(own["gso"]),
            further=list(zip(probers[1:], theirs["threads"]["ports"][1:ports], strict=False)),
        )


def _for_all(facts: host.HostFacts) -> dict[str, Any]:
    """What every rank needs of another; all else is for rank 0."""
    described = facts.described()
    used = [interface for interface in described["interfaces"] if interface["used"]]
    return {**{name: described[name] for name in ("port", "features", "threads", "boot")}, "interfaces": used}


def _judge(facts: host.HostFacts, everyone: list[dict[str, Any]], rank: int, further: int) -> list[Finding]:
    """What is known of this rank's host before anything is measured."""
    of_host = host.judge(facts, rank, meets_here=reach.are_local(everyone))
    of_ports = threads.judge_ports(everyone[rank]["threads"], further, rank, threads.level_of(everyone))
    return [*of_host, *card.judge_speeds(everyone, rank), *of_ports]


def _ip_bytes(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """The packets that gradwire would send between two: those of the smaller interface."""
    return int(min(ours["datagram_bytes"], theirs["datagram_bytes"])) + family_of_engine(ours).header_bytes
