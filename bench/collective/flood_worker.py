"""One rank of the flood benchmark: a step computes for a while and then all-reduces, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "step", "compute_ms": c, "elems": n, "at": t}  ->  {"begun", "ended", "right"}
    {"do": "look"}                                        ->  {"resident_kb", "refused"}

`at` is a time of the machine's monotonic clock, which all ranks share. `refused` counts the datagrams that were nobody's.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from gradwire import Communicator
from gradwire.bench.collectives import values, weight, weight_of_all
from gradwire.lab import crew

REFUSED = ("datagrams_unknown", "datagrams_not_authentic", "datagrams_replayed", "datagrams_invalid")


class Worker:
    """The communicator of this rank."""

    def __init__(self, say: Any) -> None:
        self._say = say
        self._communicator = Communicator()
        self._steps = 0

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {"step": self._step, "look": self._look}[order["do"]](order)

    def _step(self, order: crew.Answer) -> None:
        elems, ranks = order["elems"], self._communicator.world_size
        # Other values than in the steps before: what comes late from one of those shows.
        self._steps, step = self._steps + 1, self._steps
        gradient = np.frombuffer(values(elems, step, weight(self._communicator.rank, ranks)), dtype=np.float32)
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        begun = time.monotonic()
        _compute(order["compute_ms"] / 1e3)
        self._communicator.all_reduce(gradient)
        ended = time.monotonic()
        sums = np.frombuffer(values(elems, step, weight_of_all(ranks)), dtype=np.float32)
        self._say({"begun": begun, "ended": ended, "right": bool((gradient == sums).all())})

    def _look(self, _: crew.Answer) -> None:
        counters = self._communicator.stats()["engine"]
        refused = {name: counters[name] for name in REFUSED if name in counters}
        self._say({"resident_kb": _resident_kb(), "refused": refused})

    def close(self) -> None:
        """Leaves the group."""
        self._communicator.close()


def _compute(seconds: float) -> None:
    """Keeps a core busy, as a model does."""
    end = time.monotonic() + seconds
    matrix = np.eye(64, dtype=np.float32)
    while time.monotonic() < end:
        matrix = matrix @ matrix


def _resident_kb() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def main() -> None:
    """Serves until the input ends."""
    crew.serve(Worker)


if __name__ == "__main__":
    main()
