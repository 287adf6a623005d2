"""Results that nobody asked for: in which order they come, and what becomes of errors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire._outbox import LaterOp
from gradwire.errors import MismatchError
from gradwire.torch._deliveries import Deliveries
from gradwire.torch._ending import Ending


class Calls:
    """Calls under way, each of which notes that its result has been delivered."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.ops: list[LaterOp] = []
        self.endings: list[Ending] = []
        self._callbacks: list[Callable[[], object]] = []
        self._completer: Any = SimpleNamespace(last_error=None, watch=lambda _, back: self._callbacks.append(back))
        self.deliveries = Deliveries(self._completer)

    def start(self, count: int) -> None:
        for at in range(count):
            op = LaterOp()
            ending = Ending([op], self._completer, last=lambda at=at: self.delivered.append(at))
            self.ops.append(op)
            self.endings.append(ending)
            self.deliveries.expect([op], ending)

    def end(self, at: int, error: Exception | None = None) -> None:
        self.ops[at].resolve(None, error)
        self._callbacks[at]()


def test_results_come_in_the_order_of_the_calls_whichever_ends_first() -> None:
    calls = Calls()
    calls.start(4)
    calls.end(2)
    calls.end(1)
    assert calls.delivered == []
    calls.end(0)
    assert calls.delivered == [0, 1, 2]
    calls.end(3)
    assert calls.delivered == [0, 1, 2, 3]


def test_a_result_that_was_asked_for_is_not_delivered_again() -> None:
    calls = Calls()
    calls.start(2)
    calls.ops[1].resolve(None)
    calls.endings[1].settle()
    calls.end(0)
    calls.deliveries.bring()
    assert calls.delivered == [1, 0]


def test_an_error_is_for_who_waits_for_that_call_and_the_results_behind_it_come() -> None:
    calls = Calls()
    calls.start(3)
    error = MismatchError("rank 0 called barrier, rank 1 all_reduce")
    calls.end(0, error)
    calls.endings[1].explain = lambda _: 1 // 0  # type: ignore[return-value]
    calls.end(1, error)
    calls.end(2)
    assert calls.delivered == [2]
    assert calls.endings[0].settle() is error
    with pytest.raises(ZeroDivisionError):
        calls.endings[1].settle()


def test_an_interrupted_delivery_is_made_by_the_next_who_comes() -> None:
    calls, interrupts = Calls(), [KeyboardInterrupt()]
    calls.start(1)

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    calls.endings[0].on_seen = interrupted
    with pytest.raises(KeyboardInterrupt):
        calls.end(0)
    calls.deliveries.bring()
    calls.deliveries.bring()
    assert calls.delivered == [0]
    assert calls.endings[0].on_seen is interrupted
    assert not interrupts
