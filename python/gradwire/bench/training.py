"""`gradwire bench --training`: time to accuracy of the example transformer, by loss, for presets and peers.

The main figure of ULTIMA (11 to 13) and LTP (11). All runs start from the same weights and see the same batches; they take turns in
blocks of steps within the same processes, each in a group of its own, which meets no network but that of its loss. Before the first
block, steps that are undone end what presets measure first; every run has at least two, in the second of which DDP cuts its buckets
anew. Before each block an all-reduce of a gradient's size wakes the connections up, which TCP's window and gradwire's estimates
need after a pause; then every step counts. Time to accuracy is the sum of the steps' times until the validation loss, settled over
three validations, first is at the target, interpolated between two. A step lasts from when its last rank has begun it to the end on
its slowest rank (`Run.add`).
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire._policy import GATHER_PRESETS
from gradwire.bench.conductor import Crews, check_warm, group_of
from gradwire.bench.ground import Ground
from gradwire.bench.kept import WrongResult
from gradwire.bench.machine import file_hash
from gradwire.bench.plan import Condition, NetworkPlan, Variant
from gradwire.bench.results import Verdict, times_told
from gradwire.demo.results import percentile, times_of_step
from gradwire.lab import LabError
from gradwire.lab.namespaces import Start

LOSSES = (0.0, 0.0001, 0.001, 0.005, 0.01)
PATIENCE_S = 300.0
_TARGET_AT = 0.8  # of the steps of the first run without loss: all others have some more to get there
_SETTLED_OVER = 3  # validations
# Steps that are undone, at least: in the forward of the second DDP cuts its buckets anew, by the order of the first's gradients.
_REHEARSED = 2
_WARM_ELEMS = 1 << 18  # 1 MB, of the order of the example's buckets

Row = dict[str, Any]
Point = tuple[int, float, float]  # steps done, seconds, validation loss


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, over what.

    Attributes:
        steps: of each run.
        block: steps of one run in a row; its validation loss is taken after them.
        target: validation loss in nats for each byte, the mean of three validations; None: what the first run without loss has at
            four fifths of its steps.
        validation_batches: of the example's, that a validation looks at.
        is_tcp_chosen: as in `Plan`.
    """

    example: Path
    network: NetworkPlan
    variants: tuple[Variant, ...]
    losses: tuple[float, ...] = LOSSES
    rtt_ms: float = 0.0
    ranks: int = 4
    steps: int = 120
    block: int = 10
    batch: int = 8
    seed: int = 1
    target: float | None = None
    minutes: float = 60.0
    validation_batches: int = 16
    is_tcp_chosen: bool = True

    def __post_init__(self) -> None:
        if self.steps < self.block or self.steps % self.block or self.block < 1:
            raise ValueError(f"--steps must be a multiple of the block of {self.block}, not {self.steps}")
        if not (self.example / "train_gpt.py").is_file():
            raise ValueError(
                f"no train_gpt.py in {self.example}: an installed package has no examples, name their folder in the sources with --examples"
            )
        if not self.variants:
            raise ValueError("nothing to train with: name a --preset or a --tcp")
        if not self.network.is_shaped and any((*self.losses, self.rtt_ms)):
            raise ValueError(f"--network {self.network.kind} loses and delays nothing: take --network lab")


@dataclass
class Run:
    """One training: a variant under a condition.

    Attributes:
        step_ms, comm_ms: of each step, as `times_of_step` has them.
        lost: share of the other ranks' gradients that came a step later, mean of the ranks.
        filled: share of the results that did not come back and were filled in, which no later step brings; mean of the ranks.
        steps_apart: steps after which the replicas differed.
    """

    variant: Variant
    condition: Condition
    step_ms: list[float] = field(default_factory=list)
    comm_ms: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    steps_apart: int = 0

    def add(self, answers: list[Row]) -> None:
        """One step of all ranks, an answer of each.

        Raises:
            WrongResult: replicas differ although the variant promises that they do not.
        """
        step_ms, comm_ms = times_of_step(answers)
        self.step_ms.append(step_ms)
        self.comm_ms.append(comm_ms)
        self.lost.append(sum(answer["record"]["bytes_lost_share"] for answer in answers) / len(answers))
        self.filled.append(fmean(answer["filled"] for answer in answers))
        self.steps_apart += self.are_apart(answers, str(len(self.step_ms)))

    def are_apart(self, answers: list[Row], step: str) -> bool:
        """Whether the replicas differ after a step, of which each rank's answer has the hash of the `parameters`.

        Raises:
            WrongResult: the variant promises that they do not.
        """
        differ = len({answer["parameters"] for answer in answers}) > 1
        if differ and self.variant.preset not in GATHER_PRESETS:
            raise WrongResult(f"{self.variant.name}: the replicas differ after step {step}")
        return differ

    @property
    def loss(self) -> float:
        """Share of the packets that the network loses."""
        return self.condition.loss

    def __str__(self) -> str:
        return f"{self.variant.name}, {self.loss:.2%} lost"

    def row(self) -> Row:
        """The numbers that are printed and written."""
        seconds = [0.0, *accumulate(each / 1e3 for each in self.step_ms)]
        return {
            "variant": self.variant.name,
            "peer": self.variant.is_peer,
            "loss": self.loss,
            "steps": len(self.step_ms),
            "step_ms_p50": percentile(self.step_ms, 50),
            "step_ms_max": max(self.step_ms),
            "comm_share": sum(self.comm_ms) / sum(self.step_ms),
            "lost_share": sum(self.lost) / len(self.lost),
            "filled_share": fmean(self.filled),
            "steps_apart": self.steps_apart,
            "curve": [(step, round(seconds[step], 4), loss) for step, loss in self.validation],
            "step_ms": [round(each, 2) for each in self.step_ms],
        }


