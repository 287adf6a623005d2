"""Calls that failed and were dropped: who is told of it, and by which barrier."""

from __future__ import annotations

import traceback
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire.errors import InvalidRequestError, MismatchError, PeerLostError, WaitTimeoutError
from gradwire.torch import _deliveries
from gradwire.torch._deliveries import FAILED_MOST
from gradwire.torch._early import _Arrival
from gradwire.torch._group import GroupLink
from gradwire.torch._work import GradwireWork
from group_calls import A_MOMENT, ERROR, Calls

NOT_MADE = InvalidRequestError("BAND of floats")


@pytest.fixture
def calls() -> Calls:
    return Calls()


def test_a_failure_is_for_who_waits_for_that_call(calls: Calls) -> None:
    def explain(_: Exception) -> Exception:
        raise RuntimeError("the explanation")

    failed, odd, last = (calls.start() for _ in range(3))
    odd.ending.explain = explain
    calls.end(0, 1, error=ERROR)
    calls.end(2)
    last.wait()
    assert calls.delivered == [2]
    for _ in range(2):
        with pytest.raises(MismatchError):
            failed.wait()
        with pytest.raises(RuntimeError, match="the explanation"):
            odd.wait()
    assert failed.exception() is ERROR


class Barriers:
    """Those of one group, and what they tell of calls before them."""

    def __init__(self, calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
        self._calls = calls
        self._caplog = caplog

    def told(self) -> list[str]:
        """By one more barrier."""
        self._caplog.clear()
        self._calls.start("barrier", buffered=False, is_waited_for=True)
        self._calls.end(len(self._calls.ops) - 1)
        self._calls.works[-1].wait()
        return [record.message for record in self._caplog.records if "nobody has waited for it" in record.message]


@pytest.fixture
def barriers(calls: Calls, caplog: pytest.LogCaptureFixture) -> Barriers:
    return Barriers(calls, caplog)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_barrier_that_passes_over_a_failure_says_so_once(calls: Calls, barriers: Barriers, *, buffered: bool) -> None:
    for _ in range(2):
        calls.start(buffered=buffered)
    calls.end(0, error=ERROR)
    calls.end(1, error=ValueError("the second"))
    (told,) = barriers.told()
    assert str(ERROR) in told
    assert barriers.told() == []
    known = calls.start(buffered=buffered)
    calls.end(4, error=ERROR)
    calls.deliveries.bring()
    assert known.exception() is ERROR
    assert barriers.told() == []


@pytest.mark.parametrize("buffered", [True, False])
def test_a_failure_is_told_by_the_first_barrier_behind_it_unless_its_caller_was_told(
    calls: Calls, barriers: Barriers, *, buffered: bool
) -> None:
    known = calls.start(buffered=buffered)
    calls.start(buffered=buffered)
    calls.end(0, error=ValueError("known"))
    calls.end(1, error=ERROR)
    calls.deliveries.bring()
    with pytest.raises(ValueError, match="known"):
        known.wait()
    (told,) = barriers.told()
    assert str(ERROR) in told
    barrier = calls.start("barrier", buffered=False)
    polled = calls.start(buffered=buffered)
    calls.end(3)
    calls.end(4, error=ERROR)
    assert polled.is_completed()
    assert barrier.exception() is None
    assert polled.ending.bare in calls.deliveries._failed or not buffered, "it was called behind that barrier"
    (told,) = barriers.told()
    assert str(ERROR) in told


def test_a_call_that_could_not_be_made_is_told_of_too(calls: Calls, barriers: Barriers) -> None:
    works = [GradwireWork("all_reduce", [], [], calls._completer, failure=NOT_MADE) for _ in range(2)]
    link = GroupLink.__new__(GroupLink)
    link.deliveries = calls.deliveries
    link.hand_out(works[0], is_waited_for=True)
    assert barriers.told() == []
    for work in works:
        link.hand_out(work, is_waited_for=False)
    with pytest.raises(InvalidRequestError):
        works[0].wait()
    assert len(barriers.told()) == 1
    link.hand_out(GradwireWork.joined([], calls._completer), is_waited_for=False)
    link.hand_out(works[0], is_waited_for=False)
    assert barriers.told() == []


@pytest.mark.parametrize("buffered", [True, False])
def test_no_barrier_tells_of_calls_whose_error_somebody_is_sure_to_get(
    calls: Calls, barriers: Barriers, *, buffered: bool
) -> None:
    calls.start(buffered=buffered).get_future()
    _Arrival(calls.start(buffered=buffered), lambda _: None)
    parts = [calls.start(buffered=buffered) for _ in range(2)]
    together = GradwireWork.joined(parts, calls._completer)
    calls.deliveries.admit(together.ending, is_waited_for=True)
    together.deliveries = calls.deliveries
    for op in calls.ops:  # before the completer has been told
        op.resolve(None, ERROR)
    with pytest.raises(MismatchError):
        together.wait()
    assert barriers.told() == []


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["at once", "later"])
@pytest.mark.parametrize("buffered", [True, False])
def test_who_is_told_by_one_call_that_its_group_has_failed_knows_it_of_the_others(
    calls: Calls, barriers: Barriers, *, buffered: bool, is_waited_for: bool
) -> None:
    for at in range(3):
        calls.start(buffered=buffered, is_waited_for=is_waited_for and at == 1)
    calls.end(0, 1, 2, error=ERROR)
    with pytest.raises(MismatchError):
        calls.works[1].wait()
    assert barriers.told() == []
    calls.start(buffered=buffered)
    calls.end(4, error=ERROR)
    assert len(barriers.told()) == 1


