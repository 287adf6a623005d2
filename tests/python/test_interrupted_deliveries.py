"""Deliveries that a signal handler interrupts, which makes calls itself, waits for them, or ends the wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gradwire.torch import _ending, _memory
from gradwire.torch._ending import Ending
from group_calls import A_MOMENT, PATIENCE_S, Calls


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_an_interrupted_delivery_is_made_by_the_next_who_waits(calls: Calls) -> None:
    first, last = calls.start(), calls.start()
    calls.end(0, 1)
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    calls.steps[0] = interrupted
    with pytest.raises(KeyboardInterrupt):
        last.wait()
    last.wait()
    first.wait()
    assert calls.delivered == [0, 1]


@contextmanager
def _handled_by(handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("of_parts", [False, True], ids=["whole", "in parts"])
def test_a_signal_handler_may_wait_for_a_call_while_its_thread_delivers(calls: Calls, of_parts: bool) -> None:
    in_hand, last = calls.start(), calls.start()
    if of_parts:
        looks = iter([False])  # has not ended when it is first asked, and its parts settle one by one
        in_hand.ending.has_come = lambda: next(looks, True)  # type: ignore[method-assign]
        in_hand.ending._parts = [Ending(in_hand.ending.ops, calls._completer, last=lambda: calls._deliver(10))]
    calls.end(0, 1)
    handled: list[list[int]] = []

    def wait_for_another() -> None:
        barrier = calls.start("barrier", buffered=False)
        calls.end(2)
        barrier.wait()
        in_hand.wait()  # of the very call that it interrupts it learns what is known
        assert in_hand.ending in calls.deliveries._owed, "others wait for it still"
        handled.append([*calls.delivered])

    def once() -> None:
        if not handled:
            signal.raise_signal(signal.SIGUSR1)

    calls.steps[10 if of_parts else 0] = once
    with _handled_by(wait_for_another):
        last.wait()
    assert handled == [[]]
    assert calls.delivered == ([10, 0, 1] if of_parts else [0, 1])


def _has_completed(future: Any) -> bool:
    """Within a time in which a call ends. As `wait` of a future does, which knows no time."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    return done.wait(PATIENCE_S)


@pytest.mark.parametrize("of_parts", [False, True], ids=["whole", "in parts"])
def test_a_signal_handler_may_wait_for_futures_of_later_calls_while_its_thread_delivers(
    calls: Calls, of_parts: bool
) -> None:
    in_hand = calls.start()
    if of_parts:
        in_hand.ending._parts = [Ending(in_hand.ending.ops, calls._completer, last=lambda: calls._deliver(10))]
    futures = [calls.start().get_future() for _ in range(3)]
    calls.end(0)
    handled: list[Any] = []

    def wait_for_futures() -> None:
        with calls.ended_meanwhile(1, 2, 3):
            handled.append(all(_has_completed(future) for future in futures))
        handled.append([*calls.delivered])

    calls.steps[10 if of_parts else 0] = lambda: None if handled else signal.raise_signal(signal.SIGUSR1)
    with _handled_by(wait_for_futures):
        in_hand.wait()
    assert handled == [True, [1, 2, 3]]
    assert calls.delivered == [1, 2, 3, *([10, 0] if of_parts else [0])]


def test_a_signal_handler_that_waits_for_the_future_of_the_call_in_hand_is_told_after_the_timeout(calls: Calls) -> None:
    in_hand = calls.start()
    in_hand.timeout_of_call = A_MOMENT
    future = in_hand.get_future()
    told: list[Any] = []

    def wait_for_itself() -> None:
        with calls.ended_meanwhile():
            told.append(_has_completed(future))
        with pytest.raises(RuntimeError, match=r"WaitTimeoutError: .* was interrupted, and waits"):
            future.wait()

    calls.ops[0].resolve(None, None)
    calls.steps[0] = lambda: None if told else signal.raise_signal(signal.SIGUSR1)
    with _handled_by(wait_for_itself):
        in_hand.wait()
    assert (told, calls.delivered) == ([True], [0])


@pytest.mark.parametrize("where", ["making it", "seeing to its completion"])
def test_a_signal_handler_gets_a_future_of_the_call_whose_future_its_thread_asks_for(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    work, asked = calls.start(), list[Any]()
    calls.ops[0].resolve(None, None)
    devices_of, has_come = _memory.devices_of, work.ending.has_come

    def interrupted(here: str) -> None:
        if here == where and not asked:
            asked.append(None)
            asked[0] = work.get_future().done()

    monkeypatch.setattr(_memory, "devices_of", lambda result: (interrupted("making it"), devices_of(result))[1])
    monkeypatch.setattr(work.ending, "has_come", lambda: (interrupted("seeing to its completion"), has_come())[1])
    asker = threading.Thread(target=lambda: asked.append(work.get_future().done()), daemon=True)
    asker.start()
    asker.join(PATIENCE_S)
    assert asked == [True, True]
    assert work.get_future() is work.get_future()
    assert calls.delivered == [0]


def test_a_delivery_that_takes_long_is_not_overtaken(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = calls.start(), calls.start().get_future()
    calls.end(0)
    begun, may_end, looks, has_looked = threading.Event(), threading.Lock(), iter(range(20)), threading.Event()
    copies = eval("lambda lock: lock.acquire()", {"__name__": "gradwire.torch._streams"})
    place_of = _ending._place_outside

    def look(thread: int) -> Any:
        if next(looks, None) is None:
            has_looked.set()
        return place_of(thread)

    def copy() -> None:
        begun.set()
        copies(may_end)

    calls.steps[0] = copy
    may_end.acquire()
    other = threading.Thread(target=first.wait)
    other.start()
    assert begun.wait(PATIENCE_S)
    with monkeypatch.context() as patch, calls.ended_meanwhile(1):
        patch.setattr(_ending, "LOOK_S", 0.001)
        patch.setattr(_ending, "_place_outside", look)
        assert has_looked.wait(PATIENCE_S)
        assert (later.done(), calls.delivered) == (False, [])
        may_end.release()
    other.join()
    assert (later.done(), calls.delivered) == (True, [0, 1])
