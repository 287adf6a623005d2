"""One rank of a group that a lost rank joins again; see test_joining_again.py and test_rank_0_comes_back.py. Without torch, whose import
would cost most of the time.

Each step takes the mean of gradients that any process can compute, checks it against the reference over the ranks that its report
announces, and moves the parameters; a digest of them is written down after each step, so that those of all ranks can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import gradwire._boundary
import gradwire._entrance
import gradwire._runtime
import numpy as np
from gradwire.errors import GradwireError, NotMemberError
from lives import wait_for_the_last, wait_for_the_next

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
# Who is killed: rank, life, number of the step, and of the steps that all have made together again.
DEATHS = json.loads(os.environ.get("GRADWIRE_TEST_DEATHS", "[[2, 0, 3, 0]]"))
# Which life of the rank this process is; one that wakes up begins another.
LIVES = [int(os.environ.get("GRADWIRE_TEST_LIFE", "0"))]
CASE = os.environ["GRADWIRE_TEST_CASE"]
ELEMS, STEPS_TOGETHER = 20_000, int(os.environ.get("GRADWIRE_TEST_TOGETHER", "4"))
# A step's computation; the processor is for those who join.
PAUSE_S = 0.02
# Divisible by all numbers of ranks, so that every mean of multiples is exact.
UNIT = 60
STEPS_MAX = 100_000
WAIT_S = 60.0


def say(**facts: Any) -> None:
    with (FOLDER / f"events-{RANK}").open("a") as file:
        file.write(json.dumps({"life": LIVES[-1], "time": time.monotonic(), **facts}, default=str) + "\n")


def gradient(rank: int, step: int) -> Any:
    return ((np.arange(ELEMS) * (rank + 1) + 7 * step) % 101 * UNIT).astype("float32")


def digest(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def be_lost(step: int, together: int) -> None:
    if any(
        (RANK, LIVES[-1]) == (rank, life) and step >= at and together == so_far for rank, life, at, so_far in DEATHS
    ):
        own = FOLDER / f".lost-{RANK}"  # two may be lost at the same step
        wait_for_the_next()
        own.write_text(str(time.monotonic()))
        own.rename(FOLDER / "lost")
        os.kill(os.getpid(), signal.SIGSTOP if CASE == "stopped" else signal.SIGKILL)


def train(comm: gradwire.Communicator) -> None:
    """Until all have trained together again for some steps; who joins begins with nothing."""
    weights, moment, step = np.zeros(ELEMS, "float32"), np.zeros(ELEMS, "float64"), np.zeros(1, np.int64)
    together = np.zeros(1, np.int64)
    while together[0] < STEPS_TOGETHER and step[0] < STEPS_MAX:
        before = comm.stats()["engine"]["datagrams_sent"]
        if comm.sync(weights, moment, step, together):
            sent = comm.stats()["engine"]["datagrams_sent"] - before
            say(joined=comm.members, at=int(step[0]), digest=digest(weights, moment), sent=sent)
        be_lost(int(step[0]), int(together[0]))
        number = int(step[0])
        mean = gradient(RANK, number)
        operation = comm.all_reduce(mean, "mean", async_op=True)
        operation.wait()
        report = operation.report()
        expected = sum(gradient(rank, number) for rank in report.members) / np.float32(len(report.members))
        assert np.array_equal(mean, expected), f"step {number}: not the mean over {report.members}"
        moment += mean
        weights -= mean / np.float32(1024)
        lost = comm.stats()["group"]["epoch"]["lost"] if report.epoch else []
        say(step=number, epoch=report.epoch, members=report.members, lost=lost, digest=digest(weights, moment))
        is_again = report.epoch > 0 and len(report.members) == WORLD_SIZE
        together += int(is_again)
        step += 1
        time.sleep(PAUSE_S)
        if GIVES_UP:
            end = np.array([(FOLDER / "given-up").exists()])
            comm.all_reduce(end, "max")
            together += STEPS_TOGETHER * int(end[0])
    if len(comm.members) == WORLD_SIZE:
        rows = comm.all_gather(np.array([RANK], np.int64)).result
        say(gathered=[] if rows is None else rows.ravel().tolist())


# Cases in which nobody joins for good.
GIVES_UP = CASE in ("wrong secret", "killed while joining")


def join_and_be_killed() -> None:
    """Ends this process where the case says, on its way into the group."""
    cross = gradwire._boundary.Boundary.cross

    def killed(boundary: Any) -> Any:
        cross(boundary)
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_at_the_door(*arguments: Any) -> str:
        answered(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    answered = gradwire._entrance.Door.answered
    if LIVES == [1]:
        gradwire._entrance.Door.answered = killed_at_the_door  # type: ignore[method-assign]
    else:
        gradwire._boundary.Boundary.cross = killed  # type: ignore[method-assign]


def run() -> str:
    timeout = timedelta(seconds=120)
    try:
        with gradwire.Communicator(timeout=timeout) as comm:
            train(comm)
            say(members=comm.members, yields=comm.stats()["engine"]["yields"])
            comm.barrier()
    except NotMemberError as error:
        say(cause=error.cause)
        return f"NotMemberError: {error.outcome}"
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main() -> None:
    wait_for_the_last()
    started = time.monotonic()
    if LIVES[-1] and CASE == "killed":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # fewer cores than ranks, on any machine
    if os.environ["GRADWIRE_PORT"] != "0":  # of all lives: there before the others know that the last one is gone
        gradwire._runtime.runtime()
        say(port=gradwire.stats()["port"])
    if LIVES[-1] and CASE == "killed while joining":
        join_and_be_killed()
    ended = run()
    say(ended=ended, took=time.monotonic() - started)
    if ended.startswith("NotMemberError") and CASE == "stopped":
        LIVES.append(1)
        say(ended=run(), took=time.monotonic() - started)


if __name__ == "__main__":
    main()
    sys.exit(0)
