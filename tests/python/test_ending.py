"""What a call ends with: of one in parts the cause, whichever part it hit and whatever the others then saw; and who hears of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gradwire._outbox import LaterOp
from gradwire.errors import AbortedError, DeadlineError, GradwireError, MismatchError, PeerLostError
from gradwire.torch._ending import Ending
from gradwire.torch._work import GradwireWork

COPY = RuntimeError("an illegal memory access was encountered")
FOLLOWS = MismatchError("rank 0 called barrier, rank 1 all_reduce")
OVERDUE = DeadlineError("not copied from the device")
ABORTED = AbortedError("the group was aborted")
LOST, LOST_LATER = PeerLostError("rank 1 was lost"), PeerLostError("rank 1 was lost before")


@pytest.mark.parametrize(
    ("errors", "cause"),
    [
        ([FOLLOWS, COPY, FOLLOWS], COPY),
        ([None, COPY, FOLLOWS], COPY),
        ([ABORTED, OVERDUE, OVERDUE], OVERDUE),
        ([ABORTED, ABORTED], ABORTED),
        ([None, LOST, LOST_LATER], LOST),
        ([None, None], None),
    ],
)
def test_a_call_in_parts_fails_with_what_the_other_errors_follow_from(
    errors: list[Exception | None], cause: Exception | None
) -> None:
    completer: Any = SimpleNamespace(last_error=None, is_current_thread=lambda: False)
    ended = [LaterOp() for _ in errors]
    for op, error in zip(ended, errors, strict=True):
        op.resolve(None, error)
    whole = Ending(ended, completer, parts=[Ending([op], completer) for op in ended])
    assert whole.wait_until(None)
    assert whole.settle() is cause
    assert repr(completer.last_error) == repr(cause)


class Unlike(Exception):
    """Cannot be made of what it says."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} is not {second}")


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (PeerLostError("rank 1 was lost", rank=1), PeerLostError("rank 1 was lost", rank=1)),
        (ValueError("no class"), ValueError("no class")),
        (Unlike(1, 2), GradwireError("Unlike: 1 is not 2")),
    ],
)
def test_the_last_error_says_what_happened_and_holds_nothing_of_where(failure: Exception, told: Exception) -> None:
    def fail() -> None:
        try:
            raise KeyError("first")
        except KeyError as cause:
            raise failure from cause

    completer: Any = SimpleNamespace(last_error=None, is_current_thread=lambda: False)
    with pytest.raises(type(failure)):
        fail()
    ended = Ending([], completer, failure=failure)
    assert ended.settle() is failure
    last = completer.last_error
    assert (type(last), str(last), getattr(last, "fields", {})) == (type(told), str(told), getattr(told, "fields", {}))
    assert (last.__traceback__, last.__cause__, last.__context__) == (None, None, None)


def test_a_future_whose_wait_was_interrupted_is_made_anew_and_completed() -> None:
    class Interrupted(LaterOp):
        def wait(self, timeout_s: float | None = None) -> bool:
            if not self.is_done():
                self.resolve(None, MismatchError("first"))
                raise KeyboardInterrupt
            return super().wait(timeout_s)

    completer: Any = SimpleNamespace(
        last_error=None, sync_futures=True, is_current_thread=lambda: False, watch=lambda _ops, callback: callback()
    )
    work = GradwireWork("all_reduce", [Interrupted()], [], completer)
    with pytest.raises(KeyboardInterrupt):
        work.get_future()
    assert work.get_future().done()
    assert work.get_future() is work.get_future()
