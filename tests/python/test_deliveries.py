"""Results that nobody waited for: in which order they come and by whom, and what becomes of errors, interrupts and handlers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire._outbox import LaterOp
from gradwire.errors import DeadlineError, MismatchError, WaitTimeoutError
from gradwire.torch._backend import _Lifetime
from gradwire.torch._deliveries import ALL, BARE_MOST
from gradwire.torch._early import _Arrival
from gradwire.torch._ending import Ending
from gradwire.torch._ops import Collectives
from gradwire.torch._pinned import Fence
from gradwire.torch._work import GradwireWork
from group_calls import A_MOMENT, ERROR, PATIENCE_S, Calls


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_who_waits_for_the_last_call_brings_the_results_of_those_before_in_their_order(calls: Calls) -> None:
    last = [calls.start() for _ in range(4)][-1]
    calls.end(2, 0, 3, 1)
    assert calls.delivered == []
    last.wait()
    assert calls.delivered == [0, 1, 2, 3]
    for work in calls.works:
        work.wait()
    assert calls.delivered == [0, 1, 2, 3]


def test_it_brings_none_of_those_behind_it(calls: Calls) -> None:
    first, _ = calls.start(), calls.start()
    calls.end(0, 1)
    first.wait()
    assert calls.delivered == [0]


def test_who_makes_a_call_first_brings_what_has_ended_and_waits_for_nothing(calls: Calls) -> None:
    calls.start()
    calls.start()
    calls.end(0)
    calls.deliveries.bring()
    assert calls.delivered == [0]
    calls.start()
    calls.end(1)
    calls.start(is_waited_for=True)
    assert calls.delivered == [0, 1]


def test_a_call_that_is_under_way_is_given_no_results_of_those_before_it(calls: Calls) -> None:
    calls.start()
    calls.deliveries.bring()
    calls.ops[0].resolve(None, None)  # while the next one is submitted
    ending = Ending([LaterOp()], calls._completer)
    calls.deliveries.admit(ending, is_waited_for=False)
    assert calls.delivered == []


def _asked(work: GradwireWork) -> list[Any]:
    """What whoever polls is told of a call."""
    told: list[Any] = [work.is_completed(), work.is_success(), work.exception()]
    try:
        told.append(work.report().collective)
    except WaitTimeoutError:
        told.append(None)
    return told


@pytest.mark.parametrize("name", ["all_gather", "barrier"])
def test_a_call_has_ended_when_those_before_it_have(calls: Calls, name: str) -> None:
    calls.start()
    last = calls.start(name)
    calls.end(1)
    with pytest.raises(WaitTimeoutError, match=f"before this {name} is still in flight"):
        last.wait(A_MOMENT)
    assert _asked(last) == [False, False, None, None]
    assert calls.delivered == []
    calls.end(0)
    assert _asked(last) == [True, True, None, name]
    assert calls.delivered == [0, 1]


def test_a_future_completes_behind_the_results_of_the_calls_before_it(calls: Calls) -> None:
    works = [calls.start() for _ in range(3)]
    future = works[-1].get_future()
    calls.end(2)
    calls.end(1)
    assert (future.done(), calls.delivered) == (False, [])
    calls.end(0)
    assert (future.done(), calls.delivered) == (True, [0, 1, 2])


def test_a_barrier_waits_for_what_the_engine_writes_itself_and_other_calls_do_not(calls: Calls) -> None:
    calls.start(buffered=False)
    other, barrier = calls.start(is_waited_for=True), calls.start("barrier", buffered=False, is_waited_for=True)
    calls.end(1, 2)
    other.wait()
    with pytest.raises(WaitTimeoutError):
        barrier.wait(A_MOMENT)
    calls.end(0)
    barrier.wait()


def _monitored_barrier(calls: Calls, timeout: timedelta, meanwhile: Callable[[], object]) -> None:
    """Rank 0's, at which rank 1 comes at once; other threads do something `meanwhile`."""

    def signal_of(*_: object) -> Any:
        meanwhile()
        return SimpleNamespace(wait=lambda: None)

    rank_0 = Collectives()
    owner: Any = SimpleNamespace(check_process=lambda: None, config=SimpleNamespace(on_peer_loss="raise"))
    rank_0.link = SimpleNamespace(  # type: ignore[assignment]
        owner=owner, rank=0, world_size=2, monitored_barriers=0, timeout=timeout, deliveries=calls.deliveries, start=signal_of
    )  # fmt: skip
    rank_0.monitored_barrier()


