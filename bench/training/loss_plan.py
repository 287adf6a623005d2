"""What the training study runs: tasks, what is done about lost gradients, what the network loses, and with how many seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

RANKS = 4
PACKET_BYTES = 1500

# All of `tolerate_loss`. "/ N": what is missing counts as zero, all else as the row without it.
METHODS: dict[str, dict[str, Any]] = {
    "zero-fill / N": {"divide_by": "world", "error_feedback": False, "hadamard": "off"},
    "mean": {"error_feedback": False, "hadamard": "off"},
    "feedback": {"error_feedback": True, "hadamard": "off"},
    "feedback / N": {"divide_by": "world", "error_feedback": True, "hadamard": "off"},
    "hadamard / N": {"divide_by": "world", "error_feedback": False, "hadamard": "on"},
    "hadamard": {"error_feedback": False, "hadamard": "on"},
    "feedback + hadamard": {"error_feedback": True, "hadamard": "on"},
}
ZERO_FILL, FEEDBACK, HADAMARD, HADAMARD_BY_N, MEAN = "zero-fill / N", "feedback", "hadamard", "hadamard / N", "mean"
# Without loss the methods differ by rounding alone; this one stands for all.
REFERENCE = MEAN
STEPS = {"digits": 110, "transformer": 60}
STEPS_QUICK = {"digits": 20, "transformer": 10}
LOSSES = (0.01, 0.05, 0.1, 0.2)


@dataclass(frozen=True)
class Condition:
    """What the network does: `kind` is none, random or tail."""

    kind: str
    share: float

    def chaos(self) -> str | None:
        """For GRADWIRE_CHAOS."""
        part = {"random": "loss", "tail": "tail"}.get(self.kind)
        return None if part is None else f"{part}={self.share * 100:g}%,seed=1"

    def __str__(self) -> str:
        return "no loss" if self.kind == "none" else f"{self.share:.0%} {self.kind}"


CALM, RANDOM, TAIL = Condition("none", 0.0), Condition("random", 0.1), Condition("tail", 0.1)


@dataclass(frozen=True)
class Cell:
    """A place in the table."""

    task: str
    method: str
    condition: Condition


@dataclass(frozen=True)
class Run:
    """One training. Equal seeds share model, batches and validation set, so that their difference is what was lost."""

    cell: Cell
    seed: int

    def key(self) -> dict[str, Any]:
        """Its part of a row of the results."""
        task, method, condition = self.cell.task, self.cell.method, self.cell.condition
        return {"task": task, "method": method, "kind": condition.kind, "share": condition.share, "seed": self.seed}


@dataclass(frozen=True)
class Size:
    """How much is run; see the options."""

    tasks: Sequence[str]
    methods: Sequence[str]
    losses: Sequence[float]
    seeds: int
    judged_seeds: int


def conditions(losses: Sequence[float]) -> list[Condition]:
    """No loss, and each share at random and as a tail."""
    return [CALM, *(Condition(kind, share) for kind in ("random", "tail") for share in losses)]


def judged(task: str) -> list[Cell]:
    """What the targets are about (`loss_verdicts`): cells that get more seeds than the others."""
    cells = [(REFERENCE, CALM), (ZERO_FILL, RANDOM), (FEEDBACK, RANDOM)]
    cells += [(method, TAIL) for method in (ZERO_FILL, HADAMARD_BY_N, HADAMARD, MEAN)]
    return [Cell(task, method, condition) for method, condition in cells]


def plan(size: Size) -> Iterator[Run]:
    """Every run once: those of the targets first, so that an interrupted study has the most important part.

    Processes lose what they were told when they started, so runs of one condition follow each other.
    """
    asked = [Cell(t, m, c) for c in conditions(size.losses) for t in size.tasks for m in size.methods]
    first = [cell for task in size.tasks for cell in judged(task)]
    for cells, seeds in (([c for c in asked if c in first], size.judged_seeds), (asked, size.seeds)):
        done = size.judged_seeds if cells is asked else 0
        for cell in cells:
            yield from (Run(cell, s) for s in range(1, seeds + 1) if s > (done if cell in first else 0))