@pytest.mark.parametrize("ask", [GradwireWork.wait, lambda work: work.get_future().value()], ids=["wait", "future"])
@pytest.mark.parametrize("buffered", [True, False])
def test_what_fails_after_a_caller_was_told_that_the_group_has_failed_is_told_of(
    calls: Calls, barriers: Barriers, *, buffered: bool, ask: Any
) -> None:
    """The group may go on without who was lost."""
    for _ in range(2):
        calls.start(buffered=buffered)
    calls.end(0, 1, error=ERROR)
    with pytest.raises((MismatchError, RuntimeError), match="rank 0 called"):
        ask(calls.works[0])
    calls.start(buffered=buffered)
    calls.end(2, error=PeerLostError("rank 1 was lost", rank=1))
    (told,) = barriers.told()
    assert "rank 1 was lost" in told


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["at once", "later"])
@pytest.mark.parametrize("was_made", [True, False])
def test_who_is_told_that_the_group_has_failed_knows_it_of_all_calls_that_were_made_until_then(
    calls: Calls, barriers: Barriers, *, was_made: bool, is_waited_for: bool
) -> None:
    """Also where the failure of its call was seen before, by who made the others."""
    if was_made:
        told = calls.start(is_waited_for=is_waited_for)
        calls.end(0, error=ERROR)
        calls.deliveries.bring()
    else:
        told = GradwireWork("all_reduce", [], [], calls._completer, failure=ERROR)
        calls.deliveries.was_not_made(told.ending, is_waited_for=is_waited_for)
    for buffered in (True, False):
        calls.start(buffered=buffered)
        calls.end(len(calls.ops) - 1, error=ERROR)
    calls.deliveries.bring()
    with pytest.raises(MismatchError):
        told.wait()
    assert barriers.told() == []


@pytest.mark.parametrize("buffered", [True, False])
def test_no_barrier_tells_of_a_call_whose_wait_was_given_up(
    calls: Calls, barriers: Barriers, *, buffered: bool
) -> None:
    with pytest.raises(WaitTimeoutError):
        calls.start(buffered=buffered).wait(A_MOMENT)
    calls.end(0, error=ERROR)
    assert barriers.told() == []