def test_a_monitored_barrier_waits_for_the_calls_before_it_alone_and_says_when_they_do_not_end(calls: Calls) -> None:
    calls.start()
    calls.end(0)
    _monitored_barrier(calls, timedelta(seconds=PATIENCE_S), lambda: calls.start(buffered=False))
    assert calls.delivered == [0]
    with pytest.raises(DeadlineError, match="made before it is still in flight"):
        _monitored_barrier(calls, A_MOMENT, lambda: None)


def _arrives_later(work: GradwireWork, joined: list[str]) -> Any:
    """The result of this call is still on its way to a device when the call has ended."""
    fence: Any = SimpleNamespace(device="gpu", passed=lambda: False, join=lambda: joined.append("behind it"))
    work.ending.on_seen = lambda: work.ending.fences.append(fence)
    return fence


class Streams:
    """One device's, which notes what its caller waits for."""

    def __init__(self) -> None:
        self.waited_for: list[str] = []
        self.has_failed = False

    def current(self, _: Any) -> str:
        return "caller"

    def side(self, _: Any, direction: str) -> str:
        return direction

    def record(self, stream: str) -> str:
        return f"the end of {stream}"

    def wait(self, _: str, event: str) -> None:
        self.waited_for.append(event)

    def passed(self, _: str) -> bool:
        if self.has_failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return False


def test_of_many_results_that_are_on_their_way_to_a_device_one_event_is_waited_for(calls: Calls) -> None:
    streams: Any = Streams()
    works = [calls.start() for _ in range(100)]
    for at, work in enumerate(works):
        fences = [Fence(streams, torch.device("cuda:0"), f"piece {piece} of {at}") for piece in range(4)]
        work.ending.on_seen = partial(work.ending.fences.extend, fences)
    calls.end(*range(100))
    for work in works:
        work.wait()
    own = 4 * len(works)
    assert len(streams.waited_for) == own + len(works) - 1
    assert streams.waited_for.count("the end of back") == len(works) - 1
    assert works[-1].is_completed() is False
    streams.has_failed = True
    assert calls.start(is_waited_for=True).deliveries is None, "a failed device is told of by who asks it for something"


def test_a_wait_that_raises_leaves_the_streams_behind_what_it_has_brought(calls: Calls) -> None:
    joined: list[str] = []
    brought, failed, pending = (calls.start() for _ in range(3))
    _arrives_later(brought, joined)
    calls.end(0)
    calls.end(1, error=ERROR)
    with pytest.raises(MismatchError):
        failed.wait()
    assert joined == ["behind it"]
    with pytest.raises(WaitTimeoutError):
        pending.wait(A_MOMENT)
    assert joined == ["behind it"] * 2


def test_only_results_that_have_not_arrived_and_come_before_a_call_are_waited_for(calls: Calls) -> None:
    joined: list[str] = []
    first, last = calls.start(), calls.start()
    fence = _arrives_later(last, joined)
    calls.end(0, 1)
    calls.deliveries.bring()
    first.wait()
    assert (first.is_completed(), joined) == (True, [])
    fence.passed = lambda: True
    assert calls.start(is_waited_for=True).deliveries is None


def test_an_interrupt_of_its_last_wait_does_not_keep_a_rank_from_saying_goodbye() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    said: list[str] = []
    adapter = _Lifetime()
    owner = SimpleNamespace(aborted=set(), backends={})
    adapter.link = SimpleNamespace(finish=interrupted, leave=lambda: said.append("goodbye"), owner=owner)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        adapter.shutdown()
    assert said == ["goodbye"]


def test_where_nothing_is_under_way_a_call_that_is_waited_for_does_not_ask(calls: Calls) -> None:
    assert calls.start(is_waited_for=True).deliveries is None
    assert calls.start("barrier", buffered=False, is_waited_for=True).deliveries is None


def test_an_error_is_told_at_once_though_calls_before_are_in_flight(calls: Calls) -> None:
    calls.start()
    failed = calls.start()
    future = failed.get_future()
    calls.end(1, error=ERROR)
    with pytest.raises(MismatchError):
        failed.wait()
    assert (failed.is_completed(), failed.exception(), future.done()) == (True, ERROR, True)
    assert calls.delivered == []


@pytest.mark.parametrize(("errors", "has_failed"), [([ERROR, ERROR], True), ([ERROR, None], False)])
def test_a_call_of_several_that_still_has_a_result_to_bring_keeps_its_place(
    calls: Calls, errors: list[Exception | None], has_failed: bool
) -> None:
    calls.start()
    work = GradwireWork.joined([calls.start(), calls.start()], calls._completer)
    for at, error in enumerate(errors, 1):
        assert not work.ending.has_failed()
        calls.end(at, error=error)
    assert work.ending.has_failed() == has_failed


