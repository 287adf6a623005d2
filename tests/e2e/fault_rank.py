"""One rank of a cell of the fault matrix; see fault_cells.py. Without torch, whose import would cost most of the time.

What happens to it is written as lines of JSON to `events-RANK`, with the time of the clock that all processes share.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire._joining
import numpy as np
from gradwire.errors import GradwireError

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FAULT, PHASE = os.environ["GRADWIRE_TEST_FAULT"], os.environ["GRADWIRE_TEST_PHASE"]
LIMIT_S = float(os.environ["GRADWIRE_TEST_LIMIT_S"])
GOES_ON = os.environ["GRADWIRE_ON_PEER_LOSS"] == "continue"
TIMEOUT = timedelta(seconds=float(os.environ["GRADWIRE_TEST_TIMEOUT_S"]))
VICTIM = 1
# At the lab's 50 Mbit/s a stage takes a second: time enough for a rank that a busy machine does not let run to find itself in the middle
# of it. Faults that are there all the time need no such middle.
ELEMS, ELEMS_OF_ALL = 2_400_000, 1_000_000
# Of all that a rank receives in an all-reduce, at which it is in the middle of a stage.
MIDDLE = {"reduce": 0.2, "gather": 0.65}
# At which it is no longer: the machine has not let it run for so long that this is another cell, to be tried again.
MISSED = {"reduce": 0.45, "gather": 0.95}
POLL_S = 0.01
# Of what has arrived, which costs more to ask for.
LOOK_S = 0.1
# Datagrams damaged or doubled, as the engine counts them: what was damaged does not open, what comes twice is a replay.
TRACES = {"corrupt": "datagrams_not_authentic", "duplicate": "datagrams_replayed"}
# Shares of what a rank receives in an all-reduce, of which even with what comes twice it is in the reduce stage up to the first, and in
# the gather stage from the second on.
REDUCED, GATHERED = 0.45, 0.7
# Groups that are formed and left before the one that is used, where all datagrams are at risk: leaving one takes so few of them that none
# may be hit.
SHORT_LIVES = 12


def say(event: str, **facts: Any) -> None:
    with (FOLDER / f"events-{RANK}").open("a") as file:
        file.write(json.dumps({"event": event, "at": time.monotonic(), **facts}, default=str) + "\n")


def publish(name: str) -> None:
    """A file that others wait for, with the time in it; never half written."""
    (FOLDER / f".{name}").write_text(str(time.monotonic()))
    (FOLDER / f".{name}").rename(FOLDER / name)


def published(name: str) -> float:
    """Waits for it; whoever leads the cell ends this process if it never comes."""
    while not (FOLDER / name).exists():
        time.sleep(POLL_S)
    return float((FOLDER / name).read_text())


def exhaust_descriptors() -> None:
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4,) * 2)
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        os.close(held[0])  # `say` needs one


def fill_disk() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    os.environ["PYTHONUNBUFFERED"] = "1"


def step_clock() -> None:
    before = time.time()
    ctypes.CDLL(None).step_clock(ctypes.c_long(-3600))
    assert time.time() < before - 3000, "the clock did not step: what this cell shows would be nothing"


OWN: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "clock step": step_clock,
    "disk full": fill_disk,
    "descriptors": exhaust_descriptors,
}


def reach(phase: str, *, others_wait: bool) -> None:
    """In the cell's phase the victim suffers its fault."""
    if phase != PHASE:
        return
    publish(f"here-{RANK}")
    if RANK == VICTIM:
        for rank in range(WORLD_SIZE if others_wait else 0):
            published(f"here-{rank}")
        publish("ready")
        if FAULT in OWN:
            publish("fault")
            OWN[FAULT]()
        elif phase in MIDDLE:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the fault is there: the stage would be over
    if others_wait:
        published("fault")


def attempt(name: str, call: Callable[[], Any]) -> Any:
    """Calls, writes down how it ended, and ends this rank if that was not well."""
    started = time.monotonic()
    try:
        result = call()
    except GradwireError as error:
        facts = {"error": type(error).__name__, "fields": error.fields, "text": str(error)}
        say("ended", call=name, took=time.monotonic() - started, **facts)
        leave()
        sys.exit(0)
    say("ended", call=name, took=time.monotonic() - started, error=None, **(result if isinstance(result, dict) else {}))
    return result


def received(comm: gradwire.Communicator) -> int:
    return sum(peer["bytes_received"] for peer in comm.stats()["group"]["peers"])


def hits() -> int:
    """Datagrams that the fault has damaged or doubled, so far, and that this process has received."""
    if FAULT not in TRACES:
        return 0
    engine = COMM[0].stats()["engine"] if COMM else gradwire.stats()["engine"]
    return int(engine.get(TRACES[FAULT], 0))


def tell_hits(phase: str, since: int) -> int:
    """A phase in which the fault is there all the time is over; how many were hit until now."""
    count = hits()
    say("hits", phase=phase, count=count - since)
    return count


