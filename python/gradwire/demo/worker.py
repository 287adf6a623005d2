"""One rank of the demo, on its own host of the lab. Started by the conductor; trains what it is told to, when it is told.

Orders come in on standard input and results go out on standard output, one JSON object for each line:

    {"do": "make", "run": 0, "settings": {..}}   ->  {"made": 0}           a replica of the example's model
    {"do": "train", "run": 0, "steps": 8}        ->  {"run": 0, "record": {..}} for each step, {"trained": 0}
    {"do": "validate", "run": 0}                 ->  {"run": 0, "val_loss": 2.5}

The process ends when its input does. All runs live in one process, so torch is imported once and runs can take turns.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

GROUP_TIMEOUT_S = 60  # a step takes a second or two; a group that waits longer is broken


class Worker:
    """The example's trainers on this rank, by run number; imports torch and joins the process groups when made."""

    def __init__(self, examples: str, backends: list[str], say: Callable[[dict[str, Any]], None]) -> None:
        sys.path.insert(0, examples)
        import torch
        import torch.distributed as dist
        import train_gpt

        torch.set_num_threads(1)  # the hosts share one machine's cores
        self._example, self._say = train_gpt, say
        timeout = timedelta(seconds=GROUP_TIMEOUT_S)
        dist.init_process_group("gloo", timeout=timeout)
        self._groups = {"gloo": dist.group.WORLD}
        if "gradwire" in backends:
            import gradwire.torch  # noqa: F401  registers the backend

            self._groups["gradwire"] = dist.new_group(backend="gradwire", timeout=timeout)
        self._corpus = train_gpt.Corpus.of_standard_library()
        self._trainers: dict[int, Any] = {}

    def obey(self, order: dict[str, Any]) -> None:
        """Carries one order out and answers it."""
        {"make": self._make, "train": self._train, "validate": self._validate}[order["do"]](order)

    def _make(self, order: dict[str, Any]) -> None:
        settings = self._example.Settings(**order["settings"])
        self._trainers[order["run"]] = self._example.Trainer(settings, self._corpus, self._groups[settings.backend])
        self._say({"made": order["run"]})

    def _train(self, order: dict[str, Any]) -> None:
        trainer = self._trainers[order["run"]]
        for _ in range(order["steps"]):
            self._say({"run": order["run"], "record": asdict(trainer.step())})
        trainer.check_replicas()
        self._say({"trained": order["run"]})

    def _validate(self, order: dict[str, Any]) -> None:
        self._say({"run": order["run"], "val_loss": self._trainers[order["run"]].validation_loss()})

    def leave(self) -> None:
        """Leaves the process groups in good order."""
        import torch.distributed as dist

        dist.destroy_process_group()


def main() -> None:
    """Arguments: the examples' folder, and the backends separated by commas."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs into the log, not among the answers
    worker = Worker(sys.argv[1], sys.argv[2].split(","), lambda answer: print(json.dumps(answer), file=answers))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        worker.obey(json.loads(line))
    worker.leave()


if __name__ == "__main__":
    main()
