"""How long a call is waited for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import timedelta

import pytest
from gradwire import _native
from gradwire._operation import Operation
from gradwire.errors import WaitTimeoutError
from pair import pair, receive, send


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
        with pytest.raises(WaitTimeoutError):
            operation.wait(timeout)
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
