"""Leads the demo: builds the network, starts a worker on each host, and has the runs take turns in short blocks.

Each run has a process group of its own, so that what the ranks of one agree on and learn is of its loss alone.
It leads in the lab's sandbox, so the workers and the network end with it in every case.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradwire._policy import GATHER_PRESETS
from gradwire.demo.plan import Plan
from gradwire.demo.results import RunResults
from gradwire.demo.worker import GROUP_TIMEOUT_S
from gradwire.lab import DEVICE, Cluster
from gradwire.lab.crew import THREADS, Crew, WorkerFailed, rendezvous_environment
from gradwire.lab.nursery import Nursery
from gradwire.lab.probe import LossProbe, probe_loss

IMPORTS = ("torch", "torch.distributed", "torch.nn.parallel")  # of every worker, once


@dataclass(frozen=True)
class Progress:
    """Where the demo reports to; every function returns at once."""

    stage: Callable[[str], None]
    loss_checked: Callable[[float, LossProbe], None]
    stepped: Callable[[int, RunResults], None]


class Conductor:
    """Runs a plan once. A context manager: leaving it ends the workers and the network."""

    def __init__(self, plan: Plan, logs: Path, progress: Progress) -> None:
        self.plan, self._logs, self._progress = plan, logs, progress
        self.results = [RunResults(run) for run in plan.runs]
        self._cluster = Cluster(plan.workers, plan.link)
        self._crew: Crew | None = None
        self._nursery: Nursery | None = None

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._crew is not None:
            self._crew.close()
        if self._nursery is not None:
            self._nursery.close()
        self._cluster.close()

    def play(self) -> list[RunResults]:
        """Trains all runs to the end, or until the time is used up, with equally many steps for each.

        Raises:
            WorkerFailed: a rank failed, or the ranks' parameters were not bit-identical after a step and have to be.
            LabError: the network does not do what it was set to do.
        """
        started = time.monotonic()
        self._check_losses()
        self._start_workers()
        for index, run in enumerate(self.plan.runs):
            named = {"name": str(run), "backend": run.backend, "timeout_s": GROUP_TIMEOUT_S}
            self._cluster.set_loss(0)
            self._everyone({"do": "group", **named})
            self._cluster.set_loss(run.loss)  # DDP's first broadcast is the group's, too
            self._everyone({"do": "make", "run": index, "settings": self._settings(run.backend), "group": str(run)})
        rounds = list(self.plan.rounds())
        for turn, order in enumerate(rounds):
            round_started = time.monotonic()
            for index in order:
                self._train_block(index)
            if turn % max(1, len(rounds) // 8) == 0 or turn == len(rounds) - 1:
                self._validate()
            now = time.monotonic()
            if now - started + (now - round_started) > self.plan.budget_seconds and turn < len(rounds) - 1:
                self._progress.stage(f"time is up after {self.results[0].steps} of {self.plan.steps} steps")
                self._validate()
                break
        return self.results

    def _check_losses(self) -> None:
        self._cluster.set_congestion_control(self.plan.congestion_control)
        for loss in self.plan.losses:
            self._progress.stage("counting what the network loses")
            self._cluster.set_loss(loss)
            self._progress.loss_checked(loss, probe_loss(self._cluster))
        self._cluster.set_loss(0)

    def _start_workers(self) -> None:
        self._progress.stage(f"starting {self.plan.workers} workers, each on a host of its own")
        world_size = self.plan.workers
        command = [sys.executable, "-m", "gradwire.demo.worker", str(self.plan.example)]
        environments = [rendezvous_environment(r, world_size, Cluster.address(0), DEVICE) for r in range(world_size)]
        self._nursery = Nursery(IMPORTS, THREADS)
        spawn = partial(self._cluster.spawn, start=self._nursery.start)
        self._crew = Crew(spawn, command, environments, self._logs)
        self._crew.collect("ready")

    def _settings(self, backend: str) -> dict[str, Any]:
        plan = self.plan
        chosen = {"steps": plan.steps, "batch": plan.batch, "seed": plan.seed}
        return {"backend": backend, "preset": plan.preset, **chosen}

    def _train_block(self, index: int) -> None:
        result = self.results[index]
        self._progress.stage(f"training with {result.run.backend}, {result.run.loss:.0%} of the packets lost")
        self._cluster.set_loss(result.run.loss)
        answers = self._everyone({"do": "train", "run": index, "steps": self.plan.block})
        for step in range(self.plan.block):
            self._compare(result, {answer[step]["parameters"] for answer in answers})
            result.add_step([answer[step] for answer in answers], timed=step > 0)
        self._progress.stepped(index, result)

    def _compare(self, result: RunResults, parameters: set[str]) -> None:
        """Looks whether the replicas are the same after the next step, and counts it if they are not but need not be."""
        if len(parameters) == 1:
            return
        if result.run.backend != "gradwire" or self.plan.preset not in GATHER_PRESETS:
            raise WorkerFailed(f"{result.run}: the replicas differ after step {result.steps + 1}")
        result.steps_apart += 1

    def _validate(self) -> None:
        """Judges all runs at their current step, each over its own network: what its ranks know of one is of no other."""
        for index, result in enumerate(self.results):
            if not result.validation or result.validation[-1][0] != result.steps:
                self._cluster.set_loss(result.run.loss)
                answers = self._everyone({"do": "validate", "run": index})
                result.validation.append((result.steps, answers[0][-1]["val_loss"]))

    def _everyone(self, order: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Gives an order to all workers; returns what each of them answered."""
        assert self._crew is not None
        return self._crew.order(
            order, {"group": "made", "make": "made", "train": "trained", "validate": "val_loss"}[order["do"]]
        )