def test_a_call_whose_future_has_been_asked_for_is_brought_by_it_and_only_barriers_wait_for_it(calls: Calls) -> None:
    future = calls.start().get_future()
    last = calls.start()
    calls.end(1)
    last.wait()
    assert calls.delivered == [1]
    barrier = calls.start("barrier", buffered=False, is_waited_for=True)
    calls.end(2)
    with pytest.raises(WaitTimeoutError):
        barrier.wait(A_MOMENT)
    calls.ops[0].resolve(None, None)  # before the completer has been told
    barrier.wait()
    assert (calls.delivered, future.done()) == ([1, 0], False)
    calls.end()
    assert (calls.delivered, future.done()) == ([1, 0], True)
    assert not calls.deliveries._kept
    calls.start().get_future()
    calls.end(3)
    assert (calls.delivered, calls.deliveries._kept) == ([1, 0, 3], {})


def test_a_bucket_that_a_layer_steps_with_is_waited_for_by_barriers_alone(calls: Calls) -> None:
    _Arrival(calls.start(), lambda _: None)
    other, barrier = calls.start(), calls.start("barrier", buffered=False)
    calls.end(1, 2)
    other.wait()
    assert (calls.delivered, barrier.is_completed()) == ([1], False)
    calls.end(0)
    assert barrier.is_completed()
    assert calls.delivered == [1, 0]


def test_a_barrier_among_calls_as_one_makes_them_wait_as_one_does(calls: Calls) -> None:
    calls.start(buffered=False)
    parts = [calls.start(buffered=False), calls.start("barrier", buffered=False)]
    work = GradwireWork.joined(parts, calls._completer)
    assert calls.deliveries.admit(work.ending, is_waited_for=True, is_barrier=work.is_barrier)
    work.deliveries = calls.deliveries
    calls.end(1, 2)
    assert not work.is_completed()
    calls.end(0)
    assert work.is_completed()


def test_a_layer_that_steps_early_does_not_wait_for_the_buckets_called_before(calls: Calls) -> None:
    calls.start()
    front = calls.start()
    calls.end(1)
    ended: list[GradwireWork] = []
    _Arrival(front, ended.append).wait()
    assert (calls.delivered, ended) == ([1], [front])
    calls.end(0)
    calls.start("barrier", buffered=False, is_waited_for=True)
    calls.end(2)
    calls.works[-1].wait()
    assert calls.delivered == [1, 0]


def test_calls_that_nobody_waits_for_do_not_pile_up(calls: Calls) -> None:
    for at in range(40):
        calls.start(buffered=at % 2 == 0)
        calls.end(at)
    assert len(calls.deliveries._owed) <= 1
    assert len(calls.deliveries._bare) <= BARE_MOST
    assert calls.delivered == list(range(0, 40, 2))


def test_who_comes_while_another_thread_delivers_returns_behind_it(calls: Calls) -> None:
    first, last = calls.start(), calls.start()
    calls.end(0, 1)
    begun, may_end = threading.Event(), threading.Event()

    seen: list[int] = []
    first.ending.on_seen = lambda: seen.append(0)

    def hold() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    calls.steps[0] = hold
    other = threading.Thread(target=first.wait)
    other.start()
    assert begun.wait(PATIENCE_S)
    has_come = first.ending.has_come

    def asked() -> bool:
        may_end.set()  # this thread is in the midst of it
        return has_come()

    first.ending.has_come = asked  # type: ignore[method-assign]
    last.wait()
    assert calls.delivered == [0, 1]
    other.join()
    assert seen == [0]


def test_many_threads_deliver_each_result_once_and_in_order(calls: Calls) -> None:
    for _ in range(200):
        calls.start()
    calls.end(*range(200))
    calls.steps.update(dict.fromkeys(range(200), lambda: time.sleep(0)))  # others may have the interpreter
    seen: list[bool] = []

    def wait_for(numbers: range) -> None:
        for at in numbers:
            calls.works[at].wait()
            seen.append(calls.delivered[: at + 1] == list(range(at + 1)))

    threads = [threading.Thread(target=wait_for, args=[range(begin, 200, 7)]) for begin in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.deliveries.wait(ALL, None)
    assert all(seen)
    assert calls.delivered == list(range(200))