def identity_of(example: Path, start: Start) -> dict[str, Any]:
    """Hashes of the example's sources and of what it learns from (`corpus`).

    Args:
        example: its folder.
        start: of a nursery that has imported torch.

    Raises:
        LabError: the example cannot read it.
        WorkerFailed: torch cannot be imported, or there is no room for a process.
    """
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "gradwire.bench.corpus", str(example)]
        status = start(command, env=os.environ, stdin=subprocess.DEVNULL, stdout=told, stderr=errors).wait()
        for each in (told, errors):
            each.seek(0)
        if status:
            why = errors.read().decode(errors="replace").strip().rpartition("\n")[-1]
            raise LabError(f"the example in {example} has no corpus: {why or f'reading it ended with {status}'}")
        corpus = json.load(told)
    sources = {file.name: file_hash(file) for file in (example / "gpt.py", example / "train_gpt.py")}
    return {"sources_sha256": sources, "corpus": corpus}


def train(
    plan: TrainingPlan,
    crews: Crews,
    ground: Ground,
    told: Callable[[int, int, str], None],
    *,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Run]]:
    """Trains all runs by turns; ends early when the time is up. `say` takes what is done before the turns, for people.

    Yields:
        After each turn, what all turns so far have trained: equally many steps of each run, but none where the time was up before a
        preset had ended its warm-up, as those would be of its exact calls.

    Raises:
        WorkerFailed: a worker failed.
        WrongResult: replicas differ that must not, after a step that is undone, too.
        LabError: the target is reached before the first step, or the time was up before any run had ended its warm-up.
    """
    runs = [Run(variant, Condition(loss, plan.rtt_ms)) for loss in plan.losses for variant in plan.variants]
    for index, run in enumerate(runs):
        say(f"making the group and the model of {run}: {index + 1} of {len(runs)}")
        _make(plan, crews, ground, index, run)
    begun, turns = time.monotonic(), plan.steps // plan.block

    def is_over() -> bool:
        return time.monotonic() - begun > 60 * plan.minutes

    warm = []
    for at, run in enumerate(runs):
        say(f"steps that are undone, of {run}: {at + 1} of {len(runs)}")
        warm += [at] if _is_warmed(crews, ground, at, run, is_over) else []
    check_warm(warm, plan.minutes)
    for turn in range(turns):
        if turn > 0 and is_over():
            break
        for place in range(len(warm)):
            at = warm[(place + turn) % len(warm)]
            _train_block(plan, crews, ground, at, runs[at])
            text = f"{runs[at]}: {runs[at].step_ms[-1]:.0f} ms a step"
            told(turn * len(warm) + place + 1, turns * len(warm), text)
        yield copy.deepcopy(runs)


def _make(plan: TrainingPlan, crews: Crews, ground: Ground, index: int, run: Run) -> None:
    """The model and its group, and what it is worth untrained."""
    crews.form(run.variant, plan.ranks, run.condition)
    settings = {
        "backend": run.variant.backend,
        "steps": plan.steps,
        "batch": plan.batch,
        "seed": plan.seed,
        "validation_batches": plan.validation_batches,
        "preset": run.variant.preset or "auto",
    }
    group = group_of(run.variant, plan.ranks, run.condition)
    ground.set(run.condition)  # DDP's first broadcast is the group's, too
    crews.order(run.variant, {"do": "make", "run": index, "settings": settings, "group": group}, "made")
    _validate(crews, index, run)
    check_target(plan.target, run.validation[0][1])


def _is_warmed(crews: Crews, ground: Ground, index: int, run: Run, is_over: Callable[[], bool]) -> bool:
    """Takes steps that are undone until none of a step's calls is an exact one of a preset that measures first, if there is time."""
    ground.set(run.condition)
    for number in count(1):
        answers = [each[-1] for each in crews.order(run.variant, {"do": "rehearse", "run": index}, "rehearsed")]
        run.are_apart(answers, f"{number} that is undone")
        if any(answer["warm_ups"] for answer in answers):
            if is_over():
                return False
        elif number >= _REHEARSED:
            break
    return True