class Watch:
    """Over an all-reduce in flight: who is left, how long nothing arrived, and in which stage the fault hit."""

    def __init__(self, comm: gradwire.Communicator, before: int, expected: float) -> None:
        self.comm, self.before, self.expected = comm, before, expected
        self.arrived, self.since, self.longest = received(comm), time.monotonic(), 0.0
        self.looks_at = 0.0
        self.are_all = True
        # Hits until the reduce stage was nearly over, and until the gather stage had begun.
        self.reduced = self.gathers = hits()

    def until_it_ends(self, operation: gradwire.communicator.Operation) -> None:
        while not operation.is_completed():
            self.look()
            time.sleep(POLL_S)
        self.look()
        self.longest = max(self.longest, time.monotonic() - self.since)

    def look(self) -> None:
        now = time.monotonic()
        if GOES_ON and self.are_all and len(self.comm.members) < WORLD_SIZE:
            say("members", members=self.comm.members)
            self.are_all, self.since = False, now  # the reduction is made again
        if now < self.looks_at:
            return
        self.looks_at = now + (POLL_S if PHASE == "all" else LOOK_S)
        arrived = received(self.comm)
        if arrived != self.arrived:  # of another epoch it is counted anew
            self.longest = max(self.longest, now - self.since)
            self.arrived, self.since = arrived, now
        share = (arrived - self.before) / self.expected
        if share <= REDUCED:
            self.reduced = hits()
        if share < GATHERED:
            self.gathers = hits()


def reduce(comm: gradwire.Communicator, elems: int) -> dict[str, float]:
    """An all-reduce whose result is checked; within it the stages are reached.

    Returns:
        Of one that takes a while, the longest time in which nothing arrived.
    """
    array = np.arange(elems, dtype="float32") % 1000 + RANK
    expected = 2 * (WORLD_SIZE - 1) / WORLD_SIZE * array.nbytes
    before, hits_before = received(comm), hits()
    operation = comm.all_reduce(array, "mean" if GOES_ON else "sum", async_op=True)
    if PHASE in MIDDLE and RANK == VICTIM and elems == ELEMS:
        while received(comm) - before < MIDDLE[PHASE] * expected and not operation.is_completed():
            time.sleep(0.001)
        if received(comm) - before > MISSED[PHASE] * expected or operation.is_completed():
            publish("missed")
        reach(PHASE, others_wait=False)
    watch = Watch(comm, before, expected)
    watch.until_it_ends(operation)
    if elems == ELEMS_OF_ALL:
        say("hits", phase="reduce", count=watch.reduced - hits_before)
        tell_hits("gather", watch.gathers)
    operation.wait()
    base = np.arange(elems, dtype="float32") % 1000
    if GOES_ON:
        members = operation.report().members
        say("result", members=members)
        assert np.allclose(array, base + sum(members) / len(members)), f"not the mean over {members}"
    else:
        assert np.array_equal(array, WORLD_SIZE * base + sum(range(WORLD_SIZE))), "a wrong sum"
    return {"stalled_s": watch.longest} if elems >= ELEMS_OF_ALL else {}


COMM: list[gradwire.Communicator] = []


def leave() -> None:
    before, started = hits(), time.monotonic()
    for comm in COMM:
        comm.close()
    took = time.monotonic() - started
    COMM.clear()
    if PHASE == "all":
        tell_hits("shutdown", before)
    say("closed", took=took)


def form(life: int = 0) -> gradwire.Communicator:
    """The group of all, each life of it at an address of its own: who is quick may find the board of the last one, which is just closed."""
    host, _, port = os.environ["GRADWIRE_RENDEZVOUS"].rpartition(":")
    rendezvous = f"{host}:{int(port) + life}"
    before = hits()
    COMM.append(attempt("bootstrap", lambda: gradwire.Communicator(rendezvous, timeout=TIMEOUT)))
    if PHASE == "all":
        tell_hits("bootstrap", before)
    return COMM[0]


def main() -> None:
    form_group = gradwire._joining.form_group

    def form_group_here(*arguments: Any) -> Any:
        reach("bootstrap", others_wait=True)
        return form_group(*arguments)

    gradwire._joining.form_group = form_group_here
    for life in range(SHORT_LIVES if PHASE == "all" else 0):
        form(1 + life)
        leave()
    comm = form()
    attempt("reduction", lambda: reduce(comm, ELEMS if PHASE in MIDDLE else ELEMS_OF_ALL if PHASE == "all" else 1000))
    reach("idle", others_wait=True)
    if PHASE == "idle":  # nothing is called until everybody must have found out
        time.sleep(max(0.0, published("fault") + LIMIT_S - time.monotonic()))
        if GOES_ON:
            say("members", members=comm.members)
    elif PHASE == "all":
        before = hits()
        time.sleep(LIMIT_S)
        tell_hits("idle", before)
    attempt("barrier", comm.barrier)
    attempt("small reduction", lambda: reduce(comm, 1000))
    reach("shutdown", others_wait=True)
    leave()


if __name__ == "__main__":
    main()
