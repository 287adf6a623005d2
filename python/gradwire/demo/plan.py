"""What the demo trains, over which network, and in which order. Plain values; checked when made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradwire.lab import Link


@dataclass(frozen=True)
class Run:
    """One of the trainings that are compared: a backend over a network that loses this share of its packets."""

    backend: str
    loss: float

    def __str__(self) -> str:
        return f"{self.backend}, {self.loss * 100:g} % loss"


@dataclass(frozen=True)
class Plan:
    """The whole demonstration.

    Attributes:
        steps: optimizer steps of each run.
        block: steps that one run makes before the next run's turn. The first step of a block is not timed: TCP has
            forgotten its window by then, and the ranks start at slightly different moments.
        budget_seconds: no new round is begun if it would end later than this after the start.
        seed: the same for all runs, so all see the same batches and start from the same weights.
    """

    example: Path
    backends: tuple[str, ...] = ("gloo", "gradwire")
    losses: tuple[float, ...] = (0.0, 0.01)
    workers: int = 4
    link: Link = field(default_factory=Link)
    congestion_control: str = "cubic"
    preset: str = "auto"
    steps: int = 120
    block: int = 8
    batch: int = 8
    seed: int = 1
    budget_seconds: float = 400.0

    def __post_init__(self) -> None:
        if self.block < 2 or self.steps < self.block or self.steps % self.block:
            raise ValueError(f"steps must be a multiple of the block of {self.block} (at least 2), not {self.steps}")
        if not 2 <= self.workers <= 8:
            raise ValueError(f"2 to 8 workers fit on one machine, not {self.workers}")
        if not (self.example / "train_gpt.py").is_file():
            raise ValueError(
                f"no train_gpt.py in {self.example}: an installed package has no examples, name their folder in the sources with --examples"
            )

    @property
    def runs(self) -> list[Run]:
        """All combinations; runs over one network stand side by side."""
        return [Run(backend, loss) for loss in self.losses for backend in self.backends]

    def rounds(self) -> Iterator[list[int]]:
        """Indices into `runs`, once each for every round; the order rotates so that no run always comes first.

        All runs live through the same minutes of the machine: a disturbance from outside meets them all alike.
        """
        count = len(self.runs)
        for turn in range(self.steps // self.block):
            yield [(turn + i) % count for i in range(count)]