def _train_block(plan: TrainingPlan, crews: Crews, ground: Ground, index: int, run: Run) -> None:
    """One block, and what the model is worth after it: by a call that is not timed, in the same network, which the group knows alone."""
    group = group_of(run.variant, plan.ranks, run.condition)
    ground.set(run.condition)
    crews.order(run.variant, {"do": "warm", "group": group, "elems": _WARM_ELEMS}, "warm")
    answers = crews.order(run.variant, {"do": "train", "run": index, "steps": plan.block}, "trained")
    for step in range(plan.block):
        run.add([each[step] for each in answers])
    _validate(crews, index, run)


def _validate(crews: Crews, index: int, run: Run) -> None:
    answers = crews.order(run.variant, {"do": "validate", "run": index}, "val_loss")
    run.validation.append((len(run.step_ms), answers[0][-1]["val_loss"]))


def check_target(target: float | None, untrained: float) -> None:
    """Raises LabError where a target asks for nothing: the model's loss is no higher before it has learned anything."""
    if target is not None and untrained <= target:
        raise LabError(
            f"--target {target:g} is reached without training: the loss is {untrained:.4f} before the first step"
        )


def target_of(plan: TrainingPlan, rows: list[Row]) -> float:
    """The validation loss to reach: between two validations linear, so that it is never that of the last one."""
    if plan.target is not None:
        return plan.target
    calm = min(rows, key=lambda row: row["loss"])
    curve, wanted = settled(calm["curve"]), _TARGET_AT * calm["steps"]
    around = next((pair for pair in pairwise(curve) if pair[1][0] >= wanted), (curve[-1], curve[-1]))
    (before_step, _, before), (after_step, _, after) = around
    share = (wanted - before_step) / (after_step - before_step) if after_step > before_step else 0.0
    return (1 - share) * before + share * after  # exactly a validation's where it is one's


def settled(curve: Sequence[Point]) -> list[Point]:
    """Each validation loss as the mean of itself and the two before it.

    The batches of a turn raise the loss as well as lower it: on the slope of a single curve a thousandth more or less decides about ten
    steps. All variants see the same batches.
    """
    losses = [loss for _, _, loss in curve]
    latest = [losses[max(0, at - _SETTLED_OVER + 1) : at + 1] for at in range(len(curve))]
    return [(step, seconds, fmean(few)) for (step, seconds, _), few in zip(curve, latest, strict=True)]


def seconds_to(target: float, curve: Sequence[Point]) -> float | None:
    """When the loss is first at the target, between two validations linear; None if it never is."""
    for (_, before_s, before), (_, after_s, after) in pairwise(curve):
        if after <= target:
            share = (before - target) / (before - after) if before > target else 0.0
            return before_s + share * (after_s - before_s)
    return None


def with_target(rows: list[Row], target: float) -> list[Row]:
    """The rows with the settled curve, and `seconds`, the time to accuracy on it, or None."""
    curves = [settled(row["curve"]) for row in rows]
    return [
        {**row, "settled": curve, "seconds": seconds_to(target, curve)} for row, curve in zip(rows, curves, strict=True)
    ]


def judge(rows: list[Row], requirements: dict[str, float]) -> list[Verdict]:
    """`calm`: time to accuracy under loss at most so many times that without; `speedup`: so many times less than each peer's."""
    found = []
    for name, factor in requirements.items():
        verdicts = []
        for row in rows:
            if row["peer"] or not row["loss"]:
                continue
            for other in rows:
                words = f"{name}: {row['variant']} at {100 * row['loss']:g} % lost"
                if name == "calm" and other["variant"] == row["variant"] and not other["loss"]:
                    ratio = ratio_of(row, other)
                    told = f"{words}: {_times(ratio, factor)} its time without loss (at most {factor:g})"
                    verdicts.append(Verdict(told, ratio is not None and ratio <= factor))
                if name == "speedup" and other["peer"] and other["loss"] == row["loss"]:
                    ratio = ratio_of(other, row)
                    told = f"{words}: {other['variant']} takes {_times(ratio, factor)} as long (at least {factor:g})"
                    verdicts.append(Verdict(told, ratio is not None and ratio >= factor))
        found += verdicts or [Verdict(f"{name}: nothing was measured that it could be judged by", reached=False)]
    return found


def ratio_of(row: Row, other: Row) -> float | None:
    """How many times as long one takes to the target as the other; None where one never reaches it.

    It may be reached in no time: a training that only got worse sets a target that is above what it began with.
    """
    own, others = row["seconds"], other["seconds"]
    if own is None or others is None:
        return None
    if not others:
        return math.inf if own else 1.0
    return float(own / others)


def _times(ratio: float | None, factor: float) -> str:
    return (
        "the target was never reached by one, so no number of times"
        if ratio is None
        else f"{times_told(ratio, factor)} times"
    )
