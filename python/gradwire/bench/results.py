"""From samples to rows, and from rows to verdicts. Pure functions of plain values, so that a file gives the same as a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from gradwire.bench.collectives import COLLECTIVES
from gradwire.bench.plan import HEALTHY, Cell, NetworkPlan, size_text
from gradwire.demo.results import TIMES_OF_P99, percentile

GB = 1e9  # as in the NCCL tests
# Times that a percentile needs: one of them at least lies above it.
SAMPLES_OF = {"p95_ms": 20, "p99_ms": TIMES_OF_P99, "p999_ms": 1000}
_PERCENTS = {"p50_ms": 50.0, "p95_ms": 95.0, "p99_ms": 99.0, "p999_ms": 99.9}
# What `--require NAME=FACTOR` asks of every gradwire variant, everywhere it was measured.
REQUIREMENTS = {
    "busbw": "bus bandwidth at least FACTOR times that of each peer beside it, in the median of the turns",
    "cpu": "CPU seconds for each GB at most FACTOR times those of each peer beside it",
    "speedup": "under loss, time of each peer at least FACTOR times its own, in the median of the turns",
    "tail": "p99 at most FACTOR times the median of the same cell",
    "calm": "p99 under loss at most FACTOR times the variant's own median without loss",
    "healthy": "p99 in a scenario at most FACTOR times the variant's own p99 in the quieter half of the healthy network's calls",
}
_NEEDS_P99 = ("tail", "calm", "healthy")
_LARGE_BYTES = 1 << 20
_LINKS_LIMIT = 0.5  # of a call's time that links need at least where a measurement tells what becomes of them

Row = dict[str, Any]


@dataclass
class Series:
    """All samples of one cell.

    Attributes:
        block: samples of one turn; 0: all are of one.
        samples_ms: time of each call that is timed (`times_ms`); equally many of each sample.
        lost: of each sample, share of the elements that did not count, mean of the ranks.
        filled: share of the results that did not come back and were filled in, mean of the ranks.
        resent: share of the payload bytes that were sent again; none where nobody knows it: of exact calls.
        cpu_s, calls: processor time of all ranks in all calls of these samples, and how many those were.
        wrong: wrong elements in any result, counted or not.
        unjudged: results that nobody could judge, counted or not: rotated ones that lost something.
        settled: whether its group's ranks had agreed on what they measure before the first sample that is counted.
    """

    cell: Cell
    block: int = 0
    samples_ms: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    resent: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    calls: int = 0
    wrong: int = 0
    unjudged: int = 0
    settled: bool = True

    def add(self, answers: list[Row], *, counted: bool) -> None:
        """Adds a sample; one answer for each rank."""
        self.wrong += sum(answer["wrong"] for answer in answers)
        self.unjudged += sum(answer["unjudged"] for answer in answers)
        if not counted:
            return
        self.samples_ms += times_ms(answers)
        for name, shares in (("lost", self.lost), ("filled", self.filled), ("resent", self.resent)):
            if all(answer[name] is not None for answer in answers):
                shares.append(fmean(answer[name] for answer in answers))
        self.cpu_s += sum(answer["cpu_s"] for answer in answers)
        self.calls += len(answers[0]["ended"])

    def row(self) -> Row:
        """The numbers that are printed and written."""
        cell, condition = self.cell, self.cell.condition
        p50 = percentile(self.samples_ms, 50)
        algbw = cell.bytes / GB / (p50 / 1e3)
        runs = len(self.lost)
        return {
            "variant": cell.variant.name,
            "peer": cell.variant.is_peer,
            "collective": cell.collective,
            "ranks": cell.ranks,
            "bytes": cell.bytes,
            "rtt_ms": condition.rtt_ms,
            "loss": condition.loss,
            "scenario": condition.scenario,
            "samples": len(self.samples_ms),
            "block": (self.block or runs) * (len(self.samples_ms) // runs),
            "min_ms": min(self.samples_ms),
            **{name: percent_of(self.samples_ms, name) for name in _PERCENTS},
            "max_ms": max(self.samples_ms),
            "algbw_gb_s": algbw,
            "busbw_gb_s": algbw * COLLECTIVES[cell.collective].bus_factor(cell.ranks),
            "lost_share": fmean(self.lost),
            "filled_share": fmean(self.filled),
            "resent_share": fmean(self.resent) if self.resent else None,
            "cpu_s_per_gb": self.cpu_s / (self.calls * cell.bytes / GB),
            "wrong": self.wrong,
            "unjudged": self.unjudged,
            "settled": self.settled,
            "samples_ms": [round(sample, 4) for sample in self.samples_ms],
        }


def with_link_share(row: Row, network: NetworkPlan) -> Row:
    """The row with `link_share`: how much of its median the links need for what the best schedule carries, 0 to 1, without heads.

    Far below 1 it is a measurement of the processor, and what happens to links does not show. None: the network has no rates.
    """
    whole_gb_s = network.rate_mbit * network.rails / 8e3
    return {**row, "link_share": row["busbw_gb_s"] / whole_gb_s if network.is_shaped else None}


def times_ms(answers: list[Row]) -> list[float]:
    """Time of each call of a sample that is timed, in milliseconds.

    Of one call: from a common start to the end on its slowest rank. Of several in a row, each but the first: from when the last rank
    has begun it, which is when that rank has ended the call before, to the end on its slowest rank. The first brings the ranks
    together: their starts at a common time are further apart than such a call takes. The largest of the ranks' own times lost,
    since a rank that is late in one call holds the others up in the next one, which would have that time, too.

    Args:
        answers: of each rank: when it began, `begun`, and when each of its calls `ended`.
    """
    ends = [max(ranks) for ranks in zip(*(answer["ended"] for answer in answers), strict=True)]
    if len(ends) == 1:
        return [(ends[0] - min(answer["begun"] for answer in answers)) * 1e3]
    return [(after - before) * 1e3 for before, after in pairwise(ends)]


def percent_of(samples_ms: list[float], name: str) -> float | None:
    """A percentile that occurred (nearest rank), or None where there are too few samples to have one above it."""
    if len(samples_ms) < SAMPLES_OF.get(name, 1):
        return None
    return percentile(samples_ms, _PERCENTS[name])


@dataclass(frozen=True)
class Verdict:
    """Whether one requirement is met in one place."""

    text: str
    reached: bool

    def line(self) -> str:
        """For people."""
        return f"{'reached' if self.reached else 'MISSED'}: {self.text}"


def parse_requirements(words: Iterable[str]) -> dict[str, float]:
    """`NAME=FACTOR` each. Raises ValueError, saying what there is."""
    found = {}
    for word in words:
        name, _, factor = word.partition("=")
        try:
            found[name] = float(factor)
        except ValueError:
            raise ValueError(f"--require takes NAME=FACTOR, not {word}") from None
        if name not in REQUIREMENTS or not 0 < found[name] < math.inf:
            raise ValueError(f"nothing can be required as {word}: {', '.join(REQUIREMENTS)}, with a factor above 0")
    return found


def check_samples(requirements: Iterable[str], times: int) -> None:
    """Raises ValueError where a requirement is about percentiles that so few times do not have."""
    if times < SAMPLES_OF["p99_ms"] and (wanting := [name for name in requirements if name in _NEEDS_P99]):
        raise ValueError(f"--require {wanting[0]} is about p99, which needs {SAMPLES_OF['p99_ms']} samples: --samples")


def judge(rows: list[Row], requirements: dict[str, float]) -> list[Verdict]:
    """A verdict for each requirement and place; a requirement that was measured nowhere is missed."""
    found = []
    for name, factor in requirements.items():
        verdicts = [verdict for row in rows if not row["peer"] for verdict in _verdicts(name, factor, row, rows)]
        found += verdicts or [Verdict(f"{name}: nothing was measured that it could be judged by", reached=False)]
    return found


def unmeasured(names: Iterable[str], requirements: dict[str, float]) -> list[Verdict]:
    """What was required of cells or trainings that were never measured is missed: nobody knows."""
    names = list(names)
    return [Verdict(f"{wanted}: {name}: not measured", reached=False) for wanted in requirements for name in names]


def _verdicts(name: str, factor: float, row: Row, rows: list[Row]) -> list[Verdict]:
    if name in ("busbw", "cpu") or (name == "speedup" and row["loss"]):
        return [_against(name, factor, row, peer) for peer in beside(row, rows)]
    references: list[tuple[float | None, str]] = []
    if name == "tail":
        references = [(row["p50_ms"], "its median")]
    elif name == "calm" and row["loss"]:
        references = [(calm["p50_ms"], "its median without loss") for calm in _same(row, rows, loss=0.0)]
    elif name == "healthy" and row["scenario"] != HEALTHY:
        references = [_quieter_half(well) for well in _same(row, rows, scenario=HEALTHY)]
    return [_tail(f"{name}: {place(row)}", factor, row["p99_ms"], reference) for reference in references]


def _quieter_half(row: Row) -> tuple[float | None, str]:
    """The p99 of the earlier or the later half of a row's calls, whichever is lower, and words for it.

    What else the machine did for a while would else be a reason to demand less. Where it did so in both halves no number tells.
    """
    if row["p99_ms"] is None:
        return None, ""
    samples = row["samples_ms"]
    halves = (samples[: len(samples) // 2], samples[len(samples) // 2 :])
    quiet, other = sorted(percentile(half, 99) for half in halves)
    words = f"its p99 in the quieter half of the healthy network's calls, that of the other is {other / quiet:.2f} times as long"
    return quiet, f"{words}{_used_text(row)}"


def _used_text(row: Row) -> str:
    share = row.get("link_share")
    if share is None:
        return ""
    if share >= _LINKS_LIMIT:
        return f", whose median uses the links to {share:.0%}"
    is_processor = (
        not row["rtt_ms"] and row["bytes"] >= _LARGE_BYTES
    )  # else round trips, or waking ranks, may take as long
    why = "what they lose is hidden by the processor" if is_processor else "they are not the limit"
    return f", whose median uses the links to {share:.0%}: {why}"


def _against(name: str, factor: float, row: Row, peer: Row) -> Verdict:
    if name == "cpu":
        ratio = row["cpu_s_per_gb"] / peer["cpu_s_per_gb"]
        words = f"{times_told(ratio, factor)} times that of {peer['variant']} (at most {factor:g})"
        return Verdict(f"cpu: {place(row)}: {words}", ratio <= factor)
    turns = times_of_turns(row, peer)
    ratio = median(turns)
    what = "the bus bandwidth of" if name == "busbw" else "as fast as"
    spread = f"; {min(turns):.2f} to {max(turns):.2f} in {len(turns)} turns" if len(turns) > 1 else ""
    words = f"{times_told(ratio, factor)} times {what} {peer['variant']} (at least {factor:g}{spread})"
    return Verdict(f"{name}: {place(row)}: {words}", ratio >= factor)


def _tail(front: str, factor: float, p99_ms: float | None, reference: tuple[float | None, str]) -> Verdict:
    value, words = reference
    if p99_ms is None or value is None:
        return Verdict(f"{front}: too few samples for a p99", reached=False)
    told = f"{front}: p99 is {times_told(p99_ms / value, factor)} times {words} (at most {factor:g})"
    return Verdict(told, p99_ms <= factor * value)


def times_told(ratio: float, factor: float) -> str:
    """A ratio with two digits behind the point, or as many more as show on which side of the required factor it lies."""
    for digits in range(2, 9):
        told = f"{ratio:.{digits}f}"
        if ratio == factor or (float(told) != factor and (float(told) < factor) == (ratio < factor)):
            break
    return told


def beside(row: Row, rows: list[Row]) -> list[Row]:
    """The peers' rows of the same cell."""
    return [other for other in rows if other["peer"] and all(other[key] == row[key] for key in _PLACE)]


