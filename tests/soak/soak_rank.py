"""One rank of the churn soak (soak.py): trains until it is told to end, and joins again whenever it was left out.

Each step takes the mean of gradients that any process can compute, compares it with the reference over the ranks that its report
announces, and writes down who took part and what its state is then.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from gradwire.errors import GradwireError

# The soak itself reads this file for what a step is.
FOLDER = Path(os.environ.get("CHURN_FOLDER", "."))
RANK = int(os.environ.get("RANK", "0"))
ELEMS = 10_000
# Divisible by all numbers of ranks up to 6, so that every mean of multiples is exact.
UNIT = 60
# A step's computation: the cores are for all ranks.
PAUSE_S = 0.03
JOIN_S = 60.0


def gradient(rank: int, step: int) -> Any:
    return ((np.arange(ELEMS) * (rank + 1) + 7 * step) % 101 * UNIT).astype("float32")


def mean_of(members: Any, step: int) -> Any:
    return sum(gradient(rank, step) for rank in members) / np.float32(len(members))


def digest(weights: Any) -> str:
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def say(**facts: Any) -> None:
    with (FOLDER / f"events-{RANK}").open("a") as file:
        file.write(json.dumps({"at": time.monotonic(), **facts}, default=str) + "\n")


def train(comm: gradwire.Communicator) -> None:
    weights, step = np.zeros(ELEMS, "float32"), np.zeros(1, np.int64)
    while True:
        if comm.sync(weights, step):
            say(joined=comm.members, step=int(step[0]), digest=digest(weights))
        end = np.array([(FOLDER / "end").exists()])
        comm.all_reduce(end, "max")
        if end[0]:
            return
        number = int(step[0])
        mean = gradient(RANK, number)
        operation = comm.all_reduce(mean, "mean", async_op=True)
        operation.wait()
        report = operation.report()
        if not np.array_equal(mean, mean_of(report.members, number)):
            say(wrong=number, epoch=report.epoch, members=report.members)
        weights = np.mod(weights + mean, np.float32(1 << 20))
        say(step=number, epoch=report.epoch, members=report.members, digest=digest(weights))
        step += 1
        time.sleep(PAUSE_S)


def main() -> None:
    while not (FOLDER / "ended").exists():
        try:
            with gradwire.Communicator(timeout=timedelta(seconds=JOIN_S)) as comm:
                train(comm)
                say(ended="done", members=comm.members)
                comm.barrier()
                return
        except GradwireError as error:
            say(left=f"{type(error).__name__}: {error}"[:300])
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
    sys.exit(0)
