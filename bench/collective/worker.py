"""One rank of the all-reduce benchmark: makes process groups and times single all-reduces in them, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "group", "name": "gloo-cubic", "backend": "gloo"}                   ->  {"made": "gloo-cubic"}
    {"do": "reduce", "variant": {..}, "elems": n, "at": t, "repeat": k}        ->  {"begun", "ended", "wrong", "lost"}

`at` is a time of the machine's monotonic clock, which all ranks share: they start together without a barrier on the network
that is measured. Inputs are chosen so that a result shows which ranks it is the mean of (`check`).
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

from gradwire.lab import crew

GROUP_TIMEOUT = timedelta(seconds=120)
PATTERN = 61  # prime, so that a value at a wrong place of any power-of-two distance shows


class Worker:
    """Process groups and buffers of this rank."""

    def __init__(self, say: Any) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist, self._say = torch, dist, say
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        self._groups: dict[str, Any] = {}
        self._inputs: dict[int, tuple[Any, Any]] = {}

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {"group": self._group, "reduce": self._reduce}[order["do"]](order)

    def _group(self, order: crew.Answer) -> None:
        if order["backend"] == "gradwire":
            import gradwire.torch  # noqa: F401  registers the backend
        group = self._dist.new_group(backend=order["backend"], timeout=GROUP_TIMEOUT)
        self._dist.all_reduce(self._torch.zeros(1), group=group)  # connections are made now, with today's settings
        self._groups[order["name"]] = group
        self._say({"made": order["name"]})

    def _reduce(self, order: crew.Answer) -> None:
        pattern, mine = self._input(order["elems"])
        buffer = mine.clone()
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        begun = time.monotonic()
        lost = 0
        for _ in range(order["repeat"]):
            lost += self._all_reduce(buffer, order["variant"])
        ended = time.monotonic()
        known = order["repeat"] == 1 and not (lost and order["variant"]["hadamard"] == "on")
        wrong = self._check(buffer, pattern, order["variant"]) if known else 0
        self._say({"begun": begun, "ended": ended, "wrong": wrong, "lost": lost / order["elems"]})

    def _input(self, elems: int) -> tuple[Any, Any]:
        """`[elems] float32`: rank r holds 2**r times a small pattern, so a sum tells which ranks are in it."""
        if elems not in self._inputs:
            pattern = (self._torch.arange(elems) % PATTERN + 1).float()
            self._inputs[elems] = (pattern, pattern * float(2 ** self._dist.get_rank()))
        return self._inputs[elems]

    def _all_reduce(self, buffer: Any, variant: dict[str, Any]) -> int:
        """One all-reduce, in place; returns how many of this rank's elements did not count."""
        group = self._groups[variant["group"]]
        if variant["preset"] is None:
            self._dist.all_reduce(buffer, group=group)
            return 0
        import gradwire.torch

        work = gradwire.torch.all_reduce(buffer, preset=variant["preset"], hadamard=variant["hadamard"], group=group)
        return int(work.report().elems_uncounted)

    def _check(self, buffer: Any, pattern: Any, variant: dict[str, Any]) -> int:
        """How many elements are neither the exact result nor, where loss is tolerated, the mean over some of the ranks."""
        torch, world_size = self._torch, self._dist.get_world_size()
        if variant["preset"] is None:
            return int((buffer != pattern * float(2**world_size - 1)).sum())
        subsets = range(1, 2**world_size)
        means = torch.tensor(sorted({subset / subset.bit_count() for subset in subsets}))
        ratio = buffer / pattern
        nearest = means[torch.bucketize(ratio, (means[1:] + means[:-1]) / 2)]
        return int(((ratio - nearest).abs() > 1e-5 * nearest).sum())  # a float32 division or two: 1e-7 each


def main() -> None:
    """Serves until the input ends."""
    crew.serve(lambda say: Worker(say).obey)
    import torch.distributed as dist

    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