def _same(row: Row, rows: list[Row], **changed: Any) -> list[Row]:
    """The variant's own row in another condition."""
    wanted = {**{key: row[key] for key in ("variant", *_PLACE)}, **changed}
    return [other for other in rows if all(other[key] == value for key, value in wanted.items())]


_PLACE = ("collective", "ranks", "bytes", "rtt_ms", "loss", "scenario")


def place(row: Row) -> str:
    """Which row, for people."""
    parts = [row["variant"], row["collective"], f"{row['ranks']} ranks", size_text(row["bytes"])]
    parts += [f"{row['rtt_ms']:g} ms"] if row["rtt_ms"] else []
    parts += [f"{row['loss']:.3%}".rstrip("0%").rstrip(".") + " % lost"] if row["loss"] else []
    parts += [row["scenario"]] if row["scenario"] != HEALTHY else []
    return ", ".join(parts)


def times_of_turns(row: Row, peer: Row) -> list[float]:
    """How many times as long the peer took in each turn, by the medians of the blocks; of what has no turns, by those of all.

    What else a machine does changes from minute to minute, and the blocks of one turn follow each other.
    """
    block = row.get("block", 0)
    own, others = row["samples_ms"], peer["samples_ms"]
    if not block or len(own) != len(others) or len(own) % block:
        return [peer["p50_ms"] / row["p50_ms"]]
    starts = range(0, len(own), block)
    return [percentile(others[at : at + block], 50) / percentile(own[at : at + block], 50) for at in starts]


def comparisons(rows: list[Row]) -> list[Row]:
    """For each gradwire row and peer beside it: how many times as long the peer takes, in the median of the turns and at p99."""
    found = []
    for row in rows:
        for peer in [] if row["peer"] else beside(row, rows):
            tail = peer["p99_ms"] / row["p99_ms"] if row["p99_ms"] and peer["p99_ms"] else None
            turns = times_of_turns(row, peer)
            found.append({**{key: row[key] for key in ("variant", *_PLACE)}, "against": peer["variant"],
                          "p50_times": median(turns), "turns": turns, "p99_times": tail,
                          "cpu_times": peer["cpu_s_per_gb"] / row["cpu_s_per_gb"] if row["cpu_s_per_gb"] else None})  # fmt: skip
    return found
