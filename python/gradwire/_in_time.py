"""Calls into C++ that wait there for long, and in which no signal is heard: torch's Stores while they are opened."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_Found = TypeVar("_Found")
# Ctrl-C is heard after so long, whenever it comes.
HEARS_S = 0.5
# Who is interrupted waits so long for the answer that is under way: he may end the process at once, and a thread that comes back from C++
# while the interpreter ends aborts it.
LET_GO_S = 0.5


def comes(event: threading.Event, timeout_s: float) -> bool:
    """Whether it comes in time, in seconds. It waits in turns.

    A signal that comes just between the interpreter's look for one and its wait for a lock ends no wait: it is heard after this turn.
    """
    end = time.monotonic() + timeout_s
    while not event.wait(max(0.0, min(HEARS_S, end - time.monotonic()))):
        if time.monotonic() >= end:
            return False
    return True


@contextmanager
def letting_go(ended: threading.Event) -> Iterator[None]:
    """Around a wait for what a thread does in C++ until this: who is interrupted gives it a moment to come back."""
    try:
        yield
    except BaseException:
        ended.wait(LET_GO_S)
        raise


def in_time(call: Callable[[], _Found], timeout_s: float) -> _Found:
    """What `call` returns. It runs on a thread, so that this one answers Ctrl-C and SIGTERM, and keeps the time.

    One that has not ended in time goes on there. The end of the process does not wait for it: its thread is a daemon.

    Args:
        call: should take clearly more or clearly less time than this. What returns just when the interpreter ends may crash it.
        timeout_s: longest wait, in seconds.

    Raises:
        TimeoutError: it has not ended in time. Else what `call` raises.
    """
    found: list[_Found] = []
    failed: list[BaseException] = []
    ended = threading.Event()

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - for who asked
            failed.append(error)
        ended.set()

    with letting_go(ended):
        threading.Thread(target=run, name="gradwire-in-time", daemon=True).start()
        has_ended = comes(ended, timeout_s)
    if not has_ended:
        raise TimeoutError
    if failed:
        raise failed[0]
    return found[0]
