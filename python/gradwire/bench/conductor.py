"""Leads the benchmark: starts crews of workers on the ground, and has the cells take turns in short blocks of samples."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from gradwire.bench.ground import Ground
from gradwire.bench.plan import Cell, Condition, Plan, Variant, timed_calls
from gradwire.bench.results import Series
from gradwire.lab import LabError
from gradwire.lab.crew import Crew
from gradwire.lab.namespaces import Start

IMPORTS = ("torch", "torch.distributed")  # of every worker, once
START_AHEAD_S = 0.02  # ranks get the order well before it is time
_OVERDUE_S = 10.0  # so much longer than a call may take: a rank whose call took too long says so itself, which tells more than silence

Told = Callable[[int, int, Series], None]  # blocks done, blocks in all, the series that got one


class Crews:
    """The workers, in one crew for each set of variants that may share processes. A context manager.

    Args:
        variants: that will be ordered.
        ground: where each rank lives.
        worker: module with arguments that each worker runs (`gradwire.lab.crew`).
        logs: folder.
        patience_s: how long a call may take, and, but for a little, a worker owe an answer.
        start: of a nursery that has imported what all of them need.

    Attributes:
        ciphers: of each gradwire variant whose group was made: what seals its datagrams, None: nothing does. Of workers that tell it.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        ground: Ground,
        worker: Sequence[str],
        logs: Path,
        patience_s: float,
        *,
        start: Start,
    ) -> None:
        """Starts them.

        Raises:
            WorkerFailed: a worker ended or fell silent.
        """
        self._ground, self._worker, self._logs, self._patience_s = ground, worker, logs, patience_s
        self._start_worker = start
        self._of: dict[str, Crew] = {}
        self._calls = 0
        self.ciphers: dict[str, str | None] = {}
        try:
            for number, kind in enumerate(dict.fromkeys(variant.crew for variant in variants)):
                self._of[kind] = self._start(kind, number)
            for crew in self._of.values():
                crew.collect("ready")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the workers."""
        for crew in self._of.values():
            crew.close()

    def __enter__(self) -> Crews:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def order(self, variant: Variant, order: dict[str, Any], last: str) -> list[list[dict[str, Any]]]:
        """Gives an order to the crew of a variant; see `Crew.order`."""
        return self._of[variant.crew].order(order, last)

    def number_calls(self, count: int) -> int:
        """The number of the first of so many calls, which nothing before them had."""
        first, self._calls = self._calls, self._calls + count
        return first

    def form(self, variant: Variant, ranks: int, condition: Condition) -> None:
        """Makes the variant's group of the first so many ranks for a condition, over that network while it loses nothing.

        A connection keeps the congestion control of its start.
        """
        self._ground.set(condition.lossless)
        if variant.tcp:
            self._ground.use_tcp(variant.tcp)
        named = {"name": group_of(variant, ranks, condition), "backend": variant.backend, "ranks": ranks}
        answers = self.order(variant, {"do": "group", **named, "timeout_s": self._patience_s}, "made")
        if variant.backend == "gradwire":
            self.ciphers[variant.name] = answers[0][-1].get("cipher")  # the first rank is in every group

    def _start(self, kind: str, number: int) -> Crew:
        ground = self._ground
        folder = self._logs / (kind or "logs")
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"GRADWIRE_PRESET": kind} if kind else {}
        environments = [{**settings, **ground.environment(rank, number)} for rank in range(ground.hosts)]
        spawn = partial(ground.spawn, start=self._start_worker)
        command = [sys.executable, "-m", *self._worker]
        return Crew(spawn, command, environments, folder, self._patience_s + _OVERDUE_S)


def measure(
    plan: Plan, crews: Crews, ground: Ground, told: Told, clock: Callable[[], float] = time.monotonic
) -> Iterator[list[Series]]:
    """Takes all samples, by turns; ends early when the time is up.

    Each variant has a group for each condition: ranks of a group agree on what its network does (loss, round trip, rates) and learn
    limits from it, and a group that saw several networks would run on what none of them is.

    Yields:
        After each turn, what all turns so far have measured: equally many samples of each cell, but none where the time was up before a
        preset had ended its warm-up (`_warm_up`), as those would be of its exact calls.

    Raises:
        WorkerFailed: a worker ended or fell silent.
        LabError: the time was up before any cell could be measured.
    """
    cells = plan.cells()
    for cell in sorted(_groups(cells).values(), key=lambda cell: plan.conditions.index(cell.condition)):
        crews.form(cell.variant, cell.ranks, cell.condition)
    found = [Series(cell, plan.block) for cell in cells]
    begun, turns = clock(), list(plan.turns())

    def is_over() -> bool:
        return clock() - begun > 60 * plan.minutes

    cold = _warm_up(found, crews, ground, is_over=is_over)
    warm = [at for at, cell in enumerate(cells) if _group(cell) not in cold]
    check_warm(warm, plan.minutes)
    for turn, order in enumerate(turns):
        if turn > 0 and is_over():
            break
        for place, at in enumerate(at for at in order if at in warm):
            ground.set(cells[at].condition)
            uncounted = plan.uncounted(cells[at].variant)
            for index in range(uncounted + plan.block):
                _sample(crews, found[at], counted=index >= uncounted)
            told(turn * len(warm) + place + 1, len(turns) * len(warm), found[at])
        yield copy.deepcopy(found)


def check_warm(warm: Sequence[int], minutes: float) -> None:
    """Raises LabError where nothing has warmed up, so that there is nothing to measure."""
    if not warm:
        raise LabError(
            f"--minutes {minutes:g} were over before any preset had ended its warm-up, whose exact calls are not what is measured: "
            "allow more, or lower GRADWIRE_WARM_UP_ROUNDS"
        )


def _warm_up(every: Sequence[Series], crews: Crews, ground: Ground, *, is_over: Callable[[], bool]) -> set[str]:
    """Ends what presets measure first, by exact calls which would tell nothing of them. Of samples that are not counted.

    What they learn there, of the largest call that a group has, holds for all others of the group, and so of its condition.

    Returns:
        Groups that had not ended it when the time was up.
    """
    groups: dict[str, list[Series]] = {}
    for series in every:
        if series.cell.variant.preset is not None:
            groups.setdefault(_group(series.cell), []).append(series)
    return {name for name, group in groups.items() if not _is_warmed(group, crews, ground, is_over)}


def _is_warmed(group: Sequence[Series], crews: Crews, ground: Ground, is_over: Callable[[], bool]) -> bool:
    largest = max(series.cell.bytes for series in group)
    for series in cycle([series for series in group if series.cell.bytes == largest]):
        ground.set(series.cell.condition)
        if not _sample(crews, series, counted=False):
            break
        if is_over():
            return False
    return True


def _sample(crews: Crews, series: Series, *, counted: bool) -> bool:
    """One sample: a call from a common start, or several that follow one in which the ranks meet (`results.times_ms`).

    Returns:
        Whether one of its calls was exact because its preset measures first.
    """
    cell, timed = series.cell, timed_calls(series.cell.bytes)
    calls = timed if timed == 1 else 1 + timed
    group = {"group": _group(cell), "collective": cell.collective, "elems": cell.bytes // 4}
    crews.order(
        cell.variant, {"do": "prepare", **group, "first": crews.number_calls(calls), "calls": calls}, "prepared"
    )
    order = {"do": "sample", "variant": asdict(cell.variant), "at": time.monotonic() + START_AHEAD_S}
    sampled = crews.order(cell.variant, order, "sampled")
    judged = crews.order(cell.variant, {"do": "judge"}, "judged")
    answers = [{**took[-1], **found[-1]} for took, found in zip(sampled, judged, strict=True)]
    answers = [answer for answer in answers if answer["sampled"]]
    series.add(answers, counted=counted)
    return any(answer["warm_up"] for answer in answers)


def group_of(variant: Variant, ranks: int, condition: Condition) -> str:
    """Name of a variant's group of so many ranks under a condition."""
    return f"{variant.name} of {ranks}, {condition}"


def _group(cell: Cell) -> str:
    return group_of(cell.variant, cell.ranks, cell.condition)


def _groups(cells: Sequence[Cell]) -> dict[str, Cell]:
    """One cell of each group."""
    return {_group(cell): cell for cell in cells}
