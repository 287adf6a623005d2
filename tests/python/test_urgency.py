"""The network thread goes before threads that compute, where the system lets it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from gradwire import _native

STEPS = 3


def may_be_more_urgent() -> bool:
    """Whether a thread of this process may do what the engine's does."""
    allowed: list[bool] = []

    def probe() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - STEPS)
        except PermissionError:
            allowed.append(False)
        else:
            allowed.append(True)

    thread = threading.Thread(target=probe)
    thread.start()
    thread.join()
    return allowed[0]


def network_threads() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            if (task / "comm").read_text().strip() == "gradwire-net":
                found.add(int(task.name))
        except FileNotFoundError:
            continue
    return found


def niceness(thread: int, expected: int) -> int:
    """Of a thread that has perhaps only just started."""
    end = time.monotonic() + 20
    while (found := os.getpriority(os.PRIO_PROCESS, thread)) != expected and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("steps", [0, STEPS])
def test_the_network_thread_is_more_urgent_than_the_process_and_nothing_else_is(steps: int) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    before = network_threads()
    engine = _native.Engine({"port": 0, "urgency": steps})
    try:
        end = time.monotonic() + 20
        while not (new := network_threads() - before) and time.monotonic() < end:
            time.sleep(0.001)
        expected = max(-20, own - steps) if steps and may_be_more_urgent() else own
        assert niceness(new.pop(), expected) == expected
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
    finally:
        engine.stop()
