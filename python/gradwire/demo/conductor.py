"""Leads the demo: builds the network, starts a worker on each host, and has the runs take turns in short blocks.

It lives in the lab's sandbox as process 1, so the workers and the network end with it in every case.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradwire.demo.plan import Plan
from gradwire.demo.results import RunResults
from gradwire.lab import DEVICE, Cluster
from gradwire.lab.probe import LossProbe, probe_loss

STORE_PORT = 29400  # within the lab's own network, where nothing else listens
SILENCE_S = 90.0  # longer than the workers' own timeout, which names the culprit better than silence does


class WorkerFailed(RuntimeError):
    """A worker ended or fell silent; the message names it and shows the end of its log."""


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
        self._workers: list[_WorkerProcess] = []

    def __enter__(self) -> Conductor:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.log.close()
        self._cluster.close()

    def play(self) -> list[RunResults]:
        """Trains all runs to the end, or until the time is used up, with equally many steps for each.

        Raises:
            WorkerFailed: a rank failed.
            LabError: the network does not do what it was set to do.
        """
        started = time.monotonic()
        self._check_losses()
        self._start_workers()
        for index, run in enumerate(self.plan.runs):
            self._everyone({"do": "make", "run": index, "settings": self._settings(run.backend)})
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
        self._workers = [_WorkerProcess(self._cluster, self.plan, host, self._logs) for host in range(self.plan.workers)]
        self._collect("ready")

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
            result.add_step([answer[step]["record"] for answer in answers], timed=step > 0)
        self._progress.stepped(index, result)

    def _validate(self) -> None:
        """Judges all runs at their current step; the network loses nothing meanwhile, as this is not what is compared."""
        self._cluster.set_loss(0)
        for index, result in enumerate(self.results):
            if not result.validation or result.validation[-1][0] != result.steps:
                answers = self._everyone({"do": "validate", "run": index})
                result.validation.append((result.steps, answers[0][-1]["val_loss"]))

    def _everyone(self, order: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Gives an order to all workers; returns what each of them answered."""
        for worker in self._workers:
            worker.give(order)
        return self._collect({"make": "made", "train": "trained", "validate": "val_loss"}[order["do"]])

    def _collect(self, last: str) -> list[list[dict[str, Any]]]:
        """Reads answers from all workers until each has given one with the key `last`."""
        answers: list[list[dict[str, Any]]] = [[] for _ in self._workers]
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                selector.register(worker.answers, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(SILENCE_S)
                if not ready:
                    silent = [str(key.data) for key in selector.get_map().values()]
                    raise WorkerFailed(f"no word from worker {', '.join(silent)} for {SILENCE_S:.0f} s")
                for key, _ in ready:
                    answers[key.data] += self._workers[key.data].read()
                    if answers[key.data] and last in answers[key.data][-1]:
                        selector.unregister(key.fileobj)
        return answers


class _WorkerProcess:
    """A worker's process with its pipes and its log."""

    def __init__(self, cluster: Cluster, plan: Plan, host: int, logs: Path) -> None:
        self._rank = host
        self.log: IO[bytes] = (logs / f"worker-{host}.log").open("wb+")
        command = [sys.executable, "-m", "gradwire.demo.worker", str(plan.example), ",".join(plan.backends)]
        self._process = cluster.spawn(
            host,
            command,
            env={**os.environ, **_environment(plan, host)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,  # Ctrl-C is for the conductor, which ends the workers itself
        )
        assert self._process.stdout is not None
        self.answers: IO[bytes] = self._process.stdout
        self._partial = b""

    def give(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def read(self) -> list[dict[str, Any]]:
        """The complete answers that have come in; blocks if there is not even a part of one."""
        data = os.read(self.answers.fileno(), 1 << 16)
        if not data:
            raise self._failure()
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _failure(self) -> WorkerFailed:
        status = self._process.wait(timeout=10)
        self.log.seek(0)
        tail = self.log.read().decode(errors="replace").splitlines()[-15:]
        return WorkerFailed(f"worker {self._rank} ended with status {status}; the end of {self.log.name}:\n" + "\n".join(tail))


def _environment(plan: Plan, host: int) -> dict[str, str]:
    """What torchrun would set, and how gloo finds the host's address (it would resolve the machine's name otherwise)."""
    return {
        "MASTER_ADDR": Cluster.address(0),
        "MASTER_PORT": str(STORE_PORT),
        "RANK": str(host),
        "WORLD_SIZE": str(plan.workers),
        "LOCAL_RANK": "0",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
    }
