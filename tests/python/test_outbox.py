"""Calls that wait for their memory: in which order they are submitted, by whom they fail, and what interrupts them. No engine."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire import _outbox
from gradwire._outbox import SUBMITS, WATCHES, LaterOp, Outbox
from gradwire.errors import DeadlineError, ShutDownError
from interrupts import LIMIT_S, at_each_step

LONG_S = 1000.0
OVERDUE = DeadlineError("not copied from the device")


class Calls:
    """Those of one outbox, which are submitted under the names that a test gives them."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.submitted: list[str] = []
        self.meanwhile: Callable[[], None] = lambda: None

    def put(self, name: str, group: str = "a", *, timeout_s: float = LONG_S, arrive: Any = lambda: None) -> LaterOp:
        submit = partial(self._submit, name)
        return self.outbox.put(group, arrive, submit, timeout_s=timeout_s, overdue=lambda: OVERDUE)

    def _submit(self, name: str, failed: Exception | None) -> Any:
        self.meanwhile()
        if failed is not None:
            raise failed
        self.submitted.append(name)
        return SimpleNamespace(wait=lambda _timeout_s: True, is_done=lambda: True, error=lambda: None)


@pytest.fixture
def calls() -> Iterator[Calls]:
    made = Calls()
    yield made
    made.outbox.stop(LIMIT_S)


def test_calls_are_submitted_in_their_order_and_a_group_waits_until_its_own_are(calls: Calls) -> None:
    there = threading.Event()
    first = calls.put("first", arrive=lambda: there.wait(LIMIT_S))
    others = [calls.put(f"{number}", "ab"[number % 2]) for number in range(20)]
    assert not first.wait(0.0)
    assert [calls.outbox.is_waiting(group) for group in "abc"] == [True, True, False]
    there.set()
    assert all(op.wait(LIMIT_S) for op in [first, *others])
    assert calls.submitted == ["first", *map(str, range(20))]
    assert not calls.outbox.is_waiting("a")


def test_a_group_waits_while_its_last_call_is_being_submitted(calls: Calls) -> None:
    seen: list[bool] = []
    calls.meanwhile = lambda: seen.append(calls.outbox.is_waiting("a"))
    assert calls.put("the only one").wait(LIMIT_S)
    assert (seen, calls.outbox.is_waiting("a")) == ([True], False)


def test_a_call_whose_memory_could_not_be_copied_fails_and_the_next_one_does_not(calls: Calls) -> None:
    failed, good = calls.put("failed", arrive=lambda: 1 // 0), calls.put("good")
    assert failed.wait(LIMIT_S)
    assert good.wait(LIMIT_S)
    assert (type(failed.error()), good.error(), calls.submitted) == (ZeroDivisionError, None, ["good"])


def test_a_group_whose_call_is_overdue_ends_and_the_others_do_not(calls: Calls) -> None:
    there = threading.Event()
    other = calls.put("other", "b", arrive=lambda: there.wait(LIMIT_S))
    late = [calls.put("before it"), calls.put("late", timeout_s=0.05)]
    assert all(op.wait(LIMIT_S) for op in late)
    assert [op.error() for op in late] == [OVERDUE, OVERDUE]
    assert [calls.outbox.is_waiting(group) for group in "ab"] == [False, True]
    there.set()
    assert other.wait(LIMIT_S)
    assert calls.submitted == ["other"]


def test_calls_that_are_dropped_while_others_are_put_and_submitted_end_once(calls: Calls) -> None:
    resolved: queue.SimpleQueue[str] = queue.SimpleQueue()

    def put(prefix: str) -> None:
        for number in range(200):
            name = f"{prefix}{number}"
            calls.put(name, arrive=lambda: time.sleep(0)).when_known(lambda _op, name=name: resolved.put(name))

    threads = [threading.Thread(target=put, args=(prefix,)) for prefix in "xyz"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        calls.outbox.drop("a", ShutDownError("dropped"))
    for thread in threads:
        thread.join()
    last = calls.put("last")
    assert last.wait(LIMIT_S)
    names = sorted(resolved.get(timeout=LIMIT_S) for _ in range(600))
    assert names == sorted(f"{prefix}{number}" for prefix in "xyz" for number in range(200))
    assert resolved.empty()
    for prefix in "xyz":
        numbers = [int(name[1:]) for name in calls.submitted if name[0] == prefix]
        assert numbers == sorted(numbers)


def test_an_outbox_that_has_stopped_fails_what_it_has_and_what_comes(calls: Calls) -> None:
    there = threading.Event()
    held, behind = calls.put("held", arrive=lambda: there.wait(LIMIT_S)), calls.put("behind")
    calls.outbox.stop(0.0)
    there.set()
    calls.outbox.stop(LIMIT_S)
    after = calls.put("after")
    assert [type(op.error()) for op in (held, behind, after)] == [ShutDownError] * 3
    assert not any(thread.is_alive() for name, thread in calls.outbox._threads.items() if name == SUBMITS)


def test_who_interrupts_a_call_at_any_step_may_make_one_and_wait_for_it() -> None:
    """The first one of its process, too."""
    made: list[Calls] = [Calls()]

    def put() -> None:
        for name in ("first", "second"):
            assert made[-1].put(name).wait(LIMIT_S)

    def interrupt() -> None:
        assert made[-1].put("interrupts").wait(LIMIT_S)

    for _ in at_each_step(put, interrupt, (_outbox,)):
        calls = made.pop()
        assert sorted(calls.submitted) == ["first", "interrupts", "second"]
        assert set(calls.outbox._threads) == {SUBMITS, WATCHES}
        calls.outbox.stop(LIMIT_S)
        made.append(Calls())
    made.pop().outbox.stop(LIMIT_S)


def _resolve_meanwhile(op: LaterOp) -> None:
    """A signal handler may wait for what the outbox's thread does next."""
    resolver = threading.Thread(target=op.resolve, args=(None,), daemon=True)
    resolver.start()
    resolver.join(LIMIT_S)
    assert not resolver.is_alive()


@pytest.mark.parametrize("asks", [lambda op: op.wait(0.0), lambda op: op.when_known(id)], ids=["wait", "when known"])
def test_a_call_becomes_known_at_whatever_step_who_asks_for_it_is_interrupted(asks: Any) -> None:
    ops = [LaterOp()]
    for _ in at_each_step(lambda: asks(ops[-1]), lambda: _resolve_meanwhile(ops[-1]), (_outbox, threading)):
        assert ops[-1].is_done()
        assert not ops[-1]._callbacks
        ops.append(LaterOp())


def test_a_wait_that_is_given_up_leaves_nothing_behind() -> None:
    op = LaterOp()
    for _ in range(3):
        assert not op.wait(0.0)
    assert not op._callbacks
    op.resolve(None)
    assert op.wait(0.0)
