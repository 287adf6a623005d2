"""One rank of the incast benchmark: an engine for each incast factor, and all-reduces in its group, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "engine", "incast": i, "rank": r, "ranks": n}        ->  {"record": "..."}
    {"do": "join", "incast": i, "records": [..]}                ->  {"joined": i}
    {"do": "reduce", "incast": i, "elems": n, "at": t}          ->  {"begun", "ended", "wrong"}

The incast factor belongs to an engine, so a process has one of each; without torch, which eight processes need not load. `at` is
a time of the machine's monotonic clock, which all ranks share.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import Any

from gradwire import _native
from gradwire.lab import crew

JOIN_TIMEOUT_S = CALL_TIMEOUT_S = 120.0
FLOAT32, SUM, TRANSPOSE = 1, 0, 2  # codes of gradwire_collectives


class Worker:
    """Engines and groups of this rank, by incast factor."""

    def __init__(self, say: Any) -> None:
        self._say = say
        self._rank = int(os.environ["RANK"])
        self._engines: dict[int, _native.Engine] = {}
        self._pending: dict[int, _native.PendingGroup] = {}
        self._groups: dict[int, _native.Group] = {}

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {"engine": self._engine, "join": self._join, "reduce": self._reduce}[order["do"]](order)

    def _engine(self, order: crew.Answer) -> None:
        incast = order["incast"]
        self._engines[incast] = _native.Engine({"port": 0, "incast": incast})
        self._pending[incast] = self._engines[incast].new_group(self._rank, order["ranks"], f"incast {incast}")
        self._say({"record": self._pending[incast].record()})

    def _join(self, order: crew.Answer) -> None:
        incast = order["incast"]
        self._groups[incast] = self._pending.pop(incast).join(order["records"], JOIN_TIMEOUT_S)
        self._say({"joined": incast})

    def _reduce(self, order: crew.Answer) -> None:
        elems, ranks = order["elems"], order["ranks"]
        values = (ctypes.c_float * elems)(*([float(self._rank + 1)] * elems))
        memory = (ctypes.addressof(values), ctypes.sizeof(values))
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        begun = time.monotonic()
        op = self._groups[order["incast"]].submit(
            {
                "kind": "all_reduce",
                "input": memory,
                "output": memory,
                "timeout_s": CALL_TIMEOUT_S,
                "keep": [values],
                "dtype": FLOAT32,
                "reduce": SUM,
                "algorithm": TRANSPOSE,
            }
        )
        op.wait(CALL_TIMEOUT_S)
        ended = time.monotonic()
        if (error := op.error()) is not None:
            raise error
        wrong = sum(value != ranks * (ranks + 1) / 2 for value in values)
        self._say({"begun": begun, "ended": ended, "wrong": wrong})

    def close(self) -> None:
        """Leaves every group."""
        for incast, engine in self._engines.items():
            if incast in self._groups:
                self._groups[incast].leave(1.0)
            engine.stop()


def main() -> None:
    """Serves until the input ends."""
    workers: list[Worker] = []

    def make(say: Any) -> Any:
        workers.append(Worker(say))
        return workers[0].obey

    crew.serve(make)
    workers[0].close()


if __name__ == "__main__":
    sys.exit(main())
