"""How long a call is waited for."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
from gradwire import _native
from gradwire._operation import Operation
from gradwire.errors import EngineError, WaitTimeoutError
from pair import ELEMS, pair, receive, send


@pytest.fixture(scope="module")
def groups() -> Iterator[list[_native.Group]]:
    engines, groups = pair()
    yield groups
    for engine in engines:
        engine.stop()


def test_who_waits_for_no_time_or_less_asks_whether_it_has_ended(groups: list[_native.Group]) -> None:
    op = receive(groups[0])
    operation = Operation(op, "receive", None, [])
    for seconds in (0.0, -1e-9, -1.0, -math.inf, math.nan):
        assert not op.wait(seconds)
    for timeout in (timedelta(0), timedelta(seconds=-1), timedelta.min):
        with pytest.raises(WaitTimeoutError) as raised:
            operation.wait(timeout)
        assert raised.value.fields == {"during": "receive", "waited_s": timeout.total_seconds()}
    assert send(groups[1]).wait(60.0)
    operation.wait(timedelta.max)
    for seconds in (-1.0, math.nan, math.inf):
        assert op.wait(seconds), "it has ended"


def test_who_waits_for_longer_than_a_clock_counts_waits_for_the_end(groups: list[_native.Group]) -> None:
    for seconds in (1e18, 1e300, math.inf):
        op = receive(groups[0])
        sent = send(groups[1])
        assert op.wait(seconds)
        assert sent.wait(60.0)


def test_who_interrupts_the_wait_for_a_call_may_wait_for_it_too(groups: list[_native.Group]) -> None:
    op = receive(groups[0])
    assert send(groups[1]).wait(60.0)
    done: list[str] = []

    def second() -> None:
        if done:
            done.append("again")
        else:
            done.append("interrupted")
            operation.wait()  # as a signal handler does, on the thread that it interrupts

    operation = Operation(op, "receive", None, [lambda: done.append("first"), second])
    waits = threading.Thread(target=operation.wait, daemon=True)
    waits.start()
    waits.join(60.0)
    assert not waits.is_alive(), f"it waits for itself, after {done}"
    assert done == ["interrupted", "again", "first"]
    operation.wait()
    assert len(done) == 3, "each step is done once more only where it was interrupted"


def test_what_a_call_has_kept_is_given_back_without_the_lock_that_a_fork_might_copy(
    groups: list[_native.Group],
) -> None:
    """pyo3's own lock, which each method takes that comes next, would be copied held into a child of which the fork then never returns."""
    output = np.zeros(ELEMS, "float32")
    seen = weakref.ref(output)
    op = receive(groups[0], output)
    del output
    sent = send(groups[1])
    limit = time.monotonic() + 60
    while not op.is_done():
        assert time.monotonic() < limit
    assert seen() is not None, "the next method of any native object took it out of pyo3's queue"
    assert op.wait()
    assert seen() is None, "its memory is still taken"
    assert sent.wait(60.0)


def test_what_an_aborted_call_has_kept_is_given_up_by_the_abort() -> None:
    engines, groups = pair()
    try:
        for is_dropped in (False, True):
            output = np.zeros(ELEMS, "float32")
            seen = weakref.ref(output)
            op = receive(groups[0], output)
            del output
            assert seen() is not None
            if is_dropped:
                groups.clear()
            else:
                groups.pop(0).abort()
            assert op.is_done(), "its group has ended"
            assert seen() is None, "its memory is still taken"
    finally:
        for engine in engines:
            engine.stop()


def test_what_a_refused_call_would_have_kept_is_given_up_at_once() -> None:
    engines, groups = pair()
    for engine in engines:
        engine.stop()
    output = np.zeros(ELEMS, "float32")
    seen = weakref.ref(output)
    with pytest.raises(EngineError, match="stopped"):
        receive(groups[0], output)
    del output
    assert seen() is None, "its memory is still taken"


def test_an_engine_that_nobody_has_stopped_ends_while_other_threads_run() -> None:
    """Its network thread is waited for, and says goodbye to a rank that does not answer any more."""
    code = (
        "import sys; from gradwire import _native\n"
        "engine = _native.Engine({'port': 0}); pending = engine.new_group(1, 2, 'pair')\n"
        "print(pending.record(), flush=True)\n"
        "group = pending.join([sys.stdin.readline(), pending.record()], 60.0)\n"
        "print('joined', flush=True); sys.stdin.readline()"
    )
    interval = sys.getswitchinterval()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        engine = _native.Engine({"port": 0})
        pending = engine.new_group(0, 2, "pair")
        print(pending.record(), file=other.stdin, flush=True)
        group = pending.join([pending.record(), other.stdout.readline()], 60.0)
        assert other.stdout.readline() == "joined\n"
        other.kill()
        other.wait()
        begins, ran = threading.Event(), threading.Event()
        thread = threading.Thread(target=lambda: begins.wait() and ran.set())
        thread.start()
        try:
            sys.setswitchinterval(1000.0)  # the other thread runs only while this one is without the GIL
            begins.set()
            del engine
            has_run = ran.is_set()
        finally:
            sys.setswitchinterval(interval)
            thread.join()
    assert has_run, "it held the GIL while it waited"
    del group
