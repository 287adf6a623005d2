"""Whom the error of a monitored barrier names, by how its messages end: without a group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from gradwire.errors import AbortedError, DeadlineError, GradwireError, PeerLostError
from gradwire.torch._monitored import MonitoredBarrier


class _Ends:
    """A message whose wait ends so."""

    def __init__(self, error: GradwireError | None) -> None:
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error


def _at_rank_0(*errors: GradwireError | None) -> None:
    """A barrier of which the messages of ranks 1, 2 and so on end so."""
    barrier = MonitoredBarrier(0, len(errors) + 1, 0, timedelta(seconds=60), wait_all=True)

    def receive(other: int, _tag: int, _left: timedelta) -> Any:
        return _Ends(errors[other - 1])

    barrier.run(receive, receive)


def _aborted(cause: str) -> AbortedError:
    return AbortedError(f"rank 2 aborted the group: {cause}", rank=2, host="b", cause=cause)


def test_who_comes_too_late_is_named_whoever_gives_up_first() -> None:
    late = DeadlineError("timed out", during="receive", waited_s=60.0)
    with pytest.raises(DeadlineError, match="Ranks 1, 3 failed to pass"):
        _at_rank_0(late, None, _aborted("receive #3 timed out there after 60s"))


def test_a_group_that_another_rank_ended_for_a_reason_of_its_own_accuses_nobody_of_being_late() -> None:
    with pytest.raises(AbortedError, match="no memory"):
        _at_rank_0(_aborted("no memory there"), None)


def test_a_loss_of_which_nobody_is_known_names_none() -> None:
    lost = PeerLostError("the members change", rank=None, host="", silent_s=0.0)
    with pytest.raises(PeerLostError, match="A rank failed to pass"):
        _at_rank_0(lost, None)


def _meet(members: list[int] | GradwireError) -> None:
    """A barrier of four ranks, on rank 1, where a group goes on without lost ranks."""
    barrier = MonitoredBarrier(1, 4, 0, timedelta(seconds=60), wait_all=False)

    def meet(_left: timedelta) -> list[int]:
        if isinstance(members, GradwireError):
            raise members
        return members

    barrier.meet(meet)


def test_in_a_group_that_goes_on_every_rank_names_who_is_gone() -> None:
    _meet([0, 1, 2, 3])
    with pytest.raises(PeerLostError, match=r"\[Rank 1\]: Ranks 2, 3 failed to pass.*members are 0, 1") as caught:
        _meet([0, 1])
    assert caught.value.rank == 2


def test_in_a_group_that_goes_on_who_comes_too_late_is_what_the_group_says() -> None:
    late = DeadlineError("timed out: rank 2 has not called", during="barrier", waited_s=60.0)
    with pytest.raises(DeadlineError, match=r"not all ranks passed monitoredBarrier.*rank 2 has not called") as caught:
        _meet(late)
    assert caught.value.during == "monitored_barrier"
