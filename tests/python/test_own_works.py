"""The Work of a call is handed over to the Python caller that asks for it, and kept for nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gradwire.torch import _own_works


def test_a_work_that_nobody_asks_for_is_not_kept() -> None:
    work: Any = object()
    _own_works.remember(work)
    assert _own_works._latest.work is None


def test_a_call_returns_the_work_made_in_it_and_keeps_none() -> None:
    work: Any = SimpleNamespace(is_barrier=False)
    inner: Any = SimpleNamespace(is_barrier=False)

    def method(own: Any) -> object:
        _own_works._unwrapped(lambda: _own_works.remember(inner))()
        _own_works.remember(own)
        return object()

    assert _own_works._unwrapped(method)(work) is work
    assert _own_works._latest.work is None


def test_a_call_within_another_one_leaves_the_work_that_this_has_made() -> None:
    work: Any = SimpleNamespace(is_barrier=False)
    inner: Any = SimpleNamespace(is_barrier=False)

    def method(own: Any) -> object:
        _own_works.remember(own)
        assert (
            _own_works._unwrapped(lambda: _own_works.remember(inner) or object())() is inner
        )  # as a signal handler does
        return object()

    assert _own_works._unwrapped(method)(work) is work
    assert _own_works._latest.work is None


def test_a_call_that_fails_keeps_no_work() -> None:
    def method() -> None:
        work: Any = object()
        _own_works.remember(work)
        raise ValueError("it fails")

    with pytest.raises(ValueError, match="it fails"):
        _own_works._unwrapped(method)()
    assert _own_works._latest.work is None
    assert not _own_works._latest.is_asked