@pytest.mark.parametrize("buffered", [True, False])
def test_a_call_of_which_a_part_could_not_be_made_is_told_of_too(
    calls: Calls, barriers: Barriers, *, buffered: bool
) -> None:
    refused = GradwireWork("all_reduce", [], [], calls._completer, failure=NOT_MADE)
    whole = GradwireWork.joined([calls.start(buffered=buffered, is_waited_for=True), refused], calls._completer)
    calls.deliveries.admit(whole.ending, is_waited_for=False)
    calls.end(0)
    (told,) = barriers.told()
    assert str(NOT_MADE) in told


def test_no_barrier_tells_of_a_call_whose_caller_is_told_while_it_is_noted(
    calls: Calls, barriers: Barriers, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, bare = calls.start(), _deliveries.Bare

    def told_meanwhile(*noted: Any) -> Any:
        failed.ending.tell()
        return bare(*noted)

    monkeypatch.setattr(_deliveries, "Bare", told_meanwhile)
    calls.end(0, error=NOT_MADE)
    calls.deliveries.bring()
    assert barriers.told() == []


@pytest.mark.parametrize("cause", [None, OSError("what it comes from"), LookupError("before it")], ids=repr)
@pytest.mark.parametrize("was_made", [True, False])
def test_a_failed_call_holds_nothing_of_the_step_that_its_error_was_raised_in(
    calls: Calls, cause: Exception | None, *, was_made: bool
) -> None:
    def raise_in_a_step(batch: torch.Tensor) -> None:
        alive.append(weakref.ref(batch))
        try:
            raise LookupError("before it")
        except LookupError as error:
            if isinstance(cause, LookupError):
                raise RuntimeError("raised") from error
            if cause is not None:
                raise RuntimeError("raised") from cause
            raise RuntimeError("raised")  # noqa: B904  the first one is its context

    alive: list[weakref.ref[torch.Tensor]] = []
    if was_made:
        work = calls.start()
        calls.steps[0] = lambda: raise_in_a_step(torch.zeros(1))
        calls.end(0)
        calls.deliveries.bring()
    else:
        link: Any = GroupLink.__new__(GroupLink)
        link.owner = SimpleNamespace(check_process=lambda: None, completer=calls._completer)
        work = link._start("send", None, lambda: raise_in_a_step(torch.zeros(1)))
        calls.deliveries.was_not_made(work.ending, is_waited_for=False)
    assert [tensor() for tensor in alive] == [None]
    assert str(work.exception()) == "raised"


def test_what_the_caller_handles_keeps_its_frames_and_its_causes(calls: Calls) -> None:
    """A call that fails in an `except` of the user's."""

    def fail() -> None:
        raise RuntimeError("of the copy")

    work = calls.start()
    calls.steps[0] = fail
    calls.end(0)
    try:
        try:
            raise LookupError("the first")
        except LookupError:
            raise KeyError("the user's") from None
    except KeyError as handled:
        before = traceback.format_exception(handled)
        with pytest.raises(RuntimeError, match="of the copy"):
            work.wait()
        after, context = traceback.format_exception(handled), handled.__context__
    assert after == before
    assert isinstance(context, LookupError)


def test_of_failures_that_nobody_hears_of_the_first_ones_are_kept_and_none_of_their_tensors(
    calls: Calls, barriers: Barriers
) -> None:
    for at in range(10 * FAILED_MOST):
        work, tensor = calls.start(buffered=at % 2 == 0), torch.zeros(1)
        work.ending.explain = partial(lambda _, error: error, tensor)
        alive = weakref.ref(tensor)
        calls.end(at, error=ValueError(f"number {at}"))
    del tensor, work
    calls.works.clear()
    calls.deliveries.bring()
    assert alive() is None
    assert len(calls.deliveries._failed) == FAILED_MOST
    (told,) = barriers.told()
    assert told.endswith("number 0")
