"""One rank of a group that goes on without lost ranks; see test_going_on.py. Without torch, whose import would cost most of the time.

Every step makes three all-reduces at once and a barrier. Each result is checked against the reference mean over the ranks
that its report announces (of the tolerant one each element against the means over some of them), and the announcements are
written down, so that those of all ranks can be compared.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import numpy as np
from gradwire.errors import GradwireError, NotMemberError, PeerLostError

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VICTIMS = [int(rank) for rank in os.environ["GRADWIRE_TEST_VICTIMS"].split(",")]
SIGNAL = signal.Signals[os.environ["GRADWIRE_TEST_SIGNAL"]]
PHASE = os.environ["GRADWIRE_TEST_PHASE"]
STEPS, LOST_AT = 8, 3
# Divisible by all numbers of ranks, so that every mean of multiples is exact.
UNIT = 60
SIZES = (1_000, 400_000, 30_000)
# A woken rank is told at once; if not, the test says so.
WAIT_S = 90.0
# Of all that a rank receives in a step, when it is lost.
MIDDLE = {"reduce": 0.2, "gather": 0.7}


def say(**facts: Any) -> None:
    with (FOLDER / f"events-{RANK}").open("a") as file:
        file.write(json.dumps(facts, default=str) + "\n")


def gradient(rank: int, step: int, bucket: int) -> Any:
    return ((np.arange(SIZES[bucket]) * (rank + 1) + 7 * step + bucket) % 101 * UNIT).astype("float32")


def is_mean(result: Any, values: list[Any], *, tolerant: bool) -> bool:
    """Over all; where some may be missing, each element over some of them."""
    fewest = 1 if tolerant else len(values)
    right = np.zeros(result.shape, bool)
    for count in range(fewest, len(values) + 1):
        for some in itertools.combinations(values, count):
            right |= result == sum(some) / np.float32(count)
    return bool(right.all())


def received(comm: gradwire.Communicator) -> int:
    return sum(peer["bytes_received"] for peer in comm.stats()["group"]["peers"])


def be_lost(phase: str) -> None:
    """The last victim to come ends all of them: ranks that come here seconds apart would be lost one after the other."""
    if phase != PHASE or RANK not in VICTIMS:
        return
    being_written, written = FOLDER / f"lost-{RANK}.new", FOLDER / f"lost-{RANK}"
    being_written.write_text(str(os.getpid()))
    being_written.rename(written)
    files = [FOLDER / f"lost-{rank}" for rank in VICTIMS]
    if not all(file.exists() for file in files):
        signal.pause()
    for file in files:
        if file != written:
            os.kill(int(file.read_text()), SIGNAL)
    os.kill(os.getpid(), SIGNAL)


def step(comm: gradwire.Communicator, number: int) -> None:
    if number == LOST_AT:
        be_lost("idle")
    before = received(comm)
    arrays = [gradient(RANK, number, bucket) for bucket in range(len(SIZES))]
    apart = np.zeros_like(arrays[2])
    operations = [
        comm.all_reduce(arrays[0], "mean", async_op=True),
        comm.all_reduce(arrays[1], "mean", async_op=True, tolerate_loss=True),
        comm.all_reduce(arrays[2], "mean", async_op=True, out=apart),
    ]
    if number == LOST_AT and RANK in VICTIMS and PHASE in MIDDLE:
        expected = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * sum(array.nbytes for array in arrays)
        while received(comm) - before < MIDDLE[PHASE] * expected and not operations[1].is_completed():
            pass
        be_lost(PHASE)
    for bucket, result in enumerate((arrays[0], arrays[1], apart)):
        operations[bucket].wait()
        report = operations[bucket].report()
        say(step=number, bucket=bucket, epoch=report.epoch, members=report.members)
        values = [gradient(rank, number, bucket) for rank in report.members]
        assert is_mean(result, values, tolerant=bucket == 1), (
            f"step {number}, bucket {bucket}: not the mean over {report.members}"
        )
    comm.barrier()


def lose_a_sum(comm: gradwire.Communicator) -> None:
    """A sum that was in flight cannot be finished; the group goes on, and made again it is that of who is left."""
    own = (np.arange(100_000) % 97 * (RANK + 1)).astype("float32")
    array = own.copy()
    be_lost("sum")
    try:
        comm.all_reduce(array)
    except PeerLostError as error:
        say(refused="sum", rank=error.rank)
    assert np.array_equal(array, own), "who makes the call again begins with what it gave"
    operation = comm.all_reduce(array, async_op=True)
    operation.wait()
    members = operation.report().members
    assert np.array_equal(array, np.arange(100_000) % 97 * sum(rank + 1 for rank in members))
    say(step=0, bucket="sum", epoch=operation.report().epoch, members=members)
    try:
        comm.all_gather(array)
    except PeerLostError as error:
        say(refused="all_gather", rank=error.rank)


def run(comm: gradwire.Communicator) -> None:
    if PHASE == "sum":
        return lose_a_sum(comm)
    for number in range(STEPS):
        step(comm, number)
    return None


def attempt(call: Callable[[], None]) -> str:
    try:
        call()
    except NotMemberError as error:
        return f"NotMemberError: {error.outcome}"
    except GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def main() -> None:
    with gradwire.Communicator(timeout=timedelta(seconds=60)) as comm:
        comm.barrier()
        started = time.monotonic()
        ended = attempt(lambda: run(comm))
        say(ended=ended, again=attempt(comm.barrier) if ended != "done" else "", took=time.monotonic() - started)
        say(members=comm.members)
        if SIGNAL == signal.SIGSTOP and RANK not in VICTIMS:  # somebody has to be there when the stopped rank wakes
            wait_for_the_end_of(VICTIMS[0])


def wait_for_the_end_of(rank: int) -> None:
    events, end = FOLDER / f"events-{rank}", time.monotonic() + WAIT_S
    while '"ended"' not in events.read_text() and time.monotonic() < end:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
    sys.exit(0)
