"""The thread that runs callbacks, and what happens when one of them holds it up. No engine: operations end when a test says so."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire import _completer
from gradwire._completer import LATE_S, Completer
from gradwire._outbox import LaterOp
from interrupts import at_each_step

# Short, where something is to be held up; longer than any test, where nothing is.
SHORT_S, LONG_S, LIMIT_S = 0.05, 1000.0, 60.0


class Engine:
    """Hands out what a test puts in: a batch of operations, or None once it has stopped."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()

    def next_completions(self) -> list[Any] | None:
        return self.batches.get(timeout=LIMIT_S)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.batches.put(None)


def completer_of(engine: Any, patience_s: float) -> Completer:
    return Completer(engine, sync_futures=False, patience_s=patience_s)


def operations(count: int) -> list[Any]:
    return [SimpleNamespace(id=number, notify=lambda: None) for number in range(count)]


def refuse_to_start(_thread: threading.Thread) -> None:
    """As `Thread.start` of Python 3.12 in a function of `atexit`."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_one_thread_calls_back_in_the_order_of_the_ends(engine: Engine) -> None:
    completer, ops = completer_of(engine, LONG_S), operations(20)
    seen: list[tuple[int, int]] = []
    for op in ops:
        completer.watch([op], lambda number=op.id: seen.append((number, threading.get_ident())))
    engine.batches.put(ops[10:])
    engine.batches.put(ops[:10])
    engine.batches.put(None)
    completer.join(LIMIT_S)
    assert [number for number, _ in seen] == [*range(10, 20), *range(10)]
    assert len({thread for _, thread in seen}) == 1
    assert not any(thread.is_alive() for thread in completer._threads)


def test_a_callback_that_waits_for_those_behind_it_gets_them(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """In the same batch, and in the next one. The thread that it had takes no other callback, even if some are left when it ends."""
    completer, ops = completer_of(engine, SHORT_S), operations(8)
    seen: list[tuple[int, threading.Thread]] = []
    last = threading.Event()

    def wait_for_the_last() -> None:
        assert completer.is_current_thread()
        seen.append((0, threading.current_thread()))
        engine.batches.put(ops[3:])
        assert last.wait(LIMIT_S)
        assert completer.is_current_thread()

    def end_the_wait() -> None:
        last.set()
        seen[0][1].join(LIMIT_S)

    completer.watch([ops[0]], wait_for_the_last)
    for op in ops[1:6]:
        completer.watch([op], lambda number=op.id: seen.append((number, threading.current_thread())))
    completer.watch([ops[6]], end_the_wait)
    completer.watch([ops[7]], lambda: seen.append((7, threading.current_thread())))
    engine.batches.put(ops[:3])
    assert last.wait(LIMIT_S)
    engine.batches.put(None)
    completer.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in completer._threads)
    held_up = seen[0][1]
    assert [number for number, _ in seen] == [0, 1, 2, 3, 4, 5, 7]
    assert [number for number, thread in seen if thread is held_up] == [0]
    (warning,) = warnings(caplog)
    assert "GRADWIRE_SYNC_FUTURES=1" in warning
    assert "in wait_for_the_last" in warning


def test_a_finalizer_of_what_a_callback_held_may_wait_for_those_behind_it(engine: Engine) -> None:
    completer, ops = completer_of(engine, SHORT_S), operations(2)
    last, in_time = threading.Event(), queue.SimpleQueue[bool]()

    class Held:
        def __call__(self) -> None:
            pass

        def __del__(self) -> None:
            in_time.put(last.wait(LIMIT_S))

    completer.watch([ops[0]], Held())
    completer.watch([ops[1]], last.set)
    engine.batches.put(ops)
    assert in_time.get(timeout=2 * LIMIT_S)
    engine.batches.put(None)
    completer.join(LIMIT_S)


def test_each_of_several_such_callbacks_is_followed_and_one_warning_is_enough(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    completer, ops = completer_of(engine, SHORT_S), operations(4)
    ended = [threading.Event() for _ in ops]

    def wait_for_the_next(number: int) -> None:
        if number < 3:
            assert ended[number + 1].wait(LIMIT_S)
        ended[number].set()

    for op in ops:
        completer.watch([op], lambda number=op.id: wait_for_the_next(number))
    engine.batches.put(ops)
    assert ended[0].wait(LIMIT_S)
    assert len(warnings(caplog)) == 1


def test_a_signal_handler_that_interrupts_who_watches_may_wait_for_a_callback(engine: Engine) -> None:
    completer, called = completer_of(engine, LONG_S), threading.Event()

    class Interrupted:
        notify = staticmethod(lambda: None)

        @property
        def id(self) -> int:
            engine.batches.put(operations(1))
            assert called.wait(LIMIT_S)
            return 1

    completer.watch(operations(1), called.set)
    interrupted: Any = Interrupted()
    completer.watch([interrupted], lambda: None)


def test_a_callback_that_never_ends_keeps_neither_the_others_nor_the_end(engine: Engine) -> None:
    completer, ops = completer_of(engine, SHORT_S), operations(2)
    never, called = threading.Event(), threading.Event()
    completer.watch([ops[0]], lambda: never.wait(LIMIT_S))
    completer.watch([ops[1]], called.set)
    engine.batches.put(ops)
    assert called.wait(LIMIT_S)
    engine.batches.put(None)
    completer.join(SHORT_S)
    never.set()
    completer.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in completer._threads)


def test_what_is_watched_once_the_engine_has_stopped_is_called_back_all_the_same(engine: Engine) -> None:
    completer, ops = completer_of(engine, LONG_S), operations(2)
    called: queue.SimpleQueue[str] = queue.SimpleQueue()
    completer.watch([ops[0]], lambda: called.put("before"))
    engine.batches.put([ops[0]])
    engine.batches.put(None)
    completer.join(LIMIT_S)
    completer.watch([ops[1]], lambda: called.put("after"))
    completer.watch(ops, lambda: called.put("both"))
    assert called.get(timeout=LIMIT_S) == "before"
    assert {called.get(timeout=LIMIT_S) for _ in range(2)} == {"after", "both"}


def test_who_interrupts_that_at_any_step_may_watch_too_and_wait_for_the_callback(engine: Engine) -> None:
    completer, ops = completer_of(engine, LONG_S), operations(1)
    engine.batches.put(None)
    completer.start()
    completer.join(LIMIT_S)
    called: queue.SimpleQueue[str] = queue.SimpleQueue()

    def interrupt() -> None:
        completer.watch(ops, lambda: called.put("interrupts"))
        assert called.get(timeout=LIMIT_S)

    for _ in at_each_step(lambda: completer.watch(ops, lambda: called.put("is interrupted")), interrupt, (_completer,)):
        assert called.get(timeout=LIMIT_S)
    assert called.get(timeout=LIMIT_S) == "is interrupted"
    assert called.empty()


def test_what_is_watched_just_as_the_engine_stops_is_called_back_all_the_same() -> None:
    called = threading.Event()

    class Stopping(Engine):
        def next_completions(self) -> None:
            completer.watch(operations(1), called.set)

    completer = completer_of(Stopping(), LONG_S)
    completer.start()
    assert called.wait(LIMIT_S)
    completer.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in completer._threads)


def test_where_no_thread_starts_any_more_the_caller_calls_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter ends, of a call that never came to the engine, and of one that the engine was stopped in."""
    completer, (in_flight,) = completer_of(engine, LONG_S), operations(1)
    dropped, called = LaterOp(), []
    completer.watch([dropped], lambda: called.append("dropped"))
    completer.watch([in_flight], lambda: called.append("in flight"))
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    dropped.resolve(None)
    assert called == ["dropped"]
    engine.batches.put(None)
    completer.join(LIMIT_S)
    assert called == ["dropped", "in flight"]


