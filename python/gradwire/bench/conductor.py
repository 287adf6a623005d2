"""Leads the benchmark: starts crews of workers on the ground, and has the cells take turns in short blocks of samples."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from gradwire.bench.ground import Ground
from gradwire.bench.kept import WrongResult
from gradwire.bench.plan import Cell, Condition, Plan, Variant, timed_calls
from gradwire.bench.results import Series
from gradwire.lab import LabError
from gradwire.lab.crew import Crew
from gradwire.lab.namespaces import Start

IMPORTS = ("torch", "torch.distributed")  # of every worker, once
START_AHEAD_S = 0.02  # ranks get the order well before it is time
_OVERDUE_S = 10.0  # so much longer than a call may take: a rank whose call took too long says so itself, which tells more than silence
# Of a group, that by which it is made included: the first of which its ranks have agreed on what they measured.
SETTLED_CALLS = 41
_SETTLE_SHARE = 0.2  # of the time, that settling takes at most
_SAID_EVERY_S = 10.0

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
    plan: Plan,
    crews: Crews,
    ground: Ground,
    told: Told,
    clock: Callable[[], float] = time.monotonic,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Series]]:
    """Takes all samples, by turns; ends early when the time is up.

    Each variant has a group for each condition: ranks of a group agree on what its network does (loss, round trip, rates) and learn
    limits from it, and a group that saw several networks would run on what none of them is. A group's ranks measure round trips while
    it is idle, too, so one round trip is measured after the other, each in its share of the minutes. `say` takes
    what is done before the turns, for people.

    Yields:
        After each turn, what all turns so far have measured: equally many samples of each cell of a round trip, but none where the time
        was up before a preset had ended its warm-up, as those would be of its exact calls, or before its round trip's first turn ended.

    Raises:
        WorkerFailed: a worker ended or fell silent.
        WrongResult: no cell could be measured, and what was called to warm up was wrong.
        LabError: the time was up before any cell could be measured.
    """
    series = {cell: Series(cell, plan.block) for cell in plan.cells()}
    found, parts = list(series.values()), plan.by_round_trip()
    left_s, done, total = 60 * plan.minutes, 0, len(found) * len(list(plan.turns()))
    for index, part in enumerate(parts):
        stage = _Stage(part, crews, ground, series, clock=clock, say=say)
        stage.form()
        begun, share_s = clock(), max(0.0, left_s) / (len(parts) - index)
        warm = stage.warm_up(share_s)
        turns = list(part.turns())
        total -= (len(part.cells()) - len(warm)) * len(turns)
        for turn, order in enumerate(turns if warm else []):
            if turn > 0 and clock() - begun > share_s:
                break
            for cell in (cell for cell in map(part.cells().__getitem__, order) if cell in warm):
                stage.take_block(series[cell])
                done += 1
                told(done, total, series[cell])
            yield copy.deepcopy(found)
        left_s -= clock() - begun
    if any(each.lost for each in found):
        yield found  # what a warm-up that was cut found is in it, too
    else:
        check_right(sum(each.wrong for each in found))
        check_warm([], plan.minutes)


def check_right(wrong: int) -> None:
    """Raises WrongResult where elements of results were wrong, of calls to warm up, too."""
    if wrong:
        raise WrongResult(f"{wrong} elements of results are WRONG, of calls to warm up; nothing else was measured")


def check_warm(warm: Sequence[int], minutes: float) -> None:
    """Raises LabError where nothing has warmed up, so that there is nothing to measure."""
    if not warm:
        raise LabError(
            f"--minutes {minutes:g} were over before any preset had ended its warm-up, whose exact calls are not what is measured: "
            "allow more, or lower GRADWIRE_WARM_UP_ROUNDS"
        )


class _Stage:
    """All cells of one round trip: makes their groups, warms them up, and takes blocks of samples."""

    def __init__(
        self,
        plan: Plan,
        crews: Crews,
        ground: Ground,
        series: Mapping[Cell, Series],
        *,
        clock: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._crews, self._ground, self._clock, self._say = plan, crews, ground, clock, say
        self._groups: dict[str, list[Series]] = {}
        for cell in sorted(plan.cells(), key=lambda cell: plan.conditions.index(cell.condition)):
            self._groups.setdefault(_group(cell), []).append(series[cell])
        self._calls = dict.fromkeys(self._groups, 1)  # the one by which it is made
        self._said = clock()

    def form(self) -> None:
        """Makes the groups."""
        for number, group in enumerate(self._groups.values()):
            self._progress("making process groups", number)
            cell = group[0].cell
            self._crews.form(cell.variant, cell.ranks, cell.condition)

    def warm_up(self, share_s: float) -> set[Cell]:
        """Ends what presets measure first, then calls until the ranks of each group have agreed on what they measured (`settled`).

        Both by samples of the largest calls that a group has, which are not counted, under the group's condition. What it learns there
        holds for all others of the group. The second takes a part of the time at most, of which each group has an equal share.

        Args:
            share_s: seconds for these and all turns.

        Returns:
            Cells whose groups have ended the first before the time was up.
        """
        begun = self._clock()
        warm = []
        for number, (name, group) in enumerate(self._groups.items()):
            self._progress("warming presets up", number)
            if group[0].cell.variant.preset is None or self._is_warmed(group, begun + share_s):
                warm.append(name)
        left_s = _SETTLE_SHARE * share_s
        for number, name in enumerate(warm):
            self._progress("settling groups", number)
            before = self._clock()
            until = min(before + left_s / (len(warm) - number), begun + share_s)
            self._settle(name, self._groups[name], until)
            left_s -= self._clock() - before
        return {series.cell for name in warm for series in self._groups[name]}

    def take_block(self, series: Series) -> None:
        """Samples in a row, after those that are not counted."""
        self._ground.set(series.cell.condition)
        uncounted = self._plan.uncounted(series.cell.variant)
        for index in range(uncounted + self._plan.block):
            self._sample(series, counted=index >= uncounted)

    def _is_warmed(self, group: Sequence[Series], until: float) -> bool:
        for series in cycle(_largest(group)):
            self._ground.set(series.cell.condition)
            if not self._sample(series, counted=False):
                break
            if self._clock() > until:
                return False
        return True

    def _settle(self, name: str, group: Sequence[Series], until: float) -> None:
        wanted = SETTLED_CALLS - self._plan.uncounted(group[0].cell.variant)  # those come before the first block
        for series in cycle(_largest(group)):
            if self._calls[name] >= wanted:
                return
            if self._clock() > until:
                break
            self._ground.set(series.cell.condition)
            self._sample(series, counted=False)
        if group[0].cell.variant.is_peer:  # whose ranks agree on nothing
            return
        for series in group:
            series.settled = False
        self._say(f"not settled: {name}: its share of --minutes was over after {self._calls[name]} of {wanted} calls")

    def _sample(self, series: Series, *, counted: bool) -> bool:
        self._calls[_group(series.cell)] += calls_of(series.cell)
        return _sample(self._crews, series, counted=counted)

    def _progress(self, what: str, number: int) -> None:
        """A line at first, and now and then."""
        now = self._clock()
        if number == 0 or now - self._said > _SAID_EVERY_S:
            self._said = now
            self._say(f"{what}: {number} of {len(self._groups)}")


def _largest(group: Sequence[Series]) -> list[Series]:
    largest = max(series.cell.bytes for series in group)
    return [series for series in group if series.cell.bytes == largest]


def calls_of(cell: Cell) -> int:
    """Calls of one sample, the one that is not timed included."""
    timed = timed_calls(cell.bytes)
    return timed if timed == 1 else 1 + timed


def _sample(crews: Crews, series: Series, *, counted: bool) -> bool:
    """One sample: a call from a common start, or several that follow one in which the ranks meet (`results.times_ms`).

    Returns:
        Whether one of its calls was exact because its preset measures first.
    """
    cell, calls = series.cell, calls_of(series.cell)
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
