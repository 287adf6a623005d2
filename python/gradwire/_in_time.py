"""Calls into C++ that wait there for long, and in which no signal is heard: torch's Stores while they are opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_Found = TypeVar("_Found")


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

    threading.Thread(target=run, name="gradwire-in-time", daemon=True).start()
    if not ended.wait(timeout_s):
        raise TimeoutError
    if failed:
        raise failed[0]
    return found[0]
