"""One rank of a benchmark of engines: one for each configuration, and all-reduces in their groups, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "engine", "name": e, "config": {..}, "ranks": n}    ->  {"record": "..."}
    {"do": "join", "name": e, "records": [..]}                 ->  {"joined": e, "cipher": name or null}
    {"do": "reduce", "name": e, "ranks": n, "elems": k, "algorithm": a or null, "at": t}  ->  {"begun", "ended", "wrong"}

What is configured belongs to an engine, so a process has one of each; without torch, which eight processes need not load. `at` is
a time of the machine's monotonic clock, which all ranks share.
"""

from __future__ import annotations

import os
import time
from typing import Any

from gradwire import _native
from gradwire.bench.collectives import values, weight, weight_of_all
from gradwire.lab import crew

JOIN_TIMEOUT_S = CALL_TIMEOUT_S = 120.0
FLOAT32, SUM = 1, 0  # codes of gradwire_collectives


class Worker:
    """Engines and groups of this rank, by name."""

    def __init__(self, say: Any) -> None:
        self._say = say
        self._rank = int(os.environ["RANK"])
        self._engines: dict[str, _native.Engine] = {}
        self._pending: dict[str, _native.PendingGroup] = {}
        self._groups: dict[str, _native.Group] = {}
        self._calls = 0  # every rank is in all of them

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {"engine": self._engine, "join": self._join, "reduce": self._reduce}[order["do"]](order)

    def _engine(self, order: crew.Answer) -> None:
        name = order["name"]
        self._engines[name] = _native.Engine({"port": 0, **order["config"]})
        self._pending[name] = self._engines[name].new_group(self._rank, order["ranks"], name)
        self._say({"record": self._pending[name].record()})

    def _join(self, order: crew.Answer) -> None:
        name = order["name"]
        self._groups[name] = self._pending.pop(name).join(order["records"], JOIN_TIMEOUT_S)
        self._say({"joined": name, "cipher": self._groups[name].stats()["security"]["cipher"]})

    def _reduce(self, order: crew.Answer) -> None:
        elems, ranks = order["elems"], order["ranks"]
        # Other values than in the calls before: what comes late from one of those shows.
        self._calls, number = self._calls + 1, self._calls
        mine = values(elems, number, weight(self._rank, ranks))
        address, _ = mine.buffer_info()
        memory = (address, elems * mine.itemsize)
        call = {
            "kind": "all_reduce",
            "input": memory,
            "output": memory,
            "timeout_s": CALL_TIMEOUT_S,
            "keep": [mine],
            "dtype": FLOAT32,
            "reduce": SUM,
        }
        if order["algorithm"] is not None:
            call["algorithm"] = order["algorithm"]
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        begun = time.monotonic()
        op = self._groups[order["name"]].submit(call)
        op.wait(CALL_TIMEOUT_S)
        ended = time.monotonic()
        if (error := op.error()) is not None:
            raise error
        sums = values(elems, number, weight_of_all(ranks))
        wrong = 0 if mine.tobytes() == sums.tobytes() else sum(map(float.__ne__, mine, sums))
        self._say({"begun": begun, "ended": ended, "wrong": wrong})

    def close(self) -> None:
        """Leaves every group."""
        for name, engine in self._engines.items():
            if name in self._groups:
                self._groups[name].leave(1.0)
            engine.stop()


def main() -> None:
    """Serves until the input ends."""
    crew.serve(Worker)


if __name__ == "__main__":
    main()
