"""One rank of the demo, on its own host of the lab. Started by the conductor; trains what it is told to, when it is told.

Orders and their answers (see `lab.crew`):

    {"do": "group", "name": g, "backend": b, "timeout_s": t}  ->  {"made": g}: a process group, for trainers that name it
    {"do": "make", "run": 0, "settings": {..}, "group": g}  ->  {"made": 0}: a replica of the example's model
    {"do": "warm", "group": g, "elems": n}  ->  {"warm": g}: an all-reduce that no step is timed by
    {"do": "rehearse", "run": 0}  ->  {"rehearsed": 0, "warm_ups": n, "parameters": hash}
        a step that is undone; calls of it that were exact to warm up, and the parameters after it
    {"do": "train", "run": 0, "steps": 8}
        ->  {"run": 0, "record": {..}, "filled": share, "parameters": hash, "begun", "ended"} for each step, {"trained": 0}
    {"do": "validate", "run": 0}  ->  {"run": 0, "val_loss": 2.5}

All runs live in one process, so torch is imported once and runs can take turns.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from gradwire.lab import crew

GROUP_TIMEOUT_S = 60  # a step takes a second or two; a group that waits longer is broken


class Worker:
    """The example's trainers on this rank, by run number; imports torch and meets the other ranks when made."""

    def __init__(self, examples: str, say: Callable[[crew.Answer], None]) -> None:
        sys.path.insert(0, examples)
        import gpt
        import torch
        import torch.distributed as dist
        import train_gpt

        torch.set_num_threads(1)
        self._example, self._torch, self._dist, self._say = train_gpt, torch, dist, say
        dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        self._groups: dict[str, Any] = {}
        self._corpus = gpt.Corpus.of_standard_library()
        self._trainers: dict[int, Any] = {}

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {
            "group": self._group,
            "make": self._make,
            "warm": self._warm,
            "rehearse": self._rehearse,
            "train": self._train,
            "validate": self._validate,
        }[order["do"]](order)

    def _group(self, order: crew.Answer) -> None:
        if order["backend"] == "gradwire":
            import gradwire.torch  # noqa: F401  registers the backend
        timeout = timedelta(seconds=order["timeout_s"])
        group = self._dist.new_group(backend=order["backend"], timeout=timeout)
        self._dist.all_reduce(self._torch.zeros(1), group=group)  # connections are made now, with today's settings
        self._groups[order["name"]] = group
        self._say({"made": order["name"]})

    def _warm(self, order: crew.Answer) -> None:
        self._dist.all_reduce(self._torch.zeros(order["elems"]), group=self._groups[order["group"]])
        self._say({"warm": order["group"]})

    def _make(self, order: crew.Answer) -> None:
        settings = self._example.Settings(**order["settings"])
        self._trainers[order["run"]] = self._example.Trainer(settings, self._corpus, self._groups[order["group"]])
        self._say({"made": order["run"]})

    def _rehearse(self, order: crew.Answer) -> None:
        """What the group learns from the step stays, and so do DDP's buckets, which are cut anew in the forward of the second one."""
        trainer = self._trainers[order["run"]]
        before, state = _counted(trainer), copy.deepcopy(trainer.state_dict())
        trainer.step()
        warm_ups, digest = _counted(trainer)["warm_ups"] - before["warm_ups"], trainer.parameters_digest().hex()
        trainer.load_state_dict(state)
        self._say({"rehearsed": order["run"], "warm_ups": warm_ups, "parameters": digest})

    def _train(self, order: crew.Answer) -> None:
        trainer = self._trainers[order["run"]]
        for _ in range(order["steps"]):
            before = _counted(trainer)
            begun = time.monotonic()  # which all ranks of a machine share
            record = asdict(trainer.step())
            times = {"begun": begun, "ended": time.monotonic()}
            after, digest = _counted(trainer), trainer.parameters_digest().hex()
            filled = (after["elems_filled"] - before["elems_filled"]) / max(1, after["elems"] - before["elems"])
            self._say({"run": order["run"], "record": record, "filled": filled, "parameters": digest, **times})
        self._say({"trained": order["run"]})

    def _validate(self, order: crew.Answer) -> None:
        self._say({"run": order["run"], "val_loss": self._trainers[order["run"]].validation_loss()})

    def close(self) -> None:
        """Leaves the group."""
        import torch.distributed as dist

        dist.destroy_process_group()


def _counted(trainer: Any) -> dict[str, int]:
    """Of all calls of a trainer's group so far: elements of results, those that were filled in, exact calls to warm up. Zeros of gloo."""
    names = ("elems", "elems_filled", "warm_ups")
    if trainer.settings.backend != "gradwire":
        return dict.fromkeys(names, 0)
    import gradwire.torch

    calls = gradwire.torch.stats(trainer.group)["group"]["calls"]
    return {name: sum(call[name] for call in calls) for name in names}


def main() -> None:
    """Argument: the examples' folder."""
    crew.serve(lambda say: Worker(sys.argv[1], say))


if __name__ == "__main__":
    main()
