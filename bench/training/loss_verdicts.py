"""What the runs of the training study say: differences within pairs of runs, and the targets. Pure functions of the rows.

The rules were fixed before the runs that they judge; trials that led to them had other seeds (101 and up).

- A difference is taken between two runs of one seed: same model, same batches, same validation set.
- Over the seeds, the mean of the differences has a 95 % t-interval. *Worse* means that the interval lies above zero, *within
  noise* that it does not.
- "Within noise" is no result where the seeds are too few to see anything. So each target has a control: plain zero-fill must
  be worse by the same rule, under the same loss. A target is reached when the remedy is within noise and the control is worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loss_plan import (
    CALM,
    FEEDBACK,
    HADAMARD,
    HADAMARD_BY_N,
    RANDOM,
    REFERENCE,
    TAIL,
    ZERO_FILL,
    Cell,
    Condition,
)

Row = dict[str, Any]
CONFIDENCE = 0.95
SEEDS_MIN = 3  # an interval from two differences says nothing
# ULTIMA's figure 15 is about a convolutional network (VGG-19).
CONVOLUTIONAL = "digits"
# The border of a tail falls within a packet, which is lost as a whole: one of the 49 of the smallest transfer.
BORDER_SHARE = 1 / 49
# How far the share of packets lost at random may be from the one that was asked for, in standard deviations.
SHARE_DEVIATIONS = 6.0


@dataclass(frozen=True)
class Interval:
    """Mean of differences and the half of its 95 % t-interval."""

    mean: float
    half: float
    seeds: int

    @property
    def is_worse(self) -> bool:
        """Above zero for certain."""
        return self.seeds >= SEEDS_MIN and self.mean > self.half

    @property
    def is_within_noise(self) -> bool:
        """Not worse, and enough seeds to say so."""
        return self.seeds >= SEEDS_MIN and not self.is_worse

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {self.half:.4f}"


def interval(differences: Sequence[float]) -> Interval:
    """Of paired differences; without a width (infinite) for fewer than two."""
    from scipy.stats import t as student  # of scikit-learn's needs

    count = len(differences)
    if count < 2:
        return Interval(statistics.fmean(differences), math.inf, count)
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, count - 1))
    half = quantile * statistics.stdev(differences) / math.sqrt(count)
    return Interval(statistics.fmean(differences), half, count)


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def rows_of(rows: Iterable[Row], cell: Cell) -> list[Row]:
    """The runs of one cell."""
    kind, share = cell.condition.kind, cell.condition.share
    return select(rows, task=cell.task, method=cell.method, kind=kind, share=share)


def difference(rows: Sequence[Row], cell: Cell, base: Cell, value: str = "loss") -> Interval | None:
    """How much higher `value` is than in `base`, over the seeds that both have; None: there is none."""
    of_base = {row["seed"]: row[value] for row in rows_of(rows, base)}
    differences = [row[value] - of_base[row["seed"]] for row in rows_of(rows, cell) if row["seed"] in of_base]
    return interval(differences) if differences else None


def above_calm(rows: Sequence[Row], cell: Cell, value: str = "loss") -> Interval | None:
    """How much worse than without loss."""
    return difference(rows, cell, Cell(cell.task, REFERENCE, CALM), value)


@dataclass(frozen=True)
class Verdict:
    """Whether a target is reached, in words."""

    reached: bool
    text: str

    def line(self) -> str:
        """For people."""
        return f"{self.text}: {'reached' if self.reached else 'MISSED'}"


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The targets that these rows can decide, and complaints about rows that are no results."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        fed, control = Cell(task, FEEDBACK, RANDOM), Cell(task, ZERO_FILL, RANDOM)
        found += _judge("error feedback", (fed, control), Cell(task, REFERENCE, CALM), rows)
    tail = Cell(CONVOLUTIONAL, ZERO_FILL, TAIL)
    rotated, by_n = Cell(CONVOLUTIONAL, HADAMARD, TAIL), Cell(CONVOLUTIONAL, HADAMARD_BY_N, TAIL)
    found += _judge("Hadamard", (rotated, tail), Cell(CONVOLUTIONAL, REFERENCE, CALM), rows)
    # All else equal: the division by N takes the same from both. What a rotation can do is make a tail a scattered loss.
    found += _judge("Hadamard / N", (by_n, tail), Cell(CONVOLUTIONAL, ZERO_FILL, RANDOM), rows)
    return found + complaints(rows)


def _judge(name: str, remedy_and_control: tuple[Cell, Cell], target: Cell, rows: Sequence[Row]) -> list[Verdict]:
    remedy, control = remedy_and_control
    got, lost = difference(rows, remedy, target), difference(rows, control, target)
    if got is None or lost is None:
        return []
    goal = "no loss" if target.condition == CALM else f"{target.method} at {target.condition}"
    text = (
        f"{remedy.task}, {remedy.condition}: {name} ends {got} nats from {goal}, {got.seeds} seeds (to be within noise), and"
        f" {control.method} {lost} (to be worse)"
    )
    return [Verdict(got.is_within_noise and lost.is_worse, text)]


def complaints(rows: Sequence[Row]) -> list[Verdict]:
    """What makes rows no results: another share was lost than asked for, or the clock or a full buffer decided what was."""
    found = []
    for condition in dict.fromkeys(Condition(row["kind"], row["share"]) for row in rows):
        of_it = select(rows, kind=condition.kind, share=condition.share)
        lost = lost_share(of_it)
        if abs(lost - condition.share) > share_tolerance(condition, of_it):
            found.append(Verdict(False, f"{condition}: {lost:.2%} of the gradient bytes were lost"))
    for what, text in (
        ("ended_by_time", "transfers ended by the clock"),
        ("overflows", "datagrams lost in full buffers"),
    ):
        count = sum(row[what] for row in rows)
        if count:
            found.append(Verdict(False, f"{count} {text}, so the machine's load decided what was lost"))
    if not all(row["identical"] for row in rows):
        found.append(Verdict(False, "replicas differ: their results were to be exact"))
    return found


def lost_share(rows: Sequence[Row]) -> float:
    """Measured share of the gradient bytes that were lost."""
    return 1 - sum(row["received"] for row in rows) / sum(row["expected"] for row in rows)


def share_tolerance(condition: Condition, rows: Sequence[Row]) -> float:
    """What chance and the borders of packets explain."""
    if condition.kind == "none":
        return 0.0
    if condition.kind == "tail":
        return BORDER_SHARE
    packets = sum(row["expected"] for row in rows) / 1408
    return SHARE_DEVIATIONS * math.sqrt(condition.share * (1 - condition.share) / packets)
