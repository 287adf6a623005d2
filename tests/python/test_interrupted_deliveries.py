"""Deliveries that a signal handler interrupts, which makes calls itself, waits for them, or ends the wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gradwire.errors import WaitTimeoutError
from gradwire.torch import _memory
from gradwire.torch._ending import Ending
from gradwire.torch._work import GradwireWork
from group_calls import ERROR, PATIENCE_S, Calls


@pytest.fixture
def calls() -> Calls:
    return Calls()


INTERRUPTS = (KeyboardInterrupt(), TimeoutError("the alarm of a step"), ValueError(), WaitTimeoutError("of its own"))


@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=repr)
@pytest.mark.parametrize(
    "ask", [GradwireWork.wait, GradwireWork.get_future, None], ids=["wait", "future", "later call"]
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_a_signal_handler_raises_in_a_delivery_reaches_the_program_and_the_result_comes_later(
    calls: Calls, ask: Any, at: int, interrupt: BaseException
) -> None:
    first, last = calls.start(), calls.start()
    calls.end(0, 1)
    interrupts = [interrupt]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    calls.steps[0] = interrupted
    with pytest.raises(type(interrupt)):
        calls.start() if ask is None else ask(calls.works[at])
    last.wait()
    first.wait()
    assert calls.delivered == [0, 1]


@pytest.mark.parametrize("interrupt", INTERRUPTS, ids=repr)
@pytest.mark.parametrize(
    "ask", [GradwireWork.wait, GradwireWork.get_future, None], ids=["wait", "future", "later call"]
)
@pytest.mark.parametrize("at", [0, 1])
def test_what_a_signal_handler_raises_while_an_error_is_explained_reaches_the_program_and_the_error_comes_later(
    calls: Calls, ask: Any, at: int, interrupt: BaseException
) -> None:
    first, last = calls.start(), calls.start()
    interrupts = [interrupt]

    def explain(error: Exception) -> Exception:
        if interrupts:
            raise interrupts.pop()
        return ValueError(f"explained: {error}")

    first.ending.explain = explain
    calls.end(0, error=ERROR)
    calls.end(1)
    with pytest.raises(type(interrupt)):
        calls.start() if ask is None else ask(calls.works[at])
    last.wait()
    with pytest.raises(ValueError, match=f"explained: {ERROR}"):
        first.wait()
    assert calls.delivered == [1]


def test_what_a_delivery_raises_each_time_is_its_calls_and_holds_up_no_other(calls: Calls) -> None:
    first, last = calls.start(), calls.start()
    calls.end(0, 1)
    calls.steps[0] = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        last.wait()
    last.wait()
    with pytest.raises(ZeroDivisionError):
        first.wait()
    assert calls.delivered == [1]


def test_what_a_delivery_raises_on_a_thread_that_runs_no_signal_handlers_is_for_who_asks_for_that_call(
    calls: Calls,
) -> None:
    first, last = calls.start(), calls.start().get_future()
    calls.steps[0] = lambda: 1 // 0
    with calls.ended_meanwhile(0, 1):
        pass
    assert last.done()
    with pytest.raises(ZeroDivisionError):
        first.wait()
    assert calls.delivered == [1]


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
        with pytest.raises(WaitTimeoutError, match="comes when who asks returns"):
            in_hand.wait()
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


@pytest.mark.parametrize("of_parts", [False, True], ids=["whole", "in parts"])
@pytest.mark.parametrize("in_order", [False, True], ids=["apart", "in order"])
def test_futures_that_a_signal_handler_asks_for_while_its_thread_delivers_complete_on_it(
    calls: Calls, of_parts: bool, in_order: bool
) -> None:
    in_hand, asked = calls.start(), calls.start()
    earlier = asked.get_future()
    if not in_order:
        in_hand.stand_apart()
    if of_parts:
        in_hand.ending._parts = [Ending(in_hand.ending.ops, calls._completer, last=lambda: calls._deliver(10))]
    handled: list[Any] = []

    def ask_for_futures() -> None:
        barrier = calls.start("barrier", buffered=False)
        works = [asked, calls.start(), barrier]
        for op in calls.ops[1:]:
            op.resolve(None, None)  # and the completer, which others hold up, is not told
        handled.append([work.get_future().done() for work in works])
        handled.append([*calls.delivered])

    calls.ops[0].resolve(None, None)
    calls.steps[10 if of_parts else 0] = lambda: None if handled else signal.raise_signal(signal.SIGUSR1)
    with _handled_by(ask_for_futures):
        in_hand.wait()
    assert handled == [[True, True, True], [1, 3]]
    assert calls.delivered == [1, 3, *([10, 0] if of_parts else [0])]
    calls.end()
    assert earlier.done()


def test_so_do_those_of_another_group(calls: Calls) -> None:
    in_hand, handled = calls.start(), list[bool]()

    def ask_for_a_future() -> None:
        others = Calls()
        asked, (op,) = others.start(), others.ops
        op.wait = lambda *_: op.resolve(None, None) is None  # type: ignore[method-assign]
        handled.append(asked.get_future().done())  # the completer may stand at the interrupted result

    calls.end(0)
    calls.steps[0] = lambda: None if handled else signal.raise_signal(signal.SIGUSR1)
    with _handled_by(ask_for_a_future):
        in_hand.wait()
    assert handled == [True]


def test_asking_for_a_future_looks_at_none_of_the_calls_whose_futures_were_asked_for(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    futures = [calls.start().get_future() for _ in range(10)]
    looked_at: list[Ending] = []
    is_in_hand = Ending.is_in_hand
    monkeypatch.setattr(Ending, "is_in_hand", lambda ending: (looked_at.append(ending), is_in_hand(ending))[1])
    futures.append(calls.start().get_future())
    assert {ending.turn for ending in looked_at} <= {11}


@pytest.mark.parametrize("ask", [GradwireWork.get_future, GradwireWork.wait], ids=["future", "wait"])
def test_a_signal_handler_gets_no_result_of_the_very_call_that_its_thread_delivers(calls: Calls, ask: Any) -> None:
    in_hand = calls.start()
    told: list[Any] = []

    def ask_for_itself() -> None:
        told.append((in_hand.is_success(), type(in_hand.exception())))
        with pytest.raises(RuntimeError, match=r"WaitTimeoutError: .* comes when who asks returns"):
            in_hand.get_future().value()

    calls.ops[0].resolve(None, None)
    calls.steps[0] = lambda: None if told else signal.raise_signal(signal.SIGUSR1)
    with _handled_by(ask_for_itself):
        ask(in_hand)
    assert (told, calls.delivered) == ([(False, WaitTimeoutError)], [0])
    assert in_hand.get_future().value() == []


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
