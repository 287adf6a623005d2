"""One rank of the security benchmark: an engine in clear and one that seals, and all-reduces in their groups, as ordered.

Orders and their answers (see `gradwire.lab.crew`):

    {"do": "engine", "security": s, "ranks": n}             ->  {"record": "..."}
    {"do": "join", "security": s, "records": [..]}          ->  {"cipher": name or null}
    {"do": "reduce", "security": s, "elems": n, "at": t}    ->  {"begun", "ended", "right"}

Without torch. `at` is a time of the machine's monotonic clock, which all ranks share.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from typing import Any

from gradwire import _native
from gradwire.lab import crew

JOIN_TIMEOUT_S = CALL_TIMEOUT_S = 120.0
FLOAT32, SUM = 1, 0  # codes of gradwire_collectives


class Worker:
    """Engines and groups of this rank, by `off` and `on`."""

    def __init__(self, say: Any) -> None:
        self._say = say
        self._rank = int(os.environ["RANK"])
        self._engines: dict[str, _native.Engine] = {}
        self._pending: dict[str, _native.PendingGroup] = {}
        self._groups: dict[str, _native.Group] = {}

    def obey(self, order: crew.Answer) -> None:
        """Carries one order out and answers it."""
        {"engine": self._engine, "join": self._join, "reduce": self._reduce}[order["do"]](order)

    def _engine(self, order: crew.Answer) -> None:
        security = order["security"]
        self._engines[security] = _native.Engine({"port": 0, "security": security})
        self._pending[security] = self._engines[security].new_group(self._rank, order["ranks"], security)
        self._say({"record": self._pending[security].record()})

    def _join(self, order: crew.Answer) -> None:
        group = self._pending.pop(order["security"]).join(order["records"], JOIN_TIMEOUT_S)
        self._groups[order["security"]] = group
        self._say({"cipher": group.stats()["security"]["cipher"]})

    def _reduce(self, order: crew.Answer) -> None:
        elems, ranks = order["elems"], order["ranks"]
        values = array("f", [self._rank + 1.0]) * elems
        address, _ = values.buffer_info()
        memory = (address, elems * values.itemsize)
        time.sleep(max(0.0, order["at"] - time.monotonic()))
        begun = time.monotonic()
        op = self._groups[order["security"]].submit(
            {
                "kind": "all_reduce",
                "input": memory,
                "output": memory,
                "timeout_s": CALL_TIMEOUT_S,
                "keep": [values],
                "dtype": FLOAT32,
                "reduce": SUM,
            }
        )
        op.wait(CALL_TIMEOUT_S)
        ended = time.monotonic()
        if (error := op.error()) is not None:
            raise error
        right = values.tobytes() == (array("f", [ranks * (ranks + 1) / 2]) * elems).tobytes()
        self._say({"begun": begun, "ended": ended, "right": right})

    def close(self) -> None:
        """Leaves every group."""
        for security, engine in self._engines.items():
            if security in self._groups:
                self._groups[security].leave(1.0)
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
