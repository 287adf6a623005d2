"""From the records of single steps to the numbers that the demo reports. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from gradwire.demo.plan import Plan, Run

TIMES_OF_P99 = 100  # a p99 of fewer is the slowest of them, under another name


@dataclass
class RunResults:
    """What one run has given so far.

    Attributes:
        step_ms, comm_ms: of each timed step, as `times_of_step` has them.
        lost_shares: of every step, the mean over the ranks of the share of gradient bytes that did not count.
        validation: (step, loss in nats for each byte) in the order of steps.
        steps_apart: steps after which the replicas differed, as they may where results can be lost too.
    """

    run: Run
    steps: int = 0
    step_ms: list[float] = field(default_factory=list)
    comm_ms: list[float] = field(default_factory=list)
    lost_shares: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    steps_apart: int = 0

    def add_step(self, answers: list[dict[str, Any]], timed: bool) -> None:
        """Adds one step of all ranks, an answer of each worker."""
        self.steps += 1
        self.lost_shares.append(sum(answer["record"]["bytes_lost_share"] for answer in answers) / len(answers))
        if timed:
            step_ms, comm_ms = times_of_step(answers)
            self.step_ms.append(step_ms)
            self.comm_ms.append(comm_ms)

    def summary(self) -> dict[str, Any]:
        """The numbers of this run, as `--json` writes them."""
        return {
            "backend": self.run.backend,
            "loss": self.run.loss,
            "steps": self.steps,
            "step_ms_p50": percentile(self.step_ms, 50),
            "step_ms_p99": p99_of(self.step_ms),
            "step_ms_max": max(self.step_ms),
            "comm_ms_p50": percentile(self.comm_ms, 50),
            "comm_ms_p99": p99_of(self.comm_ms),
            "comm_ms_max": max(self.comm_ms),
            "bytes_lost_share": sum(self.lost_shares) / len(self.lost_shares),
            "val_loss": self.validation[-1][1],
            "steps_apart": self.steps_apart,
        }


def times_of_step(answers: list[dict[str, Any]]) -> tuple[float, float]:
    """Of one step of all ranks, an answer of each worker, in ms: how long it took, and of that with gradients under way.

    From its last rank's beginning to its last rank's end, and on the rank that began last: the others wait for that one, too. Ranks begin
    a step when they have ended the one before, which is not at one time. The largest of their own times would have what one rank is late
    in a step twice: in that step, and in the next one of those that wait for it. Between two steps of the slowest rank nothing is
    counted: then it only compares parameters.
    """
    last = max(answers, key=lambda answer: answer["begun"])
    return (max(answer["ended"] for answer in answers) - last["begun"]) * 1e3, last["record"]["comm_ms"]


def percentile(values: list[float], percent: float) -> float:
    """The smallest of the values that at least this percentage of them do not exceed (nearest rank; none is invented)."""
    if not values:
        raise ValueError("no values to take a percentile of")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def p99_of(values: list[float]) -> float | None:
    """The 99th percentile, None of so few values that it would be the largest."""
    return percentile(values, 99) if len(values) >= TIMES_OF_P99 else None


def tail_of(values: list[float]) -> tuple[str, float]:
    """What the slowest steps are told by, for people: `p99`, or `slowest` of few values."""
    p99 = p99_of(values)
    return ("slowest", max(values)) if p99 is None else ("p99", p99)


def report(plan: Plan, results: list[RunResults]) -> dict[str, Any]:
    """The object that `--json` writes: one entry in `runs` for each run, and what they have in common."""
    return {
        "runs": [result.summary() for result in results],
        "network": {
            "workers": plan.workers,
            "rate_mbit": plan.link.rate_mbit,
            "buffer_bytes": plan.link.buffer_bytes,
            "delay_ms": plan.link.delay_ms,
            "tcp_congestion_control": plan.congestion_control,
        },
        "timed_steps": len(results[0].step_ms),
        "preset": plan.preset,
        "seed": plan.seed,
    }
