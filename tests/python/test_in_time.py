"""Waits for what a thread does in C++: Ctrl-C ends them, whenever it comes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest
from gradwire._in_time import comes, in_time

# After which it comes all the same: so that who waits in vain comes back too late instead of never.
LIMIT_S = 20.0


class HeardLate(threading.Event):
    """Ctrl-C comes between the interpreter's look for signals and the wait for a lock, so that it is heard when that has ended."""

    def wait(self, timeout: float | None = None) -> bool:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            return super().wait(timeout)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


@pytest.fixture
def event() -> Iterator[HeardLate]:
    event = HeardLate()
    timer = threading.Timer(LIMIT_S, event.set)
    timer.start()
    yield event
    timer.cancel()


def test_a_signal_that_comes_just_before_the_wait_is_heard_before_its_end(event: HeardLate) -> None:
    with pytest.raises(KeyboardInterrupt):
        comes(event, 2 * LIMIT_S)
    assert not event.is_set(), "it waited to the end"


def test_what_comes_in_time_is_told_from_what_does_not() -> None:
    event = threading.Event()
    assert not comes(event, 0.01)
    event.set()
    assert comes(event, 0.0)
    assert comes(event, float("inf"))


def test_what_a_call_returns_and_what_it_raises_is_handed_on() -> None:
    assert in_time(lambda: 3, LIMIT_S) == 3
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, LIMIT_S)
    held = threading.Event()
    with pytest.raises(TimeoutError):
        in_time(held.wait, 0.01)
    held.set()