def test_who_looks_too_late_was_stopped_too_and_looks_again(engine: Engine) -> None:
    completer = completer_of(engine, 3.0)
    assert completer._pause_s(100.0) is None
    completer._began_s, completer._is_running = 100.0, True
    assert [completer._pause_s(now_s) for now_s in (100.5, 102.0, 103.0, 103.0 + LATE_S / 2)] == [2.5, 1.0, 0.0, 0.0]
    assert completer._pause_s(200.0) == 3.0
    assert [completer._pause_s(now_s) for now_s in (201.0, 203.0)] == [2.0, 0.0]
    completer._is_running = False
    assert [completer._pause_s(now_s) for now_s in (202.0, 203.0, 300.0)] == [1.0, None, None]


class Recorded(threading.Condition):
    """Says how long each wait may last."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.waits: queue.SimpleQueue[float | None] = queue.SimpleQueue()

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.put(timeout)
        return super().wait(timeout)


def test_many_callbacks_wake_the_one_who_looks_once(engine: Engine) -> None:
    completer, ops = completer_of(engine, LONG_S), operations(50)
    completer._changed = recorded = Recorded(completer._lock)
    for op in ops:
        completer.watch([op], lambda: time.sleep(0.001))  # in which it could be woken
        engine.batches.put([op])
    engine.batches.put(None)
    completer.join(LIMIT_S)
    waits = [recorded.waits.get() for _ in range(recorded.waits.qsize())]
    pause = pytest.approx(LONG_S, abs=LIMIT_S)
    # It may come to look when all is over already.
    assert waits in ([None, pause], [pause], [None], [])


def test_nobody_looks_once_no_callback_runs_any_more(engine: Engine) -> None:
    completer, ops = completer_of(engine, SHORT_S), operations(3)
    completer._changed = recorded = Recorded(completer._lock)

    def stay_until_somebody_looks() -> None:
        while (left_s := recorded.waits.get(timeout=LIMIT_S)) is None:
            pass
        assert left_s <= SHORT_S
        seen.set()

    for op in ops:
        seen = threading.Event()
        completer.watch([op], stay_until_somebody_looks)
        engine.batches.put([op])
        assert seen.wait(LIMIT_S)
        while recorded.waits.get(timeout=LIMIT_S) is not None:
            pass
